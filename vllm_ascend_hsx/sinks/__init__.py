"""Sinks store extracted rows.

`base` defines the contract of a sink. `file`, `shard` and `mooncake` implement it. `destination`
creates the sink for the option `sink`.
"""
