"""Finished rows keep their files if the dataset is edited, cut or sorted.

A dataset is a word. Each letter is the content of a row.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from depth import depth
from fakes.generate_process import TRACED
from generate_files import SINKS, contents, right, write_jsonl
from generate_harness import FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate import options
from vllm_ascend_hsx.generate.ledger import Ledger


def token_ids(letter: str) -> list[int]:
    return [ord(letter), *range(1 + ord(letter) % 5)]


class Run(NamedTuple):
    """A run that has ended.

    Attributes:
        code: exit code.
        asked: number of requests for each letter.
        printed: output, in one line.
    """

    code: int
    asked: Counter[str]
    printed: str


class Words:
    """Runs over datasets into one directory. Use as a context manager."""

    def __init__(self, root: Path, kind: str = "files") -> None:
        self.root = root
        self.kind = kind
        self.output = root / "out"
        self.server = FakeServer(self.output, make_sink=SINKS[kind])

    def __enter__(self) -> Words:
        self.server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)

    def run(self, word: str, *arguments: object, refuses: str = "") -> Run:
        """Run with a server that refuses some letters."""
        data = write_jsonl(
            self.root / "data.jsonl",
            [{"token_ids": token_ids(letter)} if letter != "!" else {} for letter in word],
        )
        self.server.seen.clear()
        self.server.behave = lambda seen: 400 if word[seen.row] in refuses else "ok"
        command = [
            "--data",
            data,
            "--output",
            self.output,
            "--endpoint",
            self.server.url,
            "--concurrency",
            2,
            *arguments,
        ]
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.redirect_stderr(printed),
        ):
            code = generate.main([str(each) for each in command])
        self.server.wait_idle()
        return Run(
            code,
            Counter(word[seen.row] for seen in self.server.seen),
            " ".join(printed.getvalue().split()),
        )

    def check(self, word: str, refuses: str = "") -> None:
        """Check that each letter that was not refused has the right file, and no others exist."""
        rows = {row: letter for row, letter in enumerate(word) if letter not in refuses}
        wanted = {f"hs_{row}.safetensors": right(token_ids(letter)) for row, letter in rows.items()}
        assert contents(self.output) == {**wanted, "ledger.jsonl": {}}


@pytest.fixture(params=sorted(SINKS))
def words(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Words]:
    with Words(tmp_path, request.param) as made:
        yield made


def in_place(before: str, now: str) -> Counter[str]:
    return Counter(new for old, new in zip(before, now, strict=False) if old == new)


@pytest.mark.parametrize(
    ("before", "now", "new", "moved"),
    [
        pytest.param("abcdef", "abXdef", "X", 0, id="a row is mended"),
        pytest.param("abcdef", "bcdef", "", 5, id="the first is removed"),
        pytest.param("abcdef", "abdef", "", 3, id="one in the middle is removed"),
        pytest.param("abcdef", "abcde", "", 0, id="the last is removed"),
        pytest.param("abcdef", "abcdXef", "X", 2, id="one is inserted"),
        pytest.param("abcdef", "abcdefXY", "XY", 0, id="two are appended"),
        pytest.param("abcdef", "ebcdaf", "", 2, id="two are swapped"),
        pytest.param("abcdef", "fedcba", "", 6, id="all are reversed"),
        pytest.param("abcdef", "aabcdef", "a", 5, id="one is doubled"),
        pytest.param("aabbcd", "bbaacd", "", 4, id="twins change places"),
        pytest.param("aabbcd", "cdabX", "X", 3, id="twins lose one each"),
        pytest.param("abcdef", "fXaYc", "XY", 3, id="half of them are left"),
    ],
)
def test_only_new_content_is_requested(
    words: Words, before: str, now: str, new: str, moved: int
) -> None:
    """Members of shards are not renamed, so moved rows are generated again."""
    assert words.run(before).code == 0
    run = words.run(now)
    assert run.code == 0, run.printed
    words.check(now)
    is_changed = in_place(before, now).total() < len(before)
    assert ("the dataset has changed: " in run.printed) == is_changed
    if words.kind == "files":
        assert run.asked == Counter(new)
        assert not is_changed or f", {moved} were renamed" in run.printed, run.printed
    else:
        assert run.asked == Counter(now) - in_place(before, now)
        assert not is_changed or ", 0 were renamed" in run.printed, run.printed
    again = words.run(now)
    assert (again.code, again.asked) == (
        0,
        Counter(),
    ) and "the dataset has changed" not in again.printed
    words.check(now)


@settings(max_examples=depth(120))
@given(
    before=st.text("abcdefgh", min_size=1, max_size=8),
    now=st.text("abcdefghX", min_size=1, max_size=9),
    refuses=st.text("abcdefgh", max_size=3),
    kind=st.sampled_from(sorted(SINKS)),
    deaths=st.lists(st.integers(1, 30), max_size=2),
)
def test_after_a_kill_only_content_without_a_file_is_requested(
    before: str, now: str, refuses: str, kind: str, deaths: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder, Words(Path(folder), kind) as words:
        words.run(before, refuses=refuses)
        words.check(before, refuses)
        finished = Counter(letter for letter in before if letter not in refuses)
        if 2 * (finished & Counter(now)).total() < finished.total():
            run = words.run(now)
            assert (run.code, run.asked) == (
                2,
                Counter(),
            ) and "holds rows of another dataset" in run.printed
            return words.check(before, refuses)
        for death in deaths:
            killed_at(death, words, now)
        run = words.run(now)
        assert run.code == 0, run.printed
        words.check(now)
        stay = Counter(
            new for old, new in zip(before, now, strict=False) if old == new and old not in refuses
        )
        assert run.asked == Counter(now) - (finished if kind == "files" else stay)


class Killed(BaseException):
    """The process has died."""


class MortalOs:
    """Replacement of `os`. The process dies before the change number `last` of the filesystem."""

    def __init__(self, last: int) -> None:
        self.left = last

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in ("rename", "unlink", "write", "ftruncate"):
            return function

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.left -= 1
            if self.left <= 0:  # also at later changes, so that no cleanup runs
                raise Killed
            return function(*arguments, **keywords)

        return call


def killed_at(last: int, words: Words, word: str) -> bool:
    """Run, and die before a change of the filesystem, or else before the first request.

    Return True if the process died before a change.
    """
    mortal = MortalOs(last)

    def begin(ledger: Ledger, rows: int, invalid: int) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        for module in (each for each in TRACED if hasattr(each, "os")):
            patch.setattr(module, "os", mortal)
        patch.setattr(Ledger, "note_run", begin)
        with pytest.raises(Killed):
            words.run(word)
    assert not words.server.seen
    return mortal.left <= 0


@pytest.mark.parametrize("now", ["bcaed", "Xabcde", "badc", "cbXe"])
def test_kill_before_any_filesystem_change_loses_no_row(tmp_path: Path, now: str) -> None:
    last, dies = 0, True
    while dies:
        last += 1
        (tmp_path / str(last)).mkdir()
        with Words(tmp_path / str(last)) as words:
            assert words.run("abcde").code == 0
            dies = killed_at(last, words, now)
            run = words.run(now)
            assert (run.code, run.asked) == (0, Counter(now) - Counter("abcde")), (
                last,
                run.printed,
            )
            words.check(now)
    assert last > 2


def test_file_of_a_row_removed_from_the_dataset_is_removed(words: Words) -> None:
    """No training run must read the file."""
    assert words.run("abcdef").code == 0
    run = words.run("abcd!", "--skip-invalid")
    assert (run.code, run.asked) == (0, Counter()), run.printed
    words.check("abcd")


def test_rows_beyond_the_limit_are_ignored(words: Words) -> None:
    assert words.run("abcdef").code == 0
    run = words.run("abXYZZ", "--limit", 3)
    assert (run.code, run.asked) == (0, Counter("X")), run.printed
    words.check("abXdef")


def test_another_dataset_is_refused_and_changes_nothing(words: Words) -> None:
    assert words.run("abcdef").code == 0
    ledger = (words.output / "ledger.jsonl").read_bytes()
    run = words.run("abXYZW")
    assert (run.code, run.asked) == (2, Counter()), run.printed
    problem = (
        f"{words.output} holds rows of another dataset: only 2 of 6 finished rows are in "
        f"{words.root / 'data.jsonl'}"
    )
    assert f"{problem}; give another --output" in run.printed
    words.check("abcdef")
    assert (words.output / "ledger.jsonl").read_bytes() == ledger


def test_only_a_run_of_one_rank_renames_files(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of other ranks may be in progress. Each rank generates changed rows of its own."""
    monkeypatch.setattr(options, "RANK_ROWS", 1)
    assert words.run("abcdef").code == 0
    run = words.run("abcdfe", "--world-size", 2, "--rank", 1)
    assert (run.code, run.asked) == (2, Counter())
    assert (
        "2 finished rows have moved in " in run.printed
        and "run once with --world-size 1 --rank 0" in run.printed
    )
    words.check("abcdef")
    for rank, asked in ((0, "X"), (1, "Y")):
        run = words.run("abXdeY", "--world-size", 2, "--rank", rank)
        assert (run.code, run.asked) == (0, Counter(asked)), run.printed
