"""The servers of a run: each is met with a trial request before it gets a row, then rows go to whichever has the least to do."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from vllm_ascend_hsx.generate.backoff import Backoff
from vllm_ascend_hsx.generate.client import Answer, Asking, Client
from vllm_ascend_hsx.generate.clock import Clock
from vllm_ascend_hsx.generate.collect import Collector
from vllm_ascend_hsx.generate.endpoints import Balancer, Endpoint
from vllm_ascend_hsx.generate.errors import Fault, InputError, NoFileError, RequestError, RunError
from vllm_ascend_hsx.generate.examine import ServerFacts
from vllm_ascend_hsx.generate.ledger import REMEDY, Ledger
from vllm_ascend_hsx.generate.names import RequestNames
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.rows import Row

_TRIAL = Row(0, array("q", [0]))  # the token with id 0 is in every vocabulary


class Answered(NamedTuple):
    """An answer, with where its file is here, and who gave it."""

    answer: Answer
    path: Path
    endpoint: str


class Servers:
    """Asks for rows.

    Args:
        options: of the run.
        client: sends the requests.
        collector: takes the files of trial requests.
        ledger: notes whose files these are.
        names: of the requests.
        executor: for what blocks.
        clock: for rests.
        on_down: called with a sentence when an endpoint is found to be down, and whether that leaves none that is well.

    Attributes:
        facts: what all files have in common; None until the first server was met.
        endpoints: in the order of the options.
    """

    def __init__(
        self,
        options: Options,
        client: Client,
        collector: Collector,
        ledger: Ledger,
        names: RequestNames,
        executor: Executor,
        clock: Clock,
        on_down: Callable[[str, bool], None],
    ) -> None:
        self.endpoints = [Endpoint(url) for url in options.endpoints]
        self.facts = None if ledger.content.server is None else ServerFacts.from_json(ledger.content.server)
        self._options = options
        self._client = client
        self._collector = collector
        self._ledger = ledger
        self._names = names
        self._executor = executor
        self._clock = clock
        self._on_down = on_down
        self._asking = Asking(options.tokens_to_generate, options.include_output_tokens, named=options.in_place)
        self._balancer = Balancer(self.endpoints, options.concurrency, options.retry_delay, clock)
        self._models: dict[str, str] = {}
        self._noted: set[str] = set()
        self._trials = 0

    async def meet(self, backoff: Backoff) -> None:
        """Try out every server; one that cannot be reached yet is met later, if there is another.

        Raises:
            InputError: a server is not what is needed.
            RunError: none can be reached.
        """
        meetings = [asyncio.ensure_future(self._meet_with_patience(endpoint, backoff)) for endpoint in self.endpoints]
        try:
            problems = await asyncio.gather(*meetings)
        finally:
            for meeting in meetings:
                meeting.cancel()
            await asyncio.gather(*meetings, return_exceptions=True)
        found = [problem for problem in problems if problem is not None]
        if len(found) == len(self.endpoints):
            raise RunError("; ".join(found))
        for problem in found:
            self._on_down(f"{problem}; it is tried again later", False)

    async def ask(self, row: Row, attempt: int) -> Answered:
        """Send a row, as soon as a server may be sent one.

        Args:
            row: what to send.
            attempt: its number, for the request's name.

        Raises:
            RequestError: the request failed. Only what was sent counts: a server that cannot be reached is left alone, and another tried.
            InputError, RunError: a server that was met only now is not what is needed.
        """
        while True:
            lease = await self._balancer.acquire()
            endpoint = lease.endpoint
            fault: Fault | None = None
            retry_after = None
            problem = ""
            sent = False
            try:
                if endpoint.url not in self._models:
                    await self._meet(endpoint)
                name, sent = self._names.row(row.index, attempt), True
                answer = await self._client.ask(endpoint.url, self._models[endpoint.url], row, name, self._asking)
                path = await self._place_of(answer, row.index)
                endpoint.known = True
                fault = Fault.NONE
                return Answered(answer, path, endpoint.url)
            except RunError as error:
                raise error if endpoint.known else InputError(str(error)) from error
            except RequestError as error:
                fault, retry_after, problem = error.fault, error.retry_after, error.reason
                if sent and (fault is not Fault.DOWN or error.lost):
                    raise
            finally:
                if self._balancer.release(lease, fault, retry_after):
                    rest = endpoint.rest_left(self._clock.now())
                    nobody_is_well = all(each.is_on_trial for each in self.endpoints)
                    self._on_down(f"{problem}; {endpoint.url} is left alone for {rest:.0f} s", nobody_is_well)

    async def _meet_with_patience(self, endpoint: Endpoint, backoff: Backoff) -> str | None:
        """None, or why the server cannot be reached."""
        attempt = 0
        while True:
            attempt += 1
            try:
                await self._meet(endpoint)
                return None
            except RunError as error:
                raise InputError(str(error)) from error
            except RequestError as error:
                if attempt > self._options.max_retries:
                    self._balancer.put_to_rest(endpoint)
                    return error.reason
                await self._clock.sleep(backoff.seconds(attempt, error.retry_after))

    async def _meet(self, endpoint: Endpoint) -> None:
        """Find out what a server serves, and that its files can be taken. Raises RequestError, RunError, InputError."""
        try:
            models = await self._client.models(endpoint.url)
            model = self._options.model or next(iter(models), "")
            if model not in models:
                raise RunError(
                    f"{endpoint.url} serves {', '.join(models) or 'nothing'}, and not {model or 'a model'}; name one with --model"
                )
            if self._options.in_place:  # a trial's file would stay among the rows: the first row is the trial
                self._models[endpoint.url] = model
                return
            self._trials += 1
            answer = await self._client.ask(endpoint.url, model, _TRIAL, self._names.probe(self._trials), Asking())
            path = await self._place_of(answer, None)
        except RequestError as error:
            if error.again and not isinstance(error, NoFileError):
                raise
            raise RunError(f"{error.reason}; give --endpoint the URL of a `vllm serve` with hidden-state extraction") from error
        examined = await asyncio.get_running_loop().run_in_executor(self._executor, self._collector.try_out, path)
        self._note(endpoint.url, model, examined.facts, path.parent)
        self._models[endpoint.url] = model
        endpoint.known = True

    async def _place_of(self, answer: Answer, row: int | None) -> Path:
        """Where the file is here that an answer names. Raises RequestError, InputError: it may not be taken from there."""
        path = self._options.local_path(answer.path)
        await asyncio.get_running_loop().run_in_executor(self._executor, self._collector.check_place, path, row)
        return path

    def note_file(self, url: str, facts: ServerFacts) -> None:
        """A row that stays in place has come from an endpoint: its first one says what there was no trial for.

        Raises:
            InputError: there are rows of another server.
            OSError: the ledger cannot be written.
        """
        if self._options.in_place and url not in self._noted:
            self._note(url, self._models[url], facts, self._options.output.absolute())
            self._noted.add(url)

    def _note(self, url: str, model: str, facts: ServerFacts, directory: Path) -> None:
        if self._ledger.content.server is None and self.facts not in (None, facts):
            raise InputError(f"{url}: {directory} holds rows of another server: {self.facts}, and this one's are {facts}; {REMEDY}")
        try:
            self._ledger.note_server({"model": model, **facts.as_json()}, str(directory))
        except InputError as error:
            raise InputError(f"{url}: {error}") from error
        self.facts = facts
