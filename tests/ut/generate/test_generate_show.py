"""Rows are shown as tokens with the loss mask before the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from generate_bench import Bench
from generate_files import Seen

from vllm_ascend_hsx.generate.client import Client
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.show import second_bos

DIFFERENTLY = "renders differently at the end of a conversation, so its loss is not shown"
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
}


def test_only_the_first_run_shows_a_row(bench: Bench) -> None:
    bench.output /= "new"
    code, printed = bench.run(records=[CHAT, {"prompt": "x"}])
    assert code == 0 and "row 0: 24 tokens, " in printed and "row 1: " not in printed, printed
    assert "row 0: " not in bench.run(records=[CHAT, {"prompt": "x"}])[1]


def test_tokens_of_the_assistant_are_between_marks(bench: Bench) -> None:
    bench.server.asked.clear()
    code, printed = bench.run(
        "--show", 3, records=[CHAT, {"prompt": "a text"}, {"token_ids": list(b"ids\x1b[2J")}]
    )
    assert code == 0, printed
    # The fake server renders an assistant's message as <assistant> and the text.
    assert "row 0: 24 tokens, 3 of them with a loss <user>Why?<assistant>[[So.]]" in printed
    assert "row 1: 6 tokens, 0 of them with a loss a text" in printed
    assert r"row 2: 7 tokens, 0 of them with a loss ids\x1b[2J" in printed


def test_long_row_is_shown_without_its_middle(bench: Bench) -> None:
    _, printed = bench.run("--show", 1, records=[{"prompt": "a" * 3000 + "z" * 3000}])
    assert f"{'a' * 1000} ... {'z' * 1000}" in printed and "a" * 1001 not in printed


def test_turn_that_renders_differently_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = bench.server.render
    monkeypatch.setattr(
        bench.server, "render", lambda ids: render(ids if len(ids) > 22 else [1, *ids])
    )
    code, printed = bench.run("--show", 1, records=[CHAT])
    assert code == 0 and f"message 1 of row 0 {DIFFERENTLY}" in printed, printed


@pytest.mark.parametrize("status", [400, 422])
def test_conversation_with_a_refused_prefix_is_shown_without_that_loss(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A template may require a message of the user before an answer."""
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": "a"},
            *CHAT["messages"],
        ]
    }
    render = bench.server.render
    monkeypatch.setattr(
        bench.server,
        "render",
        lambda ids: render(ids) if b"<user>" in bytes(ids) else (status, {"error": "no question"}),
    )
    code, printed = bench.run("--show", 1, records=[chat])
    assert code == 0 and f"message 1 of row 0 {DIFFERENTLY}" in printed, printed
    assert "<system>s<assistant>a<user>Why?<assistant>[[So.]]" in printed


def test_continued_final_message_is_shown_open(bench: Bench) -> None:
    code, printed = bench.run("--show", 1, records=[CHAT | {"continue_final_message": True}])
    assert code == 0 and "<user>Why?<assistant>[[So.]]" in printed, printed
    assert [
        seen["continue_final_message"]
        for seen in bench.server.rendered
        if "continue_final_message" in seen
    ] == [True, False, True]


@pytest.mark.parametrize("answer", [(404, {"detail": "Not Found"}), (200, {"other": 1}), (200, [])])
def test_server_that_cannot_render_is_reported_and_the_run_continues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, object]
) -> None:
    monkeypatch.setattr(bench.server, "render", lambda ids: answer)
    code, printed = bench.run("--show", 1, records=[CHAT])
    assert code == 0 and "cannot show rows: " in printed, printed


def test_a_second_bos_token_is_reported_once_with_the_option(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Seen, "token_ids", property(lambda seen: list(b"x" + seen.body["prompt"].encode()))
    )
    records = [{"prompt": f"xtext {row}"} for row in range(4)]
    _, printed = bench.run(records=records)
    assert (
        printed.count("texts that begin with x get a second x; ") == 1
        and "add --no-special-tokens" in printed
    )
    assert all("add_special_tokens" not in seen.body for seen in bench.server.seen)


@pytest.mark.parametrize(
    ("text", "ids", "is_noted"),
    [
        ("xa", b"xxa", True),
        ("xxa", b"xxa", False),
        ("x", b"x", False),
        ("ax", b"xax", False),
        ("b", b"xx", False),
    ],
)
def test_only_texts_with_a_bos_token_are_reported(
    bench: Bench, text: str, ids: bytes, is_noted: bool
) -> None:
    async def note() -> str:
        async with Client(Options("", bench.output)) as client:
            return await second_bos(client, bench.server.url, "tiny", text, list(ids))

    assert bool(asyncio.run(note())) == is_noted
