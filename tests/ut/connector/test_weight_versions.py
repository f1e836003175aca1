"""Versions of the weights that compute rows, in responses and in messages to the workers."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_harness import make_request, make_scheduler, schedule

from vllm_ascend_hsx.connector.metadata import RequestEnd
from vllm_ascend_hsx.connector.scheduler import ExtractionScheduler
from vllm_ascend_hsx.protocol.weights import WeightVersion

PROMPT = 10
ABORTED = "FINISHED_ABORTED"


class Lab:
    """A scheduler, and one request that has computed the first 4 tokens of its prompt."""

    def __init__(self, **params: Any) -> None:
        self.scheduler: ExtractionScheduler = make_scheduler()
        self.request = make_request("r", PROMPT, kv_transfer_params=params)
        self.scheduler.on_new_request(self.request)
        self.told = schedule(self.scheduler, self.request, most=4).started[0].weights

    def compute(self, first: int, count: int = 1) -> None:
        """Compute tokens from this position on.

        Record the versions in the message to the workers.
        """
        self.request.num_computed_tokens = first + count
        self.told = schedule(
            self.scheduler, running={"other": (3, 1), "r": (first, count)}
        ).weights.get("r", self.told)

    def load(self, name: str = "", fingerprint: str = "") -> None:
        self.scheduler.weights_may_change()
        if fingerprint:
            self.scheduler.weights.are(fingerprint)
        if name:
            self.scheduler.weights.are_named(name)

    def versions(self) -> list[tuple[int, str]]:
        """End the request.

        Return the versions in the response, equal to the versions in the file.
        """
        answer = self.scheduler.on_finished(self.request)
        assert answer is not None
        assert answer["weight_versions"] == [[each.number, each.name] for each in self.told]
        assert not self.scheduler.weights._requests
        assert not self.scheduler.weights._watched
        return [(each.number, each.name) for each in self.told]


def test_all_rows_have_one_version_unless_weights_are_loaded() -> None:
    lab = Lab()
    lab.compute(4)
    assert lab.versions() == [(0, "")]


def test_rows_before_and_after_a_load_have_two_versions() -> None:
    lab = Lab()
    lab.load("step 1")
    lab.compute(4)
    assert lab.versions() == [(0, ""), (1, "step 1")]


def test_oldest_and_newest_of_three_versions_are_reported() -> None:
    lab = Lab()
    for first in (4, 5):
        lab.load()
        lab.compute(first)
    assert lab.versions() == [(0, ""), (2, "")]


@pytest.mark.parametrize("first", [PROMPT, 0], ids=["it goes on", "it is preempted"])
@pytest.mark.parametrize(
    "spans", [[(4, PROMPT - 4)], [(4, 3), (7, PROMPT - 7)]], ids=["two steps", "three steps"]
)
def test_load_after_the_last_prompt_row_adds_no_version(
    spans: list[tuple[int, int]], first: int
) -> None:
    """Recomputed tokens have no rows, because the file has all rows."""
    lab = Lab()
    for span in spans:
        lab.compute(*span)
    lab.load()
    lab.compute(first)
    assert lab.versions() == [(0, "")]


def test_no_request_is_watched_once_all_prompt_rows_are_computed() -> None:
    lab = Lab()
    assert lab.scheduler.weights._watched == {"r"}
    lab.compute(4, PROMPT - 4)
    assert not lab.scheduler.weights._watched


def test_load_between_generated_rows_adds_a_version() -> None:
    lab = Lab(include_output_tokens=True)
    lab.compute(4)
    lab.compute(5, PROMPT - 5)
    lab.load()
    lab.compute(PROMPT)
    assert lab.versions() == [(0, ""), (1, "")]


def test_load_without_later_rows_adds_no_version() -> None:
    lab = Lab(include_output_tokens=True)
    lab.load()
    assert lab.versions() == [(0, "")]


@pytest.mark.parametrize("continued", [False, True], ids=["at once", "after rows of both"])
def test_recomputed_request_has_only_the_new_version(continued: bool) -> None:
    lab = Lab()
    lab.load()
    if continued:
        lab.compute(4)
    for first in (0, 4):
        lab.compute(first)
    assert lab.versions() == [(1, "")]


def test_request_resumed_as_new_has_the_new_version() -> None:
    """As with model runner V2."""
    lab = Lab()
    lab.load()
    lab.request.num_computed_tokens = 0
    lab.told = schedule(lab.scheduler, lab.request).weights["r"]
    assert lab.versions() == [(1, "")]


def test_name_belongs_to_one_version_only() -> None:
    lab = Lab()
    lab.scheduler.weights.are_named("sft")
    lab.compute(4)
    assert lab.told == (WeightVersion(0, "sft"),)
    lab.load()
    lab.compute(5)
    assert lab.versions() == [(0, "sft"), (1, "")]


def test_fingerprint_belongs_to_one_version_only() -> None:
    lab = Lab()
    for fingerprint in ("0a" * 16, ""):
        lab.load(fingerprint=fingerprint)
        request = make_request(f"after {fingerprint}")
        lab.scheduler.on_new_request(request)
        (start,) = schedule(lab.scheduler, request).started
        assert [each.fingerprint for each in start.weights] == [fingerprint]


def end_of(lab: Lab, status: str = ABORTED, stop: list[str] | None = None) -> RequestEnd:
    """End a request that has generated three tokens. Return the message to the workers."""
    lab.request.status.name, lab.request.sampling_params.stop = status, stop or []
    lab.request.output_token_ids, lab.request.num_output_tokens = [71, 72, 73], 3
    lab.scheduler.on_finished(lab.request)
    (end,) = schedule(lab.scheduler).ended
    return end


@pytest.mark.parametrize(
    ("params", "tokens", "most_kept"),
    [
        ({"keep_aborted": True, "include_output_tokens": True}, [71, 72, 73], PROMPT + 3),
        ({"keep_aborted": True}, [], PROMPT),
        ({"keep_aborted": False, "include_output_tokens": True}, [], 0),
        ({"include_output_tokens": True}, [], 0),
    ],
    ids=str,
)
def test_aborted_request_keeps_its_rows_on_request(
    params: dict[str, bool], tokens: list[int], most_kept: int
) -> None:
    end = end_of(Lab(**params))
    assert (end.aborted, end.output_token_ids.tolist(), end.most_kept) == (True, tokens, most_kept)


@pytest.mark.parametrize(
    ("status", "stop"), [("FINISHED_STOPPED", []), (ABORTED, ["\n"])], ids=["ended", "stop string"]
)
def test_keep_aborted_does_not_affect_a_finished_request(status: str, stop: list[str]) -> None:
    end = end_of(Lab(keep_aborted=True, include_output_tokens=True), status, stop)
    assert (end.aborted, end.output_token_ids.tolist(), end.most_kept) == (False, [71, 72], 0)


def test_rows_of_earlier_weights_are_not_kept_after_recomputed_rows() -> None:
    """The name of the new weights would be wrong for these rows."""
    lab = Lab(keep_aborted=True)
    lab.compute(4)
    lab.load()
    lab.compute(0)
    lab.request.num_computed_tokens = 3
    assert end_of(lab).most_kept == 3
