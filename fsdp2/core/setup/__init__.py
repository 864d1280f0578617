"""Once, at ``fully_shard``: arguments are checked, modules are read, units are built or copied."""
