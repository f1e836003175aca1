"""An engine on which scenarios run one after the other, and the checks after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from harness import names_in
from oracle import LOAD_SECONDS, Oracle, Reference, Served
from session import EngineSession, Request

from vllm_ascend_hsx.protocol.names import ERROR_SUFFIX, LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import HiddenStatesError, load
from vllm_ascend_hsx.sinks.base import SERVER_STOPPED

# Outcome of an ended request: rows of the prompt; rows of prompt and generated tokens; nothing;
# rows of the prompt or nothing (aborted at any time); an error file beside an obstacle in the
# lock's place; an error file; an error file that names the stop of the server.
Expected = Literal["prompt", "output", "nothing", "either", "error", "failed", "stopped"]
STEPS = 400  # limit of `until`


class Stage:
    """A session, the oracle, and the expected outcome of each request.

    Args:
        session: has our connector, with the worker in the driver's process.
        reference: reference of the session's model.
    """

    def __init__(self, session: EngineSession, reference: Reference) -> None:
        self.session = session
        self._reference = reference
        self._expected: dict[str, Expected] = {}
        self._checked: set[str] = set()
        self._visible: set[str] = set()
        self.settle_in()

    def settle_in(self) -> None:
        """Record the idle engine's resources, for `check`."""
        self.session.settle()
        self._idle = self.stats()

    # Actions of a scenario

    def add(
        self,
        prompt: Sequence[int],
        *,
        name: str = "r",
        expect: Expected = "prompt",
        params: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Request:
        """Add a request.

        Args:
            prompt: token ids.
            name: name for a failure message.
            expect: expected outcome.
            params: kv_transfer_params; the default for expect="output" includes generated tokens.
            options: further arguments of driver.Driver.add.
            sampling: SamplingParams; default: one token.
        """
        if params is None and expect == "output":
            params = {"include_output_tokens": True}
        if params is not None:
            sampling["extra_args"] = {"kv_transfer_params": params}
        request = self.session.add(
            prompt, {"max_tokens": 1, **sampling}, name=name, **(options or {})
        )
        self._expected[request.id] = expect
        return request

    def abort(self, request: Request, *, expect: Expected = "nothing") -> None:
        self.session.abort(request)
        self._expected[request.id] = expect

    def step(self, count: int = 1) -> None:
        self.session.step(count)

    def drain(self) -> None:
        self.session.drain()

    def catch_up(self) -> None:
        """Wait until all rows so far are written."""
        self.session.call("catch_up")

    def restart(self, layer_ids: Sequence[int]) -> None:
        """Replace the engine by one that extracts other layers."""
        self.session.restart(layer_ids)
        self.settle_in()

    def progress(self, request: Request) -> dict[str, Any]:
        """Return status, computed, prompt and outputs; empty if the request is unknown."""
        found: dict[str, Any] = self.session.call("progress").get(request.internal_id, {})
        return found

    def until(self, reached: Callable[[], bool]) -> None:
        """Step until `reached` returns True."""
        for _ in range(STEPS):
            if reached():
                return
            self.step()
        raise AssertionError(
            f"not reached after {STEPS} steps; the scheduler has {self.session.call('progress')}"
        )

    def until_mid_prefill(self, request: Request) -> None:
        self.until(lambda: self.progress(request).get("computed", 0) > 0)
        assert self.progress(request)["computed"] < len(request.prompt), (
            "the prompt takes one step only"
        )

    def until_mid_decode(self, request: Request, tokens: int = 2) -> None:
        self.until(lambda: len(request.tokens) >= tokens)
        assert not request.finished

    # Checks after a scenario

    def check(self) -> None:
        """Wait for the end. Check files, visible names, and resources of the idle engine."""
        self.session.settle()
        served = self.served()
        problems = []
        oracle = Oracle(self._reference, self.session.layer_ids)
        for request in self.session.requests.values():
            if request.id not in self._checked:
                self._checked.add(request.id)
                problems += self._check_request(request, oracle, served)
        assert not problems, "\n".join(problems)
        visible = names_in(self.session.storage)
        assert visible == self._visible, {
            "unexpected": visible - self._visible,
            "missing": self._visible - visible,
        }
        stats = self.stats()
        assert stats == self._idle, {
            key: (self._idle.get(key), stats[key])
            for key in stats
            if stats[key] != self._idle.get(key)
        }

    def clear(self) -> None:
        """Forget all requests, and remove their files."""
        for name in names_in(self.session.storage):
            (self.session.storage / name).unlink()
        self.session.requests.clear()
        self._expected.clear()
        self._checked.clear()
        self._visible.clear()

    def served(self) -> list[Served]:
        """Return every sequence that the session has served."""
        return [
            Served(
                _name(request, index), tuple(request.sequence(index)), request.begun, request.ended
            )
            for request in self.session.requests.values()
            for index in range(request.n)
        ]

    def _check_request(
        self, request: Request, oracle: Oracle, served: Sequence[Served]
    ) -> list[str]:
        expected = self._expected[request.id]
        problems = []
        for index, path in enumerate(self.session.paths(request)):
            if expected == "nothing" or (expected == "either" and not path.exists()):
                continue
            if expected == "error":
                self._visible |= {path.name + LOCK_SUFFIX, path.name + ERROR_SUFFIX}
                continue
            if expected == "failed":
                self._visible |= {
                    path.name + ERROR_SUFFIX,
                    *([path.name + LOCK_SUFFIX] if _companion_exists(path, LOCK_SUFFIX) else []),
                }
                problems.append(_not_failed(path))
                continue
            if expected == "stopped":
                self._visible |= {path.name + ERROR_SUFFIX, path.name + LOCK_SUFFIX}
                problems.append(_not_stopped(path))
                continue
            own = tuple(request.sequence(index))
            rows = len(request.prompt)
            if expected == "output":
                own = _with_surplus(own, path, request)
                rows = len(own) - 1
            answer = Served(_name(request, index), own, request.begun, request.ended)
            problems.append(oracle.verdict(path, answer, rows, len(request.prompt), served))
            self._visible |= {path.name, path.name + LOCK_SUFFIX}
        if request.finished and not request.aborted and expected != "nothing":
            named = (request.kv_transfer_params or {}).get("hidden_states_path")
            # The frontend aborts a request at a stop string, and has no params to pass on. A client
            # finds the file by the request's name.
            if named not in (
                [None] if request.sampling.get("stop") else map(str, self.session.paths(request))
            ):
                problems.append(f"{request.id}: the answer names {named}")
        return list(filter(None, problems))

    def stats(self) -> dict[str, Any]:
        """Return the idle engine's resources; see driver.Driver.stats."""
        stats: dict[str, Any] = self.session.call("stats")
        del stats["device_bytes"]  # buffers of the runner grow to the largest batch so far
        stats["fds"], stats["threads"] = Counter(stats["fds"]), Counter(stats["threads"])
        assert not any(stats["busy"].values()), stats["busy"]
        assert not any(stats["scheduler"].values()), stats["scheduler"]
        assert not any(stats["worker"].values()), stats["worker"]
        assert not stats["wanted"]
        return stats


class Stages:
    """The stage in use. `get` starts an engine for another stage or after a failure.

    Args:
        directory: for the output of the sessions.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engine = ExitStack()
        self._stage: tuple[str, Stage] | None = None
        self._started = 0

    def get(self, name: str, reference: Reference, **options: Any) -> Stage:
        """Return the stage with that name. Options are those of EngineSession."""
        if self._stage is None or self._stage[0] != name or self._stage[1].session.failed:
            self.close()
            self._started += 1
            self._stage = (
                name,
                self.make(self._directory / f"{self._started}-{name}", reference, options),
            )
        return self._stage[1]

    def make(self, directory: Path, reference: Reference, options: dict[str, Any]) -> Stage:
        """Start an engine."""
        dtype = str(reference.dtype).removeprefix(
            "torch."
        )  # by default vLLM converts float32 to bfloat16
        session = EngineSession(directory, reference.model, dtype=dtype, max_num_seqs=16, **options)
        return Stage(self._engine.enter_context(session), reference)

    def close(self) -> None:
        self._stage = None
        self._engine.close()


def _companion_exists(path: Path, suffix: str) -> bool:
    return path.with_name(path.name + suffix).exists()


def _not_failed(path: Path) -> str:
    try:
        load(path, LOAD_SECONDS)
    except HiddenStatesError:
        return ""
    return f"{path}: it is complete"


def _not_stopped(path: Path) -> str:
    try:
        load(path, LOAD_SECONDS)
    except HiddenStatesError as error:
        return "" if error.reason == SERVER_STOPPED else str(error)
    return f"{path}: it is complete"


def _name(request: Request, index: int) -> str:
    return request.id if request.n == 1 else f"{request.id}#{index}"


def _with_surplus(sequence: tuple[int, ...], path: Path, request: Request) -> tuple[int, ...]:
    """Add the tokens generated between a stop string and the abort, a step or two later."""
    if not request.sampling.get("stop") or not path.exists():
        return sequence
    found = tuple(load(path).token_ids.tolist())
    surplus = len(found) - (len(sequence) - 1)
    assert 0 <= surplus <= 2, (
        f"{request.id}: {len(found)} tokens in the file, {len(sequence)} in prompt and answer"
    )
    if surplus == 0:
        return sequence
    assert found[: len(sequence)] == sequence
    return (*found, 0)
