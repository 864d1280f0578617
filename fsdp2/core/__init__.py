"""The runtime: how parameters are sharded, gathered and reduced. docs/architecture.md lists its folders, lowest first."""
