"""The KV connector: scheduler side, worker side, and the messages between them."""
