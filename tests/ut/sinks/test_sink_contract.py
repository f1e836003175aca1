"""The contract of a sink (`sinks/base.py`): all rows of a request or none, in every sink."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from depth import depth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mooncake_master import MooncakeMaster
from sink_cases import IN_A_DIRECTORY, IN_A_STORE, QUANTIZED, FileCase, MooncakeCase, SinkCase
from sink_harness import (
    ENDS,
    FORMAT,
    end,
    finite_rows,
    join_sleepers,
    listing,
    make_rows,
    put,
    run_threads,
    token_ids,
    wait_for_sleepers,
)

from vllm_ascend_hsx.connector.stats import failure_kind
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import Adapter
from vllm_ascend_hsx.protocol.weights import Origin, WeightVersion
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError
from vllm_ascend_hsx.reader.mooncake import MooncakeReader
from vllm_ascend_hsx.sinks import directory as directory_module
from vllm_ascend_hsx.sinks.base import NAME_USED, REFUSED, SERVER_STOPPED, SinkError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NUMBERS = itertools.count()  # of tests and examples: a name is used once
pytestmark = pytest.mark.usefixtures("no_wait_for_the_disk")


@pytest.fixture(scope="module")
def in_a_store(
    master: MooncakeMaster, reader: MooncakeReader
) -> Iterator[Callable[[str], MooncakeCase]]:
    """The case of a sink in a store, by quantization."""
    make = functools.cache(lambda quantization: MooncakeCase(master.address, reader, quantization))
    yield make
    run_threads(*(make(quantization).close for quantization in IN_A_STORE.values()))


@pytest.fixture(params=[*IN_A_DIRECTORY, *QUANTIZED, *IN_A_STORE])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkCase]:
    """Every sink."""
    name = request.param
    if name in IN_A_STORE:
        case = request.getfixturevalue("in_a_store")(IN_A_STORE[name])
        case.test = f"{next(NUMBERS)}-"
    else:
        case = (IN_A_DIRECTORY | QUANTIZED)[name](tmp_path)
    with case.serve():
        yield case
    assert case.held() == 0


# Reading


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_in_the_models_dtype_with_ids_and_metadata(
    case: SinkCase, dtype: str
) -> None:
    rows = torch.randn(5, 3, 8).to(DTYPES[dtype])
    with case.serve(dtype=dtype):
        file = case.open("typed")
        for first, last in ((3, 5), (0, 3)):
            file.write(first, rows[first:last].contiguous().view(torch.uint8).numpy())
        file.commit(token_ids(5), 4)
        states = case.load("typed")
    assert states.hidden_states.dtype == DTYPES[dtype]
    assert torch.equal(states.hidden_states, case.as_read(rows))
    assert states.token_ids.tolist() == token_ids(5).tolist()
    assert (states.layer_ids, states.num_prompt_tokens, states.metadata["num_output_tokens"]) == (
        [2, 0, 3],
        4,
        "1",
    )
    assert (states.metadata["model"], states.metadata["request_id"]) == ("tiny", "typed")


@pytest.mark.parametrize("name", ["of an adapter", "long" * 1500])
def test_only_requests_of_an_adapter_name_it(case: SinkCase, name: str) -> None:
    adapters = {
        "plain": Adapter(),
        "adapted": Adapter(name, "0a" * 16),
        "unknown": Adapter("other"),
        "plain too": Adapter(),
    }
    for request, adapter in adapters.items():
        put(case.open(request, adapter=adapter), 2)
    for request, adapter in adapters.items():
        metadata = case.load(request).metadata
        assert (metadata.get("lora", ""), metadata.get("lora_weights", "")) == adapter
        assert ("lora" in metadata, "lora_weights" in metadata) == (
            bool(adapter.name),
            bool(adapter.weights),
        )


def test_placeholders_of_images_are_read_with_the_rows(case: SinkCase) -> None:
    ranges = [Placeholder("image", 0, 2), Placeholder("image", 2, 1)]
    for name, placeholders in (("images", ranges), ("text", [])):
        file = case.open(name)
        file.placeholders = placeholders
        file.write(0, make_rows(0, 5))
        file.commit(token_ids(5), 4)
        states = case.load(name)
        assert states.placeholders == placeholders
        assert ("placeholders" in states.metadata) == bool(placeholders)


def test_weight_versions_are_read_with_the_rows(case: SinkCase) -> None:
    fingerprint = "0a" * 16
    mixed = [WeightVersion(3, "step 3"), WeightVersion(4, "step 4")]
    origins = {
        "one": Origin([WeightVersion(3, "step 3", fingerprint)]),
        "two": Origin(mixed),
        "aborted": Origin(mixed, is_aborted=True),
    }
    for name, origin in origins.items():
        file = case.open(name)
        file.origin = origin
        put(file, 2)
        states = case.load(name)
        assert states.weight_versions == origin.weights
        assert states.metadata.get("weights") == (fingerprint if name == "one" else None)
        assert states.metadata.get("aborted") == ("true" if origin.is_aborted else None)


@settings(max_examples=depth(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_spans_in_any_order_with_repeats_give_the_rows(case: SinkCase, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 24), "tokens")
    span = st.tuples(st.integers(0, 28), st.integers(0, 9), st.integers(0, 3))
    writes = [
        (a, a + n, version) for a, n, version in data.draw(st.lists(span, max_size=12), "spans")
    ]
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts")})
    covering = [(a, b, data.draw(st.integers(0, 3))) for a, b in itertools.pairwise(cuts)]
    writes = data.draw(st.permutations(writes + covering), "order")
    expected = np.zeros((40, *FORMAT.row_shape), np.uint16)
    name = f"any-{next(NUMBERS)}"
    file = case.open(
        name, data.draw(st.sampled_from([0, tokens, tokens + 9]), "expected")
    )  # the last draw ends all open files
    for first, last, version in writes:
        rows = expected[first:last] = finite_rows(first, last, version)
        file.write(first, memoryview(rows) if rows.size and version % 2 else rows)
    file.commit(token_ids(tokens), tokens)
    assert case.has(name, expected[:tokens])
    assert case.load(name).token_ids.tolist() == token_ids(tokens).tolist()


def test_many_threads_write_one_request(case: SinkCase) -> None:
    tokens, threads, step = 17_000, 8, 50  # in Mooncake, of many chunks
    file, rows = case.open("wide"), finite_rows(0, tokens)
    file.write(0, rows[:step])  # alone

    def write(rank: int) -> None:
        for first in range((rank + 1) * step, tokens, threads * step):
            file.write(first, rows[first : first + step])

    run_threads(*(lambda rank=rank: write(rank) for rank in range(threads)))
    file.commit(token_ids(tokens), tokens)
    assert case.has("wide", rows)


def test_many_requests_at_a_time_do_not_mix(case: SinkCase) -> None:
    files = [case.open(f"many-{index}") for index in range(12)]
    for position in range(6):
        for version, file in enumerate(files):
            file.write(position, finite_rows(position, position + 1, version))
    for file in files:
        file.commit(token_ids(6), 6)
    assert all(case.has(f"many-{index}", finite_rows(0, 6, index)) for index in range(12))


NO_ROWS = {
    "every second row": (0, make_rows(0, 4)[::2]),
    "some layers": (0, make_rows(0, 4)[:, :2]),
    "every second row, memoryview": (0, memoryview(make_rows(0, 4))[::2]),
    "half a row": (0, np.zeros(FORMAT.row_bytes // 2, np.uint8)),
    "a byte too many": (0, np.zeros(FORMAT.row_bytes + 1, np.uint8)),
    "negative position": (-1, make_rows(0, 1)),
}


@pytest.mark.parametrize("label", NO_ROWS)
def test_invalid_rows_raise_value_error_and_the_request_continues(
    case: SinkCase, label: str
) -> None:
    file = case.open("mistaken")
    with pytest.raises(
        ValueError, match=r"not C-contiguous|bytes at position -?\d are not rows of 48 bytes"
    ):
        file.write(*NO_ROWS[label])
    put(file, 2)
    assert case.has("mistaken", finite_rows(0, 2))


# Leftovers


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("rows", [0, 3])
def test_readers_see_all_rows_or_the_reason_or_nothing(case: SinkCase, how: str, rows: int) -> None:
    file = case.open("once", 3)
    assert case.outcome("once") is None
    if rows or how == "commit":
        file.write(0, finite_rows(0, 3))
    assert case.outcome("once") is None
    assert case.traces("once") <= {"lock", "hidden file"}
    end(file, how, 3)
    if how == "commit":
        assert case.has("once", finite_rows(0, 3))
    else:
        assert case.outcome("once") == ("as a test" if how == "fail" else None)
    assert (
        case.traces("once")
        == {"commit": case.published, "fail": case.failed, "discard": set()}[how]
    )


@pytest.mark.parametrize("earlier", ["fail", "discard"])
@pytest.mark.parametrize("later", ENDS)
def test_name_of_a_request_without_rows_is_used_again(
    case: SinkCase, earlier: str, later: str
) -> None:
    """From `open` on, because a server that dies then leaves this state."""
    first = case.open("again")
    first.write(0, finite_rows(0, 5, version=1))
    end(first, earlier, 5)
    second = case.open("again")
    assert case.outcome("again") is None
    assert case.traces("again") <= {"lock", "hidden file"}
    second.write(0, finite_rows(0, 2, version=2))
    end(second, later, 2)
    assert (
        case.traces("again")
        == {"commit": case.published, "fail": case.failed, "discard": set()}[later]
    )
    if later == "commit":
        assert case.has("again", finite_rows(0, 2, version=2))


def test_name_with_rows_is_refused_and_its_rows_stay(case: SinkCase) -> None:
    put(case.open("used"), 3)
    for _ in range(2):
        with pytest.raises(SinkError, match=NAME_USED) as refused:
            case.open("used")
        assert failure_kind(refused.value) == REFUSED
    assert case.has("used", finite_rows(0, 3))
    assert case.traces("used") == case.published


def test_name_belongs_to_one_request_at_a_time(case: SinkCase) -> None:
    file = case.open("mine")
    with pytest.raises(SinkError, match="another request is writing"):
        case.open("mine")
    put(file, 2)
    assert case.has("mine", finite_rows(0, 2))


def test_every_end_frees_memory_and_descriptors(case: SinkCase) -> None:
    put(case.open("first"), 2)
    before = case.held()
    for turn in range(45):
        file, how = case.open(f"turn-{turn}"), ENDS[turn % 3]
        if turn % 2 or how == "commit":
            file.write(0, finite_rows(0, 2))
        end(file, how)
        assert case.held() <= before + (1 if case.spare_fds else 0), (
            "a hidden file for the next request"
        )


def test_failure_during_writes_keeps_memory_until_close(
    case: SinkCase,
) -> None:
    before = case.held()
    file = case.open("overtaken", 5)
    file.write(0, finite_rows(0, 2))
    file.fail("as a test", close=False)
    assert case.outcome("overtaken") == "as a test"
    assert case.held() > before
    file.close()
    assert case.held() <= before + case.spare_fds
    assert case.traces("overtaken") == case.failed


def test_request_without_space_fails_alone(case: SinkCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "is_in_memory", lambda fd: False)
    with case.serve():  # a new sink probes the filesystem again
        other = case.open("small")
        with pytest.raises(
            SinkError, match=r"ENOSPC|EFBIG|mooncake\.local_buffer_size=4194304 .* are free"
        ) as failure:
            large = case.open("large", 1 << 45)
            try:
                large.write(0, finite_rows(0, 1))
            except SinkError as error:
                large.fail(error.reason)
                raise
        assert failure_kind(failure.value) in ("ENOSPC", "EFBIG")
        assert case.outcome("large") == failure.value.reason
        put(other, 4)
        assert case.has("small", finite_rows(0, 4))


@pytest.mark.parametrize("how", ENDS)
def test_waiting_reader_wakes_when_the_request_ends(case: SinkCase, how: str) -> None:
    found: list[object] = []

    def read() -> None:
        try:
            found.append(
                case.load("awaited", 30 if how != "discard" or isinstance(case, FileCase) else 0.05)
            )
        except (HiddenStatesError, FileNotFoundError, TimeoutError) as error:
            found.append(error)

    file = case.open("awaited")
    file.write(0, finite_rows(0, 3))
    waiting = threading.Thread(target=read)
    waiting.start()
    if isinstance(case, FileCase):
        wait_for_sleepers(Path(f"{file.path}.lock"))
    assert found == [] or how == "discard"
    end(file, how, 3)
    waiting.join(30)
    join_sleepers()
    (what,) = found
    if how == "commit":
        assert isinstance(what, HiddenStates) and len(what.token_ids) == 3
    elif how == "fail":
        assert isinstance(what, HiddenStatesError) and what.reason == "as a test"
    else:
        assert isinstance(what, FileNotFoundError if isinstance(case, FileCase) else TimeoutError)


def test_closing_the_sink_fails_open_files_only(case: SinkCase) -> None:
    before, shared = case.held(), case.sink
    case.sink = case.make(case.row_format)
    try:
        put(case.open("done"), 1)
        rows, _, overtaken = (case.open(name) for name in ("rows", "no-rows", "overtaken"))
        rows.write(0, finite_rows(0, 1))
        overtaken.fail("too slow", close=False)
        case.sink.close()
        case.sink.close()
        with pytest.raises(SinkError, match="the sink is closed"):
            case.open("late")
        overtaken.close()
    finally:
        case.sink = shared
    assert [case.outcome(name) for name in ("rows", "no-rows", "overtaken")] == [
        SERVER_STOPPED,
        SERVER_STOPPED,
        "too slow",
    ]
    assert case.has("done", finite_rows(0, 1))
    assert case.held() == before
    if isinstance(case, FileCase):
        assert listing(case.where) == sorted(set(os.listdir(case.where)) - {f".hsx-{shared.token}"})  # type: ignore[attr-defined]
