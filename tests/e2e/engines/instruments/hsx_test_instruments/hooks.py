"""The time at which an instrument is applied."""

from __future__ import annotations

from typing import Any


def after_import(module: str, action: Any) -> None:
    """Call `action` with the module once it is imported."""
    from wrapt import register_post_import_hook

    register_post_import_hook(action, module)
