"""Leftovers of a server in a directory."""

from __future__ import annotations

import os
from pathlib import Path

from sink_harness import finite_rows, listing, token_ids

from vllm_ascend_hsx.protocol.names import token_of_workspace
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile
from vllm_ascend_hsx.sinks.workspace import LOCK

DATA = "cmpl-1.safetensors"


def open_file(sink: FileSink, directory: Path, name: str = DATA, rows: int = 2) -> RequestFile:
    file = sink.open("cmpl-1", directory / name)
    if rows:
        file.write(0, finite_rows(0, rows))
    return file


def commit(sink: FileSink, directory: Path, name: str = DATA) -> None:
    open_file(sink, directory, name).commit(token_ids(2), 2)


def everything(directory: Path) -> list[str]:
    """Return all names, including those of live servers."""
    return sorted(os.listdir(directory))


def dead_workspaces(directory: Path) -> list[str]:
    return [name for name in listing(directory) if token_of_workspace(name)]


def hidden(directory: Path) -> list[str]:
    """Return the files in all workspaces, including those of live servers."""
    workspaces = (path for path in directory.iterdir() if path.name.startswith("."))
    return [each.name for path in workspaces for each in path.iterdir() if each.name != LOCK]
