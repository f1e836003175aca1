"""Log level and handlers of this package in vLLM's processes."""

from __future__ import annotations

import logging

from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23

OURS, VLLMS = "vllm_ascend_hsx", "vllm"

uses(
    "vllm.logger",
    "init_logger",
    SINCE_0_23,
    takes="name",
    why="log lines appear where vLLM's appear",
)


def log_as_vllm_does() -> None:
    """Give our logger vLLM's level, and vLLM's handlers if no other handler would print.

    A user's configuration is kept. Reason: an API server of vLLM 0.23.0 imports
    model_hosting_container_standards. It sets the root logger to ERROR (logging_config.py:50), and
    forked processes inherit this. A logger without an explicit level would print no warnings.
    """
    from vllm.logger import init_logger

    ours, vllms, root = logging.getLogger(OURS), init_logger(VLLMS), logging.getLogger()
    if ours.level == logging.NOTSET:
        ours.setLevel(vllms.level)
    if ours.propagate and not any(
        handler.level <= logging.WARNING for handler in (*ours.handlers, *root.handlers)
    ):
        ours.handlers, ours.propagate = [*ours.handlers, *vllms.handlers], not vllms.handlers
