"""What consumers import: wait for a request's file, load it, and hear the reason if it failed.

Needs torch, and neither vLLM nor torch_npu. Reads the files of other producers too, as long as they hold the same two tensors.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.protocol.checksum import ALGORITHM, stated_checksum
from vllm_ascend_hsx.protocol.files import NotAFileError, open_regular, read_regular
from vllm_ascend_hsx.protocol.format import (
    HIDDEN_STATES,
    SCALES,
    TOKEN_IDS,
    FormatError,
    Header,
    layer_ids_of,
    num_prompt_tokens_of,
    read_header,
)
from vllm_ascend_hsx.protocol.lock import is_left_over, wait_until_released
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.reader.quantized import dequantized, quantization_problem
from vllm_ascend_hsx.reader.shards import Place, member_problem, open_member, remove_member, shards_of
from vllm_ascend_hsx.reader.tensors import check_tensors, read_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

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
        """Which residual stream each layer is: id i is the stream after i layers.

        Raises:
            KeyError: the file does not say.
            ValueError: the metadata say something else; those that `load` returns do not.
        """
        ids = layer_ids_of(self.metadata)
        if ids is None:
            raise KeyError("layer_ids")
        return ids

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's. Raises as `layer_ids`."""
        number = num_prompt_tokens_of(self.metadata)
        if number is None:
            raise KeyError("num_prompt_tokens")
        return number

    @property
    def dtype(self) -> torch.dtype:
        """The model's: that of the hidden states, or what they are dequantised to (bfloat16 if the file does not say)."""
        if self.scales is None:
            return self.hidden_states.dtype
        return model_dtype(self.metadata)


def model_dtype(metadata: Mapping[str, str]) -> torch.dtype:
    """What the rows of a file with scales are dequantised to."""
    return torch_dtype(metadata.get("dtype", "BF16"))


def load(
    path: str | os.PathLike[str], timeout: float | None = 60.0, *, mmap: bool = False, verify: bool = False, dequantize: bool = True
) -> HiddenStates:
    """Wait until the file of a request is complete, and load it.

    Sleeps in the kernel on the file's lock, so it returns as soon as the server lets go, be it because the file is complete, because
    it failed, or because the server died. A file without a lock is complete.

    Args:
        path: the path that the response named (`kv_transfer_params["hidden_states_path"]`).
        timeout: seconds to wait for the server at most, 0 or more; None or infinity waits for ever.
        mmap: map the file instead of reading it. Changes to the tensors stay private, but the pages are read when they are used. Rows that
            are dequantised are read at once, into memory of their own.
        verify: compare the file with the checksum in its metadata, which reads all of it. In files of format version 1 that is of the
            tensors alone.
        dequantize: give quantised rows in the model's dtype; otherwise as they are stored, for `reader.quantized.dequantized`.

    Raises:
        HiddenStatesError: the server says that the request failed, or it died before the file was complete, or the file does not hold
            hidden states, or not those that were written, or there is no checksum to compare it with; or something that is no file
            has its name, or that of its lock.
        ValueError: the timeout is not a number of seconds.
        TimeoutError: the server is still writing.
        FileNotFoundError: nothing is there: a wrong path, an aborted request, a file that somebody has taken away, or a server that died
            and whose leftovers another one has removed.
        OSError: it cannot be read, or there is no memory for it.
    """
    with checked(Path(path), timeout) as (place, header):
        if verify and (problem := difference(place, header)):
            raise HiddenStatesError(Path(path), problem)
        hidden_states = read_tensor(place.fd, header.tensors[HIDDEN_STATES], mmap)
        token_ids, scales = read_others(place.fd, header, mmap)
    states = HiddenStates(hidden_states, token_ids, header.metadata, scales)
    if scales is not None and dequantize:
        states = states._replace(hidden_states=dequantized(hidden_states, scales, states.dtype))
    return states


@contextmanager
def checked(path: Path, timeout: float | None) -> Iterator[tuple[Place, Header]]:
    """What `load` opens, and the header, which is one of hidden states. Raises as `load`, also for a FormatError of the block."""
    place = open_stored(path, timeout)
    try:
        header = read_header(place.fd, place.offset, place.size)
        check_tensors(header)
        if problem := quantization_problem(header):
            raise FormatError(problem)
        if problem := member_problem(place, header):
            raise HiddenStatesError(path, problem)
        yield place, header
    except FormatError as error:
        raise HiddenStatesError(path, f"this is not a file of hidden states: {error}") from error
    finally:
        os.close(place.fd)


