"""Files of quantised rows: every reader reads them, and they have half the bytes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8
from hs_connectors.transfer import FP8Transfer
from safetensors.torch import load_file, save_file
from sink_harness import token_ids
from test_fp8_encoder import (
    DTYPES,
    HIDDEN,
    LAYER_IDS,
    ROW_SHAPE,
    as_rows,
    quantised,
    row_format,
    rows_of,
)

from vllm_ascend_hsx.cli import inspect, verify
from vllm_ascend_hsx.protocol.format import read_header
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.reader.check import examine
from vllm_ascend_hsx.reader.dataset import HiddenStatesDataset
from vllm_ascend_hsx.reader.load import HiddenStates, HiddenStatesError, load, open_dir
from vllm_ascend_hsx.reader.tensors import dequantized
from vllm_ascend_hsx.sinks import directory
from vllm_ascend_hsx.sinks.data_file import FileOptions
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.sinks.request_file import RequestFile


def open_file(sink: FileSink, where: Path, name: str = "a", expected: int = 0) -> RequestFile:
    return sink.open(name, where / f"{name}.safetensors", expected)


def publish(
    where: Path,
    rows: torch.Tensor,
    dtype: str = "BF16",
    name: str = "a",
    options: FileOptions | None = None,
) -> Path:
    with FileSink(where, row_format(dtype, rows.shape[2]), options or FileOptions()) as sink:
        file = open_file(sink, where, name, len(rows))
        if len(rows):
            file.write(0, as_rows(rows))
        file.commit(token_ids(len(rows)), len(rows))
    return file.path


def test_small_and_large_float16_rows_are_restored(tmp_path: Path) -> None:
    """Scales or products of these rows are outside the range of float16."""
    rows = torch.stack(
        [torch.full(ROW_SHAPE, 65504.0), torch.full(ROW_SHAPE, 6e-8), torch.full(ROW_SHAPE, 2e-6)]
    ).half()
    back = load(publish(tmp_path, rows, "F16")).hidden_states
    assert torch.equal(back[0], rows[0])
    assert torch.allclose(back[1:], rows[1:], rtol=2**-4)


def test_sinks_need_no_torch_when_nothing_is_quantised(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from vllm_ascend_hsx.protocol.rows import RowFormat\n"
        "from vllm_ascend_hsx.sinks.file import FileSink\n"
        "with FileSink(Path(sys.argv[1]), RowFormat((1,), 4, 'BF16')) as sink:\n"
        "    file = sink.open('a', Path(sys.argv[1], 'a.safetensors'))\n"
        "    file.write(0, np.zeros((2, 4), np.uint16))\n"
        "    file.commit(np.zeros(2, np.int64), 2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_quantised_rows_use_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    bypassed: list[bool] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        bypassed.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, data, offset)

    monkeypatch.setattr(directory, "is_in_memory", lambda fd: False)
    rows = rows_of(9, shape=(3, 4096))
    with FileSink(tmp_path, row_format(hidden=4096), FileOptions(io="direct")) as sink:
        assert sink.writes_side_by_side, "quantising takes longer than the write after it"
        file = open_file(sink, tmp_path, expected=9)
        monkeypatch.setattr(os, "pwrite", pwrite)
        file.write(0, as_rows(rows[:4]))
        file.write(4, as_rows(rows[4:]))
        file.commit(token_ids(9), 9)
    # The header's page, two spans; token ids with scales, the header.
    assert bypassed == [True, True, True, False, False]
    values, _ = quantised(rows, "BF16")
    loaded = load(file.path, 0, verify=True, dequantize=False)
    assert torch.equal(loaded.hidden_states.view(torch.uint8), values.view(torch.uint8))


# Readers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_our_reader_and_hs_connectors_give_the_same_bits(
    tmp_path: Path, dtype: str, tokens: int
) -> None:
    path = publish(tmp_path, rows_of(tokens, dtype), dtype, "hs_7")
    ours = load(path, 0, verify=True)
    assert ours.hidden_states.dtype == DTYPES[dtype]
    if dtype != "F16":  # the scales may have no float16
        theirs = FP8Transfer(tmp_path, dequantize_dtype=DTYPES[dtype]).get_cached(7)
        assert theirs is not None and set(theirs) == {"hidden_states", "token_ids"}
        assert torch.equal(ours.hidden_states, theirs["hidden_states"])
        assert torch.equal(ours.token_ids, theirs["token_ids"])
    stored = load_file(path)
    assert set(stored) == {"hidden_states", "token_ids", "hidden_states_scales"}
    in_float32 = dequantize_fp8_tensor(
        stored["hidden_states"], stored["hidden_states_scales"], torch.float32
    )
    assert torch.allclose(ours.hidden_states.float(), in_float32, rtol=2**-7, atol=2**-24)


def test_files_of_hs_connectors_are_read(tmp_path: Path) -> None:
    values, scales = quantize_tensor_to_fp8(rows_of(6))
    tensors = {
        "hidden_states": values,
        "hidden_states_scales": scales,
        "token_ids": torch.arange(6),
    }
    save_file(tensors, tmp_path / "hs_0.safetensors")
    theirs = FP8Transfer(tmp_path).get_cached(0)
    assert theirs is not None
    assert torch.equal(load(tmp_path / "hs_0.safetensors").hidden_states, theirs["hidden_states"])


@pytest.mark.parametrize("mmap", [True, False])
def test_reader_can_load_quantised_rows_as_stored(tmp_path: Path, mmap: bool) -> None:
    rows = rows_of(5)
    path = publish(tmp_path, rows)
    states = load(path, mmap=mmap, dequantize=False)
    assert (states.hidden_states.dtype, states.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert states.scales is not None and states.scales.shape == (5, 1, 1)
    whole = load(path, mmap=mmap)
    assert torch.equal(
        dequantized(states.hidden_states, states.scales, states.dtype), whole.hidden_states
    )
    assert whole.scales is not None and torch.equal(whole.scales, states.scales)
    ((found, each),) = open_dir(tmp_path, mmap=mmap)
    assert found == path and torch.equal(each.hidden_states, whole.hidden_states)


def test_rows_that_are_not_quantised_have_no_scales(tmp_path: Path) -> None:
    with FileSink(tmp_path, RowFormat(LAYER_IDS, HIDDEN, "F16")) as sink:
        file = open_file(sink, tmp_path)
        file.write(0, as_rows(rows_of(3, "F16")))
        file.commit(token_ids(3), 3)
    states = load(file.path, dequantize=False)
    assert (states.scales, states.dtype) == (None, torch.float16)
    with open(file.path, "rb") as opened:
        assert "quantization" not in read_header(opened.fileno()).metadata


def test_dataset_dequantises_rows(tmp_path: Path) -> None:
    path = publish(tmp_path, rows_of(9))
    whole = load(path).hidden_states
    (item,) = HiddenStatesDataset(tmp_path, layer_ids=[3, 2], max_tokens=4)
    assert torch.equal(item["hidden_states"], whole[:4, [2, 0]])
    (item,) = HiddenStatesDataset(tmp_path, dtype=torch.float32)
    assert torch.equal(item["hidden_states"], whole.float())


def test_speculators_backend_returns_rows_in_the_models_dtype(tmp_path: Path) -> None:
    from vllm_ascend_hsx.integrations.speculators import HsxTransfer

    path = publish(tmp_path, rows_of(4), name="hs_0")
    for sample in (
        HsxTransfer(tmp_path).get_cached(0),
        HsxTransfer(tmp_path).get_generated({"hidden_states_path": str(path)}),
    ):
        assert sample is not None and set(sample) == {"hidden_states", "token_ids"}
        assert torch.equal(sample["hidden_states"], load(path).hidden_states)


# Damaged files


def test_inspect_shows_dequantised_rows_and_the_quantisation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = publish(tmp_path, rows_of(20))
    found = examine(path, norms=True)
    states = load(path)
    assert (found.kind.dtype, found.num_bytes) == (
        "bfloat16 in float8_e4m3fn",
        20 * (len(LAYER_IDS) * HIDDEN + 4),
    )
    assert np.allclose(found.token_norms, states.hidden_states.float().norm(dim=-1))
    assert inspect.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16 in float8_e4m3fn" in shown and "fp8_e4m3_per_token" in shown


def test_non_finite_scale_is_found(tmp_path: Path) -> None:
    rows = rows_of(4)
    rows[2, 1, 3] = torch.inf
    path = publish(tmp_path, rows)
    problem = examine(path).problem
    assert problem is not None and problem.startswith("the row of token 2 in layer")


def test_quantised_rows_of_different_dtypes_have_different_kinds(tmp_path: Path) -> None:
    kinds = [
        examine(publish(tmp_path, rows_of(4, dtype), dtype, name)).kind
        for name, dtype in (("a", "BF16"), ("b", "F16"))
    ]
    assert kinds[0] == ((2, 0, 3), *ROW_SHAPE, "bfloat16 in float8_e4m3fn", False, "")
    assert kinds[1].dtype == "float16 in float8_e4m3fn"


VALUES = torch.zeros(4, *ROW_SHAPE).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        (
            {"hidden_states_scales": torch.ones(3, 1, 1)},
            {},
            r"hidden_states_scales F32 \[3, 1, 1\] does not fit",
        ),
        (
            {"hidden_states_scales": torch.ones(4)},
            {},
            r"hidden_states_scales F32 \[4\] does not fit",
        ),
        (
            {"hidden_states_scales": torch.ones(4, 1, 1).half()},
            {},
            r"hidden_states_scales F16 \[4, 1, 1\] does not fit",
        ),
        (
            {"hidden_states_scales": torch.ones(4, 1, 1), "hidden_states": VALUES.float()},
            {},
            r"does not fit hidden_states F32",
        ),
        ({}, {"quantization": "fp8_e4m3_per_token"}, "but it has no hidden_states_scales"),
        (
            {"hidden_states_scales": torch.ones(4, 1, 1)},
            {"quantization": "int4"},
            "unknown quantization 'int4'",
        ),
        (
            {"hidden_states_scales": torch.ones(4, 1, 1)},
            {"dtype": "I64"},
            "its rows were quantised from I64",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, str], words: str
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"hidden_states": VALUES, "token_ids": torch.arange(4), **tensors}, path, metadata)
    with pytest.raises(HiddenStatesError, match=words):
        load(path)
    assert re.search(words, str(examine(path).problem))


# Size


@pytest.fixture
def sizes(tmp_path: Path) -> dict[str, int]:
    """Bytes of a file of 512 tokens of MiniMax-M2's four layers, by quantization."""
    found = {}
    for quantization in ("none", "fp8"):
        where = tmp_path / quantization
        with FileSink(where, RowFormat((2, 31, 59, 62), 3072, "BF16", "m", quantization)) as sink:  # type: ignore[arg-type]
            file = open_file(sink, where)
            file.write(0, as_rows(rows_of(512, shape=(4, 3072))))
            file.commit(token_ids(512), 512)
        found[quantization] = os.stat(file.path).st_size
    return found


