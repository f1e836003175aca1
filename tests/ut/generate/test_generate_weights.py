"""`hsx generate` keeps rows of different weights apart: a checkpoint may change under its name."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generate_bench import Bench
from generate_files import SINKS, Exchange, right, tensors_of, token_rows
from generate_harness import FakeServer
from test_generate_ledger import IDENTITY, SERVER, opened
from test_generate_refusals import keep_lines, other_layers

from vllm_ascend_hsx.generate import options
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import open_ledger
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER, Adapter, RowFormat
from vllm_ascend_hsx.reader.load import remove
from vllm_ascend_hsx.sinks.data_file import FileOptions

OLD, NEW = "0a" * 16, "b1" * 16


def serving(bench: Bench, weights: str, sink: str = "files") -> FakeServer:
    """Another server of the same storage, model, layers and shape."""
    return FakeServer(bench.output, weights=weights, make_sink=SINKS[sink])


def run_with(bench: Bench, weights: str, *arguments: object, sink: str = "files", fails: int | None = None) -> tuple[int, str, int]:
    """(exit code, what was printed, requests)."""
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
def test_rows_of_a_replaced_checkpoint_are_refused_at_the_first_and_not_kept(bench: Bench, sink: str, ledger: str) -> None:
    assert run_with(bench, OLD, sink=sink, fails=3)[0] == 1
    if ledger != "whole":
        keep_lines(bench, lambda line: "ledger" in line)
    code, printed, requests = run_with(bench, NEW, sink=sink)
    assert (code, requests) == (2, 1), printed
    assert f"{bench.output} holds rows of another server: weights was {OLD}, is {NEW}; " in printed
    assert "name another --output, such as a new folder below this one" in printed
    bench.check([0, 1, 2, 4, 5])
    assert run_with(bench, OLD, sink=sink)[0] == 0
    bench.check(list(range(6)))


def test_a_restarted_server_with_the_same_weights_goes_on(bench: Bench) -> None:
    assert run_with(bench, OLD, fails=3)[0] == 1
    code, _, requests = run_with(bench, OLD)
    assert (code, requests) == (0, 1)
    assert [each["weights"] for each in noted(bench)] == [OLD]


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("ledger", ["whole", "of an earlier version"])
def test_finished_rows_of_two_weights_are_refused_before_anything_is_sent(bench: Bench, ledger: str, validate: bool) -> None:
    assert run_with(bench, OLD)[0] == 0
    with bench.server.make_sink(bench.output, RowFormat((2, 0, 3), 8, "BF16", "tiny", weights=NEW), FileOptions()) as sink:
        replace_row(bench, 5, sink)
    if ledger != "whole":
        write_ledger(bench, without_weights)
    code, printed = bench.run(*["--validate"] * validate, "--concurrency", 1)
    assert (code, len(bench.server.seen)) == (2, 0), printed
    path = bench.output / "hs_5.safetensors"
    assert f"{path} is a row of another server than " in printed and f"weights was {OLD}, is {NEW}; nothing was changed" in printed
    assert tensors_of(path) == right(token_rows(6)[5]["token_ids"])


def without_weights(line: dict[str, Any]) -> dict[str, Any]:
    line.get("server", {}).pop("weights", None)
    return line


@pytest.mark.parametrize(
    ("adapters", "difference"),
    [
        ((Adapter(), Adapter("a", NEW)), "lora was , is a"),
        ((Adapter("a", NEW), Adapter("b", NEW)), "lora was a, is b"),
        ((Adapter("a", OLD), Adapter("a", NEW)), f"weights was {OLD}+{OLD}, is {OLD}+{NEW}"),
    ],
)
def test_rows_of_an_adapter_are_not_mixed_with_others(bench: Bench, adapters: tuple[Adapter, Adapter], difference: str) -> None:
    def as_noted(line: dict[str, Any]) -> dict[str, Any]:
        if "server" in line:
            line["server"] |= {"lora": adapters[0].name, "weights": "+".join(filter(None, (OLD, adapters[0].weights)))}
        return line

    assert run_with(bench, OLD)[0] == 0
    write_ledger(bench, as_noted)
    with bench.server.make_sink(bench.output, RowFormat((2, 0, 3), 8, "BF16", "tiny", weights=OLD), FileOptions()) as sink:
        for row in range(6):
            replace_row(bench, row, sink, adapters[row == 5])
    code, printed = bench.run("--validate", "--concurrency", 1)
    assert (code, len(bench.server.seen)) == (2, 0), printed
    assert difference in printed


def replace_row(bench: Bench, row: int, sink: Any, adapter: Adapter = NO_ADAPTER) -> None:
    """As a server with that sink writes it."""
    import numpy as np
    from generate_files import expected_rows

    ids = token_rows(6)[row]["token_ids"]
    path = bench.output / f"hs_{row}.safetensors"
    path.unlink(missing_ok=True)
    file = sink.open("another", path, len(ids), adapter=adapter)
    file.write(0, expected_rows(ids))
    file.commit(np.asarray(ids, dtype=np.int64), len(ids))
    Path(f"{path}.lock").unlink(missing_ok=True)


def write_ledger(bench: Bench, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    ledger = bench.output / "ledger.jsonl"
    lines = [json.dumps(change(json.loads(line)), separators=(",", ":")) + "\n" for line in ledger.read_text().splitlines()]
    ledger.write_text("".join(lines))


def test_two_endpoints_of_different_weights_are_refused(bench: Bench) -> None:
    with serving(bench, OLD) as one, serving(bench, NEW) as other:
        code, printed = bench.run(endpoint=f"{one.url},{other.url}", records=40)
        assert code == 2 and "holds rows of another server: weights was " in printed and OLD in printed and NEW in printed, printed
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
    [({"weights": NEW}, f"weights was {OLD}, is {NEW}"), ({"layer_ids": (1, 0, 3)}, "layer_ids was [2, 0, 3], is [1, 0, 3]")],
    ids=["weights", "layers"],
)
def test_a_server_that_comes_back_as_another_ends_the_run(bench: Bench, changes: dict[str, Any], difference: str) -> None:
    """It is known by then, so requests that it answers wrongly in other ways are repeated."""
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


def test_weights_that_are_not_told_are_accepted_and_the_first_that_are_count(bench: Bench) -> None:
    assert bench.run("--limit", 2)[0] == 0
    assert run_with(bench, OLD, "--limit", 4)[0] == 0
    assert [each.get("weights") for each in noted(bench)] == [None, OLD]
    assert run_with(bench, "", "--limit", 5)[0] == 0
    code, printed, requests = run_with(bench, NEW)
    assert (code, requests) == (2, 1) and f"weights was {OLD}, is {NEW}" in printed
    bench.check(list(range(5)))
    assert run_with(bench, OLD)[0] == 0


def test_ledgers_of_ranks_that_name_different_weights_are_refused_at_once(tmp_path: Path) -> None:
    for rank, weights in enumerate([{}, {"weights": OLD}, {"weights": NEW}]):
        ledger = opened(tmp_path / str(min(rank, 1)), world_size=3, rank=rank)
        ledger.note_server(SERVER | weights)
        ledger.close()
    alone = tmp_path / "0"
    (alone / "ledger-1-of-3.jsonl").write_bytes((tmp_path / "1/ledger-1-of-3.jsonl").read_bytes())
    for rank in (0, 2):
        ledger = opened(alone, world_size=3, rank=rank)
        ledger.close()
        assert ledger.server == SERVER | {"weights": OLD}
    for world_size, rank in ((3, 0), (3, 1), (3, 2), (1, 0)):
        with pytest.raises(InputError, match=f"1 holds rows of two servers: weights was {OLD}, is {NEW} .*name another --output"):
            open_ledger(tmp_path / "1", IDENTITY, world_size, rank)


def test_weights_of_a_text_s_file_that_the_ledger_does_not_name_do_not_count(bench: Bench) -> None:
    """Such a file is replaced, so its weights refuse nobody."""
    records = [{"prompt": text} for text in ("one", "two", "three")]
    assert bench.run(records=records)[0] == 0
    with serving(bench, NEW) as server:
        (bench.output / "hs_1.safetensors").unlink()
        keep_lines(bench, lambda line: line.get("row") != 1)
        bench.root = bench.root / "other"
        bench.root.mkdir()
        bench.output = bench.output / "below"
        assert bench.run("--limit", 2, records=records, endpoint=server.url)[0] == 0
    bench.root, below = bench.root.parent, bench.output
    bench.output = below.parent
    (below / "hs_1.safetensors").rename(bench.output / "hs_1.safetensors")
    code, printed, requests = run_with_records(bench, OLD, records)
    assert (code, requests) == (0, 1) and "the ledger does not name this file" in printed
    assert weights_in(bench, 1) == OLD


def run_with_records(bench: Bench, weights: str, records: list[dict[str, Any]]) -> tuple[int, str, int]:
    with serving(bench, weights) as server:
        code, printed = bench.run(records=records, endpoint=server.url)
        return code, printed, len(server.seen)


def leave(bench: Bench, *rows: int, weights: str = NEW, sink: str = "files") -> None:
    """Rows that a server wrote after its run had ended."""
    with SINKS[sink](bench.output, RowFormat((2, 0, 3), 8, "BF16", "tiny", weights=weights), FileOptions()) as other:
        for row in rows:
            replace_row(bench, row, other)


@pytest.mark.parametrize("changes", [{"weights": NEW}, {"weights": OLD, "layer_ids": (1, 0, 3)}], ids=["weights", "layers"])
@pytest.mark.parametrize("sink", SINKS)
def test_rows_in_flight_when_a_server_is_refused_do_not_stay(bench: Bench, sink: str, changes: dict[str, Any]) -> None:
    """The server publishes them, and their answers never come. Two were done once, and lost.

    One that is in flight has the right weights, and stays.
    """
    with serving(bench, OLD, sink) as server:
        code, printed = bench.run("--limit", 10, endpoint=server.url, records=40)
        assert code == 0, printed
    for row in (3, 9):
        remove(bench.output / f"hs_{row}.safetensors")
    written = threading.Barrier(4)
    with serving(bench, OLD, sink) as server, FakeServer(bench.output, make_sink=SINKS[sink], **changes) as other:

        async def do_other(exchange: Exchange) -> None:
            at = server.seen.index(exchange.seen)
            path = await server.publish(exchange, await server.begin(exchange, None if at == 2 else other._sink))
            await asyncio.get_running_loop().run_in_executor(None, written.wait, 30)
            await (server.answer(exchange, path) if at == 1 else exchange.gone())

        server.do_other = do_other  # type: ignore[attr-defined]
        server.behave = lambda seen: "other" if len(server.seen) > 1 else "ok"
        code, printed = bench.run("--concurrency", 4, endpoint=server.url, records=40)
    assert code == 2 and "holds rows of another server: " in printed
    assert "removed 2 files of another server that unfinished requests had left" in printed
    assert len(bench.rows) == 10
    assert len(server.seen) == 5 and {weights_in(bench, row) for row in bench.rows} == {OLD}
    with serving(bench, OLD, sink) as server:
        code, printed = bench.run(endpoint=server.url, records=40)
        assert code == 0, printed
    bench.check(list(range(40)), records=40)


@pytest.mark.parametrize("records", [6, [{"prompt": text} for text in "abcdef"]], ids=["token ids", "texts"])
@pytest.mark.parametrize("sink", SINKS)
def test_a_refused_server_s_files_are_removed_and_their_rows_generated_again(bench: Bench, sink: str, records: Any) -> None:
    with serving(bench, OLD, sink) as server:
        server.behave = lambda seen: 400 if seen.row == 3 else "ok"
        assert bench.run(records=records, endpoint=server.url)[0] == 1
        keep_lines(bench, lambda line: line.get("row") != 5)
        remove(bench.output / "hs_5.safetensors")
        leave(bench, 3, 5, sink=sink)
        server.behave = lambda seen: "ok"
        server.seen.clear()
        code, printed = bench.run(records=records, endpoint=server.url)
    assert (code, sorted(server.asked)) == (0, [3, 5]), printed
    assert printed.count("of another server") == 1 and "removed 2 files of another server that unfinished requests had left" in printed
    assert {weights_in(bench, row) for row in range(6)} == {OLD}


def test_rows_of_the_right_weights_that_no_ledger_names_are_kept(bench: Bench) -> None:
    assert run_with(bench, OLD, fails=3)[0] == 1
    leave(bench, 3, weights=OLD)
    keep_lines(bench, lambda line: line.get("row") != 5)
    code, printed, requests = run_with(bench, OLD)
    assert (code, requests) == (0, 0) and "removed" not in printed
    bench.check(list(range(6)))


def test_other_ranks_rows_are_neither_checked_nor_removed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "RANK_ROWS", 1)
    assert run_with(bench, OLD, "--world-size", 2, "--rank", 0)[0] == 0
    leave(bench, 3)
    assert run_with(bench, OLD, "--world-size", 2, "--rank", 0)[0] == 0
    assert weights_in(bench, 3) == NEW
    code, printed, requests = run_with(bench, OLD, "--world-size", 2, "--rank", 1)
    assert (code, requests) == (0, 3) and "removed 1 files of another server" in printed


def test_a_row_that_another_rank_s_ledger_names_as_done_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "RANK_ROWS", 1)
    assert run_with(bench, OLD)[0] == 0
    leave(bench, 3)
    code, printed, requests = run_with(bench, OLD, "--world-size", 2, "--rank", 1)
    assert (code, requests) == (2, 0) and "is a row of another server than " in printed
    assert weights_in(bench, 3) == NEW


def test_a_file_of_another_model_that_no_ledger_names_is_refused(bench: Bench) -> None:
    assert run_with(bench, OLD, fails=3)[0] == 1
    with SINKS["files"](bench.output, RowFormat((2, 0, 3), 8, "BF16", "other", weights=OLD), FileOptions()) as sink:
        replace_row(bench, 3, sink)
    code, printed, requests = run_with(bench, OLD)
    assert (code, requests) == (2, 0) and "model was tiny, is other; nothing was changed" in printed


def test_finished_rows_tell_the_weights_that_a_ledger_of_an_earlier_version_lacks(bench: Bench) -> None:
    """Some tell none, and leftovers of a refused server are not asked."""
    assert run_with(bench, "", "--limit", 3, fails=0)[0] == 1
    assert run_with(bench, OLD, fails=0)[0] == 1
    leave(bench, 0, 3)
    keep_lines(bench, lambda line: line.get("row") != 3)
    write_ledger(bench, without_weights)
    code, printed, requests = run_with(bench, OLD, "--concurrency", 1)
    assert (code, requests) == (0, 2) and "removed 2 files of another server" in printed
    (bench.output / "hs_0.safetensors").unlink()
    write_ledger(bench, without_weights)
    code, printed, requests = run_with(bench, NEW, "--concurrency", 1)
    assert (code, requests) == (2, 1) and f"weights was {OLD}, is {NEW}" in printed
    assert noted(bench)[-1]["weights"] == OLD
    bench.check(list(range(1, 6)))
    assert run_with(bench, OLD, "--concurrency", 1)[0] == 0
