"""Possible states of a name, given the log of a server of crash_harness.py."""

from __future__ import annotations

from typing import NamedTuple


class State(NamedTuple):
    """State of one name: "data" or "error" of a request, or "nothing"; and a lock file."""

    kind: str
    request_id: str
    lock: bool


EMPTY = State("nothing", "", False)
WAITING = State("nothing", "", True)


def replay(
    events: list[list[str]],
    allowed: dict[str, set[State]],
    problems: list[str],
    *,
    keeps_locks: bool,
) -> None:
    """Return the states of each file that agree with the logged events of a server."""
    running: dict[str, str] = {}
    for event, what in events:
        if event == "error":
            problems.append(f"a server met {what}")
        if event == "close":
            for name, request_id in running.items():
                allowed[name] |= {State("error", request_id, True)}
        if event == "closed":
            allowed.update(
                {name: {State("error", request_id, True)} for name, request_id in running.items()}
            )
        name = what.split(".", 2)[-1]
        if name not in allowed:
            continue
        data, error = State("data", what, True), State("error", what, True)
        if event == "open":
            allowed[name] |= {state._replace(lock=True) for state in allowed[name]} | {WAITING}
        elif event == "refused":
            allowed[name] = {state for state in allowed[name] if state.kind == "data"}
        elif event == "remove":  # the lock goes first
            allowed[name] |= {state._replace(lock=False) for state in allowed[name]} | {EMPTY}
        elif event == "removed":
            allowed[name] = {EMPTY}
        elif event == "opened":
            allowed[name] = {WAITING}
            running[name] = what
        elif event in ("commit", "fail", "discard"):
            allowed[name] = {WAITING, {"commit": data, "fail": error, "discard": EMPTY}[event]}
            if event == "commit" and not keeps_locks:
                allowed[name].add(data._replace(lock=False))
        elif event.endswith(" done"):
            allowed[name] = {
                {
                    "commit done": data._replace(lock=keeps_locks),
                    "fail done": error,
                    "discard done": EMPTY,
                }[event]
            }
            del running[name]
