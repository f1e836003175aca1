"""Any value in kv_transfer_params is either accepted or refused by name in the response."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import scheduler_harness
from depth import depth
from hostile import HUGE, JSON, STRINGS, nested
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.connector.metadata import RankState, WorkerReport
from vllm_ascend_hsx.connector.scheduler import ExtractionScheduler
from vllm_ascend_hsx.protocol.api import ParamsError, ServerParams, read_params
from vllm_ascend_hsx.protocol.names import MAX_DEPTH, file_name
from vllm_ascend_hsx.sinks.destination import InDirectory

OURS = (
    "hidden_states_path",
    "hidden_states",
    "include_output_tokens",
    "keep_aborted",
    "sample_key",
)
KEYS = (*OURS, "do_remote_decode", "do_remote_prefill")
PARAMS = JSON | st.fixed_dictionaries(
    {}, optional={key: JSON | st.booleans() | STRINGS for key in KEYS}
)


def make_request(request_id: str, params: Any, output: int = 2) -> Any:
    """The attributes of vllm.v1.request.Request that are read."""
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        kv_transfer_params=params,
        pooling_params=None,
        resumable=False,
        mm_features=[],
        priority=0,
        arrival_time=0.0,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        sampling_params=SimpleNamespace(stop=[]),
        max_tokens=4,
        num_output_tokens=output,
        output_token_ids=list(range(output)),
        lora_request=None,
        num_computed_tokens=0,
    )


def make_scheduler(allow_path: bool, directory: str = "/data") -> ExtractionScheduler:
    return scheduler_harness.make_scheduler(
        destination=InDirectory(Path(directory)), allow_path=allow_path
    )


def schedule(scheduler: ExtractionScheduler, *requests: Any) -> list[str]:
    """Schedule requests. Return the paths of the extracted requests."""
    return [start.path for start in scheduler_harness.schedule(scheduler, *requests).started]


@settings(max_examples=depth(400))
@given(request_id=STRINGS, params=PARAMS, allow_path=st.booleans())
@example(request_id="r", params="x", allow_path=False)
@example(request_id="r", params=5, allow_path=False)
@example(request_id="r", params={"hidden_states_path": "\ud800.safetensors"}, allow_path=True)
@example(request_id="../" * 3000, params={"hidden_states_path": "../" * 3000}, allow_path=True)
def test_client_parameters_neither_stop_the_scheduler_nor_leave_the_directory(
    request_id: str, params: Any, allow_path: bool
) -> None:
    play(request_id, params, allow_path)


@pytest.mark.parametrize("key", [None, *KEYS])
@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, nested(100_000), {"a": nested(5_000)}, "\ud800" * 10_000], ids="abcde"
)
def test_unprintable_values_are_refused(key: str | None, value: Any) -> None:
    play("r", value if key is None else {key: value}, allow_path=True)


def play(request_id: str, params: Any, allow_path: bool) -> None:
    """Run a request through the scheduler, and check the invariants for any client input."""
    scheduler = make_scheduler(allow_path)
    request = make_request(request_id, params)
    scheduler.on_new_request(request)
    assert not scheduler.must_wait(request)
    started = schedule(scheduler, request)
    for path in started:
        assert path.startswith("/data/")
        assert os.path.normpath(path) == path
        assert path.isprintable()
        assert allow_path or path == f"/data/{file_name(request_id)}"
    answer = scheduler.on_finished(request)
    msgspec.msgpack.encode(answer)  # as for the API server
    if answer is not None and not started:
        assert set(answer) == {"hidden_states_error"}
        assert len(answer["hidden_states_error"]) < 500
        assert answer["hidden_states_error"].isprintable()
        assert answer["hidden_states_error"].startswith("kv_transfer_params")
    scheduler.on_worker_report(WorkerReport({request_id: None}, {0: RankState(backlog=0)}))
    schedule(scheduler)
    held = {
        name: value
        for name, value in vars(scheduler).items()
        if isinstance(value, dict | set | list) and name != "_backlog"
    }
    assert not any(map(any, held.values())), f"something of the request has stayed: {held}"


@pytest.mark.parametrize(
    ("chosen", "path"),
    [
        ("a.safetensors", "/data/x/a.safetensors"),
        ("train/shard 0/é.safetensors", "/data/x/train/shard 0/é.safetensors"),
        ("/data/x/a.safetensors", "/data/x/a.safetensors"),
        ("/data/y/../x/a/b.safetensors", "/data/x/a/b.safetensors"),
        ("d/" * MAX_DEPTH + "a.safetensors", "/data/x/" + "d/" * MAX_DEPTH + "a.safetensors"),
    ],
    ids=ascii,
)
def test_path_below_the_directory_is_accepted_if_clients_may_choose(chosen: str, path: str) -> None:
    directory = Path(
        "/data/y/../x"
    )  # as configured; responses use this form, and requests may use the normal form
    params = read_params({"hidden_states_path": chosen}, ServerParams(directory, allow_path=True))
    assert os.path.normpath(str(params.path)) == path
    with pytest.raises(
        ParamsError,
        match="chooses file names itself.*kv_connector_extra_config.allow_custom_save_path=true",
    ):
        read_params({"hidden_states_path": chosen}, ServerParams(directory))


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (
            "../a.safetensors",
            "one of its directories cannot be used: it is not a plain, printable name",
        ),
        ("a/../../b.safetensors", "it is not a plain, printable name"),
        ("a/./b.safetensors", "it is not a plain, printable name"),
        ("a//b.safetensors", "it is not a plain, printable name"),
        ("/data/x/../y.safetensors", "it is not a plain, printable name"),
        ("/data/x//y.safetensors", "it is not a plain, printable name"),
        ("/data/xy.safetensors", "is outside the storage directory"),
        ("/data/x", "is outside the storage directory"),
        ("/etc/passwd.safetensors", "is outside the storage directory"),
        ("//data/x/a.safetensors", "is outside the storage directory"),
        ("", "it is not a plain, printable name"),
        ("a.safetensors/", "is reserved for files"),
        ("a/b/", "it is not a plain, printable name"),
        ("a\0.safetensors", "it is not a plain, printable name"),
        ("a\n/b.safetensors", "it is not a plain, printable name"),
        ("\ud800.safetensors", "it is not a plain, printable name"),
        ("\u202e.safetensors", "it is not a plain, printable name"),
        (".hidden.safetensors", "starts with a dot"),
        (".git/a.safetensors", "starts with a dot"),
        ("a.lock", "does not end with .safetensors"),
        ("a.safetensors.lock/b.safetensors", "is reserved for files"),
        ("cmpl-1-0-deadbeef.safetensors/b.safetensors", "is reserved for files"),
        ("x" * 300 + ".safetensors", "longer than 223 bytes"),
        ("d/" * (MAX_DEPTH + 1) + "a.safetensors", f"more than {MAX_DEPTH} directories"),
        ("x" * 10_000, "(10000 characters), which cannot be used"),
        (None, "is None; use a path below /data/x that ends with .safetensors"),
        (True, "is True; use a path"),
        (7, "is 7; use a path"),
        (HUGE, "is a number of 16610 bits; use a path"),
        (["a.safetensors"], "is a list; use a path"),
        ({"a": 1}, "is an object; use a path"),
    ],
    ids=lambda value: ascii(value)[:40] if not isinstance(value, int) or value < 100 else "huge",
)
def test_any_other_path_is_refused_with_its_value_and_the_reason(chosen: Any, words: str) -> None:
    with pytest.raises(ParamsError) as refused:
        read_params({"hidden_states_path": chosen}, ServerParams(Path("/data/x"), allow_path=True))
    assert str(refused.value).startswith("kv_transfer_params.hidden_states_path is ")
    assert words in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("params", "extracted"),
    [
        (None, False),
        ({}, False),
        ({"do_remote_decode": True}, False),
        ({"hidden_states": False}, False),
        (
            {
                "hidden_states": False,
                "include_output_tokens": True,
                "hidden_states_path": "a.safetensors",
            },
            False,
        ),
        ({"hidden_states": True}, True),
        ({"include_output_tokens": False}, True),
        ({"keep_aborted": False}, True),
        ({"hidden_states_path": "a.safetensors"}, True),
    ],
    ids=repr,
)
def test_with_extract_requested_only_requests_with_our_keys_are_extracted(
    params: Any, extracted: bool
) -> None:
    server = ServerParams(Path("/data"), allow_path=True, extract_all=False, has_others=True)
    assert read_params(params, server).extract is extracted


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("hiden_states", "did you mean 'hidden_states'?"),
        ("hidden-states", "did you mean 'hidden_states'?"),
        ("keep_abort", "did you mean 'keep_aborted'?"),
        ("include_output_token", "did you mean 'include_output_tokens'?"),
    ],
)
@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("value", [False, True, None])
def test_misspelt_key_is_refused_by_name(
    key: str, words: str, has_others: bool, value: object
) -> None:
    with pytest.raises(
        ParamsError,
        match=re.escape(f"has the unknown key {key!r}; {words}"),
    ):
        read_params(
            {key: value, "hidden_states": True}, ServerParams(Path("/data"), has_others=has_others)
        )


# Keys of connectors in vllm and vllm-ascend 0.23.0 and 0.30.0rc2.
OTHERS = (
    *(
        "do_remote_decode",
        "do_virtual",
        "engine_id",
        "handshake_port",
        "metaserver",
        "num_computed_tokens",
        "num_prompt_blocks",
    ),
    *(
        "remote_block_ids",
        "remote_cached_tokens",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_request_id",
        "trans_count",
    ),
)


@pytest.mark.parametrize("key", OTHERS)
def test_key_of_another_connector_is_accepted_only_beside_it(key: str) -> None:
    assert read_params({key: 1}, ServerParams(Path("/data"), has_others=True)).extract
    with pytest.raises(
        ParamsError,
        match=f"has the unknown key '{key}'; the keys are: hidden_states, ",
    ):
        read_params({key: 1}, ServerParams(Path("/data")))


# Of user-0 to user-99, with the rate 0.1. Servers of all releases must choose the same.
SAMPLED_KEYS = [8, 10, 15, 16, 44, 47, 50, 54, 56, 60, 67, 70, 81, 87]
SAMPLING = ServerParams(Path("/data"), extract_all=False, sample_rate=0.1, has_others=True)


def sampled(request_id: str, params: Any = None, rate: float = 0.1) -> bool:
    return read_params(params, replace(SAMPLING, sample_rate=rate), request_id).extract


def test_sampling_extracts_the_configured_share() -> None:
    for rate in (0.01, 0.1, 0.5):
        share = (
            sum(sampled(f"cmpl-{number}-0-0123abcd", rate=rate) for number in range(20_000))
            / 20_000
        )
        assert abs(share - rate) < 4 * (rate * (1 - rate) / 20_000) ** 0.5
    assert all(sampled(f"cmpl-{number}-0-0123abcd", rate=1.0) for number in range(1000))


def test_all_processes_and_versions_sample_the_same_requests() -> None:
    chosen = [
        number for number in range(100) if sampled("ignored", {"sample_key": f"user-{number}"})
    ]
    assert chosen == SAMPLED_KEYS


@pytest.mark.parametrize("number", range(40))
def test_requests_of_one_id_or_sample_key_are_sampled_together(
    number: int,
) -> None:
    children = [
        f"{sample}cmpl-{number}-{prompt}-{number:08x}"
        for sample in ("", "0_", "3_")
        for prompt in (0, 1, 7)
    ]
    assert len({sampled(each, rate=0.5) for each in children}) == 1
    key = {"sample_key": f"conversation {number} \ud800"}
    assert len({sampled(f"chatcmpl-{turn}-0123abcd", key, rate=0.5) for turn in range(20)}) == 1


@pytest.mark.parametrize(
    ("params", "extracted"),
    [
        ({"hidden_states": True}, True),
        ({"include_output_tokens": False}, True),
        ({"keep_aborted": False}, True),
        ({"hidden_states": False, "keep_aborted": True}, False),
        ({}, False),
        ({"do_remote_decode": True}, False),
    ],
    ids=repr,
)
def test_explicit_request_is_not_sampled(params: Any, extracted: bool) -> None:
    assert sampled("r", params, rate=1e-9) is extracted
    assert sampled("r", {**params, "sample_key": "k"}, rate=1e-9) is extracted
    assert sampled("r", {**params, "hidden_states": False}, rate=1.0) is False


@pytest.mark.parametrize("extract_all", [True, False])
def test_sample_key_has_no_effect_without_sampling(extract_all: bool) -> None:
    server = ServerParams(Path("/data"), extract_all=extract_all)
    assert {read_params({"sample_key": str(number)}, server).extract for number in range(100)} == {
        extract_all
    }


@pytest.mark.parametrize("server", [SAMPLING, ServerParams(Path("/data"))], ids=["sampling", "all"])
@pytest.mark.parametrize("key", [None, 7, ["a"], True])
def test_sample_key_must_be_a_string(server: ServerParams, key: object) -> None:
    with pytest.raises(
        ParamsError,
        match=r"kv_transfer_params\.sample_key is .*; use a string, the same for all requests that belong together",
    ):
        read_params({"sample_key": key}, server, "r")


def test_unsampled_request_stops_at_the_decision() -> None:
    class Untouchable:
        # The scheduler may read no other attribute.
        request_id, pooling_params, kv_transfer_params = "r", None, None

    scheduler = scheduler_harness.make_scheduler(extract_all=False, sample_rate=1e-9)
    request = Untouchable()
    scheduler.on_new_request(request)
    assert vars(request) == {}
    assert not scheduler.extracts("r")
    assert scheduler.on_finished(request) is None
    assert scheduler.take_stats() is None


@pytest.mark.parametrize("extract_all", [True, False])
def test_path_of_a_prefill_server_is_ignored(extract_all: bool) -> None:
    passed_on = {"do_remote_prefill": True, "hidden_states_path": "/elsewhere/a.safetensors"}
    params = read_params(passed_on, ServerParams(Path("/data"), extract_all=extract_all))
    assert (params.extract, params.path) == (extract_all, None)


def test_refused_request_is_not_extracted_and_its_response_says_why() -> None:
    scheduler, request = (
        make_scheduler(allow_path=False),
        make_request("r", {"hidden_states_path": "a.safetensors"}),
    )
    scheduler.on_new_request(request)
    assert not scheduler.extracts("r")
    assert schedule(scheduler, request) == []
    assert "allow_custom_save_path" in scheduler.on_finished(request)["hidden_states_error"]
    assert scheduler.take_stats().failures == {"refused": 1}


@pytest.mark.parametrize("progress", ["waiting", "running"])
@pytest.mark.parametrize("other", ["a.safetensors", "/data/a.safetensors"])
def test_name_is_refused_while_another_request_is_writing_it(progress: str, other: str) -> None:
    scheduler = make_scheduler(allow_path=True)
    first, second, third = (
        make_request(name, {"hidden_states_path": other}) for name in ("first", "second", "third")
    )
    first.kv_transfer_params = {"hidden_states_path": "a.safetensors"}
    scheduler.on_new_request(first)
    if progress != "waiting":
        schedule(scheduler, first)
    scheduler.on_new_request(second)
    assert schedule(scheduler, second) == []
    assert "another request is writing" in scheduler.on_finished(second)["hidden_states_error"]
    if progress == "waiting":
        scheduler.on_finished(first)
    else:
        scheduler.on_worker_report(WorkerReport({"first": None}, {0: RankState(backlog=0)}))
    scheduler.on_new_request(third)
    assert schedule(scheduler, third) == ["/data/a.safetensors"]


def test_name_of_an_open_request_cannot_be_chosen() -> None:
    scheduler = make_scheduler(allow_path=True)
    victim, thief = (
        make_request("cmpl-1", None),
        make_request("thief", {"hidden_states_path": file_name("cmpl-1")}),
    )
    scheduler.on_new_request(victim)
    scheduler.on_new_request(thief)
    assert schedule(scheduler, victim, thief) == ["/data/cmpl-1.safetensors"]
    assert "another request is writing" in scheduler.on_finished(thief)["hidden_states_error"]
