"""The rotation of a target is found as vllm-ascend does; one that cannot be used is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_hsx.compat.rotation import DESCRIPTION, read_rotation, rotation_of
from vllm_ascend_hsx.protocol.errors import UserError

SIZE = 8
NAME = "optional/quarot.safetensors"
QUAROT = {"optional": {"quarot": {"rotation_map": {"global_rotation": NAME}}}, "model.norm.weight": "FLOAT"}
CPU = torch.device("cpu")


def checkpoint(directory: Path, description: Any, matrix: torch.Tensor | None = None, quantization: str | None = "ascend") -> Any:
    directory.mkdir(exist_ok=True)
    text = description if isinstance(description, str) else json.dumps(description)
    if description is not None:
        (directory / DESCRIPTION).write_text(text)
    if matrix is not None:
        (directory / NAME).parent.mkdir(exist_ok=True)
        save_file({"global_rotation": matrix}, directory / NAME)
    return SimpleNamespace(model=str(directory), revision=None, quantization=quantization)


def test_the_file_is_the_one_that_the_description_names(tmp_path: Path) -> None:
    assert rotation_of(checkpoint(tmp_path, QUAROT, torch.eye(SIZE)), "undo") == tmp_path / NAME


@pytest.mark.parametrize(
    "description",
    [{}, {"optional": {}}, {"optional": {"quarot": None}}, {"optional": {"quarot": {"rotation_map": {"global_rotation": 5}}}}, [], None],
    ids=str,
)
def test_a_target_whose_description_names_none_is_not_rotated(tmp_path: Path, description: Any) -> None:
    assert rotation_of(checkpoint(tmp_path, description), "undo") is None


def test_a_rotation_in_its_usual_place_needs_no_name(tmp_path: Path) -> None:
    assert rotation_of(checkpoint(tmp_path, {"optional": {}}, torch.eye(SIZE)), "undo") == tmp_path / NAME


def test_a_target_that_says_that_it_is_rotated_needs_its_matrix(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, {"is_rot_used": True})
    with pytest.raises(UserError, match=rf"its matrix {NAME} is not there"):
        rotation_of(model, "undo")
    assert rotation_of(model, "keep") is not None
    assert rotation_of(checkpoint(tmp_path / "not", {"is_rot_used": False}), "undo") is None


def test_a_target_that_vllm_ascend_does_not_quantise_is_not_rotated(tmp_path: Path) -> None:
    for quantization in (None, "fp8"):
        assert rotation_of(checkpoint(tmp_path, QUAROT, torch.eye(SIZE), quantization), "undo") is None


def test_a_rotation_that_is_not_there_is_refused_unless_rows_are_kept(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, QUAROT)
    with pytest.raises(UserError, match=rf"is rotated \(QuaRot\), and its matrix {NAME} is not there.*rotation='keep'"):
        rotation_of(model, "undo")
    assert rotation_of(model, "keep") is not None


def test_a_description_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has a {DESCRIPTION} that cannot be read"):
        rotation_of(checkpoint(tmp_path, "{"), "undo")


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        (torch.eye(SIZE + 1), rf"is a rotation of \({SIZE + 1}, {SIZE + 1}\), and rows have {SIZE} elements"),
        (torch.ones(SIZE, SIZE), "is not orthogonal: Q @ Q.T deviates by 8 from the identity"),
        (torch.full((SIZE, SIZE), torch.nan), "is not orthogonal"),
    ],
    ids=["size", "ones", "NaN"],
)
def test_a_matrix_that_is_no_rotation_is_refused(tmp_path: Path, matrix: torch.Tensor, problem: str) -> None:
    checkpoint(tmp_path, QUAROT, matrix)
    with pytest.raises(UserError, match=problem):
        read_rotation(tmp_path / NAME, SIZE, CPU)


def test_a_file_without_the_matrix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    for content in (b"", b"no safetensors"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a rotation"):
            read_rotation(path, SIZE, CPU)
    save_file({"another": torch.eye(SIZE)}, path)
    with pytest.raises(UserError, match="is not a rotation: KeyError"):
        read_rotation(path, SIZE, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rotation_is_read_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)))[0].contiguous()
    checkpoint(tmp_path, QUAROT, matrix.to(dtype))
    found = read_rotation(tmp_path / NAME, SIZE, CPU)
    assert found.dtype == torch.float32
    assert torch.equal(found, matrix.to(dtype).float())
