"""Changed ledgers of `hsx generate` are refused, or read without the invalid lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import DEEP, KINDS, plant_no_file, promptly

from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.ledger import open_ledger


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["ledger.jsonl", "ledger-1-of-2.jsonl"])
def test_generate_refuses_an_irregular_ledger(tmp_path: Path, kind: str, which: str) -> None:
    plant_no_file(tmp_path / which, kind)
    with pytest.raises(InputError, match=f"--output .*{which}"):
        promptly(lambda: open_ledger(tmp_path, {}))


def test_linked_ledger_is_not_written(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"no line")
    output = tmp_path / "rows"
    output.mkdir()
    (output / "ledger.jsonl").symlink_to(precious)
    with pytest.raises(InputError, match="--output"):
        open_ledger(output, {})
    assert precious.read_bytes() == b"no line"


ODD_LINES = [DEEP, "[" * 100_000, "[1]", "1e400", '{"row":1e400}', '{"row":true,"status":[]}', '{"row":' + "9" * 5000 + "}",
             '{"server":[],"directories":3}', '{"server":null}', '{"server":1}', "\0", "\\ud800", '{"row":1,"row":2}', '{"row":NaN}',
             '{"row":2,"status":"done"}', '{"row":2,"status":"done","identity":7}', '{"row":2,"status":{},"identity":""}',
             '{"row":-1,"status":"done","identity":""}', '{"row":9e9,"status":"done","identity":""}']  # fmt: skip
IDENTITY = "0a" * 16


def test_invalid_ledger_lines_are_skipped(tmp_path: Path) -> None:
    request = {"a": 1}
    server = {
        "model": "m",
        "layer_ids": [1],
        "layers": 1,
        "hidden_size": 8,
        "dtype": "bfloat16",
        "rotated": False,
        "lora": "",
    }
    first = open_ledger(tmp_path, request)
    first.note_server(server)
    first.close()
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    with open(path, "ab") as file:
        for line in ODD_LINES:
            file.write(line.encode() + b"\n")
        file.write(b'{"row":2,"status":"done","identity":"%b"}\n' % IDENTITY.encode())
    for world_size in (1, 2):
        ledger = open_ledger(tmp_path, request, world_size)
        ledger.close()
        assert ledger.server == server
        assert ledger.is_done(2, IDENTITY)
        assert len(ledger.finished.marks) == 3
    for line in ODD_LINES:
        path.write_bytes(line.encode() + b"\n" + whole)
        with pytest.raises(InputError, match="is not a ledger of version"):
            open_ledger(tmp_path, request)


@pytest.mark.parametrize("other", ["{}", '{"layer_ids":[]}'])
def test_odd_line_of_another_server_is_refused(tmp_path: Path, other: str) -> None:
    first = open_ledger(tmp_path, {})
    first.note_server({"model": "m", "layer_ids": [1]})
    first.close()
    with open(tmp_path / "ledger.jsonl", "ab") as file:
        file.write(b'{"server":%b}\n' % other.encode())
    with pytest.raises(InputError, match="holds rows of two servers: model was m, is None"):
        open_ledger(tmp_path, {})
