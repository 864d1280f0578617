"""The needs of a training run, before there is a machine for it: ``fsdp2.plan`` and ``fsdp2 plan``.

    workload     what is trained: a model on the meta device, its inputs, its loss
    models       what built-in workloads are made of
    shapes       built-in workloads by name, and those of transformers
    script       a training script as a workload
    world        W ranks in one process, one of which this process is
    streams      a device's streams, which only write down what they are told
    recorder     what a step allocates, computes and communicates: tensors without memory, written down one by one
    known_values values of integers that follow from sizes alone
    rehearsal    a workload, sharded by the library's own code and trained for two steps in such a world
    repetition   the figures of a model of many equal blocks, from rehearsals with few of them
    memory       from what was written down: bytes at a time, the peak and what it is made of
    traffic      from what was written down: bytes communicated, by phase and link
    duration     from what was written down and a card: how long a step takes, by a model
    result       the plan, as plain values
    api          ``plan``; command: ``fsdp2 plan``
    card_file    device cards as files; measure: such a file of this machine, by ranks that it starts
    proposals    what a search has found, as tables; search: settings that fit a memory limit, the fastest first

Nothing is derived by formula: ``parallelize``, the hooks, the schedule, autograd and the optimizer run as they do in training, on
tensors that have sizes and no memory.
"""
