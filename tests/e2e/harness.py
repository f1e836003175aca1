"""Runs engines and servers on the emulated NPU for the tests, with our connector or with vLLM's in its place."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_ascend_hsx.demo.reference import Comparison, compare, reference_hidden_states
from vllm_ascend_hsx.emulator.launch import environment
from vllm_ascend_hsx.protocol.lock import wait_until_released
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX, file_name, token_of_workspace
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.sinks.workspace import LOCK

HERE = Path(__file__).parent
HBM_BYTES = 2 << 30
EXIT_SECONDS = 30.0
# At most, on a machine that is busy with other things: a server that ends meanwhile is noticed at once.
START_SECONDS = 600.0
PUBLISH_SECONDS = 60.0
# How vLLM starts processes where nothing is said: for one test with workers and one server. The others fork, which saves each process
# the import of vLLM.
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# Actions that may fail without harm to the engine: what is wrong is their arguments.
REFUSABLE = frozenset({"add"})
# SamplingParams of a request whose generated tokens are extracted too, and of one that is not extracted.
WITH_OUTPUT = {"extra_args": {"kv_transfer_params": {"include_output_tokens": True}}}
NOT_EXTRACTED = {"extra_args": {"kv_transfer_params": {"hidden_states": False}}}
# vllm-ascend's own general plugins: without ours, the engine is what its users have today.
UPSTREAM_PLUGINS = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling,hsx_test_instruments"


def process_environment(*, npus: int, ours: bool = True, late: bool = True, instruments: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The environment of a process on the emulated NPU, to be added to the current one."""
    added = environment(npus=npus, hbm_bytes=HBM_BYTES, late=late)
    folders = [str(HERE / "instruments"), added.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    added["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, os.pathsep.join(folders).split(os.pathsep))))
    added["HSX_TEST_INSTRUMENTS"] = json.dumps(instruments or {})
    if not ours:
        added["VLLM_PLUGINS"] = UPSTREAM_PLUGINS
    return added


@dataclass
class Request:
    """A request of a session, and what has become of it.

    Attributes:
        id: the client's, unique in the session.
        internal_id: vLLM's, from which the file has its name; with n>1 the children's are `<index>_<internal_id>`.
        prompt: its tokens.
        sampling: SamplingParams as they were given.
        begun, ended: the session's clock when it was added, and when it had been answered or aborted (None before).
        aborted: whether it ended so.
        steps: how many outputs there were. updates: the tokens of each, by index of the completion.
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
    def n(self) -> int:
        count: int = self.sampling.get("n", 1)
        return count

    @property
    def internal_ids(self) -> list[str]:
        """Of each completion, in order."""
        return [self.internal_id] if self.n == 1 else [f"{index}_{self.internal_id}" for index in range(self.n)]

    def sequence(self, index: int = 0) -> list[int]:
        """Prompt and generated tokens of one completion."""
        return self.prompt + self.completions.get(index, [])

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of an output."""
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


class Forks:
    """A process that has imported vLLM (driver.py), and forks those of engines.

    Args:
        environ: of the process.
        log_fd: receives what it prints.

    Attributes:
        key: what of the environment is read when modules are imported; other engines need another process.
    """

    def __init__(self, environ: Mapping[str, str], log_fd: int) -> None:
        self.key = self.key_of(environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "driver.py"), str(theirs.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    @staticmethod
    def key_of(environ: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environ.items() if name.startswith(("HSX_EMULATOR_", "VLLM_", "PYTHONPATH"))}

    def fork(self, environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Returns the id of the process of a new engine, the leader of its process group. Raises ConnectionError: vLLM was not imported."""
        socket.send_fds(self._socket, [json.dumps(dict(environ)).encode()], descriptors)
        if pid := self._socket.recv(64):
            return int(pid)
        raise ConnectionResetError("the process that forks engines has ended")

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_last_forks: Forks | None = None


def _forks(environ: Mapping[str, str], log_fd: int) -> Forks:
    """The last one if it serves for this environment, else a new one: tests that follow each other mostly need the same."""
    global _last_forks
    if _last_forks is None or _last_forks.key != Forks.key_of(environ):
        if _last_forks is not None:
            _last_forks.close()
        _last_forks = Forks(environ, log_fd)
    return _last_forks


class EngineError(Exception):
    """An action failed in the engine's process; the message is its traceback."""


class EngineSession:
    """An engine in a process of its own, to which actions are sent while it runs. Use as a context manager.

    One engine serves any number of requests: ids are made unique, and everything that it has served is kept for the oracle.

    Args:
        directory: for the files and the log of this session.
        model: the target's directory.
        layer_ids: to extract, in the file's order.
        extract: without it the engine serves as if nothing of extraction existed.
        ours: our plugin and connector, or vLLM's.
        late: late mode of the emulator.
        instruments: see instruments/hsx_test_instruments.py.
        connector_options: added to kv_connector_extra_config.
        timeout: seconds that an action may take.
        environ: added to the environment.
        engine: EngineArgs.

    Attributes:
        storage: where the files go.
        requests: all requests so far, by id.
        preemptions: of each its "id" (the client's), "computed" tokens and "phase": "prefill" or "decode".
        facts: of the engine: num_gpu_blocks, kv_groups, kv_bytes, async_scheduling, hybrid_kv_cache_manager, mamba_cache_mode.
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
        npus = self._arguments.get("tensor_parallel_size", 1)
        self._environment = {
            **os.environ,
            **process_environment(npus=npus, ours=ours, late=late, instruments=instruments),
            **(environ or {}),
        }

    def _engine_arguments(self, extract: bool, ours: bool, connector: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
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
            # vLLM refuses its connector together with chunked prefill.
            options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
        if extract:
            transfer = kv_transfer_config(self.storage) if ours else upstream_transfer_config(self.storage)
            transfer["kv_connector_extra_config"].update(connector)
            options |= {"speculative_config": speculative_config(self.layer_ids), "kv_transfer_config": transfer}
        return options | dict(engine)

    # The process

    def __enter__(self) -> EngineSession:
        ours_read, its_write = os.pipe()
        its_read, ours_write = os.pipe()
        with self._log_path.open("wb") as log:
            forks = _forks(self._environment, log.fileno())
            try:
                self.pid = forks.fork(self._environment, (its_read, its_write, log.fileno()))
            except ConnectionError as error:
                raise AssertionError(f"{error}:\n{self.log[-4000:]}") from error
        self._exit = os.pidfd_open(self.pid)
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if not self.failed:
                self.call("shutdown")
        finally:
            self.close()

    def close(self) -> None:
        """End the process, and with it everything that it has started."""
        with suppress(BrokenPipeError):
            self._actions.close()
        os.close(self._answers)
        select.select([self._exit], [], [], EXIT_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        select.select([self._exit], [], [])
        os.close(self._exit)

    def call(self, action: str, *args: Any, **kwargs: Any) -> Any:
        """Have the driver do something: see driver.Driver. Returns its result.

        Raises:
            EngineError: it raised.
            AssertionError: the process ended, or took longer than the timeout; the message has the end of its log.
        """
        self.clock += 1
        failed, self.failed = self.failed, True  # unless an answer comes
        with suppress(BrokenPipeError):  # the missing answer tells
            self._actions.write(json.dumps({"action": action, "args": args, "kwargs": kwargs}) + "\n")
            self._actions.flush()
        answer = json.loads(self._read_line(action))
        self.failed = failed
        for event in answer["events"]:
            request = self.requests[event["id"]]
            request.take(event)
            if request.finished:
                request.ended = self.clock
        by_internal_id = {internal: request.id for request in self.requests.values() for internal in request.internal_ids}
        self.preemptions += [{"id": by_internal_id[each["internal_id"]], **each} for each in answer["preemptions"]]
        if answer["error"] is not None:
            self.failed = action not in REFUSABLE
            raise EngineError(answer["error"])
        return answer["result"]

    def _read_line(self, action: str) -> bytes:
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
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

    def add(self, prompt: Sequence[int], sampling: Mapping[str, Any] | None = None, *, name: str = "r", **options: Any) -> Request:
        """Add a request.

        Args:
            prompt: its tokens.
            sampling: SamplingParams; greedy without.
            name: what its id is to be; a number is appended if there is a request of that id.
            options: further arguments of driver.Driver.add.
        """
        request_id = name
        for number in itertools.count(2):
            if request_id not in self.requests:
                break
            request_id = f"{name}.{number}"
        sampling = dict(sampling or {})
        internal_id = self.call("add", request_id, list(prompt), sampling, **options)
        self.requests[request_id] = request = Request(request_id, internal_id, list(prompt), sampling, begun=self.clock)
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
        """Another engine in the same process, which extracts other layers. Nothing of ours may be left of the one before."""
        self.call("shutdown")
        left = self.call("stats")
        assert not [name for name in left["threads"] if name.startswith("hsx")], left["threads"]
        assert str(self.storage) not in left["fds"], left["fds"]
        self.layer_ids = tuple(layer_ids)
        self._arguments |= {"speculative_config": speculative_config(layer_ids)}
        self.facts = self.call("start", self._arguments)

    def paths(self, request: Request) -> list[Path]:
        """Where the files of a request are to be, one per completion."""
        return [self.storage / file_name(internal_id) for internal_id in request.internal_ids]


@dataclass
class Run:
    """What an engine did with a script."""

    model: Path
    storage: Path
    layer_ids: Sequence[int]
    result: dict[str, Any]
    log: str

    @property
    def requests(self) -> dict[str, Any]:
        return self.result["requests"]

    @property
    def error(self) -> str | None:
        """Traceback of what stopped the engine, or None."""
        return self.result["error"]

    def path(self, request_id: str) -> Path:
        return Path(self.requests[request_id]["kv_transfer_params"]["hidden_states_path"])

    def sequence(self, request_id: str) -> list[int]:
        """The tokens whose rows the request's file has to hold."""
        request = self.requests[request_id]
        params = request["sampling"].get("extra_args", {}).get("kv_transfer_params", {})
        generated = request["tokens"][:-1] if params.get("include_output_tokens") else []
        return request["prompt"] + generated

    def rows(self, request_id: str) -> dict[str, torch.Tensor]:
        return load_file(self.path(request_id))

    def compare(self, request_id: str) -> Comparison:
        """The request's file against transformers."""
        return compare_file(self.path(request_id), self.model, self.sequence(request_id), self.layer_ids)


def compare_file(path: Path, model: Path, prompt: Sequence[int], layer_ids: Sequence[int]) -> Comparison:
    """A file against transformers on the CPU: token ids equal, rows within the tolerance of their dtype."""
    wait_until_released(path.with_name(path.name + LOCK_SUFFIX), PUBLISH_SECONDS)  # a server publishes behind its answer
    tensors = load_file(path)
    if tensors["token_ids"].tolist() != list(prompt):
        return Comparison(float("nan"), "mismatch", f"token_ids {tensors['token_ids'].tolist()} are not the prompt's")
    return compare(tensors["hidden_states"], reference_hidden_states(model, prompt, layer_ids))


def upstream_transfer_config(storage: Path) -> dict[str, Any]:
    """vLLM's own connector, as vllm-ascend's users have it."""
    return kv_transfer_config(storage) | {"kv_connector": "ExampleHiddenStatesConnector"}


def run_engine(directory: Path, model: Path, script: Sequence[Sequence[Any]], *, timeout: float = 900, **options: Any) -> Run:
    """Run an engine in a process of its own.

    Args:
        directory: for the files and the log of this run.
        model: the target's directory.
        script: actions of driver.py.
        timeout: seconds that all of them may take.
        options: of EngineSession.

    Raises:
        AssertionError: the driver ended without a result, or ran out of time.
    """
    deadline = time.monotonic() + timeout
    session = EngineSession(directory, model, timeout=timeout, **options)
    error: str | None = None
    try:
        with session:
            for action, *arguments in script:
                session.timeout = deadline - time.monotonic()
                if action == "add":
                    request_id, prompt, sampling = arguments
                    session.add(prompt, sampling, name=request_id)
                elif action == "abort":
                    session.abort(session.requests[arguments[0]])
                else:
                    session.call(action, *arguments)
    except EngineError as failure:
        error = str(failure)
    result = {**session.facts, "preemptions": len(session.preemptions), "error": error}
    result["requests"] = {each.id: {**vars(each), "tokens": each.tokens} for each in session.requests.values()}
    return Run(model, session.storage, session.layer_ids, result, session.log)


def names_in(storage: Path) -> set[str]:
    """What is in a storage directory, and in the workspaces of servers but for their locks."""
    names = set()
    for path in storage.iterdir():
        if token_of_workspace(path.name) is None:
            names.add(path.name)
        else:
            with suppress(FileNotFoundError):  # its server has stopped meanwhile
                names |= {f"{path.name}/{each}" for each in os.listdir(path) if each != LOCK}
    return names


def read_trace(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Events of the instruments, by process id, in order."""
    return {
        int(path.stem.removeprefix("trace-")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(directory.glob("trace-*.jsonl"))
    }


def tokens(length: int, seed: int = 0) -> list[int]:
    """A prompt of given length; different seeds share no prefix."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(8, 600, (length,), generator=generator).tolist()
