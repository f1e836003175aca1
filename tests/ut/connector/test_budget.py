"""directory_budget_bytes: files of a rank stay within its share, and freed space is detected."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import ROW_BYTES, make_request, make_scheduler, schedule

from vllm_ascend_hsx.compat.engine import Share, engine_of, remember_engines
from vllm_ascend_hsx.connector.budget import DirectoryBudget, StoredFiles
from vllm_ascend_hsx.connector.metadata import RankState, WorkerReport
from vllm_ascend_hsx.connector.progress import RankProgress
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import FileLayout
from vllm_ascend_hsx.protocol.rows import RowFormat

FORMAT = RowFormat((0, 1), ROW_BYTES // 8, "F32", "tiny")
LAYOUT = FileLayout(FORMAT, "a")
SIZE = LAYOUT.file_size(5)  # layout of a request from `make_request`
FULL = "the storage directory has no room"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A scheduler with a budget, the clock, and the reports of the ranks."""

    def __init__(
        self, files: float, num_engines: int = 1, num_ranks: int = 1, **options: Any
    ) -> None:
        self.clock = Clock()
        self.budget = DirectoryBudget(int(files * SIZE), num_engines, FORMAT, self.clock)
        self.scheduler = make_scheduler(
            num_ranks, ring_bytes=1 << 20, budget=self.budget, **options
        )
        self.states = {rank: RankState(checked=1) for rank in range(num_ranks)}
        self.report()

    def report(self, outcomes: dict[str, str | None] | None = None, **state: Any) -> None:
        self.states[0] = RankState(**{**vars(self.states[0]), **state})
        self.scheduler.on_worker_report(WorkerReport(outcomes or {}, dict(self.states)))

    def asks(self, request: Any) -> str:
        """Send a new request, or ask again about a waiting request."""
        if not self.scheduler.extracts(request.request_id):
            self.scheduler.on_new_request(request)
        if not self.scheduler.extracts(request.request_id):
            return "refused"
        if not self.scheduler.must_wait(request):
            schedule(self.scheduler, request)
            return "starts"
        return "waits" if self.scheduler.extracts(request.request_id) else "refused"

    def check(self) -> int:
        """Return the number of the check that the next step requests from the ranks."""
        return schedule(self.scheduler).check

    def error(self, request: Any) -> str:
        return str(self.scheduler.on_finished(request)["hidden_states_error"])


def test_request_without_space_waits_for_a_check_and_is_then_not_extracted() -> None:
    served = Served(files=1.9)
    first, second, third = (make_request(name) for name in ("first", "second", "third"))
    assert served.asks(first) == "starts"
    assert served.check() == 1
    assert [served.asks(second), served.check(), served.asks(second)] == ["waits", 2, "waits"]
    served.report(checked=2)
    assert served.asks(second) == "refused"
    assert second.skip_reading_prefix_cache is False, "it reads the prefix cache as any other"
    assert not served.scheduler.must_wait(second)
    assert served.asks(third) == "refused", "the check is recent enough for others"
    error = served.error(second)
    assert error.startswith(
        f"{FULL} for a file of up to {SIZE} bytes: {SIZE} of {int(1.9 * SIZE)} bytes are used"
    )
    assert f"(kv_connector_extra_config.directory_budget_bytes is {int(1.9 * SIZE)})" in error
    assert "hsx clean --keep-bytes" in error
    stats = served.scheduler.take_stats()
    assert stats is not None
    assert (stats.failures, stats.counter("failed")) == ({"directory_full": 1}, 1)


def test_request_without_space_keeps_its_own_setting_to_skip_the_prefix_cache() -> None:
    served, request = Served(files=1), make_request("a", skip_reading_prefix_cache=True)
    served.report(stored=1)
    assert served.asks(request) == "waits"
    served.report(checked=2)
    assert served.asks(request) == "refused"
    assert request.skip_reading_prefix_cache is True


def test_file_larger_than_the_budget_is_refused_immediately_with_another_remedy() -> None:
    served, request = Served(files=0.5), make_request("a")
    assert served.asks(request) == "refused"
    assert "; raise kv_connector_extra_config.directory_budget_bytes, which is" in served.error(
        request
    )


@pytest.mark.parametrize("ended", ["aborted in the queue", "failed", "discarded", "removed"])
def test_space_of_a_request_without_a_file_is_freed(ended: str) -> None:
    served, first, second = Served(files=1), make_request("first"), make_request("second")
    if ended == "aborted in the queue":
        served.scheduler.on_new_request(first)
        assert not served.scheduler.must_wait(first)
        served.scheduler.on_finished(first)
    else:
        assert served.asks(first) == "starts"
        served.report(
            {"first": None if ended != "failed" else "broken"},
            stored=SIZE if ended == "removed" else 0,
        )
    if ended == "removed":
        assert served.asks(second) == "waits"
        served.report(stored=0, checked=2)
    assert served.asks(second) == "starts"


def test_tensor_parallel_ranks_share_the_budget_of_a_data_parallel_rank() -> None:
    served = Served(files=4, num_engines=2, num_ranks=2)
    first, second, third = (make_request(name) for name in "abc")
    served.states[1] = RankState(checked=1, stored=SIZE)
    served.report()
    assert served.asks(first) == "starts"
    assert served.asks(second) == "waits"
    served.report(checked=2)
    assert served.asks(second) == "waits", "the other rank is still checking"
    served.states[1] = RankState(checked=2, stored=SIZE)
    served.report()
    assert served.asks(second) == "refused"
    assert (
        f"{2 * SIZE} of {2 * SIZE} bytes, the share of this data-parallel rank, are used"
        in served.error(second)
    )
    served.states[1] = RankState(checked=2)
    served.report()
    assert served.asks(third) == "starts"


