"""A step on a clock: a model of the time of a training step on accelerators that nobody has at hand."""
