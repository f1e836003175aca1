"""Do the rows of a run on a Ray cluster, with one task per rank. Ray places and repeats tasks.

Each task is a run with a ledger, so a repeated task continues where the lost task has stopped. This
process checks the dataset, submits the ranks and adds up the results.
"""

from __future__ import annotations

import io
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from rich.console import Console

from vllm_ascend_hsx.generate.dataset import Checked
from vllm_ascend_hsx.generate.endpoints import Endpoint
from vllm_ascend_hsx.generate.errors import InputError, Interrupted, RunError
from vllm_ascend_hsx.generate.ledger import open_ledger, rank_file
from vllm_ascend_hsx.generate.open_dataset import open_dataset
from vllm_ascend_hsx.generate.options import RANK_ROWS, Options, RayCluster, read_endpoints
from vllm_ascend_hsx.generate.progress import SHOWN_FAILURES, Outcome, Progress
from vllm_ascend_hsx.generate.resume import resume
from vllm_ascend_hsx.generate.run import Plan, do_here
from vllm_ascend_hsx.protocol.files import open_regular

# Ray repeats a task this many times if it fails or the node is lost.
RETRIES = 10
# Concurrent tasks per node, so that one works while another ends. They share --concurrency.
TASKS_PER_NODE = 2
POLL_S = 1.0  # interval at which new nodes are found
CONNECT_S = 10.0
_COUNTS = (
    "before",
    "done",
    "failed",
    "requests",
    "retries",
    "tokens",
    "bytes",
    "prompt_tokens",
    "reused",
)


class RankResult(NamedTuple):
    """The result of a task.

    Attributes:
        outcome: outcome of the rank's run.
        messages: lines for the user.
        refusal: reason to end the whole run; "" if there is none.
    """

    outcome: Outcome
    messages: list[str]
    refusal: str


def do_rank(options: Options, checked: Checked, begin: bytes) -> RankResult:
    """Do one rank's rows on a node. This is the function of a task.

    Args:
        options: options of the rank.
        checked: result of the dataset's check.
        begin: first line of the run's ledger, to verify that the node has the same storage.

    Raises:
        RunError, OSError: the run cannot continue on this node.
    """
    messages = io.StringIO()
    outcome = Outcome(0)
    try:
        _require_same_storage(options.output, begin)
        plan = Plan(
            options,
            open_dataset(options),
            checked,
            Console(file=messages, width=10**6, no_color=True),
        )
        outcome = do_here(plan, signals=())
        if outcome.stopped_by is not None:
            raise outcome.stopped_by
    except InputError as error:
        outcome.stopped_by = None
        return RankResult(outcome, messages.getvalue().splitlines(), str(error))
    outcome.endpoints = [replace(each) for each in outcome.endpoints]
    return RankResult(outcome, messages.getvalue().splitlines(), "")


def _require_same_storage(output: Path, begin: bytes) -> None:
    """Raise InputError if the output directory of this machine is not that of the run."""
    path = output / rank_file("ledger", 1, 0)
    problem = "it has another file of that name"
    try:
        with open(open_regular(path), "rb") as file:
            if file.read(len(begin)) == begin:
                return
    except OSError as error:
        problem = error.strerror or str(error)
    remedy = "mount the storage there, or select the nodes that have it with --ray-label KEY=VALUE"
    raise InputError(f"{socket.gethostname()} does not see the run's {path} ({problem}); {remedy}")


