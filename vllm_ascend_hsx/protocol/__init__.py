"""What writers and readers of hidden states agree on: the bytes of files and shards, their names, locks and checksums, and request keys."""
