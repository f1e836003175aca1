"""Send one request to `vllm serve`, and classify its answer or failure."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from vllm_ascend_hsx.generate.errors import Fault, InputError, RequestError, UnauthorizedError
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import CHAT, Row
from vllm_ascend_hsx.protocol.api import ERROR_KEY, PATH_KEY, REUSED_KEY, refuses_path
from vllm_ascend_hsx.protocol.strict_json import parse
from vllm_ascend_hsx.reader.check import Expected

CONNECT_S = 10.0
LONGEST_DELAY_S = 60.0  # before another attempt, whatever a server asks for
# Bytes. An answer has the ids of all tokens, in 8 bytes each at most (`200000,`), and the text of
# the generated ones: the longest context of any model, of ten million tokens, makes 80 MB.
LARGEST_ANSWER = 256 << 20
_SHOWN = 300  # most characters of a server's message
# Answers to an invalid request, which any server would repeat: vLLM's validation and web framework.
# Others, such as 404 for a model's name, are the server's own fault, or a proxy's.
_REFUSALS = frozenset((400, 413, 422))
# Answers to the request for the list of models, which every `vllm serve` has.
_NO_SERVER = frozenset(range(400, 500)) - {408, 409, 425, 429}
_UNAUTHORIZED = (401, 403)
# Environment variables that httpx reads; those of proxies also in capitals.
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


class _Reply(NamedTuple):
    """A response that was read to its end."""

    status: int
    phrase: str
    headers: httpx.Headers
    content: bytes


class Answer(NamedTuple):
    """What a server answers.

    Attributes:
        expected: the tokens that the file must hold.
        reused: number of prompt tokens whose rows were copied from an earlier file.
    """

    expected: Expected
    reused: int


def check_url(url: str) -> None:
    """Raise InputError if no request can be sent to an endpoint."""
    problem = "there is no such host or port"
    try:
        parsed = httpx.URL(url)
        possible = parsed.host and (parsed.port is None or 0 < parsed.port < 2**16)
        parsed.host.encode("idna")  # as the system is asked for it
    except (httpx.InvalidURL, ValueError) as error:
        problem, possible = str(error), False
    if not possible:
        remedy = "give the URL of a server, such as http://localhost:8000"
        raise InputError(f"--endpoint {_shown(url)}: {_shown(problem)}; {remedy}")


class Client:
    """An HTTP client for all endpoints. Use as an asynchronous context manager."""

    def __init__(self, options: Options) -> None:
        self._options = options
        key = options.api_key
        try:
            self._http = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                # `_send` limits the time of the whole answer.
                timeout=httpx.Timeout(None, connect=min(CONNECT_S, options.request_timeout)),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            )
            _check_proxy_ports()
        except (ImportError, ValueError, httpx.InvalidURL, OSError) as error:
            raise InputError(_environment_problem(error)) from error

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self, url: str) -> str:
        """Return the model's name on a server.

        Raises:
            RequestError: the server cannot be reached, or is not ready.
            InputError: the server does not serve that model.
        """
        try:
            answer = await self._send("GET", f"{url}/v1/models")
        except RequestError as error:
            if error.again:
                raise _unreached(error.reason, error.retry_after) from error
            remedy = "give --endpoint the URL of a `vllm serve` with hidden-state extraction"
            raise InputError(f"{error.reason}; {remedy}") from error
        try:
            names = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError):
            names = [None]
        if not all(isinstance(name, str) for name in names):
            raise _unreached(f"{url}/v1/models answers {_shown(answer)}")
        model = self._options.model or next(iter(names), "")
        if model not in names:
            served = ", ".join(names) or "nothing"
            wanted = model or "a model"
            raise InputError(f"{url} serves {served}, and not {wanted}; name one with --model")
        return str(model)

    async def ask(self, url: str, model: str, row: Row, path: str, request_id: str) -> Answer:
        """Request a row.

        Args:
            url: of the endpoint.
            model: its name there.
            row: to send.
            path: of the row's file, on the server's machine.
            request_id: unique.

        Raises:
            RequestError: there is no answer, or it names no hidden states of this row.
            InputError: the server refuses the file's path, or needs a key.
        """
        options = self._options
        body = row.body(model, options.tokens_to_generate, options.include_output_tokens, path) | {"request_id": request_id}
        answer = await self._send("POST", f"{url}/v1/{row.endpoint}", body)
        prompt, output, reused = _read(url, answer, row, path)
        # The last generated token has no row: it was never an input of the model.
        output = output[:-1] if options.include_output_tokens else []
        return Answer(Expected(prompt if row.token_ids is None else row.token_ids, output), reused)

    async def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        seconds = self._options.request_timeout
        try:
            # Serialized here, in ASCII: a path need not be valid UTF-8, as httpx requires.
            content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            reply = await asyncio.wait_for(self._exchange(method, url, content), seconds)
        except (asyncio.TimeoutError, httpx.ReadTimeout) as error:
            raise RequestError(f"{url} did not answer within {seconds:g} s", lost=True) from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if (distrust := _distrust_of(error)) is not None:
                raise InputError(f"{url}: {distrust}") from error
            raise _unreached(f"{url}: {_words(error)}") from error
        except httpx.UnsupportedProtocol as error:
            raise InputError(f"--endpoint {url}: {error}") from error
        except (httpx.InvalidURL, ValueError) as error:  # httpx parses it, and does not follow it
            raise RequestError(f"{url} answers a redirect to what is no URL: {_words(error)}") from error
        except httpx.HTTPError as error:
            raise RequestError(f"{url}: the connection broke: {_words(error)}", fault=Fault.DOWN, lost=True) from error
        if reply.status != 200:
            raise _refused(url, reply, _NO_SERVER if body is None else _REFUSALS)
        try:
            return parse(reply.content)
        except ValueError as error:
            raise RequestError(f"{url} answers no JSON: {_shown(_text(reply))} ({error})") from error

    async def _exchange(self, method: str, url: str, content: bytes | None) -> _Reply:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream(method, url, content=content, headers=headers) as response:
            received = bytearray()
            async for block in response.aiter_bytes():
                received += block
                if len(received) > LARGEST_ANSWER:
                    problem = f"{url} answers more than {LARGEST_ANSWER >> 20} MiB, which no vLLM does; is it a proxy's error?"
                    raise RequestError(problem, lost=True)
            return _Reply(response.status_code, response.reason_phrase, response.headers, bytes(received))


def _check_proxy_ports() -> None:
    """Raise ValueError if a proxy has no possible port: httpx finds out when it connects."""
    for scheme, proxy in getproxies().items():
        if scheme in ("http", "https", "all"):
            _ = urlsplit(proxy if "://" in proxy else f"http://{proxy}").port


def _environment_problem(error: Exception) -> str:
    """Return why httpx accepts no proxy or certificate; only environment variables name them."""
    names = _CERTIFICATES if isinstance(error, OSError) else {*_PROXIES, *map(str.upper, _PROXIES)}
    found = ", ".join(sorted(name for name in names if os.environ.get(name)))
    return f"{found}: {_words(error)}; correct or unset it"


def _distrust_of(error: BaseException) -> str | None:
    """Return why a server's certificate is not accepted, and what to do; None for other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    names = " or ".join(_CERTIFICATES)
    remedy = f"name it, or that of its authority, in {names}, and the endpoint by a name that it has"
    return f"its certificate is not trusted: {cause.verify_message}; {remedy}"


