"""Refuse vllm-ascend's balance scheduling if our connector is the only one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.compat.versions import BEFORE_0_30, release_to_patch
from vllm_ascend_hsx.protocol.errors import UserError

_KEY = "enable_balance_scheduling"
_VARIABLE = "VLLM_ASCEND_BALANCE_SCHEDULING"


def refuse_balance_scheduling(
    additional_config: Mapping[str, Any],
    kv_role: str | None,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Refuse balance scheduling unless the server's role is `kv_both`.

    Reason: vllm-ascend takes any other role for one half of a disaggregated pair, and refuses the
    option without naming our connector (platform.py:677 in 0.23.0, :1029 in 0.30.0rc2).
    MultiConnector may have another role than our connector inside of it.

    Args:
        additional_config: vLLM's option for platforms.
        kv_role: role in kv_transfer_config.
        environ: environment of the server. Before 0.30 a variable sets the option, too.

    Raises:
        UserError: if the server would balance.
    """
    option, value = f"additional_config.{_KEY}", additional_config.get(_KEY)
    scheduler = additional_config.get("scheduler_config")
    if isinstance(scheduler, Mapping) and _KEY in scheduler:
        option, value = f"additional_config.scheduler_config.{_KEY}", scheduler[_KEY]
    elif value is None and release_to_patch("vllm_ascend") in SpecifierSet(BEFORE_0_30):
        option, value = _VARIABLE, environ.get(_VARIABLE, "0")
    if kv_role == "kv_both" or value in (None, False, 0, "0"):
        return
    remedy = (
        'Remove it, or make this connector a child of a MultiConnector with "kv_role": "kv_both".'
    )
    raise UserError(
        option,
        value,
        f"needs kv_role='kv_both' in vllm-ascend, but this server has {kv_role!r}",
        remedy,
    )
