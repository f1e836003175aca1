"""Where extracted rows go.

`base` has the contract of a sink; `file`, `shard` and `mooncake` implement it. `destination` makes
the one that the option `sink` names.
"""
