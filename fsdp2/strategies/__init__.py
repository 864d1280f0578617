"""The parts of ``fsdp2.parallelize`` beside ``fully_shard``: meshes of strategies, and ranks that begin alike."""
