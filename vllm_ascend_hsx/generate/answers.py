"""Store the target's answers as JSON lines, and write a training dataset at the end.

    {"row": 17, "request_id": ..., "prompt_tokens": 9, "token_ids": [...],
     "output_token_ids": [...], "text": ..., "finish_reason": "stop"}

`token_ids` are the tokens in the row's file: the prompt and all generated tokens except the last.
The request id links an answer to a file, because it is also in the file's metadata. A row that is
sampled again, or that moves in the dataset, therefore never gets the tokens of another file. The
dataset has the form that speculators trains on (train/data.py:141, 0.9.0): row i has the tokens and
the loss mask of hs_i.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ascend_hsx.generate.client import Answer
from vllm_ascend_hsx.generate.errors import RunError
from vllm_ascend_hsx.generate.files import request_in
from vllm_ascend_hsx.generate.ledger import mark_of, parse_line, rank_file, row_file
from vllm_ascend_hsx.protocol.files import OnError, describe, open_regular
from vllm_ascend_hsx.reader.check import check
from vllm_ascend_hsx.reader.load import HiddenStatesError

DATASET = "training_data"
# A row without an answer is one token without loss. An empty row would fail: speculators requests
# the hidden states of missing rows by default, and a server can't compute an empty prompt.
_NO_ANSWER = {"input_ids": [0], "loss_mask": [0], "seq_len": 1, "text": "", "finish_reason": ""}
_BEGIN = re.compile(rb'\{"row":[0-9]+,"request_id":"([0-9a-f-]+)"')


class Index:
    """Positions of the answers in a directory, 16 bytes each. Raises OSError.

    Args:
        output: the directory.
    """

    def __init__(self, output: Path) -> None:
        self._files = sorted(output.glob("answers*.jsonl"))
        keys, places = array("q"), array("q")
        for number, path in enumerate(self._files):
            with open(open_regular(path), "rb") as file:
                offset = 0
                for line in file:
                    if match := _BEGIN.match(line):
                        keys.append(hash(match[1].decode()))
                        places.append(offset * len(self._files) + number)
                    offset += len(line)
        order = np.argsort(keys, kind="stable")
        self._keys, self._places = np.asarray(keys)[order], np.asarray(places)[order]

    def find(self, request_id: str) -> dict[str, Any] | None:
        """Return the last answer to a request; None if there is none. Raises OSError."""
        first, end = (
            int(np.searchsorted(self._keys, hash(request_id), side)) for side in ("left", "right")
        )
        for place in reversed(self._places[first:end]):
            offset, number = divmod(int(place), len(self._files))
            with open(open_regular(self._files[number]), "rb") as file:
                file.seek(offset)
                line = parse_line(file.readline())  # {} if a run was killed while it wrote the line
            if line.get("request_id") == request_id:
                return line
        return None


class Answers:
    """The answers in an output directory. Each rank appends to a file of the rank.

    Args:
        output: the directory.
        world_size, rank: as in `Options`.

    Raises:
        RunError: a file cannot be read or written.
    """

    def __init__(self, output: Path, world_size: int = 1, rank: int = 0) -> None:
        self._path = output / rank_file("answers", world_size, rank)
        try:
            self._fd = open_regular(
                self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT, 0o644
            )
            with OnError(os.close, self._fd):
                size = os.fstat(self._fd).st_size
                if size and os.pread(self._fd, 1, size - 1) != b"\n":
                    os.write(self._fd, b"\n")  # end the partial line of a killed run
                self._earlier = Index(output)
        except OSError as error:
            raise RunError(
                describe(f"cannot write {self._path} or read earlier answers", error)
            ) from error

    def has(self, row: int, request_id: str) -> bool:
        """Return True if an earlier run has stored the answer to a request.

        If the row has moved in the dataset, store the answer again with the new number.

        Raises:
            OSError, RunError: a file cannot be read or written.
        """
        line = self._earlier.find(request_id)
        if line is not None and line["row"] != row:
            self._write({**line, "row": row})
        return line is not None

    def append(self, row: int, answer: Answer) -> None:
        """Store the answer to a row. Raises RunError."""
        prompt, output = list(answer.expected.prompt or ()), list(answer.expected.output or ())
        line = {
            "row": row,
            "request_id": answer.request_id,
            "prompt_tokens": len(prompt),
            "token_ids": prompt + output,
        }
        self._write(
            {
                **line,
                "output_token_ids": answer.output,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise RunError(describe(f"cannot write {self._path}", error)) from error

    def close(self) -> None:
        """Close the file. Remove an empty file."""
        try:
            opened = os.fstat(self._fd)
            with suppress(OSError):  # somebody removed it
                if not opened.st_size and os.path.samestat(opened, os.stat(self._path)):
                    self._path.unlink()
        finally:
            os.close(self._fd)


def write_dataset(output: Path, marks: Sequence[int]) -> Path:
    """Write the answers of all ranks as a dataset. Replace an earlier dataset of other answers.

    A dataset of the same answers is kept: the trainer stores files such as the draft's vocabulary
    in the folder.

    Args:
        output: the directory of the answers.
        marks: marks of the rows' identities; 0 for a row without an answer.

    Returns:
        The folder of the dataset.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        Exception: a file cannot be read or written; the cause is an OSError.
    """
    import datasets

    numbers = {
        name: datasets.Sequence(datasets.Value("int64")) for name in ("input_ids", "loss_mask")
    }
    texts = {name: datasets.Value("string") for name in ("text", "finish_reason")}
    features = datasets.Features({**numbers, "seq_len": datasets.Value("int64"), **texts})
    folder = output / DATASET
    sizes = sorted((path.name, path.stat().st_size) for path in output.glob("answers*.jsonl"))
    stamp = hashlib.blake2b(
        np.asarray(marks, np.uint64).tobytes() + repr(sizes).encode(), digest_size=16
    ).hexdigest()
    with suppress(OSError, ValueError):
        if json.loads((folder / "dataset_info.json").read_text())["description"] == stamp:
            return folder
    work = output / f".{DATASET}"
    shutil.rmtree(work, ignore_errors=True)  # a killed run leaves it behind
    new = work / "new"
    try:
        source = {"output": output, "marks": marks}
        rows = datasets.Dataset.from_generator(
            _records, features=features, cache_dir=str(work), gen_kwargs=source
        )
        rows.info.description = stamp
        rows.save_to_disk(new)
        state = new / "state.json"
        # `with_format` would import torch.
        state.write_text(json.dumps(json.loads(state.read_text()) | {"_format_type": "torch"}))
        if folder.exists():
            os.rename(folder, work / "old")
        os.rename(new, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _records(output: Path, marks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the training row of each row of the dataset."""
    index = Index(output)
    for row, mark in enumerate(marks):
        request_id = ""
        with suppress(HiddenStatesError, FileNotFoundError, TimeoutError):
            request_id = request_in(check(output / row_file(row), data=False).metadata)
        line = index.find(request_id) if mark and mark_of(request_id) == mark else None
        yield _NO_ANSWER if line is None else _record(line)


def _record(line: dict[str, Any]) -> dict[str, Any]:
    """Return the training row of an answer. The loss covers generated tokens only."""
    ids, prompt = line["token_ids"], line["prompt_tokens"]
    mask = [0] * prompt + [1] * (len(ids) - prompt)
    # Arrow refuses lone surrogates.
    texts = {
        name: line[name].encode(errors="replace").decode() for name in ("text", "finish_reason")
    }
    return {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids), **texts}
