"""A request in a Mooncake store: three keys, the packed tensors, and a manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_ascend_hsx.protocol.format import (
    DTYPE_BYTES,
    FORMAT_VERSION,
    HIDDEN_STATES,
    PRODUCER,
    SCALES,
    TOKEN_IDS,
    FormatError,
    Header,
    TensorInfo,
    check_metadata,
    tensor_info,
)
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.protocol.strict_json import is_count, parse

# As in hs_connectors' manifests (0.9.0, mooncake_store.py:26 and 28). MooncakeTransfer there
# compares them.
TRANSFER_VERSION = 1
ALIGNMENT = 64

HANDLE_KEY = "handle"
# Appended to a handle. No handle contains ':', so keys of two requests never collide.
ERROR_KEY_SUFFIX = ":error"
MANIFEST_KEY_SUFFIX = ":manifest"

_TORCH_NAMES = {
    "BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32", "I64": "torch.int64", "F8_E4M3": "torch.float8_e4m3fn",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _TORCH_NAMES.items()}


def handle_of(request_id: str) -> str:
    """Return the key of a request's data: the name of its file without the suffix."""
    return file_name(request_id).removesuffix(DATA_SUFFIX)


def keys_of(handle: str) -> list[str]:
    """Return every key that a request can have."""
    return [handle, handle + ERROR_KEY_SUFFIX, handle + MANIFEST_KEY_SUFFIX]


@dataclass(frozen=True)
class PackedLayout:
    """Offsets of a request's tensors in the object.

    Attributes:
        tensors: {name: {"shape", "dtype" (torch's name), "nbytes", "offset"}}. Each tensor begins
            at a multiple of 64 bytes.
        size: bytes of the object, a multiple of 64.
    """

    tensors: dict[str, dict[str, Any]]
    size: int

    def offset(self, name: str) -> int:
        offset: int = self.tensors[name]["offset"]
        return offset

    def end(self, name: str) -> int:
        nbytes: int = self.tensors[name]["nbytes"]
        return self.offset(name) + nbytes


def packed_layout(row_format: RowFormat, tokens: int) -> PackedLayout:
    """Return the layout of `tokens` tokens: rows at byte 0, then ids, then scales if quantised."""
    tensors: dict[str, dict[str, Any]] = {}
    end = 0
    parts = [
        (HIDDEN_STATES, row_format.stored_dtype, [tokens, *row_format.row_shape]),
        (TOKEN_IDS, "I64", [tokens]),
    ]
    if row_format.is_quantized:
        parts.append((SCALES, "F32", [tokens, 1, 1]))
    for name, dtype, shape in parts:
        nbytes = prod(shape) * DTYPE_BYTES[dtype]
        tensors[name] = {
            "shape": shape,
            "dtype": _TORCH_NAMES[dtype],
            "nbytes": nbytes,
            "offset": end,
        }
        end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT
    return PackedLayout(tensors, end)


def transfer_params(
    handle: str, row_format: RowFormat, tokens: int, include_output: bool
) -> dict[str, Any]:
    """Return a response's `kv_transfer_params`, in the form of hs_connectors' manifest."""
    layout = packed_layout(row_format, tokens)
    return {
        HANDLE_KEY: handle,
        "version": TRANSFER_VERSION,
        "tensors": layout.tensors,
        "metadata": {
            "num_tokens": tokens,
            "total_aligned_bytes": layout.size,
            "extract_mode": "all" if include_output else "prompt_only",
        },
    }


def manifest(layout: PackedLayout, metadata: dict[str, str]) -> bytes:
    """Return the object for `<handle>:manifest`.

    Args:
        layout: layout of the object under the handle.
        metadata: as in a file. `Digest.stamp` fills in a blank checksum.
    """
    value = {
        "format_version": FORMAT_VERSION,
        "producer": PRODUCER,
        "tensors": layout.tensors,
        "metadata": metadata,
    }
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def read_manifest(text: bytes) -> Header:
    """Parse a manifest. Offsets of tensors are counted in the object. Raises FormatError."""
    try:
        value = parse(text)
        if not isinstance(value, dict) or not isinstance(value.get("tensors"), dict):
            raise ValueError("it names no tensors")
        return Header(
            check_metadata(value.get("metadata")),
            {name: _tensor_info(each) for name, each in value["tensors"].items()},
            text,
        )
    except ValueError as error:
        raise FormatError(f"its manifest is invalid: {error}") from error


def _tensor_info(entry: object) -> TensorInfo:
    if not isinstance(entry, dict):
        raise ValueError("a tensor is not an object")
    begin, size, dtype = entry.get("offset"), entry.get("nbytes"), entry.get("dtype")
    if not is_count(begin) or not is_count(size):
        raise ValueError("a tensor has no offset or size")
    return tensor_info(
        _DTYPES.get(dtype) if isinstance(dtype, str) else None,
        entry.get("shape"),
        begin,
        begin + size,
    )


def error_marker(reason: str) -> bytes:
    """Return the object for `<handle>:error`. hs_connectors' reader reads the key `error`."""
    return json.dumps({"error": reason, "producer": PRODUCER}).encode("ascii")
