"""Parts of `hsx demo`: tiny models, a server, requests, and the reference."""


class DemoError(RuntimeError):
    """The demo cannot run, or has failed. The message has the reason and the remedy."""
