"""Back-pressure: requests wait while the ring is full, and no longer than necessary."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_harness import (
    FIRST_WEIGHTS,
    make_request,
    make_scheduler,
    report,
    schedule,
)

from vllm_ascend_hsx.connector.metadata import RankState, WorkerReport
from vllm_ascend_hsx.connector.storage_watch import Reminder


def test_new_requests_wait_while_the_ring_is_full_and_started_requests_do_not() -> None:
    scheduler, running, waiting = (
        make_scheduler(num_ranks=1),
        make_request("running"),
        make_request("waiting"),
    )
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


def test_admitted_request_counts_before_the_worker_reports_it() -> None:
    scheduler = make_scheduler(num_ranks=1)
    requests = [make_request(f"r{index}", 5, arrival_time=index) for index in range(5)]
    for request in requests:
        scheduler.on_new_request(request)
    assert [scheduler.must_wait(request) for request in requests] == [
        False,
        False,
        False,
        True,
        True,
    ]
    schedule(scheduler, *requests[:2])  # the KV cache was too full for the third request
    assert [scheduler.must_wait(request) for request in requests[2:]] == [
        False,
        True,
        True,
    ]  # no request has overtaken it


def test_admitted_request_that_is_not_scheduled_adds_no_debt() -> None:
    """vLLM asks the connector first, and may then find the KV cache full."""
    scheduler, large, small = make_scheduler(), make_request("large", 10), make_request("small", 1)
    for request in (large, small):
        scheduler.on_new_request(request)
    assert not scheduler.must_wait(large)
    schedule(scheduler)
    (start,) = schedule(scheduler, small).started
    assert start.owner == 0


@pytest.mark.parametrize(
    ("rates", "waits"),
    [
        pytest.param({}, True, id="nothing is known"),
        pytest.param(
            {"write_rate": 50.0, "prompt_rate": 100.0}, False, id="half is written while it comes"
        ),
        pytest.param(
            {"write_rate": 10.0, "prompt_rate": 100.0}, True, id="a tenth is written while it comes"
        ),
        pytest.param(
            {"write_rate": 100.0, "prompt_rate": 100.0, "backlog": 1000},
            False,
            id="storage is as fast as prompts",
        ),
        pytest.param({"write_rate": 100.0}, True, id="how fast prompts come is not known"),
    ],
)
def test_rows_written_during_the_prompt_need_no_memory(
    rates: dict[str, float], waits: bool
) -> None:
    scheduler = make_scheduler(num_ranks=1)
    running, asking = make_request("running", 10), make_request("asking", 10)
    for request in (running, asking):
        scheduler.on_new_request(request)
    schedule(scheduler, running)
    report(scheduler, **{"started": 1, "coming": 640} | rates)
    assert scheduler.must_wait(asking) == waits


def test_generated_rows_count_at_the_step_rate() -> None:
    """A hundred steps per second make 100 rows of 64 bytes per second for each request."""
    rates = {"prompt_rate": 1e6, "step_rate": 100.0}
    for write_rate, waits in ((12_800.0, False), (12_000.0, True)):
        scheduler = make_scheduler(num_ranks=1)
        running, asking = (
            make_request(
                name, 1, kv_transfer_params={"include_output_tokens": True}, max_tokens=501
            )
            for name in "ab"
        )
        for request in (running, asking):
            scheduler.on_new_request(request)
        schedule(scheduler, running)
        report(scheduler, started=1, write_rate=write_rate, **rates)
        assert scheduler.must_wait(asking) == waits


def test_request_larger_than_the_ring_starts_when_half_is_free_and_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_ranks=1)
    first, large, small = (
        make_request("first", 5),
        make_request("large", 50, arrival_time=1.0),
        make_request("small", 1, arrival_time=2.0),
    )
    for request in (first, large, small):
        scheduler.on_new_request(request)
    schedule(scheduler, first)
    report(scheduler, started=1, coming=320, backlog=320)
    assert [scheduler.must_wait(request) for request in (small, large)] == [False, True]
    schedule(scheduler)
    assert [scheduler.must_wait(request) for request in (small, large)] == [True, True]
    schedule(scheduler)
    report(scheduler, started=1, backlog=320)
    assert [scheduler.must_wait(request) for request in (small, large, small)] == [
        True,
        False,
        True,
    ]


def test_request_with_higher_priority_is_admitted_first() -> None:
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


def test_paused_rank_holds_requests_and_unresponsive_rank_refuses_them() -> None:
    scheduler, request = make_scheduler(num_ranks=1), make_request("r")
    scheduler.on_new_request(request)
    paused, full = {"backlog": 1, "paused": True}, {"backlog": 2000}
    unresponsive = {"unresponsive": True}
    states = (
        (paused, True),
        (paused | unresponsive, False),
        (full, True),
        (full | unresponsive, False),
        (full, True),
    )
    for state, waits in states:
        report(scheduler, **state)
        assert scheduler.must_wait(request) == waits, state
        schedule(scheduler)


def test_held_requests_are_logged_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    scheduler, request = make_scheduler(num_ranks=1), make_request("r")
    scheduler._admission._reminder = Reminder(5.0, lambda: now)
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
    assert (
        "/data" in lines[0][1] and "2.0 MiB/s" in lines[0][1] and "pinned_ring_bytes" in lines[0][1]
    )


@pytest.mark.parametrize("end", ["admitted", "aborted"])
def test_stats_count_held_requests_until_they_start_or_end(end: str) -> None:
    scheduler, running, waiting = (
        make_scheduler(num_ranks=1),
        make_request("running"),
        make_request("waiting"),
    )
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


@pytest.mark.parametrize(
    "name", [None, "a.safetensors"], ids=["an id that is used again", "a name that is chosen again"]
)
def test_request_waits_for_an_earlier_file_of_its_name_but_ignores_the_outcome(
    name: str | None,
) -> None:
    """Workers report only with steps, so a file can be complete long before the scheduler knows."""
    scheduler = make_scheduler(num_ranks=1, allow_path=True)
    params = name and {"hidden_states_path": name}
    first, second = (
        make_request("r", kv_transfer_params=params),
        make_request("s" if name else "r", kv_transfer_params=params),
    )
    scheduler.on_new_request(first)
    schedule(scheduler, first)
    scheduler.on_finished(first)
    scheduler.on_new_request(second)
    assert scheduler.must_wait(second)
    assert schedule(scheduler).started == []
    for _ in range(2):  # as with report_before_answers
        scheduler.on_worker_report(WorkerReport({"r": "broken"}, {0: RankState(started=1)}))
    assert not scheduler.must_wait(second)
    (start,) = schedule(scheduler, second).started
    assert scheduler.on_finished(second) == {"hidden_states_path": start.path, **FIRST_WEIGHTS}
    scheduler.on_worker_report(WorkerReport({second.request_id: None}, {0: RankState(started=2)}))
    assert scheduler._loads[0].unfinished == 0
    assert (scheduler._undecided, scheduler._undecided_paths, scheduler._writing) == ({}, {}, {})


def test_request_that_ends_while_waiting_for_a_file_does_not_release_the_next_request() -> None:
    scheduler = make_scheduler(num_ranks=1, allow_path=True)
    first, *others = (
        make_request(name, kv_transfer_params={"hidden_states_path": "a.safetensors"})
        for name in "abcd"
    )
    scheduler.on_new_request(first)
    schedule(scheduler, first)
    scheduler.on_finished(first)
    for other in others[:2]:
        scheduler.on_new_request(other)
        assert scheduler.must_wait(other)
        assert scheduler.on_finished(other) is None
    report(scheduler, started=1, backlog=1, unresponsive=True)
    scheduler.on_new_request(others[2])
    assert not scheduler.must_wait(others[2])
    assert "has not ended" in scheduler.on_finished(others[2])["hidden_states_error"]
    scheduler.on_worker_report(WorkerReport({"a": None}, {0: RankState(started=1)}))
    assert (scheduler._undecided, scheduler._undecided_paths, scheduler._writing) == ({}, {}, {})


def test_chosen_name_belongs_to_the_first_prompt_and_sample_on_any_rank() -> None:
    scheduler = make_scheduler(num_ranks=1, allow_path=True)
    reason = (
        "which names one file, and the first prompt and sample of the request uses it; send each "
        "prompt in a request of its own, with n=1"
    )
    error = {
        "hidden_states_error": f"kv_transfer_params.hidden_states_path is '/data/a.safetensors', {reason}"
    }
    for first, *others in (
        ["cmpl-x-0-0123abcd", "cmpl-x-1-0123abcd"],
        ["0_cmpl-y-0-0123abcd", "1_cmpl-y-0-0123abcd", "0_cmpl-y-1-0123abcd"],
        ["0_chatcmpl-z-0123abcd", "1_chatcmpl-z-0123abcd", "2_chatcmpl-z-0123abcd"],
        ["2026_run_0-0123abcd"],  # turns of /v1/responses; clients choose the ids
        ["20261124_0001_0-0123abcd"],
        ["7_0-0123abcd"],
        ["3_cmpl-q-1_0-0123abcd"],
    ):
        requests = [
            make_request(each, kv_transfer_params={"hidden_states_path": "a.safetensors"})
            for each in (*others, first)
        ]
        for request in requests:
            scheduler.on_new_request(request)
        assert [scheduler.extracts(request.request_id) for request in requests] == [False] * len(
            others
        ) + [True]
        assert [scheduler.on_finished(request) for request in requests[:-1]] == [error] * len(
            others
        )
        scheduler.on_finished(requests[-1])
        scheduler.on_worker_report(WorkerReport({first: None}, {}))
        for request_id in (first, *others):
            scheduler.on_new_request(make_request(f"{request_id}0"))
            assert scheduler.extracts(f"{request_id}0"), "each has a name of its own"


@pytest.mark.parametrize("name", [None, "a.safetensors"], ids=["id", "name"])
def test_id_or_name_in_use_by_an_unresponsive_rank_is_generated_without_extraction(
    name: str | None,
) -> None:
    """The rank could not distinguish two requests with the same id."""
    scheduler = make_scheduler(num_ranks=2, allow_path=True)
    params = name and {"hidden_states_path": name}
    first, second = (
        make_request("r", kv_transfer_params=params),
        make_request("s" if name else "r", kv_transfer_params=params),
    )
    scheduler.on_new_request(first)
    (start,) = schedule(scheduler, first).started
    scheduler.on_finished(first)
    scheduler.on_new_request(second)
    assert scheduler.must_wait(second)
    report(scheduler, rank=start.owner, started=1, backlog=1, unresponsive=True)
    assert not scheduler.must_wait(second)
    assert schedule(scheduler, second).started == []
    scheduler.on_worker_report(WorkerReport({"r": None}, {start.owner: RankState(started=1)}))
    assert scheduler.on_finished(second) == {
        "hidden_states_error": (
            "an earlier request with this id or name has not ended, because the storage does not "
            "answer"
        )
    }
    assert (scheduler._undecided, scheduler._undecided_paths, scheduler._writing) == ({}, {}, {})
    assert [load.unfinished for load in scheduler._loads] == [0, 0]


def test_unresponsive_rank_gets_no_request_while_another_rank_responds() -> None:
    scheduler = make_scheduler()
    report(scheduler, rank=0, backlog=1, paused=True, unresponsive=True)
    for request in (make_request(f"r{index}", 1, arrival_time=index) for index in range(3)):
        scheduler.on_new_request(request)
        assert not scheduler.must_wait(request)
        (start,) = schedule(scheduler, request).started
        assert start.owner == 1


def test_unresponsive_rank_refuses_requests_only_if_all_ranks_are_unresponsive() -> None:
    """Refused requests reduce the load of a rank, so it would attract more requests."""
    scheduler = make_scheduler()
    requests = [make_request(f"r{index}", 1, arrival_time=index) for index in range(6)]

    def owners(some: list[Any]) -> list[int]:
        for request in some:
            scheduler.on_new_request(request)
            assert not scheduler.must_wait(request)
        return [start.owner for start in schedule(scheduler, *some).started]

    report(scheduler, rank=0, backlog=1, paused=True, unresponsive=True)
    assert owners(requests[:3]) == [1, 1, 1]
    report(scheduler, rank=1, started=3, backlog=1, paused=True, unresponsive=True)
    assert owners(requests[3:5]) == [0, 0]
    report(scheduler, rank=1, started=3)
    assert owners(requests[5:]) == [1]


def test_paused_rank_stops_admission_on_all_ranks_and_all_learn_of_an_unresponsive_rank() -> None:
    """Ranks share the storage, so the next step would wait for the same stall."""
    scheduler, request = make_scheduler(num_ranks=2), make_request("one")
    scheduler.on_new_request(request)
    report(scheduler, 0, paused=True)
    assert scheduler.must_wait(request)
    report(scheduler, 0, paused=True, unresponsive=True)  # perhaps only on this rank
    assert not scheduler.must_wait(request)
    metadata = schedule(scheduler, request)
    assert [start.owner for start in metadata.started] == [1]
    assert metadata.unresponsive == {0}
    report(scheduler, 0)
    assert not schedule(scheduler).unresponsive
