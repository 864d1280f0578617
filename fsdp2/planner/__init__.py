"""What a training run needs, before there is a machine for it: ``fsdp2.plan`` and ``fsdp2 plan``.

    workload     what is trained: a model on the meta device, its inputs, its loss
    setting      how it is trained: each argument with its default, check and option
    models       the models of built-in workloads; shapes: these workloads by name, and models of transformers
    script       a training script as a workload
    world        W ranks in one process, which is the first of them
    streams      a device's streams that only record
    recorder     records what a step allocates, computes and communicates, on tensors without memory
    known_values values of integers that follow from sizes alone
    tiers        where parameters and states lie: on the device, on the host, in files
    rehearsal    a workload, sharded by the library's own code and trained for two steps in such a world
    repetition   the figures of a model with many equal blocks, from rehearsals with few of them
    memory       from the record: bytes over time, the peak and what it consists of
    traffic      from the record: bytes communicated, by phase and link
    duration     from the record and a device card: the time of a step, by a model
    result       the plan, as plain values
    api          ``plan``; command, search_command: ``fsdp2 plan``, ``fsdp2 search``
    card_file    device cards as files; measure: measures such a card on this machine, with ranks that it starts: ``fsdp2 measure``
    search       settings that fit a memory limit, the fastest first; proposals: its result as tables

Nothing is derived by formula: ``parallelize``, the hooks, the schedule, autograd and the optimizer run as they do in training, on
tensors that have sizes and no memory.
"""