class RayRun:
    """One run on a cluster.

    Args:
        plan: the run, with `options.ray`.
        begin: first line of the run's ledger.

    Attributes:
        outcome: outcome of the run.
    """

    def __init__(self, plan: Plan, begin: bytes) -> None:
        assert plan.options.ray is not None
        self.outcome = Outcome(
            len(plan.checked.identities) - len(plan.checked.bad), len(plan.checked.bad)
        )
        self._cluster = plan.options.ray
        self._ranks = min(self._cluster.tasks, -(-len(plan.checked.identities) // RANK_ROWS))
        concurrency = max(1, plan.options.concurrency // TASKS_PER_NODE)
        self._options = replace(
            plan.options,
            ray=None,
            concurrency=concurrency,
            world_size=self._ranks,
            waits_for_lock=True,
        )
        self._plan = plan
        self._begin = begin
        self._progress = Progress(plan.console, self.outcome)
        self._results = 0
        self._endpoints: dict[str, Endpoint] = {}
        self._printed: set[str] = set()

    def run(self) -> None:
        """Do all rows. `outcome.stopped_by` has the reason of an early end."""
        started = time.monotonic()
        try:
            with _connected(self._cluster), _interrupts(self.outcome), self._progress:
                self._do()
        except RayTaskError as error:  # a subclass of the cause's class, so before RunError
            self.outcome.stopped_by = _cause_of(error.cause)
        except (InputError, RunError) as error:
            self.outcome.stopped_by = error
        except RayError as error:
            self.outcome.stopped_by = RunError(
                f"Ray: {error}; finished rows are kept; run again to continue"
            )
        finally:
            self.outcome.seconds = time.monotonic() - started

    def _do(self) -> None:
        checked = ray.put(self._plan.checked)
        # A first task of a few rows runs alone and records the server for all others.
        left: list[tuple[int, int | None]] = [
            (0, RANK_ROWS),
            *((rank, self._options.limit) for rank in range(self._ranks)),
        ]
        under_way: dict[Any, int | None] = {}
        while self.outcome.stopped_by is None and (left or under_way):
            while left and self.outcome.stopped_by is None and len(under_way) < self._room():
                rank, limit = left.pop(0)
                under_way[
                    self._submit(replace(self._current_options(), rank=rank, limit=limit), checked)
                ] = limit
            for done in ray.wait(list(under_way), timeout=POLL_S)[0]:
                del under_way[done]
                self._end(ray.get(done))

    def _submit(self, options: Options, checked: Any) -> Any:
        """Submit a rank to Ray, with retries on other nodes."""
        placed: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self._cluster.label is not None:
            placed["label_selector"] = dict([self._cluster.label])
        # The first task is a trial of the servers, so its problems are reported immediately.
        retried = [RunError, OSError] if self._results else False
        task = ray.remote(do_rank).options(max_retries=RETRIES, retry_exceptions=retried, **placed)
        return task.remote(options, checked, self._begin)

    def _room(self) -> int:
        """Return the maximum number of concurrent tasks."""
        nodes = sum(_can_work(node, self._cluster.label) for node in ray.nodes())
        if not nodes:
            self._say(
                "no node of the cluster can take a task (1 CPU, --ray-label); waiting for one"
            )
        return max(1, TASKS_PER_NODE * nodes) if self._results else 1

    def _current_options(self) -> Options:
        """Return the options with the currently listed servers."""
        if self._options.endpoint_file is not None:
            try:
                self._options = replace(
                    self._options, endpoints=read_endpoints(self._options.endpoint_file)
                )
            except InputError as error:
                self._say(f"{error}; the servers listed before are still used")
        return self._options

    def _end(self, result: RankResult) -> None:
        """Add the result of a rank. Raises InputError: the run must end."""
        for text in result.messages:
            self._say(text)
        if result.refusal:
            raise InputError(result.refusal)
        outcome = result.outcome
        if not self._results:
            # The task with the rest of the rank counts these rows again, and repeats failed ones.
            outcome = replace(outcome, before=-outcome.done, failed=0, failures=[])
        self._results += 1
        for name in _COUNTS:
            setattr(self.outcome, name, getattr(self.outcome, name) + getattr(outcome, name))
        self.outcome.failures = [*self.outcome.failures, *outcome.failures][:SHOWN_FAILURES]
        self.outcome.left += outcome.left
        self.outcome.removed += outcome.removed
        for each in outcome.endpoints:
            known = self._endpoints.setdefault(each.url, Endpoint(each.url))
            known.answered += each.answered
            known.failed += each.failed
        self.outcome.endpoints = list(self._endpoints.values())

    def _say(self, text: str) -> None:
        """Print a line, once."""
        if text not in self._printed:
            self._printed.add(text)
            self._progress.say(text)


def do_on_ray(plan: Plan) -> Outcome:
    """Do the rows on the cluster of the options. Raises InputError."""
    options = plan.options
    ledger = open_ledger(options.output, options.request)
    try:
        resume(options, ledger, plan.checked, plan.console)  # ranks cannot rename files
        with open(ledger.path, "rb") as file:
            run = RayRun(plan, file.readline())
    except RunError as error:
        return Outcome(len(plan.checked.identities), stopped_by=error)
    finally:
        ledger.close()
    run.run()
    if run.outcome.is_refused:
        _withdraw(options, ledger.made)
    return run.outcome


def _withdraw(options: Options, made: Sequence[Path]) -> None:
    """Remove the ledger and directories that a refused run has `made`, if no other run uses them.

    The ledger was unlocked for the ranks, so it is locked again.
    """
    with suppress(InputError):
        ledger = open_ledger(options.output, options.request)
        ledger.made = made
        ledger.withdraw()
        ledger.close()


def _cause_of(cause: BaseException) -> RunError:
    """Return the error that ends the run after a task has failed."""
    if isinstance(cause, RunError):
        return cause
    text = str(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
    return RunError(f"a node of the cluster: {text}; finished rows are kept; run again to continue")


def _can_work(node: dict[str, Any], label: tuple[str, str] | None) -> bool:
    return bool(
        node["Alive"]
        and node["Resources"].get("CPU", 0) >= 1
        and (label is None or node.get("Labels", {}).get(label[0]) == label[1])
    )


@contextmanager
def _connected(cluster: RayCluster) -> Iterator[None]:
    """Connect this process to the cluster. Raises InputError."""
    remedy = (
        "run this command on a node of a running cluster, and give the address of the head, such "
        "as head:6379, or auto"
    )
    host, colon, port = cluster.address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():  # Ray would retry for minutes
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
        ray.shutdown()  # also ends running tasks


@contextmanager
def _interrupts(outcome: Outcome) -> Iterator[None]:
    """Stop the run on SIGINT and SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        outcome.stopped_by = outcome.stopped_by or Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
