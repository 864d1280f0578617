"""A step on a clock: a model of how long a training step takes on accelerators that are not at hand. It is arithmetic alone.

Traces come from the planner, and from the device of ``benchmarks/clock_device``, which computes nothing and logs what it is given. One
trace can be run with several cards.

    trace       what a device is given, as plain values
    cards       what hardware can do, with sources
    costs       what one entry of a trace costs on a card
    caching     which memory a trace's allocations reserve
    timeline    when each entry begins and ends, in virtual time
    report      what a step consists of: computing, exposed communication, idle gaps
"""
