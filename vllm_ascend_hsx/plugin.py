"""The entry point that vLLM loads: registers the connector, the drafter and all patches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.compat import (  # noqa: F401 - each import declares patch points
    adapters,
    drafts,
    engine,
    failures,
    request_params,
    rotation,
    runner,
    shutdown,
    targets,
    weights,
)
from vllm_ascend_hsx.compat.drafts import extracts
from vllm_ascend_hsx.compat.logs import log_as_vllm_does
from vllm_ascend_hsx.compat.patch_points import POINTS, patch, uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_30, IncompatibleVersionError
from vllm_ascend_hsx.config import CONNECTOR_NAME

if TYPE_CHECKING:
    from vllm_ascend_hsx.settings import ServerSettings

logger = logging.getLogger(__name__)

DRAFTER_ARCHITECTURE = "ExtractHiddenStatesModel"
MODELS = "vllm.model_executor.models"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"

_CONNECTOR = "KVConnectorFactory.register_connector"
uses(
    FACTORY,
    _CONNECTOR,
    SINCE_0_23,
    takes="name module_path class_name",
    why="the connector is known",
)
uses(FACTORY, "KVConnectorFactory._registry", SINCE_0_23, why="the plugin registers once")
_MODEL = "ModelRegistry.register_model"
uses(MODELS, _MODEL, SINCE_0_23, takes="model_arch model_cls", why="the drafter is known")


def register() -> None:
    """Register everything with vLLM. vLLM calls this in every process (`vllm.general_plugins`).

    Later calls in a process do nothing. Do not import vllm_ascend here: plugins are loaded before
    vllm_ascend applies its patches.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models import ModelRegistry
    from wrapt import register_post_import_hook

    log_as_vllm_does()
    if CONNECTOR_NAME in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(
        CONNECTOR_NAME, "vllm_ascend_hsx.connector.connector", CONNECTOR_NAME
    )
    ModelRegistry.register_model(
        DRAFTER_ARCHITECTURE, "vllm_ascend_hsx.drafter.model:AscendExtractHiddenStatesModel"
    )
    for point in POINTS:
        if point.replacement and point.fits:
            register_post_import_hook(point.apply, point.module)


@patch(
    "vllm.engine.arg_utils",
    "EngineArgs.create_engine_config",
    SINCE_0_23,
    why="unusable settings end a server within seconds",
)
def check_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the settings of an engine that extracts, and log a line about them.

    Reason: the user has started this process, so an error here is the last output that the user
    sees. Later errors are raised in processes of the engine, and vLLM then ends with "See root
    cause above" (v1/engine/utils.py:1251, 0.23.0). If a server has several API servers, each of
    them repeats this step (entrypoints/openai/api_server.py:123).
    """
    vllm_config = original(self, *args, **kwargs)
    if not extracts(vllm_config.speculative_config):
        return vllm_config
    # These modules import torch. A process without an engine does not need it.
    from vllm_ascend_hsx.drafter.ring import ring_bytes_of
    from vllm_ascend_hsx.settings import read_settings

    parallel = vllm_config.parallel_config
    local = parallel.data_parallel_size_local
    settings = read_settings(vllm_config, has_engine=local > 0)
    # Rank -1: this process starts the API servers (entrypoints/cli/serve.py:288).
    if parallel._api_process_count == 1 or parallel._api_process_rank < 0:
        writers = settings.num_writers(parallel.tensor_parallel_size * max(1, local))()
        logger.info("%s", _introduction(settings, ring_bytes_of(settings), writers))
    return vllm_config


def _introduction(settings: ServerSettings, ring_bytes: int, writers: int) -> str:
    rows = settings.row_format
    return (
        f"vllm-ascend-hsx {__version__} extracts layers {','.join(map(str, rows.layer_ids))} of "
        f"{settings.target.model}: "
        f"{rows.stored_row_bytes} bytes per token, into {settings.destination.description} (sink "
        f"{settings.config.sink}). "
        f"Each worker has a pinned ring of {ring_bytes / 2**20:g} MiB and {writers} writer threads."
    )


@patch(
    "vllm_ascend.spec_decode",
    "AscendExtractHiddenStatesProposer",
    SINCE_0_23,
    takes="vllm_config device runner",
    why="our proposer replaces that of vllm-ascend",
)
def make_proposer(original: Any, *args: Any) -> Any:
    """Let vllm-ascend construct our proposer for the method extract_hidden_states.

    Reason: `get_spec_decode_method` (vllm_ascend/spec_decode/__init__.py:36-55) has no registry. It
    looks the class up in the module at each call. MR:644 and MR:1750 only assert `isinstance`, and
    a subclass passes.
    """
    from vllm_ascend_hsx.drafter.proposer import HsxProposer

    if not issubclass(HsxProposer, original):
        raise IncompatibleVersionError(f"{original} is not the base class of our proposer")
    return HsxProposer(*args)


@patch(
    "vllm.v1.worker.gpu.spec_decode.extract_hidden_states",
    "ExtractHiddenStatesSpeculator",
    SINCE_0_30,
    takes="vllm_config device",
    why="our speculator replaces that of vLLM on model runner V2",
)
def make_speculator(original: Any, *args: Any) -> Any:
    """Let model runner V2 construct our speculator for the method extract_hidden_states.

    Reason: `init_speculator` of vLLM and of vllm-ascend (v1/worker/gpu/spec_decode/__init__.py:11,
    vllm_ascend/worker/v2/spec_decode/__init__.py:33) has no registry. It looks the class up in the
    module at each call.
    """
    from vllm_ascend_hsx.drafter.speculator import HsxSpeculator

    return HsxSpeculator(*args)
