"""Contexts on NPUs: the calls that create them, their memory, and the processes that see them.

The definition is torch_npu 2.10.0.post4 (5dd8ef3f9b37): csrc/core/npu/NPUFunctions.cpp,
NPUStream.cpp:289, NPUEvent.cpp:53, impl/NPUGuardImpl.cpp; csrc/npu/Module.cpp:2523.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated import MIB

from ascend_npu_emulator.launch import environment

CONTEXT = 107 * MIB
# Each scenario runs in a thread "other". The main thread of the process has used NPU 1 before.
PROGRAM = """
import json, os, sys, threading
import torch, torch_npu
from ascend_npu_emulator.native import core

def prepare():
    torch.npu.set_device(1)
    made = {"stream": torch.npu.Stream(), "event": torch.npu.Event(), "tensor": torch.ones(4, device="npu:1")}
    made["event"].record()
    torch.npu.synchronize()
    return made

def scenario(body, made):
    exec(body, {"torch": torch, **made})

def contexts():
    return [index for index in range(torch.npu.device_count()) if torch_npu._C._npu_hasPrimaryContext(index)]

def run(body):
    made = prepare()
    box = {"events": [made.pop("event")], **made}
    thread = threading.Thread(target=scenario, args=(body, box), name="other")
    thread.start()
    thread.join()
    created = [[thread, call] for device, thread, call, _ in core.contexts() if device == 0]
    return {"contexts": contexts(), "created": created}

found = {}
for name, body in json.load(sys.stdin).items():
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(run(body)).encode())
        os._exit(0)
    os.close(write)
    found[name] = json.loads(os.read(read, 1 << 16))
    os.wait()
print(json.dumps(found))
"""
# The code of the thread, and the call that creates the context on NPU 0.
GETS_NPU_0 = {
    "an event is dropped": ("events.clear()", "dropping an event"),
    "the current stream is asked for": ("torch.npu.current_stream()", "current_stream"),
    "the current stream of another NPU is asked for": (
        "torch.npu.current_stream('npu:1')",
        "current_stream",
    ),
    "the default stream is asked for": ("torch.npu.default_stream()", "default_stream"),
    "a stream is made": ("torch.npu.Stream()", "a new stream"),
    "an event is recorded": ("events[0].record()", "current_stream"),
    "an event is recorded on a stream of another NPU": ("events[0].record(stream)", "Event.record"),
    "a stream waits for an event": ("stream.wait_event(events[0])", "Event.wait"),
    "memory is allocated": ("torch.empty(4, device='npu')", "an allocation"),
    "the device is synchronized": ("torch.npu.synchronize()", "synchronize"),
    "an event is dropped after an operator on another NPU": (
        "tensor + 1; events.clear()",
        "dropping an event",
    ),
}
GETS_NONE = {
    "nothing": "pass",
    "an event is waited for": "events[0].synchronize()",
    "an event is asked": "events[0].query()",
    "an event that was never recorded is dropped": "torch.npu.Event()",
    "a stream of another NPU is waited for": "stream.synchronize()",
    "the number of NPUs and the current one are asked for": "torch.npu.device_count(), torch.npu.current_device()",
    "an operator on a tensor of another NPU": "tensor + 1",
    "memory is allocated on another NPU": "torch.empty(4, device='npu:1')",
    "pinned memory is allocated": "torch.empty(4, pin_memory=True)",
    "a copy to the host": "tensor.cpu()",
    "an event is dropped after pinned memory": "torch.empty(4, pin_memory=True); events.clear()",
    "an event is dropped after set_device": "torch.npu.set_device(1); events.clear()",
    "an event is dropped within a device": "exec('with torch.npu.device(1): events.clear()')",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    bodies = {**{name: body for name, (body, _) in GETS_NPU_0.items()}, **GETS_NONE}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment(npus=2)},
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", GETS_NPU_0)
def test_call_in_a_thread_without_a_device_creates_a_context_on_npu_0(
    name: str, found: dict[str, Any]
) -> None:
    _, call = GETS_NPU_0[name]
    assert found[name] == {"contexts": [0, 1], "created": [["other", call]]}


@pytest.mark.parametrize("name", GETS_NONE)
def test_call_in_a_thread_without_a_device_creates_no_context(
    name: str, found: dict[str, Any]
) -> None:
    assert found[name] == {"contexts": [1], "created": []}


def test_context_records_the_python_calls_that_created_it() -> None:
    program = """
