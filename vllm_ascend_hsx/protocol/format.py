"""The file format: safetensors with a header of reserved size. Offsets are known in advance."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx._version import __version__
from vllm_ascend_hsx.protocol.checksum import ALGORITHM, BLANK
from vllm_ascend_hsx.protocol.files import read_bytes
from vllm_ascend_hsx.protocol.placeholders import (
    Placeholder,
    encode_placeholders,
    placeholders_of,
    within,
)
from vllm_ascend_hsx.protocol.rows import RowFormat, TokenIds
from vllm_ascend_hsx.protocol.strict_json import LARGEST, is_count, parse
from vllm_ascend_hsx.protocol.weights import (
    LONGEST,
    UNKNOWN,
    Origin,
    encode_origin,
    weight_versions_of,
)

FORMAT_VERSION = "2"  # the checksum covers the header since 2
_READABLE = ("1", "2")
PRODUCER = "vllm-ascend-hsx"
HIDDEN_STATES = "hidden_states"
TOKEN_IDS = "token_ids"
SCALES = "hidden_states_scales"
LORA, LORA_WEIGHTS = "lora", "lora_weights"
ARRIVED = "arrived_ns"
QUANTIZATIONS = {"fp8": "fp8_e4m3_per_token"}  # names in the metadata

PAGE = 4096
_LENGTH = struct.Struct("<Q")
_TOKEN_ID_BYTES = 8
_SCALE_BYTES = 4
# Room for values that differ between requests: twelve numbers of at most 20 digits, the name of one
# number, and a checksum with name.
_LATE_BYTES = 360
_FORMATS = 64  # cached formats: a server has one per adapter, and one without an adapter
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_MAX_HEADER = 100_000_000  # safetensors' own limit (safetensors 0.8.0, MAX_HEADER_SIZE)
_MAX_DIMENSIONS = 64  # numpy's limit
_COUNT = re.compile("[0-9]{1,18}")

# Bytes per element of every dtype in files that can be read, by safetensors name.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class FormatError(ValueError):
    """A file is not a complete safetensors file. The message says why."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file.

    `dtype` is the safetensors name. The bytes are [begin, end), counted from the start of the open
    file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """Parsed header of a safetensors file, and `content`, the bytes before the data."""

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    content: bytes


