"""The benchmarks run on tiny rows and prompts: files are right and reports complete."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import goals, measure, report
from benchmarks.kv_cache import capacity
from benchmarks.kv_cache.server_config import EngineOptions
from benchmarks.pipeline import (
    conversations,
    decoding,
    engine,
    host_path,
    latency,
    peers,
    per_step,
    shards,
    slow_storage,
)
from benchmarks.pipeline.host_path import COPIED, DURABLY, OURS, PINNED, Cell, Figures
from benchmarks.pipeline.ours import Ours, Pipeline
from benchmarks.pipeline.rows import TINY, Load, Source

ROOT = Path(__file__).parents[3]
STEP_TOKENS = 32
SOURCE_TOKENS = 96
HOST = host_path.Scale(
    pinned={8: (1, 20), 48: (3,)},
    copied={8: (4,), 48: (1,)},
    durable={48: (2,)},
    evenly={48: (5,)},
    repetitions=3,
    least_bytes=40000,
)
LATENCY = latency.Scale(tokens=(48,), last_chunks=(5, 32), samples=2, polled=1, peer_samples=1)
STEP = per_step.Scale(tokens=(8, 40, 80), in_flight=(1, 4), rounds=1, waves=2, steps=3)


TALK = conversations.Result(
    [
        conversations.Cell(conversations.OFF, 9000, 1000, wall=10.0, wall_of_off=1.0, of_off=1.0),
        conversations.Cell(conversations.OURS, 9000, 1100, 7900, 11.4, 1.14, 1.1, 5 << 20, 8, 8),
        conversations.Cell(conversations.WITHOUT, 9000, 9000, 0, 70.0, 7.0, 9.0, 5 << 20, 8, 8),
        conversations.Cell(conversations.VLLM, reason="needs another release"),
    ],
    950,
    conversations.QUICK,
    "a small one",
)
ENGINES = (engine.OFF, engine.OURS, engine.VLLM)


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(TINY, SOURCE_TOKENS, torch.device("npu:0"))


@pytest.fixture(scope="module")
def host(source: Source, tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    cells, _ = host_path.run(
        HOST, source, tmp_path_factory.mktemp("host"), quiet, step_tokens=STEP_TOKENS
    )
    return cells


@pytest.fixture(scope="module")
def results(
    host: list[Cell], source: Source, tmp_path_factory: pytest.TempPathFactory
) -> goals.Results:
    place = tmp_path_factory.mktemp("rest")
    return goals.Results(
        machine={"processor": "a small one"},
        load_average=(0.0, 0.0),
        ring_bytes=1 << 20,
        host=host,
        no_durable_view={"tmpfs": "because"},
        latency=[latency.run(LATENCY, source, place, quiet, step_tokens=STEP_TOKENS)],
        # tests/e2e/commands/test_benchmark_engine.py runs them.
        engine=engine.Result(
            [
                engine.Cell("decode", name, [0.5, 0.985, 1.2], [1.0, 1.1, 2.0], 9)
                for name in ENGINES
            ],
            3,
            5,
            "none",
        ),
        step=per_step.run(STEP, place, torch.device("npu:0"), quiet, step_tokens=STEP_TOKENS),
        # tests/e2e/commands/test_benchmark_engine.py runs it.
        slow_storage=slow_storage.Result(
            [slow_storage.Cell(slow_storage.WAIT, "1/2", 0.01, 0.02, 0.5, 7.0, 0.25)],
            {slow_storage.WAIT: 3.0 * (1 << 20)},
            slow_storage.FULL,
            "a small one",
        ),
        # tests/e2e/commands/test_benchmark_engine.py runs it.
        conversations=TALK,
        # test_capacity.py makes them.
        capacity=capacity.Result(
            EngineOptions(),
            30 << 30,
            [
                capacity.Cell("small", "hsx", 128, 9, 1152, 0.99),
                capacity.Cell("small", "upstream", 0, 0, 0, 0.0, "Error: no"),
            ],
        ),
        decode=decoding.run(
            decoding.Scale(in_flight=(3,), steps=12, rounds=2, python_s=0.0001),
            source,
            place,
            quiet,
        ),
    )


# Contestants


def test_ring_is_resident_before_the_measurement(source: Source, tmp_path: Path) -> None:
    before = measure.resident_bytes()
    with closing(Pipeline(source, tmp_path, with_copy=True)) as made:
        assert measure.resident_bytes() - before > 0.9 * made.ring.pinned_bytes


@pytest.mark.parametrize("with_copy", [False, True])
@pytest.mark.parametrize("name", ["ours", "vllm", "vllm, reusing"])
@pytest.mark.parametrize(("tokens", "requests", "in_flight"), [(8, 6, 3), (48, 2, 1), (33, 4, 4)])
def test_files_are_compared_with_expected_contents(
    name: str,
    with_copy: bool,
    tokens: int,
    requests: int,
    in_flight: int,
    source: Source,
    tmp_path: Path,
) -> None:
    made: peers.Contestant
    if name == "ours":
        made = Ours(source, tmp_path, with_copy=with_copy)
    else:
        made = peers.Vllm033(source, tmp_path, with_copy=with_copy, reuse_pinned="reusing" in name)
    load = Load(tokens, requests, in_flight, SOURCE_TOKENS, STEP_TOKENS)
    try:
        for _ in range(2):
            made.prepare(load)
            made.run(load)
            made.verify(load)
            assert len(list(tmp_path.glob("*.safetensors"))) == requests
            victim = made.path(load.ids[-1])
            data = bytearray(victim.read_bytes())
            data[-tokens * (TINY.row_bytes // 2 + 8)] ^= (
                1  # a bit of a row, whether token ids come first or last
            )
            victim.write_bytes(data)
            with pytest.raises(AssertionError, match="rows"):
                made.verify(load)
            for path in tmp_path.glob("[!.]*"):
                path.unlink()
    finally:
        made.close()


@pytest.mark.parametrize("kind", [peers.RawWrite, peers.RawDirect])
def test_raw_contestants_write_the_bytes_of_every_request(
    kind: type[peers.RawWrite | peers.RawDirect], source: Source, tmp_path: Path
) -> None:
    if kind is peers.RawDirect and (reason := peers.direct_io_works(tmp_path)) is not None:
        pytest.skip(f"the temporary directory has no direct I/O: {reason}")
    load = Load(64, 4, 2, SOURCE_TOKENS, STEP_TOKENS)
    made = kind(source, tmp_path, threads=2)
    made.prepare(load)
    made.run(load)
    made.close()
    for index, request_id in enumerate(load.ids):
        expected = bytes(source.bytes_of(load.first_row(index), 64))
        assert made.path(request_id).read_bytes() == expected


def test_error_in_a_pool_is_raised_in_the_waiting_thread() -> None:
    def fail(job: int) -> None:
        raise OSError(f"job {job}")

    pool = peers.Pool(1, fail)
    with pytest.raises(OSError, match="job 0"):
        pool.run(2)
    pool.close()


# Parts


def test_every_view_has_every_cell(host: list[Cell]) -> None:
    cells = [
        (cell.view, cell.tokens, cell.in_flight, cell.evenly, cell.requests)
        for cell in host
        if cell.view != DURABLY
    ]
    assert cells == [
        (PINNED, 8, 1, False, 1),
        (PINNED, 8, 20, False, 20),
        (PINNED, 48, 3, False, 3),
        (PINNED, 48, 5, True, 5),
        (COPIED, 8, 4, False, 4),
        (COPIED, 48, 1, False, 1),
    ]
    assert {(cell.tokens, cell.in_flight) for cell in host if cell.view == DURABLY} in (
        set(),
        {(48, 2)},
    )
    for cell in host:
        assert OURS in cell.figures
        assert all(figures.gb_per_s > 0 and figures.of_raw > 0 for figures in cell.figures.values())


def test_measurements_leave_no_files(
    host: list[Cell], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert [path for path in tmp_path_factory.getbasetemp().rglob("hsx-benchmark-*")] == []


def test_each_stage_of_each_prompt_is_timed(results: goals.Results) -> None:
    (measured,) = results.latency
    assert [(each.tokens, each.last_chunk) for each in measured.prompts] == [(48, 5), (48, 32)]
    for each in measured.prompts:
        assert set(each.quantiles) == {"from_host", "from_step", "told", "loaded", "raw"}
        assert each.quantiles["from_step"]["p50"] >= each.quantiles["from_host"]["p50"] > 0
    assert set(measured.vllm) == {48}


def test_cost_model_is_fitted_to_the_steps() -> None:
    cells = [
        per_step.Cell(
            tokens,
            in_flight,
            1e-4 + 2e-5 * in_flight,
            1e-4 + 5e-6 * in_flight + 1e-9 * tokens,
            1e-6,
        )
        for tokens in (128, 2048)
        for in_flight in (1, 8, 64)
    ]
    assert np.allclose(per_step.fit(cells), (1e-4, 5e-6, 1.5e-5), rtol=0.02)
    assert np.isclose(per_step.slope(cells), 1e-6)


def test_main_thread_is_measured_with_and_without_requests_that_begin(
    results: goals.Results,
) -> None:
    assert results.step is not None
    assert [
        (cell.tokens, cell.in_flight, cell.going_on is None) for cell in results.step.cells
    ] == [
        (8, 1, True),
        (8, 4, True),
        (40, 1, False),
        (40, 4, False),
        (80, 1, False),
        (80, 4, False),
    ]


# Goals and report


def durable_cell(of_raw: float, tokens: int = 2048) -> Cell:
    return Cell(
        DURABLY, "ext4", tokens, 1, False, 1, 1000, {OURS: Figures(1.0, 0.3, 0, of_raw, 2.0)}
    )


def judged(cells: list[Cell], goal: str) -> goals.Verdict:
    results = goals.Results({}, (0, 0), 1 << 20, cells, {}, [], None, None, None, None, None)
    (verdict,) = [each for each in goals.judge(results) if each.goal.startswith(goal)]
    return verdict


def test_goal_is_met_only_if_every_cell_meets_it() -> None:
    goal = "durable, from 2,048 tokens on"
    assert judged([durable_cell(0.96), durable_cell(0.99)], goal).met == "yes"
    missed = judged([durable_cell(0.96), durable_cell(0.94)], goal)
    assert (missed.met, missed.measured) == ("in 1 of 2 cells", "96%, worst 94%")
    assert judged([durable_cell(0.1, tokens=128), durable_cell(0.96)], goal).met == "yes"


def test_conversations_have_goals() -> None:
    results = goals.Results({}, (0, 0), 1 << 20, [], {}, [], None, None, None, None, TALK)
    assert [verdict.met for verdict in goals.judge(results)] == ["yes", "yes"]
    ours = replace(TALK.cells[1], of_off=1.11, wall_of_off=1.16)
    missed = replace(
        results, conversations=replace(TALK, cells=[TALK.cells[0], ours, *TALK.cells[2:]])
    )
    verdicts = goals.judge(missed)
    assert [verdict.met for verdict in verdicts] == ["no", "no"]
    assert [verdict.measured for verdict in verdicts] == ["1.11 times", "1.16 times"]


def test_report_has_figures_and_words_of_every_part(results: goals.Results, tmp_path: Path) -> None:
    as_json, cost_image, image, text = report.write(results, tmp_path / "docs")
    report.show(Console(quiet=True), results)
    for title, headings, rows in report.tables(results):
        assert all(len(row) == len(headings) for row in rows), title
    assert json.loads(as_json.read_text())["host"][0]["figures"][OURS]["cpu_s_per_gb"] > 0
    assert image.read_bytes()[:4] == cost_image.read_bytes()[:4] == b"\x89PNG"
    page = text.read_text()
    words = " ".join(page.split())
    main, _, appendix = page.partition("## Appendix")
    assert f"]({cost_image.name})" in main
    for row in (
        "| KV cache kept, small | 100.0% | 99.0% | does not start |",
        "| requests per second, decode | 100.0% | 98.5% | 98.5% |",
        "| prompt tokens computed, conversations | 1.00 × | 1.10 × | not measured |",
    ):
        assert row in main
    assert "| host memory, " in main
    assert re.findall(r"^### (.*)$", appendix, re.MULTILINE) == [
        "Goals",
        "Files",
        "Latency",
        "Engine",
        "Main thread",
        "Generated tokens",
        "Slow storage",
        "Conversations",
        "KV cache",
    ]
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    slowest = min(cell.figures[OURS].gb_per_s for cell in results.host if cell.view == PINNED)
    assert f"writes {slowest:.1f} GB/s" in words
    assert "There are none on tmpfs: because." in words
    assert "small with upstream: Error: no." in words
    assert "vLLM's connector, 0.30.0rc2: needs another release" in words
    assert "950 of them different" in words
    assert not re.search(r"/tmp|/work|/home|\{|nan", page)


def test_page_is_written_again_without_measuring(results: goals.Results, tmp_path: Path) -> None:
    written = report.write(results, tmp_path)
    before = [path.read_bytes() for path in written]
    written[-1].unlink()
    assert report.write_again(tmp_path) == written
    assert [path.read_bytes() for path in written] == before


def test_page_also_has_goals_of_other_machines(results: goals.Results, tmp_path: Path) -> None:
    (as_json, *_) = report.write(
        replace(results, machine={"processor": "a large one, 16 cores"}, capacity=None), tmp_path
    )
    as_json.rename(tmp_path / "performance-large.json")
    page = report.write(results, tmp_path)[-1].read_text()
    assert "* `performance-large.json`: a large one, 16 cores" in page
    assert "| goal | a small one | a large one |" in page
    for each in goals.judge(results):
        cell = f"{each.measured}: {each.met}"
        assert f"| {each.goal} | {cell} | {cell} |" in page


def test_remeasured_part_replaces_only_itself(results: goals.Results, tmp_path: Path) -> None:
    as_json, *_ = report.write(results, tmp_path)
    as_json.write_text(as_json.read_text().replace('"longest": 0.5', '"of_another_form": 0.5'))
    assert results.slow_storage is not None
    (cell,) = results.slow_storage.cells
    again = replace(results.slow_storage, cells=[replace(cell, longest=1.5)])
    alone = goals.Results({}, (1.0, 1.0), 0, [], {}, [], None, None, again, None, None)
    merged = report.merge(
        alone, report.written_before(tmp_path, ["slow_storage"]), ["slow_storage"]
    )
    assert merged == replace(results, slow_storage=again)
    report.write(merged, tmp_path)
    assert "| 1/2 | 20 / 1,500 | 7.0 |  |  |  |" in (tmp_path / "performance.md").read_text()
    elsewhere = replace(alone, machine={"processor": "another one"}, host=results.host)
    merged = report.merge(elsewhere, report.written_before(tmp_path, ["host"]), ["host"])
    assert (merged.machine, merged.load_average) == (elsewhere.machine, (1.0, 1.0))


def test_command_writes_to_docs_only_with_all_parts() -> None:
    assert (
        command.parse_arguments(["--parts", "slow_storage", "--merge"]).output
        == command.ROOT / "docs"
    )
    assert command.parse_arguments([]).output == command.ROOT / "docs"
    assert command.parse_arguments(["--page"]).output == command.ROOT / "docs"
    assert command.parse_arguments(["--quick"]).output is None
    assert command.parse_arguments(["--parts", "step"]).output is None
    assert command.parse_arguments(["--quick", "--output", "here"]).output == Path("here")


def test_shards_are_compared_with_files() -> None:
    found = shards.measure(requests=12, tokens=3, repetitions=1)
    written, read, names = found.values()
    assert min(float(written), float(read)) > 0
    assert names == "4 instead of 24"
