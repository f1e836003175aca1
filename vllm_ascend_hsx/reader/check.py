"""Check a file of hidden states, or a member of a shard, in one pass and in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.protocol.checksum import names_checksum, stated_checksum, unverifiable
from vllm_ascend_hsx.protocol.format import (
    DTYPE_BYTES,
    HIDDEN_STATES,
    LORA,
    LORA_WEIGHTS,
    SCALES,
    TOKEN_IDS,
    Header,
    TensorInfo,
    layer_ids_of,
    num_prompt_tokens_of,
)
from vllm_ascend_hsx.protocol.weights import WEIGHTS
from vllm_ascend_hsx.reader.load import HiddenStatesError, checked, checksum_difference
from vllm_ascend_hsx.reader.members import is_named
from vllm_ascend_hsx.reader.shards import Place
from vllm_ascend_hsx.reader.tensors import (
    LEAST_SCALE,
    dequantized,
    dtype_name,
    model_dtype,
    read_at,
    torch_dtype,
)

Numbers = npt.NDArray[Any]

_BLOCK = 256 << 10  # bytes; a block stays in the processor's cache while it is checked
# A floating-point number is infinite or NaN if all these bits are set: unsigned type, bits.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("|u1", 0x7C),
    "F8_E4M3": ("|u1", 0x7F),  # no infinity, one NaN
}


class Kind(NamedTuple):
    """Properties that all rows of one dataset share.

    Attributes:
        layer_ids: residual stream of each layer; empty if the file does not name them.
        layers, hidden_size: shape of a row.
        dtype: torch's name of the model's dtype; "bfloat16 in float8_e4m3fn" for quantised rows.
        rotated: whether rows are in the basis of rotated weights, not in the model's own basis.
        lora: name of the adapter (LoRA); empty without one.
    """

    layer_ids: tuple[int, ...] = ()
    layers: int = 0
    hidden_size: int = 0
    dtype: str = ""
    rotated: bool = False
    lora: str = ""

    def __str__(self) -> str:
        basis = ", rotated" if self.rotated else ""
        adapter = f", adapter {self.lora}" if self.lora else ""
        return (
            f"{self.layers} layers {list(self.layer_ids)} x {self.hidden_size} "
            f"{self.dtype}{basis}{adapter}"
        )


_UNKNOWN = Kind()


@dataclass(frozen=True)
class Expected:
    """The expected tokens of a file.

    Attributes:
        prompt: token ids of the prompt; None if unknown.
        output: ids of the generated tokens that have rows; None if unknown.
    """

    prompt: Sequence[int] | None
    output: Sequence[int] | None

    def difference(self, token_ids: Numbers) -> str | None:
        """Return how `token_ids` int64 [tokens] differ from the expected tokens, or None."""
        if self.prompt is None:
            return None
        prompt = len(self.prompt)
        parts = (
            ("prompt", self.prompt, token_ids[:prompt]),
            ("generated", self.output, token_ids[prompt:]),
        )
        for part, expected, found in parts:
            if expected is None:
                break
            if len(expected) != len(found):
                return f"it has {len(found)} rows for {len(expected)} {part} tokens"
            wrong = np.flatnonzero(np.asarray(expected, dtype=np.int64) != found)
            if wrong.size:
                return f"{part} token {wrong[0]} is {found[wrong[0]]}, not {expected[wrong[0]]}"
        return None


@dataclass(frozen=True)
class Examination:
    """The result for one file.

    Attributes:
        path: the file.
        problem: the problem of the file, in one sentence, or None.
        is_there: False if there is no file to check: it was removed, or a server is writing it.
        tokens, prompt_tokens: number of rows, and of rows of the prompt (None if not stated).
        kind: properties that all files of one dataset share.
        num_bytes: bytes of the hidden states, with the scales of quantised rows.
        file_bytes: bytes of the file.
        token_norms: float32 [tokens, layers], Euclidean norms of the dequantised rows, on request.
        tiny_tokens: number of quantised rows at the smallest scale. They lost accuracy.
        metadata: metadata of the file.
    """

    path: Path
    problem: str | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    kind: Kind = _UNKNOWN
    num_bytes: int = 0
    file_bytes: int = 0
    token_norms: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    tiny_tokens: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    is_there: bool = True

    @property
    def verdict(self) -> str:
        """Return the result in one word, for a table."""
        if self.problem is not None:
            return "bad" if self.is_there else "absent"
        return "verified" if names_checksum(self.metadata) else "plausible"

    @property
    def weights(self) -> str | None:
        """Fingerprint of the weights of target and adapter (if any); None if not stated."""
        stated = [
            self.metadata.get(key)
            for key in ((WEIGHTS, LORA_WEIGHTS) if self.kind.lora else (WEIGHTS,))
        ]
        return None if None in stated else "+".join(filter(None, stated))

    @property
    def norms(self) -> list[float]:
        """Mean of `token_norms` over the tokens, for each layer; empty without `token_norms`."""
        if self.token_norms is None:
            return []
        mean: list[float] = self.token_norms.sum(0, dtype=np.float64).tolist()
        return [total / max(1, self.tokens) for total in mean]


def examine(
    path: str | Path,
    *,
    listed: bool = False,
    checksum: bool = True,
    norms: bool = False,
    timeout: float = 0.0,
) -> Examination:
    """Check a file like `check`, but report every failure as the problem instead of raising it.

    Args:
        path: as for `check`.
        listed: True if the path is from a listing. If it is gone now, it was removed.
        checksum, norms, timeout: as for `check`.
    """
    path = Path(path)
    try:
        return check(path, checksum=checksum, norms=norms, timeout=timeout)
    except HiddenStatesError as error:
        problem = error.reason
    except TimeoutError:
        return Examination(path, "a server is still writing it", is_there=False)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror or error}"
    if not listed or not _is_gone(path):
        return Examination(path, problem)
    return Examination(path, "it was removed meanwhile", is_there=False)


def _is_gone(path: Path) -> bool:
    """Return whether no directory or index names a file; False if this cannot be determined."""
    try:
        return not is_named(path)
    except OSError:
        return False


def check(
    path: Path,
    expected: Expected | None = None,
    *,
    data: bool = True,
    checksum: bool = True,
    norms: bool = False,
    timeout: float = 0.0,
) -> Examination:
    """Check a file that a server has completed. Each byte of the rows is read once.

    Args:
        path: the file, or the name of a member of a shard.
        expected: tokens to compare with; if they differ, the rows are not read.
        data: read the rows: compare the checksum, and find numbers that are not finite.
        checksum: False to leave out the checksum.
        norms: compute `token_norms`. This needs torch.
        timeout: seconds to wait for a server that is still writing the file.

    Returns:
        The properties of the file, and the first problem.

    Raises:
        HiddenStatesError: the request failed, or this is not a file of hidden states.
        TimeoutError: a server is still writing the file.
        OSError: the file is missing or cannot be read.
    """
    with checked(path, timeout) as (place, header):
        ids = _numbers(place.fd, header.tensors[TOKEN_IDS]).astype(np.int64)
        scales = _numbers(place.fd, header.tensors[SCALES]) if SCALES in header.tensors else None
        found = _describe(path, place, header, scales)
        problem = _contradiction(found, ids)
        if expected is not None:
            problem = expected.difference(ids) or problem
        if data and (expected is None or problem is None):
            damage, token_norms = _read_rows(place, header, scales, checksum, norms)
            found, problem = replace(found, token_norms=token_norms), damage or problem
    return replace(found, problem=problem)


def _describe(path: Path, place: Place, header: Header, scales: Numbers | None) -> Examination:
    rows, metadata = header.tensors[HIDDEN_STATES], header.metadata
    tokens, layers, hidden = rows.shape
    dtype = dtype_name(rows.dtype)
    if scales is not None:
        dtype = f"{dtype_name(metadata.get('dtype', 'BF16'))} in {dtype}"
    return Examination(
        path,
        tokens=tokens,
        prompt_tokens=num_prompt_tokens_of(metadata),
        kind=Kind(
            tuple(layer_ids_of(metadata) or ()),
            layers,
            hidden,
            dtype,
            metadata.get("basis") == "rotated",
            metadata.get(LORA, ""),
        ),
        num_bytes=rows.end - rows.begin + (0 if scales is None else scales.nbytes),
        file_bytes=place.size,
        tiny_tokens=0 if scales is None else int((scales <= LEAST_SCALE).sum()),
        metadata=metadata,
    )


def _numbers(fd: int, tensor: TensorInfo) -> Numbers:
    kind = {"I64": "<i8", "I32": "<i4", "F32": "<f4"}[tensor.dtype]
    return np.frombuffer(read_at(fd, tensor.begin, tensor.end), kind)


def _read_rows(
    place: Place, header: Header, scales: Numbers | None, checksum: bool, norms: bool
) -> tuple[str | None, npt.NDArray[np.float32] | None]:
    """Read all bytes after the header, once.

    The file is not mapped: truncating a mapped file would end the process.

    Returns:
        The first problem, and the norms if requested.
    """
    stated = stated_checksum(header.content, header.metadata) if checksum else None
    if checksum and stated is None and names_checksum(header.metadata):
        return unverifiable(header.metadata), None
    damage = None
    found: list[Numbers] = [np.zeros((0, header.tensors[HIDDEN_STATES].shape[1]), np.float32)]
    for name, tensor in sorted(header.tensors.items(), key=lambda each: each[1].begin):
        is_rows = name == HIDDEN_STATES
        unit = prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype] if is_rows else 8
        # torch computes norms with threads; small blocks would start them again and again.
        step = max(1, (64 if norms else 1) * _BLOCK // unit) * unit
        for begin in range(tensor.begin, tensor.end, step):
            block = read_at(place.fd, begin, min(begin + step, tensor.end))
            if stated is not None:
                stated[1].update(block)
            if damage is None and name in (HIDDEN_STATES, SCALES):
                damage = _not_finite(name, tensor, begin, block)
            if is_rows and norms:
                first = (begin - tensor.begin) // unit
                found.append(_norms(block, tensor, scales, first, header.metadata))
    if stated is not None:
        damage = checksum_difference(*stated) or damage
    return damage, np.concatenate(found) if norms else None


def _not_finite(name: str, tensor: TensorInfo, begin: int, block: memoryview) -> str | None:
    """Describe the first infinite or NaN number of a block, or return None."""
    kind, mask = _EXPONENTS[tensor.dtype]
    bits = np.frombuffer(block, kind)
    bits = bits & bits.dtype.type(mask)
    if int(bits.max()) < mask:
        return None
    at = (begin - tensor.begin) // bits.itemsize + int(np.argmax(bits))
    if name == SCALES:
        return f"the scale of token {at} is not finite"
    layers, hidden = tensor.shape[1:]
    token, layer = divmod(at // hidden, layers)
    return f"the row of token {token} in layer {layer} is not finite"


def _norms(
    block: memoryview,
    tensor: TensorInfo,
    scales: Numbers | None,
    first: int,
    metadata: dict[str, str],
) -> Numbers:
    """Return the norms float32 [tokens, layers] of a block that begins with token `first`."""
    import torch

    rows = torch.frombuffer(block, dtype=torch_dtype(tensor.dtype)).reshape(-1, *tensor.shape[1:])
    if scales is not None:
        factors = torch.from_numpy(scales[first : first + len(rows)].copy()).reshape(-1, 1, 1)
        rows = dequantized(rows, factors, model_dtype(metadata))
    norms: Numbers = torch.linalg.vector_norm(rows.float(), dim=-1).numpy()
    return norms


def _contradiction(found: Examination, token_ids: Numbers) -> str | None:
    """Describe a contradiction between metadata and tensors, or return None."""
    layer_ids, layers, prompt = found.kind.layer_ids, found.kind.layers, found.prompt_tokens
    if layer_ids and len(layer_ids) != layers:
        return f"it names {len(layer_ids)} layer ids, but has {layers} layers"
    if prompt is not None and not 0 <= prompt <= found.tokens:
        return f"it has {found.tokens} tokens, but states {prompt} prompt tokens"
    if found.tokens and int(token_ids.min()) < 0:
        return "it has a negative token id"
    return None
