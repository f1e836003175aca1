"""Device side: batch layout, the cache-only layer, and staging, which copies rows to the host."""
