"""A client of a Mooncake store, with options and errors."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_ascend_hsx.protocol.arguments import LARGEST, parse_size
from vllm_ascend_hsx.protocol.errors import UserError

# Bytes of the client's own memory, for values outside registered memory: manifests and errors.
# With 0, over any transport, Mooncake neither puts nor gets these values: put returns -600
# (mooncake-store/src/real_client.cpp:1652 in 0.3.11.post1).
_OWN_BUFFER = 16 << 20
_CONNECT_TIMEOUT = 5.0  # seconds

# Statuses of the client of mooncake-transfer-engine, the same in 0.3.11.post1 and 0.3.13.post1.
_NO_ROOM = -200
_NOT_FOUND = -704
_LEASE_EXPIRED = -707
_TRANSFER_FAILED = -800
_NO_ANSWER = -900
_ANSWER_TOO_LATE = -901
_MASTER_UNREACHABLE = 2  # of health_check

_HOLDER_GONE = (
    errno.EHOSTUNREACH,
    "the process that provides the memory cannot be reached: it has ended, or other machines "
    "cannot reach its address (mooncake.local_hostname)",
)
_MEANINGS = {
    _NO_ROOM: (
        errno.ENOSPC,
        "the store is full: let consumers remove requests after reading, or increase "
        "mooncake.global_segment_size",
    ),
    _NOT_FOUND: _HOLDER_GONE,  # of a put: the memory was lost during the write
    _TRANSFER_FAILED: _HOLDER_GONE,
    _LEASE_EXPIRED: (
        errno.ETIMEDOUT,
        (
            "it took longer than the store's lease: start mooncake_master with a longer "
            "-default_kv_lease_ttl"
        ),
    ),
    _NO_ANSWER: (
        errno.ENOTCONN,
        "mooncake_master does not answer: check that it is running and reachable",
    ),
    _ANSWER_TOO_LATE: (
        errno.ETIMEDOUT,
        "mooncake_master did not answer in time: check that it is running and not overloaded",
    ),
}

Size = Annotated[int, BeforeValidator(parse_size)]
OPTION = "kv_connector_extra_config.mooncake"
# Holds the only engine of vllm-ascend's KV connectors in this process.
_SHARED_ENGINE = "vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine"
_FABRIC_MEMORY = "ASCEND_ENABLE_USE_FABRIC_MEM"


class MooncakeOptions(BaseModel):
    """The options of `kv_connector_extra_config.mooncake`.

    The keys are the same as in hs_connectors' MooncakeStoreConfig (0.9.0).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    master_server_address: str = Field(description="host:port of `mooncake_master`.")
    metadata_server: str = Field(
        default="P2PHANDSHAKE", description="Mooncake's metadata server, or P2PHANDSHAKE for none."
    )
    local_hostname: str | None = Field(
        default=None,
        description=(
            "Name or address of this machine for others; by default the address from which it "
            "reaches the master."
        ),
    )
    protocol: Literal["tcp", "rdma", "ascend"] = Field(
        default="tcp",
        description=(
            "Mooncake's transport. 'ascend', the transport of vllm-ascend's KV connectors, needs "
            "a build of Mooncake for Ascend, and an NPU in servers and readers."
        ),
    )
    device_name: str = Field(
        default="",
        description="Devices of the transport, such as 'mlx5_0'; empty lets Mooncake choose.",
    )
    global_segment_size: Size = Field(
        default=4 << 30,
        ge=0,
        le=LARGEST,
        description=(
            "Bytes of this worker's memory that hold objects of the store; bytes, or a size such "
            "as '4GiB'."
        ),
    )
    local_buffer_size: Size = Field(
        default=2 << 30,
        ge=1 << 20,
        le=LARGEST,
        description=(
            "Bytes of this worker's memory in which requests are assembled before they are "
            "sent; bytes, or a size."
        ),
    )


class MooncakeError(OSError):
    """A failed operation of the store. `errno` is the nearest system error."""

    def __init__(self, status: int) -> None:
        code, meaning = _MEANINGS.get(
            status, (errno.EIO, f"Mooncake reports status {status}; its log says more")
        )
        super().__init__(code, meaning)
        self.status = status
        self.meaning = meaning

    @property
    def is_retryable(self) -> bool:
        """True if a put failed because of the memory that the master chose, and left no object."""
        return self.status in (_NOT_FOUND, _TRANSFER_FAILED)

    def __str__(self) -> str:
        return self.meaning


