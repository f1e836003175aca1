"""The contract of writers and readers: bytes, names, locks and checksums; request keys."""
