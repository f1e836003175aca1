"""HsxConfig: every option of the connector, typed, validated and documented; and what is read from the engine's own settings."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from vllm_ascend_hsx.protocol.arguments import LARGEST, LONGEST_S, parse_size
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake_store import MooncakeOptions
from vllm_ascend_hsx.protocol.names import printable

CONNECTOR_NAME = "AscendHiddenStatesConnector"
PLUGIN_NAME = "ascend_hsx"  # the entry point, and what VLLM_PLUGINS calls it
METHOD = "extract_hidden_states"
EXTRA_CONFIG = "kv_connector_extra_config"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"

UPSTREAM_CONNECTOR = "ExampleHiddenStatesConnector"
# What VLLM_PLUGINS chooses from (vllm/plugins/__init__.py, 0.23.0).
_PLUGIN_GROUPS = tuple(f"vllm.{kind}_plugins" for kind in ("platform", "general", "io_processor", "stat_logger"))
LAST_WORDS_S = 5.0  # seconds that a worker takes at most, behind drain_timeout_s, to leave a reason in place of files that are not complete

Size = Annotated[int, BeforeValidator(parse_size)]


class HsxConfig(BaseModel):
    """The options of `kv_connector_extra_config`.

    An unknown key or a value of the wrong type is an `UserError` (see `HsxConfig.parse`), never a warning: a misspelt option
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
        try:
            usable = value is None or b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise ValueError("is no path: it has a character that none can have")
        return value

    @classmethod
    def parse(cls, extra_config: dict[str, Any]) -> HsxConfig:
        """Read `kv_connector_extra_config`.

        Raises:
            UserError: an unknown key, a missing one, or a value that cannot be used; the first of them.
        """
        _require_names(cls, EXTRA_CONFIG, extra_config)
        if isinstance(mooncake := extra_config.get("mooncake"), dict):
            _require_names(MooncakeOptions, f"{EXTRA_CONFIG}.mooncake", mooncake)
        try:
            config = cls.model_validate(extra_config)
        except ValidationError as error:
            first = error.errors()[0]
            raise _explain(extra_config, [str(each) for each in first["loc"]], first["type"], first["msg"]) from None
        if config.sink == "mooncake":
            if config.mooncake is None:
                remedy = 'Set it to {"master_server_address": "host:port"}.'
                raise UserError(f"{EXTRA_CONFIG}.mooncake", None, "is missing, and sink is 'mooncake'", remedy)
        elif config.shared_storage_path is None:
            remedy = "Set it to the directory that is to receive the files."
            raise UserError(f"{EXTRA_CONFIG}.shared_storage_path", None, "is missing", remedy)
        return config


def _require_names(model: type[BaseModel], option: str, values: dict[Any, Any]) -> None:
    """Refuse a key that is no printable text, of which pydantic does not say where it is. Raises UserError."""
    for key, value in values.items():
        if not isinstance(key, str) or not key.isprintable():
            raise UserError(f"{option}.{printable(str(key))}", value, "is not an option", _names_of(model))


def _names_of(model: type[BaseModel]) -> str:
    return f"The options are: {', '.join(model.model_fields)}."


def _explain(values: dict[str, Any], keys: list[str], kind: str, message: str) -> UserError:
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
        hint = f"Did you mean {near[0]!r}?" if near else _names_of(model)
        return UserError(option, values[key], "is not an option", hint)
    remedy = f"{key}: {model.model_fields[key].description}"
    if kind == "missing":
        return UserError(option, None, "is missing", remedy)
    problem = message.removeprefix("Value error, ")
    problem = problem if problem.startswith("is ") else f"cannot be used: {problem}"
    return UserError(option, values[key], problem, remedy)


def read_options(transfer: Any) -> HsxConfig:
    """Read and check the options of our connector, alone or inside MultiConnector.

    Args:
        transfer: vllm.config.KVTransferConfig, or None.

    Raises:
        UserError: it is not there, or has a role or an option that cannot be used.
    """
    role, options = _connector_entry(transfer)
    config = HsxConfig.parse(options)
    require_producer(role)
    return config


def _connector_entry(transfer: Any) -> tuple[str | None, dict[str, Any]]:
    if transfer is not None and transfer.kv_connector == CONNECTOR_NAME:
        return transfer.kv_role, transfer.kv_connector_extra_config
    if transfer is not None and transfer.kv_connector == "MultiConnector":
        children = {child.get("kv_connector"): child for child in transfer.kv_connector_extra_config.get("connectors", ())}
        if CONNECTOR_NAME in children:
            if UPSTREAM_CONNECTOR in children:
                raise UserError(
                    f"kv_transfer_config.{EXTRA_CONFIG}.connectors",
                    UPSTREAM_CONNECTOR,
                    f"reads hidden states from the KV cache, where {CONNECTOR_NAME} keeps none",
                    "Leave it out.",
                )
            child = children[CONNECTOR_NAME]
            return child.get("kv_role", transfer.kv_role), child.get("kv_connector_extra_config", {})
    raise UserError(
        "kv_transfer_config.kv_connector",
        getattr(transfer, "kv_connector", None),
        f"does not take the hidden states that the speculative method extracts when the plugin {PLUGIN_NAME} is loaded",
        f'Start the server with --kv-transfer-config \'{{"kv_connector": "{CONNECTOR_NAME}", "kv_role": "kv_producer", ...}}\'; '
        f"or, for another connector of hidden states, without this plugin: VLLM_PLUGINS={plugins_without_ours()} vllm serve ...",
    )


def plugins_without_ours(environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of VLLM_PLUGINS that leaves our plugin out and keeps every other one that is loaded now."""
    allowed = environ.get("VLLM_PLUGINS")
    names = [point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group) if point.name != PLUGIN_NAME]
    return ",".join(name for name in dict.fromkeys(names) if allowed is None or name in allowed.split(","))


def require_producer(kv_role: str | None) -> None:
    """Refuse a role that would have the engine load from us.

    Raises:
        UserError: any role but `kv_producer`.
    """
    if kv_role != "kv_producer":
        raise UserError(
            "kv_transfer_config.kv_role",
            kv_role,
            "makes the engine expect KV data from a connector that only writes hidden states",
            'Set "kv_role": "kv_producer".',
        )
