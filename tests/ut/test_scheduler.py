"""Scheduler side: who is extracted, who owns it, who waits, and what the response says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_ascend_hsx.connector.limits import RequestLimits
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RankState, WorkerReport
from vllm_ascend_hsx.connector.reminder import Reminder
from vllm_ascend_hsx.connector.scheduler import ExtractionScheduler
from vllm_ascend_hsx.protocol.mooncake_store import MooncakeOptions
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.destination import InDirectory, InStore

STORE = MooncakeOptions(master_server_address="localhost:50051")
ROW_BYTES = 64


def make_scheduler(num_ranks: int = 2) -> ExtractionScheduler:
    return ExtractionScheduler(InDirectory(Path("/data")), ROW_BYTES, num_ranks=num_ranks, ring_bytes=1000)


def make_request(request_id: str, num_tokens: int = 5, **changes: Any) -> Any:
    """As much of vllm.v1.request.Request as is read."""
    request = SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        kv_transfer_params=None,
        pooling_params=None,
        resumable=False,
        priority=0,
        arrival_time=0.0,
        skip_reading_prefix_cache=False,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        sampling_params=SimpleNamespace(stop=[]),
        max_tokens=4,
        num_output_tokens=0,
        output_token_ids=[],
    )
    vars(request).update(changes)
    return request


def schedule(scheduler: ExtractionScheduler, *requests: Any) -> HsxConnectorMetadata:
    new = [SimpleNamespace(req_id=request.request_id, prompt_token_ids=request.prompt_token_ids) for request in requests]
    return scheduler.build_metadata(SimpleNamespace(scheduled_new_reqs=new))


def test_an_extracted_request_skips_the_prefix_cache_and_its_response_names_the_file() -> None:
    scheduler, request = make_scheduler(), make_request("cmpl-1")
    scheduler.on_new_request(request)
    assert request.skip_reading_prefix_cache is True
    (start,) = schedule(scheduler, request).started
    assert start.token_ids.tolist() == request.prompt_token_ids
    assert scheduler.on_finished(request) == {"hidden_states_path": start.path}
    assert Path(start.path).parent == Path("/data")


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        pytest.param({"kv_transfer_params": {"hidden_states": False}}, None, id="opts out"),
        pytest.param({"pooling_params": object()}, None, id="pooling"),
        pytest.param({"kv_transfer_params": {"hidden_states": "no"}}, "'no'; use true or false", id="not a boolean"),
        pytest.param({"kv_transfer_params": {"include_output_tokens": 1}}, "1; use true or false", id="not a boolean either"),
        pytest.param({"kv_transfer_params": "x"}, "kv_transfer_params is 'x'; use an object", id="vllm_xargs"),
        pytest.param({"kv_transfer_params": {"hidden_states_path": "a.safetensors"}}, "allow_custom_save_path", id="chooses a name"),
        pytest.param({"prompt_token_ids": None}, "prompt_embeds", id="embeddings"),
        pytest.param({"resumable": True}, "streaming input", id="streaming input"),
    ],
)
def test_what_is_not_extracted_keeps_its_prefix_cache_and_is_told_why(change: dict[str, Any], answer: str | None) -> None:
    scheduler, request = make_scheduler(), make_request("r", **change)
    scheduler.on_new_request(request)
    assert request.skip_reading_prefix_cache is False
    assert schedule(scheduler, request) == HsxConnectorMetadata()
    params = scheduler.on_finished(request)
    assert params is None if answer is None else answer in params["hidden_states_error"]


def test_where_extraction_must_be_requested_other_requests_cost_nothing() -> None:
    scheduler = ExtractionScheduler(InDirectory(Path("/data")), ROW_BYTES, num_ranks=1, ring_bytes=1000, extract_all=False)
    ordinary, asking = make_request("ordinary"), make_request("asking", kv_transfer_params={"hidden_states": True})
    for request in (ordinary, asking):
        scheduler.on_new_request(request)
    scheduler.on_worker_report(WorkerReport({}, {0: RankState(backlog=1001)}))
    assert (scheduler.must_wait(ordinary), scheduler.must_wait(asking)) == (False, True)
    assert (ordinary.skip_reading_prefix_cache, asking.skip_reading_prefix_cache) == (False, True)
    assert [start.request_id for start in schedule(scheduler, ordinary, asking).started] == ["asking"]
    assert scheduler.on_finished(ordinary) is None


def test_what_exceeds_the_limits_of_an_api_request_is_generated_without_rows_and_told_why() -> None:
    limits = RequestLimits(max_files=2, max_bytes=10_000, row_bytes=ROW_BYTES)
    scheduler = ExtractionScheduler(InDirectory(Path("/data")), ROW_BYTES, num_ranks=1, ring_bytes=1000, limits=limits)
    requests = [make_request(f"cmpl-1-{prompt}-0123abcd") for prompt in range(3)]
    for request in requests:
        scheduler.on_new_request(request)
    assert [request.skip_reading_prefix_cache for request in requests] == [True, True, False]
    assert [start.request_id for start in schedule(scheduler, *requests).started] == ["cmpl-1-0-0123abcd", "cmpl-1-1-0123abcd"]
    assert "kv_connector_extra_config.max_files_per_request" in scheduler.on_finished(requests[2])["hidden_states_error"]
    stats = scheduler.take_stats()
    assert stats is not None and stats.failures == {"refused": 1}


def test_a_request_that_was_never_scheduled_leaves_nothing() -> None:
    scheduler, request = make_scheduler(), make_request("r")
    scheduler.on_new_request(request)
    assert scheduler.on_finished(request) is None
    assert schedule(scheduler) == HsxConnectorMetadata()


@pytest.mark.parametrize(("status", "aborted"), [("FINISHED_ABORTED", True), ("FINISHED_ERROR", False), ("FINISHED_STOPPED", False)])
def test_workers_learn_of_the_end_in_the_next_step_once(status: str, aborted: bool) -> None:
    scheduler, request = make_scheduler(), make_request("r", status=SimpleNamespace(name=status))
    scheduler.on_new_request(request)
    schedule(scheduler, request)
    scheduler.on_finished(request)
    (end,) = schedule(scheduler).ended
    assert (end.request_id, end.aborted) == ("r", aborted)
    assert schedule(scheduler).ended == []


@pytest.mark.parametrize(
    ("default", "params", "included"),
    [
        (False, None, False),
        (False, {"include_output_tokens": True}, True),
        (True, None, True),
        (True, {"include_output_tokens": False}, False),
    ],
)
def test_rows_of_generated_tokens_but_the_last_are_taken_if_the_server_or_the_request_says_so(
    default: bool, params: dict[str, bool] | None, included: bool
) -> None:
    scheduler = ExtractionScheduler(InDirectory(Path("/data")), ROW_BYTES, num_ranks=1, ring_bytes=1000, include_output=default)
    request = make_request("r", kv_transfer_params=params, output_token_ids=[7, 8, 9], num_output_tokens=3)
    scheduler.on_new_request(request)
    (start,) = schedule(scheduler, request).started
    scheduler.on_finished(request)
    (end,) = schedule(scheduler).ended
    assert (start.include_output, end.output_token_ids.tolist()) == ((True, [7, 8]) if included else (False, []))


@pytest.mark.parametrize(("stop", "generated", "aborted"), [(["."], 2, False), (["."], 0, True), ([], 2, True)])
def test_a_request_that_a_stop_string_may_have_ended_keeps_its_file(stop: list[str], generated: int, aborted: bool) -> None:
    scheduler = make_scheduler()
    request = make_request(
        "r",
        kv_transfer_params={"include_output_tokens": True},
        status=SimpleNamespace(name="FINISHED_ABORTED"),
        sampling_params=SimpleNamespace(stop=stop),
        output_token_ids=list(range(generated)),
        num_output_tokens=generated,
    )
    scheduler.on_new_request(request)
    schedule(scheduler, request)
    scheduler.on_finished(request)
    (end,) = schedule(scheduler).ended
    assert end.aborted is aborted


@pytest.mark.parametrize(("include_output", "tokens", "mode"), [(False, 5, "prompt_only"), (True, 7, "all")])
def test_in_a_store_the_response_is_the_manifest_that_its_readers_need(include_output: bool, tokens: int, mode: str) -> None:
    row_format = RowFormat((2, 0), 8, "BF16")
    scheduler = ExtractionScheduler(InStore(row_format, STORE), row_format.row_bytes, num_ranks=1, ring_bytes=1000)
    params = {"include_output_tokens": include_output}
    request = make_request("a/b", kv_transfer_params=params, output_token_ids=[7, 8, 9], num_output_tokens=3)
    scheduler.on_new_request(request)
    (start,) = schedule(scheduler, request).started
    scheduler.on_worker_report(WorkerReport({"a/b": "no room"}, {0: RankState(backlog=0)}))
    answer = scheduler.on_finished(request)
    assert answer == {
        "handle": start.path,
        "version": 1,
        "tensors": {
            "hidden_states": {"shape": [tokens, 2, 8], "dtype": "torch.bfloat16", "nbytes": tokens * 32, "offset": 0},
            "token_ids": {"shape": [tokens], "dtype": "torch.int64", "nbytes": tokens * 8, "offset": 192 if tokens == 5 else 256},
        },
        "metadata": {"num_tokens": tokens, "total_aligned_bytes": 256 if tokens == 5 else 320, "extract_mode": mode},
        "hidden_states_error": "no room",
    }
    assert "/" not in start.path and start.path.startswith("a_b~")


def test_in_a_store_no_request_chooses_a_file() -> None:
    row_format = RowFormat((2, 0), 8, "BF16")
    scheduler = ExtractionScheduler(InStore(row_format, STORE), row_format.row_bytes, num_ranks=1, ring_bytes=1000, allow_path=True)
    request = make_request("r", kv_transfer_params={"hidden_states_path": "a.safetensors"})
    scheduler.on_new_request(request)
    assert not scheduler.extracts("r")
    assert "'a.safetensors', but this server makes no files: it puts hidden states" in scheduler.on_finished(request)["hidden_states_error"]


def test_a_request_that_has_been_answered_is_not_answered_again() -> None:
    scheduler, request = make_scheduler(), make_request("r", kv_transfer_params={"do_remote_decode": True})
    scheduler.on_new_request(request)
    (start,) = schedule(scheduler, request).started
    assert scheduler.on_finished(request) == {"hidden_states_path": start.path}
    assert scheduler.on_finished(request) is None  # MultiConnector asks again
    assert [end.request_id for end in schedule(scheduler).ended] == ["r"]
    assert not scheduler.extracts("r")


def test_an_error_that_is_known_in_time_is_in_the_response() -> None:
    scheduler, request = make_scheduler(), make_request("r")
    scheduler.on_new_request(request)
    schedule(scheduler, request)
    scheduler.on_worker_report(WorkerReport({"r": "No space left on device"}, {0: RankState(backlog=0)}))
    assert scheduler.on_finished(request)["hidden_states_error"] == "No space left on device"


def test_owners_are_the_ranks_with_least_outstanding_bytes() -> None:
    scheduler = make_scheduler(num_ranks=3)
    requests = [make_request(f"r{i}", num_tokens) for i, num_tokens in enumerate((50, 10, 20, 5, 30))]
    for request in requests:
        scheduler.on_new_request(request)
    owners = [start.owner for start in schedule(scheduler, *requests).started]
    assert owners == [0, 1, 2, 1, 1]
    scheduler.on_worker_report(WorkerReport({"r0": None}))
    late = make_request("late")
    scheduler.on_new_request(late)
    assert schedule(scheduler, late).started[0].owner == 0


def report(scheduler: ExtractionScheduler, rank: int = 0, **state: Any) -> None:
    scheduler.on_worker_report(WorkerReport({}, {rank: RankState(**state)}))


def test_new_requests_wait_while_rows_of_others_fill_the_memory_and_started_ones_do_not() -> None:
    scheduler, running, waiting = make_scheduler(num_ranks=1), make_request("running"), make_request("waiting")
    other = make_request("other", kv_transfer_params={"hidden_states": False})
    for request in (running, waiting, other):
        scheduler.on_new_request(request)
    schedule(scheduler, running)
    report(scheduler, started=1, backlog=681)
    assert scheduler.must_wait(waiting)
    assert not scheduler.must_wait(running)
    assert not scheduler.must_wait(other)
    report(scheduler, started=1, backlog=680)  # and 320 of its own
    assert not scheduler.must_wait(waiting)


def test_what_was_let_through_counts_before_a_worker_has_told_of_it() -> None:
    scheduler = make_scheduler(num_ranks=1)
    requests = [make_request(f"r{index}", 5, arrival_time=index) for index in range(5)]
    for request in requests:
        scheduler.on_new_request(request)
    assert [scheduler.must_wait(request) for request in requests] == [False, False, False, True, True]
    schedule(scheduler, *requests[:2])  # there was no room in the KV cache for the third
    assert [scheduler.must_wait(request) for request in requests[2:]] == [False, True, True]  # it has been overtaken by nobody


@pytest.mark.parametrize(
    ("rates", "waits"),
    [
        pytest.param({}, True, id="nothing is known"),
        pytest.param({"write_rate": 50.0, "prompt_rate": 100.0}, False, id="half is written while it comes"),
        pytest.param({"write_rate": 10.0, "prompt_rate": 100.0}, True, id="a tenth is written while it comes"),
        pytest.param({"write_rate": 100.0, "prompt_rate": 100.0, "backlog": 1000}, False, id="storage is as fast as prompts"),
        pytest.param({"write_rate": 100.0}, True, id="how fast prompts come is not known"),
    ],
)
def test_what_storage_writes_while_rows_come_needs_no_memory(rates: dict[str, float], waits: bool) -> None:
    scheduler = make_scheduler(num_ranks=1)
    running, asking = make_request("running", 10), make_request("asking", 10)
    for request in (running, asking):
        scheduler.on_new_request(request)
    schedule(scheduler, running)
    report(scheduler, **{"started": 1, "prompt_owed": 640 + rates.get("backlog", 0)} | rates)
    assert scheduler.must_wait(asking) == waits


def test_generated_rows_count_at_the_speed_at_which_they_come() -> None:
    """A hundred steps a second make 100 rows of 64 bytes, for each request."""
    rates = {"prompt_rate": 1e6, "step_rate": 100.0}
    for write_rate, waits in ((12_800.0, False), (12_000.0, True)):
        scheduler = make_scheduler(num_ranks=1)
        running, asking = (make_request(name, 1, kv_transfer_params={"include_output_tokens": True}, max_tokens=501) for name in "ab")
        for request in (running, asking):
            scheduler.on_new_request(request)
        (start,) = schedule(scheduler, running).started
        assert start.max_output_rows == 500
        report(scheduler, started=1, output_owed=500 * ROW_BYTES, generating=1, write_rate=write_rate, **rates)
        assert scheduler.must_wait(asking) == waits


def test_a_request_larger_than_the_memory_runs_when_nothing_else_needs_it_and_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_ranks=1)
    first, large, small = make_request("first", 5), make_request("large", 50, arrival_time=1.0), make_request("small", 1, arrival_time=2.0)
    for request in (first, large, small):
        scheduler.on_new_request(request)
    schedule(scheduler, first)
    report(scheduler, started=1, prompt_owed=320)
    assert [scheduler.must_wait(request) for request in (small, large)] == [False, True]
    schedule(scheduler)
    assert [scheduler.must_wait(request) for request in (small, large)] == [True, True]
    schedule(scheduler)
    report(scheduler, started=1, prompt_owed=320, backlog=320)
    assert [scheduler.must_wait(request) for request in (small, large, small)] == [True, False, True]


def test_an_urgent_request_is_let_through_first() -> None:
    scheduler = make_scheduler(num_ranks=1)
    patient, urgent = make_request("patient", priority=1), make_request("urgent", arrival_time=9.0)
    for request in (patient, urgent):
        scheduler.on_new_request(request)
    report(scheduler, backlog=1001)
    assert scheduler.must_wait(patient)
    assert scheduler.must_wait(urgent)
    report(scheduler, backlog=680 - 320)
    assert scheduler.must_wait(patient)
    assert not scheduler.must_wait(urgent)
    assert not scheduler.must_wait(patient)


def test_nothing_new_begins_while_storage_does_not_answer_until_it_is_refused() -> None:
    scheduler, request = make_scheduler(num_ranks=1), make_request("r")
    scheduler.on_new_request(request)
    report(scheduler, backlog=1, quiet=True)
    assert scheduler.must_wait(request)
    report(scheduler, backlog=1, quiet=True, stuck=True)
    assert not scheduler.must_wait(request)


def test_the_log_tells_of_requests_that_are_held_for_long_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    scheduler, request = make_scheduler(num_ranks=1), make_request("r")
    scheduler._reminder = Reminder(5.0, lambda: now)
    scheduler.on_new_request(request)
    report(scheduler, backlog=1001, write_rate=2.0 * (1 << 20))
    lines = []
    for second in range(31):
        now = 100.0 + second
        scheduler.must_wait(request)
        schedule(scheduler)
        lines += [(second, record.getMessage()) for record in caplog.records]
        caplog.clear()
    assert [second for second, _ in lines] == [5, 15, 25]
    assert "held back for 5 s, 1 now" in lines[0][1]
    assert "/data" in lines[0][1] and "2.0 MiB/s" in lines[0][1] and "pinned_ring_bytes" in lines[0][1]


@pytest.mark.parametrize("end", ["admitted", "aborted"])
def test_stats_say_how_many_requests_wait_until_they_need_not_or_have_gone(end: str) -> None:
    scheduler, running, waiting = make_scheduler(num_ranks=1), make_request("running"), make_request("waiting")
    for request in (running, waiting):
        scheduler.on_new_request(request)
    assert not scheduler.must_wait(running)
    schedule(scheduler, running)
    assert scheduler.take_stats() is None
    scheduler.on_worker_report(WorkerReport({}, {0: RankState(backlog=1001)}))
    assert not schedule(scheduler).stats_wanted
    assert scheduler.must_wait(waiting)
    assert schedule(scheduler).stats_wanted
    stats = scheduler.take_stats()
    assert stats is not None
    assert stats.gauge("requests_held") == {"scheduler": 1}
    if end == "admitted":
        report(scheduler, started=1)
        assert not scheduler.must_wait(waiting)
    else:
        scheduler.on_finished(waiting)
    assert schedule(scheduler).stats_wanted
    stats = scheduler.take_stats()
    assert stats is not None
    assert stats.gauge("requests_held") == {"scheduler": 0}
    assert stats.counter("backpressure_ns") > 0
    assert not schedule(scheduler).stats_wanted
    assert scheduler.take_stats() is None


@pytest.mark.parametrize("name", [None, "a.safetensors"], ids=["an id that is used again", "a name that is chosen again"])
def test_a_request_waits_for_the_file_of_its_predecessor_but_ignores_the_outcome(name: str | None) -> None:
    """An engine that has nothing to do asks no worker, so a file can be complete long before the scheduler knows it."""
    scheduler = ExtractionScheduler(InDirectory(Path("/data")), ROW_BYTES, num_ranks=1, ring_bytes=1000, allow_path=True)
    params = name and {"hidden_states_path": name}
    first, second = make_request("r", kv_transfer_params=params), make_request("s" if name else "r", kv_transfer_params=params)
    scheduler.on_new_request(first)
    schedule(scheduler, first)
    scheduler.on_finished(first)
    scheduler.on_new_request(second)
    assert scheduler.must_wait(second)
    assert schedule(scheduler).started == []
    for _ in range(2):  # as report_before_answers has it
        scheduler.on_worker_report(WorkerReport({"r": "broken"}, {0: RankState(started=1)}))
    assert not scheduler.must_wait(second)
    (start,) = schedule(scheduler, second).started
    assert scheduler.on_finished(second) == {"hidden_states_path": start.path}
    scheduler.on_worker_report(WorkerReport({second.request_id: None}, {0: RankState(started=2)}))
    assert scheduler._outstanding == [0]
    assert (scheduler._undecided, scheduler._writing) == ({}, {})


def test_a_request_that_gives_up_waiting_for_a_file_leaves_the_next_one_waiting() -> None:
    scheduler = ExtractionScheduler(InDirectory(Path("/data")), ROW_BYTES, num_ranks=1, ring_bytes=1000, allow_path=True)
    first, *others = (make_request(name, kv_transfer_params={"hidden_states_path": "a.safetensors"}) for name in "abcd")
    scheduler.on_new_request(first)
    schedule(scheduler, first)
    scheduler.on_finished(first)
    for other in others[:2]:
        scheduler.on_new_request(other)
        assert scheduler.must_wait(other)
        assert scheduler.on_finished(other) is None
    report(scheduler, started=1, backlog=1, stuck=True)
    scheduler.on_new_request(others[2])
    assert not scheduler.must_wait(others[2])  # its rank refuses it, which is better than to wait for nobody knows how long
    scheduler.on_finished(others[2])
    scheduler.on_worker_report(WorkerReport({"a": None}, {0: RankState(started=1)}))
    assert (scheduler._undecided, scheduler._writing) == ({}, {})


def test_reports_of_two_ranks_add_up() -> None:
    five, seven = RankState(backlog=5), RankState(backlog=7)
    both = WorkerReport({"a": None}, {0: five}).aggregate(WorkerReport({"b": "broken"}, {1: seven}))
    assert both == WorkerReport({"a": None, "b": "broken"}, {0: five, 1: seven})


class SchedulerLife(RuleBasedStateMachine):
    """Requests arrive, are scheduled, decided and finished in any order; ids are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.undecided: dict[str, int] = {}

    @rule(number=st.integers(0, 5), num_tokens=st.integers(1, 40))
    def arrive(self, number: int, num_tokens: int) -> None:
        request_id = f"r{number}"
        if request_id not in self.undecided and all(r.request_id != request_id for r in self.waiting + self.running):
            request = make_request(request_id, num_tokens)
            self.scheduler.on_new_request(request)
            self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        request = self.waiting.pop(0)
        (start,) = schedule(self.scheduler, request).started
        self.running.append(request)
        self.undecided[request.request_id] = len(start.token_ids)

    @precondition(lambda self: self.undecided)
    @rule(error=st.sampled_from([None, "broken"]), data=st.data())
    def decide(self, error: str | None, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.undecided)))
        del self.undecided[request_id]
        self.scheduler.on_worker_report(WorkerReport({request_id: error}, {0: RankState(backlog=0)}))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert "hidden_states_path" in self.scheduler.on_finished(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def abort_waiting(self) -> None:
        assert self.scheduler.on_finished(self.waiting.pop()) is None

    @invariant()
    def outstanding_bytes_are_those_of_undecided_requests(self) -> None:
        assert sum(self.scheduler._outstanding) == sum(self.undecided.values()) * ROW_BYTES
        assert len(self.scheduler._requests) == len(self.waiting) + len(self.running)


SchedulerLife.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSchedulerLife = SchedulerLife.TestCase
