"""Parts of the runner, the batch and the connector that proposer and layer use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23, IncompatibleVersionError

RUNNER = "vllm_ascend.worker.model_runner_v1"
# Methods that HsxProposer calls on the runner; vllm-ascend's model runner V2 has neither.
RUNNER_HOOKS = ("_pad_for_sequence_parallelism", "_sync_metadata_across_dp")

_PAD, _SYNC = (f"NPUModelRunner.{name}" for name in RUNNER_HOOKS)
uses(
    RUNNER,
    _PAD,
    SINCE_0_23,
    takes="self num_scheduled_tokens",
    why="rows are right with sequence parallelism",
)
_KEYWORDS = "num_tokens is_draft_model cudagraph_mode"
uses(
    RUNNER,
    _SYNC,
    SINCE_0_23,
    takes="self",
    keywords=_KEYWORDS,
    why="data-parallel ranks stay in step",
)
_RANK = "get_tensor_model_parallel_rank"
uses("vllm.distributed", _RANK, SINCE_0_23, takes="", why="one rank writes each row")


def require_runner_hooks(runner: Any) -> None:
    """Refuse a runner without the two methods that keep DP ranks in step.

    Reason: `_pad_for_sequence_parallelism` (MR:2876) and `_sync_metadata_across_dp` (MR:673) are
    private methods of the v1 NPUModelRunner.

    Raises:
        IncompatibleVersionError: no runner, or a runner without a method. It is raised at start-up,
            before an AttributeError in the first step.
    """
    if runner is None:
        raise IncompatibleVersionError("vllm-ascend created its proposer without a model runner")
    missing = [name for name in RUNNER_HOOKS if not callable(getattr(runner, name, None))]
    if missing:
        raise IncompatibleVersionError(
            f"the model runner {type(runner).__name__} has no {' and no '.join(missing)} "
            "(model runner V2 is supported from vllm-ascend 0.30 on: unset "
            "VLLM_USE_V2_MODEL_RUNNER)"
        )


class BatchRow(NamedTuple):
    """Rows of one request in the runner's current batch."""

    request_id: str
    first: int
    num_rows: int
    row: int


def batch_layout(runner: Any, query_start_loc: torch.Tensor) -> list[BatchRow]:
    """Return the requests in the runner's current batch, in batch order.

    Reason: `propose` receives tensors without request ids. `input_batch`
    (vllm/v1/worker/gpu_input_batch.py) holds the ids and the position of each request's first
    token. Without draft tokens `num_computed_tokens_cpu` is exact also with asynchronous
    scheduling.

    Args:
        runner: the NPUModelRunner.
        query_start_loc: int32 [requests + 1] on the host; first row of each request.
    """
    input_batch = runner.input_batch
    positions = input_batch.num_computed_tokens_cpu[
        : len(input_batch.req_ids)
    ]  # int32 [max requests]
    return _batch_rows(input_batch.req_ids, positions.tolist(), query_start_loc.tolist())


def batch_layout_v2(input_batch: Any) -> list[BatchRow]:
    """Return the requests in a batch of model runner V2, in batch order.

    Without draft tokens `num_computed_tokens_np` is exact also with asynchronous scheduling.

    Args:
        input_batch: vllm.v1.worker.gpu.input_batch.InputBatch (input_batch.py:44, 0.30).
    """
    return _batch_rows(
        input_batch.req_ids,
        input_batch.num_computed_tokens_np.tolist(),
        input_batch.query_start_loc_np.tolist(),
    )


def _batch_rows(
    request_ids: Sequence[str], positions: Sequence[int], starts: Sequence[int]
) -> list[BatchRow]:
    """Return the requests from the position of each first token and from each first row."""
    count = len(request_ids)  # the runners' arrays may be padded
    return [
        BatchRow(request_id, first, end - start, start)
        for request_id, first, start, end in zip(
            request_ids, positions[:count], starts[:count], starts[1 : count + 1], strict=True
        )
    ]


def connector_hand_over() -> Callable[[str, torch.Tensor, Any], None]:
    """Return a function (layer name, KV cache, metadata) that calls `save_kv_layer`.

    It repeats vLLM's code after each attention layer
    (model_executor/layers/attention/kv_transfer_utils.py:22), and also reaches a connector inside
    MultiConnector.

    Reason: vLLM's decorator finds layer and metadata in a forward context. Entering one takes 40 µs
    of each step. With DP>1 and a MoE target it also posts a [4, dp] collective unless the ranks'
    token counts are passed (vllm/forward_context.py:280).
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    def hand_over(layer_name: str, kv_cache: torch.Tensor, metadata: Any) -> None:
        if (
            has_kv_transfer_group()
            and (connector := get_kv_transfer_group()).has_connector_metadata()
        ):
            connector.save_kv_layer(layer_name, kv_cache, metadata)

    return hand_over


def register_layer(vllm_config: Any, name: str, layer: Any) -> None:
    """Register an attention layer with vLLM.

    Reason: vLLM's attention layers register themselves in `static_forward_context`. The forward
    context, the connector's hook and the drafter look layers up there.

    Raises:
        ValueError: if the name is taken.
    """
    layers = vllm_config.compilation_config.static_forward_context
    if name in layers:
        raise ValueError(f"a layer named {name!r} exists already")
    layers[name] = layer


def find_layers(vllm_config: Any, layer_type: type) -> dict[str, Any]:
    """Return the registered layers of a type by name.

    Reason: `static_forward_context` is vLLM's registry of attention layers.
    """
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if isinstance(layer, layer_type)}


def tensor_parallel_rank() -> int:
    """Return this worker's rank among the ranks that hold the same rows."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank
