"""Where rows go, and what the response says: a path or, in a Mooncake store, a handle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.protocol.api import PATH_KEY
from vllm_ascend_hsx.protocol.mooncake_manifest import handle_of, transfer_params
from vllm_ascend_hsx.protocol.names import file_name
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.settings import StartUp


class Destination(ABC):
    """What the scheduler must know of a sink.

    Attributes:
        directory: directory of the files, in which a request may choose its file if that is
            allowed. None if the sink writes no files.
    """

    directory: Path | None = None

    @abstractmethod
    def of(self, request_id: str) -> Path:
        """Return the default path of a request's rows, for the sink. Each id has its own."""

    @abstractmethod
    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        """Return the response's `kv_transfer_params`, without an error.

        Args:
            path: destination of the rows.
            tokens: number of rows.
            include_output: whether rows of generated tokens are extracted.
        """


class InDirectory(Destination):
    """A file in a directory.

    Args:
        directory: as the administrator wrote it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory: Path = directory

    def of(self, request_id: str) -> Path:
        return self.directory / file_name(request_id)

    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        return {PATH_KEY: path}


class InStore(Destination):
    """An object in a Mooncake store.

    Args:
        row_format: format of its rows.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self._row_format = row_format

    def of(self, request_id: str) -> Path:
        return Path(handle_of(request_id))

    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        return transfer_params(path, self._row_format, tokens, include_output)


def make_destination(start_up: StartUp) -> Destination:
    """Return the destination that belongs to the configured sink."""
    return (
        InStore(start_up.row_format)
        if start_up.config.sink == "mooncake"
        else InDirectory(start_up.directory)
    )