class FileLayout:
    """Offsets in one request's file: header space, rows by position, token ids and scales."""

    def __init__(
        self,
        row_format: RowFormat,
        request_id: str,
        arrived_ns: int | None = None,
        placeholders: Sequence[Placeholder] = (),
    ) -> None:
        self._row_format = row_format
        self._request_id = request_id
        self._late = arrived_ns, tuple(placeholders)
        of_request = [
            valid_unicode(request_id),
            encode_placeholders(placeholders),
            encode_origin(LONGEST),
        ]
        needed = (
            _LENGTH.size + _fixed_bytes(row_format) + len(_ENCODER.encode(of_request)) + _LATE_BYTES
        )
        self.data_start = -(-needed // PAGE) * PAGE

    def row_offset(self, position: int) -> int:
        """Return the file offset of a token position's row.

        It does not depend on the number of tokens.
        """
        return self.data_start + position * self._row_format.stored_row_bytes

    def file_size(self, tokens: int) -> int:
        return self.row_offset(tokens) + tokens * (
            _TOKEN_ID_BYTES + (_SCALE_BYTES if self._row_format.is_quantized else 0)
        )

    def tail(self, token_ids: TokenIds, scales: npt.NDArray[np.float32] | None) -> bytes:
        """Return the bytes after the rows.

        Args:
            token_ids: int64 [tokens].
            scales: float32 [tokens] if rows are quantised, else None.
        """
        assert (scales is not None) == self._row_format.is_quantized
        ids = token_ids.astype("<i8", copy=False).tobytes()
        return ids if scales is None else ids + scales.astype("<f4", copy=False).tobytes()

    def header(
        self, tokens: int, num_prompt_tokens: int, checksum: bool = False, origin: Origin = UNKNOWN
    ) -> bytes:
        """Return the first `data_start` bytes of the file, padded with spaces.

        Args:
            tokens: rows of the file.
            num_prompt_tokens: number of rows of the prompt.
            checksum: whether to reserve space for a checksum. `Digest.stamp` fills it in.
            origin: the weights that computed the rows, and whether the request was aborted.
        """
        text = _header_json(
            self._row_format,
            self._request_id,
            tokens,
            num_prompt_tokens,
            checksum,
            *self._late,
            origin,
        )
        size = self.data_start - _LENGTH.size
        assert len(text) <= size, f"header of {len(text)} bytes does not fit in the {size} reserved"
        return _LENGTH.pack(size) + text.ljust(size)


@lru_cache(maxsize=_FORMATS)
def _fixed_bytes(row_format: RowFormat) -> int:
    """Return the size of the header's part that all requests of an adapter share."""
    return len(_header_json(row_format, "", 0, 0, False))


def _header_json(
    row_format: RowFormat,
    request_id: str,
    tokens: int,
    num_prompt_tokens: int,
    checksum: bool,
    *late: Any,
) -> bytes:
    rows_end = tokens * row_format.stored_row_bytes
    ids_end = rows_end + tokens * _TOKEN_ID_BYTES
    header: dict[str, Any] = {
        "__metadata__": metadata_of(
            row_format, request_id, tokens, num_prompt_tokens, checksum, *late
        ),
        HIDDEN_STATES: {
            "dtype": row_format.stored_dtype,
            "shape": [tokens, *row_format.row_shape],
            "data_offsets": [0, rows_end],
        },
        TOKEN_IDS: {
            "dtype": "I64",
            "shape": [tokens],
            "data_offsets": [rows_end, ids_end],
        },
    }
    if row_format.is_quantized:
        header[SCALES] = {
            "dtype": "F32",
            "shape": [tokens, 1, 1],
            "data_offsets": [ids_end, ids_end + tokens * _SCALE_BYTES],
        }
    return _ENCODER.encode(header).encode("ascii")


def metadata_of(
    row_format: RowFormat,
    request_id: str,
    tokens: int,
    num_prompt_tokens: int,
    checksum: bool,
    arrived_ns: int | None = None,
    placeholders: Sequence[Placeholder] = (),
    origin: Origin = UNKNOWN,
) -> dict[str, str]:
    """Return the metadata of a request's rows, for a file or a store.

    Args:
        row_format: format of the rows.
        request_id: id of the request.
        tokens: number of stored rows.
        num_prompt_tokens: number of rows of the prompt.
        checksum: whether to reserve space for a checksum. `Digest.stamp` fills it in.
        arrived_ns: arrival time in nanoseconds since the epoch; None if unknown.
        placeholders: rows of the images in the prompt. Images after the last row are left out.
        origin: the weights that computed the rows, and whether the request was aborted.
    """
    return {
        **_fixed_metadata(row_format),
        "num_prompt_tokens": str(num_prompt_tokens),
        "num_output_tokens": str(tokens - num_prompt_tokens),
        "request_id": valid_unicode(request_id),
        **({} if arrived_ns is None else {ARRIVED: str(arrived_ns)}),
        **encode_placeholders(within(placeholders, num_prompt_tokens)),
        **encode_origin(origin),
        **({"checksum_algorithm": ALGORITHM, "checksum": BLANK} if checksum else {}),
    }


@lru_cache(maxsize=_FORMATS)
def _fixed_metadata(row_format: RowFormat) -> dict[str, str]:
    """Return the metadata that all requests of an adapter share."""
    adapter = row_format.adapter
    return {
        "format_version": FORMAT_VERSION,
        "producer": PRODUCER,
        "producer_version": __version__,
        "model": valid_unicode(row_format.model),
        **({LORA: valid_unicode(adapter.name)} if adapter.name else {}),
        **({LORA_WEIGHTS: adapter.weights} if adapter.weights else {}),
        "layer_ids": json.dumps(list(row_format.layer_ids)),
        "layer_id_meaning": row_format.layer_id_meaning,
        "dtype": row_format.dtype,
        **({"basis": row_format.basis} if row_format.basis else {}),
        **(
            {"quantization": QUANTIZATIONS[row_format.quantization]}
            if row_format.is_quantized
            else {}
        ),
    }


def read_header(fd: int, offset: int = 0, size: int | None = None) -> Header:
    """Read and check the header of a safetensors file.

    Args:
        fd: the open file. It may contain more than the safetensors file.
        offset: offset of the safetensors file.
        size: bytes of the safetensors file; None for all bytes from `offset` on.

    Returns:
        The header. Offsets of tensors are counted from the start of the open file.

    Raises:
        FormatError: if this is not a safetensors file, does not have the length that the header
            states, or has invalid metadata.
        OSError: if the file cannot be read.
    """
    available = max(0, os.fstat(fd).st_size - offset)
    size = available if size is None else size
    if size > available:
        raise FormatError(f"it has {available} of {size} bytes")
    prefix = read_bytes(fd, _LENGTH.size, offset)
    if size < _LENGTH.size or len(prefix) < _LENGTH.size:
        raise FormatError(f"it has {size} bytes, too few for a safetensors file")
    length: int = _LENGTH.unpack(prefix)[0]
    data_start = _LENGTH.size + length
    if length > _MAX_HEADER or data_start > size:
        raise FormatError(f"it has {size} bytes, but the first 8 state a header of {length} bytes")
    content = prefix + read_bytes(fd, length, offset + _LENGTH.size)
    try:
        entries = parse(content[_LENGTH.size :])
        if not isinstance(entries, dict):
            raise ValueError("it is not an object")
        metadata = check_metadata(entries.pop("__metadata__", {}))
        tensors = {
            name: _tensor_info(entry, offset + data_start) for name, entry in entries.items()
        }
    except ValueError as error:
        raise FormatError(f"its header is invalid: {error}") from error
    _check_places(tensors, offset, data_start, size)
    return Header(metadata, tensors, content)


def layer_ids_of(metadata: Mapping[str, str]) -> list[int] | None:
    """Return the ids of the layers, None if the metadata have none.

    Raises FormatError if invalid.
    """
    text = metadata.get("layer_ids")
    if text is None:
        return None
    try:
        ids = parse(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(map(is_count, ids)):
        raise FormatError(f"layer_ids={_short(text)} is not a list of layers")
    return ids


def num_prompt_tokens_of(metadata: Mapping[str, str]) -> int | None:
    """Return the number of prompt tokens, None if absent. Raises FormatError if invalid."""
    text = metadata.get("num_prompt_tokens")
    if text is not None and not _COUNT.fullmatch(text):
        raise FormatError(f"num_prompt_tokens={_short(text)} is not a number of tokens")
    return None if text is None else int(text)


def check_metadata(value: object) -> dict[str, str]:
    """Return the metadata of a request. Raises ValueError if they are invalid."""
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError("not all metadata are strings")
    "".join((*value, *value.values())).encode()  # a lone surrogate raises a ValueError
    version = value.get("format_version")
    if value.get("producer") == PRODUCER and version not in _READABLE:
        raise ValueError(
            f"format_version={_short(version)} is unknown to this version of {PRODUCER}"
        )
    layer_ids_of(value)
    num_prompt_tokens_of(value)
    placeholders_of(value)
    weight_versions_of(value)
    return value


def _tensor_info(entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"a tensor {_short(entry)}")
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise ValueError(f"a tensor at {_short(offsets)}")
    return tensor_info(
        entry["dtype"], entry["shape"], data_start + offsets[0], data_start + offsets[1]
    )


def tensor_info(dtype: object, shape: object, begin: int, end: int) -> TensorInfo:
    """Return a tensor's description.

    Raises ValueError if it is invalid or does not fit these bytes.
    """
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ValueError(f"a tensor of dtype {_short(dtype)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(is_count, shape)):
        raise ValueError(f"a tensor of shape {_short(shape)}")
    if (
        prod(shape) * DTYPE_BYTES[dtype] != end - begin
        or prod(filter(None, shape)) * DTYPE_BYTES[dtype] > LARGEST
    ):
        raise ValueError(f"a tensor {dtype} {shape} of {end - begin} bytes")
    return TensorInfo(dtype, tuple(shape), begin, end)


def _check_places(
    tensors: Mapping[str, TensorInfo], offset: int, data_start: int, size: int
) -> None:
    """Require that the tensors fill the data without gaps, as safetensors demands.

    Raises FormatError.
    """
    end = offset + data_start
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].begin, each[1].end)):
        if tensor.end > offset + size:
            raise FormatError(
                f"{_short(name)} ends at byte {tensor.end - offset}, but the file has {size} bytes"
            )
        if tensor.begin != end:
            raise FormatError(
                f"{_short(name)} begins at byte {tensor.begin - offset}, but the preceding data "
                f"end at byte {end - offset}"
            )
        end = tensor.end
    if end != offset + size:
        raise FormatError(f"its tensors end at byte {end - offset}, but the file has {size} bytes")


def _short(value: object) -> str:
    """Return a value as short, printable text for an error."""
    try:
        text = (
            value
            if isinstance(value, str) and value.isidentifier() and value.isascii()
            else ascii(value)
        )
    except RecursionError:
        return "that nests too deep"
    return text if len(text) <= 100 else text[:100] + "..."


def valid_unicode(text: str) -> str:
    """Escape lone surrogates, because safetensors refuses them in a header."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
