"""An API request stores at most its limit, whatever its prompts, samples and names."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.connector.admission import RefusalLog, RequestLimits

ROW_BYTES = 64
DIGITS = "0123abcd"


def make_limits(files: int = 4, rows: int = 1000) -> RequestLimits:
    return RequestLimits(files, rows * ROW_BYTES, ROW_BYTES)


def completion(name: str, prompts: int, samples: int = 1, digits: str = DIGITS) -> list[str]:
    """vLLM's ids of a request for completions."""
    return [
        "".join((f"{sample}_" if samples > 1 else "", f"cmpl-{name}-{prompt}", f"-{digits}" if digits else ""))
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def chat(name: str, samples: int = 1, digits: str = DIGITS) -> list[str]:
    return [f"{sample}_chatcmpl-{name}-{digits}" if samples > 1 else f"chatcmpl-{name}-{digits}" for sample in range(samples)]


def stored(limits: RequestLimits, ids: list[str], rows: int = 1) -> int:
    """How many of the files are allowed."""
    return sum(limits.refusal(each, rows) is None for each in ids)


@pytest.mark.parametrize("digits", [DIGITS, ""], ids=["random", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"])
@pytest.mark.parametrize("name", ["x", "sample-17", "0-0", "3_x", "a/../b\nc", "deadbeef", "cmpl-x-0-deadbeef", ""])
@pytest.mark.parametrize(("prompts", "samples"), [(9, 1), (1, 9), (3, 3)])
def test_prompts_and_samples_of_a_completion_are_counted_together(name: str, digits: str, prompts: int, samples: int) -> None:
    assert stored(make_limits(), completion(name, prompts, samples, digits)) == 4


@given(name=st.text(max_size=60))
def test_whatever_a_client_calls_its_request_its_samples_are_counted_together(name: str) -> None:
    assert stored(make_limits(), chat(name, samples=9)) == 4
    assert stored(make_limits(), completion(name, 3, 3)) == 4


@pytest.mark.parametrize("digits", [DIGITS, ""], ids=["random", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"])
def test_items_that_are_scored_together_are_counted_together(digits: str) -> None:
    ids = [f"generative-scoring-row-7-{item}{'-' if digits else ''}{digits}" for item in range(9)]
    assert stored(make_limits(), ids) == 4


def test_requests_are_counted_alone_however_their_client_numbers_them() -> None:
    limits = make_limits()
    ids = [each for number in range(30) for sep in "-_" for each in chat(f"row{sep}{number}") + completion(f"row{sep}{number}", 1)]
    assert stored(limits, ids) == len(ids)


def test_requests_that_all_have_one_id_are_counted_alone() -> None:
    limits = make_limits()
    assert [stored(limits, completion("same", 1, digits=f"{n:08x}")) for n in range(9)] == [1] * 9
    assert [stored(limits, completion("same", 3, digits=f"{n:08x}")) for n in range(9)] == [3] * 9
    assert [stored(limits, chat("same", 3, digits=f"{n:08x}")) for n in range(9)] == [3] * 9


def test_prompts_that_come_late_are_counted_with_the_first_while_others_come_in_between() -> None:
    limits = make_limits()
    assert sum(stored(limits, [each, *completion(f"other-{n}", 2)]) for n, each in enumerate(completion("big", 500))) == 4 + 500 * 2


def test_bytes_are_counted_together_too_and_what_still_fits_is_stored() -> None:
    limits = make_limits(files=100, rows=50)
    first, second, third, fourth = completion("x", 4)
    assert limits.refusal(first, 30) is None
    reason = limits.refusal(second, 21)
    assert reason is not None
    assert f"up to {51 * ROW_BYTES} bytes, and kv_connector_extra_config.max_bytes_per_request is {50 * ROW_BYTES}; send fewer" in reason
    assert limits.refusal(third, 20) is None
    assert limits.refusal(fourth, 1) is not None


def test_what_is_refused_is_logged_once_in_ten_seconds_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = RefusalLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.add("cmpl-x\ny-4-0123abcd", "no room")
        now = 9.9
        log.add("a", "no room")
        assert caplog.messages == [r"request 'cmpl-x\ny-4-0123abcd' is not extracted: no room"]
        now = 10.0
        log.add("b", "no room")
        assert caplog.messages[1] == "request 'b' is not extracted: no room (3 others were refused since the last log line)"
        now = 20.0
        log.add("c", "no room")
        assert caplog.messages[2] == "request 'c' is not extracted: no room"