def load_package() -> ModuleType:
    """Return the module `mooncake.store`.

    Raises:
        UserError: if the package, or a library that it needs, is missing or too old.
    """
    try:
        import mooncake.store
    except ImportError as error:
        problem = f"cannot be used: Mooncake's package cannot be imported: {error}"
        remedy = (
            "Install the package that fits this machine, or `pip install vllm-ascend-hsx[mooncake]`; "
            "it needs libibverbs, libnuma and libcurl (Debian: apt-get install libibverbs1 "
            "libnuma1 libcurl4)."
        )
        raise UserError("sink", "mooncake", problem, remedy) from None
    if not hasattr(mooncake.store.ReplicateConfig, "with_hard_pin"):  # there since 0.3.10.post2
        problem = (
            "cannot be used: Mooncake's package is too old: it cannot protect objects from eviction"
        )
        raise UserError("sink", "mooncake", problem, "Install version 0.3.11 or later.")
    package: ModuleType = mooncake.store
    return package


def soft_pinned(package: ModuleType) -> Any:
    """Return the configuration of an object that a full store evicts after all unpinned objects.

    Args:
        package: `mooncake.store`. The flag of 0.3.11.post1, the version in vllm-ascend's images,
            has the effect of 0.3.13's action (mooncake-integration/store/store_py.cpp:1598).
    """
    config = package.ReplicateConfig()
    if hasattr(package, "SoftPinAction"):
        config.soft_pin_action = package.SoftPinAction.ENABLE
    else:
        config.with_soft_pin = True
    return config


def bind_npu(npu: int | None = None) -> int:
    """Give the calling thread a context on an NPU, and return the NPU.

    Ascend's transport neither initialises an engine nor registers memory in a thread without a
    context (ascend_direct_transport.cpp:203 and 316 in Mooncake 0.3.11.post1). Threads of the
    transport make the transfers, in the engine's context (slice_dispatcher.cpp:83).

    Args:
        npu: None for the NPU that `torch.npu.set_device` chose in the thread, or the first NPU of
            ASCEND_RT_VISIBLE_DEVICES.

    Raises:
        UserError: if torch_npu is missing, or the NPU cannot be used.
    """
    try:
        from torch_npu import npu as npus

        chosen: int = npus.current_device() if npu is None else npu
        npus.set_device(chosen)
    except (ImportError, RuntimeError) as error:
        problem = f"needs an NPU in every process that opens the store, also in a reader: {error}"
        remedy = (
            "Read on a machine with vllm-ascend's torch_npu and an NPU, or set 'rdma' or 'tcp' "
            "for server and readers."
        )
        raise UserError(f"{OPTION}.protocol", "ascend", problem, remedy) from None
    return chosen


def ascend_engine(hostname: str, options: MooncakeOptions) -> Any:
    """Return a transfer engine over Ascend's transport, set up like vllm-ascend's engine.

    A process has one engine. A worker shares the engine of vllm-ascend's KV connectors, because
    they may run beside ours (distributed/kv_transfer/utils/mooncake_transfer_engine.py in 0.23.0).

    Raises:
        UserError: if the installed Mooncake has no Ascend transport, or it cannot be set up.
    """
    option, remedy = (
        f"{OPTION}.protocol",
        (
            "Install the package of vllm-ascend's image, or `pip install "
            "vllm-ascend-hsx[mooncake-ascend]`."
        ),
    )
    if os.environ.get(_FABRIC_MEMORY, "0") == "1":
        problem = (
            f"cannot be used with {_FABRIC_MEMORY}=1, where memory is not registered with an engine"
        )
        raise UserError(
            option, options.protocol, problem, f"Unset {_FABRIC_MEMORY}, or choose 'rdma' or 'tcp'."
        )
    try:
        if "vllm_ascend" in sys.modules:
            shared = importlib.import_module(_SHARED_ENGINE).global_te
            return shared.get_transfer_engine(hostname, options.device_name)
        engine = importlib.import_module("mooncake.engine").TransferEngine()
    except (ImportError, RuntimeError) as error:
        raise UserError(option, options.protocol, f"cannot be used: {error}", remedy) from None
    if status := engine.initialize(hostname, "P2PHANDSHAKE", options.protocol, options.device_name):
        problem = (
            f"cannot be used: the engine's set-up failed with status {status}; its log, on "
            "stderr, says more"
        )
        raise UserError(option, options.protocol, problem, remedy)
    return engine


def own_address(master: str) -> str:
    """Connect to the master at host:port, and return the local address of the connection.

    Call it before Mooncake's own set-up: that retries for 90 seconds and blocks all other threads
    of the process (0.3.13).

    Raises:
        UserError: if the master cannot be reached.
    """
    host, _, port = master.rpartition(":")
    remedy = "Start `mooncake_master`, and set the host:port at which this machine reaches it."
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise UserError(f"{OPTION}.master_server_address", master, "is not host:port", remedy)
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), _CONNECT_TIMEOUT
        ) as connection:
            address: str = connection.getsockname()[0]
            return address
    except OSError as error:
        raise UserError(
            f"{OPTION}.master_server_address",
            master,
            f"cannot be reached: {error.strerror or error}",
            remedy,
        ) from None


