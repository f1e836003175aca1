"""What extraction costs before a server is started: memory, KV cache, disk, bandwidth. Used by `hsx plan`."""
