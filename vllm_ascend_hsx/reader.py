"""What consumers import: wait for a request's file, load it, and hear the reason if it failed.

Needs torch, and neither vLLM nor torch_npu. Reads the files of other producers too, as long as they hold the same two tensors.
"""

from __future__ import annotations

import errno
import json
import mmap as memory_map
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_hsx.quantized import dequantized, quantization_problem
from vllm_ascend_hsx.shards import Place, open_member, remove_member, shards_of
from vllm_ascend_hsx.sinks.checksum import ALGORITHM, checksum_of
from vllm_ascend_hsx.sinks.format import HIDDEN_STATES, SCALES, TOKEN_IDS, FormatError, Header, TensorInfo, read_header
from vllm_ascend_hsx.sinks.lock import is_left_over, wait_until_released
from vllm_ascend_hsx.sinks.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX

if TYPE_CHECKING:
    import torch

# torch's names of the dtypes that a file may hold, by safetensors name.
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
}


class HiddenStatesError(Exception):
    """There will be no hidden states at `path`.

    Attributes:
        path: the file that was asked for.
        reason: why, in one sentence; the server's own where it could leave one.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class HiddenStates(NamedTuple):
    """One request's hidden states.

    Attributes:
        hidden_states: [tokens, layers, hidden] in the model's dtype, layers in the order that the server was given. Of a file with
            quantised rows float8_e4m3fn if it was loaded with dequantize=False.
        token_ids: int64 [tokens], prompt first, then output.
        metadata: what the file says about itself; empty if its producer says nothing.
        scales: float32 [tokens, 1, 1] of a file with quantised rows; None of others.
    """

    hidden_states: torch.Tensor
    token_ids: torch.Tensor
    metadata: dict[str, str]
    scales: torch.Tensor | None = None

    @property
    def layer_ids(self) -> list[int]:
        """Which residual stream each layer is: id i is the stream after i layers. KeyError if the file does not say."""
        ids: list[int] = json.loads(self.metadata["layer_ids"])
        return ids

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's. KeyError if the file does not say."""
        return int(self.metadata["num_prompt_tokens"])

    @property
    def dtype(self) -> torch.dtype:
        """The model's: that of the hidden states, or what they are dequantised to (bfloat16 if the file does not say)."""
        if self.scales is None:
            return self.hidden_states.dtype
        return _torch_dtype(self.metadata.get("dtype", "BF16"))


def load(
    path: str | Path, timeout: float | None = 60.0, *, mmap: bool = False, verify: bool = False, dequantize: bool = True
) -> HiddenStates:
    """Wait until the file of a request is complete, and load it.

    Sleeps in the kernel on the file's lock, so it returns as soon as the server lets go, be it because the file is complete, because
    it failed, or because the server died. A file without a lock is complete.

    Args:
        path: the path that the response named (`kv_transfer_params["hidden_states_path"]`).
        timeout: seconds to wait for the server at most; None waits for ever.
        mmap: map the file instead of reading it. Changes to the tensors stay private, but the pages are read when they are used. Rows that
            are dequantised are read at once, into memory of their own.
        verify: compare the file with the checksum in its metadata, which reads all of it.
        dequantize: give quantised rows in the model's dtype; otherwise as they are stored, for `vllm_ascend_hsx.quantized.dequantized`.

    Raises:
        HiddenStatesError: the server says that the request failed, or it died before the file was complete, or the file does not hold
            hidden states, or not those that were written, or there is no checksum to compare it with.
        TimeoutError: the server is still writing.
        FileNotFoundError: nothing is there: a wrong path, an aborted request, a file that somebody has taken away, or a server that died
            and whose leftovers another one has removed.
    """
    path = Path(path)
    place = open_stored(path, timeout)
    fd = place.fd
    try:
        header = read_header(fd, place.offset, place.size)
        _check(header)
        if verify and (problem := _difference(place, header)):
            raise HiddenStatesError(path, problem)
        hidden_states = _tensor(fd, header.tensors[HIDDEN_STATES], mmap)
        token_ids = _tensor(fd, header.tensors[TOKEN_IDS], mmap)
        scales = _tensor(fd, header.tensors[SCALES], mmap) if SCALES in header.tensors else None
    except FormatError as error:
        raise HiddenStatesError(path, f"this is not a file of hidden states: {error}") from error
    finally:
        os.close(fd)
    states = HiddenStates(hidden_states, token_ids, header.metadata, scales)
    if scales is not None and dequantize:
        states = states._replace(hidden_states=dequantized(hidden_states, scales, states.dtype))
    return states


def open_stored(path: Path, timeout: float | None) -> Place:
    """Wait until a request is complete, and open the file of it, or the shard that it is in. `load` says what it waits for and raises."""
    lock_path = _companion(path, LOCK_SUFFIX)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        wait_until_released(lock_path, None if deadline is None else max(0.0, deadline - time.monotonic()))
        place = _stored(path)
        if place is not None:
            return place
        if not lock_path.exists():
            raise FileNotFoundError(
                errno.ENOENT, "no hidden states, no lock and no error are there; was the request aborted, or did its server die?", str(path)
            )
        if is_left_over(lock_path, partial(is_decided, path)):
            raise HiddenStatesError(
                path,
                "the server died before the file was complete: it left the lock file, which nobody holds, and no data",
            )
        # A server has begun to write the file, or has completed it, between two of the looks.


