"""Send requests to `vllm serve`, and classify answers and failures."""

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
LONGEST_DELAY_S = 60.0  # upper bound of a delay, and of a server's Retry-After
_SHOWN = 300  # longest part of a server's message to show
# Status codes of vLLM and its web framework for an invalid request. Any server would refuse it.
_REFUSALS = (400, 413, 422)
_UNAUTHORIZED = (401, 403)
# Status codes of temporary problems.
_MAY_PASS = (408, 409, 425, 429)
# Class names in httpx and httpx2 of errors that mean that no request was sent.
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
        expected: tokens that the file must hold.
        reused: number of prompt tokens whose rows were copied from an earlier file.
        text: the generated text.
        output: ids of all generated tokens. The last has no row.
        finish_reason: vLLM's reason for the end of the text; "" if there is none.
        request_id: id of the request. The file's metadata has it, too.
    """

    expected: Expected
    reused: int
    text: str = ""
    output: list[int] = []  # noqa: RUF012 (never changed)
    finish_reason: str = ""
    request_id: str = ""


def check_url(url: str) -> None:
    """Raise InputError if the URL of an endpoint is invalid."""
    problem = "invalid host or port"
    try:
        parsed = urlsplit(url)
        possible = (
            bool(parsed.hostname) and parsed.port != 0 and url.isprintable() and " " not in url
        )
        (parsed.hostname or "").encode("idna")  # as the resolver does
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
            # The client would notice an invalid port only when it connects.
            for proxy in getproxies().values():
                _ = urlsplit(proxy if "://" in proxy else f"http://{proxy}").port
            timeout = openai.Timeout(
                options.request_timeout, connect=min(CONNECT_S, options.request_timeout)
            )
            self._openai = openai.AsyncOpenAI(
                base_url="http://localhost",
                api_key=options.api_key or "none",
                timeout=timeout,
                max_retries=0,  # a retry may go to another endpoint
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
        except Exception as error:  # errors about proxies and certificates have no common class
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
            InputError: the server does not serve `--model`.
        """
        answer = await self._exchange(url, "v1/models", None)
        try:
            names = ["" + model["id"] for model in answer["data"]]  # TypeError unless it is a text
        except (KeyError, TypeError):
            raise RequestError(
                f"unexpected response of {url}/v1/models: {shown(answer)}", Failure.UNREACHED
            ) from None
        model = self._options.model or next(iter(names), "")
        if model not in names:
            served = ", ".join(names) or "nothing"
            raise InputError(
                f"{url} serves {served}, not {model or 'a model'}; give a served model's name "
                "with --model"
            )
        return model

    async def ask(self, url: str, model: str, row: Row, path: str, identity: str) -> Answer:
        """Request a row.

        Args:
            url: URL of the endpoint.
            model: the model's name there.
            row: the row to send.
            path: path of the row's file on the server's machine.
            identity: identity of the row.

        Raises:
            RequestError: there is no answer, or it does not name this row's file.
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
        if "seed" in body:  # one seed for all rows would give them the same random numbers
            body["seed"] = (body["seed"] + int(identity[:15], 16)) % 2**63
        answer = _read(url, await self.post(url, f"v1/{row.endpoint}", body), row, path)._replace(
            request_id=request_id
        )
        if not options.include_output:
            return answer._replace(expected=Expected(answer.expected.prompt, []))
        return answer

    async def post(self, url: str, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request to `{url}/{path}` and return the parsed answer. Raises like `ask`."""
        return await self._exchange(url, path, body)

    async def _exchange(self, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
        where, seconds = f"{url}/{path}", self._options.request_timeout
        try:
            request = (
                self._openai.get(where, cast_to=object)
                if body is None
                else self._openai.post(where, cast_to=object, body=body)
            )
            answer = await asyncio.wait_for(request, seconds)  # limits the whole answer
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
            raise RequestError(f"{where} did not return JSON: {shown(words(error))}") from error
        if isinstance(answer, str):
            raise RequestError(f"{where} did not return JSON: {shown(answer)}")
        return answer


def _broken(where: str, error: openai.APIConnectionError) -> Exception:
    """Return the error for a connection that failed or broke."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        remedy = (
            f"set {' or '.join(_CERTIFICATES)} to the certificate or the authority's, and use a "
            "host name of the certificate in --endpoint"
        )
        return InputError(
            f"{where}: the certificate is not trusted: {cause.verify_message}; {remedy}"
        )
    if _names_of_causes(error) & set(_NOT_SENT):
        return RequestError(f"{where}: {words(error)}", Failure.UNREACHED)
    return RequestError(f"{where}: the connection broke: {words(error)}", Failure.BROKEN)


def _refused(where: str, error: openai.APIStatusError, is_row: bool) -> Exception:
    """Return the error for an answer with a status other than 200."""
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
        seconds = float(headers["Retry-After"])  # HTTP also allows a date; ignored
    except (KeyError, ValueError):
        return None
    return min(seconds, LONGEST_DELAY_S) if seconds >= 0 else None


def _read(url: str, answer: Any, row: Row, path: str) -> Answer:
    """Validate the answer to a request for a row. It may be any JSON."""
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
            f"{url} refuses the path of a row's file: {shown(error)}; set --output to --out of "
            "`hsx serve` or a folder below it; if the directory has another path on the server's "
            "machine, add --map-path SERVER=HERE"
        )
    if error:
        raise RequestError(
            f"the server could not store the hidden states: {shown(error)}", Failure.UNSTORED
        )
    if not isinstance(named, str) or not named:
        hint = "was the server started with hidden-state extraction?"
        raise RequestError(
            f"the answer names no file (kv_transfer_params: {shown(params)}); {hint}",
            Failure.ABSENT,
        )
    if os.path.normpath(named) != os.path.normpath(path):
        reason = (
            f"the answer names the file {shown(named)} instead of {path}; does a proxy mix up "
            "answers?"
        )
        raise RequestError(reason, Failure.UNCLEAR)
    if not _are_token_ids(prompt) or not _are_token_ids(output):
        raise RequestError("the answer has no token ids, in spite of return_token_ids")
    reused = params.get(REUSED_KEY)  # a statistic only: an invalid value counts as 0
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
    """Return the class names of an error and of all causes."""
    names = set()
    while error is not None:
        names |= {each.__name__ for each in type(error).__mro__}
        error = error.__cause__ or error.__context__
    return names


def words(error: BaseException | None) -> str:
    """Return the message of the deepest cause. The client's own message has no details."""
    message = type(error).__name__
    while error is not None:
        message = str(error) or message
        error = error.__cause__ or error.__context__
    return message


def shown(value: object) -> str:
    """Return a server's message in one line, shortened. Other values become JSON."""
    try:
        text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    except RecursionError:
        text = "a value nested too deeply"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
