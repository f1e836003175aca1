"""HsxConfig: every option of the connector, typed, validated and documented."""

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

# Seconds, after drain_timeout_s, in which a worker writes the error files of unfinished requests.
FAILURE_REPORT_TIMEOUT_S = 5.0
# A step that waits for storage must end before the server's own timeouts. vLLM's executor waits
# 300 seconds for a step (vllm/envs.py:210, 0.23.0). Releases of vllm-ascend other than 0.26.0rc1
# make it 3,000 (vllm_ascend/platform.py:1276, 0.23.0). An operator that waits for a rank is aborted
# after 547 (torch_npu 2.10.0.post4, core/npu/sys_ctrl/npu_sys_ctrl.cpp:38 and 275).
LONGEST_WAIT_S = 240.0


Size = Annotated[int, BeforeValidator(parse_size)]


class HsxConfig(BaseModel):
    """The options of `kv_connector_extra_config`.

    An unknown key or a value of the wrong type is a `UserError` (see `HsxConfig.parse`), not a
    warning: otherwise a misspelt option would be noticed weeks later, in the data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shared_storage_path: str | None = Field(
        default=None,
        description="Directory of the files, created if missing. All workers must see it under "
        "this path. Required unless `sink` is 'mooncake'.",
    )
    sink: Literal["file", "shard", "mooncake"] = Field(
        default="file",
        description="Where rows go. 'file' writes one safetensors file per request. 'shard' "
        "appends requests to large tar files with an index, for millions of requests. "
        "'mooncake' puts them into a Mooncake store, for readers on other machines.",
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
        description="Size at which a shard is sealed and the next one begins, with `sink` "
        "'shard'. Bytes, or a size such as '4GiB'.",
    )
    mooncake: MooncakeOptions | None = Field(
        default=None, description="The Mooncake store. Required if `sink` is 'mooncake'."
    )
    extract: Literal["all", "requested", "sample"] = Field(
        default="all",
        description="Which requests are extracted. 'all': all except those with "
        "`\"hidden_states\": false` in their kv_transfer_params. 'requested': only those with "
        "`\"hidden_states\": true` or another key of this connector there. 'sample': also the "
        "share "
        "`sample_rate` of all others. Other requests use the prefix cache and cost nothing.",
    )
    sample_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of API requests that are extracted with `extract` 'sample', such as 0.1. "
        "Requests with one `sample_key` in their kv_transfer_params are extracted all or not at "
        "all.",
    )
    directory_budget_bytes: Annotated[int | None, BeforeValidator(parse_size)] = Field(
        default=None,
        ge=1,
        le=1 << 60,
        description="Most bytes of files in shared_storage_path, with `sink` 'file'. While there is no "
        "room, requests are generated without extraction, and their responses have an error. Each "
        "data-parallel rank has an equal share. Default: no limit. Bytes, or a size such as "
        "'64GiB'.",
    )
    max_files_per_request: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="Most files of one API request, with all its prompts and samples, on each "
        "data-parallel rank. Prompts and samples beyond this are generated without extraction, "
        "and their responses have an error: see docs/security.md.",
    )
    max_bytes_per_request: Size = Field(
        default=128 << 30,
        ge=1,
        le=1 << 60,
        description="Most bytes of rows of one API request, counted like "
        "`max_files_per_request`. Rows of generated tokens count with the request's max_tokens. "
        "Bytes, or a size such as '128GiB'.",
    )
    prefix_reuse_bytes: Size = Field(
        default=4 << 30,
        ge=0,
        le=1 << 60,
        description="Most bytes of published files that each data-parallel rank keeps open, so that "
        "requests with the same first tokens copy these rows and read the prefix cache instead of "
        "computing them. The space of a kept file that a consumer removes is freed when newer "
        "files take its place, when such files hold a quarter of what is free, or when there is no "
        "space for a request. 0: each request computes all of its rows. Bytes, or a size such as "
        "'4GiB'.",
    )
    prefix_reuse_files: int = Field(
        default=256,
        ge=0,
        le=1 << 16,
        description="Most files that are kept open for this, on each data-parallel rank. Each takes "
        "a file descriptor; all are closed when a request finds none.",
    )
    use_synchronization_lock: bool = Field(
        default=True,
        description="Hold an flock on `<file>.lock` until the file is complete, so that "
        "readers can sleep until then.",
    )
    allow_custom_save_path: bool = Field(
        default=False,
        description="Let requests choose their file below shared_storage_path, with "
        "`hidden_states_path` in their kv_transfer_params. Such a client can replace any file "
        "of hidden states there: see docs/security.md.",
    )
    include_output_tokens: bool = Field(
        default=False,
        description="Also store rows of generated tokens, except the last one, which is never "
        "an input of the model. Requests can override this in kv_transfer_params.",
    )
    io: Literal["buffered", "direct"] = Field(
        default="buffered",
        description="'direct' bypasses the page cache (O_DIRECT): less CPU time and memory, "
        "for local disks. 'buffered' is faster while the page cache has room, and works "
        "everywhere. Shards are always 'buffered'.",
    )
    durability: Literal["none", "fdatasync"] = Field(
        default="none",
        description="'fdatasync' publishes a file only when it and its name survive a power "
        "failure. With 'none' a file survives the death of the server, but not of the machine.",
    )
    checksum: Literal["crc32c", "none"] = Field(
        default="crc32c",
        description="Store a checksum (CRC-32C) of each file in its metadata. "
        "`vllm_ascend_hsx.load(path, verify=True)` compares it.",
    )
    rotation: Literal["undo", "keep"] = Field(
        default="undo",
        description="Rows of a target whose weights are rotated (QuaRot): 'undo' turns them back "
        "into the model's own basis, 'keep' stores them as the server computes them. The "
        "metadata `basis` of a file says which. With 'undo' a target is refused if it is rotated "
        "and "
        "does not say so. Other targets are not concerned.",
    )
    check_finite: bool = Field(
        default=False, description="Fail requests whose rows contain a NaN or an infinity."
    )
    file_mode: str = Field(
        default="0640",
        description="Permissions of the files in octal digits, such as '0640', regardless of "
        "the umask. Users who can read a file can also open its lock for writing.",
    )
    num_writer_threads: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Threads per worker that write rows from the pinned ring to files. "
        "Default: processors divided by workers, at most 8, and at least 2, or 4 if they wait "
        "for a disk or a store (direct, fdatasync, mooncake).",
    )
    staging_slots: int = Field(
        default=2,
        ge=1,
        le=8,
        description="Device buffers, each with a rank's share of a step: max_num_batched_tokens "
        "/ tensor_parallel_size rows. With two, a step is copied while the next one computes. A "
        "prompt that fills a step belongs to one rank; rows that its buffers do not hold are "
        "copied before the step ends.",
    )
    pinned_ring_bytes: Annotated[int | None, BeforeValidator(parse_size)] = Field(
        default=None,
        ge=1 << 12,
        le=LARGEST,
        description="Pinned host memory per worker for rows on their way to the file. Bytes, "
        "or a size such as '256MiB'. Other sizes are rounded up to a power of two, as torch pins "
        "them. If it holds more than one prompt, files are written side by side. Default: 256MiB "
        "or, if that is more, 32MiB and the rows by which staging_slots buffers of whole steps "
        "would be larger than those of a rank; `hsx plan` shows it.",
    )
    slow_storage: Literal["wait", "fail"] = Field(
        default="wait",
        description="What happens if storage is too slow. In both cases new requests wait "
        "until admitted ones can be written in time. If rows still do not fit into "
        "pinned_ring_bytes, or a new file is not made in time, 'wait' makes the step wait, and "
        "with it every request; 'fail' fails the requests of these rows, and no step waits.",
    )
    storage_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds that an engine step waits for storage that makes no progress. "
        "Then requests whose rows wait fail, and new ones are held back or refused until it "
        "recovers. All others continue. The limit keeps a step shorter than the server's own "
        "timeouts, the first of which is 300 seconds.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=LONGEST_S,
        description="Most seconds that a stopping server takes to write computed rows.",
    )

    allow_unchecked_versions: bool = Field(
        default=False,
        description="Start although vLLM or vllm-ascend differs from the checked releases in "
        "functions that this plugin relies on. Rows may be wrong or missing.",
    )

    @property
    def close_timeout_s(self) -> float:
        """Most seconds that a worker takes to stop once no step runs."""
        return self.drain_timeout_s + FAILURE_REPORT_TIMEOUT_S

    @field_validator("file_mode", mode="before")
    @classmethod
    def _require_mode(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("is a number; write the octal digits as a text, such as '0640'")
        if isinstance(value, str) and (
            not re.fullmatch("0?[0-7]{3}", value) or int(value, 8) & 0o600 != 0o600
        ):
            raise ValueError(
                "is not a mode of three octal digits that lets the server read and write its own "
                "files, such as '0640'"
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
            raise ValueError("is not a path: it contains a character that paths cannot have")
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
                problem = "is missing, and sink is 'mooncake'"
                raise UserError(f"{EXTRA_CONFIG}.mooncake", None, problem, remedy)
        elif config.shared_storage_path is None:
            remedy = "Set it to the directory of the files."
            raise UserError(f"{EXTRA_CONFIG}.shared_storage_path", None, "is missing", remedy)
        _require_fitting(config)
        return config


def _require_fitting(config: HsxConfig) -> None:
    """Refuse options that need another one. Raises UserError."""
    rate, budget = config.sample_rate, config.directory_budget_bytes
    if config.extract == "sample" and rate is None:
        remedy = "Set it to the share of requests to extract, such as 0.1."
        raise UserError(
            f"{EXTRA_CONFIG}.sample_rate", None, "is missing, and extract is 'sample'", remedy
        )
    if config.extract != "sample" and rate is not None:
        problem = f"has no effect, because extract is {config.extract!r}"
        raise UserError(
            f"{EXTRA_CONFIG}.sample_rate",
            rate,
            problem,
            "Set extract to 'sample', or leave it out.",
        )
    if config.sink != "file" and budget is not None:
        remedy = "Use sink 'file', or leave it out."
        if config.sink == "shard":
            problem = (
                "cannot be kept with sink 'shard': a shard takes its space until the whole tar "
                "file is removed"
            )
        else:
            problem = (
                "cannot be kept with sink 'mooncake': the store has no directory, and evicts by "
                "itself"
            )
        raise UserError(f"{EXTRA_CONFIG}.directory_budget_bytes", budget, problem, remedy)


def _require_names(model: type[BaseModel], option: str, values: dict[Any, Any]) -> None:
    """Refuse unprintable keys, whose place pydantic does not report. Raises UserError."""
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
