"""Consumers of a Mooncake store: wait for a request's hidden states and load them, or get the reason of its failure.

Needs torch and Mooncake's package, and neither vLLM nor torch_npu. `vllm_ascend_hsx.load` is the same for files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from vllm_ascend_hsx.protocol.arguments import deadline_after
from vllm_ascend_hsx.protocol.checksum import names_checksum, stated_checksum
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, SCALES, TOKEN_IDS, FormatError, TensorInfo
from vllm_ascend_hsx.protocol.mooncake_manifest import ERROR_KEY_SUFFIX, HANDLE_KEY, MANIFEST_KEY_SUFFIX, keys_of, read_manifest
from vllm_ascend_hsx.protocol.mooncake_store import MooncakeClient, MooncakeError, MooncakeOptions
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError
from vllm_ascend_hsx.reader.quantized import dequantized, quantization_problem
from vllm_ascend_hsx.reader.tensors import check_tensors, torch_dtype

if TYPE_CHECKING:
    import torch

# Mooncake tells nobody that an object has appeared, so it is asked, at first every millisecond: an object mostly follows the response
# by some.
_FIRST_POLL = 0.001
_LONGEST_POLL = 0.05

Handle = Mapping[str, Any] | str


class MooncakeReader:
    """Reads from one store. Its methods may be called from several threads.

    Args:
        master_server_address: host:port of `mooncake_master`.
        metadata_server, protocol, device_name: as the server has them in `kv_connector_extra_config.mooncake`.
        local_hostname: name or address under which others reach this machine; by default the one that the master sees.

    Raises:
        UserError: the store cannot be reached, or Mooncake's package is not there.
    """

    def __init__(
        self,
        master_server_address: str,
        *,
        metadata_server: str = "P2PHANDSHAKE",
        local_hostname: str | None = None,
        protocol: Literal["tcp", "rdma"] = "tcp",
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

    def load(self, params: Handle, timeout: float | None = 60.0, *, verify: bool = True, dequantize: bool = True) -> HiddenStates:
        """Wait until a request is complete, and load it.

        Args:
            params: the response's `kv_transfer_params`, or the handle in them.
            timeout: seconds to wait for the server at most, 0 or more; None or infinity waits for ever.
            verify: compare the data with its checksum, if the server made one.
            dequantize: give quantised rows in the model's dtype; otherwise as they are stored, with their scales.

        Raises:
            HiddenStatesError: the server says that the request failed; or its data is not what was written, or has gone.
            TimeoutError: nothing is there yet: the server is still at it, or has died, or the handle is wrong.
            MooncakeError: the store does not answer.
            ValueError: there is no handle in `params`, or the timeout is not a number of seconds.
        """
        import torch

        handle = _handle(params)
        text = self._wait(handle, timeout)
        try:
            header = read_manifest(text)
            check_tensors(header)
            if problem := quantization_problem(header):
                raise FormatError(problem)
        except FormatError as error:
            raise HiddenStatesError(Path(handle), str(error)) from error
        tensors, metadata = header.tensors, header.metadata
        size = max(tensor.end for tensor in tensors.values())
        stored = self._client.size(handle)
        if stored is None or stored < size:
            found = "is not there any more" if stored is None else f"has {stored} bytes, not {size}"
            raise HiddenStatesError(Path(handle), f"its data {found}: {_WHERE_IT_WENT}")
        data = torch.empty(stored, dtype=torch.uint8)
        self._read(handle, data)
        if verify and names_checksum(metadata):
            stated = stated_checksum(text, metadata)
            if stated is None:
                raise HiddenStatesError(Path(handle), "it cannot be verified: its manifest names a checksum of no known kind")
            expected, digest = stated
            digest.update(data.numpy().data)
            if digest.hexdigest() != expected:
                problem = f"it is not as it was written: its checksum is {digest.hexdigest()}, not {expected}"
                raise HiddenStatesError(Path(handle), problem)
        scales = _tensor(data, tensors[SCALES]) if SCALES in tensors else None
        states = HiddenStates(_tensor(data, tensors[HIDDEN_STATES]), _tensor(data, tensors[TOKEN_IDS]), metadata, scales)
        if scales is not None and dequantize:
            states = states._replace(hidden_states=dequantized(states.hidden_states, scales, states.dtype))
        return states

    def remove(self, params: Handle) -> None:
        """Remove all objects of a request, even while they are read; missing ones are no error.

        The store keeps data until then, whatever it is short of: call this after `load`.

        Args:
            params: as for `load`.

        Raises:
            MooncakeError: the store does not answer.
        """
        self._client.remove(keys_of(_handle(params)))

    def close(self) -> None:
        """Leave the store."""
        self._client.close()

    def __enter__(self) -> MooncakeReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _wait(self, handle: str, timeout: float | None) -> bytes:
        """The manifest, as soon as it is there."""
        deadline = deadline_after(timeout)
        delay = _FIRST_POLL
        failure, complete = handle + ERROR_KEY_SUFFIX, handle + MANIFEST_KEY_SUFFIX
        while True:
            has_data, has_failed, has_manifest = self._client.exist([handle, failure, complete])
            if has_failed and (text := self._client.get(failure)) is not None:
                raise HiddenStatesError(Path(handle), _reason(text))
            if has_manifest and (text := self._client.get(complete)) is not None:
                return text
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if has_manifest or has_failed:
                    raise HiddenStatesError(Path(handle), f"it is in the store and cannot be read: {_OUT_OF_REACH}")
                if has_data:
                    problem = "its data is there, but its manifest is not: somebody has removed it, or it went with a process that ended"
                    raise HiddenStatesError(Path(handle), problem)
                problem = f"nothing is in the store under {handle!r} after {timeout:g} s"
                raise TimeoutError(f"{problem}: is the request done, and its server alive?")
            time.sleep(delay if left is None else min(delay, left))
            delay = min(2 * delay, _LONGEST_POLL)

    def _read(self, handle: str, data: torch.Tensor) -> None:
        self._client.register(data.data_ptr(), data.numel())
        try:
            read = self._client.read_into(handle, data.data_ptr(), data.numel())
        except MooncakeError as error:
            problem = f"its data could not be read ({error}): it took too long, or {_OUT_OF_REACH}"
            raise HiddenStatesError(Path(handle), problem) from error
        finally:
            self._client.unregister(data.data_ptr())
        if read != data.numel():
            raise HiddenStatesError(Path(handle), f"its data is not there any more: {_WHERE_IT_WENT}")


_OUT_OF_REACH = "the process that holds it has ended, or is not at the address that it gave (mooncake.local_hostname)"
_WHERE_IT_WENT = "somebody has removed it, or the process whose memory it was in has ended"


def _handle(params: Handle) -> str:
    handle = params if isinstance(params, str) else params.get(HANDLE_KEY)
    if not isinstance(handle, str) or not handle:
        raise ValueError(f"there is no {HANDLE_KEY!r} in {params!r}; give the response's kv_transfer_params as they are")
    return handle


def _reason(text: bytes) -> str:
    """The server's reason in an error marker."""
    try:
        return str(parse(text)["error"])
    except (ValueError, TypeError, KeyError):
        return f"the server reports a failure that cannot be understood: {text[:200]!r}"


def _tensor(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """A view of the part of the data that one tensor has."""
    part = data[info.begin : info.end]
    dtype = torch_dtype(info.dtype)
    if info.begin % dtype.itemsize:  # torch has no views at such places; ours begin at multiples of 64
        part = part.clone()
    return part.view(dtype).view(info.shape)
