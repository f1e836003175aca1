"""`hsx generate` does not mix rows of different weights: a checkpoint may be replaced."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from generate_bench import Bench
from generate_files import SINKS, Exchange, change_a_bit, right, tensors_of, token_rows
from generate_harness import FakeServer
from test_generate_ledger import REQUEST, SERVER, opened
from test_generate_refusals import keep_lines, other_layers

from vllm_ascend_hsx.generate import options
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import open_ledger
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat
from vllm_ascend_hsx.protocol.weights import Origin, WeightVersion
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.sinks.data_file import FileOptions

OLD, NEW = "0a" * 16, "b1" * 16
FORMAT = RowFormat((2, 0, 3), 8, "BF16", "tiny")


def serving(bench: Bench, weights: str, sink: str = "files") -> FakeServer:
    """Return another server of the same storage, model, layers and shape."""
    return FakeServer(bench.output, weights=weights, make_sink=SINKS[sink])


def run_with(
    bench: Bench, weights: str, *arguments: object, sink: str = "files", fails: int | None = None
) -> tuple[int, str, int]:
    """Run, and return exit code, output and number of requests."""
    with serving(bench, weights, sink) as server:
        server.behave = lambda seen: 400 if seen.row == fails else "ok"
        code, printed = bench.run("--validate", *arguments, endpoint=server.url)
        server.wait_idle()
        return code, printed, len(server.seen)


def noted(bench: Bench) -> list[dict[str, Any]]:
    lines = map(json.loads, (bench.output / "ledger.jsonl").read_text().splitlines())
    return [line["server"] for line in lines if "server" in line]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("ledger", ["whole", "of a run that was killed before it noted the server"])
def test_first_row_of_a_replaced_checkpoint_is_refused_and_removed(
    bench: Bench, sink: str, ledger: str
) -> None:
    assert run_with(bench, OLD, sink=sink, fails=3)[0] == 1
    if ledger != "whole":
        keep_lines(bench, lambda line: "ledger" in line)
    code, printed, requests = run_with(bench, NEW, sink=sink)
    assert (code, requests) == (2, 1), printed
    assert f"{bench.output} holds rows of another server: weights was {OLD}, is {NEW}; " in printed
    assert "give another --output, such as a new folder below this one" in printed
    bench.check([0, 1, 2, 4, 5])
    assert run_with(bench, OLD, sink=sink)[0] == 0
    bench.check(list(range(6)))


def test_restarted_server_with_the_same_weights_continues(bench: Bench) -> None:
    assert run_with(bench, OLD, fails=3)[0] == 1
    code, _, requests = run_with(bench, OLD)
    assert (code, requests) == (0, 1)
    assert [each["weights"] for each in noted(bench)] == [OLD]


@pytest.mark.parametrize("validate", [True, False])
def test_mixed_weights_of_finished_rows_are_refused_before_anything_is_sent(
    bench: Bench, validate: bool
) -> None:
    assert run_with(bench, OLD)[0] == 0
    with bench.server.make_sink(bench.output, FORMAT, FileOptions()) as sink:
        replace_row(bench, 5, sink, NEW)
    code, printed = bench.run(*["--validate"] * validate, "--concurrency", 1)
    assert (code, len(bench.server.seen)) == (2, 0), printed
    path = bench.output / "hs_5.safetensors"
    assert (
        f"{path} is from another server than " in printed
        and f"weights was {OLD}, is {NEW}; nothing was changed" in printed
    )
    assert tensors_of(path) == right(token_rows(6)[5]["token_ids"])


@pytest.mark.parametrize(
    ("adapters", "difference"),
    [
        ((Adapter(), Adapter("a", NEW)), "lora was , is a"),
        ((Adapter("a", NEW), Adapter("b", NEW)), "lora was a, is b"),
        ((Adapter("a", OLD), Adapter("a", NEW)), f"weights was {OLD}+{OLD}, is {OLD}+{NEW}"),
    ],
)
def test_rows_of_an_adapter_are_not_mixed_with_rows_of_the_base_model(
    bench: Bench, adapters: tuple[Adapter, Adapter], difference: str
) -> None:
    def as_noted(line: dict[str, Any]) -> dict[str, Any]:
        if "server" in line:
            line["server"] |= {
                "lora": adapters[0].name,
                "weights": "+".join(filter(None, (OLD, adapters[0].weights))),
            }
        return line

    assert run_with(bench, OLD)[0] == 0
    write_ledger(bench, as_noted)
    with bench.server.make_sink(bench.output, FORMAT, FileOptions()) as sink:
        for row in range(6):
            replace_row(bench, row, sink, OLD, adapters[row == 5])
    code, printed = bench.run("--validate", "--concurrency", 1)
    assert (code, len(bench.server.seen)) == (2, 0), printed
    assert difference in printed


def replace_row(
    bench: Bench,
    row: int,
    sink: Any,
    weights: str,
    adapter: Adapter = NO_ADAPTER,
    content: str | None = None,
) -> None:
    """Write a file as a server with that sink does for the row's token ids or text."""
    import numpy as np
    from generate_files import expected_rows

    ids = token_rows(6)[row]["token_ids"] if content is None else list(content.encode())
    path = bench.output / f"hs_{row}.safetensors"
    path.unlink(missing_ok=True)
    identity = Row(row, array("q", ids) if content is None else content).identity(
        Options("", bench.output).request
    )
    file = sink.open(f"cmpl-{identity}-0123456789ab-0-0123abcd", path, len(ids), adapter=adapter)
    file.origin = Origin([WeightVersion(fingerprint=weights)])
    file.write(0, expected_rows(ids))
    file.commit(np.asarray(ids, dtype=np.int64), len(ids))
    Path(f"{path}.lock").unlink(missing_ok=True)


