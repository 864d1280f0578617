"""Where each rank is when ranks wait for each other for ever: ``watchdog`` prints it and ends the processes (docs/hangs.md).

``report.py`` collects what one rank knows of itself, ``explanation.py`` makes sentences of the reports of all ranks, ``patience.py``
decides when nothing has moved for too long, ``watcher.py`` is the thread that carries reports over the store. ``joint_calls.py`` notes
calls that all ranks must make, and ``lookout.py`` is a thread that notices those that only some have made. ``asked.py`` starts both
for a whole program. Importing this package imports none of them.
"""
