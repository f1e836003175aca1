"""Names that a run chooses: of its requests, so that their files on the server's side can be told from all others, and of its files."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX, partial_name

_ROW_FILE = re.compile(r"hs_(0|[1-9][0-9]*)" + re.escape(DATA_SUFFIX))
_TOKEN = re.compile(r"[0-9a-f]{12}")
# How vLLM makes an internal id of a request's name: see vllm_ascend_hsx/reader/find.py.
_SERVER_FILE = re.compile(
    r"((?:chat)?cmpl-hsx-([0-9a-f]{12})-[0-9a-f]{4}-([0-9]+|probe)-[0-9]+(?:-0)?(?:-[0-9a-f]{8})?"
    + re.escape(DATA_SUFFIX)
    + f")(?:{re.escape(LOCK_SUFFIX)}|{re.escape(ERROR_SUFFIX)})?"
)


def row_file(row: int) -> str:
    """The name of a row's file in the output directory."""
    return f"hs_{row}{DATA_SUFFIX}"


def row_of_file(name: str) -> int | None:
    """The row whose file is called so, or None."""
    match = _ROW_FILE.fullmatch(name)
    return int(match[1]) if match else None


def hidden_file(name: str, token: str) -> str:
    """What a file is called in the output directory until it gets its name."""
    return partial_name(name, token)


def is_hidden_file(name: str, token: str) -> bool:
    """Whether a run with this token called a file so."""
    return name.startswith(".") and name.endswith(partial_name("", token)[1:])


def new_token() -> str:
    """Tells the requests of an output directory, over all its runs, from all others."""
    return secrets.token_hex(6)


def is_token(text: object) -> bool:
    return isinstance(text, str) and _TOKEN.fullmatch(text) is not None


def is_path(value: object) -> TypeGuard[str]:
    """Whether it is a text that the system would take for a path."""
    try:
        return isinstance(value, str) and value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class RequestNames:
    """The names of the requests of one process: X-Request-Id, which vLLM makes the response's id from.

    Attributes:
        token: of the output directory, kept in its ledger.
        process: tells this process from earlier ones, whose requests the server may still be busy with.
    """

    token: str
    process: str

    @classmethod
    def for_this_process(cls, token: str) -> RequestNames:
        return cls(token, secrets.token_hex(2))

    def row(self, row: int, attempt: int) -> str:
        return f"hsx-{self.token}-{self.process}-{row}-{attempt}"

    def probe(self, number: int) -> str:
        return f"hsx-{self.token}-{self.process}-probe-{number}"


class ServerFile(NamedTuple):
    """A file, lock or error of a request of ours: the data file's name, the run's token, and the row, or None for a probe."""

    data_name: str
    token: str
    row: int | None


def server_file(name: str) -> ServerFile | None:
    """What a name in a server's directory says, or None if it is of no request of ours."""
    match = _SERVER_FILE.fullmatch(name)
    return ServerFile(match[1], match[2], None if match[3] == "probe" else int(match[3])) if match else None
