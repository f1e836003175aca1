"""Find the connector's options in vLLM's `kv_transfer_config`, alone or in MultiConnector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from vllm_ascend_hsx.config import CONNECTOR_NAME, EXTRA_CONFIG, PLUGIN_NAME, HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError

UPSTREAM_CONNECTOR = "ExampleHiddenStatesConnector"
# Entry-point groups that VLLM_PLUGINS filters (vllm/plugins/__init__.py, 0.23.0).
_PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins" for kind in ("platform", "general", "io_processor", "stat_logger")
)


def read_options(transfer: Any) -> HsxConfig:
    """Parse and check the connector's options, alone or in MultiConnector.

    Args:
        transfer: vllm.config.KVTransferConfig, or None.

    Raises:
        UserError: if the connector is missing, or the role or an option is invalid.
    """
    role, options = _connector_entry(transfer)
    config = HsxConfig.parse(options)
    require_producer(role)
    return config


def _connector_entry(transfer: Any) -> tuple[str | None, dict[str, Any]]:
    if transfer is not None and transfer.kv_connector == CONNECTOR_NAME:
        return transfer.kv_role, transfer.kv_connector_extra_config
    if transfer is not None and transfer.kv_connector == "MultiConnector":
        connectors = transfer.kv_connector_extra_config.get("connectors", ())
        children = {child.get("kv_connector"): child for child in connectors}
        if CONNECTOR_NAME in children:
            if UPSTREAM_CONNECTOR in children:
                option = f"kv_transfer_config.{EXTRA_CONFIG}.connectors"
                problem = (
                    f"reads hidden states from the KV cache, where {CONNECTOR_NAME} keeps none"
                )
                raise UserError(option, UPSTREAM_CONNECTOR, problem, "Leave it out.")
            child = children[CONNECTOR_NAME]
            role = child.get("kv_role", transfer.kv_role)
            return role, child.get("kv_connector_extra_config", {})
    raise UserError(
        "kv_transfer_config.kv_connector",
        getattr(transfer, "kv_connector", None),
        "does not take the hidden states that the speculative method extracts while the plugin "
        f"{PLUGIN_NAME} is loaded",
        f'Start the server with --kv-transfer-config \'{{"kv_connector": "{CONNECTOR_NAME}", '
        '"kv_role": "kv_producer", ...}\'; '
        "or, to use another connector for hidden states, without this plugin: "
        f"VLLM_PLUGINS={plugins_without_ours()} vllm serve ...",
    )


def plugins_without_ours(environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of VLLM_PLUGINS that excludes only this plugin."""
    allowed = environ.get("VLLM_PLUGINS")
    points = [point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)]
    others = dict.fromkeys(name for name in points if name != PLUGIN_NAME)
    return ",".join(name for name in others if allowed is None or name in allowed.split(","))


def require_producer(kv_role: str | None) -> None:
    """Require the role `kv_producer`, because the connector loads nothing. Raises UserError."""
    if kv_role != "kv_producer":
        problem = "makes the engine expect KV data from a connector that only writes hidden states"
        remedy = 'Set "kv_role": "kv_producer".'
        raise UserError("kv_transfer_config.kv_role", kv_role, problem, remedy)
