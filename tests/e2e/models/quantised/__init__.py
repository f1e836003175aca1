"""Write rotated and quantised checkpoints of the tiny models, and compute the expected rows."""
