"""Estimates of `hsx generate --dry-run`, and the warning about free space."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from documents import blocks
from rich.console import Console

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate.dataset import BadRow, Checked
from vllm_ascend_hsx.generate.ledger import VERSION
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import Outcome
from vllm_ascend_hsx.generate.rows import Row
from vllm_ascend_hsx.generate.sizes import SAMPLE, free_space, show_sizes, sizes_of, space_problem

NOBODY = "http://localhost:1"
GB = 10**9
REFUSED = {"error": {"message": "too long", "code": 400}}
CHAT = [{"role": "user", "content": "one two three"}]


class Usage(NamedTuple):
    """As shutil.disk_usage returns it."""

    free: int


class Rows:
    """A dataset in memory."""

    def __init__(self, *contents: Any) -> None:
        self.all = [Row(index, content) for index, content in enumerate(contents)]

    def rows(self, wanted: Callable[[int], bool]) -> Iterator[Row]:
        return (row for row in self.all if wanted(row.index))

    def checked(self, bad: int = 0) -> Checked:
        """Return the result of Dataset.check, with `bad` additional rows."""
        identities = array("Q", [int(identity(row)[:16], 16) for row in self.all] + [0] * bad)
        tokens = sum(len(row.token_ids or ()) for row in self.all)
        characters = sum(len(str(row.content)) for row in self.all if row.token_ids is None)
        return Checked(
            identities,
            [BadRow(len(self.all) + at, "", "") for at in range(bad)],
            Counter(),
            tokens,
            characters,
        )


def identity(row: Row) -> str:
    return row.identity({})


def ids(count: int) -> array[int]:
    return array("q", range(count))


def write_ledger(output: Path, *lines: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    output.mkdir(exist_ok=True)
    name = "ledger.jsonl" if world_size == 1 else f"ledger-{rank}-of-{world_size}.jsonl"
    begin = {"ledger": VERSION, "request": {}, "world_size": world_size, "rank": rank, "id": "0"}
    (output / name).write_text("".join(json.dumps(line) + "\n" for line in (begin, *lines)))


def run(time: float = 1000.0) -> dict[str, Any]:
    return {"run": {"rows": 100, "invalid": 0}, "time": time}


def done(
    row: Row, tokens: int, num_bytes: int, time: float = 1010.0, status: str = "done"
) -> dict[str, Any]:
    return {
        "row": row.index,
        "status": status,
        "identity": identity(row),
        "time": time,
        "tokens": tokens,
        "bytes": num_bytes,
    }


def shown(output: Path, dataset: Rows, bad: int = 0, **options: Any) -> dict[str, str]:
    """Return the lines of --dry-run."""
    said = StringIO()
    given = Options("data", output, **{"endpoints": (NOBODY,), **options})
    show_sizes(Console(file=said, width=200), sizes_of(given, dataset, dataset.checked(bad)))  # type: ignore[arg-type]
    return dict(line.split(": ", 1) for line in said.getvalue().splitlines())


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free bytes of all file systems."""

    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(num_bytes))

    set_free(GB)
    return set_free


