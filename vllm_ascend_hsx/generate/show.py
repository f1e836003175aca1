"""Show rows as tokens of the target with the loss mask, before the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_ascend_hsx.generate.client import Client
from vllm_ascend_hsx.generate.errors import Failure, InputError, RequestError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import tell
from vllm_ascend_hsx.generate.rows import CHAT, Row
from vllm_ascend_hsx.protocol.names import printable

_MOST = 2000  # characters of a row to show; the middle of longer rows is left out


async def show_rows(console: Console, options: Options, rows: Iterable[Row]) -> None:
    """Print rows as tokens, as rendered by the first server. Report a server that cannot render.

    Tokens with a loss, the assistant's messages, are between [[ and ]].

    Args:
        console: output for the rows.
        options: options of the run.
        rows: rows to show.
    """
    url = options.endpoints[0]
    async with Client(options) as client:
        try:
            model = await client.model(url)
            for row in rows:
                known = row.token_ids
                ids = (
                    known.tolist()
                    if known is not None
                    else await render(client, url, model, row.endpoint, row.prompt())
                )
                notes: list[str] = []
                spans = await _spans(client, url, model, row, ids, notes)
                text = await _marked(client, url, model, ids, spans)
                tell(
                    console,
                    (
                        f"row {row.index}: {len(ids):,} tokens, "
                        f"{sum(end - begin for begin, end in spans):,} of them with a loss"
                    ),
                )
                console.print(Text(text, "dim"), soft_wrap=True)
                for note in notes:
                    tell(console, note, "yellow")
        except (RequestError, InputError) as error:
            if isinstance(error, RequestError) and error.failure is Failure.UNREACHED:
                return  # the run itself reports it
            tell(console, f"cannot show rows: {error}", "yellow")


async def decode(client: Client, url: str, model: str, ids: Sequence[int]) -> str:
    """Return the text of token ids, including special tokens. Raises like `Client.post`."""
    answer = await client.post(url, "detokenize", {"model": model, "tokens": list(ids)})
    return str(answer["prompt"]) if isinstance(answer, dict) and "prompt" in answer else ""


async def render(
    client: Client, url: str, model: str, endpoint: str, body: dict[str, Any]
) -> list[int]:
    """Return the token ids of a prompt as a server renders it. Raises like `Client.post`."""
    answer = await client.post(
        url, f"v1/{endpoint}/render", {"model": model, "max_tokens": 1, **body}
    )
    try:
        return list((answer if endpoint == CHAT else answer[0])["token_ids"])
    except (LookupError, TypeError):
        raise RequestError(
            f"{url} does not render prompts; start vllm 0.30 or later with --enable-scale-out"
        ) from None


async def second_bos(client: Client, url: str, model: str, text: str, prompt: Sequence[int]) -> str:
    """Return a note for the user if a text with a BOS token got a second BOS token, else "".

    Args:
        client: client to decode the first token.
        url, model: URL of the server, and the model's name there.
        text: the text that was sent.
        prompt: token ids of the text, from the server.

    Raises:
        RequestError, InputError: the server does not decode tokens.
    """
    if len(prompt) < 2 or prompt[0] != prompt[1]:
        return ""
    first = await decode(client, url, model, prompt[:1])
    # If the text itself begins with two BOS tokens, the server has not added one.
    if not first or not text.startswith(first) or text.startswith(first * 2):
        return ""
    return (
        f"texts that begin with {first} get a second {first}; if a chat template has rendered "
        "them, add --no-special-tokens"
    )


async def _spans(
    client: Client, url: str, model: str, row: Row, ids: list[int], notes: list[str]
) -> list[tuple[int, int]]:
    """Return begin and end of each assistant's message among the tokens of a chat."""
    spans: list[tuple[int, int]] = []
    if not isinstance(row.content, list):
        return spans
    for turn, message in enumerate(row.content):
        if message.get("role") != "assistant":
            continue
        is_open = turn + 1 == len(row.content) and row.prompt().get("continue_final_message", False)
        before = {
            **row.prompt(),
            "messages": row.content[:turn],
            "add_generation_prompt": True,
            "continue_final_message": False,
        }
        after = {
            **before,
            "messages": row.content[: turn + 1],
            "add_generation_prompt": False,
            "continue_final_message": is_open,
        }
        try:
            begin = await render(client, url, model, row.endpoint, before) if turn else []
            end = await render(client, url, model, row.endpoint, after)
        except RequestError as error:
            if error.failure is not Failure.REFUSED:
                raise
            begin = end = [-1]  # matches no row
        if ids[: len(begin)] == begin and ids[: len(end)] == end:
            spans.append((len(begin), len(end)))
        else:
            notes.append(
                f"message {turn} of row {row.index} renders differently at the end of a "
                "conversation, so its loss is not shown"
            )
    return spans


async def _marked(
    client: Client, url: str, model: str, ids: list[int], spans: list[tuple[int, int]]
) -> str:
    """Return the text of a row in one line, with marks around the tokens with a loss."""
    parts, at = [], 0
    for begin, end in spans:
        parts += [
            await decode(client, url, model, ids[at:begin]),
            "[[",
            await decode(client, url, model, ids[begin:end]),
            "]]",
        ]
        at = end
    text = printable(
        "".join([*parts, await decode(client, url, model, ids[at:]) if at < len(ids) else ""])
    )
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
