"""Scheduler side: requests to extract, their owners, waiting, and responses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_harness import FIRST_WEIGHTS, ROW_BYTES, make_request, make_scheduler, schedule

from vllm_ascend_hsx.connector.admission import RequestLimits
from vllm_ascend_hsx.connector.metadata import HsxConnectorMetadata, RankState, WorkerReport
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.sinks.destination import InStore

STORE = MooncakeOptions(master_server_address="localhost:50051")


def test_an_extracted_request_skips_the_prefix_cache_and_its_response_names_the_file() -> None:
    scheduler, request = make_scheduler(), make_request("cmpl-1", arrival_time=12.5)
    scheduler.on_new_request(request)
    assert request.skip_reading_prefix_cache is True
    (start,) = schedule(scheduler, request).started
    assert start.token_ids.tolist() == request.prompt_token_ids
    assert start.arrived_ns == 12_500_000_000
    assert scheduler.on_finished(request) == {"hidden_states_path": start.path, **FIRST_WEIGHTS}
    assert Path(start.path).parent == Path("/data")


def test_each_request_of_a_step_starts_with_its_own_adapter() -> None:
    scheduler, adapters = make_scheduler(), [object(), None, object()]
    requests = [
        make_request(f"r{index}", lora_request=adapter) for index, adapter in enumerate(adapters)
    ]
    for request in requests:
        scheduler.on_new_request(request)
    assert [start.lora for start in schedule(scheduler, *requests).started] == adapters


def feature(modality: str, offset: int, length: int) -> Any:
    """Return the part of vllm.multimodal.inputs.MultiModalFeatureSpec that is read."""
    return SimpleNamespace(
        modality=modality, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def test_request_starts_with_its_images_in_prompt_order() -> None:
    scheduler = make_scheduler()
    requests = [
        make_request("two", 9, mm_features=[feature("image", 5, 3), feature("image", 1, 2)]),
        make_request("text"),
        make_request("one", mm_features=[feature("image", 0, 4)]),
    ]
    for request in requests:
        scheduler.on_new_request(request)
    placeholders = [start.placeholders for start in schedule(scheduler, *requests).started]
    assert placeholders == [(("image", 1, 2), ("image", 5, 3)), (), (("image", 0, 4),)]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        pytest.param({"kv_transfer_params": {"hidden_states": False}}, None, id="opts out"),
        pytest.param({"pooling_params": object()}, None, id="pooling"),
        pytest.param(
            {"kv_transfer_params": {"hidden_states": "no"}},
            "'no'; use true or false",
            id="not a boolean",
        ),
        pytest.param(
            {"kv_transfer_params": {"include_output_tokens": 1}},
            "1; use true or false",
            id="not a boolean either",
        ),
        pytest.param(
            {"kv_transfer_params": "x"}, "kv_transfer_params is 'x'; use an object", id="vllm_xargs"
        ),
        pytest.param(
            {"kv_transfer_params": {"hidden_states_path": "a.safetensors"}},
            "allow_custom_save_path",
            id="chooses a name",
        ),
        pytest.param({"prompt_token_ids": None}, "prompt_embeds", id="embeddings"),
        pytest.param({"resumable": True}, "streaming input", id="streaming input"),
        pytest.param(
            {"mm_features": [feature("video", 1, 2), feature("image", 3, 1)]},
            "with video is not extracted",
            id="video",
        ),
        pytest.param(
            {"mm_features": [feature("audio", 1, 2)]}, "with audio is not extracted", id="audio"
        ),
    ],
)
def test_request_without_extraction_keeps_the_prefix_cache_and_gets_the_reason(
    change: dict[str, Any], answer: str | None
) -> None:
    scheduler, request = make_scheduler(), make_request("r", **change)
    scheduler.on_new_request(request)
    assert request.skip_reading_prefix_cache is False
    assert schedule(scheduler, request) == HsxConnectorMetadata()
    params = scheduler.on_finished(request)
    assert params is None if answer is None else answer in params["hidden_states_error"]


def test_requests_without_extraction_cost_nothing() -> None:
    scheduler = make_scheduler(num_ranks=1, extract_all=False)
    ordinary, asking = (
        make_request("ordinary"),
        make_request("asking", kv_transfer_params={"hidden_states": True}),
    )
    for request in (ordinary, asking):
        scheduler.on_new_request(request)
    scheduler.on_worker_report(WorkerReport({}, {0: RankState(backlog=1001)}))
    assert (scheduler.must_wait(ordinary), scheduler.must_wait(asking)) == (False, True)
    assert (ordinary.skip_reading_prefix_cache, asking.skip_reading_prefix_cache) == (False, True)
    assert [start.request_id for start in schedule(scheduler, ordinary, asking).started] == [
        "asking"
    ]
    assert scheduler.on_finished(ordinary) is None


def test_prompts_beyond_the_limits_are_generated_without_rows_and_get_the_reason() -> None:
    limits = RequestLimits(max_files=2, max_bytes=10_000, row_bytes=ROW_BYTES)
    scheduler = make_scheduler(num_ranks=1, limits=limits)
    requests = [make_request(f"cmpl-1-{prompt}-0123abcd") for prompt in range(3)]
    for request in requests:
        scheduler.on_new_request(request)
    assert [request.skip_reading_prefix_cache for request in requests] == [True, True, False]
    assert [start.request_id for start in schedule(scheduler, *requests).started] == [
        "cmpl-1-0-0123abcd",
        "cmpl-1-1-0123abcd",
    ]
    assert (
        "kv_connector_extra_config.max_files_per_request"
        in scheduler.on_finished(requests[2])["hidden_states_error"]
    )
    stats = scheduler.take_stats()
    assert stats is not None and stats.failures == {"refused": 1}


def test_request_that_was_never_scheduled_leaves_no_state() -> None:
    scheduler, request = make_scheduler(), make_request("r")
    scheduler.on_new_request(request)
    assert scheduler.on_finished(request) is None
    assert schedule(scheduler) == HsxConnectorMetadata()


@pytest.mark.parametrize(
    ("status", "aborted"),
    [("FINISHED_ABORTED", True), ("FINISHED_ERROR", False), ("FINISHED_STOPPED", False)],
)
def test_workers_learn_of_an_end_once_in_the_next_step(status: str, aborted: bool) -> None:
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
def test_server_or_request_can_include_rows_of_generated_tokens(
    default: bool, params: dict[str, bool] | None, included: bool
) -> None:
    scheduler = make_scheduler(num_ranks=1, include_output=default)
    request = make_request(
        "r", kv_transfer_params=params, output_token_ids=[7, 8, 9], num_output_tokens=3
    )
    scheduler.on_new_request(request)
    (start,) = schedule(scheduler, request).started
    scheduler.on_finished(request)
    (end,) = schedule(scheduler).ended
    assert (start.include_output, end.output_token_ids.tolist()) == (
        (True, [7, 8]) if included else (False, [])
    )


@pytest.mark.parametrize(
    ("stop", "generated", "aborted"), [(["."], 2, False), (["."], 0, True), ([], 2, True)]
)
def test_request_ended_by_a_stop_string_keeps_its_file(
    stop: list[str], generated: int, aborted: bool
) -> None:
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


@pytest.mark.parametrize(
    ("include_output", "tokens", "mode"), [(False, 5, "prompt_only"), (True, 7, "all")]
)
def test_response_of_a_store_has_the_manifest_for_readers(
    include_output: bool, tokens: int, mode: str
) -> None:
    row_format = RowFormat((2, 0), 8, "BF16")
    scheduler = make_scheduler(
        num_ranks=1, destination=InStore(row_format, STORE), row_bytes=row_format.row_bytes
    )
    params = {"include_output_tokens": include_output}
    request = make_request(
        "a/b", kv_transfer_params=params, output_token_ids=[7, 8, 9], num_output_tokens=3
    )
    scheduler.on_new_request(request)
    (start,) = schedule(scheduler, request).started
    scheduler.on_worker_report(WorkerReport({"a/b": "no room"}, {0: RankState(backlog=0)}))
    answer = scheduler.on_finished(request)
    assert answer == {
        **FIRST_WEIGHTS,
        "handle": start.path,
        "version": 1,
        "tensors": {
            "hidden_states": {
                "shape": [tokens, 2, 8],
                "dtype": "torch.bfloat16",
                "nbytes": tokens * 32,
                "offset": 0,
            },
            "token_ids": {
                "shape": [tokens],
                "dtype": "torch.int64",
                "nbytes": tokens * 8,
                "offset": 192 if tokens == 5 else 256,
            },
        },
        "metadata": {
            "num_tokens": tokens,
            "total_aligned_bytes": 256 if tokens == 5 else 320,
            "extract_mode": mode,
        },
        "hidden_states_error": "no room",
    }
    assert "/" not in start.path and start.path.startswith("a_b~")


def test_requests_cannot_choose_a_file_in_a_store() -> None:
    row_format = RowFormat((2, 0), 8, "BF16")
    scheduler = make_scheduler(
        num_ranks=1,
        destination=InStore(row_format, STORE),
        row_bytes=row_format.row_bytes,
        allow_path=True,
    )
    request = make_request("r", kv_transfer_params={"hidden_states_path": "a.safetensors"})
    scheduler.on_new_request(request)
    assert not scheduler.extracts("r")
    assert (
        "'a.safetensors', but this server writes no files: it puts hidden states"
        in scheduler.on_finished(request)["hidden_states_error"]
    )


def test_finished_request_is_answered_once() -> None:
    scheduler, request = (
        make_scheduler(),
        make_request("r", kv_transfer_params={"do_remote_decode": True}),
    )
    scheduler.beside_others()
    scheduler.on_new_request(request)
    (start,) = schedule(scheduler, request).started
    assert scheduler.on_finished(request) == {"hidden_states_path": start.path, **FIRST_WEIGHTS}
    assert scheduler.on_finished(request) is None  # MultiConnector asks again
    assert [end.request_id for end in schedule(scheduler).ended] == ["r"]
    assert not scheduler.extracts("r")


def test_known_error_is_in_the_response() -> None:
    scheduler, request = make_scheduler(), make_request("r")
    scheduler.on_new_request(request)
    schedule(scheduler, request)
    scheduler.on_worker_report(
        WorkerReport({"r": "No space left on device"}, {0: RankState(backlog=0)})
    )
    assert scheduler.on_finished(request)["hidden_states_error"] == "No space left on device"


def test_owners_are_the_ranks_with_least_unfinished_bytes() -> None:
    scheduler = make_scheduler(num_ranks=3)
    requests = [
        make_request(f"r{i}", num_tokens) for i, num_tokens in enumerate((50, 10, 20, 5, 30))
    ]
    for request in requests:
        scheduler.on_new_request(request)
    owners = [start.owner for start in schedule(scheduler, *requests).started]
    assert owners == [0, 1, 2, 1, 1]
    scheduler.on_worker_report(WorkerReport({"r0": None}))
    late = make_request("late")
    scheduler.on_new_request(late)
    assert schedule(scheduler, late).started[0].owner == 0


def test_reports_of_two_ranks_add_up() -> None:
    five, seven = RankState(backlog=5), RankState(backlog=7)
    both = WorkerReport({"a": None}, {0: five}).aggregate(WorkerReport({"b": "broken"}, {1: seven}))
    assert both == WorkerReport({"a": None, "b": "broken"}, {0: five, 1: seven})


class SchedulerLife(RuleBasedStateMachine):
    """Requests arrive, are scheduled, decided and finished in any order. Ids are reused."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler()
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.undecided: dict[str, int] = {}

    @rule(number=st.integers(0, 5), num_tokens=st.integers(1, 40))
    def arrive(self, number: int, num_tokens: int) -> None:
        request_id = f"r{number}"
        if request_id not in self.undecided and all(
            r.request_id != request_id for r in self.waiting + self.running
        ):
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
        self.scheduler.on_worker_report(
            WorkerReport({request_id: error}, {0: RankState(backlog=0)})
        )

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
    def unfinished_bytes_are_those_of_undecided_requests(self) -> None:
        assert (
            sum(load.unfinished for load in self.scheduler._loads)
            == sum(self.undecided.values()) * ROW_BYTES
        )
        assert len(self.scheduler._requests) == len(self.waiting) + len(self.running)


SchedulerLife.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSchedulerLife = SchedulerLife.TestCase
