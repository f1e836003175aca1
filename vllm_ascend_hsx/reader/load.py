"""Wait for a request's file and load it, or report why the request failed.

Needs torch, but neither vLLM nor torch_npu. Also reads files of other producers if they have the
same two tensors.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy.typing as npt

from vllm_ascend_hsx.protocol.arguments import deadline_after, require_path, require_text
from vllm_ascend_hsx.protocol.checksum import Digest, stated_checksum, unverifiable
from vllm_ascend_hsx.protocol.files import Naming, NotAFileError, open_regular, read_regular
from vllm_ascend_hsx.protocol.format import (
    HIDDEN_STATES,
    SCALES,
    TOKEN_IDS,
    FormatError,
    Header,
    TensorInfo,
    layer_ids_of,
    num_prompt_tokens_of,
    read_header,
)
from vllm_ascend_hsx.protocol.names import (
    ACKNOWLEDGED_SUFFIX,
    DATA_SUFFIX,
    ERROR_SUFFIX,
    LOCK_SUFFIX,
    SHARDS_MARK,
)
from vllm_ascend_hsx.protocol.placeholders import Placeholder, placeholders_of
from vllm_ascend_hsx.protocol.request_ids import belongs_to
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.protocol.weights import WeightVersion, weight_versions_of
from vllm_ascend_hsx.reader.lock_wait import is_left_over, wait_until_released
from vllm_ascend_hsx.reader.members import open_member, paths_below, remove_member
from vllm_ascend_hsx.reader.other_machines import OtherMachines, may_be_written_elsewhere
from vllm_ascend_hsx.reader.shards import Place, member_problem
from vllm_ascend_hsx.reader.tensors import (
    check_tensors,
    dequantized,
    model_dtype,
    read_tensor,
    to_numpy,
)

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
STORAGE_REMEDY = "give the directory to which the server writes"
RESPONSE_REMEDY = "give the `id` of the response"
PATH_REMEDY = (
    "give the path from the response, kv_transfer_params['hidden_states_path'], or from `find`"
)
# Seconds to wait for another reader that tries an exclusive lock for a moment.
_MOMENT_S = 0.05
# Seconds between two looks for a file whose lock does not reach this machine. inotify does not
# report changes that other machines make.
_POLL_S = 0.5
_NOTHING = (
    "there are no hidden states, lock or error; was the request refused (see hidden_states_error "
    "in its response) "
    f"or aborted, did its server die, or were shards copied without {SHARDS_MARK}?"
)
_DIED = (
    "the server died before the file was complete, or could not store the reason of a failure: "
    "there is a free lock and no data"
)
_OUT_OF_REACH = (
    "there is no file yet, its lock is free here, and so is the lock of a server on {}: locks do "
    "not reach the server's machine, or the server has just died. Mount the directory on both with "
    "flock and without localflock (Lustre), or with local_lock=none and without nolock (NFS); `hsx "
    "doctor --out` names the mount option"
)


class HiddenStatesError(Exception):
    """There are no hidden states at `path`, and no server will write them.

    Attributes:
        path: the requested file.
        reason: one sentence, from the server if it left a reason.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Arrays(NamedTuple):
    """Rows and token ids of a request as numpy arrays, in the shapes of `HiddenStates`."""

    hidden_states: npt.NDArray[Any]
    token_ids: npt.NDArray[Any]


class _Stored(NamedTuple):
    """The parts of HiddenStates. A named tuple cannot have attributes besides them."""

    hidden_states: torch.Tensor
    token_ids: torch.Tensor
    metadata: dict[str, str]
    scales: torch.Tensor | None = None


