"""Reads a file of hidden states once and says whether it is what was asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.protocol.checksum import names_checksum, stated_checksum
from vllm_ascend_hsx.protocol.files import write_at
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, SCALES, TOKEN_IDS, FormatError, Header, read_header
from vllm_ascend_hsx.reader.quantized import quantization_problem
from vllm_ascend_hsx.reader.shards import Place, member_problem
from vllm_ascend_hsx.reader.tensors import check_tensors

_BLOCK = 256 << 10  # small enough for what is read to stay in the processor's cache while it is looked at
_TOKEN_DTYPES = {"I64": "<i8", "I32": "<i4"}
# What of the bits of a floating-point number says, when it is so large, that it is not finite: unsigned type, mask, least value.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000, 0x7F80_0000),
    "F16": ("<u2", 0x7C00, 0x7C00),
    "BF16": ("<u2", 0x7F80, 0x7F80),
    "F8_E5M2": ("|u1", 0x7C, 0x7C),
    "F8_E4M3": ("|u1", 0x7F, 0x7F),  # it has no infinity, and one NaN
}


class CheckError(Exception):
    """A file is not what was asked for; the message says in what way."""


@dataclass(frozen=True)
class ServerFacts:
    """What all files of a run have in common. layer_ids is None for files that do not say.

    Attributes:
        layer_ids: of the file's metadata, as JSON.
        dtype: safetensors name of the hidden states' type; of quantised ones, what they were and are: "BF16 in F8_E4M3".
        row_shape: [layers, hidden].
    """

    layer_ids: str | None
    dtype: str
    row_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.row_shape)} of layers {self.layer_ids}"

    @classmethod
    def of(cls, header: Header) -> ServerFacts:
        states = header.tensors[HIDDEN_STATES]
        dtype = f"{header.metadata.get('dtype', 'BF16')} in {states.dtype}" if SCALES in header.tensors else states.dtype
        return cls(header.metadata.get("layer_ids"), dtype, states.shape[1:])

    def as_json(self) -> dict[str, Any]:
        return {"layer_ids": self.layer_ids, "dtype": self.dtype, "row_shape": list(self.row_shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ServerFacts:
        """Raises KeyError or TypeError: it does not come from `as_json`."""
        return cls(value["layer_ids"], value["dtype"], tuple(value["row_shape"]))


@dataclass(frozen=True)
class Expected:
    """What is known of a file beforehand.

    Attributes:
        prompt: token ids of the prompt, if they are known.
        output: ids of the generated tokens that have rows, if they are known; () if none has.
        facts: None if this is the first file of a server.
    """

    prompt: Sequence[int] | None
    output: Sequence[int] | None
    facts: ServerFacts | None


class Examined(NamedTuple):
    """What a file holds."""

    tokens: int
    bytes: int
    facts: ServerFacts


def examine(place: Place, expected: Expected, *, validate: bool, copy_to: int | None = None) -> Examined:
    """Check a file: header, shapes, token ids, and whether it fits the others.

    Args:
        place: where it is open for reading; the descriptor's position is not used.
        expected: what it has to be.
        validate: look at all of its data too: every number is finite, and the checksum, if the file has one, is right.
        copy_to: a file that receives all bytes; everything is read once whatever is asked for.

    Raises:
        CheckError: it is not what it has to be.
        OSError: it cannot be read, or the copy not written.
    """
    header = _header(place)
    facts = ServerFacts.of(header)
    if expected.facts is not None and facts != expected.facts:
        raise CheckError(f"it holds {facts}, and the others hold {expected.facts}")
    tokens = _check_tokens(place.fd, header, expected)
    if validate or copy_to is not None:
        _read_all(place, header, validate, copy_to)
    return Examined(tokens, place.size, facts)


def facts_of(place: Place) -> ServerFacts:
    """What a file says of its server; nothing else is looked at. Raises as `examine`."""
    return ServerFacts.of(_header(place))


def _header(place: Place) -> Header:
    try:
        header = read_header(place.fd, place.offset, place.size)
        check_tensors(header)
    except FormatError as error:
        raise CheckError(f"this is not a file of hidden states: {error}") from error
    if problem := quantization_problem(header) or member_problem(place, header):
        raise CheckError(problem)
    return header


def _check_tokens(fd: int, header: Header, expected: Expected) -> int:
    ids = header.tensors[TOKEN_IDS]
    found = np.frombuffer(_read(fd, ids.begin, ids.end), dtype=_TOKEN_DTYPES[ids.dtype])
    if expected.prompt is not None:
        prompt = np.asarray(expected.prompt, dtype=np.int64)
        _compare("the prompt", prompt, found[: len(prompt)])
        if expected.output is not None:
            _compare("the generated tokens", np.asarray(expected.output, dtype=np.int64), found[len(prompt) :])
    return len(found)


def _compare(what: str, expected: npt.NDArray[np.int64], found: npt.NDArray[np.int64]) -> None:
    if len(expected) != len(found):
        raise CheckError(f"it has {len(found)} rows for {what} of {len(expected)} tokens")
    if (wrong := np.flatnonzero(expected != found)).size:
        at = wrong[0]
        raise CheckError(f"token {at} of {what} is {found[at]} in it, and was {expected[at]}")


def _read_all(place: Place, header: Header, validate: bool, copy_to: int | None) -> None:
    stated = stated_checksum(header.content, header.metadata) if validate else None
    if validate and stated is None and names_checksum(header.metadata):
        raise CheckError("it names a checksum of no known kind, so it cannot be verified")
    if copy_to is not None:
        write_at(copy_to, memoryview(header.content), 0)
    for name, tensor in sorted(header.tensors.items(), key=lambda each: each[1].begin):
        for offset in range(tensor.begin, tensor.end, _BLOCK):
            block = _read(place.fd, offset, min(offset + _BLOCK, tensor.end))
            if stated is not None:
                stated[1].update(block)
            if validate and not _is_finite(block, tensor.dtype):
                raise CheckError(f"{name} has numbers that are not finite")
            if copy_to is not None:
                write_at(copy_to, block, offset - place.offset)
    if stated is not None and stated[1].hexdigest() != stated[0]:
        raise CheckError(f"it is not as it was written: its checksum is {stated[1].hexdigest()}, not {stated[0]}")


def _is_finite(block: memoryview, dtype: str) -> bool:
    if dtype not in _EXPONENTS:
        return True
    kind, mask, least = _EXPONENTS[dtype]
    bits = np.frombuffer(block, dtype=kind)
    return bits.size == 0 or int((bits & bits.dtype.type(mask)).max()) < least


def _read(fd: int, begin: int, end: int) -> memoryview:
    """Bytes of the file; a file that is cut off meanwhile is an error."""
    data = bytearray(end - begin)
    rest = memoryview(data)
    while rest:
        count = os.preadv(fd, [rest], end - len(rest))
        if not count:
            raise CheckError(f"it ended at byte {end - len(rest)} while it was read")
        rest = rest[count:]
    return memoryview(data)
