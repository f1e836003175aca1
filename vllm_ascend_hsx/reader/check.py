"""What a file of hidden states holds, and whether it is what it says it is: read once, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_hsx.protocol.checksum import names_checksum
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, Header, TensorInfo, layer_ids_of, num_prompt_tokens_of
from vllm_ascend_hsx.protocol.lock import is_left_over
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import HiddenStatesError, checked, difference, is_decided, model_dtype, read_others
from vllm_ascend_hsx.reader.quantized import LEAST_SCALE, dequantized
from vllm_ascend_hsx.reader.shards import shards_of
from vllm_ascend_hsx.reader.tensors import read_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

_BLOCK = 64 << 20  # bytes of rows that are looked at at a time


@dataclass(frozen=True)
class Examination:
    """The result for one file.

    Attributes:
        path: the file.
        problem: what is wrong with it, in one sentence, or None.
        tokens, prompt_tokens: rows, and how many of them are the prompt's (None if the file does not say).
        layers, hidden_size, dtype: of a row; dtype is the model's by its name in torch, and "in float8_e4m3fn" if it is quantised to that.
        layer_ids: residual stream of each layer; empty if the file does not say.
        num_bytes: of the hidden states, with the scales of quantised rows.
        norms: mean over the tokens of the Euclidean norm of a (dequantised) row, for each layer.
        token_norms: [layers][tokens] the norms themselves, if they were asked for.
        tiny_tokens: quantised rows too small for their scale to be smaller: they lost accuracy, or all that they had.
        metadata: what the file says about itself.
    """

    path: Path
    problem: str | None = None
    tokens: int = 0
    prompt_tokens: int | None = None
    layers: int = 0
    hidden_size: int = 0
    dtype: str = ""
    layer_ids: tuple[int, ...] = ()
    num_bytes: int = 0
    norms: tuple[float, ...] = ()
    token_norms: tuple[tuple[float, ...], ...] = ()
    tiny_tokens: int = 0
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """One or two words for a table."""
        if self.problem is not None:
            return "bad"
        return "verified" if names_checksum(self.metadata) else "plausible"


def examine(
    path: str | Path, *, checksum: bool = True, finite: bool = True, token_norms: bool = False, timeout: float = 0.0
) -> Examination:
    """Look at a file that a server has completed.

    Args:
        path: the file.
        checksum: compare it with the checksum that it names; a file without one passes.
        finite: whether a NaN or an infinity is a problem.
        token_norms: keep the norm of every row.
        timeout: seconds to wait for a server that is still writing it.

    Returns:
        What was found; nothing that is wrong with the file is raised.
    """
    path = Path(path)
    try:
        with checked(path, timeout) as (place, header):
            if checksum and names_checksum(header.metadata) and (problem := difference(place, header)):
                raise HiddenStatesError(path, problem)
            return _describe(path, place.fd, header, finite, token_norms)
    except HiddenStatesError as error:
        return Examination(path, error.reason)
    except TimeoutError:
        return Examination(path, "a server is still writing it")
    except OSError as error:
        return Examination(path, f"it cannot be read: {error.strerror or error}")


def _describe(path: Path, fd: int, header: Header, finite: bool, keep: bool) -> Examination:
    """Read rows some at a time, and map nothing: a file that is cut off meanwhile would end the process. Raises FormatError or OSError."""
    rows = header.tensors[HIDDEN_STATES]
    token_ids, scales = read_others(fd, header, mmap=False)
    metadata = header.metadata
    tokens, layers, hidden = rows.shape
    sums = [0.0] * layers
    all_norms: list[list[float]] = [[] for _ in range(layers)]
    problem = None
    for first, block, norms in _norms(fd, rows, scales, metadata):
        if finite and problem is None:
            problem = _not_finite(first, block, norms)
        for layer in range(layers):
            sums[layer] += float(norms[:, layer].sum())
            if keep:
                all_norms[layer] += norms[:, layer].tolist()
    layer_ids = tuple(layer_ids_of(metadata) or ())
    prompt_tokens = num_prompt_tokens_of(metadata)
    return Examination(
        path,
        problem or _contradiction(layers, token_ids, layer_ids, prompt_tokens),
        tokens,
        prompt_tokens,
        layers,
        hidden,
        _words(torch_dtype(rows.dtype)) if scales is None else f"{_words(model_dtype(metadata))} in {_words(torch_dtype(rows.dtype))}",
        layer_ids,
        rows.end - rows.begin + (0 if scales is None else scales.nbytes),
        tuple(total / tokens if tokens else 0.0 for total in sums),
        tuple(map(tuple, all_norms)) if keep else (),
        0 if scales is None else int((scales <= LEAST_SCALE).sum()),
        metadata,
    )


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _norms(
    fd: int, rows: TensorInfo, scales: torch.Tensor | None, metadata: Mapping[str, str]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first token, its and the next tokens' rows, their Euclidean norms as float32 [tokens, layers]), some tokens at a time."""
    import torch

    tokens, layers, hidden = rows.shape
    row_bytes = (rows.end - rows.begin) // max(1, tokens)
    step = max(1, _BLOCK // max(1, row_bytes))
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        part = TensorInfo(rows.dtype, (last - first, layers, hidden), rows.begin + first * row_bytes, rows.begin + last * row_bytes)
        block = read_tensor(fd, part, mapped=False)
        if scales is not None:
            block = dequantized(block, scales[first:last], model_dtype(metadata))
        yield first, block, torch.linalg.vector_norm(block.float(), dim=-1)


def _not_finite(first: int, rows: torch.Tensor, norms: torch.Tensor) -> str | None:
    """Where a NaN or an infinity is. It makes the row's norm one, so the rows themselves are only looked at if a norm says so."""
    import torch

    if bool(torch.isfinite(norms).all()):
        return None
    # torch does not know it of float8_e4m3fn.
    good = torch.isfinite(rows.float() if rows.element_size() == 1 else rows).all(dim=-1)
    if bool(good.all()):  # large values, whose squares have no float32
        return None
    token, layer = (~good).nonzero()[0].tolist()
    return f"the row of token {first + token} in layer {layer} is not finite"


def _contradiction(layers: int, token_ids: torch.Tensor, layer_ids: tuple[int, ...], prompt_tokens: int | None) -> str | None:
    """What in the metadata does not fit the tensors."""
    tokens = len(token_ids)
    if layer_ids and len(layer_ids) != layers:
        return f"it names {len(layer_ids)} layer ids and has {layers} layers"
    if prompt_tokens is not None and not 0 <= prompt_tokens <= tokens:
        return f"it says that {prompt_tokens} of its {tokens} tokens are the prompt's"
    if tokens and int(token_ids.min()) < 0:
        return "it has a negative token id"
    return None


def orphaned_locks(directory: str | Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """The locks below a directory that nobody holds and beside which there is neither data nor an error, in the order of their paths.

    Args:
        directory: where to look.
        on_error: called for each folder that cannot be read, which is passed over.
    """
    found: list[Path] = []
    for folder, inside, names in os.walk(directory, onerror=on_error):
        inside[:] = [name for name in inside if not name.startswith(".")]
        there = set(names)
        for name in names:
            data = name.removesuffix(LOCK_SUFFIX)
            is_lock = name.endswith(DATA_SUFFIX + LOCK_SUFFIX) and not name.startswith(".")
            if is_lock and data not in there and data + ERROR_SUFFIX not in there:
                # What cannot be opened is not known to be a lock that nobody holds.
                with suppress(OSError):
                    if is_left_over(Path(folder, name), partial(is_decided, Path(folder, data))):
                        found.append(Path(folder, name))
    return sorted(found)


def files_in(directory: str | Path) -> list[Path]:
    """The data and error files below a directory and the members of its shards, in the order of their paths; hidden ones are passed over.

    Raises:
        OSError: it is no directory, or cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    found = (path for suffix in (DATA_SUFFIX, DATA_SUFFIX + ERROR_SUFFIX) for path in directory.rglob(f"*{suffix}"))
    files = {path for path in found if not any(part.startswith(".") for part in path.relative_to(directory).parts)}
    return sorted(files.union(directory / name for name in shards_of(directory).members()))