class HiddenStates(_Stored):
    """One request's hidden states, a tuple of four parts.

    Attributes:
        hidden_states: [tokens, layers, hidden] in the model's dtype, layers in the server's order.
            float8_e4m3fn if rows are quantised and were loaded with dequantize=False.
        token_ids: int64 [tokens], prompt first, then output.
        metadata: the file's metadata; empty if the producer wrote none.
        scales: float32 [tokens, 1, 1] if the file's rows are quantised, else None.
        path: the file, or the handle in a store; None if not loaded. Not a part of the tuple.
    """

    path: Path | None = None

    def __repr__(self) -> str:
        rows, layer_ids = self.hidden_states, self.metadata.get("layer_ids")
        path = None if self.path is None else str(self.path)
        return (
            f"HiddenStates(path={path!r}, shape={list(rows.shape)}, dtype={rows.dtype}, "
            f"layer_ids={layer_ids})"
        )

    def numpy(self, dtype: object = None) -> Arrays:
        """Return rows and token ids as numpy arrays. Quantised rows are dequantised, as by `load`.

        The arrays share memory with the tensors unless they are converted.

        Args:
            dtype: "float16", "bfloat16" (of ml_dtypes), "float32" or "float64", as a name or as a
                type of numpy, ml_dtypes or torch. Numbers that float16 cannot represent become
                infinite. By default bfloat16 becomes float32, and other dtypes stay.

        Raises:
            ModuleNotFoundError: if ml_dtypes is needed and not installed.
            ValueError: if `dtype` is none of these.
        """
        rows = self.hidden_states
        if self.scales is not None and rows.dtype != self.dtype:
            rows = dequantized(rows, self.scales, self.dtype)
        return Arrays(to_numpy(rows, dtype), self.token_ids.numpy())

    def _stated(self, key: str, value: _T | None) -> _T:
        if value is None:
            problem = (
                f"{key} is not among the metadata of {self.path or 'these rows'} "
                f"({', '.join(self.metadata) or 'none':.200})"
            )
            raise KeyError(
                f"{problem}: another producer wrote them. Test `{key!r} in states.metadata` first."
            )
        return value

    @property
    def layer_ids(self) -> list[int]:
        """The residual stream of each layer: id i is the stream after i layers.

        Raises:
            KeyError: if the metadata have no layer ids.
            ValueError: if the metadata are invalid, never after `load`.
        """
        return self._stated("layer_ids", layer_ids_of(self.metadata))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens. Raises like `layer_ids`."""
        return self._stated("num_prompt_tokens", num_prompt_tokens_of(self.metadata))

    @property
    def placeholders(self) -> list[Placeholder]:
        """The rows of each image in the prompt: (modality, start, length). Raises ValueError."""
        return placeholders_of(self.metadata)

    @property
    def weight_versions(self) -> list[WeightVersion]:
        """The version of the weights that computed all rows, or the oldest and the newest.

        Empty if the producer names none. Raises ValueError.
        """
        return weight_versions_of(self.metadata)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's rows, before quantisation. Default: bfloat16."""
        return self.hidden_states.dtype if self.scales is None else model_dtype(self.metadata)


def load(
    path: str | os.PathLike[str],
    timeout: float | None = 60.0,
    *,
    mmap: bool = False,
    verify: bool = False,
    dequantize: bool = True,
    response_id: str | None = None,
) -> HiddenStates:
    """Wait until the file of a request is complete, and load it.

    Sleeps until the server releases the lock: the file is complete, the request failed, or the
    server died. If locks do not reach this machine, `load` waits while the server has a heartbeat.

    Args:
        path: the path from the response (`kv_transfer_params["hidden_states_path"]`).
        timeout: most seconds to wait for the server, 0 or more. None or infinity waits forever.
        mmap: whether to map the file instead of reading it. Changes to the tensors stay private.
            Dequantised rows are always read at once.
        verify: whether to read the whole file and compare the checksum. In format version 1 the
            checksum covers the tensors only.
        dequantize: whether to return quantised rows in the model's dtype. If not, use
            `reader.tensors.dequantized`.
        response_id: the `id` of the response, to refuse rows of another request of the same name.
            Not for /inference/v1/generate, a batch of chats, or ids of /v1/responses that a client
            has chosen and that begin with `chatcmpl-`.

    Raises:
        HiddenStatesError: if the request failed, the server died before the file was complete, or
            the file is invalid, of another request, cannot be verified or differs from the
            checksum.
        ValueError: if an argument is invalid.
        TimeoutError: if the server is still writing, or may be on another machine.
        FileNotFoundError: if nothing is there: a wrong path, an aborted request, or a removed file.
        OSError: if the file, or an index that may list it, cannot be read, or memory is short.
    """
    path = require_path("path", path, PATH_REMEDY, named=True)
    if response_id is not None:
        require_text("response_id", response_id, f"{RESPONSE_REMEDY}; or None")
    with checked(path, timeout) as (place, header):
        if response_id is not None and not belongs_to(
            owner := header.metadata.get("request_id", ""), response_id
        ):
            owner = f", {owner}" if owner else ""
            raise HiddenStatesError(
                path, f"these are rows of another request{owner}, not of response {response_id}"
            )
        if verify and (problem := difference(place, header)):
            raise HiddenStatesError(path, problem)
        return assembled(path, header, partial(read_tensor, place.fd, mapped=mmap), dequantize)


