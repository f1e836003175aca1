"""HsxConfig: every option of the connector, typed, validated and documented; and what is read from the engine's own settings."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from vllm_ascend_hsx.arguments import LARGEST, LONGEST_S

CONNECTOR_NAME = "AscendHiddenStatesConnector"
PLUGIN_NAME = "ascend_hsx"  # the entry point, and what VLLM_PLUGINS calls it
METHOD = "extract_hidden_states"
EXTRA_CONFIG = "kv_connector_extra_config"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"

LAST_WORDS_S = 5.0  # seconds that a worker takes at most, behind drain_timeout_s, to leave a reason in place of files that are not complete

_SIZE = re.compile(r"^\s*(\d{1,30})\s*(B|KiB|MiB|GiB)?\s*$")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class HsxConfigError(ValueError):
    """An option that cannot be used; the message names the option, its value and the remedy."""

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        self.option = option
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{CONNECTOR_NAME}: {option}={_echo(value)} {problem}. {remedy}")


def _echo(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes down no number of more than 4,300 digits
        return "<a number of thousands of digits>"


def _size(value: object) -> object:
    """Bytes, if it is a size in words; what cannot be one is pydantic's to refuse."""
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None:
            raise ValueError("is not a size; use bytes or a number with B, KiB, MiB or GiB, such as '32MiB'")
        return int(match[1]) * _UNITS[match[2]]
    return value


Size = Annotated[int, BeforeValidator(_size)]


