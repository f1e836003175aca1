"""No draft tokens: an extracting engine schedules and samples as without a speculative method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from vllm_ascend_hsx.compat.engine import remember_engines
from vllm_ascend_hsx.compat.installed import require_checked
from vllm_ascend_hsx.compat.patch_points import patch, uses
from vllm_ascend_hsx.compat.scheduling import refuse_balance_scheduling
from vllm_ascend_hsx.compat.targets import language_architectures, refuse_architecture
from vllm_ascend_hsx.compat.versions import SINCE_0_23, SINCE_0_30
from vllm_ascend_hsx.config import LAYER_IDS_KEY, METHOD
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.target import refuse_parallelism
from vllm_ascend_hsx.transfer_config import read_options

CONFIG = "vllm.config.vllm"
LOAD_CONFIG = "vllm.config.load"
RUNNER = "vllm_ascend.worker.model_runner_v1"
RUNNER_V2 = "vllm_ascend.worker.v2.model_runner"


@patch(CONFIG, "VllmConfig.__init__", SINCE_0_23, takes="", why="no draft tokens are scheduled")
def check_config_with_one_draft(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Give vLLM's check a number of draft tokens that it accepts; see `schedule_no_drafts`."""
    speculative: Any = kwargs.get("speculative_config")
    if extracts(speculative) and speculative.num_speculative_tokens == 0:
        speculative.num_speculative_tokens = 1
    original(self, *args, **kwargs)


@patch(CONFIG, "VllmConfig.__post_init__", SINCE_0_23, why="no draft tokens are scheduled")
def schedule_no_drafts(original: Any, self: Any) -> None:
    """Set `num_speculative_tokens` to 0 for an engine that extracts.

    Reason: our method is speculative in name only. But vLLM accepts no number below 1
    (config/speculative.py:990), and then treats each decode as one of two tokens: twice the work,
    another sampler (the same seed gives other text), graphs for two tokens per request, Mamba state
    for the draft. With 0, scheduler, sampler, graphs and KV cache are the same as on a server
    without extraction. The runner still calls the drafter (MR:2503).

    VllmConfig checks its parts again on each copy (`with_hf_config`, for the text part of a
    multimodal model), and then derives sizes from them in `__post_init__`. So the number is 1
    during the check, and 0 afterwards. With data parallelism each engine calls `__post_init__`
    alone once more (vllm/v1/engine/core.py:1038).

    Method, connector and target are first known together here, and this runs in the process that
    the user starts. So unusable settings are refused here, in the last error that this process
    prints. `--kv-offloading-size` replaces the connector (config/vllm.py:780), so the connector is
    checked again.
    """
    speculative = self.speculative_config
    if extracts(speculative):
        if speculative.num_speculative_tokens not in (0, 1):
            raise UserError(
                "speculative_config.num_speculative_tokens",
                speculative.num_speculative_tokens,
                f"has no effect: {METHOD} proposes no tokens",
                "Set it to 1, the minimum that vLLM accepts.",
            )
        speculative.num_speculative_tokens = 0
        require_checked(read_options(self.kv_transfer_config).allow_unchecked_versions)
        refuse_parallelism(self.parallel_config)
        remember_engines(self.parallel_config)
        refuse_balance_scheduling(self.additional_config or {}, self.kv_transfer_config.kv_role)
        target = self.model_config
        refuse_architecture(
            target.architecture, _layer_ids(speculative), language_architectures(target.hf_config)
        )
    original(self)
    if extracts(speculative):
        read_options(self.kv_transfer_config)


def _layer_ids(speculative: Any) -> Sequence[int]:
    """Return the ids of the layers to extract; empty if they are not a list (see `read_target`)."""
    layer_ids = getattr(speculative.draft_model_config.hf_config, LAYER_IDS_KEY, None)
    return layer_ids if isinstance(layer_ids, list | tuple) else ()


def require_no_drafts(vllm_config: Any) -> None:
    """Refuse an engine configuration created before our plugin was loaded.

    Raises:
        UserError: if draft tokens would be scheduled.
    """
    number = vllm_config.speculative_config.num_speculative_tokens
    if number != 0:
        raise UserError(
            "speculative_config.num_speculative_tokens",
            number,
            (
                "would schedule draft tokens: this configuration was created before our "
                "plugin was loaded"
            ),
            (
                "Create it with vLLM's EngineArgs, which loads plugins first. If "
                "VLLM_PLUGINS is set, add ascend_hsx to it."
            ),
        )


