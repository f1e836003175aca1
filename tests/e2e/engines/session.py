"""An engine in a separate process. A test sends it actions while it runs."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from launch import START_SECONDS, fork, process_environment

from vllm_ascend_hsx.protocol.api import REUSED_KEY
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

EXIT_SECONDS = 30.0
# Actions that may fail without harm to the engine: the arguments are wrong.
REFUSABLE = frozenset({"add"})
# SamplingParams of a request with extracted generated tokens, and of a request that opts out.
WITH_OUTPUT = {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}}
NOT_EXTRACTED = {"extra_args": {"kv_transfer_params": {"hidden_states": False}}}


@dataclass
class Request:
    """A request of a session, and the outputs so far.

    Attributes:
        id: the client's id, unique in the session.
        internal_id: vLLM's id. It names the file; with n>1, `<index>_<internal_id>` names each.
        prompt: token ids.
        sampling: the given SamplingParams.
        begun, ended: times of the session's clock: when it was added, and when it was answered or
            aborted.
        aborted: True if it was aborted.
        steps: number of outputs. updates: the tokens of each, by index of the completion.
        completions: all tokens generated so far, by index. texts: their text.
        num_cached_tokens, kv_transfer_params: of the last output.
    """

    id: str
    internal_id: str
    prompt: list[int]
    sampling: dict[str, Any]
    begun: int
    ended: int | None = None
    aborted: bool = False
    finished: bool = False
    steps: int = 0
    updates: list[tuple[int, list[int]]] = field(default_factory=list)
    completions: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    stop_reasons: dict[int, Any] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def tokens(self) -> list[int]:
        return self.completions.get(0, [])

    @property
    def reused(self) -> int:
        """Number of rows that were copied; the request read these tokens from the prefix cache."""
        count = int((self.kv_transfer_params or {}).get(REUSED_KEY, 0))
        assert self.num_cached_tokens == count, (self.num_cached_tokens, count)
        return count

    @property
    def n(self) -> int:
        count: int = self.sampling.get("n", 1)
        return count

    @property
    def internal_ids(self) -> list[str]:
        """The internal id of each completion, in order."""
        return (
            [self.internal_id]
            if self.n == 1
            else [f"{index}_{self.internal_id}" for index in range(self.n)]
        )

    def sequence(self, index: int = 0) -> list[int]:
        """Return prompt and generated tokens of one completion."""
        return self.prompt + self.completions.get(index, [])

    def take(self, event: Mapping[str, Any]) -> None:
        """Record an output."""
        self.steps += 1
        self.finished = event["finished"]
        self.num_cached_tokens = event["num_cached_tokens"]
        self.kv_transfer_params = event["kv_transfer_params"]
        delta = self.sampling.get("output_kind") == "DELTA"
        for output in event["outputs"]:
            index, new = output["index"], list(output["tokens"])
            self.updates.append((index, new))
            self.completions[index] = [*self.completions.get(index, []), *new] if delta else new
            self.texts[index] = (self.texts.get(index, "") if delta else "") + output["text"]
            self.stop_reasons[index] = output["stop_reason"]


class EngineError(Exception):
    """An action failed in the engine's process; the message is the traceback."""


