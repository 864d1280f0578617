"""What ``fsdp2.parallelize`` is made of beside ``fully_shard``: meshes of strategies, and ranks that begin alike."""
