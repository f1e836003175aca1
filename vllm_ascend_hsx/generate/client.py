"""Send one request to `vllm serve`, and classify its answer or failure."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import openai

from vllm_ascend_hsx.generate.errors import Failure, InputError, RequestError, UnauthorizedError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import CHAT, Row
from vllm_ascend_hsx.protocol.api import (
    ERROR_KEY,
    EXTRACT_KEY,
    OUTPUT_KEY,
    PATH_KEY,
    REUSED_KEY,
    refuses_path,
)
from vllm_ascend_hsx.reader.check import Expected

CONNECT_S = 10.0
LONGEST_DELAY_S = 60.0  # before another attempt, whatever a server asks for
_SHOWN = 300  # most characters of a server's message
# Answers to an invalid request, which any server would repeat: vLLM's validation and web framework.
_REFUSALS = (400, 413, 422)
_UNAUTHORIZED = (401, 403)
# Answers that may be other ones later.
_MAY_PASS = (408, 409, 425, 429)
# Causes of a failed connection, by their names in httpx and its successor: no request was sent.
_NOT_SENT = ("ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = [
    name
    for each in ("http", "https", "all", "no")
    for name in (f"{each}_proxy", f"{each.upper()}_PROXY")
]


class Answer(NamedTuple):
    """The answer of a server.

    Attributes:
        expected: the tokens that the file must hold.
        reused: number of prompt tokens whose rows were copied from an earlier file.
        text: that was generated.
        output: ids of all generated tokens. The last one has no row.
        finish_reason: why the text ends, as vLLM names it; "" if it does not.
        request_id: of the request. The file's metadata has it, too.
    """

    expected: Expected
    reused: int
    text: str = ""
    output: list[int] = []  # noqa: RUF012 (never changed)
    finish_reason: str = ""
    request_id: str = ""


def check_url(url: str) -> None:
    """Raise InputError if no request can be sent to an endpoint."""
    problem = "there is no such host or port"
    try:
        parsed = urlsplit(url)
        possible = (
            bool(parsed.hostname) and parsed.port != 0 and url.isprintable() and " " not in url
        )
        (parsed.hostname or "").encode("idna")  # as the system is asked for it
    except ValueError as error:
        problem, possible = str(error), False
    if not possible:
        raise InputError(
            f"--endpoint {shown(url)}: {shown(problem)}; give the URL of a server, such as "
            "http://localhost:8000"
        )


class Client:
    """A client for all endpoints. Use as an asynchronous context manager."""

    def __init__(self, options: Options) -> None:
        self._options = options
        try:
            for (
                proxy
            ) in getproxies().values():  # the client finds an impossible port when it connects
                _ = urlsplit(proxy if "://" in proxy else f"http://{proxy}").port
            timeout = openai.Timeout(
                options.request_timeout, connect=min(CONNECT_S, options.request_timeout)
            )
            self._openai = openai.AsyncOpenAI(
                base_url="http://localhost",
                api_key=options.api_key or "none",
                timeout=timeout,
                max_retries=0,  # a row that failed goes to another endpoint, unknown to the client
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
        except (
            Exception
        ) as error:  # there is no common class of errors about proxies and certificates
            names = _CERTIFICATES if isinstance(error, OSError) else _PROXIES
            found = ", ".join(sorted(name for name in names if os.environ.get(name)))
            raise InputError(f"{found}: {words(error)}; correct or unset it") from error

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._openai.close()

    async def model(self, url: str) -> str:
        """Return the model's name on a server.

        Raises:
            RequestError: the server cannot be reached, or is not ready.
            InputError: the server does not serve that model.
        """
        answer = await self._exchange(url, "v1/models", None)
        try:
            names = [
                "" + model["id"] for model in answer["data"]
            ]  # a TypeError for anything but a text
        except (KeyError, TypeError):
            raise RequestError(
                f"{url}/v1/models answers {shown(answer)}", Failure.UNREACHED
            ) from None
        model = self._options.model or next(iter(names), "")
        if model not in names:
            served = ", ".join(names) or "nothing"
            raise InputError(
                f"{url} serves {served}, and not {model or 'a model'}; name one with --model"
            )
        return model

    async def ask(self, url: str, model: str, row: Row, path: str, identity: str) -> Answer:
        """Request a row.

        Args:
            url: of the endpoint.
            model: its name there.
            row: to send.
            path: of the row's file, on the server's machine.
            identity: of the row.

        Raises:
            RequestError: there is no answer, or it names no hidden states of this row.
            InputError: the server refuses the file's path, or needs a key.
        """
        options, request_id = self._options, f"{identity}-{uuid.uuid4().hex[:12]}"
        body = {
            "model": model,
            "return_token_ids": True,
            **row.prompt(),
            **options.request,
            "request_id": request_id,
            "kv_transfer_params": {
                EXTRACT_KEY: True,
                OUTPUT_KEY: options.include_output,
                PATH_KEY: path,
            },
        }
        if "seed" in body:  # the same for all rows would give all of them the same random numbers
            body["seed"] = (body["seed"] + int(identity[:15], 16)) % 2**63
        answer = _read(url, await self.post(url, f"v1/{row.endpoint}", body), row, path)._replace(
            request_id=request_id
        )
        if not options.include_output:
            return answer._replace(expected=Expected(answer.expected.prompt, []))
        return answer

    async def post(self, url: str, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request to `{url}/{path}`, and return the parsed answer. Raises like `ask`."""
        return await self._exchange(url, path, body)

    async def _exchange(self, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
        where, seconds = f"{url}/{path}", self._options.request_timeout
        try:
            request = (
                self._openai.get(where, cast_to=object)
                if body is None
                else self._openai.post(where, cast_to=object, body=body)
            )
            answer = await asyncio.wait_for(request, seconds)  # of the whole answer
        except (openai.APITimeoutError, asyncio.TimeoutError) as error:
            sent = (
                Failure.UNREACHED
                if _names_of_causes(error) & {"ConnectTimeout"}
                else Failure.UNCLEAR
            )
            raise RequestError(f"{where} did not answer within {seconds:g} s", sent) from error
        except openai.APIConnectionError as error:
            raise _broken(where, error) from error
        except openai.APIStatusError as error:
            raise _refused(where, error, is_row=body is not None) from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} answers no JSON: {shown(words(error))}") from error
        if isinstance(answer, str):
            raise RequestError(f"{where} answers no JSON: {shown(answer)}")
        return answer


