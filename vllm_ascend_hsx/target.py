"""The extraction target: the model, the layers, and the supported parallel settings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_hsx.config import LAYER_IDS_KEY, METHOD
from vllm_ascend_hsx.draft_layers import layers_of_draft
from vllm_ascend_hsx.protocol.errors import UserError

_IDS = re.compile(r"\s*-?\d{1,30}\s*(,\s*-?\d{1,30}\s*)*", re.ASCII)


@dataclass(frozen=True)
class ExtractionTarget:
    """Model and layers to extract, read once from the engine's configuration.

    Attributes:
        model: name or path of the target, for the metadata of files.
        layer_ids: residual-stream ids in the user's order. Id i is the stream after i layers.
            `num_layers` is the state before the final norm.
        layer_order: for each of `layer_ids`, the index in the list that the target returns. The
            target returns layers in ascending order.
        hidden_size: elements per row and layer.
        max_tokens: most tokens of one step (`max_num_batched_tokens`).
        tensor_parallel: ranks that share the requests of a step.
    """

    model: str
    layer_ids: tuple[int, ...]
    layer_order: tuple[int, ...]
    hidden_size: int
    max_tokens: int
    tensor_parallel: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)


def validate_layer_ids(layer_ids: object, num_hidden_layers: int) -> tuple[int, ...]:
    """Check the ids of the layers to extract. Return them in the same order, as in the file.

    Args:
        layer_ids: the user's `eagle_aux_hidden_state_layer_ids`.
        num_hidden_layers: layers of the target.

    Raises:
        UserError: if `layer_ids` is not a list of integers, is empty, or has a duplicate or an id
            outside [0, num_hidden_layers].
    """
    option = f"speculative_config.draft_model_config.hf_config.{LAYER_IDS_KEY}"
    example = (
        [2, num_hidden_layers // 2, num_hidden_layers - 3, num_hidden_layers]
        if num_hidden_layers > 6
        else [num_hidden_layers]
    )
    remedy = (
        f"Give distinct integers from 0 (the embedding output) to {num_hidden_layers} (after the "
        f"last layer, before the final norm), for example {example}."
    )
    if (
        not isinstance(layer_ids, list | tuple)
        or not layer_ids
        or any(not isinstance(i, int) or isinstance(i, bool) for i in layer_ids)
    ):
        raise UserError(option, layer_ids, "is not a list of layer ids", remedy)
    for index, layer_id in enumerate(layer_ids):
        if not 0 <= layer_id <= num_hidden_layers:
            raise UserError(
                option, layer_ids, f"has id {layer_id}, which the target does not have", remedy
            )
        if layer_id in layer_ids[:index]:
            raise UserError(option, layer_ids, f"has id {layer_id} twice", remedy)
    return tuple(layer_ids)


def layer_ids(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers that --layers selects, in the order of the file.

    Args:
        text: one of
            * ids, such as "2,30,59,62";
            * "eagle3" or "dflash": the default layers of speculators 0.9.0
              (speculators/models/utils.py:113), and the last layer. Training computes the logits of
              the target from the last layer;
            * "mtp": the last layer;
            * the directory of a draft model; see `layers_of_draft`.
        num_layers: layers of the target.

    Raises:
        UserError: if `text` is none of these, or the target does not have the layers.
    """
    last = num_layers
    rules = {
        "eagle3": (2, last // 2, last - 3, last),
        "dflash": (2, last // 2, last - 3, last),
        "mtp": (last,),
    }
    remedy = (
        f"Give distinct ids from 0 (the embedding output) to {last} (after the last layer), "
        f"such as {last // 2},{last}, or one of {', '.join(rules)}, or the directory of a draft."
    )
    if text in rules:
        ids = rules[text]
    elif _IDS.fullmatch(text):
        ids = tuple(map(int, text.split(",")))
    elif text and os.path.exists(text):
        ids = layers_of_draft(text, num_layers)
    else:
        raise UserError("--layers", text, "is not a list of layer ids", remedy)
    selected = "" if _IDS.fullmatch(text) else _selected(ids, num_layers)
    try:
        validate_layer_ids(ids, num_layers)
    except UserError as error:
        raise UserError("--layers", text, selected + error.problem, remedy) from None
    if text in rules and list(ids) != sorted(ids):
        raise UserError("--layers", text, f"{selected}is out of order", remedy)
    return ids


def _selected(ids: Sequence[int], num_layers: int) -> str:
    return f"selects {','.join(map(str, ids))} of {num_layers} layers, so it "


def read_target(vllm_config: Any) -> ExtractionTarget:
    """Read the target from vLLM's configuration, and refuse unsupported settings.

    Args:
        vllm_config: vllm.config.VllmConfig with the speculative method `extract_hidden_states`.

    Raises:
        UserError: if the speculative method is not `extract_hidden_states`, layer ids are invalid,
            or a parallel setting is not supported.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        raise UserError(
            "speculative_config.method",
            getattr(speculative, "method", None),
            "produces no hidden states",
            (
                f'Start the server with --speculative-config \'{{"method": "{METHOD}", '
                f'"num_speculative_tokens": 1, ...}}\'.'
            ),
        )
    if speculative.disable_padded_drafter_batch:
        raise UserError(
            "speculative_config.disable_padded_drafter_batch",
            True,
            "passes sampled tokens to the drafter as lists, without the layout of the batch",
            "Leave it out.",
        )
    parallel = vllm_config.parallel_config
    refuse_parallelism(parallel)
    model = vllm_config.model_config
    layer_ids = validate_layer_ids(
        getattr(speculative.draft_model_config.hf_config, LAYER_IDS_KEY, None),
        model.get_total_num_hidden_layers(),
    )
    ascending = sorted(layer_ids)
    return ExtractionTarget(
        model=model.served_model_name if isinstance(model.served_model_name, str) else model.model,
        layer_ids=layer_ids,
        layer_order=tuple(ascending.index(layer_id) for layer_id in layer_ids),
        hidden_size=model.get_hidden_size(),
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        tensor_parallel=parallel.tensor_parallel_size,
    )


def refuse_parallelism(parallel_config: Any) -> None:
    """Refuse unsupported parallel settings.

    Args:
        parallel_config: vllm.config.ParallelConfig.

    Raises:
        UserError: if a setting in ONE_ONLY is above 1.
    """
    for option, reason in ONE_ONLY.items():
        value = getattr(parallel_config, option, 1)
        if value > 1:
            raise UserError(
                option,
                value,
                reason,
                f"Use {option}=1; scale with tensor, data and expert parallelism.",
            )


ONE_ONLY = {
    "pipeline_parallel_size": "leaves each stage with the hidden states of its own layers only",
    "prefill_context_parallel_size": "reorders the tokens of a batch across ranks",
    "decode_context_parallel_size": "has not been shown to keep the order of the rows",
}
