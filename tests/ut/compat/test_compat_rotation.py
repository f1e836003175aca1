"""The rotation of a target is found as vllm-ascend does; an unusable one is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_hsx.compat.rotation import (
    DESCRIPTION,
    logger,
    read_rotation,
    refuse_undeclared_rotation,
    rotation_of,
)
from vllm_ascend_hsx.protocol.errors import UserError

SIZE = 8
NAME = "optional/quarot.safetensors"
QUAROT = {
    "optional": {"quarot": {"rotation_map": {"global_rotation": NAME}}},
    "model.norm.weight": "FLOAT",
}
CPU = torch.device("cpu")


def checkpoint(
    directory: Path,
    description: Any,
    matrix: torch.Tensor | None = None,
    quantization: str | None = "ascend",
) -> Any:
    directory.mkdir(exist_ok=True)
    text = description if isinstance(description, str) else json.dumps(description)
    if description is not None:
        (directory / DESCRIPTION).write_text(text)
    if matrix is not None:
        (directory / NAME).parent.mkdir(exist_ok=True)
        save_file({"global_rotation": matrix}, directory / NAME)
    model = SimpleNamespace(model=str(directory), revision=None, quantization=quantization)
    return SimpleNamespace(
        model_config=model, load_config=SimpleNamespace(load_format="auto", download_dir=None)
    )


def test_rotation_file_is_read_from_the_description(tmp_path: Path) -> None:
    assert rotation_of(checkpoint(tmp_path, QUAROT, torch.eye(SIZE)), "undo") == tmp_path / NAME


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"optional": {}},
        {"optional": {"quarot": None}},
        {"optional": {"quarot": {"rotation_map": {"global_rotation": 5}}}},
        [],
        None,
    ],
    ids=str,
)
def test_target_without_rotation_in_its_description_is_not_rotated(
    tmp_path: Path, description: Any
) -> None:
    assert rotation_of(checkpoint(tmp_path, description), "undo") is None


def test_rotation_file_with_the_usual_name_is_found(tmp_path: Path) -> None:
    assert (
        rotation_of(checkpoint(tmp_path, {"optional": {}}, torch.eye(SIZE)), "undo")
        == tmp_path / NAME
    )


def test_declared_rotation_without_matrix_is_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, {"is_rot_used": True})
    with pytest.raises(UserError, match=rf"its matrix {NAME} is missing"):
        rotation_of(model, "undo")
    assert rotation_of(model, "keep") is not None
    assert rotation_of(checkpoint(tmp_path / "not", {"is_rot_used": False}), "undo") is None


def test_target_without_ascend_quantisation_is_not_rotated(tmp_path: Path) -> None:
    for quantization in (None, "fp8"):
        assert (
            rotation_of(checkpoint(tmp_path, QUAROT, torch.eye(SIZE), quantization), "undo") is None
        )


def test_missing_rotation_file_is_refused_unless_rows_are_kept(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, QUAROT)
    with pytest.raises(
        UserError,
        match=rf"is rotated \(QuaRot\), but its matrix {NAME} is missing.*rotation='keep'",
    ):
        rotation_of(model, "undo")
    assert rotation_of(model, "keep") is not None


def test_unreadable_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has a {DESCRIPTION} that cannot be read"):
        rotation_of(checkpoint(tmp_path, "{"), "undo")


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        (
            torch.eye(SIZE + 1),
            rf"is a rotation of shape \({SIZE + 1}, {SIZE + 1}\), but rows have {SIZE} elements",
        ),
        (torch.ones(SIZE, SIZE), "is not orthogonal: Q @ Q.T deviates by 8 from the identity"),
        (torch.full((SIZE, SIZE), torch.nan), "is not orthogonal"),
    ],
    ids=["size", "ones", "NaN"],
)
def test_matrix_that_is_not_a_rotation_is_refused(
    tmp_path: Path, matrix: torch.Tensor, problem: str
) -> None:
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
    matrix = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)))[
        0
    ].contiguous()
    checkpoint(tmp_path, QUAROT, matrix.to(dtype))
    found = read_rotation(tmp_path / NAME, SIZE, CPU)
    assert found.dtype == torch.float32
    assert torch.equal(found, matrix.to(dtype).float())


# An undeclared rotation

UNDECLARED = r"does not declare it: all weights of its final norm are equal.*Put the rotation into optional/quarot\.safetensors .*'keep'"
EQUAL, TRAINED = torch.ones(SIZE), torch.linspace(0.5, 1.5, SIZE)
FILES = (
    "quant_model_weights-00001-of-00002.safetensors",
    "quant_model_weights-00002-of-00002.safetensors",
)
NORMS_OF_A_LAYER = (
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
)


def with_norms(
    directory: Path,
    final: torch.Tensor,
    name: str = "model.norm.weight",
    of_a_layer: torch.Tensor = TRAINED,
) -> Any:
    """A checkpoint of two files whose description declares nothing."""
    found = checkpoint(directory, {"model.norm.weight": "FLOAT"})
    save_file(
        {"lm_head.weight": torch.ones(2, SIZE), name: final.contiguous()}, directory / FILES[0]
    )
    save_file({each: of_a_layer.clone() for each in NORMS_OF_A_LAYER}, directory / FILES[1])
    return found


@pytest.mark.parametrize(
    "final",
    [EQUAL, EQUAL.bfloat16(), torch.zeros(SIZE)],
    ids=["1", "bfloat16", "0, of a norm that adds 1"],
)
@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "norm.weight",
        "language_model.model.norm.weight",
        "model.language_model.norm.weight",
    ],
)
def test_a_rotation_that_is_not_declared_is_refused_unless_rows_are_kept(
    tmp_path: Path, name: str, final: torch.Tensor
) -> None:
    """The norms of layers are not equal: smoothing changes them after the rotation."""
    config = with_norms(tmp_path, final, name)
    with pytest.raises(UserError, match=UNDECLARED):
        rotation_of(config, "undo")
    assert rotation_of(config, "keep") is not None, "files say that rows are rotated"


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "visual.merger.norm.weight", "model.layers.3.shared_head.norm.weight"],
)
def test_a_target_whose_final_norm_was_trained_is_not_rotated(tmp_path: Path, name: str) -> None:
    final = TRAINED if name == "model.norm.weight" else EQUAL
    assert rotation_of(with_norms(tmp_path, final, name, of_a_layer=EQUAL), "undo") is None


def test_equal_norm_weights_without_quantisation_are_accepted(tmp_path: Path) -> None:
    config = with_norms(tmp_path, EQUAL)
    config.model_config.quantization = None
    assert rotation_of(config, "undo") is None
    refuse_undeclared_rotation(config.model_config, target(EQUAL))


def test_declared_rotation_takes_precedence_over_the_norm(tmp_path: Path) -> None:
    config = with_norms(tmp_path, EQUAL)
    checkpoint(tmp_path, QUAROT, torch.eye(SIZE))
    assert rotation_of(config, "undo") == tmp_path / NAME


@pytest.mark.parametrize("load_format", ["auto", "dummy", "runai_streamer"])
def test_missing_weights_are_checked_after_loading(tmp_path: Path, load_format: str) -> None:
    config = checkpoint(tmp_path, {})
    config.load_config.load_format = load_format
    assert rotation_of(config, "undo") is None
    with pytest.raises(UserError, match=UNDECLARED):
        refuse_undeclared_rotation(config.model_config, target(EQUAL))
    refuse_undeclared_rotation(config.model_config, target(TRAINED))
    refuse_undeclared_rotation(config.model_config, torch.nn.Module())


def test_dummy_weights_are_not_checked_for_rotation(tmp_path: Path) -> None:
    config = with_norms(tmp_path, EQUAL)
    config.load_config.load_format = "dummy"
    assert rotation_of(config, "undo") is None


@pytest.mark.parametrize("damage", ["file", "index"])
def test_unreadable_checkpoint_is_left_to_vllm(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_norms(tmp_path, EQUAL)
    if damage == "file":
        (tmp_path / FILES[1]).write_bytes(b"no safetensors")
    else:
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    with caplog.at_level("WARNING", logger.name):
        assert rotation_of(config, "undo") is None
    assert "so whether it is rotated is checked after loading" in caplog.text


def target(final: torch.Tensor) -> torch.nn.Module:
    """A model with only a final norm."""
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.norm = torch.nn.Module()
    model.model.norm.weight = torch.nn.Parameter(final)
    return model
