"""`hsx generate --in-place`: rows stay where the servers write them, under their own names, and nothing else is left there."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from generate_harness import Exchange, FakeServer, Seen, change_a_bit, expected_rows, ledger_lines, token_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate_resume import DEATHS, ROWS, Death, Runs, right
from test_generate_run import CASES, Bench

from vllm_ascend_hsx.generate.names import row_of_file
from vllm_ascend_hsx.protocol.format import read_header
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.load import load, open_stored
from vllm_ascend_hsx.reader.shards import Place, shards_of
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

IN_PLACE = "--in-place"
# Which of two kinds of rows the first is that arrives, nobody knows; see test_rows_of_other_layers_are_refused.
THE_SAME_IN_PLACE = [name for name in CASES if name != "other-layers"]


SINKS = {"files": FileSink, "shards": partial(ShardSink, shard_bytes=1 << 15)}


@pytest.fixture(params=SINKS)
def bench(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    with FakeServer(tmp_path / "out", make_sink=SINKS[request.param]) as server:
        yield Bench(tmp_path, server, capsys)


def found(directory: Path) -> dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """What is there: of files of rows and members of shards the tensors; of others the name."""
    members = shards_of(directory).members()
    stored = {name: tensors_at(open_stored(directory / name, 0)) for name in members}
    names = [name for name in os.listdir(directory) if not name.startswith((".", "hsx-"))]
    assert not stored.keys() & set(names), "a file and a member have one name"
    return stored | {name: tensors_at(open_stored(directory / name, 0)) if name.endswith(".safetensors") else {} for name in names}


def tensors_at(place: Place) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    try:
        tensors = read_header(place.fd, place.offset, place.size).tensors
        return {name: (each.dtype, each.shape, os.pread(place.fd, each.end - each.begin, each.begin)) for name, each in tensors.items()}
    finally:
        os.close(place.fd)


def check(bench: Bench, rows: list[int], records: int = 6) -> None:
    """These rows are there, each right, and nothing else but the ledger."""
    there = found(bench.output)
    assert sorted(there) == sorted(["ledger.jsonl", *(f"hs_{row}.safetensors" for row in rows)])
    for row in rows:
        wanted = token_rows(records)[row]["token_ids"]
        tensors = there[f"hs_{row}.safetensors"]
        assert np.frombuffer(tensors["token_ids"][2], "<i8").tolist() == wanted
        assert tensors["hidden_states"][2] == expected_rows(wanted).tobytes()


def test_every_row_is_where_the_server_wrote_it(bench: Bench) -> None:
    code, printed = bench.run(IN_PLACE, "--validate")
    assert code == 0, printed
    check(bench, list(range(6)))
    assert bench.server.asked == Counter(range(6))
    assert bench.server.trials == [], "the file of a trial would stay"
    assert {row: line["path"] for row, line in bench.lines().items()} == {row: f"hs_{row}.safetensors" for row in range(6)}
    # Again: there is nothing to do.
    assert bench.run(IN_PLACE)[0] == 0
    assert bench.server.asked == Counter(range(6))


@pytest.mark.parametrize("name", THE_SAME_IN_PLACE)
def test_what_is_asked_for_again_and_what_is_given_up(bench: Bench, name: str) -> None:
    case = CASES[name]

    def behave(seen: Seen) -> str | int:
        return case.behaviours[min(seen.time, len(case.behaviours)) - 1] if seen.row == 2 else "ok"

    bench.server.behave = behave
    code, _ = bench.run(IN_PLACE, *case.options, "--max-consecutive-errors", 100)
    assert bench.server.asked == Counter({row: case.times if row == 2 else 1 for row in range(6)})
    line = bench.lines()[2]
    assert (line["status"], line["attempts"]) == (case.status, case.times)
    assert case.error in line.get("error", "")
    assert code == (0 if case.status == "done" else 1)
    check(bench, [row for row in range(6) if row != 2 or case.status == "done"])


def test_a_bad_row_is_found_by_validate_and_made_anew(bench: Bench) -> None:
    assert bench.run(IN_PLACE)[0] == 0
    change_a_bit(bench.output / "hs_3.safetensors")
    code, printed = bench.run(IN_PLACE, "--validate")
    assert code == 0
    assert "hs_3.safetensors: it is not as it was written" in " ".join(printed.split())
    assert bench.server.asked[3] == 2
    check(bench, list(range(6)))


def test_rows_of_other_layers_are_refused(bench: Bench) -> None:
    assert bench.run(IN_PLACE, "--limit", 3)[0] == 0

    async def other_layers(exchange: Exchange) -> None:
        with bench.server.make_sink(bench.server.storage, RowFormat((2, 0), 8, "BF16", "tiny"), FileOptions()) as sink:
            await bench.server.answer(exchange, await bench.server.publish(exchange, await bench.server.begin(exchange, sink)))

    bench.server.do_ok = other_layers  # type: ignore[method-assign]
    code, printed = bench.run(IN_PLACE, "--max-retries", 0)
    assert code == 1
    assert "and the others hold BF16 [3, 8] of layers [2, 0, 3]" in " ".join(printed.split())
    check(bench, [0, 1, 2])


@pytest.mark.parametrize("options", [(), ("--validate",)], ids=["as it is", "validated"])
def test_rows_of_a_run_that_ended_before_its_first_answer_say_which_layers_there_are(bench: Bench, options: tuple[str, ...]) -> None:
    assert bench.run(IN_PLACE, "--limit", 2)[0] == 0
    ledger = bench.output / "ledger.jsonl"
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(True) if '"server"' not in line and '"row"' not in line))

    async def other_layers(exchange: Exchange) -> None:
        with bench.server.make_sink(bench.server.storage, RowFormat((2, 0), 8, "BF16", "tiny"), FileOptions()) as sink:
            await bench.server.answer(exchange, await bench.server.publish(exchange, await bench.server.begin(exchange, sink)))

    bench.server.do_ok = other_layers  # type: ignore[method-assign]
    code, printed = bench.run(IN_PLACE, "--max-retries", 0, *options)
    assert code == 1
    assert "and the others hold BF16 [3, 8] of layers [2, 0, 3]" in " ".join(printed.split())
    check(bench, [0, 1])


def test_a_server_that_names_its_files_itself_is_told_at_once(bench: Bench) -> None:
    refusal = "kv_transfer_params.hidden_states_path is 'hs_0.safetensors', but this server names its files itself; leave it out, or have "
    refusal += "the server started with kv_connector_extra_config.allow_custom_save_path=true"

    async def refuse(exchange: Exchange) -> None:
        await bench.server.answer(exchange, None, kv_transfer_params={"hidden_states_error": refusal})

    bench.server.do_ok = refuse  # type: ignore[method-assign]
    code, printed = bench.run(IN_PLACE)
    assert code == 2
    assert "--in-place: the server does not let requests name their files" in " ".join(printed.split())
    assert "allow_custom_save_path=true" in printed
    assert sum(bench.server.asked.values()) == 1


def test_another_directory_than_the_servers_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(tmp_path / "store") as server:
        bench = Bench(tmp_path, server, capsys)
        code, printed = bench.run(IN_PLACE)
        said = " ".join(printed.split())
        assert code == 2
        # Of the rows that are under way at first any may be the one that is sent.
        stored = rf"the server stores a row as {tmp_path}/store/hs_(\d)\.safetensors, and it has to be {tmp_path}/out/hs_\1\.safetensors"
        assert re.search(stored, said), said
        assert "--map-path SERVER=HERE" in said
        assert sum(server.asked.values()) == 1


def test_a_directory_that_is_called_otherwise_on_the_server_s_machine(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(bench.output)
    arguments = ["--output", tmp_path / "mounted", "--map-path", f"{bench.output}={tmp_path / 'mounted'}"]
    assert bench.run(IN_PLACE, *arguments)[0] == 0
    check(bench, list(range(6)))


@pytest.mark.parametrize("output", ["out", "other/../out", "link", "."])
def test_the_servers_directory_is_known_by_what_it_is_and_not_by_how_it_is_called(
    bench: Bench, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("out")
    bench.output.mkdir(exist_ok=True)
    monkeypatch.chdir(bench.output if output == "." else tmp_path)
    code, printed = bench.run(IN_PLACE, "--output", output)
    assert code == 0, printed
    check(bench, list(range(6)))
    noted = {name for line in map(json.loads, (bench.output / "ledger.jsonl").open()) for name in line.get("directories", ())}
    assert noted and all(os.path.isabs(name) and os.path.samefile(name, bench.output) for name in noted), "the next run may start elsewhere"


def test_a_first_row_that_fails_does_not_hold_up_the_others(bench: Bench) -> None:
    bench.server.behave = lambda seen: 400 if seen.row == 0 else "ok"  # type: ignore[assignment]
    assert bench.run(IN_PLACE)[0] == 1
    check(bench, [1, 2, 3, 4, 5])
    assert bench.server.asked == Counter(range(6))


@pytest.mark.parametrize("option", ["--copy", "--overwrite"])
def test_what_moves_or_removes_files_does_not_fit(bench: Bench, option: str) -> None:
    code, printed = bench.run(IN_PLACE, option)
    assert code == 2
    assert f"{option}: with --in-place files stay as the servers write them; leave out one of the two" in printed
    assert not bench.server.seen


class RunsInPlace(Runs):
    """The output is the server's directory."""

    def __init__(self, root: Path, kind: str) -> None:
        super().__init__(root, root / "out", IN_PLACE)
        self.server.make_sink = SINKS[kind]

    @property
    def finished(self) -> set[int]:
        there = found(self.output) if self.output.exists() else {}
        rows = {row for row in map(row_of_file, there) if row is not None}
        for row in rows:
            assert there[f"hs_{row}.safetensors"] == right(row)
        return rows

    def check_complete(self) -> None:
        rows = {f"hs_{row}.safetensors": right(row) for row in range(ROWS)}
        assert found(self.output) == {**rows, "ledger.jsonl": {}}, self.log.read_text()
        lines = {line["row"]: line["status"] for line in ledger_lines(self.output / "ledger.jsonl")}
        assert sorted(lines) == list(range(ROWS))
        assert set(lines.values()) <= {"done", "recovered", "found"}


