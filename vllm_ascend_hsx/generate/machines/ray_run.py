"""Do the rows of a run as tasks of a Ray cluster, a block of rows each.

Ray places tasks, and does them again if a node dies. This process reads the dataset, and has the
one ledger and the one progress display. A row that a lost task had finished is found by the next
task, by its file.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vllm_ascend_hsx.generate.endpoints import Endpoint
from vllm_ascend_hsx.generate.errors import InputError, Interrupted, RunError
from vllm_ascend_hsx.generate.ledger import REMEDY, differences
from vllm_ascend_hsx.generate.machines.block import Block, BlockResult, do_block
from vllm_ascend_hsx.generate.options import RANK_ROWS, Options, RayCluster, read_endpoints
from vllm_ascend_hsx.generate.progress import SHOWN_FAILURES, Outcome
from vllm_ascend_hsx.generate.run import Job

# How often Ray does a block again that was lost with its node, or that failed.
RETRIES = 10
# Blocks under way on each node, so that one goes on while another ends. They share --concurrency.
BLOCKS_PER_NODE = 2
POLL_S = 1.0  # until a node that has joined gets blocks
CONNECT_S = 10.0


class Begun:
    """An actor beside this process that knows where each block was begun."""

    def __init__(self) -> None:
        self._nodes: dict[int, list[str]] = {}

    def add(self, block: int, node: str) -> None:
        self._nodes.setdefault(block, []).append(node)

    def take(self, block: int) -> list[str]:
        return self._nodes.pop(block, [])


def do_task(options: Options, block: Block, begun: Any) -> BlockResult:
    """Do a block on a node; the function of the task."""
    ray.get(begun.add.remote(block.number, socket.gethostname()))
    return do_block(options, block)


class RayRun:
    """One run on a cluster.

    Args:
        job: the parts of the run; its options have `ray`.
    """

    def __init__(self, job: Job) -> None:
        assert job.options.ray is not None
        self._job = job
        self._cluster = job.options.ray
        self._options = replace(job.options, concurrency=max(1, job.options.concurrency // BLOCKS_PER_NODE))
        self._ledger, self._outcome = job.ledger, job.outcome
        self._blocks = 0
        self._nodes: set[str] = set()
        self._endpoints: dict[str, Endpoint] = {}
        self._said: set[str] = set()

    def run(self) -> None:
        """Do all rows. The outcome says what stopped the run."""
        with _connected(self._cluster), _interrupts(self._outcome):
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            self._begun = ray.remote(Begun).options(num_cpus=0, scheduling_strategy=here).remote()
            self._task = ray.remote(do_task)
            started = time.monotonic()
            try:
                self._do()
            except RayTaskError as error:  # its text is a traceback, even where it is a RunError, too
                self._outcome.stopped_by = _cause_of(error.cause)
            except (InputError, RunError) as error:
                self._outcome.stopped_by = error
            except RayError as error:
                self._outcome.stopped_by = RunError(f"Ray: {error}; what is done is kept: call again to go on")
            finally:
                self._outcome.seconds = time.monotonic() - started

    def _do(self) -> None:
        under_way: dict[Any, Block] = {}
        while self._outcome.stopped_by is None:
            while len(under_way) < self._room() and (block := self._next()) is not None:
                under_way[self._submit(block)] = block
            if not under_way:
                return
            for done in ray.wait(list(under_way), timeout=POLL_S)[0]:
                self._end(under_way.pop(done), done)

    def _submit(self, block: Block) -> Any:
        """Have Ray do a block, again if its node dies, or if nothing works there."""
        placed: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self._cluster.label is not None:
            placed["label_selector"] = dict([self._cluster.label])
        # The first block is a trial of the servers: what is wrong with them is told at once.
        retried = [RunError, OSError] if block.server is not None else False
        task = self._task.options(max_retries=RETRIES, retry_exceptions=retried, **placed)
        return task.remote(self._current_options(), block, self._begun)

    def _room(self) -> int:
        """Return how many blocks may be under way."""
        if self._ledger.server is None:
            return 1  # the first block says which server the others must have
        nodes = sum(_can_work(node, self._cluster.label) for node in ray.nodes())
        if not nodes:
            self._say("no node of the cluster can take a block (1 CPU, --ray-label); waiting for one")
        return max(1, BLOCKS_PER_NODE * nodes)

    def _next(self) -> Block | None:
        """Return the next block; None if there are no more rows."""
        most = self._cluster.block_rows if self._ledger.server is not None else min(RANK_ROWS, self._cluster.block_rows)
        rows = list(islice(self._job.rows, most))
        if not rows:
            return None
        identities = {row.index: row.identity(self._options.request) for row in rows}
        done = frozenset(row for row, identity in identities.items() if self._ledger.is_done(row, identity))
        answers = self._job.answers
        answered = frozenset(row for row, identity in identities.items() if answers is not None and answers.has(row, identity))
        self._blocks += 1
        with open(self._ledger.path, "rb") as file:
            begin = file.readline()
        return Block(self._blocks, rows, done, answered, self._ledger.server, self._ledger.path.absolute(), begin)

    def _current_options(self) -> Options:
        """Return the options with the servers that are listed now."""
        if self._options.endpoint_file is not None:
            try:
                self._options = replace(self._options, endpoints=read_endpoints(self._options.endpoint_file))
            except InputError as error:
                self._say(f"{error}; until then the servers that it listed last are used")
        return self._options

    def _end(self, block: Block, task: Any) -> None:
        """Log and count what became of a block. Raises InputError, RunError, RayError."""
        result: BlockResult = ray.get(task)
        begun = ray.get(self._begun.take.remote(block.number))
        if len(begun) > 1:
            self._outcome.blocks_again += 1
            self._job.progress.say(f"{block} were begun {len(begun)} times ({', '.join(begun)}): the earlier tasks were lost or failed")
        self._note_server(result)
        for answer in result.answers:
            assert self._job.answers is not None
            self._job.answers.append(*answer)
        for row, status, identity, facts in result.lines:
            self._ledger.append(row, status, identity, **facts)
        for text in result.messages:
            self._say(text)
        self._count(result)
        if result.refusal:
            raise InputError(result.refusal)

    def _note_server(self, result: BlockResult) -> None:
        before, now = self._ledger.server, result.server
        if now is None or now == before:
            return
        if before is not None:
            changes = differences(before, now)
            raise InputError(f"{result.node} has another server than the rows before: {changes}; serve the same there, or {REMEDY}")
        self._ledger.note_server(now)

    def _count(self, result: BlockResult) -> None:
        ours, its = self._outcome, result.outcome
        for name in ("before", "done", "failed", "requests", "retries", "tokens", "bytes", "prompt_tokens", "reused"):
            setattr(ours, name, getattr(ours, name) + getattr(its, name))
        ours.failures = [*ours.failures, *its.failures][:SHOWN_FAILURES]
        ours.left += its.left
        ours.blocks += 1
        self._nodes.add(result.node)
        ours.nodes = len(self._nodes)
        for each in its.endpoints:
            known = self._endpoints.setdefault(each.url, Endpoint(each.url))
            known.answered += each.answered
            known.failed += each.failed
        ours.endpoints = list(self._endpoints.values())

    def _say(self, text: str) -> None:
        """Print a line, once."""
        if text not in self._said:
            self._said.add(text)
            self._job.progress.say(text)


def do_on_ray(job: Job) -> None:
    """Do the rows on the cluster that the options name."""
    RayRun(job).run()


def _cause_of(cause: BaseException) -> RunError:
    """Return the error that ends the run after an error of a task."""
    if isinstance(cause, RunError):
        return cause
    text = str(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
    return RunError(f"a node of the cluster: {text}; what is done is kept: call again to go on")


def _can_work(node: dict[str, Any], label: tuple[str, str] | None) -> bool:
    return bool(
        node["Alive"] and node["Resources"].get("CPU", 0) >= 1 and (label is None or node.get("Labels", {}).get(label[0]) == label[1])
    )


@contextmanager
def _connected(cluster: RayCluster) -> Iterator[None]:
    """Connect this process to the cluster. Raises InputError."""
    remedy = "start this command on a node of a cluster that runs, and give the address of its head, such as head:6379, or auto"
    host, colon, port = cluster.address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"--ray {cluster.address}: {error}; {remedy}") from error
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InputError(f"--ray {cluster.address}: {error}; {remedy}") from error
    try:
        yield
    finally:
        ray.shutdown()  # ends tasks that are under way


@contextmanager
def _interrupts(outcome: Outcome) -> Iterator[None]:
    """Have SIGINT and SIGTERM stop the run."""

    def stop(number: int, frame: FrameType | None) -> None:
        outcome.stopped_by = outcome.stopped_by or Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
