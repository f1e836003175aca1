"""Parts of `hsx demo`: tiny models, a server, requests, and the reference."""
