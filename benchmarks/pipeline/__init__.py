"""Our path of rows compared with peers: host path, latency, main thread, engine, slow storage."""