def _stored(path: Path) -> Place | None:
    """Open what a request has become; None: nothing yet. Raises HiddenStatesError: it has failed."""
    reason = _failure(path)
    if reason is not None:
        raise HiddenStatesError(path, reason)
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return Place(fd, 0, os.fstat(fd).st_size)
    return open_member(path)


def is_decided(path: Path) -> bool:
    """True if a request has become a file or a member of a shard, or has failed. Raises OSError."""
    try:
        place = _stored(path)
    except HiddenStatesError:
        return True
    if place is not None:
        os.close(place.fd)
    return place is not None


def open_dir(directory: str | Path, *, mmap: bool = False) -> Iterator[tuple[Path, HiddenStates]]:
    """The complete files of a directory, and the members of its shards, in the order of their names, each loaded when it is asked for.

    Files that a server is still writing are passed over, and so are files that somebody takes away meanwhile.

    Args:
        directory: where the server stores them.
        mmap: as for `load`.

    Raises:
        HiddenStatesError: a file does not hold hidden states.
        OSError: the directory cannot be read.
    """
    with os.scandir(directory) as entries:
        names = {e.name for e in entries if e.name.endswith(DATA_SUFFIX) and not e.name.startswith(".")}
    for name in sorted(names | shards_of(directory).members().keys()):
        path = Path(directory, name)
        try:
            states = load(path, 0, mmap=mmap)
        except (FileNotFoundError, TimeoutError):  # taken away, still written
            continue
        yield path, states


def remove(path: str | Path, *, keep_data: bool = False) -> None:
    """Remove a request's file and its companions once they are no longer needed; what is not there is no error.

    A member of a shard is only not seen any more: a line in the directory says so, and its bytes stay among those of others.

    The server leaves the lock file to its consumers, because other readers need it: call this after `load`.

    Args:
        path: as for `load`.
        keep_data: remove the companions only.

    Raises:
        OSError: a file cannot be removed, or a member of a shard cannot be noted as such.
    """
    path = Path(path)
    doomed = [_companion(path, LOCK_SUFFIX), _companion(path, ERROR_SUFFIX)]
    # The lock first: without it a reader takes what is there for complete, with it and no data it would report a dead server.
    for each in doomed if keep_data else [*doomed, path]:
        with suppress(FileNotFoundError):
            os.unlink(each)
    if not keep_data:
        remove_member(path)


def _companion(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _failure(path: Path) -> str | None:
    """The server's reason why there is no file, or None if it has not left one."""
    try:
        text = _companion(path, ERROR_SUFFIX).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return str(json.loads(text)["reason"])
    except (ValueError, TypeError, KeyError):
        return f"the server reports a failure that cannot be understood: {text[:200]!r}"


def _check(header: Header) -> None:
    missing = {HIDDEN_STATES, TOKEN_IDS} - header.tensors.keys()
    if missing:
        raise FormatError(f"it has no {' and no '.join(sorted(missing))}")
    states, ids = header.tensors[HIDDEN_STATES], header.tensors[TOKEN_IDS]
    if len(ids.shape) != 1 or states.shape[:1] != ids.shape:
        raise FormatError(f"{TOKEN_IDS} {list(ids.shape)} does not fit {HIDDEN_STATES} {list(states.shape)}")
    for tensor in (states, ids):
        if tensor.dtype not in _TORCH_DTYPES:
            raise FormatError(f"a tensor is {tensor.dtype}")
    if problem := quantization_problem(header):
        raise FormatError(problem)


def _difference(place: Place, header: Header) -> str | None:
    """What speaks against the file being as it was written, or None if nothing does."""
    expected = header.metadata.get("checksum")
    algorithm = header.metadata.get("checksum_algorithm")
    if expected is None or algorithm != ALGORITHM:
        return f"it cannot be verified: its metadata has no {ALGORITHM} checksum (checksum_algorithm is {algorithm})"
    found = checksum_of(place.fd, min(tensor.begin for tensor in header.tensors.values()), place.offset + place.size)
    return None if found == expected else f"it is not as it was written: its checksum is {found}, not {expected}"


def _tensor(fd: int, info: TensorInfo, mapped: bool) -> torch.Tensor:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        problem = "hidden states are read into torch tensors, and torch is not installed here"
        remedy = "install torch, any build of it (no NPU is needed), or vllm-ascend-hsx[reader]"
        raise ModuleNotFoundError(f"{problem}; {remedy}", name="torch") from None
    dtype = _torch_dtype(info.dtype)
    if info.begin == info.end:
        return torch.empty(info.shape, dtype=dtype)
    if mapped and info.begin % dtype.itemsize == 0:  # other producers need not align their tensors
        start = info.begin // memory_map.ALLOCATIONGRANULARITY * memory_map.ALLOCATIONGRANULARITY
        protection = memory_map.PROT_READ | memory_map.PROT_WRITE
        view = memory_map.mmap(fd, info.end - start, flags=memory_map.MAP_PRIVATE, prot=protection, offset=start)
        count = (info.end - info.begin) // dtype.itemsize
        return torch.frombuffer(view, dtype=dtype, count=count, offset=info.begin - start).reshape(info.shape)
    buffer = torch.empty(info.end - info.begin, dtype=torch.uint8)
    _read_at(fd, buffer.numpy().data, info.begin)
    return buffer.view(dtype).reshape(info.shape)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[name])
    return dtype


def _read_at(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from the file; the system may give less at a time than is asked for (never more than 2 GiB)."""
    while into:
        read = os.preadv(fd, [into], offset)
        if read == 0:
            raise FormatError(f"it ended at byte {offset} while it was read")
        into = into[read:]
        offset += read
