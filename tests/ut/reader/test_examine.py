"""`examine` finds the problems of a file, and no false ones."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from written_files import FORMAT, rows_of, write

from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.protocol.format import TensorInfo
from vllm_ascend_hsx.reader import check, tensors
from vllm_ascend_hsx.reader.check import Expected, examine
from vllm_ascend_hsx.reader.load import HiddenStatesError, open_dir
from vllm_ascend_hsx.sinks.file import FileSink


def test_good_file_is_described(tmp_path: Path) -> None:
    rows = rows_of(50)
    found = examine(write(tmp_path, "a", rows, prompt=40), norms=True)
    assert (found.problem, found.verdict) == (None, "verified")
    assert (found.tokens, found.prompt_tokens, found.kind) == (
        50,
        40,
        ((2, 4), 2, 8, "bfloat16", False, ""),
    )
    assert found.num_bytes == rows.nbytes
    norms = rows.float().norm(dim=-1)
    assert found.norms == pytest.approx(norms.mean(0).tolist())
    assert np.allclose(found.token_norms, norms)


def test_large_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = examine(write(tmp_path, "a", rows_of(50)), norms=True)
    monkeypatch.setattr("vllm_ascend_hsx.reader.check._BLOCK", 1)
    in_blocks = examine(whole.path, norms=True)
    assert np.array_equal(in_blocks.token_norms, whole.token_norms)
    assert in_blocks.norms == pytest.approx(whole.norms)


def test_file_truncated_while_being_read_is_reported_as_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a truncated page of a mapped file would end the process."""
    path = write(tmp_path, "a", torch.zeros(200, 2, 4096, dtype=torch.bfloat16))
    seen = []

    def cut_off(name: str, *_: object) -> None:
        seen.append(name)
        os.truncate(path, 8192)

    monkeypatch.setattr(check, "_BLOCK", 1 << 20)
    monkeypatch.setattr(check, "_not_finite", cut_off)
    assert "while it was being read" in str(examine(path).problem)
    assert seen == ["hidden_states"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_value_is_named(
    tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ascend_hsx.reader.check._BLOCK", 100)
    rows = rows_of(20)
    rows[17, 1, 3] = value
    path = write(tmp_path, "a", rows)
    assert examine(path).problem == "the row of token 17 in layer 1 is not finite"
    assert check.check(path, data=False).problem is None


def test_large_values_are_finite(tmp_path: Path) -> None:
    assert examine(write(tmp_path, "a", rows_of(5, scale=1e30))).problem is None


def test_changed_byte_is_found_unless_checksums_are_off(tmp_path: Path) -> None:
    path = write(tmp_path, "a", rows_of(5))
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    assert "it has changed since it was written" in str(examine(path).problem)
    assert examine(path, checksum=False).problem is None


def test_file_of_another_producer_is_plausible(tmp_path: Path) -> None:
    save_file(
        {"hidden_states": rows_of(3), "token_ids": torch.arange(3)}, tmp_path / "x.safetensors"
    )
    found = examine(tmp_path / "x.safetensors")
    assert (found.problem, found.verdict, found.kind.layer_ids, found.prompt_tokens) == (
        None,
        "plausible",
        (),
        None,
    )


@pytest.mark.parametrize(
    ("tensors", "metadata", "problem"),
    [
        (
            {"hidden_states": torch.zeros(3, 8), "token_ids": torch.arange(3)},
            {},
            "not [tokens, layers, hidden]",
        ),
        ({"hidden_states": torch.zeros(3, 2, 8)}, {}, "it has no token_ids"),
        (
            {"hidden_states": torch.zeros(3, 2, 8), "token_ids": torch.arange(3)},
            {"layer_ids": "[1]"},
            "names 1 layer ids, but has 2",
        ),
        (
            {"hidden_states": torch.zeros(3, 2, 8), "token_ids": torch.arange(3)},
            {"num_prompt_tokens": "4"},
            "has 3 tokens, but states 4 prompt tokens",
        ),
        (
            {"hidden_states": torch.zeros(3, 2, 8), "token_ids": torch.arange(3) - 1},
            {},
            "negative token id",
        ),
    ],
)
def test_contradictions_are_reported(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], problem: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors", metadata or None)
    assert problem in str(examine(tmp_path / "x.safetensors").problem)


def test_missing_or_irregular_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no header")
    assert "this is not a file of hidden states" in str(examine(tmp_path / "x.safetensors").problem)
    assert "cannot be read" in str(examine(tmp_path / "y.safetensors").problem)


def test_open_file_is_reported_as_still_written(tmp_path: Path) -> None:
    with FileSink(tmp_path, FORMAT) as sink:
        file = sink.open("a", tmp_path / "a.safetensors")
        assert examine(file.path).problem == "a server is still writing it"


def spoil(at: int, to: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at : at + len(to) if at + len(to) else None] = to
        path.write_bytes(data)

    return change


KNOWN = {
    "as expected": (Expected([0, 1, 2], [3]), None),
    "nothing known": (Expected(None, None), None),
    "a prompt alone": (Expected([0, 1, 2], None), None),
    "another prompt": (Expected([0, 9, 2], [3]), "prompt token 1 is 1, not 9"),
    "a longer prompt": (
        Expected([0, 1, 2, 3, 4], None),
        "it has 4 rows for 5 prompt tokens",
    ),
    "rows of an output": (
        Expected([0, 1], ()),
        "it has 2 rows for 0 generated tokens",
    ),
    "another output": (
        Expected([0, 1], [2, 9]),
        "generated token 1 is 3, not 9",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_expected_tokens_are_compared_before_rows_are_read(tmp_path: Path, name: str) -> None:
    expected, problem = KNOWN[name]
    path = write(tmp_path, "a", rows_of(4))
    assert (
        check.check(path, expected).problem
        == check.check(path, expected, data=False).problem
        == problem
    )
    spoil(4096, b"\x80\x7f")(path)  # infinity
    assert check.check(path, expected, data=False).problem == problem
    assert problem is None or check.check(path, expected).problem == problem
    assert "its checksum" in str(check.check(path).problem)


def test_each_byte_of_the_rows_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "a", torch.zeros(50_000, 2, 8, dtype=torch.bfloat16))
    reads: list[tuple[int, int]] = []

    def read_at(fd: int, begin: int, end: int) -> memoryview:
        reads.append((begin, end))
        return tensors.read_at(fd, begin, end)

    monkeypatch.setattr(check, "read_at", read_at)
    assert examine(path).problem is None
    rows = sorted(each for each in reads if each[1] <= 4096 + 50_000 * 32)
    assert [begin for begin, _ in rows] == [4096, *(end for _, end in rows[:-1])] and len(rows) > 1
    assert rows[-1][1] == 4096 + 50_000 * 32


@given(st.sampled_from(sorted(check._EXPONENTS)), st.binary(min_size=8, max_size=64))
def test_finite_check_agrees_with_torch(dtype: str, data: bytes) -> None:
    data = data[: len(data) // 8 * 8]
    numbers = torch.frombuffer(bytearray(data), dtype=tensors.torch_dtype(dtype))
    bad = (~numbers.to(torch.float64).isfinite()).nonzero()
    info = TensorInfo(dtype, (len(numbers), 1, 1), 0, len(data))
    found = check._not_finite("hidden_states", info, 0, memoryview(data))
    assert found == (
        f"the row of token {int(bad[0])} in layer 0 is not finite" if len(bad) else None
    )


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit this process to another 2 GiB of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_file_larger_than_memory_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = 50 * 10**9
    tensors = {
        "hidden_states": {
            "dtype": "BF16",
            "shape": [tokens, 1, 1],
            "data_offsets": [0, 2 * tokens],
        },
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [2 * tokens, 10 * tokens]},
    }
    header = json.dumps(tensors).encode()
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 10 * tokens)
    save_file(
        {"hidden_states": torch.ones(2, 1, 4), "token_ids": torch.arange(2)},
        tmp_path / "b.safetensors",
    )
    for mmap in (False, True):
        bad: list[HiddenStatesError] = []
        assert [path.name for path, _ in open_dir(tmp_path, mmap=mmap, on_bad=bad.append)] == [
            "b.safetensors"
        ]
        assert [each.path.name for each in bad] == ["a.safetensors"]
        with pytest.raises(OSError, match="memory.*max_map_count" if mmap else "not enough memory"):
            next(open_dir(tmp_path, mmap=mmap))
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 1
    assert inspect.main([str(tmp_path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "1 good (1 of them without checksum), 1 bad" in printed
        and "cannot be read: not enough memory" in printed
    )
