"""No draft tokens: an engine with our speculative method schedules and samples as without one."""

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
    """Give vLLM's check the number of draft tokens that it accepts; see `schedule_no_drafts`."""
    speculative: Any = kwargs.get("speculative_config")
    if extracts(speculative) and speculative.num_speculative_tokens == 0:
        speculative.num_speculative_tokens = 1
    original(self, *args, **kwargs)


@patch(CONFIG, "VllmConfig.__post_init__", SINCE_0_23, why="no draft tokens are scheduled")
def schedule_no_drafts(original: Any, self: Any) -> None:
    """Have an engine that extracts schedule no draft tokens: `num_speculative_tokens` becomes 0.

    Reason: the method is a speculative one in name only, but vLLM accepts no number below 1
    (config/speculative.py:990) and then treats each decode as one of two tokens: twice the work,
    another sampler (the same seed gives other text), graphs for two tokens a request, Mamba state
    for the draft. With 0, scheduler, sampler, graphs and KV cache are those of a server without
    extraction; the runner calls the drafter all the same (MR:2503).

    VllmConfig checks its parts again whenever it is copied (`with_hf_config`, for the text part of
    a multimodal model), and then derives sizes from them in `__post_init__`. So the number is what
    vLLM accepts during the check, and 0 from here on. With data parallelism each engine calls
    `__post_init__` alone once more (vllm/v1/engine/core.py:1038).

    It is also the first place where method, connector and target are known together, and it runs in
    the process that the user has started: unusable settings are refused here, in the last error
    that this process prints. `--kv-offloading-size` replaces the connector (config/vllm.py:780), so
    the connector is checked again.
    """
    speculative = self.speculative_config
    if extracts(speculative):
        if speculative.num_speculative_tokens not in (0, 1):
            raise UserError(
                "speculative_config.num_speculative_tokens",
                speculative.num_speculative_tokens,
                f"has no meaning: {METHOD} proposes no tokens",
                "Set it to 1, the least that vLLM takes.",
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
    """Return the ids of the layers to extract; empty if they are no list (see `read_target`)."""
    layer_ids = getattr(speculative.draft_model_config.hf_config, LAYER_IDS_KEY, None)
    return layer_ids if isinstance(layer_ids, list | tuple) else ()


def require_no_drafts(vllm_config: Any) -> None:
    """Refuse an engine whose configuration was made before our plugin was loaded.

    Raises:
        UserError: draft tokens would be scheduled.
    """
    number = vllm_config.speculative_config.num_speculative_tokens
    if number != 0:
        raise UserError(
            "speculative_config.num_speculative_tokens",
            number,
            (
                "would be scheduled as draft tokens: this configuration was made before our plugin "
                "was loaded"
            ),
            (
                "Make it with vLLM's EngineArgs, which loads plugins first, and have ascend_hsx in "
                "VLLM_PLUGINS if that is set."
            ),
        )


@patch(
    "vllm.v1.spec_decode.extract_hidden_states",
    "ExtractHiddenStatesProposer.__init__",
    SINCE_0_23,
    why="the proposer is made without drafts",
)
def set_up_proposer(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Let vLLM's proposer be made although no draft tokens are scheduled.

    Reason: its constructor asserts one token (vllm/v1/spec_decode/extract_hidden_states.py:32). It
    is the base class of ours, and vLLM's runner makes one itself before vllm-ascend's does
    (vllm/v1/worker/gpu_model_runner.py:607).
    """
    with _set(vllm_config.speculative_config, "num_speculative_tokens", 1):
        original(self, vllm_config, *args, **kwargs)


@patch(
    RUNNER, "NPUModelRunner._set_up_drafter", SINCE_0_23, why="the runner sets up without drafts"
)
def set_up_drafter(original: Any, self: Any) -> None:
    """Let the runner set its drafter up although no draft tokens are scheduled.

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
    why="structured outputs with asynchronous scheduling",
)


@patch(
    RUNNER,
    "NPUModelRunner.take_draft_token_ids",
    SINCE_0_23,
    why="structured outputs with asynchronous scheduling",
)
def take_no_drafts(original: Any, self: Any) -> Any:
    """Let the runner answer, when the engine asks for draft tokens, that there are none.

    Reason: with asynchronous scheduling and structured outputs the engine asks whatever the number
    of draft tokens is, and stops if the runner has no answer (v1/engine/core.py:583); without draft
    tokens it has none (v1/worker/gpu_model_runner.py:4693).
    """
    if not extracts(self.speculative_config):
        return original(self)
    from vllm.v1.outputs import DraftTokenIds

    return DraftTokenIds([], [])


@patch(
    RUNNER,
    "NPUModelRunner._update_states_after_model_execute",
    SINCE_0_23,
    why="states of hybrid targets",
)
@patch(RUNNER, "NPUModelRunner._get_mamba_bufs", SINCE_0_23, why="states of hybrid targets")
def without_speculative_method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a hybrid target's Mamba states handled as on a server without a speculative method.

    Reason: the runner counts accepted drafts whenever there is a speculative method (MR:755), with
    an event that it has only if draft tokens are scheduled
    (vllm/v1/worker/gpu_model_runner.py:871), and has buffers and copies for it
    (gpu_model_runner.py:1016, MR:2187).
    """
    if not extracts(self.speculative_config):
        return original(self, *args, **kwargs)
    with _set(self, "speculative_config", None):
        return original(self, *args, **kwargs)


_NO_WAIT = "a step of model runner V2 does not wait for the device"


@patch(RUNNER_V2, "NPUModelRunner._copy_num_computed_tokens_to_cpu", SINCE_0_30, why=_NO_WAIT)
def copy_no_counts(original: Any, self: Any) -> None:
    """Have model runner V2 not copy to the host how many tokens of each request are computed.

    Reason: only drafts that were rejected make the host's own count wrong. The runner copies
    whenever there is a speculator (worker/v2/model_runner.py:1082), on a stream of its own, while
    the next step may write the same memory (vllm/v1/worker/gpu/states.py:124).
    """
    if not extracts(self.speculative_config):
        original(self)


@patch(RUNNER_V2, "NPUModelRunner._update_seq_lens_cpu", SINCE_0_30, why=_NO_WAIT)
def count_without_speculator(original: Any, self: Any, scheduler_output: Any, req_ids: Any) -> None:
    """Have model runner V2 count computed tokens as on a server without a speculator.

    Reason: with one each step waits for the copy (worker/v2/model_runner.py:1121); see
    `copy_no_counts`.
    """
    speculator = None if extracts(self.speculative_config) else self.speculator
    with _set(self, "speculator", speculator):
        original(self, scheduler_output, req_ids)


@patch(
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    SINCE_0_23,
    why="min_p and logit_bias are taken",
)
def accept_logits_parameters(original: Any, self: Any, speculative_config: Any) -> None:
    """Let requests use `min_p` and `logit_bias`.

    Reason: vLLM refuses both with any speculative method (sampling_params.py:828), since they are
    not applied to drafts.
    """
    if not extracts(speculative_config):
        original(self, speculative_config)


@patch(RUNNER, "build_logitsprocs", SINCE_0_23, why="logits processors are applied")
def apply_logits_processors(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the runner apply `min_p`, `logit_bias` and custom logits processors.

    Reason: `build_logitsprocs` (vllm/v1/sample/logits_processor/__init__.py:201), which the runner
    has imported (MR:86), leaves them out with any speculative method.
    """
    if extracts(vllm_config.speculative_config):
        vllm_config = copy(vllm_config)
        vllm_config.speculative_config = None
    return original(vllm_config, *args, **kwargs)


_NO_WEIGHTS = "the drafter is loaded without weights"
uses(LOAD_CONFIG, "LoadConfig", SINCE_0_23, takes="", keywords="load_format", why=_NO_WEIGHTS)


@contextmanager
def without_weights(vllm_config: Any) -> Iterator[None]:
    """Have models that are loaded in the block read no checkpoint.

    Reason: the drafter's checkpoint is the target's, and the drafter takes no tensor of it. vLLM's
    loader then logs the age of the machine as the time that loading took
    (model_executor/model_loader/default_loader.py:397, 0.23.0), and loaders that know the tensors
    of a model beforehand find none for it (sharded_state_loader.py).

    Args:
        vllm_config: vllm.config.VllmConfig with which the drafter is loaded.
    """
    from vllm.config.load import LoadConfig

    with _set(vllm_config, "load_config", LoadConfig(load_format="dummy")):
        yield


def extracts(speculative: Any) -> bool:
    """Return whether a vllm.config.SpeculativeConfig, or None, is one of extraction."""
    return getattr(speculative, "method", None) == METHOD


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value for the time of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
