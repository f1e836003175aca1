"""Output of `hsx generate`: progress, help, and names that a console cannot print."""

from __future__ import annotations

import io

import pytest
from generate_bench import Bench
from rich.console import Console

from vllm_ascend_hsx.cli import generate
from vllm_ascend_hsx.generate import progress as progress_module
from vllm_ascend_hsx.generate.progress import Outcome, Progress


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_line_has_rows_rates_and_remaining_time(
    terminal: bool,
) -> None:
    time = Time()
    target = console(terminal)
    outcome = Outcome(100)
    with Progress(target, outcome, now=time) as progress:
        time.now += 10
        outcome.done, outcome.tokens, outcome.bytes = 20, 20_000, 1_000_000_000
        outcome.before, outcome.failed, outcome.retries = 20, 1, 1
        progress.say("http://a is left alone for 2 s")
        assert progress.line() == (
            "40 of 100 rows, 2.0 rows/s, 2,000 tokens/s, 100.0 MB/s, 1 failed, 1 retries, ETA "
            "0:00:30"
        )
    assert "http://a is left alone for 2 s" in target.file.getvalue()  # type: ignore[attr-defined]


def test_rates_cover_the_last_half_minute() -> None:
    time = Time()
    outcome = Outcome(300)
    progress = Progress(console(False), outcome, now=time)
    for tokens in (1000, 30):
        for _ in range(100):
            time.now += 1
            outcome.done, outcome.tokens, outcome.bytes = (
                outcome.done + 1,
                outcome.tokens + tokens,
                outcome.bytes + 2 * tokens,
            )
            line = progress.line()
    assert "200 of 300 rows, 1.0 rows/s, 30 tokens/s, 60 bytes/s" in line
    time.now += 1000
    assert "0.0 rows/s, 0 tokens/s" in progress.line()


def test_lines_are_printed_periodically_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_S", 0.001)
    target = console(False)
    with Progress(target, Outcome(10)) as progress:
        while "0 of 10 rows" not in target.file.getvalue():  # type: ignore[attr-defined]
            progress._thread.join(0.001)


def test_help_names_every_option_and_the_aliases_of_speculators(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        generate.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--endpoint",
        "--data",
        "--preprocessed-data",
        "--output",
        "--concurrency",
        "--validate-outputs",
        "--request-timeout",
    ):
        assert option in text
    for option in (
        "--max-retries",
        "--max-consecutive-errors",
        "--world-size",
        "--rank",
        "--max-samples",
        "--map-path",
    ):
        assert option in text


def test_names_with_markup_or_unprintable_characters_are_shown(
    bench: Bench,
) -> None:
    bench.root /= "[/x]\udcff"
    bench.root.mkdir(parents=True)
    bench.output /= "[x]"
    code, printed = bench.run()
    assert code == 0, printed
    assert r"[/x]\udcff/data.jsonl: 6 rows" in printed and "out/[x]" in printed
