"""What happens once, at ``fully_shard``: it checks arguments, reads modules, and builds or copies units."""
