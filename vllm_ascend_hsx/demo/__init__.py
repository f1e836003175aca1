"""What `hsx demo` is made of: tiny models, a server, requests, and the reference they are compared with."""