class MooncakeOptions(BaseModel):
    """The options of `kv_connector_extra_config.mooncake`; the keys are those of hs_connectors' MooncakeStoreConfig (0.9.0)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    master_server_address: str = Field(description="host:port of `mooncake_master`.")
    metadata_server: str = Field(default="P2PHANDSHAKE", description="Mooncake's metadata server, or P2PHANDSHAKE for none.")
    local_hostname: str | None = Field(
        default=None,
        description="Name or address under which other machines reach this one; by default the address from which it reaches the master.",
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="Mooncake's transport.")
    device_name: str = Field(default="", description="Devices of the transport, such as 'mlx5_0'; empty lets Mooncake choose.")
    global_segment_size: Size = Field(
        default=4 << 30,
        ge=0,
        le=LARGEST,
        description="Bytes of this worker's memory that hold objects of the store; bytes, or a size such as '4GiB'.",
    )
    local_buffer_size: Size = Field(
        default=2 << 30,
        ge=1 << 20,
        le=LARGEST,
        description="Bytes of this worker's memory in which requests are put together before they are sent; bytes, or a size.",
    )


class HsxConfig(BaseModel):
    """The options of `kv_connector_extra_config`.

    An unknown key or a value of the wrong type is an `HsxConfigError` (see `HsxConfig.parse`), never a warning: a misspelt option
    would otherwise be found in the data, weeks later.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shared_storage_path: str | None = Field(
        default=None,
        description="Directory that receives the files. It is created if it does not exist; every worker of the server must see it under "
        "this path. Required, unless `sink` is 'mooncake'.",
    )
    sink: Literal["file", "shard", "mooncake"] = Field(
        default="file",
        description="Where rows go: 'file' makes one safetensors file per request; 'shard' appends requests to large tar files, with an "
        "index, for datasets of millions of requests; 'mooncake' puts them into a Mooncake store, for readers on other machines.",
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="'fp8' stores rows as float8_e4m3fn with one float32 scale per token: half the bytes of bfloat16.",
    )
    shard_bytes: Size = Field(
        default=4 << 30,
        ge=1 << 20,
        le=LARGEST,
        description="Size at which a shard is sealed and the next one begun; bytes, or a size such as '4GiB'. Of `sink` 'shard'.",
    )
    mooncake: MooncakeOptions | None = Field(default=None, description="The Mooncake store. Required if `sink` is 'mooncake'.")
    extract: Literal["all", "requested"] = Field(
        default="all",
        description="Which requests are extracted: 'all' but those that opt out with `\"hidden_states\": false` in their "
        "kv_transfer_params, or only those 'requested' with `\"hidden_states\": true` or another of our keys there. "
        "All others use the prefix cache and cost nothing.",
    )
    max_files_per_request: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="Files that one API request may make, with all its prompts and samples, on each data-parallel rank. "
        "Those beyond are generated but not extracted, and told so: see docs/security.md.",
    )
    max_bytes_per_request: Size = Field(
        default=128 << 30,
        ge=1,
        le=1 << 60,
        description="Bytes of rows that one API request may store, counted as `max_files_per_request`; rows of generated tokens "
        "count with the request's max_tokens. Bytes, or a size such as '128GiB'.",
    )
    use_synchronization_lock: bool = Field(
        default=True,
        description="Hold an flock on `<file>.lock` until the file is complete, so that a reader can sleep until then.",
    )
    allow_custom_save_path: bool = Field(
        default=False,
        description="Let requests choose the file that receives their rows, below shared_storage_path, with `hidden_states_path` in their "
        "kv_transfer_params. Whoever may do so may replace any file of hidden states there: see docs/security.md.",
    )
    include_output_tokens: bool = Field(
        default=False,
        description="Store rows of generated tokens too, all but the last, which is never an input of the model. "
        "A request can say otherwise in its kv_transfer_params.",
    )
    io: Literal["buffered", "direct"] = Field(
        default="buffered",
        description="'direct' writes rows past the page cache (O_DIRECT): less processor time and memory, for local disks; 'buffered' is "
        "faster where the page cache has room, and works everywhere.",
    )
    durability: Literal["none", "fdatasync"] = Field(
        default="none",
        description="'fdatasync' publishes a file only when it survives a loss of power, its name included. "
        "With 'none' a file survives the death of the server, not that of the machine.",
    )
    checksum: Literal["crc32c", "none"] = Field(
        default="crc32c",
        description="A checksum (CRC-32C) of each file, in its metadata; `vllm_ascend_hsx.load(path, verify=True)` compares it.",
    )
    check_finite: bool = Field(default=False, description="Fail the file of a request whose rows hold a NaN or an infinity.")
    file_mode: str = Field(
        default="0640",
        description="Permissions of the files in octal digits, such as '0640', whatever the umask. Who may read a file may also open its "
        "lock for writing.",
    )
    num_writer_threads: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Threads per worker that write rows from the pinned ring into files. "
        "By default the processors divided by the workers, but at most 8, and at least 2, or 4 if they wait for the disk or a store "
        "(direct, fdatasync, mooncake).",
    )
    staging_slots: int = Field(
        default=2,
        ge=1,
        le=8,
        description="Device buffers of max_num_batched_tokens rows. With two, a step is copied out while the next one computes.",
    )
    pinned_ring_bytes: Size = Field(
        default=32 << 20,
        ge=1 << 12,
        le=LARGEST,
        description="Pinned host memory per worker that rows pass through on their way to the file; bytes, or a size such as '32MiB'.",
    )
    slow_storage: Literal["wait", "fail"] = Field(
        default="wait",
        description="Who gives way to storage that is too slow. With both, new requests wait until what was admitted can be written in "
        "time. If rows have no room in pinned_ring_bytes all the same, 'wait' has the step wait, and with it every request; 'fail' fails "
        "the requests whose rows these are, and no step waits.",
    )
    storage_patience_s: float = Field(
        default=30.0,
        gt=0,
        le=LONGEST_S,
        description="Seconds that an engine step waits for storage that does nothing at all. Then the requests whose rows wait fail, "
        "new ones are refused, and all others go on, until the storage answers again.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=LONGEST_S,
        description="Seconds that a server which is stopped takes at most to write the rows that were computed.",
    )

    @property
    def close_timeout_s(self) -> float:
        """Seconds that a worker takes at most to stop once no step runs."""
        return self.drain_timeout_s + LAST_WORDS_S

    @field_validator("file_mode", mode="before")
    @classmethod
    def _require_mode(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("is a number; write the octal digits as a text, such as '0640'")
        if isinstance(value, str) and (not re.fullmatch("0?[0-7]{3}", value) or int(value, 8) & 0o600 != 0o600):
            raise ValueError("is not a mode of three octal digits that lets the server read and write its own files, such as '0640'")
        return value

    @field_validator("shared_storage_path", mode="before")
    @classmethod
    def _take_path(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("shared_storage_path")
    @classmethod
    def _require_absolute(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_absolute():
            raise ValueError("is not an absolute path; the server's processes need not share a working directory")
        return value

    @classmethod
    def parse(cls, extra_config: dict[str, Any]) -> HsxConfig:
        """Read `kv_connector_extra_config`.

        Raises:
            HsxConfigError: an unknown key, a missing one, or a value that cannot be used; the first of them.
        """
        try:
            config = cls.model_validate(extra_config)
        except ValidationError as error:
            first = error.errors()[0]
            raise _explain(extra_config, [str(each) for each in first["loc"]], first["type"], first["msg"]) from None
        if config.sink == "mooncake":
            if config.mooncake is None:
                remedy = 'Set it to {"master_server_address": "host:port"}.'
                raise HsxConfigError(f"{EXTRA_CONFIG}.mooncake", None, "is missing, and sink is 'mooncake'", remedy)
        elif config.shared_storage_path is None:
            remedy = "Set it to the directory that is to receive the files."
            raise HsxConfigError(f"{EXTRA_CONFIG}.shared_storage_path", None, "is missing", remedy)
        return config


def _explain(values: dict[str, Any], keys: list[str], kind: str, message: str) -> HsxConfigError:
    """pydantic's first error in our words; `keys` lead to the option, through `mooncake` if it is one of its."""
    model: type[BaseModel] = HsxConfig
    if keys[0] == "mooncake" and len(keys) > 1 and isinstance(values["mooncake"], dict):
        model, values = MooncakeOptions, values["mooncake"]
        key = keys[1]
        option = f"{EXTRA_CONFIG}.mooncake.{key}"
    else:
        key = keys[0]
        option = f"{EXTRA_CONFIG}.{key}"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, model.model_fields, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"The options are: {', '.join(model.model_fields)}."
        return HsxConfigError(option, values[key], "is not an option", hint)
    remedy = f"{key}: {model.model_fields[key].description}"
    if kind == "missing":
        return HsxConfigError(option, None, "is missing", remedy)
    problem = message.removeprefix("Value error, ")
    problem = problem if problem.startswith("is ") else f"cannot be used: {problem}"
    return HsxConfigError(option, values[key], problem, remedy)


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
        HsxConfigError: not a list of integers, empty, a duplicate, or an id outside [0, num_hidden_layers].
    """
    option = f"speculative_config.draft_model_config.hf_config.{LAYER_IDS_KEY}"
    example = [2, num_hidden_layers // 2, num_hidden_layers - 3, num_hidden_layers] if num_hidden_layers > 6 else [num_hidden_layers]
    remedy = (
        f"Give distinct integers from 0 (the embedding output) to {num_hidden_layers} (after the last layer, before the final norm), "
        f"for example {example}."
    )
    if not isinstance(layer_ids, list | tuple) or not layer_ids or any(not isinstance(i, int) or isinstance(i, bool) for i in layer_ids):
        raise HsxConfigError(option, layer_ids, "is not a list of layer ids", remedy)
    for index, layer_id in enumerate(layer_ids):
        if not 0 <= layer_id <= num_hidden_layers:
            raise HsxConfigError(option, layer_ids, f"has id {layer_id}, which the target does not have", remedy)
        if layer_id in layer_ids[:index]:
            raise HsxConfigError(option, layer_ids, f"has id {layer_id} twice", remedy)
    return tuple(layer_ids)


def read_target(vllm_config: Any) -> ExtractionTarget:
    """Read what is to be extracted from vLLM's configuration, and refuse what cannot be extracted correctly.

    Args:
        vllm_config: vllm.config.VllmConfig with the speculative method `extract_hidden_states`.

    Raises:
        HsxConfigError: another speculative method, unusable layer ids, or a parallel or role setting that is not supported.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        raise HsxConfigError(
            "speculative_config.method",
            getattr(speculative, "method", None),
            "produces no hidden states",
            f'Start the server with --speculative-config \'{{"method": "{METHOD}", "num_speculative_tokens": 1, ...}}\'.',
        )
    if speculative.disable_padded_drafter_batch:
        raise HsxConfigError(
            "speculative_config.disable_padded_drafter_batch",
            True,
            "passes sampled tokens to the drafter as lists, without the layout of the batch",
            "Leave it out.",
        )
    parallel = vllm_config.parallel_config
    for option, reason in ONE_ONLY.items():
        value = getattr(parallel, option, 1)
        if value > 1:
            raise HsxConfigError(option, value, reason, f"Use {option}=1; scale with tensor, data and expert parallelism.")
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


def require_producer(kv_role: str | None) -> None:
    """Refuse a role that would have the engine load from us.

    Raises:
        HsxConfigError: any role but `kv_producer`.
    """
    if kv_role != "kv_producer":
        raise HsxConfigError(
            "kv_transfer_config.kv_role",
            kv_role,
            "makes the engine expect KV data from a connector that only writes hidden states",
            'Set "kv_role": "kv_producer".',
        )
