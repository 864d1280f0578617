"""Where each rank is when ranks wait for each other forever: ``watchdog`` prints it and ends the processes (docs/hangs.md).

``report.py`` collects what one rank knows of itself, ``explanation.py`` turns the reports of all ranks into sentences, ``patience.py``
decides when nothing has moved for too long, and ``watcher.py`` is the thread that carries reports over the store. ``joint_calls.py``
notes calls that all ranks must make; ``lookout.py`` is a thread that ends a rank which waits in one too long. Neither thread runs
unless a program or its environment asks for it (``asked.py``). Importing this package imports none of them.
"""
