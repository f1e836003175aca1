"""Readers sleep until a file ends, and raise TimeoutError after the timeout."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reader_harness import SOURCE, assert_rows, committed, written
from sink_harness import FORMAT, make_rows, open_fds, token_ids, wait_for_sleepers

from vllm_ascend_hsx.reader import load as load_module
from vllm_ascend_hsx.reader import lock_wait
from vllm_ascend_hsx.reader.load import HiddenStates, load
from vllm_ascend_hsx.reader.shards import Place
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.shard import ShardSink

READ_AND_REPORT = """
import sys
from vllm_ascend_hsx import HiddenStatesError, load
try:
    states = load(sys.argv[1], timeout=float(sys.argv[2]) if sys.argv[2] != "None" else None)
    print(list(states.hidden_states.shape), states.token_ids.tolist())
except (HiddenStatesError, FileNotFoundError, TimeoutError) as error:
    print(type(error).__name__, getattr(error, "reason", error))
assert not any(name.split(".")[0] in ("vllm", "torch_npu", "vllm_ascend") for name in sys.modules)
"""


@pytest.mark.parametrize("timeout", ["60", "None"])
@pytest.mark.parametrize(
    ("end", "report"),
    [
        (lambda file: file.commit(token_ids(2), 2), f"[2, 3, 8] {token_ids(2).tolist()}"),
        (lambda file: file.fail("no luck"), "HiddenStatesError no luck"),
        (lambda file: file.discard(), "FileNotFoundError"),
    ],
    ids=["commit", "fail", "discard"],
)
def test_reader_asleep_in_another_process_wakes_when_the_file_ends(
    sink: FileSink, tmp_path: Path, end: Callable[[RequestFile], None], report: str, timeout: str
) -> None:
    file = written(sink, tmp_path)
    reader = subprocess.Popen(
        [sys.executable, "-c", READ_AND_REPORT, file.path, timeout],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for_sleepers(Path(f"{file.path}.lock"))
    end(file)
    output, _ = reader.communicate(timeout=60)
    assert output.startswith(report)
    assert reader.returncode == 0


def test_many_readers_of_one_file_all_wake(sink: FileSink, tmp_path: Path) -> None:
    file = written(sink, tmp_path)
    results: list[HiddenStates] = []
    threads = [
        threading.Thread(target=lambda: results.append(load(file.path, 30))) for _ in range(5)
    ]
    threads += [
        threading.Thread(target=lambda: results.append(load(file.path, None))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_for_sleepers(Path(f"{file.path}.lock"))  # they share one call
    file.commit(token_ids(5), 5)
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    for states in results:
        assert_rows(states, 5)


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_reader_times_out(sink: FileSink, tmp_path: Path, timeout: float) -> None:
    file = written(sink, tmp_path)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="still locked by its writer"):
        load(file.path, timeout)
    assert timeout <= time.monotonic() - started < timeout + 5


def test_repeated_timeouts_use_one_thread_and_one_descriptor(
    sink: FileSink, tmp_path: Path
) -> None:
    file = written(sink, tmp_path)
    threads, fds = set(threading.enumerate()), open_fds()
    for _ in range(20):
        with pytest.raises(TimeoutError):
            load(file.path, 0.001)
    (sleeper,) = set(threading.enumerate()) - threads
    assert len(open_fds()) == len(fds) + 1
    file.commit(token_ids(5), 5)
    sleeper.join(30)
    assert not sleeper.is_alive()
    assert len(open_fds()) == len(fds) - 2, "the sleeper's, the lock's and the data's"


def test_timed_out_reader_does_not_block_the_next_request(sink: FileSink, tmp_path: Path) -> None:
    file = written(sink, tmp_path)
    with pytest.raises(TimeoutError):
        load(file.path, 0.001)
    file.commit(token_ids(5), 5)
    file.path.unlink()
    path = committed(sink, tmp_path, tokens=2)
    assert_rows(load(path, 30), 2)


def test_member_published_between_two_checks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publication of a request in a shard removes the lock."""
    path = tmp_path / "a.safetensors"
    with ShardSink(tmp_path, FORMAT, shard_bytes=1 << 20) as sink:
        file = sink.open("a", path, 2)
        file.write(0, make_rows(0, 2))
        stored, looks = load_module._stored, []

        def look_and_publish(where: Path) -> Place | None:
            found = stored(where)
            if not looks:
                file.commit(token_ids(2), 2)
            looks.append(found)
            return found

        monkeypatch.setattr(load_module, "wait_until_released", lambda lock, timeout: None)
        monkeypatch.setattr(load_module, "_stored", look_and_publish)
        assert len(load(path, 10).token_ids) == 2
        assert looks[0] is None and len(looks) == 2


def test_forked_process_waits_with_its_own_thread(sink: FileSink, tmp_path: Path) -> None:
    """Like workers of torch's DataLoader that start while the parent waits."""
    file = written(sink, tmp_path)
    while not lock_wait._sleepers:  # a millisecond may be over before anybody was asked to sleep
        with pytest.raises(TimeoutError):
            load(file.path, 0.001)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(load(file.path, 30).token_ids.tolist()))
    child.start()
    wait_for_sleepers(Path(f"{file.path}.lock"), 2)
    file.commit(token_ids(5), 5)
    assert receive.poll(30)
    assert receive.recv() == token_ids(5).tolist()
    child.join(30)
    assert child.exitcode == 0