@settings(deadline=None, max_examples=12)
@given(death=DEATHS, kind=st.sampled_from(sorted(SINKS)))
def test_killed_at_any_instant_and_started_again_the_directory_is_that_of_an_undisturbed_run(death: Death, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = RunsInPlace(Path(folder), kind)
        with runs.server:
            finished: set[int] = set()
            for next_death in (death, None):
                asked = len(runs.server.seen)
                code = runs.run(next_death)
                assert not finished & {seen.row for seen in runs.server.seen[asked:]}
                assert code in (0, -signal.SIGKILL), runs.log.read_text()
                finished = runs.finished
            assert code == 0
            runs.check_complete()


def test_a_lock_that_a_killed_run_did_not_remove_goes_with_the_next_one(bench: Bench) -> None:
    write_jsonl(bench.root / "data.jsonl", token_rows(6))
    assert bench.run(IN_PLACE, "--limit", 2)[0] == 0
    for name in ("hs_0.safetensors.lock", "hs_5.safetensors.error"):
        (bench.output / name).write_text('{"reason": "old"}')
    assert bench.run(IN_PLACE, "--limit", 3)[0] == 0
    check(bench, [0, 1, 2])
    assert not [name for name in os.listdir(bench.output) if name.endswith((".lock", ".error"))]


def test_a_server_of_shards_is_told_to_be_asked_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(tmp_path / "store", make_sink=SINKS["shards"]) as server:
        code, printed = Bench(tmp_path, server, capsys).run()
    assert code == 2
    assert "the server stores rows in shards" in " ".join(printed.split())
    assert "--in-place" in printed
    assert not server.seen


def test_overwrite_replaces_rows_in_shards_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Members that stayed would be taken for rows of the new dataset."""
    with FakeServer(tmp_path / "out", make_sink=SINKS["shards"]) as server:
        in_place = Bench(tmp_path, server, capsys)
        assert in_place.run(IN_PLACE, records=[{"token_ids": [9, 9, row]} for row in range(4)])[0] == 0
    with FakeServer(tmp_path / "store") as server:
        bench = Bench(tmp_path, server, capsys)
        code, printed = bench.run("--overwrite", records=6)
        assert (code, server.asked) == (0, Counter(range(6))), printed
    for row in range(6):
        assert load(tmp_path / "out" / f"hs_{row}.safetensors", 0).token_ids.tolist() == token_rows(6)[row]["token_ids"]
    assert shards_of(tmp_path / "out").members() == {}