@contextmanager
def checked(path: Path, timeout: float | None) -> Iterator[tuple[Place, Header]]:
    """Open the file for `load`, and yield file and header. Convert FormatErrors of the block."""
    with Naming(path):
        place = open_stored(path, timeout)
        try:
            header = read_header(place.fd, place.offset, place.size)
            check_tensors(header)
            if place.line is not None and (problem := member_problem(place, header, place.line)):
                raise HiddenStatesError(path, problem)
            yield place, header
        except FormatError as error:
            raise HiddenStatesError(
                path, f"this is not a file of hidden states: {error}"
            ) from error
        except MemoryError as error:
            raise OSError(
                errno.ENOMEM, f"not enough memory for a file of {place.size} bytes", str(path)
            ) from error
        finally:
            os.close(place.fd)


def assembled(
    path: Path, header: Header, read: Callable[[TensorInfo], torch.Tensor], dequantize: bool
) -> HiddenStates:
    """Return the hidden states of a file or object whose tensors `read` returns."""
    tensors, metadata = header.tensors, header.metadata
    rows, token_ids = read(tensors[HIDDEN_STATES]), read(tensors[TOKEN_IDS])
    scales = read(tensors[SCALES]) if SCALES in tensors else None
    if scales is not None and dequantize:
        rows = dequantized(rows, scales, model_dtype(metadata))
    # long() copies nothing, unless another producer wrote int32.
    states = HiddenStates(rows, token_ids.long(), metadata, scales)
    states.path = path
    return states


def open_stored(path: Path, timeout: float | None) -> Place:
    """Wait until a request is complete, and open its file or shard. Raises like `load`."""
    lock_path = _companion(path, LOCK_SUFFIX)
    deadline = deadline_after(timeout)
    others: OtherMachines | None = None
    try:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            wait_until_released(lock_path, left)
            place = _stored(path)
            if place is None and not os.path.exists(lock_path):
                place = _stored(path)  # it may have been published in between, and the lock removed
                if place is None:
                    raise FileNotFoundError(errno.ENOENT, _NOTHING, str(path))
            if place is not None:
                return place
            others = others or OtherMachines(path)
            machine = others.living()  # first: no request may begin after the decision
            if is_left_over(lock_path, partial(is_decided, path)):
                if machine is None:
                    raise HiddenStatesError(path, _DIED)
                if left == 0:
                    raise TimeoutError(f"{path}: {_OUT_OF_REACH.format(machine)}")
                time.sleep(_POLL_S if left is None else min(_POLL_S, left))
            # Between two checks a server has started or finished the file.
    except NotAFileError as error:
        raise HiddenStatesError(path, error.reason) from error


def _stored(path: Path) -> Place | None:
    """Open the file or member of a request, or return None if there is none yet.

    Raises HiddenStatesError if the request has failed, and OSError if the file cannot be opened.
    """
    with suppress(FileNotFoundError):
        raise HiddenStatesError(path, failure_reason(_companion(path, ERROR_SUFFIX)))
    with suppress(FileNotFoundError):
        fd = open_regular(path)
        return Place(fd, 0, os.fstat(fd).st_size)
    return open_member(path)


def is_decided(path: Path) -> bool:
    """Return whether a request has failed or has a file or a member of a shard. Raises OSError."""
    try:
        place = _stored(path)
    except HiddenStatesError:
        return True
    if place is not None:
        os.close(place.fd)
    return place is not None


