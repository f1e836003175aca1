"""Ray's functions for `hsx generate --ray` in this process. A task runs when it is submitted."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

OPTIONS = {"num_cpus", "max_retries", "retry_exceptions", "scheduling_strategy", "label_selector"}


class RayError(Exception):
    """Base class of Ray's errors."""


class RayTaskError(RayError):
    """Error of a task. `get` raises a subclass of this class and of the original error's class."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    def __str__(self) -> str:
        return f"Traceback (most recent call last) {self.cause!r}"


class InlineRay(ModuleType):
    """Replacement of the module `ray`. Tests change the attributes.

    Attributes:
        nodes_now: the answer of `nodes`.
        lose: called with the numbers of a task and an attempt. True: the result is lost, and the
            task runs again.
        refuse: error that `init` raises.
        asked: options of each task.
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
        """Return the modules for sys.modules."""
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

    def remote(self, function: Any) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(
                remote=lambda *given: self._call(function, options, given)
            )
        )

    def _call(self, function: Any, options: dict[str, Any], given: tuple[Any, ...]) -> Any:
        assert options.keys() <= OPTIONS
        self.asked.append(options)
        number = len(self.asked)
        for attempt in range(options["max_retries"] + 1):
            sent = pickle.loads(pickle.dumps(given))  # as for another machine
            try:
                result = function(*sent)
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
