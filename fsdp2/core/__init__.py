"""The runtime: it shards and gathers parameters, and reduces gradients. docs/architecture.md lists its folders."""
