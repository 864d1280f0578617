"""Which modules become groups: the model as a tree, policies that choose in it, and a dry run. ``fsdp2.wrap`` is its public face."""
