"""One request to `vllm serve`, and what its answer, or the lack of one, means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from vllm_ascend_hsx.generate.backoff import LONGEST
from vllm_ascend_hsx.generate.errors import Fault, InputError, NoFileError, RequestError, RunError
from vllm_ascend_hsx.generate.names import is_path, row_file
from vllm_ascend_hsx.generate.rows import CHAT, Row
from vllm_ascend_hsx.protocol.api import ERROR_KEY, PATH_KEY, PATH_OPTION
from vllm_ascend_hsx.protocol.strict_json import parse

CONNECT_SECONDS = 10.0
_SHOWN = 300  # characters of a server's words
# What a server that is well says of a request that is not; it would say the same again.
_REFUSALS = frozenset(range(300, 500)) - {408, 409, 425, 429}
_CLOSED_TO_US = (401, 403)


class Answer(NamedTuple):
    """What a server says of a row.

    Attributes:
        path: of the file, on the server's machine.
        prompt: token ids.
        output: ids of the generated tokens.
    """

    path: str
    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True)
class Asking:
    """What is the same in every request.

    Attributes:
        max_tokens: to generate.
        include_output: whether their rows are wanted.
        named: the server gives each row's file the name that it is to keep.
    """

    max_tokens: int = 1
    include_output: bool = False
    named: bool = False


def check_url(url: str) -> None:
    """Raises InputError: no request can be sent there."""
    try:
        parsed = httpx.URL(url)
        possible = parsed.host and (parsed.port is None or 0 < parsed.port < 2**16)
        parsed.host.encode("idna")  # as the system is asked for it
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"--endpoint {url}: {error}; give the URL of a server, such as http://localhost:8000") from error
    if not possible:
        raise InputError(f"--endpoint {url}: there is no such host or port; give the URL of a server, such as http://localhost:8000")


class Client:
    """Sends requests. Use as an asynchronous context manager.

    Args:
        timeout: seconds for an answer.
        api_key: sent as a bearer token.
    """

    def __init__(self, timeout: float, api_key: str | None = None) -> None:
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # The whole answer has one time limit, kept by us.
            timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._http.aclose()

    async def models(self, url: str) -> list[str]:
        """What the server calls its models. Raises RequestError."""
        answer = await self._send("GET", f"{url}/v1/models")
        try:
            names = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError):
            names = [None]
        if not all(isinstance(name, str) for name in names):
            raise RequestError(f"{url}/v1/models answers {_shown(answer)}", fault=Fault.ILL)
        return names

    async def ask(self, url: str, model: str, row: Row, name: str, asking: Asking) -> Answer:
        """Send a row.

        Args:
            url: of the endpoint.
            model: as the server calls it.
            row: what to send.
            name: of the request; its file's name can be told from it.
            asking: for what.

        Raises:
            RequestError: there is no answer, or none that leads to hidden states of this row.
        """
        body = row.body(model, asking.max_tokens, asking.include_output, row_file(row.index) if asking.named else None)
        answer = await self._send("POST", f"{url}/v1/{row.endpoint}", body, name)
        return _read(answer, row)

    async def _send(self, method: str, url: str, body: dict[str, Any] | None = None, name: str = "") -> Any:
        headers = {"X-Request-Id": name} if name else {}
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            response = await asyncio.wait_for(self._http.request(method, url, content=content, headers=headers), self._timeout)
        except (asyncio.TimeoutError, httpx.ReadTimeout) as error:
            raise RequestError(f"{url} did not answer within {self._timeout:g} s", fault=Fault.ILL, lost=True) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RequestError(f"{url}: {_words(error)}", fault=Fault.DOWN) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise RunError(f"--endpoint {url}: {error}") from error
        except httpx.HTTPError as error:
            raise RequestError(f"{url}: the connection broke: {_words(error)}", fault=Fault.DOWN, lost=True) from error
        if response.status_code != 200:
            raise _refused(url, response)
        try:
            return parse(response.content)
        except ValueError as error:
            raise RequestError(f"{url} answers no JSON: {_shown(_text(response))} ({error})", fault=Fault.ILL) from error


def _refused(url: str, response: httpx.Response) -> Exception:
    status = response.status_code
    reason = f"{url} answers {status}: {_message(response)}"
    if status in _CLOSED_TO_US:
        return RunError(f"{reason}; give the server's key with --api-key or in OPENAI_API_KEY")
    if status in _REFUSALS:
        return RequestError(reason, again=False)
    return RequestError(reason, fault=Fault.ILL, retry_after=_retry_after(response))


def _message(response: httpx.Response) -> str:
    """The server's reason: of OpenAI's error object, or as it stands there."""
    try:
        error = parse(response.content)["error"]
        return _shown(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return _shown(_text(response)) or response.reason_phrase


def _text(response: httpx.Response) -> str:
    """The body as text, whatever charset the answer names: httpx would take every codec of Python's, such as hex."""
    return response.content.decode(errors="replace")


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers["Retry-After"])  # a date, which is allowed too, is passed over
    except (KeyError, ValueError):
        return None
    return min(seconds, LONGEST) if seconds >= 0 else None


def _read(answer: Any, row: Row) -> Answer:
    try:
        params = answer.get("kv_transfer_params") or {}
        choice = answer["choices"][0]
        prompt = (answer if row.endpoint == CHAT else choice)["prompt_token_ids"]
        output = choice.get("token_ids") or []
        error, path = params.get(ERROR_KEY), params.get(PATH_KEY)
        error = error if isinstance(error, str | None) else _shown(error)
    except (KeyError, IndexError, TypeError, AttributeError) as problem:
        raise RequestError(f"the answer is not what vLLM's looks like: {_shown(answer)}", fault=Fault.ILL) from problem
    if error and PATH_OPTION in error:
        raise RunError(f"--in-place: the server does not let requests name their files: {_shown(error)}")
    if error:
        raise RequestError(f"the server could not store the hidden states: {_shown(error)}", fault=Fault.ILL)
    if not isinstance(path, str) or not path:
        raise NoFileError(
            f"the answer names no file (kv_transfer_params are {_shown(params)}); was the server started with hidden-state extraction?",
            fault=Fault.ILL,
        )
    if not is_path(path):
        raise RequestError(f"the answer names {_shown(path)}, which no system takes for a path", fault=Fault.ILL, lost=True)
    if not _are_token_ids(prompt) or not _are_token_ids(output):
        raise RequestError("the answer has no token ids, although they were asked for with return_token_ids", fault=Fault.ILL)
    sent = row.token_ids
    if sent is not None and prompt != sent.tolist():
        raise RequestError(
            f"the server computed other tokens than were sent: {len(prompt)} instead of {len(sent)}"
            if len(prompt) != len(sent)
            else f"the server computed other tokens than were sent, from position {_first_difference(prompt, sent)} on",
            again=False,
        )
    return Answer(path, prompt, output)


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and (not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**63))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _shown(value: object) -> str:
    """A server's words, in one line; other values as JSON."""
    try:
        text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    except RecursionError:
        text = "something that nests too deep"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
