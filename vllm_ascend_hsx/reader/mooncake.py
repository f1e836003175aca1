"""Wait for a request's hidden states in a Mooncake store and load them, or report why it failed.

Needs torch and Mooncake's package, but not vLLM. Only the protocol 'ascend' needs torch_npu and an
NPU. For files use `vllm_ascend_hsx.load`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.protocol.checksum import names_checksum, stated_checksum
from vllm_ascend_hsx.protocol.format import FormatError, TensorInfo
from vllm_ascend_hsx.protocol.mooncake.manifest import (
    ERROR_KEY_SUFFIX,
    HANDLE_KEY,
    MANIFEST_KEY_SUFFIX,
    keys_of,
    read_manifest,
)
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeClient, MooncakeError, MooncakeOptions
from vllm_ascend_hsx.reader.load import (
    HiddenStates,
    HiddenStatesError,
    assembled,
    checksum_difference,
    reason_in,
)
from vllm_ascend_hsx.reader.tensors import check_tensors, torch_dtype

if TYPE_CHECKING:
    import torch

# Seconds between polls, doubled each time. Mooncake signals no event for a new object. The object
# usually follows the response by some milliseconds.
_FIRST_POLL = 0.001
_LONGEST_POLL = 0.05

Handle = Mapping[str, Any] | str


class MooncakeReader:
    """A client of one store. Thread-safe.

    Args:
        master_server_address: host:port of `mooncake_master`.
        metadata_server, protocol, device_name: as in `kv_connector_extra_config.mooncake` of the
            server. With the protocol 'ascend' the reader uses the NPU that `torch.npu.set_device`
            chose in the calling thread, or the first visible NPU.
        local_hostname: name or address by which others reach this machine; None for the address
            from which this machine reaches the master.

    Raises:
        UserError: if the store cannot be reached, Mooncake's package is missing, or the protocol
            is 'ascend' and the process has no NPU.
    """

    def __init__(
        self,
        master_server_address: str,
        *,
        metadata_server: str = "P2PHANDSHAKE",
        local_hostname: str | None = None,
        protocol: Literal["tcp", "rdma", "ascend"] = "tcp",
        device_name: str = "",
    ) -> None:
        options = MooncakeOptions(
            master_server_address=master_server_address,
            metadata_server=metadata_server,
            local_hostname=local_hostname,
            protocol=protocol,
            device_name=device_name,
        )
        self._client = MooncakeClient(options, segment=0)

    def load(
        self,
        params: Handle,
        timeout: float | None = 60.0,
        *,
        verify: bool = True,
        dequantize: bool = True,
    ) -> HiddenStates:
        """Wait until a request is complete, and load it.

        Args:
            params: the response's `kv_transfer_params`, or the handle in them.
            timeout: most seconds to wait for the server, 0 or more. None or infinity waits forever.
            verify: whether to verify the checksum of the data, if the server made one.
            dequantize: whether to return quantised rows in the model's dtype. If not, they are
                returned as stored, with their scales.

        Raises:
            HiddenStatesError: if the request failed, or the data were removed or differ from the
                checksum.
            TimeoutError: if nothing is in the store yet: the server is still writing or has died,
                or the handle is wrong.
            MooncakeError: if the store does not answer.
            ValueError: if `params` have no handle, or the timeout is not a number of seconds.
        """
        handle = _handle(params)
        text = self._wait(handle, timeout)
        try:
            header = read_manifest(text)
            check_tensors(header)
        except FormatError as error:
            raise HiddenStatesError(Path(handle), str(error)) from error
        data = self._read(handle, max(tensor.end for tensor in header.tensors.values()))
        if verify and names_checksum(header.metadata):
            stated = stated_checksum(text, header.metadata)
            if stated is None:
                raise HiddenStatesError(
                    Path(handle),
                    "it cannot be verified: its manifest names an unknown checksum algorithm",
                )
            stated[1].update(data.numpy().data)
            if problem := checksum_difference(*stated):
                raise HiddenStatesError(Path(handle), problem)
        return assembled(Path(handle), header, partial(_tensor, data), dequantize)

    def remove(self, params: Handle) -> None:
        """Remove all objects of a request, even during a read. Missing objects are not an error.

        Call this after `load`: the store keeps the data until then, even if it runs short of
        memory.

        Args:
            params: as for `load`.

        Raises:
            MooncakeError: if the store does not answer.
        """
        self._client.remove(keys_of(_handle(params)))

    def close(self) -> None:
        """Leave the store."""
        self._client.close()

    def __enter__(self) -> MooncakeReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, handle: str, timeout: float | None) -> bytes:
        """Poll the store for the manifest, and return it. The store signals no event."""
        deadline = deadline_after(timeout)
        delay = _FIRST_POLL
        failure, complete = handle + ERROR_KEY_SUFFIX, handle + MANIFEST_KEY_SUFFIX
        while True:
            has_data, has_failed, has_manifest = self._client.exist([handle, failure, complete])
            if has_failed and (text := self._client.get(failure)) is not None:
                raise HiddenStatesError(Path(handle), reason_in(text, "error"))
            if has_manifest and (text := self._client.get(complete)) is not None:
                return text
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if has_manifest or has_failed:
                    raise HiddenStatesError(
                        Path(handle), f"it is in the store, but cannot be read: {_OUT_OF_REACH}"
                    )
                if has_data:
                    problem = (
                        "its data is in the store, but its manifest is missing: it was removed, or "
                        "the process that held it in memory has ended"
                    )
                    raise HiddenStatesError(Path(handle), problem)
                problem = f"nothing is in the store under {handle!r} after {timeout:g} s"
                raise TimeoutError(f"{problem}: has the request ended, and is its server alive?")
            time.sleep(delay if left is None else min(delay, left))
            delay = min(2 * delay, _LONGEST_POLL)

    def _read(self, handle: str, size: int) -> torch.Tensor:
        """Return the bytes of an object of at least `size` bytes."""
        import torch

        stored = self._client.size(handle)
        if stored is None or stored < size:
            found = (
                "is no longer in the store" if stored is None else f"has {stored} bytes, not {size}"
            )
            raise HiddenStatesError(Path(handle), f"its data {found}: {_REMOVED_OR_LOST}")
        data = torch.empty(stored, dtype=torch.uint8)
        self._client.register(data.data_ptr(), stored)
        try:
            read = self._client.read_into(handle, data.data_ptr(), stored)
        except MooncakeError as error:
            problem = f"its data could not be read ({error}): it took too long, or {_OUT_OF_REACH}"
            raise HiddenStatesError(Path(handle), problem) from error
        finally:
            self._client.unregister(data.data_ptr())
        if read != stored:
            raise HiddenStatesError(
                Path(handle), f"its data is no longer in the store: {_REMOVED_OR_LOST}"
            )
        return data


_OUT_OF_REACH = (
    "the process that holds it in memory has ended, or its address (mooncake.local_hostname) "
    "cannot be reached"
)
_REMOVED_OR_LOST = "it was removed, or the process that held it in memory has ended"


def _handle(params: Handle) -> str:
    handle = params.get(HANDLE_KEY) if isinstance(params, Mapping) else params
    if not isinstance(handle, str) or not handle:
        raise ValueError(
            f"there is no {HANDLE_KEY!r} in {params!r}; give the response's kv_transfer_params "
            "as they are"
        )
    return handle


def _tensor(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Return one tensor, a view of the data if aligned. The server aligns all tensors."""
    part = data[info.begin : info.end]
    dtype = torch_dtype(info.dtype)
    if info.begin % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(info.shape)
