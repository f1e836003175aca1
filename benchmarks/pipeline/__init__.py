"""Our path of rows against its peers: host path, latency, main thread, engine, slow storage."""
