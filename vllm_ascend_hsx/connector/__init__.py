"""The KV connector: scheduler side, worker side, and what they tell each other."""
