"""Requests of the killed servers. The id determines all properties of a request."""

from __future__ import annotations

import os
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sink_harness import checksum_of

from vllm_ascend_hsx.protocol.checksum import ALGORITHM
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.format import HIDDEN_STATES, TOKEN_IDS, read_header
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.members import open_member
from vllm_ascend_hsx.reader.shards import Place
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.directory import check_directory

SMALL = RowFormat(layer_ids=(2, 0, 3), hidden_size=8, dtype="BF16", model="tiny")
PAGES = RowFormat(
    layer_ids=(4, 1), hidden_size=1024, dtype="BF16", model="tiny"
)  # a page per row, for direct I/O

ENDS = ("commit", "commit", "commit", "commit", "fail", "discard", "never")


@dataclass(frozen=True)
class Request:
    """A request with the id `<server>.<serial>.<name>`.

    Attributes:
        id: as above.
        server: number of the server.
        name: name of the file.
        row_format, options: those of the server.
        tokens, num_prompt_tokens: tokens of the file.
        end: one of ENDS.
    """

    id: str
    server: int
    name: str
    row_format: RowFormat
    options: FileOptions
    tokens: int
    num_prompt_tokens: int
    end: str

    @classmethod
    def of(cls, request_id: str, direct: bool) -> Request:
        server, _, name = request_id.split(".", 2)
        row_format, options = settings_of(int(server), direct)
        luck = random.Random(request_id)
        tokens = luck.choice([0, 1, 2, 3, 7, luck.randrange(1, 40)])
        return cls(
            request_id,
            int(server),
            name,
            row_format,
            options,
            tokens,
            luck.randint(0, tokens),
            luck.choice(ENDS),
        )

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint16]:
        """Return the rows of positions [first, last); no two rows and no two requests are alike."""
        positions = np.arange(first, last, dtype=np.uint32).reshape(-1, 1, 1)
        elements = np.arange(self.row_format.row_bytes // 2, dtype=np.uint32).reshape(
            1, *self.row_format.row_shape
        )
        mixed = (
            positions * 7919 + elements * 104729 + np.uint32(zlib.crc32(self.id.encode()))
        ) * np.uint32(2654435761)
        rows: npt.NDArray[np.uint16] = (mixed >> np.uint32(16)).astype(np.uint16)
        return rows

    def token_ids(self) -> npt.NDArray[np.int64]:
        return np.arange(self.tokens, dtype=np.int64) * 3 + zlib.crc32(self.id.encode())

    def spans(self) -> list[tuple[int, int, bool]]:
        """Return the writes, in order, as (first, last, stale).

        Positions are written in any order. Stale (wrong) rows come before the right rows, or after
        the last token.
        """
        luck = random.Random(f"{self.id} spans")
        cuts = sorted(
            {0, self.tokens, *(luck.randint(0, self.tokens) for _ in range(luck.randrange(4)))}
        )
        spans = [(first, last, False) for first, last in zip(cuts, cuts[1:], strict=False)]
        if luck.random() < 0.5:
            luck.shuffle(spans)
        if luck.random() < 0.3 and self.tokens:
            spans.insert(0, (luck.randrange(self.tokens), self.tokens + luck.randrange(3), True))
        if luck.random() < 0.2:
            spans.append((self.tokens, self.tokens + 1, True))
        return spans

    def check(self, fd: int, offset: int = 0, size: int | None = None) -> None:
        """Compare a file or a part with the request. Raises AssertionError, FormatError."""
        header = read_header(fd, offset, size)
        states, ids = header.tensors[HIDDEN_STATES], header.tensors[TOKEN_IDS]
        assert states.shape == (self.tokens, *self.row_format.row_shape), (
            f"{states.shape}, {self.tokens} tokens expected"
        )
        assert states.dtype == "BF16"
        found = np.frombuffer(
            os.pread(fd, states.end - states.begin, states.begin), np.uint16
        ).reshape(states.shape)
        assert np.array_equal(found, self.rows(0, self.tokens)), "its rows are wrong"
        found_ids = np.frombuffer(os.pread(fd, ids.end - ids.begin, ids.begin), np.int64)
        assert np.array_equal(found_ids, self.token_ids()), "its token ids are wrong"
        assert header.metadata["num_prompt_tokens"] == str(self.num_prompt_tokens)
        end = os.fstat(fd).st_size if size is None else offset + size
        assert end == max(states.end, ids.end), f"{end - offset} bytes"
        if self.options.checksum == "crc32c":
            assert header.metadata["checksum_algorithm"] == ALGORITHM
            assert header.metadata["checksum"] == checksum_of(os.pread(fd, end - offset, offset)), (
                "its checksum is wrong"
            )
        else:
            assert "checksum" not in header.metadata


def settings_of(server: int, direct: bool) -> tuple[RowFormat, FileOptions]:
    """Return format and options of a server.

    Args:
        server: number of the server.
        direct: whether the directory's filesystem has O_DIRECT.
    """
    luck = random.Random(f"server {server}")
    io = "direct" if direct and luck.random() < 0.25 else "buffered"
    options = FileOptions(
        io=io,  # type: ignore[arg-type]
        durability="fdatasync" if luck.random() < 0.15 else "none",
        checksum="crc32c" if luck.random() < 0.75 else "none",
    )
    return PAGES if io == "direct" or luck.random() < 0.2 else SMALL, options


def request_of(path: Path, direct: bool) -> Request:
    """Return the request whose rows are in a file.

    Raises AssertionError or FormatError if the rows are wrong, and FileNotFoundError.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
        place = Place(fd, 0, os.fstat(fd).st_size)
    except FileNotFoundError:
        found = open_member(path)
        if found is None:
            raise
        place = found
    try:
        request = Request.of(read_header(*place[:3]).metadata["request_id"], direct)
        request.check(*place[:3])
    finally:
        os.close(place.fd)
    assert request.name == path.name, f"{path.name} holds the rows of {request.id}"
    return request


def has_direct(directory: Path) -> bool:
    try:
        check_directory(directory, direct=True)
    except UserError:
        return False
    return True