def test_quantised_file_has_half_the_bytes(sizes: dict[str, int]) -> None:
    assert sizes["none"] == 4096 + 512 * (4 * 3072 * 2 + 8)
    assert sizes["fp8"] == 4096 + 512 * (4 * 3072 + 8 + 4)
    assert sizes["fp8"] / sizes["none"] == pytest.approx(0.5, abs=0.001)


def test_scales_are_the_last_part_of_the_tuple() -> None:
    assert HiddenStates._fields == ("hidden_states", "token_ids", "metadata", "scales")
    assert HiddenStates._field_defaults == {"scales": None}


def test_verify_counts_tokens_too_small_for_fp8_without_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row_format = RowFormat((1, 2), 8, "F32", quantization="fp8")
    sizes = [1.0, 4.4e-10, 9.7e-16, 4.6e-10, 0.0]
    with FileSink(tmp_path, row_format) as sink:
        for name in ("a", "b"):
            file = sink.open(name, tmp_path / f"{name}.safetensors")
            rows = np.stack(
                [np.full((2, 8), size if name == "a" else 1.0, np.float32) for size in sizes]
            )
            file.write(0, rows)
            file.commit(np.arange(len(sizes)), len(sizes))
    stored = load(tmp_path / "a.safetensors").hidden_states
    assert [bool(row.any()) for row in stored] == [True, True, False, True, False]
    assert verify.main([str(tmp_path), "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tiny_tokens"] == 3
    assert verify.main([str(tmp_path), "--jobs", "1"]) == 0
    assert (
        "warning: 3 tokens in 1 files have rows below 4.5e-10"
        in capsys.readouterr().out.replace("\n", " ")
    )
