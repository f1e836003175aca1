"""Where the rows of a request go, and what its response says of that: a path or, in a Mooncake store, a handle."""

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
    """What the scheduler has to know of a sink.

    Attributes:
        directory: that files go to, of which a request may choose one if it is allowed to; None if there are no files.
    """

    directory: Path | None = None

    @abstractmethod
    def of(self, request_id: str) -> Path:
        """Where the rows of a request go that chooses nothing itself: what its sink is given as its path. Two ids never share one."""

    @abstractmethod
    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        """What the response says, but for an error.

        Args:
            path: where the rows go.
            tokens: how many of them there are.
            include_output: whether rows of generated tokens were wanted.
        """


class InDirectory(Destination):
    """A file below a directory.

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
    """An object of a Mooncake store.

    Args:
        row_format: of its rows.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self._row_format = row_format

    def of(self, request_id: str) -> Path:
        return Path(handle_of(request_id))

    def answer(self, path: str, tokens: int, include_output: bool) -> dict[str, Any]:
        return transfer_params(path, self._row_format, tokens, include_output)


def make_destination(start_up: StartUp) -> Destination:
    """Where the sink of these settings puts rows."""
    return InStore(start_up.row_format) if start_up.config.sink == "mooncake" else InDirectory(start_up.directory)
