"""The answers of the target beside the rows: lines of JSON, and at the end a dataset to train on.

    {"row": 17, "identity": ..., "prompt_tokens": 9, "token_ids": [...], "output_token_ids": [...],
     "text": ..., "finish_reason": "stop"}

`token_ids` are those that have rows in the row's file: the prompt's and all generated ones but the
last. The dataset has the form that speculators trains on (train/data.py:141, 0.9.0): row i has the
tokens and the loss mask of hs_i.safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_ascend_hsx.generate.client import Answer
from vllm_ascend_hsx.generate.errors import RunError
from vllm_ascend_hsx.generate.ledger import Division, Finished, Status, mark_of, parse_line, row_line
from vllm_ascend_hsx.protocol.files import OnError, describe, open_regular

DATASET = "training_data"
# A row that has no answer keeps its place, with a token on which nothing is trained.
_NO_ANSWER = {"input_ids": [0], "loss_mask": [0], "seq_len": 1, "text": "", "finish_reason": ""}


class Answers:
    """The answers in an output directory; those of this run are appended to a file of its rank.

    Args:
        output: the directory.
        division: of the rows.

    Raises:
        RunError: a file cannot be read or written.
    """

    def __init__(self, output: Path, division: Division) -> None:
        self._output = output
        name = "answers.jsonl" if division.world_size == 1 else f"answers-{division.rank}-of-{division.world_size}.jsonl"
        self._path = output / name
        self._known = Finished()
        try:
            self._fd = open_regular(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT, 0o644)
            with OnError(os.close, self._fd):
                os.write(self._fd, b"\n")  # ends the line at which a run was killed
                for line in _lines(output):
                    self._known.note(line["row"], Status.DONE, line["identity"])
        except OSError as error:
            raise RunError(describe(f"{self._path} cannot be written, or other answers not be read", error)) from error

    def has(self, row: int, identity: str) -> bool:
        """Return True if the row has an answer."""
        return self._known.has(row, identity)

    def append(self, row: int, identity: str, answer: Answer) -> None:
        """Store the answer to a row. Raises RunError."""
        prompt, output = list(answer.expected.prompt or ()), list(answer.expected.output or ())
        line = {"row": row, "identity": identity, "prompt_tokens": len(prompt), "token_ids": prompt + output}
        line |= {"output_token_ids": answer.output, "text": answer.text, "finish_reason": answer.finish_reason}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise RunError(describe(f"{self._path} cannot be written", error)) from error
        self._known.note(row, Status.DONE, identity)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def write_dataset(output: Path, marks: Sequence[int]) -> Path:
    """Write the answers of all ranks as a dataset. Replaces an earlier one.

    Args:
        output: the directory of the answers.
        marks: of the identities of the rows; 0: the row has no answer.

    Returns:
        The folder.

    Raises:
        ModuleNotFoundError: `datasets` is not installed.
        OSError: a file cannot be read or written.
    """
    import datasets

    numbers = {name: datasets.Sequence(datasets.Value("int64")) for name in ("input_ids", "loss_mask")}
    texts = {name: datasets.Value("string") for name in ("text", "finish_reason")}
    features = datasets.Features({**numbers, "seq_len": datasets.Value("int64"), **texts})
    folder = output / DATASET
    with tempfile.TemporaryDirectory(dir=output, prefix=f".{DATASET}-") as work:
        new, old = Path(work) / "new", Path(work) / "old"
        rows = datasets.Dataset.from_generator(_records, features=features, cache_dir=work, gen_kwargs={"output": output, "marks": marks})
        rows.with_format("torch").save_to_disk(new)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _records(output: Path, marks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the training row of each row of the dataset."""
    places = array("q", [-1]) * (2 * len(marks))  # for each row: file and offset of its answer
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "rb")) for path in _files(output)]
        for number, file in enumerate(files):
            offset = 0
            for text in file:
                line = _answer(text)
                if line is not None and line["row"] < len(marks) and mark_of(line["identity"]) == marks[line["row"]]:
                    places[2 * line["row"]], places[2 * line["row"] + 1] = number, offset
                offset += len(text)
        for row in range(len(marks)):
            number, offset = places[2 * row], places[2 * row + 1]
            if number < 0:
                yield _NO_ANSWER
            else:
                files[number].seek(offset)
                yield _record(parse_line(files[number].readline()))


def _record(line: dict[str, Any]) -> dict[str, Any]:
    """Return the training row of an answer. Only generated tokens have a loss."""
    ids, prompt = line["token_ids"], line["prompt_tokens"]
    mask = [0] * prompt + [1] * (len(ids) - prompt)
    return {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids), "text": line["text"], "finish_reason": line["finish_reason"]}


def _files(output: Path) -> list[Path]:
    return sorted(output.glob("answers*.jsonl"))


def _lines(output: Path) -> Iterator[dict[str, Any]]:
    for path in _files(output):
        with open(open_regular(path), "rb") as file:
            yield from filter(None, map(_answer, file))


def _answer(text: bytes) -> dict[str, Any] | None:
    """Return the line of an answer; None for anything else, such as half of one."""
    line = parse_line(text)
    return line if row_line({**line, "status": Status.DONE.value}) and isinstance(line.get("token_ids"), list) else None