def write_ledger(bench: Bench, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    ledger = bench.output / "ledger.jsonl"
    lines = [
        json.dumps(change(json.loads(line)), separators=(",", ":")) + "\n"
        for line in ledger.read_text().splitlines()
    ]
    ledger.write_text("".join(lines))


def test_two_endpoints_of_different_weights_are_refused(bench: Bench) -> None:
    with serving(bench, OLD) as one, serving(bench, NEW) as other:
        code, printed = bench.run(endpoint=f"{one.url},{other.url}", records=40)
        assert (
            code == 2
            and "holds rows of another server: weights was " in printed
            and OLD in printed
            and NEW in printed
        ), printed
        for server in (one, other):
            server.wait_idle()
        done = {row for row, line in bench.lines().items() if line["status"] == "done"}
    assert len({weights_in(bench, row) for row in done}) <= 1
    assert {weights_in(bench, row) for row in done} <= {each["weights"] for each in noted(bench)}


def weights_in(bench: Bench, row: int) -> str | None:
    from vllm_ascend_hsx import load

    return load(bench.output / f"hs_{row}.safetensors").metadata.get("weights")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"weights": NEW}, f"weights was {OLD}, is {NEW}"),
        ({"layer_ids": (1, 0, 3)}, "layer_ids was [2, 0, 3], is [1, 0, 3]"),
    ],
    ids=["weights", "layers"],
)
def test_restarted_server_with_other_weights_ends_the_run(
    bench: Bench, changes: dict[str, Any], difference: str
) -> None:
    """The server is proven, so other failures would be retried."""
    with serving(bench, OLD) as server:

        async def do_other(exchange: Exchange) -> None:
            await other_layers(exchange, server, **changes)

        server.do_other = do_other  # type: ignore[attr-defined]
        server.behave = lambda seen: "other" if seen.row >= 20 else "ok"  # type: ignore[operator]
        code, printed = bench.run("--concurrency", 1, endpoint=server.url, records=40)
        server.wait_idle()
        assert (code, server.asked[20], max(server.asked)) == (2, 1, 20), printed
    assert difference in printed
    bench.check(list(range(20)), records=40)


