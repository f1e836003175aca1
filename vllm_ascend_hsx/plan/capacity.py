"""The plan: bytes of hidden states, staging, ring and files, and the KV cache with and without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_ascend_hsx.config import HsxConfig, HsxConfigError
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.plan.errors import PlanError
from vllm_ascend_hsx.plan.server_config import EngineOptions, Layout, step_tokens
from vllm_ascend_hsx.plan.shape import ModelShape
from vllm_ascend_hsx.plan.vllm_planner import Capacity, LayoutError, plan_layout
from vllm_ascend_hsx.plan.weights import count_parameters
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.target import validate_layer_ids

PROMPTS = 1000
_SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_REQUEST_ID = "cmpl-" + 40 * "0"  # as long as those of the API server; a file's header holds it


@dataclass(frozen=True)
class NpuMemory:
    """An NPU's memory, from which that for the KV cache is reckoned; bytes.

    Attributes:
        total: of the NPU.
        utilization: the share that vLLM may use (--gpu-memory-utilization).
        weights: on one NPU.
        reserve: activations, communication buffers and graphs; an estimate, the server measures it.
    """

    total: int
    utilization: float
    weights: int
    reserve: int

    @property
    def for_kv_cache(self) -> int:
        return int(self.total * self.utilization) - self.weights - self.reserve


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        shape: the target.
        layer_ids: residual streams that are extracted.
        engine: the server's options.
        data_parallel: replicas.
        kv_bytes: memory of an NPU for the KV cache, without extraction.
        staging_slots, ring_bytes: of our connector, per NPU.
        prompt_tokens: of a prompt whose file is reckoned.
        prefill_speed: tokens per second of the whole server.
        npu_memory: what `kv_bytes` was reckoned from, if it was.
        quantization: how rows are stored; in the memory of NPU and host they are as the model computed them.
    """

    shape: ModelShape
    layer_ids: tuple[int, ...]
    engine: EngineOptions
    data_parallel: int
    kv_bytes: int
    staging_slots: int
    ring_bytes: int
    prompt_tokens: int
    prefill_speed: float
    npu_memory: NpuMemory | None = None
    quantization: Literal["none", "fp8"] = "none"