def read_others(fd: int, header: Header, mmap: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids, and scales if there are some. Raises as read_tensor."""
    token_ids = read_tensor(fd, header.tensors[TOKEN_IDS], mmap).long()  # as they are, unless another producer wrote int32
    return token_ids, read_tensor(fd, header.tensors[SCALES], mmap) if SCALES in header.tensors else None


def open_stored(path: Path, timeout: float | None) -> Place:
    """Wait until a request is complete, and open the file of it, or the shard that it is in. `load` says what it waits for and raises."""
    lock_path = _companion(path, LOCK_SUFFIX)
    deadline = deadline_after(timeout)
    try:
        while True:
            wait_until_released(lock_path, None if deadline is None else max(0.0, deadline - time.monotonic()))
            place = _stored(path)
            if place is not None:
                return place
            if not os.path.exists(lock_path):
                raise FileNotFoundError(
                    errno.ENOENT,
                    "no hidden states, no lock and no error are there; was the request aborted, or did its server die?",
                    str(path),
                )
            if is_left_over(lock_path, partial(is_decided, path)):
                raise HiddenStatesError(
                    path,
                    "the server died before the file was complete: it left the lock file, which nobody holds, and no data",
                )
            # A server has begun to write the file, or has completed it, between two of the looks.
    except NotAFileError as error:
        raise HiddenStatesError(path, error.reason) from error


def _stored(path: Path) -> Place | None:
    """Open what a request has become; None: nothing yet. Raises HiddenStatesError: it has failed; OSError: it cannot be opened."""
    with suppress(FileNotFoundError):
        raise HiddenStatesError(path, failure_reason(_companion(path, ERROR_SUFFIX)))
    with suppress(FileNotFoundError):
        return whole_file(open_regular(path))
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


def open_dir(
    directory: str | os.PathLike[str], *, mmap: bool = False, on_bad: Callable[[HiddenStatesError], None] | None = None
) -> Iterator[tuple[Path, HiddenStates]]:
    """The complete files of a directory, and the members of its shards, in the order of their names, each loaded when it is asked for.

    Files that a server is still writing are passed over, and so are files that somebody takes away meanwhile.

    Args:
        directory: where the server stores them.
        mmap: as for `load`.
        on_bad: called for each file that is none of hidden states, and for each whose request failed though there is one; such files are
            then passed over. Without it the first one ends the iteration: nobody is to train on less than a dataset without being told.

    Raises:
        HiddenStatesError: there is such a file, and no `on_bad`.
        OSError: the directory or a file cannot be read.
    """
    with os.scandir(directory) as entries:
        names = {e.name for e in entries if e.name.endswith(DATA_SUFFIX) and not e.name.startswith(".")}
    for name in sorted(names | shards_of(directory).members().keys()):
        path = Path(directory, name)
        try:
            states = load(path, 0, mmap=mmap)
        except (FileNotFoundError, TimeoutError):  # taken away, still written
            continue
        except HiddenStatesError as error:
            if on_bad is None:
                raise
            on_bad(error)
            continue
        yield path, states


def remove(path: str | os.PathLike[str], *, keep_data: bool = False) -> None:
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
        try:
            os.unlink(each)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                raise
    if not keep_data:
        remove_member(path)


def _companion(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def whole_file(fd: int) -> Place:
    """A file that is one of hidden states by itself."""
    return Place(fd, 0, os.fstat(fd).st_size)


def failure_reason(path: Path) -> str:
    """The server's reason in an error file. Raises OSError: it is not there, cannot be read, or is no file."""
    content = read_regular(path)
    with suppress(ValueError):
        said = parse(content)
        if isinstance(said, dict) and isinstance(said.get("reason"), str):
            return str(said["reason"])
    return f"the server reports a failure that cannot be understood: {content[:200]!r}"


def difference(place: Place, header: Header) -> str | None:
    """What speaks against the file being as it was written, or None if nothing does."""
    stated = stated_checksum(header.content, header.metadata)
    if stated is None:
        return unverifiable(header)
    expected, digest = stated
    digest.read(place.fd, place.offset + len(header.content), place.offset + place.size)
    found = digest.hexdigest()
    return None if found == expected else f"it is not as it was written: its checksum is {found}, not {expected}"


def unverifiable(header: Header) -> str:
    """Return why a file has no checksum that can be compared."""
    algorithm = header.metadata.get("checksum_algorithm")
    return f"it cannot be verified: its metadata has no {ALGORITHM} checksum (checksum_algorithm is {algorithm})"