@pytest.mark.parametrize(("first", "second"), [("", OLD), (OLD, "")])
def test_unknown_weights_count_as_another_server(bench: Bench, first: str, second: str) -> None:
    assert run_with(bench, first, "--limit", 3)[0] == 0
    told = [weights or None for weights in (first, second)]
    assert [each["weights"] for each in noted(bench)] == told[:1]
    code, printed, requests = run_with(bench, second)
    assert (code, requests) == (2, 1) and f"weights was {told[0]}, is {told[1]}" in printed, printed
    bench.check(list(range(3)))
    assert run_with(bench, first)[0] == 0
    bench.check(list(range(6)))


@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (None, NEW)])
def test_ledgers_of_ranks_with_different_weights_are_refused(
    tmp_path: Path, first: str | None, second: str
) -> None:
    for rank, weights in enumerate((first, second)):
        ledger = opened(tmp_path / str(rank), world_size=3, rank=rank)
        ledger.note_server(SERVER | {"weights": weights})
        ledger.close()
    for rank in (0, 2):
        ledger = opened(tmp_path / "0", world_size=3, rank=rank)
        ledger.close()
        assert ledger.server == SERVER | {"weights": first}, (
            "each rank knows the server of the others"
        )
    (tmp_path / "0" / "ledger-1-of-3.jsonl").write_bytes(
        (tmp_path / "1/ledger-1-of-3.jsonl").read_bytes()
    )
    for world_size, rank in ((3, 0), (3, 1), (3, 2), (1, 0)):
        with pytest.raises(
            InputError,
            match=(
                f"0 holds rows of two servers: weights was {first}, is {second}.*give another "
                "--output"
            ),
        ):
            open_ledger(tmp_path / "0", REQUEST, world_size, rank)


def leave(
    bench: Bench,
    *rows: int,
    weights: str = NEW,
    model: str = "tiny",
    sink: str = "files",
    texts: str = "",
) -> None:
    """The server wrote the rows after the run had ended."""
    with SINKS[sink](bench.output, replace(FORMAT, model=model), FileOptions()) as other:
        for row in rows:
            replace_row(bench, row, other, weights, content=texts[row] if texts else None)


@pytest.mark.parametrize(
    "changes",
    [{"weights": NEW}, {"weights": OLD, "layer_ids": (1, 0, 3)}],
    ids=["weights", "layers"],
)
@pytest.mark.parametrize("sink", SINKS)
def test_rows_in_flight_at_a_refused_server_are_removed(
    bench: Bench, sink: str, changes: dict[str, Any]
) -> None:
    """The server publishes the rows but never answers. Two of them were done once, and lost.

    One row in flight has the right weights and is kept.
    """
    with serving(bench, OLD, sink) as server:
        code, printed = bench.run("--limit", 10, endpoint=server.url, records=40)
        assert code == 0, printed
    for row in (3, 9):
        remove(bench.output / f"hs_{row}.safetensors")
    written = threading.Barrier(4)
    with (
        serving(bench, OLD, sink) as server,
        FakeServer(bench.output, make_sink=SINKS[sink], **changes) as other,
    ):

        async def do_other(exchange: Exchange) -> None:
            at = server.seen.index(exchange.seen)
            maker = server if at == 2 else other
            file = await server.begin(exchange, maker._sink)
            file.origin = Origin([WeightVersion(fingerprint=maker.weights)])
            path = await server.publish(exchange, file)
            await asyncio.get_running_loop().run_in_executor(None, written.wait, 30)
            await (server.answer(exchange, path) if at == 1 else exchange.gone())

        server.do_other = do_other  # type: ignore[attr-defined]
        server.behave = lambda seen: "other" if len(server.seen) > 1 else "ok"
        code, printed = bench.run("--concurrency", 4, endpoint=server.url, records=40)
    assert code == 2 and "holds rows of another server: " in printed, printed
    assert len(bench.rows) == 10
    assert len(server.seen) == 5 and {weights_in(bench, row) for row in bench.rows} == {OLD}
    with serving(bench, OLD, sink) as server:
        code, printed = bench.run(endpoint=server.url, records=40)
        assert code == 0, printed
    bench.check(list(range(40)), records=40)


