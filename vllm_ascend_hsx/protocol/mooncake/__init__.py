"""Rows in a Mooncake store: the client, and the objects of a request."""