@patch(
    "vllm.v1.spec_decode.extract_hidden_states",
    "ExtractHiddenStatesProposer.__init__",
    SINCE_0_23,
    why="the proposer can be created without drafts",
)
def set_up_proposer(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Allow vLLM's proposer to be created although no draft tokens are scheduled.

    Reason: the constructor asserts one token (vllm/v1/spec_decode/extract_hidden_states.py:32). It
    is the base class of ours, and vLLM's runner creates one before vllm-ascend's does
    (vllm/v1/worker/gpu_model_runner.py:607).
    """
    with _set(vllm_config.speculative_config, "num_speculative_tokens", 1):
        original(self, vllm_config, *args, **kwargs)


@patch(
    RUNNER,
    "NPUModelRunner._set_up_drafter",
    SINCE_0_23,
    why="the runner sets up the drafter without drafts",
)
def set_up_drafter(original: Any, self: Any) -> None:
    """Allow the runner to set up the drafter although no draft tokens are scheduled.

    Reason: `_set_up_drafter` (MR:618) asserts a positive number. Everything else in the runner
    handles 0.
    """
    if not extracts(self.speculative_config):
        original(self)
        return
    require_no_drafts(self.vllm_config)
    with _set(self.speculative_config, "num_speculative_tokens", 1):
        original(self)
    self.decode_token_per_req = 1


uses(
    "vllm.v1.outputs",
    "DraftTokenIds",
    SINCE_0_23,
    takes="req_ids draft_token_ids",
    why="structured outputs work with asynchronous scheduling",
)


@patch(
    RUNNER,
    "NPUModelRunner.take_draft_token_ids",
    SINCE_0_23,
    why="structured outputs work with asynchronous scheduling",
)
def take_no_drafts(original: Any, self: Any) -> Any:
    """Answer the engine's request for draft tokens with none.

    Reason: with asynchronous scheduling and structured outputs the engine asks for draft tokens
    regardless of their number, and stops if the runner has no answer (v1/engine/core.py:583).
    Without draft tokens the runner has none (v1/worker/gpu_model_runner.py:4693).
    """
    if not extracts(self.speculative_config):
        return original(self)
    from vllm.v1.outputs import DraftTokenIds

    return DraftTokenIds([], [])


@patch(
    RUNNER,
    "NPUModelRunner._update_states_after_model_execute",
    SINCE_0_23,
    why="states of hybrid targets are right",
)
@patch(
    RUNNER, "NPUModelRunner._get_mamba_bufs", SINCE_0_23, why="states of hybrid targets are right"
)
def without_speculative_method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Handle a hybrid target's Mamba states as on a server without a speculative method.

    Reason: the runner counts accepted drafts whenever there is a speculative method (MR:755). It
    uses an event that exists only if draft tokens are scheduled
    (vllm/v1/worker/gpu_model_runner.py:871), and keeps buffers and copies for the counts
    (gpu_model_runner.py:1016, MR:2187).
    """
    if not extracts(self.speculative_config):
        return original(self, *args, **kwargs)
    with _set(self, "speculative_config", None):
        return original(self, *args, **kwargs)


_NO_WAIT = "a step of model runner V2 does not wait for the device"


@patch(RUNNER_V2, "NPUModelRunner._copy_num_computed_tokens_to_cpu", SINCE_0_30, why=_NO_WAIT)
def copy_no_counts(original: Any, self: Any) -> None:
    """Keep model runner V2 from copying the number of computed tokens per request to the host.

    Reason: only rejected drafts make the host's count wrong. The runner copies whenever there is a
    speculator (worker/v2/model_runner.py:1082), on a separate stream, while the next step may write
    the same memory (vllm/v1/worker/gpu/states.py:124).
    """
    if not extracts(self.speculative_config):
        original(self)


@patch(RUNNER_V2, "NPUModelRunner._update_seq_lens_cpu", SINCE_0_30, why=_NO_WAIT)
def count_without_speculator(original: Any, self: Any, scheduler_output: Any, req_ids: Any) -> None:
    """Make model runner V2 count computed tokens as on a server without a speculator.

    Reason: with a speculator each step waits for the copy (worker/v2/model_runner.py:1121); see
    `copy_no_counts`.
    """
    speculator = None if extracts(self.speculative_config) else self.speculator
    with _set(self, "speculator", speculator):
        original(self, scheduler_output, req_ids)


@patch(
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    SINCE_0_23,
    why="requests may use min_p and logit_bias",
)
def accept_logits_parameters(original: Any, self: Any, speculative_config: Any) -> None:
    """Allow requests to use `min_p` and `logit_bias`.

    Reason: vLLM refuses both with any speculative method (sampling_params.py:828), because they are
    not applied to drafts.
    """
    if not extracts(speculative_config):
        original(self, speculative_config)


@patch(RUNNER, "build_logitsprocs", SINCE_0_23, why="logits processors are applied")
def apply_logits_processors(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the runner apply `min_p`, `logit_bias` and custom logits processors.

    Reason: `build_logitsprocs` (vllm/v1/sample/logits_processor/__init__.py:201) skips them with
    any speculative method. The runner has imported it by name (MR:86).
    """
    if extracts(vllm_config.speculative_config):
        vllm_config = copy(vllm_config)
        vllm_config.speculative_config = None
    return original(vllm_config, *args, **kwargs)


_NO_WEIGHTS = "the drafter is loaded without weights"
uses(LOAD_CONFIG, "LoadConfig", SINCE_0_23, takes="", keywords="load_format", why=_NO_WEIGHTS)


@contextmanager
def without_weights(vllm_config: Any) -> Iterator[None]:
    """Load models in this block without reading a checkpoint.

    Reason: the drafter's checkpoint is the target's, and the drafter takes no tensor of it. vLLM's
    loader would log the uptime of the machine as loading time
    (model_executor/model_loader/default_loader.py:397, 0.23.0). Loaders that expect tensors for a
    model would find none (sharded_state_loader.py).

    Args:
        vllm_config: vllm.config.VllmConfig for loading the drafter.
    """
    from vllm.config.load import LoadConfig

    with _set(vllm_config, "load_config", LoadConfig(load_format="dummy")):
        yield


def extracts(speculative: Any) -> bool:
    """Return True if a vllm.config.SpeculativeConfig (or None) has our method."""
    return getattr(speculative, "method", None) == METHOD


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute to another value within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
