"""Records of a run, written while it runs and shown afterwards (docs/inspecting.md).

ledger_file    a line for each step and rank
meter          counts for it
computing      which unit computes
memory_now     bytes by kind, asked for while steps run
trace_file     what all ranks do in a few steps, as a file for Perfetto
moments        spans and samples of one rank
clock          how far its clock is ahead of rank 0's
chrome         spans and samples in Chrome's trace format
record_file    fingerprints of each step, for ``fsdp2 diff``
step_lines     what the two share: a line for each step, until it is stopped
fingerprint    a checksum and a sketch of a tensor, which sum up over its shards
difference     where two recorded runs first differ
diff_command   the command
report/        ledger and trace as an HTML page
run_folder     what lies where in a run's folder
"""