@contextmanager
def renderer(
    answer: Callable[[dict[str, Any]], Any],
) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Run a server that renders prompts. Yield the URL, and a list of paths and bodies."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            told = answer(body)
            text = json.dumps(told).encode()
            self.send_response(400 if told == REFUSED else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


# Rows and tokens


def test_dry_run_counts_token_ids_exactly_and_creates_no_directory(tmp_path: Path) -> None:
    lines = shown(tmp_path / "new" / "rows", Rows(ids(3), ids(4)), bad=1)
    assert lines["rows"] == "2, 0 of them finished"
    assert lines["tokens"] == "7 (exact: from token ids)"
    assert lines["free space"] == "1.0 GB"
    assert not (tmp_path / "new").exists()


def test_rows_count_as_finished_by_last_line_and_current_content(
    tmp_path: Path,
) -> None:
    dataset = Rows(*(ids(1 + each) for each in range(8)))
    rows = dataset.all
    failed = {"row": 3, "status": "failed", "identity": identity(rows[3]), "time": 1020.0}
    changed = {"row": 4, "status": "changed", "identity": "", "time": 1020.0}
    of_another_content = {**done(rows[5], 6, 60), "identity": identity(rows[6])}
    outside = {**done(rows[6], 7, 70), "row": 1000}
    lines = [done(each, 1, 10) for each in (rows[0], rows[3], rows[4])]
    write_ledger(
        tmp_path,
        run(),
        *lines,
        done(rows[1], 2, 20, status="found"),
        failed,
        changed,
        of_another_content,
        outside,
    )
    assert shown(tmp_path, dataset, bad=2)["rows"] == "8, 2 of them finished"


def test_rows_finished_by_any_rank_count(tmp_path: Path) -> None:
    dataset = Rows(*(ids(1 + each) for each in range(20)))
    write_ledger(tmp_path, run(), done(dataset.all[0], 1, 10), rank=0, world_size=2)
    write_ledger(tmp_path, run(), done(dataset.all[17], 18, 180), rank=1, world_size=2)
    assert shown(tmp_path, dataset)["rows"] == "20, 2 of them finished"


def test_tokens_of_texts_are_estimated_from_ledger_files(tmp_path: Path) -> None:
    dataset = Rows(*["some text"] * 10)
    write_ledger(tmp_path, run(), done(dataset.all[0], 4, 400), done(dataset.all[1], 6, 600))
    assert (
        shown(tmp_path, dataset)["tokens"]
        == "50 (estimate: 5 per row, from 2 files of the ledgers)"
    )


def test_tokens_of_texts_are_estimated_from_a_rendered_sample(tmp_path: Path) -> None:
    texts = [f"{'x' * (at % 7)} {at}" for at in range(5 * SAMPLE)]
    dataset = Rows(*texts, ids(1000))
    with renderer(lambda body: [{"token_ids": [1] * (2 * len(body["prompt"]))}]) as (url, seen):
        lines = shown(tmp_path, dataset, endpoints=(url,))
    assert (
        lines["tokens"]
        == f"{2 * sum(map(len, texts)) + 1000:,} (estimate: from a sample of texts, rendered by a server)"
    )
    assert {path for path, _ in seen} == {"/v1/completions/render"} and 1 < len(seen) <= SAMPLE


def test_a_chat_is_rendered_as_it_would_be_sent(tmp_path: Path) -> None:
    dataset = Rows(CHAT)
    with renderer(lambda body: {"token_ids": [1] * 9}) as (url, seen):
        assert shown(tmp_path, dataset, endpoints=(url,))["tokens"].startswith("9 (")
    ((path, body),) = seen
    assert path == "/v1/chat/completions/render" and body | dataset.all[0].prompt() == body


def test_rows_that_fail_to_render_are_left_out_of_the_estimate(tmp_path: Path) -> None:
    dataset = Rows("x" * 10, "y" * 990)
    with renderer(
        lambda body: [{"token_ids": [1] * 5}] if body["prompt"].startswith("x") else REFUSED
    ) as (url, _):
        assert shown(tmp_path, dataset, endpoints=(url,))["tokens"].startswith(
            "500 (estimate: from a sample of texts"
        )


@pytest.mark.parametrize("answer", [REFUSED, {}, [], [[]], {"token_ids": 3}, "text", None], ids=str)
def test_estimate_without_a_rendering_server_is_four_characters_per_token(
    answer: Any, tmp_path: Path
) -> None:
    told = "10 (estimate: 4 characters per token, because no server rendered texts)"
    assert shown(tmp_path, Rows("x" * 40))["tokens"] == told
    with renderer(lambda body: answer) as (url, _):
        assert shown(tmp_path, Rows("x" * 40), endpoints=(url,))["tokens"] == told


def test_generated_tokens_are_an_upper_bound_until_a_ledger_has_files(
    tmp_path: Path,
) -> None:
    dataset = Rows(ids(3), ids(4))
    wanted = {"include_output": True, "max_tokens": 100}
    told = "207 (exact: from token ids; upper bound, with --max-tokens generated tokens per row)"
    assert shown(tmp_path, dataset, **wanted)["tokens"] == told
    write_ledger(tmp_path, run(), done(dataset.all[0], 13, 130))
    assert (
        shown(tmp_path, dataset, **wanted)["tokens"]
        == "26 (estimate: 13 per row, from 1 files of the ledgers)"
    )


# Bytes and time


def test_bytes_per_token_come_from_existing_files(tmp_path: Path) -> None:
    dataset = Rows(ids(30), ids(30), ids(30))
    write_ledger(tmp_path, run(), done(dataset.all[0], 30, 60_000))
    assert (
        shown(tmp_path, dataset, bytes_per_token=7)["size of remaining rows"]
        == "120.0 kB, 2,000 bytes per token"
    )


def test_bytes_per_token_can_be_given_and_are_unknown_otherwise(tmp_path: Path) -> None:
    dataset = Rows(ids(10))
    assert (
        shown(tmp_path, dataset, bytes_per_token=24_576)["size of remaining rows"]
        == "245.8 kB, 24,576 bytes per token"
    )
    assert shown(tmp_path, dataset)["size of remaining rows"] == "unknown; give --bytes-per-token"


@pytest.mark.parametrize(("left", "told"), [(10_000, "10.0 kB"), (9_999, "10.0 kB, not enough")])
def test_lack_of_free_space_is_reported(
    left: int, told: str, free: Callable[[int], None], tmp_path: Path
) -> None:
    free(left)
    assert shown(tmp_path, Rows(ids(10)), bytes_per_token=1000)["free space"] == told


def test_time_uses_the_given_rate_or_that_of_the_last_run(tmp_path: Path) -> None:
    dataset = Rows(*[ids(36_000)] * 40)
    assert shown(tmp_path, dataset)["time for remaining rows"] == "unknown; give --rate"
    assert (
        shown(tmp_path, dataset, rate=400.0)["time for remaining rows"] == "1:00:00 at 400 tokens/s"
    )
    early = done(dataset.all[0], 36_000, 36, time=500.0)
    write_ledger(
        tmp_path,
        run(400.0),
        early,
        run(1000.0),
        done(dataset.all[1], 36_000, 36, time=1100.0),
        rank=0,
        world_size=2,
    )
    write_ledger(
        tmp_path, run(1000.0), done(dataset.all[16], 36_000, 36, time=1200.0), rank=1, world_size=2
    )
    write_ledger(
        tmp_path, run(0.0), done(dataset.all[20], 36_000, 36, time=1.0)
    )  # of an earlier run, by one rank
    assert shown(tmp_path, dataset)["time for remaining rows"] == "0:40:00 at 540 tokens/s"


# The warning of a run


def outcome(done: int, left: int, failed: int = 0) -> Outcome:
    return Outcome(total=done + left + failed, done=done, failed=failed, bytes=done * 1000)


@pytest.mark.parametrize(
    ("so_far", "world_size", "is_told"),
    [
        (outcome(SAMPLE, 1000), 1, False),
        (outcome(SAMPLE, 1001), 1, True),
        (outcome(SAMPLE - 1, 5000), 1, False),
        (outcome(SAMPLE, 1000, failed=500), 1, False),
        (outcome(SAMPLE, 501), 2, True),
        (outcome(0, 0), 1, False),
    ],
)
def test_run_warns_if_remaining_rows_exceed_the_free_space(
    so_far: Outcome, world_size: int, is_told: bool, free: Callable[[int], None], tmp_path: Path
) -> None:
    free(1_000_000)
    problem = space_problem(Options("data", tmp_path, world_size=world_size), so_far)
    assert (problem is not None) == is_told
    if problem is not None:
        assert (
            f"remaining rows need about 1.0 MB, but {tmp_path} has 1.0 MB free; free some space"
            in problem
        )


def test_unreadable_free_space_gives_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    assert space_problem(Options("data", tmp_path), outcome(SAMPLE, 10**9)) is None


def test_free_space_is_read_from_the_nearest_existing_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(7)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.chdir(tmp_path)
    assert (free_space(tmp_path / "a" / "b"), free_space(Path("c") / "d"), free_space(Path())) == (
        7,
        7,
        7,
    )
    assert asked == [tmp_path, tmp_path, Path()]


def test_documented_command_is_accepted() -> None:
    (command,) = blocks("generate.md", "dry-run")
    words = shlex.split(command)
    options = generate.parse_arguments(words[2:])
    assert (
        words[:2] == ["hsx", "generate"]
        and options.dry_run
        and (options.bytes_per_token, options.rate) == (24_584, 20_000)
    )