class EngineSession:
    """An engine in a separate process that executes actions. A context manager.

    Request ids are made unique, and all served requests are kept for the oracle.

    Args:
        directory: for the files and the log of this session.
        model: directory of the target.
        layer_ids: layers to extract, in the file's order.
        extract: False for an engine without anything of extraction.
        ours: True for our plugin and connector, False for vLLM's.
        late: late mode of the emulator.
        instruments: see instruments/hsx_test_instruments.
        connector_options: added to kv_connector_extra_config.
        timeout: maximum seconds of an action.
        environ: added to the environment.
        engine: EngineArgs.

    Attributes:
        storage: directory of the files.
        requests: all requests so far, by id.
        preemptions: "id" (the client's), "computed" tokens and "phase" ("prefill" or "decode").
        facts: see driver.Driver.start.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        layer_ids: Sequence[int] = (1, 2, 4),
        extract: bool = True,
        ours: bool = True,
        late: bool = True,
        instruments: Mapping[str, Any] | None = None,
        connector_options: Mapping[str, Any] | None = None,
        timeout: float = START_SECONDS,
        environ: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.storage = directory / "hidden_states"
        self.layer_ids = tuple(layer_ids)
        self.timeout = timeout
        self.requests: dict[str, Request] = {}
        self.preemptions: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.clock = 0
        self.failed = False
        self._log_path = directory / "engine.log"
        self._arguments = self._engine_arguments(extract, ours, connector_options or {}, engine)
        npus = self._arguments.get("tensor_parallel_size", 1) * self._arguments.get(
            "pipeline_parallel_size", 1
        )
        self._environment = {
            **os.environ,
            **process_environment(npus=npus, ours=ours, late=late, instruments=instruments),
            **(environ or {}),
        }

    def _engine_arguments(
        self, extract: bool, ours: bool, connector: Mapping[str, Any], engine: Mapping[str, Any]
    ) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": str(self.model),
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }
        if not ours:
            # vLLM refuses the connector together with chunked prefill.
            options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
        if extract:
            transfer = (
                kv_transfer_config(self.storage) if ours else upstream_transfer_config(self.storage)
            )
            transfer["kv_connector_extra_config"].update(connector)
            options |= {
                "speculative_config": speculative_config(self.layer_ids),
                "kv_transfer_config": transfer,
            }
        return options | dict(engine)

    # The process

    def __enter__(self) -> EngineSession:
        ours_read, its_write = os.pipe()
        its_read, ours_write = os.pipe()
        with self._log_path.open("wb") as log:
            self._process = fork(self._environment, ["engine"], log.fileno(), its_read, its_write)
        self.pid = self._process.pid
        os.close(its_read)
        os.close(its_write)
        self._answers = ours_read
        self._buffer = b""
        self._actions = os.fdopen(ours_write, "w")
        with ExitStack() as unless_started:
            unless_started.callback(self.close)
            self.facts = self.call("start", self._arguments)
            unless_started.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self.failed:
                self.call("shutdown")
        finally:
            self.close()

    def close(self) -> None:
        """End the process group."""
        with suppress(BrokenPipeError):
            self._actions.close()
        os.close(self._answers)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def call(self, action: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of driver.Driver, and return the result.

        Raises:
            EngineError: it raised.
            AssertionError: the process ended or ran out of time; the message has the log.
        """
        self.clock += 1
        failed, self.failed = self.failed, True  # until an answer arrives
        with suppress(BrokenPipeError):  # the missing answer reports it
            self._actions.write(
                json.dumps({"action": action, "args": args, "kwargs": kwargs}) + "\n"
            )
            self._actions.flush()
        answer = json.loads(self._read_line(action))
        self.failed = failed
        for event in answer["events"]:
            request = self.requests[event["id"]]
            request.take(event)
            if request.finished:
                request.ended = self.clock
        by_internal_id = {
            internal: request.id
            for request in self.requests.values()
            for internal in request.internal_ids
        }
        self.preemptions += [
            {"id": by_internal_id[each["internal_id"]], **each} for each in answer["preemptions"]
        ]
        if answer["error"] is not None:
            self.failed = action not in REFUSABLE
            raise EngineError(answer["error"])
        return answer["result"]

    def _read_line(self, action: str) -> bytes:
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"{action!r} took longer than {self.timeout:.0f} s:\n{self.log[-4000:]}"
            found = os.read(self._answers, 1 << 16)
            assert found, f"the engine's process ended during {action!r}:\n{self.log[-4000:]}"
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    # Actions

    def add(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        name: str = "r",
        **options: Any,
    ) -> Request:
        """Add a request.

        Args:
            prompt: token ids.
            sampling: SamplingParams; greedy without.
            name: desired id; a number is appended if it is taken.
            options: further arguments of driver.Driver.add.
        """
        request_id = name
        for number in itertools.count(2):
            if request_id not in self.requests:
                break
            request_id = f"{name}.{number}"
        sampling = dict(sampling or {})
        internal_id = self.call("add", request_id, list(prompt), sampling, **options)
        self.requests[request_id] = request = Request(
            request_id, internal_id, list(prompt), sampling, begun=self.clock
        )
        return request

    def step(self, count: int = 1) -> None:
        self.call("step", count)

    def drain(self) -> None:
        """Step until every request has been answered."""
        self.call("drain")

    def settle(self) -> None:
        """Step until every request has been answered and every file is decided."""
        self.call("drain")
        self.call("settle")

    def abort(self, request: Request) -> None:
        self.call("abort", request.id)
        if request.ended is None:
            request.ended, request.aborted = self.clock, True

    def restart(self, layer_ids: Sequence[int]) -> None:
        """Replace the engine by one that extracts other layers; nothing of ours may remain."""
        self.call("shutdown")
        left = self.call("stats")
        assert not [name for name in left["threads"] if name.startswith("hsx")], left["threads"]
        assert str(self.storage) not in left["fds"], left["fds"]
        self.layer_ids = tuple(layer_ids)
        self._arguments |= {"speculative_config": speculative_config(layer_ids)}
        self.facts = self.call("start", self._arguments)

    def paths(self, request: Request) -> list[Path]:
        """Return the paths of a request's files, one per completion."""
        return [self.storage / file_name(internal_id) for internal_id in request.internal_ids]


def upstream_transfer_config(storage: Path) -> dict[str, Any]:
    """Return the --kv-transfer-config of vLLM's own connector."""
    return kv_transfer_config(storage) | {"kv_connector": "ExampleHiddenStatesConnector"}