def _unreached(reason: str, retry_after: float | None = None) -> RequestError:
    return RequestError(reason, fault=Fault.DOWN, retry_after=retry_after)


def _refused(url: str, reply: _Reply, refusals: frozenset[int]) -> Exception:
    status = reply.status
    place = f" (to {_shown(reply.headers['Location'])})" if "Location" in reply.headers else ""
    reason = f"{url} answers {status}{place}: {_message(reply)}"
    if status in _UNAUTHORIZED:
        return UnauthorizedError(f"{reason}; give the server's key with --api-key or in OPENAI_API_KEY")
    if status in refusals:
        return RequestError(reason, again=False, fault=Fault.NONE)
    return RequestError(reason, retry_after=_retry_after(reply))


def _message(reply: _Reply) -> str:
    """Return the server's reason: the message of OpenAI's error object, or the body."""
    try:
        error = parse(reply.content)["error"]
        return _shown(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return _shown(_text(reply)) or reply.phrase


def _text(reply: _Reply) -> str:
    """Decode the body as UTF-8: httpx would accept any of Python's codecs, such as hex."""
    return reply.content.decode(errors="replace")


def _retry_after(reply: _Reply) -> float | None:
    try:
        seconds = float(reply.headers["Retry-After"])  # a date, which HTTP also allows, is ignored
    except (KeyError, ValueError):
        return None
    return min(seconds, LONGEST_DELAY_S) if seconds >= 0 else None


def _read(url: str, answer: Any, row: Row, path: str) -> tuple[list[int], list[int], int]:
    """Return the token ids of prompt and output, and the number of reused tokens.

    The answer may be anything.
    """
    try:
        params = answer.get("kv_transfer_params") or {}
        choice = answer["choices"][0]
        prompt = (answer if row.endpoint == CHAT else choice)["prompt_token_ids"]
        output = choice.get("token_ids") or []
        error, named = params.get(ERROR_KEY), params.get(PATH_KEY)
        error = error if isinstance(error, str | None) else _shown(error)
    except (KeyError, IndexError, TypeError, AttributeError) as problem:
        raise RequestError(f"the answer is not what vLLM's looks like: {_shown(answer)}") from problem
    if error and refuses_path(error):
        raise InputError(
            f"{url} refuses the path of a row's file: {_shown(error)}; `hsx serve` allows paths "
            "below its --out: name that, or a folder below it, with --output, and if it has "
            "another name on the server's machine, pass --map-path SERVER=HERE"
        )
    if error:
        raise RequestError(f"the server could not store the hidden states: {_shown(error)}", lost=True)
    if not isinstance(named, str) or not named:
        hint = "was the server started with hidden-state extraction?"
        raise RequestError(f"the answer names no file (kv_transfer_params are {_shown(params)}); {hint}", missing=True)
    if os.path.normpath(named) != os.path.normpath(path):
        reason = f"the answer names the file {_shown(named)} instead of {path}; does a proxy mix up answers?"
        raise RequestError(reason, lost=True)
    if not _are_token_ids(prompt) or not _are_token_ids(output):
        raise RequestError("the answer has no token ids, although they were asked for with return_token_ids")
    reused = params.get(REUSED_KEY)  # only counted: no reason to refuse a file
    return prompt, output, reused if type(reused) is int and 0 <= reused <= len(prompt) else 0


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and (not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**63))


def _words(error: BaseException) -> str:
    """Return an error's message, or that of its cause: httpx passes on empty ones."""
    while not str(error) and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__


def _shown(value: object) -> str:
    """Return a server's message in one line, shortened; other values as JSON."""
    try:
        text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    except RecursionError:
        text = "something that nests too deep"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
