"""The device side: who is in the batch, the cache-only layer that catches their rows, and the staging that copies them to the host."""
