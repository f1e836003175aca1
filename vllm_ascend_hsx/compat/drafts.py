"""No draft tokens: what makes an engine with our speculative method schedule, sample and plan as one without any."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from vllm_ascend_hsx.compat.models import refuse_unservable_target
from vllm_ascend_hsx.compat.versions import require
from vllm_ascend_hsx.config import METHOD, HsxConfigError, read_options

CONFIG_MODULE = "vllm.config.vllm"
PROPOSER_MODULE = "vllm.v1.spec_decode.extract_hidden_states"
RUNNER_MODULE = "vllm_ascend.worker.model_runner_v1"
SAMPLING_MODULE = "vllm.sampling_params"


def schedule_no_drafts(config_module: Any) -> None:
    """Have an engine that extracts hidden states schedule no draft tokens: `num_speculative_tokens` becomes 0.

    Reason: the method is a speculative one in name only, but vLLM accepts no number below 1 (config/speculative.py:990) and then treats
    each decode as one of two tokens: twice the work, another sampler (the same seed gives other text), graphs for two tokens a request,
    Mamba state for the draft. With 0 scheduler, sampler, graphs and KV cache are those of a server without extraction; the runner calls
    the drafter all the same (MR:2503).

    VllmConfig checks its parts again whenever a copy is made of it (`with_hf_config`, for the text part of a multimodal model), and then
    derives sizes from them in `__post_init__`. So the number is what vLLM accepts during the check, and 0 from there on. With data
    parallelism each engine calls `__post_init__` alone once more (vllm/v1/engine/core.py:1038).

    It is also the first place where method, connector and target are known together, and it runs in the process that the user has started:
    what does not fit is refused here, in the last error that this process prints. `--kv-offloading-size` replaces the connector
    (config/vllm.py:780), so it is checked again.

    Args:
        config_module: the module `vllm.config.vllm`.

    Raises:
        IncompatibleVersionError: no VllmConfig there that has both steps.
    """
    config, check = require(config_module, CONFIG_MODULE, "VllmConfig", "__init__")
    _, derive = require(config_module, CONFIG_MODULE, "VllmConfig", "__post_init__")

    @functools.wraps(check)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        speculative: Any = kwargs.get("speculative_config")
        if _extracts(speculative) and speculative.num_speculative_tokens == 0:
            speculative.num_speculative_tokens = 1
        check(self, *args, **kwargs)

    @functools.wraps(derive)
    def post_init(self: Any) -> None:
        speculative = self.speculative_config
        if _extracts(speculative):
            if speculative.num_speculative_tokens not in (0, 1):
                raise HsxConfigError(
                    "speculative_config.num_speculative_tokens",
                    speculative.num_speculative_tokens,
                    f"has no meaning: {METHOD} proposes no tokens",
                    "Set it to 1, the least that vLLM takes.",
                )
            speculative.num_speculative_tokens = 0
            read_options(self.kv_transfer_config)
            refuse_unservable_target(self.model_config)
        derive(self)
        if _extracts(speculative):
            read_options(self.kv_transfer_config)

    config.__init__ = init
    config.__post_init__ = post_init


def require_no_drafts(vllm_config: Any) -> None:
    """Refuse an engine whose configuration was made before our plugin was loaded.

    Raises:
        HsxConfigError: draft tokens would be scheduled.
    """
    number = vllm_config.speculative_config.num_speculative_tokens
    if number != 0:
        raise HsxConfigError(
            "speculative_config.num_speculative_tokens",
            number,
            "would be scheduled as draft tokens: this configuration was made before our plugin was loaded",
            "Make it with vLLM's EngineArgs, which loads plugins first, and have ascend_hsx in VLLM_PLUGINS if that is set.",
        )


def set_up_proposer_without_drafts(proposer_module: Any) -> None:
    """Let vLLM's proposer be made although no draft tokens are scheduled.

    Reason: its constructor asserts one token (vllm/v1/spec_decode/extract_hidden_states.py:32). It is the base class of ours, and vLLM's
    runner makes one itself before vllm-ascend's does (vllm/v1/worker/gpu_model_runner.py:607).

    Args:
        proposer_module: the module `vllm.v1.spec_decode.extract_hidden_states`.

    Raises:
        IncompatibleVersionError: no such class there.
    """
    proposer_class, original = require(proposer_module, PROPOSER_MODULE, "ExtractHiddenStatesProposer", "__init__")

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _one_draft(vllm_config.speculative_config):
            original(self, vllm_config, *args, **kwargs)

    proposer_class.__init__ = init


def set_up_drafter_without_drafts(runner_module: Any) -> None:
    """Let the runner set its drafter up although no draft tokens are scheduled.

    Reason: `_set_up_drafter` (MR:618) asserts a positive number. Everything else in the runner takes 0 as what it says.

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`.

    Raises:
        IncompatibleVersionError: the runner sets its drafter up elsewhere.
    """
    runner_class, original = require(runner_module, RUNNER_MODULE, "NPUModelRunner", "_set_up_drafter")

    @functools.wraps(original)
    def set_up_drafter(self: Any) -> None:
        if not _extracts(self.speculative_config):
            original(self)
            return
        require_no_drafts(self.vllm_config)
        with _one_draft(self.speculative_config):
            original(self)
        self.decode_token_per_req = 1

    runner_class._set_up_drafter = set_up_drafter


def have_no_drafts_to_take(runner_module: Any) -> None:
    """Let the runner answer, when the engine asks for draft tokens, that there are none.

    Reason: with asynchronous scheduling and structured outputs the engine asks whatever the number of draft tokens is, and stops if the
    runner has no answer (v1/engine/core.py:583); with no draft tokens it has none (v1/worker/gpu_model_runner.py:4693).

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`.

    Raises:
        IncompatibleVersionError: the runner is not asked this way.
    """
    runner_class, original = require(runner_module, RUNNER_MODULE, "NPUModelRunner", "take_draft_token_ids")

    @functools.wraps(original)
    def take_draft_token_ids(self: Any) -> Any:
        if not _extracts(self.speculative_config):
            return original(self)
        from vllm.v1.outputs import DraftTokenIds

        return DraftTokenIds([], [])

    runner_class.take_draft_token_ids = take_draft_token_ids


def keep_mamba_states_without_drafts(runner_module: Any) -> None:
    """Have a hybrid target's Mamba states handled as on a server without a speculative method.

    Reason: the runner counts accepted drafts whenever there is a speculative method (MR:755), with an event that it has only if draft
    tokens are scheduled (vllm/v1/worker/gpu_model_runner.py:871), and has buffers and copies for it (gpu_model_runner.py:1016, MR:2187).

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`.

    Raises:
        IncompatibleVersionError: the runner does it elsewhere.
    """
    for name in ("_update_states_after_model_execute", "_get_mamba_bufs"):
        runner_class, original = require(runner_module, RUNNER_MODULE, "NPUModelRunner", name)
        setattr(runner_class, name, _without_speculative_method(original))


def take_logits_parameters(sampling_module: Any) -> None:
    """Let requests use `min_p` and `logit_bias`.

    Reason: vLLM refuses both with any speculative method (sampling_params.py:828), since they are not applied to drafts. There are none.

    Args:
        sampling_module: the module `vllm.sampling_params`.

    Raises:
        IncompatibleVersionError: the check is elsewhere.
    """
    params, original = require(sampling_module, SAMPLING_MODULE, "SamplingParams", "_validate_spec_decode")

    @functools.wraps(original)
    def validate(self: Any, speculative_config: Any) -> None:
        if not _extracts(speculative_config):
            original(self, speculative_config)

    params._validate_spec_decode = validate


def apply_logits_processors(runner_module: Any) -> None:
    """Have the runner apply `min_p`, `logit_bias` and custom logits processors.

    Reason: `build_logitsprocs` (vllm/v1/sample/logits_processor/__init__.py:201) leaves them out with any speculative method.

    Args:
        runner_module: the module `vllm_ascend.worker.model_runner_v1`, which has imported that function (MR:86).

    Raises:
        IncompatibleVersionError: it has not.
    """
    _, original = require(runner_module, RUNNER_MODULE, "build_logitsprocs")

    @functools.wraps(original)
    def build_logitsprocs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _extracts(vllm_config.speculative_config):
            vllm_config = copy(vllm_config)
            vllm_config.speculative_config = None
        return original(vllm_config, *args, **kwargs)

    runner_module.build_logitsprocs = build_logitsprocs


def _extracts(speculative: Any) -> bool:
    return getattr(speculative, "method", None) == METHOD


@contextmanager
def _one_draft(speculative: Any) -> Iterator[None]:
    number, speculative.num_speculative_tokens = speculative.num_speculative_tokens, 1
    try:
        yield
    finally:
        speculative.num_speculative_tokens = number


def _without_speculative_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        speculative = self.speculative_config
        if not _extracts(speculative):
            return method(self, *args, **kwargs)
        self.speculative_config = None
        try:
            return method(self, *args, **kwargs)
        finally:
            self.speculative_config = speculative

    return call