import torch, torch_npu
from ascend_npu_emulator.native import core
def first_use():
    torch.npu.set_device(1)
first_use()
[(device, thread, call, calls)] = core.contexts()
assert (device, thread, call) == (1, "MainThread", "set_device")
assert "in first_use" in calls, calls
"""
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment(npus=2)}, check=True
    )


def test_pinned_memory_without_set_device_creates_a_context_on_npu_0() -> None:
    """See CachingHostAllocator.cpp:206 and npu_sys_ctrl.cpp:394."""
    program = """
import torch, torch_npu
torch.empty(4, pin_memory=True)
assert [torch_npu._C._npu_hasPrimaryContext(index) for index in range(2)] == [True, False]
"""
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment(npus=2)}, check=True
    )


def test_has_primary_context_refuses_unknown_npu() -> None:
    import torch_npu

    with pytest.raises(RuntimeError, match="Invalid NPU device id 8"):
        torch_npu._C._npu_hasPrimaryContext(8)


# ---- processes of one machine ----

USER = """
import sys, torch, torch_npu
torch.npu.set_device(0)
print("ready", torch.npu.mem_get_info()[0], flush=True)
for line in sys.stdin:
    try:
        torch.empty(int(line), dtype=torch.uint8, device="npu")
        print("allocated", flush=True)
    except torch.OutOfMemoryError as error:
        print(error, flush=True)
"""


class User:
    """A process with a context on the first NPU that is visible to it."""

    def __init__(self, environ: dict[str, str], **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER],
            env={**os.environ, **environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        word, free = self.process.stdout.readline().split()
        assert word == "ready"
        self.free_at_start = int(free)

    def allocate(self, num_bytes: int) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(num_bytes, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def users(environ: dict[str, str], *variables: dict[str, str]) -> Iterator[list[User]]:
    made: list[User] = []
    try:
        for each in variables:
            made.append(User(environ, **each))
        yield made
    finally:
        for user in made:
            user.kill()


def test_processes_of_a_machine_see_each_others_contexts_until_they_are_killed() -> None:
    size = 1 << 30
    environ = environment(npus=2, hbm_bytes=size)
    with users(environ, {}, {}) as (first, second):
        assert (first.free_at_start, second.free_at_start) == (size - CONTEXT, size - 2 * CONTEXT)
        assert "214.00 MiB in contexts" in first.allocate(size - 2 * CONTEXT + MIB)
        second.kill()
        assert first.allocate(size - 2 * CONTEXT + MIB) == "allocated\n"
        with users(environ, {}) as (third,):
            assert third.free_at_start == size - 2 * CONTEXT


def test_context_takes_memory_of_the_physical_npu() -> None:
    size = 1 << 30
    environ = environment(npus=2, hbm_bytes=size)
    with users(
        environ, {}, {"ASCEND_RT_VISIBLE_DEVICES": "1"}, {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    ) as (on_0, *on_1):
        assert [user.free_at_start for user in (on_0, *on_1)] == [
            size - CONTEXT,
            size - CONTEXT,
            size - 2 * CONTEXT,
        ]


def test_machines_do_not_see_each_others_contexts() -> None:
    size = 1 << 30
    with (
        users(environment(npus=1, hbm_bytes=size), {}),
        users(environment(npus=1, hbm_bytes=size), {}) as (other,),
    ):
        assert other.free_at_start == size - CONTEXT


def test_process_keeps_its_context_after_empty_cache() -> None:
    torch.npu.set_device(0)
    free = []
    for size in (1, MIB):
        held = torch.empty(size, device="npu:0")
        del held
        torch.npu.empty_cache()
        free.append(torch.npu.mem_get_info(0)[0])
    assert free[0] == free[1] <= torch.npu.mem_get_info(0)[1] - CONTEXT
