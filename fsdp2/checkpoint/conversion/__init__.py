"""Checkpoints of any format, read and written without the job that saved them; a training process imports none of this by itself."""
