"""What `hsx generate --ray` calls of Ray, in this process: a task is done when it is submitted."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

OPTIONS = {"num_cpus", "max_retries", "retry_exceptions", "scheduling_strategy", "label_selector"}


class RayError(Exception):
    """As all of Ray's own errors."""


class RayTaskError(RayError):
    """An error of a task, which `get` raises as of the error's own class, too."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    def __str__(self) -> str:
        return f"Traceback (most recent call last) {self.cause!r}"


class InlineRay(ModuleType):
    """The module.

    Attributes:
        nodes_now: what `ray.nodes` answers; changed by tests.
        lose: called with the number of a task, and of the attempt; True if its result is lost, so
            that the task is done again.
        refuse: raised by `init`.
        asked: the options of each task.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.nodes_now: list[dict[str, Any]] = [node("a"), node("b")]
        self.lose: Callable[[int, int], bool] = lambda task, attempt: False
        self.refuse: Exception | None = None
        self.asked: list[dict[str, Any]] = []
        self.most_at_once = 0
        self.connected = False

    def modules(self) -> dict[str, ModuleType]:
        """All modules to be put into sys.modules."""
        exceptions = ModuleType("ray.exceptions")
        vars(exceptions).update(RayError=RayError, RayTaskError=RayTaskError)
        return {"ray": self, "ray.exceptions": exceptions}

    def init(self, address: str, **_: Any) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def nodes(self) -> list[dict[str, Any]]:
        return self.nodes_now

    def put(self, value: Any) -> Any:
        return value

    def remote(self, what: Any) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(
                remote=lambda *given: self._call(what, options, given)
            )
        )

    def _call(self, what: Any, options: dict[str, Any], given: tuple[Any, ...]) -> Any:
        assert options.keys() <= OPTIONS
        self.asked.append(options)
        number = len(self.asked)
        for attempt in range(options["max_retries"] + 1):
            sent = pickle.loads(pickle.dumps(given))  # as to another machine
            try:
                result = what(*sent)
            except Exception as error:  # noqa: BLE001 (any error of a task is the caller's)
                if attempt == options["max_retries"] or not isinstance(
                    error, tuple(options["retry_exceptions"] or ())
                ):
                    both = type("Both", (RayTaskError, type(error)), {})
                    return _Result(both(error))
                continue
            if not self.lose(number, attempt):
                return _Result(pickle.loads(pickle.dumps(result)))
        return _Result(RayError("the node of the task died"))

    def wait(self, results: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        self.most_at_once = max(self.most_at_once, len(results))
        return list(results[:1]), list(results[1:])

    def get(self, result: Any) -> Any:
        if isinstance(result.value, Exception):
            raise result.value
        return result.value


class _Result:
    def __init__(self, value: Any) -> None:
        self.value = value


def node(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "NodeID": name,
        "Alive": True,
        "Resources": {"CPU": 2.0},
        "Labels": {"storage": "here"},
    } | changes
