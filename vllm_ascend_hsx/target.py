"""What is extracted: the target, its layers, and the parallel settings with which it can be extracted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx.config import LAYER_IDS_KEY, METHOD
from vllm_ascend_hsx.protocol.errors import UserError


@dataclass(frozen=True)
class ExtractionTarget:
    """What is extracted, read once from the engine's configuration.

    Attributes:
        model: the target's name or path, for the file's metadata.
        layer_ids: residual-stream ids in the user's order; id i is the stream after i layers, `num_layers` the one before the final norm.
        collected: for each entry of `layer_ids` its place in the list that the target returns, which is in ascending layer order.
        hidden_size: elements per row and layer.
        max_tokens: most tokens that one step can hold (`max_num_batched_tokens`).
    """

    model: str
    layer_ids: tuple[int, ...]
    collected: tuple[int, ...]
    hidden_size: int
    max_tokens: int

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)


def validate_layer_ids(layer_ids: object, num_hidden_layers: int) -> tuple[int, ...]:
    """Check the ids of the layers to extract; their order is kept, for it is the order of the file.

    Args:
        layer_ids: what the user gave as `eagle_aux_hidden_state_layer_ids`.
        num_hidden_layers: layers of the target.

    Raises:
        UserError: not a list of integers, empty, a duplicate, or an id outside [0, num_hidden_layers].
    """
    option = f"speculative_config.draft_model_config.hf_config.{LAYER_IDS_KEY}"
    example = [2, num_hidden_layers // 2, num_hidden_layers - 3, num_hidden_layers] if num_hidden_layers > 6 else [num_hidden_layers]
    remedy = (
        f"Give distinct integers from 0 (the embedding output) to {num_hidden_layers} (after the last layer, before the final norm), "
        f"for example {example}."
    )
    if not isinstance(layer_ids, list | tuple) or not layer_ids or any(not isinstance(i, int) or isinstance(i, bool) for i in layer_ids):
        raise UserError(option, layer_ids, "is not a list of layer ids", remedy)
    for index, layer_id in enumerate(layer_ids):
        if not 0 <= layer_id <= num_hidden_layers:
            raise UserError(option, layer_ids, f"has id {layer_id}, which the target does not have", remedy)
        if layer_id in layer_ids[:index]:
            raise UserError(option, layer_ids, f"has id {layer_id} twice", remedy)
    return tuple(layer_ids)


def read_target(vllm_config: Any) -> ExtractionTarget:
    """Read what is to be extracted from vLLM's configuration, and refuse what cannot be extracted correctly.

    Args:
        vllm_config: vllm.config.VllmConfig with the speculative method `extract_hidden_states`.

    Raises:
        UserError: another speculative method, unusable layer ids, or a parallel or role setting that is not supported.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        raise UserError(
            "speculative_config.method",
            getattr(speculative, "method", None),
            "produces no hidden states",
            f'Start the server with --speculative-config \'{{"method": "{METHOD}", "num_speculative_tokens": 1, ...}}\'.',
        )
    if speculative.disable_padded_drafter_batch:
        raise UserError(
            "speculative_config.disable_padded_drafter_batch",
            True,
            "passes sampled tokens to the drafter as lists, without the layout of the batch",
            "Leave it out.",
        )
    parallel = vllm_config.parallel_config
    for option, reason in ONE_ONLY.items():
        value = getattr(parallel, option, 1)
        if value > 1:
            raise UserError(option, value, reason, f"Use {option}=1; scale with tensor, data and expert parallelism.")
    model = vllm_config.model_config
    layer_ids = validate_layer_ids(
        getattr(speculative.draft_model_config.hf_config, LAYER_IDS_KEY, None), model.get_total_num_hidden_layers()
    )
    ascending = sorted(layer_ids)
    return ExtractionTarget(
        model=model.served_model_name if isinstance(model.served_model_name, str) else model.model,
        layer_ids=layer_ids,
        collected=tuple(ascending.index(layer_id) for layer_id in layer_ids),
        hidden_size=model.get_hidden_size(),
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


ONE_ONLY = {
    "pipeline_parallel_size": "leaves each stage with the hidden states of its own layers only",
    "prefill_context_parallel_size": "reorders the tokens of a batch across ranks",
    "decode_context_parallel_size": "has not been shown to keep the order of the rows",
}
