"""Requests and rows of `hsx generate`, and the expected files and ledgers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_hsx.generate.ledger import row_of_file
from vllm_ascend_hsx.protocol.format import read_header
from vllm_ascend_hsx.reader.load import open_stored
from vllm_ascend_hsx.reader.members import members_in, shards_of
from vllm_ascend_hsx.sinks.file import DirectorySink, FileSink
from vllm_ascend_hsx.sinks.shard import ShardSink

LAYER_IDS = (2, 0, 3)
HIDDEN = 8
MODEL = "tiny"


def expected_rows(token_ids: Sequence[int], layers: int = len(LAYER_IDS)) -> npt.NDArray[np.uint16]:
    """Return bf16 rows [tokens, layers, hidden] of a sequence as bits: different and finite."""
    ids = np.asarray(token_ids, dtype=np.uint32).reshape(-1, 1, 1)
    positions = np.arange(len(token_ids), dtype=np.uint32).reshape(-1, 1, 1)
    layer = np.arange(layers, dtype=np.uint32).reshape(1, -1, 1)
    elements = np.arange(HIDDEN, dtype=np.uint32).reshape(1, 1, -1)
    mixed = (ids * 7919 + positions * 31 + layer * 104729 + elements * 1299709) * np.uint32(
        2654435761
    )
    return ((mixed >> np.uint32(16)) & np.uint32(0xFF7F)).astype(np.uint16)


def change_a_bit(path: Path) -> None:
    """Flip a bit in the rows of a file, or of a member of a shard."""
    found = shards_of(path.parent).find(path.name)
    shard, offset = (path, 0) if found is None else (found[0], found[1].offset)
    with shard.open("r+b") as file:
        file.seek(4096 + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def token_rows(count: int) -> list[dict[str, Any]]:
    """Return a dataset of different rows of 1 to 9 tokens."""
    return [
        {"token_ids": [100 * row + at for at in range(1 + row * 5 % 9)]} for row in range(count)
    ]


def in_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    different = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
SINKS: dict[str, Callable[..., DirectorySink]] = {
    "files": FileSink,
    "shards": partial(ShardSink, shard_bytes=1 << 15),
}


def contents(output: Path) -> dict[str, Tensors]:
    """Return (type, shape, bytes) of each tensor by file or member; {} for files without rows."""
    members = members_in(output)
    names = [name for name in os.listdir(output) if not name.startswith((".", "hsx-"))]
    assert not set(members) & set(names), "a file and a member have one name"
    return {
        name: tensors_of(output / name) if row_of_file(name) is not None else {}
        for name in sorted([*members, *names])
    }


def tensors_of(path: Path) -> Tensors:
    """Return (type, shape, bytes) of each tensor of a file."""
    place = open_stored(path, 0)
    try:
        tensors = read_header(place.fd, place.offset, place.size).tensors
        return {
            name: (each.dtype, each.shape, os.pread(place.fd, each.end - each.begin, each.begin))
            for name, each in tensors.items()
        }
    finally:
        os.close(place.fd)


def right(ids: Sequence[int]) -> Tensors:
    """Return the tensors that the file of a row must have."""
    rows, id_bytes = expected_rows(ids), b"".join(each.to_bytes(8, "little") for each in ids)
    return {
        "hidden_states": ("BF16", rows.shape, rows.tobytes()),
        "token_ids": ("I64", (len(ids),), id_bytes),
    }


def stored_ids(path: Path) -> list[int]:
    """Return the token ids of a file."""
    return np.frombuffer(tensors_of(path)["token_ids"][2], dtype="<i8").tolist()


def ledger_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines about rows."""
    lines = []
    for text in path.read_text().splitlines():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if "row" in line]


@dataclass(frozen=True)
class Seen:
    """A request that the server has received.

    Attributes:
        row: index of the row, from the name of the file.
        time: number of requests for this row so far, including this request.
        endpoint: path after /v1/.
    """

    row: int
    time: int
    endpoint: str
    body: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt. A text has one token per byte."""
        if "messages" in self.body:
            text = "".join(f"<{each['role']}>{each['content']}" for each in self.body["messages"])
            return list((text + "<assistant>" * self.body["add_generation_prompt"]).encode())
        prompt = self.body["prompt"]
        return list(prompt.encode()) if isinstance(prompt, str) else prompt

    @property
    def request_id(self) -> str:
        """vLLM's internal id without the random digits."""
        chat = "messages" in self.body
        return (
            f"chatcmpl-{self.body['request_id']}" if chat else f"cmpl-{self.body['request_id']}-0"
        )

    @property
    def output(self) -> list[int]:
        """Generated tokens."""
        return [7 + step for step in range(self.body["max_tokens"])]

    @property
    def stored(self) -> list[int]:
        """Tokens whose rows are stored."""
        return self.token_ids + (
            self.output[:-1] if self.body["kv_transfer_params"]["include_output_tokens"] else []
        )


@dataclass
class Exchange:
    """A request that is being answered."""

    seen: Seen
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def gone(self) -> None:
        """Wait until the client has closed the connection."""
        while await self.reader.read(1 << 16):
            pass
