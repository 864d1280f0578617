"""``fsdp2 prove``: whether a sharded program trains what it says, by running it unchanged on this machine (docs/prove.md).

``command.py`` runs the program several times: ``witness.py`` writes down what each rank saw, ``certificate.py`` what gradients are
divided by, ``checkpoint.py`` saves and loads its state; ``stand_ins.py`` has the names that programs get in runs on the reference.
``on_device.py`` is a rank on the pretend accelerator. ``comparing.py`` compares two runs, ``judging.py`` makes statements of that, and
``verdict.py`` is what people and programs get to read.
"""
