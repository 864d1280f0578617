"""Integers and frozen values: which mesh axes shard, where each element lives, how one parameter is cut."""
