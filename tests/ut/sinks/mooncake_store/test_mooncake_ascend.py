"""`protocol: ascend`: the engine and the store are set up as vllm-ascend's KV connectors do it.

A thread binds an NPU before Ascend's transport uses the context of the thread.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from mooncake_master import MooncakeMaster
from sink_harness import FORMAT, bits, finite_rows, token_ids
from test_mooncake_objects import open_file

from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake import store as mooncake_store
from vllm_ascend_hsx.protocol.mooncake.store import (
    MooncakeClient,
    MooncakeError,
    MooncakeOptions,
    ascend_engine,
)
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks.mooncake.sink import MooncakeSink

T = TypeVar("T")
OPTIONS = MooncakeOptions(
    master_server_address="master:50051",
    local_hostname="10.0.0.1",
    protocol="ascend",
    device_name="3",
)


class FakeEngine:
    """The methods of mooncake.engine.TransferEngine that vllm-ascend calls. Records the calls."""

    status = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        self.calls.append(("initialize", hostname, metadata, protocol, device))
        return self.status

    def get_rpc_port(self) -> int:
        return 15123

    def get_engine(self) -> str:
        return "the engine"

    def register_memory(self, address: int, size: int) -> int:
        self.calls.append(("register_memory", address, size))
        return 0

    def unregister_memory(self, address: int) -> int:
        self.calls.append(("unregister_memory", address))
        return 0


class FakeStore:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def setup(self, **given: Any) -> int:
        self.given = given
        return 0

    def get_hostname(self) -> str:
        return str(self.given["local_hostname"])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that the process creates if vllm-ascend is not loaded."""
    fake = FakeEngine()
    module = ModuleType("mooncake.engine")
    module.TransferEngine = lambda: fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.delitem(sys.modules, "vllm_ascend", raising=False)
    package = SimpleNamespace(
        ReplicateConfig=SimpleNamespace,
        SoftPinAction=SimpleNamespace(ENABLE=1),
        MooncakeDistributedStore=FakeStore,
    )
    monkeypatch.setattr(mooncake_store, "load_package", lambda: package)
    monkeypatch.setattr(mooncake_store, "own_address", lambda master: "10.0.0.9")
    return fake


def test_store_gets_the_engine_and_an_address_with_its_port(engine: FakeEngine) -> None:
    client = MooncakeClient(OPTIONS, segment=64)
    assert engine.calls == [("initialize", "10.0.0.1", "P2PHANDSHAKE", "ascend", "3")]
    given = client._store.given
    assert (given["local_hostname"], given["engine"]) == ("10.0.0.1:15123", "the engine")
    assert (given["protocol"], given["rdma_devices"], given["global_segment_size"]) == (
        "ascend",
        "3",
        64,
    )
    client.register(4096, 100)
    client.unregister(4096)
    assert engine.calls[1:] == [("register_memory", 4096, 100), ("unregister_memory", 4096)]


def test_other_protocols_create_no_engine(engine: FakeEngine) -> None:
    client = MooncakeClient(OPTIONS.model_copy(update={"protocol": "rdma"}), segment=64)
    assert engine.calls == [] and "engine" not in client._store.given
    assert client._store.given["local_hostname"] == "10.0.0.1"


