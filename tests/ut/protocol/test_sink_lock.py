"""The lock protocol with every supported reader, in every order of steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from depth import depth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lock_readers import Reader, Stepped, speculators_reader, vllm_reader
from sink_harness import FORMAT, is_held, make_rows, token_ids
from tracing import Traced, trace

from vllm_ascend_hsx.protocol import lock as lock_module
from vllm_ascend_hsx.protocol.lock import HeldLock
from vllm_ascend_hsx.reader.load import HiddenStatesError, load, remove
from vllm_ascend_hsx.sinks.file import FileSink

READERS = {"speculators": speculators_reader, "vLLM": vllm_reader}


def our_reader(path: Path) -> Reader:
    """Call `load` with timeout 0 until it returns."""
    while True:
        yield
        try:
            return load(path, 0)._asdict()
        except TimeoutError:
            continue


ALL_READERS = READERS | {"ours": our_reader}


def run_interleaved(
    directory: Path, reader: Callable[[Path], Reader], steps: Callable[[int], int]
) -> tuple[Stepped, int]:
    """Open, write and commit three rows. A reader runs `steps(i)` steps before our call i.

    The reader starts when `open` has returned, before the response can leave. Returns the reader
    and the number of our calls.
    """
    calls = 0
    with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
        path = directory / "cmpl-1.safetensors"
        file = sink.open("cmpl-1", path)
        stepped = Stepped(reader(path))

        def checkpoint(call: str) -> None:
            nonlocal calls
            if stepped.running:  # a call of our own reader: it uses the same module
                return
            stepped.step(steps(calls))
            calls += 1

        trace(patch, checkpoint)
        file.write(1, make_rows(1, 3))
        file.write(0, make_rows(0, 1))
        file.commit(token_ids(3), 2)
    return stepped, calls


def assert_complete(result: dict[str, torch.Tensor] | None) -> None:
    assert result is not None, "the reader took the file for missing"
    assert np.array_equal(result["hidden_states"].view(torch.uint16).numpy(), make_rows(0, 3))
    assert np.array_equal(result["token_ids"].numpy(), token_ids(3))


@pytest.mark.parametrize("reader", ALL_READERS)
def test_reader_paused_at_any_step_of_a_commit_gets_the_whole_file(
    tmp_path: Path, reader: str
) -> None:
    """Pauses at every call of the commit, after every number of steps of the reader."""
    _, calls = run_interleaved(tmp_path / "count", ALL_READERS[reader], lambda call: 0)
    assert calls > 8
    for stop_at in range(calls):
        for count in range(1, 9):
            directory = tmp_path / f"{stop_at}-{count}"
            stepped, _ = run_interleaved(
                directory,
                ALL_READERS[reader],
                lambda call: count if call == stop_at else 0,  # noqa: B023
            )
            assert_complete(stepped.finish())


@settings(max_examples=depth(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    reader=st.sampled_from(sorted(ALL_READERS)),
)
def test_any_interleaving_of_a_reader_with_a_commit_gives_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, schedule: list[int], reader: str
) -> None:
    directory = tmp_path_factory.mktemp("any")
    stepped, _ = run_interleaved(
        directory, ALL_READERS[reader], lambda call: schedule[call % len(schedule)]
    )
    assert_complete(stepped.finish())


@pytest.mark.parametrize("reader", READERS)
def test_commit_that_removed_the_lock_file_would_break_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """Shows why the lock file stays: the same interleavings, with a removal."""
    monkeypatch.setattr(HeldLock, "release", _remove_and_release)
    broken = 0
    for stop_at in range(25):
        stepped, _ = run_interleaved(
            tmp_path / str(stop_at),
            READERS[reader],
            lambda call: call == stop_at,  # noqa: B023
        )
        try:
            stepped.finish()
        except FileNotFoundError:
            broken += 1
    assert broken


def _remove_and_release(held: HeldLock) -> None:
    os.unlink(held._name, dir_fd=held._dir_fd)
    lock_module.unlock_and_close(held.fd)


@pytest.mark.parametrize("end", ["fail", "discard"])
@pytest.mark.parametrize("reader", ALL_READERS)
def test_reader_of_a_failed_or_aborted_request_wakes_without_rows(
    tmp_path: Path, end: str, reader: str
) -> None:
    for before in range(4):
        directory = tmp_path / str(before)
        with FileSink(directory, FORMAT) as sink:
            file = sink.open("cmpl-1", directory / "cmpl-1.safetensors")
            stepped = Stepped(ALL_READERS[reader](file.path))
            stepped.step(before)
            file.write(0, make_rows(0, 3))
            {"fail": lambda: file.fail("no luck"), "discard": file.discard}[end]()  # noqa: B023
        try:
            assert stepped.finish() is None
        except FileNotFoundError:
            assert reader != "ours" or end == "discard"
        except HiddenStatesError as error:
            assert end == "fail"
            assert error.reason == "no luck"


@pytest.mark.parametrize("event", ["commit", "fail", "discard", "another consumer takes the file"])
def test_reader_is_right_whatever_happens_between_its_system_calls(
    tmp_path: Path, event: str
) -> None:
    outcomes = set()
    for happens_at in range(40):
        directory = tmp_path / str(happens_at)
        with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
            file = sink.open("cmpl-1", directory / "cmpl-1.safetensors")
            file.write(0, make_rows(0, 3))
            if event.startswith("another"):
                file.commit(token_ids(3), 3)
            events = {
                "commit": lambda: file.commit(token_ids(3), 3),  # noqa: B023
                "fail": lambda: file.fail("no luck"),  # noqa: B023
                "discard": file.discard,
            }
            calls, happening = 0, False

            def checkpoint(call: str) -> None:
                nonlocal calls, happening
                if happening:
                    return
                if calls == happens_at:  # noqa: B023
                    happening = True
                    events.get(event, lambda: remove(file.path))()  # noqa: B023
                    happening = False
                calls += 1

            trace(patch, checkpoint)
            patch.setattr("vllm_ascend_hsx.reader.load.os", Traced(os, checkpoint))
            try:
                assert_complete(load(file.path, 0)._asdict())
                outcomes.add("complete")
            except (TimeoutError, FileNotFoundError, HiddenStatesError) as error:
                outcomes.add(
                    str(error.reason)
                    if isinstance(error, HiddenStatesError)
                    else type(error).__name__
                )
        if calls <= happens_at:
            break
    assert (
        outcomes
        == {
            "commit": {"TimeoutError", "complete"},
            "fail": {"TimeoutError", "no luck"},
            "discard": {"TimeoutError", "FileNotFoundError"},
            "another consumer takes the file": {"FileNotFoundError", "complete"},
        }[event]
    )


def test_reader_during_open_never_reports_a_dead_server(
    tmp_path: Path,
) -> None:
    """Readers may know the name before the response: by `find`, or because a client chose it."""
    seen = set()
    with FileSink(tmp_path, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
        path = tmp_path / "cmpl-1.safetensors"
        looking = False

        def checkpoint(call: str) -> None:
            nonlocal looking
            if looking:  # a call of the reader: it uses the same module
                return
            looking = True
            try:
                load(path, 0)
            except (FileNotFoundError, TimeoutError, HiddenStatesError) as error:
                seen.add(
                    str(error) if isinstance(error, HiddenStatesError) else type(error).__name__
                )
            finally:
                looking = False

        trace(patch, checkpoint)
        sink.open("cmpl-1", path)
    assert seen == {"FileNotFoundError", "TimeoutError"}


@pytest.mark.parametrize("earlier", [False, True], ids=["new name", "a stale lock is there"])
def test_reader_waits_for_a_request_that_begins_between_two_system_calls(
    tmp_path: Path, earlier: bool
) -> None:
    """A lock without data that was absent at the first check: a server has started the file."""
    outcomes = set()
    for happens_at in range(40):
        directory = tmp_path / str(happens_at)
        with FileSink(directory, FORMAT) as sink, pytest.MonkeyPatch.context() as patch:
            path = directory / "cmpl-1.safetensors"
            calls, happening = 0, False
            if earlier:
                Path(f"{path}.lock").touch()

            def checkpoint(call: str) -> None:
                nonlocal calls, happening
                if happening:
                    return
                if calls == happens_at:  # noqa: B023
                    happening = True
                    sink.open("cmpl-1", path)  # noqa: B023
                    happening = False
                calls += 1

            trace(patch, checkpoint)
            patch.setattr("vllm_ascend_hsx.reader.load.os", Traced(os, checkpoint))
            patch.setattr(
                Path, "exists", lambda self: (checkpoint("exists"), os.path.exists(self))[1]
            )
            try:
                load(path, 0)
            except (TimeoutError, FileNotFoundError, HiddenStatesError) as error:
                # Later calls only release resources: the result was already right.
                began = (
                    os.path.exists(f"{path}.lock")
                    and is_held(Path(f"{path}.lock"))
                    and happens_at < calls - 3
                )
                outcomes.add(f"{type(error).__name__}{', a server had begun' if began else ''}")
        if calls <= happens_at:
            break
    waits = "TimeoutError, a server had begun"
    assert outcomes - {"TimeoutError"} == (
        {waits, "HiddenStatesError"} if earlier else {waits, "FileNotFoundError"}
    )
