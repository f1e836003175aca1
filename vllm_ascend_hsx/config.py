"""Options of the connector: types, checks and descriptions."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from vllm_ascend_hsx.protocol.arguments import LARGEST, LONGEST_S, parse_size
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions
from vllm_ascend_hsx.protocol.names import printable

CONNECTOR_NAME = "AscendHiddenStatesConnector"
PLUGIN_NAME = "ascend_hsx"  # name of the entry point, used in VLLM_PLUGINS
METHOD = "extract_hidden_states"
EXTRA_CONFIG = "kv_connector_extra_config"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"

# Seconds after drain_timeout_s in which a worker writes the error files of unfinished requests.
FAILURE_REPORT_TIMEOUT_S = 5.0
# A step that waits for storage must end before the timeouts of the server. vLLM's executor waits
# 300 seconds for a step (vllm/envs.py:210, 0.23.0). Releases of vllm-ascend other than 0.26.0rc1
# raise this to 3,000 (vllm_ascend/platform.py:1276, 0.23.0). An operator that waits for a rank is
# aborted after 547 (torch_npu 2.10.0.post4, core/npu/sys_ctrl/npu_sys_ctrl.cpp:38 and 275).
LONGEST_WAIT_S = 240.0


Size = Annotated[int, BeforeValidator(parse_size)]


class HsxConfig(BaseModel):
    """The options of `kv_connector_extra_config`.

    An unknown key or a value of the wrong type raises a `UserError`; see `HsxConfig.parse`. After
    a mere warning, a misspelt option could go unnoticed until the data is used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shared_storage_path: str | None = Field(
        default=None,
        description="Directory for the files, created if missing. All workers must see it under "
        "the same path. Required unless `sink` is 'mooncake'.",
    )
    sink: Literal["file", "shard", "mooncake"] = Field(
        default="file",
        description="Where rows are stored. 'file' writes one safetensors file per request. "
        "'shard' appends requests to large tar files with an index, for millions of requests. "
        "'mooncake' puts requests into a Mooncake store, for readers on other machines.",
    )
    quantization: Literal["none", "fp8"] = Field(
        default="none",
        description="'fp8' stores rows as float8_e4m3fn with one float32 scale per token: half "
        "the bytes of bfloat16.",
    )
    shard_bytes: Size = Field(
        default=4 << 30,
        ge=1 << 20,
        le=LARGEST,
        description="Size at which a shard is sealed and a new shard begins, with `sink` "
        "'shard'. Bytes, or a size such as '4GiB'.",
    )
    mooncake: MooncakeOptions | None = Field(
        default=None, description="The Mooncake store. Required if `sink` is 'mooncake'."
    )
    extract: Literal["all", "requested", "sample"] = Field(
        default="all",
        description="Requests to extract. 'all': every request, unless kv_transfer_params have "
        "`\"hidden_states\": false`. 'requested': requests whose kv_transfer_params have "
        "`\"hidden_states\": true` or another key of this connector. 'sample': the same, plus the "
        "share `sample_rate` of all others. Requests that are not extracted use the prefix cache as "
        "usual and cost nothing.",
    )
    sample_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of API requests to extract with `extract` 'sample', such as 0.1. "
        "Requests with the same `sample_key` in kv_transfer_params are all extracted or all skipped.",
    )
    directory_budget_bytes: Annotated[int | None, BeforeValidator(parse_size)] = Field(
        default=None,
        ge=1,
        le=1 << 60,
        description="Limit on the total size of the files in shared_storage_path, with `sink` "
        "'file'; each data-parallel rank has an equal share. Without space for another file, "
        "requests are answered without extraction, and responses contain an error. Default: no "
        "limit. Bytes, or a size such as '64GiB'.",
    )
    max_files_per_request: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="Limit on the files of one API request, over all prompts and samples, per "
        "data-parallel rank. Beyond it, prompts and samples are answered without extraction, and "
        "responses contain an error: see docs/security.md.",
    )
    max_bytes_per_request: Size = Field(
        default=128 << 30,
        ge=1,
        le=1 << 60,
        description="Limit on the size of all rows of one API request, counted like "
        "`max_files_per_request`. Rows of generated tokens count as max_tokens. Bytes, or a size such as '128GiB'.",
    )
    prefix_reuse_bytes: Size = Field(
        default=4 << 30,
        ge=0,
        le=1 << 60,
        description="Limit on the size of published files that each data-parallel rank keeps "
        "open. Requests with the same first tokens copy rows from these files instead of "
        "computing them. The space of a removed open file is freed once newer files replace it, "
        "removed files hold more than a quarter of the free space, or a request finds no space. "
        "0: every request computes all rows. Bytes, or a size such as '4GiB'.",
    )
    prefix_reuse_files: int = Field(
        default=256,
        ge=0,
        le=1 << 16,
        description="Limit on the number of these open files, per data-parallel rank. Each takes "
        "a file descriptor. All are closed if a request finds no free descriptor.",
    )
    use_synchronization_lock: bool = Field(
        default=True,
        description="Hold an flock on `<file>.lock` until the file is complete. Readers can sleep "
        "on it.",
    )
    allow_custom_save_path: bool = Field(
        default=False,
        description="Let requests choose the file below shared_storage_path, with "
        "`hidden_states_path` in kv_transfer_params. Clients can take any free name there, but "
        "replace no rows: see docs/security.md.",
    )
    include_output_tokens: bool = Field(
        default=False,
        description="Also store rows of generated tokens, except the last, which is never an input "
        "of the model. Requests can override this in kv_transfer_params.",
    )
    io: Literal["buffered", "direct"] = Field(
        default="buffered",
        description="'direct' bypasses the page cache (O_DIRECT): less CPU time and memory, "
        "for local disks. 'buffered' works everywhere and is faster while the page cache has free "
        "space. Shards are always 'buffered'.",
    )
    durability: Literal["none", "fdatasync"] = Field(
        default="none",
        description="With 'fdatasync', a published file survives a power failure. With 'none', it "
        "survives a crash of the server, but maybe not of the machine.",
    )
    checksum: Literal["crc32c", "none"] = Field(
        default="crc32c",
        description="Store a checksum (CRC-32C) in the metadata of each file. "
        "`vllm_ascend_hsx.load(path, verify=True)` verifies it.",
    )
    rotation: Literal["undo", "keep"] = Field(
        default="undo",
        description="For targets with rotated weights (QuaRot). 'undo' converts rows back to the "
        "basis of the original model, and refuses a target that does not declare the rotation. "
        "'keep' stores rows as computed. The metadata key `basis` names the basis.",
    )
    check_finite: bool = Field(
        default=False, description="Fail requests with a NaN or an infinity in their rows."
    )
    file_mode: str = Field(
        default="0640",
        description="Permissions of the files in octal digits, such as '0640', regardless of "
        "the umask. Users who can read a file can also open the lock for writing.",
    )
    num_writer_threads: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Threads per worker that write rows from the pinned ring to files. Default: "
        "CPUs divided by workers, at most 8, and at least 2, or 4 with direct, fdatasync or "
        "mooncake.",
    )
    staging_slots: int = Field(
        default=2,
        ge=1,
        le=8,
        description="Number of device buffers. Each holds a rank's share of a step: "
        "max_num_batched_tokens / tensor_parallel_size rows. With two slots, a step is copied "
        "while the next step is computed. Rows beyond the slots, as of one prompt that fills a "
        "step, are copied before the step ends.",
    )
    pinned_ring_bytes: Annotated[int | None, BeforeValidator(parse_size)] = Field(
        default=None,
        ge=1 << 12,
        le=LARGEST,
        description="Pinned host memory per worker (the ring) for rows that wait to be written. "
        "Bytes, or a size such as '256MiB'. Rounded up to a power of two, because torch "
        "pins no other size. Files of prompts in the ring are written in parallel. Default "
        "(`hsx plan` shows it): 256MiB, or, if larger, 32MiB plus the part of `staging_slots` full "
        "steps that does not fit into the slots.",
    )
    slow_storage: Literal["wait", "fail"] = Field(
        default="wait",
        description="Behaviour if storage is too slow. New requests wait until the rows of admitted "
        "requests can be written in time. If rows still do not fit into the ring, or a new file "
        "is not opened in time, 'wait' delays the step, and with it every request. 'fail' fails "
        "the requests concerned.",
    )
    storage_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds that an engine step waits for storage without progress. Then requests "
        "with waiting rows fail, new requests are held back or refused until storage recovers, and "
        "all others continue. The upper limit keeps a step below the server's shortest timeout, "
        "300 seconds.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=LONGEST_S,
        description="Seconds that a stopping server may take to write computed rows.",
    )

    allow_unchecked_versions: bool = Field(
        default=False,
        description="Start even if functions of vLLM or vllm-ascend that the plugin uses differ "
        "from the checked releases. Rows may be wrong or missing.",
    )

    @property
    def close_timeout_s(self) -> float:
        """Seconds that a worker may take to stop once no step runs."""
        return self.drain_timeout_s + FAILURE_REPORT_TIMEOUT_S

    @field_validator("file_mode", mode="before")
    @classmethod
    def _require_mode(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("is a number; write the octal digits as a string, such as '0640'")
        if isinstance(value, str) and (
            not re.fullmatch("0?[0-7]{3}", value) or int(value, 8) & 0o600 != 0o600
        ):
            raise ValueError(
                "is not a mode of three octal digits with read and write permission for the "
                "owner, such as '0640'"
            )
        return value

    @field_validator("shared_storage_path", mode="before")
    @classmethod
    def _take_path(cls, value: object) -> object:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("shared_storage_path")
    @classmethod
    def _require_absolute(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_absolute():
            raise ValueError("is not an absolute path; working directories of processes may differ")
        try:
            usable = value is None or b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise ValueError("is not a path: it contains an invalid character")
        return value

    @classmethod
    def parse(cls, extra_config: dict[str, Any]) -> HsxConfig:
        """Parse `kv_connector_extra_config`.

        Raises:
            UserError: for the first unknown key, missing key or invalid value.
        """
        _require_names(cls, EXTRA_CONFIG, extra_config)
        if isinstance(mooncake := extra_config.get("mooncake"), dict):
            _require_names(MooncakeOptions, f"{EXTRA_CONFIG}.mooncake", mooncake)
        try:
            config = cls.model_validate(extra_config)
        except ValidationError as error:
            first = error.errors()[0]
            keys = [str(each) for each in first["loc"]]
            raise _explain(extra_config, keys, first["type"], first["msg"]) from None
        if config.sink == "mooncake":
            if config.mooncake is None:
                remedy = 'Set it to {"master_server_address": "host:port"}.'
                problem = "is missing, but sink is 'mooncake'"
                raise UserError(f"{EXTRA_CONFIG}.mooncake", None, problem, remedy)
        elif config.shared_storage_path is None:
            remedy = "Set it to the directory of the files."
            raise UserError(f"{EXTRA_CONFIG}.shared_storage_path", None, "is missing", remedy)
        _require_fitting(config)
        return config


def _require_fitting(config: HsxConfig) -> None:
    """Refuse options that contradict each other. Raises UserError."""
    rate, budget = config.sample_rate, config.directory_budget_bytes
    if config.extract == "sample" and rate is None:
        remedy = "Set it to the share of requests to extract, such as 0.1."
        raise UserError(
            f"{EXTRA_CONFIG}.sample_rate", None, "is missing, but extract is 'sample'", remedy
        )
    if config.extract != "sample" and rate is not None:
        problem = f"has no effect, because extract is {config.extract!r}"
        raise UserError(
            f"{EXTRA_CONFIG}.sample_rate",
            rate,
            problem,
            "Set extract to 'sample', or leave sample_rate out.",
        )
    if config.sink != "file" and budget is not None:
        remedy = "Use sink 'file', or leave directory_budget_bytes out."
        if config.sink == "shard":
            problem = (
                "is not supported with sink 'shard': a shard holds its space until the whole tar "
                "file is removed"
            )
        else:
            problem = (
                "is not supported with sink 'mooncake': the store has no directory, and evicts "
                "objects itself"
            )
        raise UserError(f"{EXTRA_CONFIG}.directory_budget_bytes", budget, problem, remedy)


def _require_names(model: type[BaseModel], option: str, values: dict[Any, Any]) -> None:
    """Refuse unprintable keys, because pydantic does not locate them. Raises UserError."""
    for key, value in values.items():
        if not isinstance(key, str) or not key.isprintable():
            option = f"{option}.{printable(str(key))}"
            raise UserError(option, value, "is not an option", _names_of(model))


def _names_of(model: type[BaseModel]) -> str:
    return f"The options are: {', '.join(model.model_fields)}."


def _explain(values: dict[str, Any], keys: list[str], kind: str, message: str) -> UserError:
    """Convert pydantic's first error. `keys` is the path to the option."""
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
        hint = f"Did you mean {near[0]!r}?" if near else _names_of(model)
        return UserError(option, values[key], "is not an option", hint)
    remedy = f"{key}: {model.model_fields[key].description}"
    if kind == "missing":
        return UserError(option, None, "is missing", remedy)
    problem = message.removeprefix("Value error, ")
    problem = problem if problem.startswith("is ") else f"cannot be used: {problem}"
    return UserError(option, values[key], problem, remedy)