@dataclass(frozen=True)
class LayoutPlan:
    """The KV cache with one layout.

    Attributes:
        capacity: None if a server does not start.
        kept: tokens as a share of those without extraction; 0 if it does not start.
        kept_at_least: the same when the target's collected layers are taken from the KV cache too.
        reason: why it does not start.
    """

    capacity: Capacity | None
    kept: float
    kept_at_least: float
    reason: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a request costs; bytes, and per NPU where nothing else is said.

    Attributes:
        row_bytes: hidden states of one token.
        staging_bytes: device memory of the staging slots.
        ring_bytes: pinned host memory, whole rows.
        collected_bytes: what the target holds until its forward is done: a tensor for each extracted layer below the last. It adds to the
            peak of activations that vLLM measures, with any extraction, if the peak is in the last layers; else it adds less.
        layouts: the KV cache with each layout.
        prompts_bytes: files of 1,000 prompts.
        write_bytes_per_second: of all NPUs together, at the given prefill speed.
    """

    request: Request
    row_bytes: int
    staging_bytes: int
    ring_bytes: int
    collected_bytes: int
    layouts: dict[Layout, LayoutPlan]
    prompts_bytes: int
    write_bytes_per_second: float

    @property
    def num_npus(self) -> int:
        return self.request.engine.tensor_parallel * self.request.data_parallel


def make_plan(request: Request) -> Plan:
    """Reckon a request. vllm_planner.load must have been called.

    Raises:
        PlanError: an input that cannot be used, or with which a server would not start, extraction or not.
    """
    _check(request)
    shape, engine = request.shape, request.engine
    row_bytes = len(request.layer_ids) * shape.hidden_size * shape.dtype_bytes
    staging = request.staging_slots * engine.max_num_batched_tokens * row_bytes
    collected = sum(layer_id < shape.num_layers for layer_id in request.layer_ids) * shape.hidden_size * shape.dtype_bytes
    try:
        row_format = RowFormat(request.layer_ids, shape.hidden_size, _SAFETENSORS_DTYPES[shape.dtype], shape.name, request.quantization)
    except ValueError as error:
        raise PlanError("--layers", _ids(request.layer_ids), str(error).rstrip("."), "choose others") from None
    file = FileLayout(row_format, _REQUEST_ID)
    try:
        ring_rows, _ = PinnedRing.shape_for(request.ring_bytes, row_bytes)
    except ValueError:
        problem = f"a row has {row_bytes} bytes and two must fit"
        raise PlanError("--ring", _size(request.ring_bytes), problem, f"give at least {2 * row_bytes}") from None
    per_token = file.file_size(1) - file.file_size(0)
    return Plan(
        request=request,
        row_bytes=row_bytes,
        staging_bytes=staging,
        ring_bytes=ring_rows * row_bytes,
        collected_bytes=collected * step_tokens(engine, Layout.HSX),
        layouts=_layouts(request, staging, collected),
        prompts_bytes=PROMPTS * file.file_size(request.prompt_tokens),
        write_bytes_per_second=request.prefill_speed * per_token,
    )


def memory_per_npu(
    shape: ModelShape, tensor_parallel: int, data_parallel: int, *, total: int, utilization: float, weights: int | None, reserve: int
) -> NpuMemory:
    """The memory of an NPU; the weights, if they are not given, are those of the text model in the dtype in which it is served.

    Raises:
        PlanError: nothing is left for a KV cache.
    """
    if weights is None:
        weights = count_parameters(shape).per_npu(tensor_parallel, data_parallel) * shape.dtype_bytes
    memory = NpuMemory(total, utilization, weights, reserve)
    if memory.for_kv_cache <= 0:
        raise PlanError(
            "--memory",
            _size(total),
            f"{memory.utilization:.0%} of it, less {weights / 2**30:.1f} GiB of weights and a reserve of {reserve / 2**30:.1f} GiB, leaves "
            "nothing for the KV cache",
            "raise --tp or --dp, or give --weights if the served weights are quantized",
        )
    return memory


def _layouts(request: Request, staging: int, collected: int) -> dict[Layout, LayoutPlan]:
    """The KV cache with each layout; `staging` bytes in all, `collected` bytes per token of a step."""
    engine, count = request.engine, len(request.layer_ids)

    def ask(layout: Layout, kv_bytes: int) -> Capacity:
        return plan_layout(request.shape, engine, layout, count, kv_bytes)

    memory = f"{request.kv_bytes / 2**30:.2f} GiB"
    try:
        plain = ask(Layout.PLAIN, request.kv_bytes)
    except LayoutError as error:
        if not error.memory:
            problem = f"a server with --tp {engine.tensor_parallel} does not start, with extraction or without ({error})"
            raise PlanError("MODEL", request.shape.name, problem, "try another --tp or --block-size") from None
        npu = request.npu_memory
        raise PlanError(
            "--memory" if npu else "--kv-memory",
            _size(npu.total if npu else request.kv_bytes),
            f"with {memory} per NPU for the KV cache a server does not start, with extraction or without ({error})",
            "give more memory, raise --tp, or lower --max-model-len",
        ) from None
    layouts = {Layout.PLAIN: LayoutPlan(plain, 1.0, 1.0)}
    for layout, taken in ((Layout.HSX, staging), (Layout.UPSTREAM, 0)):
        try:
            capacity = ask(layout, request.kv_bytes - taken)
        except LayoutError as error:
            if layout is Layout.HSX:
                raise PlanError(
                    "--staging-slots",
                    request.staging_slots,
                    f"{staging / 2**20:.1f} MiB of staging leave too little of {memory} for the KV cache ({error})",
                    "lower --max-num-batched-tokens or --staging-slots, or extract fewer layers",
                ) from None
            layouts[layout] = LayoutPlan(None, 0.0, 0.0, str(error))
            continue
        try:
            least = ask(layout, request.kv_bytes - taken - collected * step_tokens(engine, layout)).tokens / plain.tokens
        except LayoutError:
            least = 0.0
        layouts[layout] = LayoutPlan(capacity, capacity.tokens / plain.tokens, least)
    return layouts


def _check(request: Request) -> None:
    shape, engine = request.shape, request.engine
    tensor_parallel = engine.tensor_parallel
    if not _divides(shape, tensor_parallel):
        possible = [str(size) for size in range(1, 65) if _divides(shape, size)]
        state = ""
        if shape.delta_net is not None:
            state = f", {shape.delta_net.num_key_heads} key and {shape.delta_net.num_value_heads} value heads of GatedDeltaNet"
        raise PlanError(
            "--tp",
            tensor_parallel,
            f"does not divide {shape.name}: {shape.num_heads} attention heads, {shape.num_kv_heads} with keys and values{state}",
            f"give one of {', '.join(possible)}",
        )
    ids, last = request.layer_ids, shape.num_layers
    try:
        validate_layer_ids(ids, last)
    except HsxConfigError as error:
        remedy = f"give distinct ids from 0 (the embedding output) to {last} (after the last layer)"
        raise PlanError("--layers", _ids(ids), error.problem, remedy) from None
    try:
        HsxConfig.parse(
            {"shared_storage_path": "/", "staging_slots": request.staging_slots, "pinned_ring_bytes": request.ring_bytes}
        )
    except HsxConfigError as error:
        slots = error.option.endswith("staging_slots")
        option, value = ("--staging-slots", str(request.staging_slots)) if slots else ("--ring", _size(request.ring_bytes))
        raise PlanError(option, value, "the connector does not take it", str(error)) from None


def _divides(shape: ModelShape, size: int) -> bool:
    """What vLLM checks when it cuts the heads (config/model.py, verify_with_parallel_config; qkv and delta-net layers)."""
    if shape.num_heads % size:
        return False
    if not shape.is_latent and shape.num_kv_heads % size and size % shape.num_kv_heads:
        return False
    net = shape.delta_net
    return net is None or (net.num_key_heads % size == 0 and net.num_value_heads % size == 0)


def _size(number: int) -> str:
    if type(number) is not int:  # a cli.numbers.Size, which knows how it was typed
        return str(number)
    return f"{number / 2**30:g}GiB" if number >= 2**30 else f"{number / 2**20:g}MiB"


def _ids(layer_ids: tuple[int, ...]) -> str:
    return ",".join(map(str, layer_ids))
