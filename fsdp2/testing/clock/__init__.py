"""A step on a clock: a model of how long a training step takes on accelerators that are not at hand. For benchmarks and tests alone.

    device      a device type that computes nothing and logs what it is given; ours and torch's FSDP2 both train on it
    trace       that log, as plain values
    cards       what hardware can do, with sources
    costs       what one entry of a trace costs on a card
    caching     which memory a trace's allocations reserve
    timeline    when each entry begins and ends, in virtual time
    report      what a step consists of: computing, exposed communication, idle gaps

Only ``device`` knows programs, and only it needs a C++ compiler. The others are arithmetic, and one trace can be run with several
cards.

Why a device type of its own, and not a dispatch mode over fake tensors, or the pretend accelerator in a mode that runs nothing:
streams, events, ``record_stream``, storage resizes and autograd's own thread are asked of a device, so both libraries take the paths
here that they take on a GPU, and nothing of either is replaced. Under a dispatch mode they would take the CPU's, and a Python call an
operator would drown the host's time. The pretend accelerator orders real data, seeds its executor and holds each entry's tensors; of
its files, this device shares those that say the same (guard, hooks, ``torch.<device>`` module) and nothing that runs.
"""
