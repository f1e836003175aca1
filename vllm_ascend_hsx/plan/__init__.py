"""Cost of extraction in memory, disk and bandwidth, computed without a server.

Used by `hsx plan`. The cost is a constant, because rows never enter the KV cache: staging slots x
the share of `max_num_batched_tokens` of a rank x bytes of a row, and a tensor for each collected
layer but the last. Both come out of the memory of the KV cache. `tests/e2e/commands/test_plan.py`
compares this with the memory that an engine measures, to a block.
"""
