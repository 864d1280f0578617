"""``fsdp2 prove``: whether a sharded program trains what it says, by running it unchanged on this machine (docs/prove.md).

``command.py`` runs the program several times: ``ranks.py`` forks the ranks, ``witness.py`` writes down what each of them saw,
``stand_ins.py`` has the names that programs get in runs on the reference. ``comparing.py`` compares two runs and ``judging.py`` makes
statements of that; ``verdict.py`` is what both people and programs get to read.
"""
