"""Rows in a Mooncake store: its client, and the objects that a request has there."""
