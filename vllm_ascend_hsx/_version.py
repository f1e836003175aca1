"""The version of this package. pyproject.toml reads it from this module.

The module imports nothing, so every module can import it.
"""

__version__ = "0.1.0"
