"""Properties of loaded hidden states, and rows in numpy."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from written_files import rows_of, write, write_member

from vllm_ascend_hsx import HiddenStates, HiddenStatesDataset, load


def states_of(dtype: torch.dtype) -> HiddenStates:
    return HiddenStates(rows_of(3).to(dtype), torch.arange(3), {})


@pytest.mark.parametrize("mmap", [False, True])
def test_bfloat16_rows_become_equal_float32_rows(tmp_path: Path, mmap: bool) -> None:
    for path in (write(tmp_path / "files", "a", rows_of(3)), write_member(tmp_path)):
        rows, token_ids = load(path, mmap=mmap).numpy()
        assert rows.dtype == np.float32 and np.array_equal(rows, rows_of(3).float().numpy())
        assert token_ids.dtype == np.int64 and token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dequantize", [False, True])
def test_numpy_dequantises_like_load(tmp_path: Path, dequantize: bool) -> None:
    path = write(tmp_path, "a", rows_of(3), quantization="fp8")
    rows = load(path, dequantize=dequantize).numpy().hidden_states
    assert rows.dtype == np.float32 and np.array_equal(
        rows, load(path).hidden_states.float().numpy()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_numpy_dtypes_are_shared_without_conversion(dtype: torch.dtype) -> None:
    states = states_of(dtype)
    rows = states.numpy().hidden_states
    states.hidden_states[0, 0, 0] = 7
    assert f"torch.{rows.dtype}" == str(dtype) and rows[0, 0, 0] == 7


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_given_by_name_or_type(stored: torch.dtype, name: str) -> None:
    states = states_of(stored)
    for dtype in (name, np.dtype(name), getattr(np, name), getattr(torch, name)):
        rows = states.numpy(dtype).hidden_states
        assert rows.dtype == np.dtype(name)
        assert np.array_equal(rows, states.hidden_states.to(getattr(torch, name)).numpy())


def test_bfloat16_of_ml_dtypes_is_used_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages do not affect the default dtype. A stand-in shows the bits."""
    states, bits = states_of(torch.bfloat16), rows_of(3).view(torch.int16).numpy()
    for module in (None, SimpleNamespace(bfloat16=np.int16)):
        monkeypatch.setitem(sys.modules, "ml_dtypes", module)  # type: ignore[arg-type]
        assert states.numpy().hidden_states.dtype == np.float32
    for dtype in ("bfloat16", torch.bfloat16):
        assert np.array_equal(states.numpy(dtype).hidden_states, bits)
        assert np.array_equal(states_of(torch.float32).numpy(dtype).hidden_states, bits)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # type: ignore[arg-type]
    remedy = "pip install ml_dtypes, or leave dtype out for float32"
    with pytest.raises(
        ModuleNotFoundError,
        match=f"^dtype='bfloat16' needs the package ml_dtypes, because .*{remedy}",
    ) as raised:
        states.numpy("bfloat16")
    assert raised.value.name == "ml_dtypes"


def test_repr_names_the_file_and_not_the_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "a", rows_of(3000))
    fp8 = write(tmp_path, "b", rows_of(3), quantization="fp8")
    expected = (
        f"HiddenStates(path='{path}', shape=[3000, 2, 8], dtype=torch.bfloat16, layer_ids=[2, 4])"
    )
    assert (
        f"{load(path)}"
        == repr(load(path))
        == repr(pickle.loads(pickle.dumps(load(path))))
        == expected
    )
    assert "shape=[3, 2, 8], dtype=torch.float8_e4m3fn, layer_ids=[2, 4]" in repr(
        load(fp8, dequantize=False)
    )
    assert (
        repr(states_of(torch.float32))
        == "HiddenStates(path=None, shape=[3, 2, 8], dtype=torch.float32, layer_ids=None)"
    )
    dataset = HiddenStatesDataset(tmp_path, layer_ids=[4], max_tokens=5)
    options = "layer_ids=[4], dtype=None, max_tokens=5, verify=False"
    assert repr(dataset) == f"HiddenStatesDataset(2 files from '{path}' on, {options})"


def test_path_is_not_part_of_the_tuple(tmp_path: Path) -> None:
    path = write(tmp_path, "a", rows_of(3))
    states = load(str(path))
    assert states.path == path and len(states) == 4
    assert states.numpy()._fields == ("hidden_states", "token_ids")