def open_dir(
    directory: str | os.PathLike[str],
    *,
    mmap: bool = False,
    on_bad: Callable[[HiddenStatesError], None] | None = None,
) -> Iterator[tuple[Path, HiddenStates]]:
    """Yield the complete files below a directory and the members of shards there, sorted by path.

    Files that are being written, or were removed meanwhile, are skipped.

    Args:
        directory: the server's storage directory.
        mmap: as for `load`.
        on_bad: called for each bad file, which is then skipped: an invalid file, a file for which
            memory is short, or a file of a failed request. Damaged lines of an index and lost tar
            files are found by `hsx verify` only.

    Raises:
        ValueError: if `directory` is no path.
        HiddenStatesError: at the first bad file without `on_bad`.
        OSError: if the directory, a folder below it, or a file cannot be read.
    """
    for path in paths_below(require_path("directory", directory, STORAGE_REMEDY), (DATA_SUFFIX,)):
        try:
            states = load(path, 0, mmap=mmap)
        except (FileNotFoundError, TimeoutError):  # removed, or still being written
            continue
        except HiddenStatesError as error:
            if on_bad is None:
                raise
            on_bad(error)
        except OSError as error:
            if on_bad is None or error.errno != errno.ENOMEM:
                raise
            on_bad(HiddenStatesError(path, f"it cannot be read: {error.strerror}"))
        else:
            yield path, states


def remove(path: str | os.PathLike[str], *, keep_data: bool = False) -> None:
    """Remove file, lock, error and acknowledgement of a request. Missing files are not an error.

    A member of a shard is only hidden, and the bytes remain. A later member of the same name is
    visible.

    Args:
        path: as for `load`.
        keep_data: whether to remove only lock and error.

    Raises:
        ValueError: if `path` is no path.
        TimeoutError: if the server is still writing, or may be on another machine. Nothing is
            removed then.
        OSError: if a file cannot be removed, or a member of a shard cannot be marked.
    """
    path = require_path("path", path, PATH_REMEDY, named=True)
    lock = _companion(path, LOCK_SUFFIX)
    with suppress(NotAFileError):
        wait_until_released(lock, _MOMENT_S)
        if (
            not os.path.lexists(path)
            and is_left_over(lock, partial(is_decided, path))
            and may_be_written_elsewhere(path)
        ):
            raise TimeoutError(
                f"{path}: its lock is free here, but a server on another machine may still be "
                "writing it"
            )
    # The lock first: without a lock readers treat the data as complete; with a lock and no data
    # they would report a dead server.
    is_file = os.path.lexists(path)
    _unlink(lock)
    if not keep_data:
        _unlink(path)
        remove_member(path, is_file)
        _unlink(_companion(path, ACKNOWLEDGED_SUFFIX))
    _unlink(_companion(path, ERROR_SUFFIX))


def _unlink(path: Path) -> None:
    """Remove a file if it exists. Ignore a name that is too long for any filesystem."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise


def _companion(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def failure_reason(path: Path) -> str:
    """Return the server's reason from an error file. Raises OSError if it cannot be read."""
    content = read_regular(path)
    if not content:
        return (
            "the request failed, and the storage had no space for the reason: see the server's log"
        )
    return reason_in(content, "reason")


def reason_in(content: bytes, key: str) -> str:
    """Return the reason of a failure, the text of `key` in a JSON object."""
    with suppress(ValueError):
        if isinstance(value := parse(content), dict) and isinstance(value.get(key), str):
            return str(value[key])
    return f"the server's report of the failure is invalid: {content[:200]!r}"


def difference(place: Place, header: Header) -> str | None:
    """Return how the file differs from the checksum, or why it cannot be verified, or None."""
    stated = stated_checksum(header.content, header.metadata)
    if stated is None:
        return unverifiable(header.metadata)
    stated[1].read(place.fd, place.offset + len(header.content), place.offset + place.size)
    return checksum_difference(*stated)


def checksum_difference(expected: str, digest: Digest) -> str | None:
    """Return how the digest of all bytes differs from the stated checksum, or None."""
    found = digest.hexdigest()
    return (
        None
        if found == expected
        else f"it has changed since it was written: its checksum is {found}, not {expected}"
    )