def _broken(where: str, error: openai.APIConnectionError) -> Exception:
    """Return the error of a connection that could not be made, or that broke."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        remedy = (
            f"name it, or that of its authority, in {' or '.join(_CERTIFICATES)}, and the "
            "endpoint by a name that it has"
        )
        return InputError(
            f"{where}: its certificate is not trusted: {cause.verify_message}; {remedy}"
        )
    if _names_of_causes(error) & set(_NOT_SENT):
        return RequestError(f"{where}: {words(error)}", Failure.UNREACHED)
    return RequestError(f"{where}: the connection broke: {words(error)}", Failure.BROKEN)


def _refused(where: str, error: openai.APIStatusError, is_row: bool) -> Exception:
    """Return the error of an answer with another status than 200."""
    status, headers = error.status_code, error.response.headers
    body = error.body.get("message", error.body) if isinstance(error.body, dict) else error.body
    reason = f"{where} answers {status}: {shown(body or error.response.reason_phrase)}"
    if status in _UNAUTHORIZED:
        return UnauthorizedError(
            f"{reason}; give the server's key with --api-key or in OPENAI_API_KEY"
        )
    if status in _REFUSALS and is_row:
        return RequestError(reason, Failure.REFUSED)
    if not is_row and 400 <= status < 500 and status not in _MAY_PASS:
        return InputError(
            f"{reason}; give --endpoint the URL of a `vllm serve` with hidden-state extraction"
        )
    failure = Failure.GONE if status == 404 else Failure.WRONG if is_row else Failure.UNREACHED
    return RequestError(reason, failure, retry_after=_retry_after(headers))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers["Retry-After"])  # a date, which HTTP also allows, is ignored
    except (KeyError, ValueError):
        return None
    return min(seconds, LONGEST_DELAY_S) if seconds >= 0 else None


def _read(url: str, answer: Any, row: Row, path: str) -> Answer:
    """Return the answer to a request for a row. It may be any JSON."""
    try:
        params = answer.get("kv_transfer_params") or {}
        choice = answer["choices"][0]
        prompt = (answer if row.endpoint == CHAT else choice)["prompt_token_ids"]
        output = choice.get("token_ids") or []
        text = (
            (choice.get("message") or {}).get("content")
            if row.endpoint == CHAT
            else choice.get("text")
        )
        error, named = params.get(ERROR_KEY), params.get(PATH_KEY)
        error = error if isinstance(error, str | None) else shown(error)
    except (KeyError, IndexError, TypeError, AttributeError) as problem:
        raise RequestError(f"unexpected response format: {shown(answer)}") from problem
    if error and refuses_path(error):
        raise InputError(
            f"{url} refuses the path of a row's file: {shown(error)}; `hsx serve` allows paths "
            "below its --out: name that, or a folder below it, with --output, and if it has "
            "another name on the server's machine, pass --map-path SERVER=HERE"
        )
    if error:
        raise RequestError(
            f"the server could not store the hidden states: {shown(error)}", Failure.UNSTORED
        )
    if not isinstance(named, str) or not named:
        hint = "was the server started with hidden-state extraction?"
        raise RequestError(
            f"the answer names no file (kv_transfer_params are {shown(params)}); {hint}",
            Failure.ABSENT,
        )
    if os.path.normpath(named) != os.path.normpath(path):
        reason = (
            f"the answer names the file {shown(named)} instead of {path}; does a proxy mix up "
            "answers?"
        )
        raise RequestError(reason, Failure.UNCLEAR)
    if not _are_token_ids(prompt) or not _are_token_ids(output):
        raise RequestError(
            "the answer has no token ids, although they were asked for with return_token_ids"
        )
    reused = params.get(REUSED_KEY)  # only counted: no reason to refuse a file
    reused = reused if type(reused) is int and 0 <= reused <= len(prompt) else 0
    expected = Expected(prompt if row.token_ids is None else row.token_ids, output[:-1])
    return Answer(
        expected,
        reused,
        text if isinstance(text, str) else "",
        output,
        str(choice.get("finish_reason") or ""),
    )


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and (
        not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**63)
    )


def _names_of_causes(error: BaseException | None) -> set[str]:
    """Return the names of an error's class and of its causes'."""
    names = set()
    while error is not None:
        names |= {each.__name__ for each in type(error).__mro__}
        error = error.__cause__ or error.__context__
    return names


def words(error: BaseException | None) -> str:
    """Return the message of an error's deepest cause. The client's own message tells nothing."""
    message = type(error).__name__
    while error is not None:
        message = str(error) or message
        error = error.__cause__ or error.__context__
    return message


def shown(value: object) -> str:
    """Return a server's message in one line, shortened; other values as JSON."""
    try:
        text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    except RecursionError:
        text = "something that nests too deep"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
