"""Compute a plan: size of rows, staging, ring and files, and the remaining KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.drafter.shapes import ring_bytes, slot_rows, turn_back_bytes
from vllm_ascend_hsx.plan.shape import ModelShape
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.target import validate_layer_ids

_SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_REQUEST_ID = "cmpl-" + 40 * "0"  # in the header; as long as ids of the API server


@dataclass(frozen=True)
class Request:
    """Input of a plan.

    Attributes:
        shape: the target.
        layer_ids: residual streams to extract.
        tensor_parallel, data_parallel: parallel sizes of the server.
        max_num_batched_tokens: most tokens of one step.
        kv_bytes: memory of an NPU for the KV cache, without extraction.
        staging_slots, ring_bytes: options of the connector, per NPU; None for the default ring.
        prompts: number of prompts, for the size of all files.
        prompt_tokens: mean length of a prompt.
        prefill_speed: tokens per second of the whole server.
        quantization: format of stored rows. Rows in memory are never quantized.
        rotated: whether the weights are rotated (QuaRot), and rows are turned back.
    """

    shape: ModelShape
    layer_ids: tuple[int, ...]
    tensor_parallel: int
    data_parallel: int
    max_num_batched_tokens: int
    kv_bytes: int
    staging_slots: int
    ring_bytes: int | None
    prompts: int
    prompt_tokens: int
    prefill_speed: float
    quantization: Literal["none", "fp8"] = "none"
    rotated: bool = False


@dataclass(frozen=True)
class Plan:
    """Costs of extraction, in bytes per NPU unless stated otherwise.

    With tensor parallelism, each rank holds whole rows of the requests that it owns: a share of a
    step.

    Attributes:
        request: the input.
        row_bytes: hidden states of one token.
        slot_rows: rows of a staging slot.
        staging_bytes: device memory of the staging slots.
        waiting_bytes: if one prompt fills a step, the rows that do not fit into the slots of the
            owner. The step ends once these rows are copied to the host.
        turn_back_bytes: device memory of the rotation and its buffers; 0 without a rotation.
        turn_back_flops: floating-point operations for the rows of a token, on each NPU.
        collected_bytes: memory that the target holds until the end of the forward pass: a tensor
            for each extracted layer except the last. Any kind of extraction adds this to the
            activation peak that vLLM measures: in full if the peak is in the last layers, else
            less.
        ring_bytes: pinned host memory.
        kept: share of the KV cache that remains.
        kept_at_least: the same, if `collected_bytes` is taken from the KV cache in full.
        stored_bytes: bytes of one token in a file: the stored hidden states and the token id.
        prompts_bytes: size of the files of all prompts.
        prompts_seconds: time for all prompts, at the given prefill speed.
        write_bytes_per_second: write rate of all NPUs, at the given prefill speed.
    """

    request: Request
    row_bytes: int
    slot_rows: int
    staging_bytes: int
    waiting_bytes: int
    turn_back_bytes: int
    turn_back_flops: int
    collected_bytes: int
    ring_bytes: int
    kept: float
    kept_at_least: float
    stored_bytes: int
    prompts_bytes: int
    prompts_seconds: float
    write_bytes_per_second: float

    @property
    def num_npus(self) -> int:
        return self.request.tensor_parallel * self.request.data_parallel


def make_plan(request: Request) -> Plan:
    """Compute the plan of a request.

    Raises:
        UserError: if an input is invalid.
    """
    shape, ids, step = request.shape, request.layer_ids, request.max_num_batched_tokens
    file = FileLayout(_row_format(request), _REQUEST_ID)
    row_bytes, stored_bytes = len(ids) * shape.layer_bytes, file.file_size(1) - file.file_size(0)
    rows = slot_rows(step, request.tensor_parallel)
    staging = request.staging_slots * rows * row_bytes
    collected = sum(layer_id < shape.num_layers for layer_id in ids) * step * shape.layer_bytes
    turn_back = turn_back_bytes(shape.hidden_size, rows) if request.rotated else 0
    taken = staging + turn_back
    if taken >= request.kv_bytes:
        rotation = " and the rotation" if request.rotated else ""
        problem = f"is not more than the {taken / 2**20:,.1f} MiB of the staging slots{rotation}"
        remedy = (
            "Raise it, lower --max-num-batched-tokens or --staging-slots, or extract fewer layers."
        )
        raise UserError("--kv-memory", request.kv_bytes, problem, remedy)
    return Plan(
        request=request,
        row_bytes=row_bytes,
        slot_rows=rows,
        staging_bytes=staging,
        waiting_bytes=max(0, step * row_bytes - staging),
        turn_back_bytes=turn_back,
        turn_back_flops=2 * len(ids) * shape.hidden_size**2 if request.rotated else 0,
        collected_bytes=collected,
        ring_bytes=_pinned_ring(request, row_bytes),
        kept=1 - taken / request.kv_bytes,
        kept_at_least=max(0.0, 1 - (taken + collected) / request.kv_bytes),
        stored_bytes=stored_bytes,
        prompts_bytes=request.prompts * file.file_size(request.prompt_tokens),
        prompts_seconds=request.prompts * request.prompt_tokens / request.prefill_speed,
        write_bytes_per_second=request.prefill_speed * stored_bytes,
    )


def _row_format(request: Request) -> RowFormat:
    shape, ids = request.shape, request.layer_ids
    shown = ",".join(map(str, ids))
    try:
        validate_layer_ids(ids, shape.num_layers)
    except UserError as error:
        remedy = (
            f"Give distinct ids from 0 (the embedding output) to {shape.num_layers} (after the "
            "last layer)."
        )
        raise UserError("--layers", shown, error.problem, remedy) from None
    try:
        return RowFormat(
            ids,
            shape.hidden_size,
            _SAFETENSORS_DTYPES[shape.dtype],
            shape.name,
            request.quantization,
        )
    except ValueError as error:
        raise UserError(
            "--layers", shown, f"cannot be stored: {str(error).rstrip('.')}", "Choose other layers."
        ) from None


def _pinned_ring(request: Request, row_bytes: int) -> int:
    given = request.ring_bytes
    try:
        HsxConfig.parse(
            {"shared_storage_path": "/", "pinned_ring_bytes": None if given is None else int(given)}
        )
    except UserError as error:
        raise UserError("--ring", given, error.problem, error.remedy) from None
    if given is not None and given < 2 * row_bytes:
        problem = f"does not hold two rows of {row_bytes} bytes"
        raise UserError("--ring", given, problem, f"Give at least {2 * row_bytes}.")
    return ring_bytes(
        given,
        num_slots=request.staging_slots,
        max_tokens=request.max_num_batched_tokens,
        tensor_parallel=request.tensor_parallel,
        row_bytes=row_bytes,
    )
