"""The version of this package. A module of its own, so that all modules can import it."""

__version__ = "0.1.0.dev0"
