"""The design page names exactly the threads, queues, locks and states of the write path."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_ascend_hsx.connector.extraction import State

ROOT = Path(__file__).parents[3]
# The table covers files in a storage directory, not a Mooncake store.
WRITE_PATH = ("connector", "drafter", "sinks", "protocol")
LEFT_OUT = "mooncake"
MOST = 28
KINDS = {
    "Lock": "lock",
    "RLock": "lock",
    "Condition": "lock",
    "Thread": "thread",
    "Timer": "thread",
    "ThreadPool": "thread",
    "SimpleQueue": "queue",
    "Queue": "queue",
    "Lane": "queue",
}
# The table lists pools, not threads of pools. The function that starts the other thread ends it.
NO_CONCEPT = {("thread", "ThreadPool._threads"), ("thread", "_use_one_thread.restore")}


def owners(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each statement with the enclosing class; outside of classes, with the function."""

    def walk(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.stmt]]:
        for child in ast.iter_child_nodes(node):
            inside = owner
            if isinstance(child, ast.ClassDef) or (
                isinstance(child, ast.FunctionDef) and not owner
            ):
                inside = child.name
            if isinstance(child, ast.stmt):
                yield inside, child
            yield from walk(child, inside)

    return walk(tree, "")


def made_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield kind and name (Class.attribute) of each thread, queue and lock that a file makes."""
    for owner, statement in owners(ast.parse(path.read_text())):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [
                target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                for target in targets
            ]
        elif isinstance(statement, ast.Expr):  # self._threads.append(Thread(...))
            names = [
                found.attr
                for found in ast.walk(statement)
                if isinstance(found, ast.Attribute) and found.attr.startswith("_")
            ]
        else:
            continue
        called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for function in called:
            kind = KINDS.get(
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            if kind is not None:
                yield kind, f"{owner}.{names[0]}"


def everything_made() -> set[tuple[str, str]]:
    files = [
        path for folder in WRITE_PATH for path in (ROOT / "vllm_ascend_hsx" / folder).rglob("*.py")
    ]
    return {each for path in files if LEFT_OUT not in path.parts for each in made_in(path)}


def made() -> set[tuple[str, str]]:
    states = {("state", f"State.{state.name}") for state in State}
    return everything_made() - NO_CONCEPT | states | {("thread", "MainThread")}


def named() -> set[tuple[str, str]]:
    page = (ROOT / "docs/design.md").read_text()
    return set(re.findall(r"^\| (thread|queue|lock|state) \| `([\w.]+)` \|", page, re.MULTILINE))


def test_the_design_page_names_each_thread_queue_lock_and_state() -> None:
    assert everything_made() >= NO_CONCEPT
    assert named() == made()


def test_write_path_has_at_most_28_concepts() -> None:
    assert len(made()) <= MOST
