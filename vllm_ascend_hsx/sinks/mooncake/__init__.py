"""The sink for a Mooncake store."""