def test_requests_wait_for_a_limited_time_until_ranks_report_earlier_files() -> None:
    served = Served(files=9)
    served.scheduler = make_scheduler(num_ranks=1, ring_bytes=1 << 20, budget=served.budget)
    request, later = make_request("a"), make_request("b")
    assert served.asks(request) == "waits"
    served.clock.now += 5.1
    assert served.asks(request) == "refused"
    assert "and the storage does not answer the check for removed files" in served.error(request)
    assert served.asks(later) == "waits"
    served.report()
    assert served.asks(later) == "starts"


def test_files_are_checked_at_most_once_per_second() -> None:
    served = Served(files=1)
    served.report(stored=1)
    for number in range(100):
        served.asks(make_request(str(number)))
        served.report(checked=served.check())
    assert served.check() == 2
    served.clock.now += 1.1
    assert served.asks(make_request("later")) == "waits"
    assert served.check() == 3


def test_space_for_generated_rows_is_reserved_by_max_tokens_until_the_end() -> None:
    served = Served(files=6, include_output=True)
    first, second = (
        make_request("first", output_token_ids=list(range(11)), max_tokens=201),
        make_request("second", max_tokens=200),
    )
    assert served.asks(first) == "starts"
    assert served.budget._reserved == LAYOUT.file_size(5 + 200)
    assert served.asks(second) == "waits"
    served.scheduler.on_finished(first)
    assert served.budget._reserved == LAYOUT.file_size(5 + 10)
    assert served.asks(second) == "starts"
    served.report({"first": None}, stored=LAYOUT.file_size(5 + 10))
    assert served.budget._reserved == LAYOUT.file_size(5 + 199)


# Files that ranks count


def test_later_file_of_the_same_name_stays_counted_after_an_earlier_check() -> None:
    files = StoredFiles()
    files.add("/nowhere/a", 10)
    seen = files.all()
    assert files.missing(seen) == seen
    files.add("/nowhere/a", 10)
    files.forget(seen)
    assert files.num_bytes == 10
    files.forget(files.all())
    assert files.num_bytes == 0


def test_failing_storage_frees_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.EIO, "broken", path)

    files = StoredFiles()
    files.add(str(tmp_path / "a"), 10)
    monkeypatch.setattr(os, "lstat", fail)
    assert files.missing(files.all()) == []


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 1000), max_size=12), ranks=st.integers(1, 5), data=st.data())
def test_each_earlier_file_is_counted_by_one_rank(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], ranks: int, data: Any
) -> None:
    directory = tmp_path_factory.mktemp("earlier")
    (directory / "day").mkdir()
    (directory / ".hsx-00000000").mkdir()
    for name in (
        ".hsx-00000000/rows.safetensors",
        "a.safetensors.error",
        "a.safetensors.lock",
        "notes.txt",
    ):
        (directory / name).write_bytes(b"x" * 50)
    suffixes = (".tar", ".safetensors", ".safetensors")
    paths = [
        directory / ("day" if number % 2 else "") / f"{number}{suffixes[number % 3]}"
        for number in range(len(sizes))
    ]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(b"x" * size)
    found = [StoredFiles.found_in(str(directory), Share(index, ranks)) for index in range(ranks)]
    total = sum(sizes)
    assert total <= sum(each.num_bytes for each in found) < total + ranks
    assert max(each.num_bytes for each in found) == min(each.num_bytes for each in found)
    assert sorted(path for each in found for path, _ in each.all()) == sorted(map(str, paths))
    for path in data.draw(st.permutations(paths)):
        path.unlink()
        for each in found:
            each.forget(each.missing(each.all()))
        total = sum(path.stat().st_size for path in paths if path.exists())
        assert total <= sum(each.num_bytes for each in found) < total + ranks


def test_a_directory_whose_files_cannot_be_counted_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=r"shared_storage_path='.*' has files that cannot be counted for directory_budget_bytes: .*ENOTDIR",
    ):
        StoredFiles.found_in(str(tmp_path / "file"), Share(0, 1))


def test_published_file_is_counted_in_the_report_of_its_outcome(tmp_path: Path) -> None:
    progress = RankProgress(1, 1, StoredFiles())
    path = tmp_path / "a.safetensors"
    path.touch()

    def news() -> tuple[int, int, int]:
        found = progress.end_step(
            paused=False, unresponsive=False, opens_slowly=False, needs_space=False
        )
        assert found is not None
        return found[0].stored, found[0].checked, len(found[1])

    assert news() == (0, 1, 0)
    progress.decide(SimpleNamespace(path=str(path), stored_bytes=7), None)  # type: ignore[arg-type]
    assert news() == (7, 1, 1)
    progress.check(2)
    assert news() == (7, 2, 0)
    path.unlink()
    progress.check(3)
    assert news() == (0, 3, 0)


def test_number_of_engines_is_remembered_for_targets_without_experts() -> None:
    parallel = SimpleNamespace(data_parallel_size=4, data_parallel_index=0)
    remember_engines(parallel)
    parallel.data_parallel_size, parallel.data_parallel_index = (
        1,
        3,
    )  # as in vLLM for a target without experts
    remember_engines(parallel)
    assert engine_of(parallel) == (3, 4)
