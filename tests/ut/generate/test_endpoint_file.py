"""A list of servers is read again: added servers are used, removed servers are drained."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from generate_bench import Bench
from generate_files import Seen
from generate_harness import FakeServer

from vllm_ascend_hsx.cli.generate import parse_arguments
from vllm_ascend_hsx.generate import endpoints
from vllm_ascend_hsx.generate.endpoints import Balancer
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.options import read_endpoints
from vllm_ascend_hsx.generate.progress import Progress


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "REREAD_S", 0.005)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Replace a file atomically, as documented."""
    new = path.with_suffix(".new")
    make(new)
    os.replace(new, path)


def write(path: Path, text: str) -> None:
    replace(path, lambda new: new.write_text(text))


class Script:
    """Steps by row: do a step when a row is requested, and answer once the run has printed a text.

    Args:
        steps: by row, a function to call, and a part of the text that the run prints then.
    """

    def __init__(
        self,
        bench: Bench,
        steps: dict[int, tuple[Callable[[], object], str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self._steps = steps
        self._said: list[str] = []
        self._news = threading.Condition()
        say = Progress.say

        def note(progress: Progress, text: str) -> None:
            say(progress, text)
            with self._news:
                self._said.append(text)
                self._news.notify_all()

        monkeypatch.setattr(Progress, "say", note)
        bench.server.at = self._at

    def _at(self, seen: Seen, stage: str) -> None:
        if stage == "asked" and seen.row in self._steps:
            act, result = self._steps.pop(seen.row)
            act()
            with self._news:
                assert self._news.wait_for(
                    lambda: any(result in each for each in self._said), 30
                ), self._said


def test_added_server_is_used_and_removed_server_is_drained(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "servers"
    with FakeServer(bench.output) as second:
        write(listed, f"# ours\n{bench.server.url}/v1/  # the first\n\n")
        both = f"{bench.server.url}\n{second.url}\n"
        steps = {5: (lambda: write(listed, both), f"{second.url} is used from now on")}
        Script(bench, steps, monkeypatch)

        def leave(seen: Seen, stage: str) -> None:
            if stage == "asked" and len(second.seen) == 4:
                write(listed, f"{second.url}\n")

        second.at = leave
        code, printed = bench.run(records=400, endpoint=f"@{listed}")
        assert code == 0, printed
        assert f"{bench.server.url} gets no new requests; " in printed
        assert (
            f"{bench.server.url} has no requests in flight any more" in printed
            or "gets no new requests; 0 in flight" in printed
        )
        assert bench.server.asked + second.asked == Counter(range(400)), "no row was sent twice"
        assert len(second.seen) > 20
        assert f"{second.url} │ {len(second.seen)} answered, 0 failed" in printed
    bench.check(list(range(400)), records=400)


BROKEN = {
    "gone": (lambda path: path.unlink(), "cannot be read: No such file or directory"),
    "empty": (lambda path: write(path, "# nobody\n"), "the file lists no server"),
    "half-written": (
        lambda path: write(path, "http://127.0.0.1:1\nhtt"),
        "htt: give the URL of a server",
    ),
    "no-host": (lambda path: write(path, "http://:1"), "invalid host or port"),
    "no-text": (
        lambda path: replace(path, lambda new: new.write_bytes(b"\xff\xfe")),
        "not UTF-8 text",
    ),
    "directory": (
        lambda path: replace(path, lambda new: new.symlink_to(path.parent)),
        "it is a directory",
    ),
    "fifo": (lambda path: replace(path, os.mkfifo), "it is a FIFO"),
}


@pytest.mark.parametrize(("breaks", "problem"), BROKEN.values(), ids=BROKEN)
def test_invalid_list_changes_nothing_and_is_reported_once(
    breaks: Callable[[Path], object],
    problem: str,
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = tmp_path / "servers"
    write(listed, bench.server.url)
    Script(bench, {3: (lambda: breaks(listed), problem)}, monkeypatch)
    bench.server.behave = lambda seen: time.sleep(0.01) or "ok"  # the file is read several times
    code, printed = bench.run(records=20, endpoint=f"@{listed}")
    assert code == 0 and printed.count("the servers listed before are still used") == 1, printed
    bench.check(list(range(20)), records=20)


def test_wrong_added_server_is_set_aside_and_the_run_continues(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tmp_path / "servers"
    write(listed, bench.server.url)
    with FakeServer(bench.output, layer_ids=(0, 2)) as wrong:
        steps = {
            5: (
                lambda: write(listed, f"{bench.server.url}\n{wrong.url}\n"),
                f"{wrong.url} is used from now on",
            )
        }
        Script(bench, steps, monkeypatch)
        code, printed = bench.run(records=60, endpoint=f"@{listed}")
        assert code == 0, printed
        assert len(wrong.seen) == 1
        assert (
            printed.count(f"{wrong.url} will not be used") == 1
            and "holds rows of another server: layer_ids was" in printed
        )
    bench.check(list(range(60)), records=60)


def test_invalid_list_is_refused_at_the_start(bench: Bench, tmp_path: Path) -> None:
    listed = tmp_path / "servers"
    for text, problem in (
        (None, "cannot be read"),
        ("", "the file lists no server"),
        ("x", "x: give the URL"),
        ("http://a\nhttp://a/v1", "twice"),
    ):
        if text is not None:
            write(listed, text)
        code, printed = bench.run(endpoint=f"@{listed}")
        assert (
            code == 2
            and printed.startswith(f"hsx generate: --endpoint @{listed}: ")
            and problem in printed
        ), printed


def test_list_cannot_be_combined_with_other_endpoints(tmp_path: Path) -> None:
    words = [
        "--data",
        "d",
        "--output",
        "o",
        "--endpoint",
        f"@{tmp_path / 'servers'}",
        "--endpoint",
        "http://b",
    ]
    with pytest.raises(InputError, match="@FILE: cannot be used with other --endpoint"):
        parse_arguments(words)
    (tmp_path / "servers").write_text("http://a:1/v1\n")
    options = parse_arguments(words[:-2])
    assert (options.endpoints, options.endpoint_file) == (("http://a:1",), tmp_path / "servers")
    assert read_endpoints(tmp_path / "servers") == ("http://a:1",)


def used(balancer: Balancer) -> list[str]:
    return [each.url for each in balancer.used]


def test_returning_server_is_on_trial_and_listed_server_stays_set_aside() -> None:
    async def scenario() -> None:
        made = Balancer(["a"], 1.0)
        (a,) = made.endpoints
        a.proven, a.model = True, "m"

        def replace(urls: Sequence[str]) -> tuple[list[str], list[str]]:
            came, went = made.replace(urls)
            return [each.url for each in came], [each.url for each in went]

        assert replace(["b"]) == (["b"], ["a"])
        b = made.endpoints[1]
        assert not made.go_on_without(b, InputError()), "it is the only one"
        assert replace(["a", "b"]) == (["a"], [])
        again = made.endpoints[2]
        assert (
            again is not a
            and again.is_on_trial
            and again.model is None
            and again.is_used
            and not a.is_used
        )
        assert made.go_on_without(b, InputError()) and used(made) == ["a"]
        assert replace(["b", "a"]) == ([], []) and used(made) == ["a"], (
            "it has been listed all the time"
        )
        assert replace(["b"]) == (["b"], ["a"]), "no other is left"
        b = made.endpoints[3]
        again.proven = b.proven = True
        b.in_flight = 1
        assert replace(["a"]) == (["a"], ["b"])
        last = made.endpoints[4]
        assert not last.proven
        made.note_answer(b)  # the request in flight ends
        made.give_back(b)
        assert await made.acquire(near=b) is last

    asyncio.run(scenario())


def test_waiting_request_gets_an_added_server() -> None:
    async def scenario() -> None:
        made = Balancer(["a"], 1.0)
        await made.acquire()  # the trial
        waiting = asyncio.ensure_future(made.acquire())
        await asyncio.sleep(0)
        made.replace(["a", "b"])
        assert (await waiting).url == "b"

    asyncio.run(scenario())