@pytest.mark.parametrize("texts", ["", "abcdef"], ids=["token ids", "texts"])
@pytest.mark.parametrize("sink", SINKS)
def test_a_refused_server_s_files_are_removed_and_their_rows_generated_again(
    bench: Bench, sink: str, texts: str
) -> None:
    records: Any = [{"prompt": text} for text in texts] or 6
    with serving(bench, OLD, sink) as server:
        server.behave = lambda seen: 400 if seen.row == 3 else "ok"
        assert bench.run(records=records, endpoint=server.url)[0] == 1
        keep_lines(bench, lambda line: line.get("row") != 5)
        remove(bench.output / "hs_5.safetensors")
        leave(bench, 3, 5, sink=sink, texts=texts)
        server.behave = lambda seen: "ok"
        server.seen.clear()
        code, printed = bench.run(records=records, endpoint=server.url)
    assert (code, sorted(server.asked)) == (0, [3, 5]), printed
    for row in (3, 5):
        problem = (
            f"hs_{row}.safetensors: the file is from another server: weights was {OLD}, is {NEW}; "
            "requesting the row again"
        )
        assert printed.count(problem) == 1, printed
    assert {weights_in(bench, row) for row in range(6)} == {OLD}


def test_unlogged_rows_of_the_right_weights_are_kept(bench: Bench) -> None:
    assert run_with(bench, OLD, fails=3)[0] == 1
    leave(bench, 3, weights=OLD)
    keep_lines(bench, lambda line: line.get("row") != 5)
    code, printed, requests = run_with(bench, OLD)
    assert (code, requests) == (0, 0) and "requesting the row again" not in printed
    bench.check(list(range(6)))


def test_other_ranks_rows_are_neither_checked_nor_removed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "RANK_ROWS", 1)
    assert run_with(bench, OLD, "--world-size", 2, "--rank", 0)[0] == 0
    leave(bench, 3)
    assert run_with(bench, OLD, "--world-size", 2, "--rank", 0)[0] == 0
    assert weights_in(bench, 3) == NEW
    code, printed, requests = run_with(bench, OLD, "--world-size", 2, "--rank", 1)
    assert (code, requests) == (
        0,
        3,
    ) and "hs_3.safetensors: the file is from another server" in printed


def test_wrong_row_finished_by_another_rank_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "RANK_ROWS", 1)
    assert run_with(bench, OLD)[0] == 0
    leave(bench, 3)
    code, printed, requests = run_with(bench, OLD, "--world-size", 2, "--rank", 1)
    assert (code, requests) == (2, 0) and "is from another server than " in printed
    assert weights_in(bench, 3) == NEW


def test_unlogged_file_of_another_model_is_generated_again(bench: Bench) -> None:
    assert run_with(bench, OLD, fails=3)[0] == 1
    leave(bench, 3, weights=OLD, model="other")
    code, printed, requests = run_with(bench, OLD)
    assert (
        (code, requests)
        == (
            0,
            1,
        )
        and "the file is from another server: model was tiny, is other; requesting the row again"
        in printed
    ), printed
    bench.check(list(range(6)))


def test_first_unlogged_file_decides_the_server(
    bench: Bench,
) -> None:
    """The run that requested the files was killed before it logged anything."""
    assert run_with(bench, OLD)[0] == 0
    keep_lines(bench, lambda line: "ledger" in line)
    leave(bench, 5)
    code, printed, requests = run_with(bench, NEW, "--concurrency", 1)
    assert (code, requests) == (2, 1) and f"weights was {OLD}, is {NEW}" in printed, printed
    assert [each["weights"] for each in noted(bench)] == [OLD]
    assert run_with(bench, OLD)[0] == 0
    bench.check(list(range(6)))


def test_wrong_file_does_not_decide_the_server(bench: Bench) -> None:
    assert run_with(bench, OLD)[0] == 0
    keep_lines(bench, lambda line: "ledger" in line)
    leave(bench, 0)
    change_a_bit(bench.output / "hs_0.safetensors")
    code, printed, requests = run_with(bench, OLD, "--concurrency", 1)
    assert (code, requests) == (0, 1), printed
    assert [each["weights"] for each in noted(bench)] == [OLD]
    bench.check(list(range(6)))