class MooncakeClient:
    """A client of a store. Thread-safe.

    The first call blocks for up to 30 seconds if the master hangs, or 5 if it is gone. Later calls
    fail at once: Mooncake checks the master every second. Methods raise MooncakeError if the
    operation fails.

    Args:
        options: options of the store.
        segment: bytes of memory that this process contributes to the store.

    Raises:
        UserError: if the store cannot be used.
    """

    def __init__(self, options: MooncakeOptions, segment: int) -> None:
        package = load_package()
        address = own_address(options.master_server_address)
        self._pinned = package.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._evictable = soft_pinned(package)
        self._store: Any = package.MooncakeDistributedStore()
        hostname = options.local_hostname or address
        self._npu = bind_npu() if options.protocol == "ascend" else None
        self._engine = ascend_engine(hostname, options) if options.protocol == "ascend" else None
        engine = {}
        if self._engine is not None:
            hostname = f"{hostname}:{self._engine.get_rpc_port()}"
            engine = {"engine": self._engine.get_engine()}
        status = self._store.setup(
            local_hostname=hostname,
            metadata_server=options.metadata_server,
            global_segment_size=segment,
            local_buffer_size=_OWN_BUFFER,
            protocol=options.protocol,
            rdma_devices=options.device_name,
            master_server_addr=options.master_server_address,
            **engine,
        )
        if status != 0:
            problem = (
                f"accepts connections, but Mooncake's set-up failed with status {status}; its log, "
                "on stderr, says more"
            )
            remedy = (
                "Check that it is a mooncake_master of this version, and that protocol, "
                "device_name and metadata_server fit."
            )
            raise UserError(
                f"{OPTION}.master_server_address", options.master_server_address, problem, remedy
            )
        # While this process's segment has room, objects are lost with this process alone. Without a
        # segment, this name has no effect.
        self._pinned.preferred_segment = self._evictable.preferred_segment = (
            self._store.get_hostname()
        )

    def register(self, address: int, size: int) -> None:
        """Register memory, to move data to and from it without another copy."""
        self._bind_npu()
        if self._engine is not None:  # as vllm-ascend does
            _check(self._engine.register_memory(address, size))
        else:
            _check(self._store.register_buffer(address, size))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._bind_npu()
        _check(
            self._store.unregister_buffer(address)
            if self._engine is None
            else self._engine.unregister_memory(address)
        )

    def put_parts(self, key: str, parts: Sequence[tuple[int, int]]) -> None:
        """Store one object, made of parts (address, bytes) of registered memory.

        The object becomes visible as a whole and is not evicted. There must be no object of this
        key: Mooncake would keep the old object and report success.
        """
        self._require_master()
        addresses, sizes = [list(each) for each in zip(*parts, strict=True)]
        (status,) = self._store.batch_put_from_multi_buffers(
            [key], [addresses], [sizes], self._pinned
        )
        _check(status)

    def put(self, key: str, value: bytes, *, evictable: bool = False) -> None:
        """Store a small object, like `put_parts`. With `evictable`, a full store may evict it."""
        self._require_master()
        _check(self._store.put(key, value, self._evictable if evictable else self._pinned))

    def remove(self, keys: list[str]) -> None:
        """Remove objects, even while they are read. Missing objects are no error."""
        self._require_master()
        for status in self._store.batch_remove(keys, True):
            if status != _NOT_FOUND:
                _check(status)

    def exist(self, keys: list[str]) -> list[bool]:
        """Return for each key whether it has an object."""
        return [bool(_check(status)) for status in self._store.batch_is_exist(keys)]

    def get(self, key: str) -> bytes | None:
        """Return a small object, or None if it is missing or cannot be read."""
        value: bytes = self._store.get(key)
        return value or None

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, or None if it is missing."""
        status: int = self._store.get_size(key)
        return None if status == _NOT_FOUND else _check(status)

    def read_into(self, key: str, address: int, size: int) -> int | None:
        """Read an object into registered memory. Return its size, or None if it is missing."""
        status: int = self._store.get_into(key, address, size)
        return None if status == _NOT_FOUND else _check(status)

    def close(self) -> None:
        """Leave the store. Objects in this process's segment are lost."""
        self._bind_npu()  # Mooncake unregisters internal memory
        self._store.close()

    def _bind_npu(self) -> None:
        """Give the calling thread the client's NPU, if the transport needs one."""
        if self._npu is not None:
            bind_npu(self._npu)

    def _require_master(self) -> None:
        """Fail at once if the master is known not to answer, instead of after seconds."""
        if self._store.health_check() == _MASTER_UNREACHABLE:
            raise MooncakeError(_NO_ANSWER)


def _check(status: int) -> int:
    if status < 0:
        raise MooncakeError(status)
    return status
