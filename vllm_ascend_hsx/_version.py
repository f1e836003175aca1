"""The version of this package: its one place, which pyproject.toml reads, too.

A module of its own, so that all modules can import it.
"""

__version__ = "0.1.0"