def test_worker_shares_the_engine_of_vllm_ascends_connectors(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    shared = SimpleNamespace(
        get_transfer_engine=lambda host, device: asked.append((host, device)) or "theirs"
    )
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    module = ModuleType(mooncake_store._SHARED_ENGINE)
    module.global_te = shared  # type: ignore[attr-defined]
    monkeypatch.setattr(
        mooncake_store.importlib,
        "import_module",
        {mooncake_store._SHARED_ENGINE: module}.__getitem__,
    )
    assert ascend_engine("10.0.0.1", OPTIONS) == "theirs"
    assert asked == [("10.0.0.1", "3")] and engine.calls == []


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("status", "the engine's set-up failed with status -1"),
        ("module", "cannot be used: "),
        ("fabric", "cannot be used with ASCEND_ENABLE_USE_FABRIC_MEM=1"),
    ],
)
def test_unusable_engine_is_refused_with_a_remedy(
    fault: str, problem: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "status":
        monkeypatch.setattr(engine, "status", -1)
    elif fault == "module":
        monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    else:
        monkeypatch.setenv("ASCEND_ENABLE_USE_FABRIC_MEM", "1")
    with pytest.raises(UserError) as error:
        ascend_engine("10.0.0.1", OPTIONS)
    assert error.value.option == "kv_connector_extra_config.mooncake.protocol"
    assert problem in error.value.problem and error.value.remedy


# The NPU of the process. The transport takes the calling thread's context, and fails without one:
# Mooncake 0.3.11.post1, ascend_direct_transport.cpp:203 (of the set-up) and 316 (of registrations).


class ContextEngine(FakeEngine):
    """An engine that fails in a thread that has bound no NPU, and records the NPU of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = threading.local()  # `npu` of each thread; the system uses thread ids again
        self.npus: list[int] = []

    def _take_context(self) -> int:
        npu = getattr(self.bound, "npu", None)
        if npu is None:
            return -1
        self.npus.append(npu)
        return 0

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        return self._take_context()

    def register_memory(self, address: int, size: int) -> int:
        return self._take_context()

    def unregister_memory(self, address: int) -> int:
        return self._take_context()


@pytest.fixture
def transport(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> ContextEngine:
    """An engine as above, in a thread for which no NPU was chosen yet."""
    import torch
    import torch_npu  # noqa: F401 - adds torch.npu

    made = ContextEngine()
    set_device = torch.npu.set_device

    def record(npu: int) -> None:
        set_device(npu)
        made.bound.npu = npu

    monkeypatch.setattr(torch.npu, "set_device", record)
    monkeypatch.setattr(sys.modules["mooncake.engine"], "TransferEngine", lambda: made)
    return made


def in_a_new_thread(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


@pytest.mark.parametrize(("chosen", "used"), [(None, 0), (3, 3)], ids=["the first", "a chosen one"])
def test_each_thread_that_opens_registers_or_closes_binds_the_npu(
    transport: ContextEngine, chosen: int | None, used: int
) -> None:
    import torch

    def open_store() -> MooncakeClient:
        if chosen is not None:
            torch.npu.set_device(chosen)
            del transport.bound.npu  # as if it had been set without a context
        return MooncakeClient(OPTIONS, segment=0)

    client = in_a_new_thread(open_store)
    client._store.close = lambda: transport.unregister_memory(0)
    in_a_new_thread(lambda: client.register(4096, 100))
    in_a_new_thread(lambda: client.unregister(4096))
    in_a_new_thread(client.close)
    assert transport.npus == [used] * 4


def test_other_protocols_use_no_npu(
    transport: ContextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    MooncakeClient(OPTIONS.model_copy(update={"protocol": "rdma"}), segment=0)
    assert not hasattr(transport.bound, "npu")


@pytest.mark.parametrize("fault", ["no torch_npu", "no NPU"])
def test_reader_without_an_npu_is_refused_by_the_protocol(
    transport: ContextEngine, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def none_there(npu: int) -> None:
        raise RuntimeError("No NPUs are available")

    if fault == "no NPU":
        monkeypatch.setattr(torch.npu, "set_device", none_there)
    else:
        monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(
        UserError,
        match=(
            "protocol='ascend' needs an NPU in every process that opens the store, also in a reader"
        ),
    ) as error:
        MooncakeReader("master:50051", protocol="ascend")
    assert ("No NPUs" in error.value.problem) == (fault == "no NPU")
    assert "'rdma' or 'tcp'" in error.value.remedy


# The contract with vllm-ascend: the calls in the installed wheel's sources


def calls_of(file: str, name: str) -> list[ast.Call]:
    spec = find_spec("vllm_ascend")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse(
        Path(spec.submodule_search_locations[0], "distributed/kv_transfer", file).read_text()
    )
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name
    ]


def test_engine_is_initialised_like_in_vllm_ascend(engine: FakeEngine) -> None:
    (call,) = calls_of("utils/mooncake_transfer_engine.py", "initialize")
    ascend_engine("host", OPTIONS)
    (ours,) = engine.calls
    assert [ast.literal_eval(each) for each in call.args if isinstance(each, ast.Constant)] == [
        ours[2],
        ours[3],
    ]
    assert [each.id for each in call.args if isinstance(each, ast.Name)] == [
        "hostname",
        "device_name",
    ]


def test_store_is_set_up_with_the_keywords_of_vllm_ascend(engine: FakeEngine) -> None:
    calls = calls_of("kv_pool/ascend_store/backend/mooncake_backend.py", "setup")
    keywords = [{each.arg for each in call.keywords if each.arg} for call in calls]
    (with_engine,) = [names for names in keywords if "engine" in names]
    assert set(MooncakeClient(OPTIONS, segment=64)._store.given) == with_engine


def test_shared_engine_exists_in_vllm_ascend() -> None:
    path = (
        mooncake_store._SHARED_ENGINE.removeprefix("vllm_ascend.distributed.kv_transfer.").replace(
            ".", "/"
        )
        + ".py"
    )
    assert calls_of(path, "register_memory")
    spec = find_spec("vllm_ascend")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse(
        Path(spec.submodule_search_locations[0], "distributed/kv_transfer", path).read_text()
    )
    assigned = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert "global_te" in assigned
    (method,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "get_transfer_engine"
    ]
    assert [each.arg for each in method.args.args] == ["self", "hostname", "device_name"]


# A real store, with a real engine, over TCP


def test_client_without_its_own_buffer_cannot_put_a_manifest(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-ascend's scheduler has no buffer either, and only asks which objects exist."""
    monkeypatch.setattr(mooncake_store, "_OWN_BUFFER", 0)
    client = MooncakeClient(MooncakeOptions(master_server_address=master.address), segment=16 << 20)
    with pytest.raises(MooncakeError, match="status -600"):
        client.put("a manifest", b"{}")
    client.close()


def test_rows_pass_through_a_store_with_our_engine(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `ascend`, except for the transport."""
    monkeypatch.delitem(sys.modules, "vllm_ascend", raising=False)
    initialised: list[str] = []

    def over_tcp(hostname: str, options: MooncakeOptions) -> Any:
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        assert engine.initialize(hostname, "P2PHANDSHAKE", "tcp", "") == 0
        initialised.append(hostname)
        return engine

    monkeypatch.setattr(mooncake_store, "ascend_engine", over_tcp)
    options = MooncakeOptions(
        master_server_address=master.address,
        local_hostname="127.0.0.1",
        protocol="ascend",
        global_segment_size=64 << 20,
        local_buffer_size=16 << 20,
    )
    with monkeypatch.context() as patched:
        patched.setattr(mooncake_store, "load_package", _store_over_tcp)
        sink = MooncakeSink(options, FORMAT)
    with sink, MooncakeReader(master.address) as reader:
        file = open_file(sink)
        file.write(0, finite_rows(0, 100))
        file.commit(token_ids(100), 100)
        assert np.array_equal(bits(reader.load(file.handle, 10).hidden_states), finite_rows(0, 100))
        reader.remove(file.handle)
    assert initialised == ["127.0.0.1"]


def _store_over_tcp() -> Any:
    """Return Mooncake's package, whose stores take the protocol `ascend` for `tcp`."""
    import mooncake.store

    class OverTcp(mooncake.store.MooncakeDistributedStore):
        def setup(self, **given: Any) -> int:
            assert given["protocol"] == "ascend" and given["engine"] is not None
            return int(super().setup(**{**given, "protocol": "tcp"}))

    return SimpleNamespace(**{**vars(mooncake.store), "MooncakeDistributedStore": OverTcp})
