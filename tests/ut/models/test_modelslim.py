"""Checkpoints in the form of msmodelslim. A rotation changes only the basis of the rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised.modelslim import (
    DESCRIPTION,
    DYNAMIC,
    FLOAT,
    INDEX,
    INT4,
    ROTATION,
    STATIC,
    WEIGHTS,
    dynamic,
    int4_experts,
    mixed,
    plain,
    write_modelslim,
)
from quantised.reference import (
    Product,
    int8_rows,
    quantised_hidden_states,
    rotation_of,
)
from quantised.rotation import is_linear, random_rotation, rotate
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_deepseek_v3 import build_deepseek_v3
from transformers import AutoModelForCausalLM

from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2, build_qwen3

BUILDERS = {"qwen3": build_qwen3, "minimax_m2": build_minimax_m2, "deepseek_v3": build_deepseek_v3}
PROMPT = torch.randint(8, 600, (40,), generator=torch.Generator().manual_seed(0)).tolist()
LAYER_IDS = (0, 1, 2)


@pytest.fixture(scope="module", params=BUILDERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16."""
    return BUILDERS[request.param](tmp_path_factory.mktemp("models") / "bfloat16", layers=2)


@pytest.mark.parametrize("rotated", [False, True])
def test_scales_of_an_int8_cache_map_the_largest_magnitude_of_a_channel_to_127(
    source: Path, tmp_path: Path, rotated: bool
) -> None:
    """A rotation of the residual stream does not change keys and values."""
    directory = write_modelslim(source, tmp_path / "c8", plain, rotated=rotated, int8_cache=True)
    assert kinds(directory)["kv_cache_type"] == "C8"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(
        0, model.config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    tensors = load_file(directory / WEIGHTS)
    for index, layer in enumerate(layers):
        for name, cached in (("k_proj", layer.keys), ("v_proj", layer.values)):
            prefix = f"model.layers.{index}.self_attn.{name}.kv_cache_"
            assert kinds(directory)[f"{prefix}scale"] == "C8"
            largest = torch.stack(
                [
                    cached[0, head, :, element].abs().max()
                    for head in range(4)
                    for element in range(cached.shape[-1])
                ]
            )
            torch.testing.assert_close(
                tensors[f"{prefix}scale"].float() * 127,
                largest,
                rtol=2**-7 if rotated else 2**-8,
                atol=0,
            )
            assert not tensors[f"{prefix}offset"].any()


@pytest.fixture(scope="module", params=BUILDERS)
def exact_source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32."""
    return BUILDERS[request.param](
        tmp_path_factory.mktemp("models") / "float32", layers=2, dtype="float32"
    )


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_modelslim(source, tmp_path_factory.mktemp("models") / "quantised", mixed)


def kinds(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / DESCRIPTION).read_text())
    return found


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / WEIGHTS)


def written_plain(source: Path, directory: Path) -> Path:
    """Write a rotated model that transformers can also read."""
    made = write_modelslim(source, directory, plain, rotated=True)
    (made / "model.safetensors").symlink_to(WEIGHTS)
    return made


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


# Quantised checkpoints


def test_description_and_index_have_every_tensor(checkpoint: Path) -> None:
    names = set(tensors(checkpoint))
    described = kinds(checkpoint)
    assert {
        name
        for name, kind in described.items()
        if kind in (STATIC, DYNAMIC, FLOAT) and name != "model_quant_type"
    } == names
    assert described["model_quant_type"] == STATIC
    assert json.loads((checkpoint / INDEX).read_text())["weight_map"] == dict.fromkeys(
        sorted(names), WEIGHTS
    )


def test_attention_is_static_other_linear_layers_dynamic_and_the_rest_float(
    checkpoint: Path,
) -> None:
    described, stored = kinds(checkpoint), tensors(checkpoint)
    for name in stored:
        # vllm-ascend multiplies by parts of kv_b_proj and refuses a quantised kv_b_proj.
        is_float = any(
            each in name
            for each in (
                "norm.",
                "embed_tokens",
                "lm_head",
                ".gate.",
                "e_score_correction_bias",
                ".kv_b_proj.",
            )
        )
        assert described[name] == (
            FLOAT if is_float else STATIC if ".self_attn." in name else DYNAMIC
        ), name
    dtypes = {"weight": torch.int8, "input_scale": torch.bfloat16, "input_offset": torch.int8}
    assert fields(stored, "self_attn.o_proj") == dtypes | {
        "deq_scale": torch.float32,
        "quant_bias": torch.int32,
    }
    (layer,) = {
        each
        for each in ("mlp.up_proj", "block_sparse_moe.experts.0.w3")
        if f"model.layers.0.{each}.weight" in stored
    }
    assert fields(stored, layer) == {
        "weight": torch.int8,
        "weight_scale": torch.bfloat16,
        "weight_offset": torch.bfloat16,
    }


def fields(stored: dict[str, torch.Tensor], layer: str) -> dict[str, torch.dtype]:
    prefix = f"model.layers.0.{layer}."
    return {
        name.removeprefix(prefix): tensor.dtype
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }


def test_fused_layers_have_the_same_input_scale(checkpoint: Path) -> None:
    stored = tensors(checkpoint)
    for field in ("input_scale", "input_offset"):
        fused = [
            name
            for name in stored
            if re.search(
                rf"layers\.1\.self_attn\.([qkv]_proj|q_a_proj|kv_a_proj_with_mqa)\.{field}$", name
            )
        ]
        assert len(fused) in (2, 3)
        assert all(torch.equal(stored[name], stored[fused[0]]) for name in fused)


def test_int8_weights_are_accurate_to_half_a_step(source: Path, checkpoint: Path) -> None:
    original, stored, described = (
        load_file(source / "model.safetensors"),
        tensors(checkpoint),
        kinds(checkpoint),
    )
    for name, weight in original.items():
        layer = name.removesuffix("weight")
        if described[name] == FLOAT:
            assert torch.equal(stored[name], weight)
            continue
        if described[name] == STATIC:
            scale = (stored[f"{layer}deq_scale"] / stored[f"{layer}input_scale"].float()).unsqueeze(
                1
            )
        else:
            scale = stored[f"{layer}weight_scale"].float()
            assert (stored[f"{layer}weight_offset"] == 0).all()
        assert scale.shape == (weight.shape[0], 1)
        # The largest number of a row may be 127.5, because the scale is rounded to bfloat16.
        assert ((stored[name] * scale - weight.float()).abs() <= scale * 0.76).all(), name
        assert stored[name].abs().amax(1).min() >= 126


def test_static_bias_cancels_the_input_offset(checkpoint: Path) -> None:
    stored = tensors(checkpoint)
    layer = "model.layers.0.self_attn.o_proj."
    # the quantised form of an input of zeros
    zero = stored[f"{layer}input_offset"].int().expand(stored[f"{layer}weight"].shape[1])
    assert torch.equal(
        stored[f"{layer}weight"].int() @ zero + stored[f"{layer}quant_bias"],
        torch.zeros(256, dtype=torch.int32),
    )


def test_rows_of_int8_weights_are_close_to_rows_of_the_model(
    source: Path, checkpoint: Path
) -> None:
    rows, expected = (
        quantised_hidden_states(checkpoint, PROMPT, LAYER_IDS).float(),
        reference_hidden_states(source, PROMPT, LAYER_IDS),
    )
    errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.08
    assert errors[:, 1:].mean() > 0.005  # an effect of quantisation


EXPERTS = {name: build for name, build in BUILDERS.items() if build is not build_qwen3}


@pytest.fixture(scope="module", params=EXPERTS)
def of_int4(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model, and a checkpoint of this model with int4 experts."""
    directory = tmp_path_factory.mktemp("int4")
    source = EXPERTS[request.param](directory / "model", layers=2)
    return source, write_modelslim(source, directory / "made", int4_experts)


def test_experts_are_int4_with_a_scale_per_row_and_the_rest_is_like_mixed(
    of_int4: tuple[Path, Path], tmp_path: Path
) -> None:
    source, made = of_int4
    described, others = kinds(made), kinds(write_modelslim(source, tmp_path / "int8", mixed))
    assert (described["group_size"], described["model_quant_type"]) == (0, STATIC)
    for name, kind in described.items():
        assert kind == (INT4 if ".experts." in name else others[name]), name
    (layer,) = {
        each
        for each in ("mlp.experts.0.up_proj", "block_sparse_moe.experts.0.w3")
        if f"model.layers.1.{each}.weight" in described
    }
    floats = dict.fromkeys(("weight_scale", "weight_offset", "scale_bias"), torch.float32)
    prefix = f"model.layers.1.{layer}."
    assert {
        n.removeprefix(prefix): t.dtype for n, t in tensors(made).items() if n.startswith(prefix)
    } == {"weight": torch.int8, **floats}


def test_int4_weights_are_packed_in_pairs_and_accurate_to_half_a_step(
    of_int4: tuple[Path, Path],
) -> None:
    source, made = of_int4
    stored = tensors(made)
    experts = {
        name: weight
        for name, weight in load_file(source / "model.safetensors").items()
        if ".experts." in name
    }
    for name, weight in experts.items():
        layer, packed = name.removesuffix("weight"), stored[name].int() & 255
        numbers = torch.empty(weight.shape)
        numbers[0::2], numbers[1::2] = (
            nibbles - 16 * (nibbles // 8) for nibbles in (packed % 16, packed // 16)
        )
        scale = stored[f"{layer}weight_scale"]
        assert scale.shape == (len(weight), 1)
        assert ((numbers * scale - weight.float()).abs() <= scale * 0.5001).all(), name
        assert (numbers.abs().amax(1) == 7).all()
        writes = name.endswith(("down_proj.weight", "w2.weight"))
        summands = [8 * share.sum(1) for share in (numbers * scale).chunk(16 if writes else 1, 1)]
        torch.testing.assert_close(
            stored[f"{layer}scale_bias"], torch.stack(summands, 1), atol=1e-5, rtol=1e-5
        )


def test_rows_of_int4_experts_are_close_to_rows_of_the_model(
    of_int4: tuple[Path, Path],
) -> None:
    source, made = of_int4
    rows, expected = (
        quantised_hidden_states(made, PROMPT, LAYER_IDS).float(),
        reference_hidden_states(source, PROMPT, LAYER_IDS),
    )
    errors = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 0.16
    assert errors[:, 2].mean() > 0.01  # an effect of quantisation


# Variants of an int4 product. The arguments are an int8 row as float64, the weight, the scales and
# the summand. The first variant is the computation of the kernel, the others are mistakes.
ROUNDED = "halves are rounded to float16"
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    ROUNDED: lambda row, weight, scale, summand: (
        sum(
            factor * (half @ weight.t() * scale).half()
            for factor, half in ((16, (row / 16).floor()), (1, row % 16 - 8))
        )
        + summand
    ),
    "neighbouring rows of a weight are exchanged": lambda row, weight, scale, _: (
        row @ weight.unflatten(0, (-1, 2)).flip(1).flatten(0, 1).t() * scale
    ),
    "the 8 is not added back": lambda row, weight, scale, _: (row - 8) @ weight.t() * scale,
    "each row of a weight has the scale of another row": lambda row, weight, scale, _: (
        row @ weight.t() * scale.roll(1)
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_mistakes_in_int4_products_exceed_the_rounding_of_the_kernel(
    of_int4: tuple[Path, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, made = of_int4
    right = quantised_hidden_states(made, PROMPT, LAYER_IDS).float()
    exact = Product.exact

    def changed(product: Product, x: torch.Tensor) -> torch.Tensor:
        given = product.tensors
        if "scale_bias" not in given:
            return exact(product, x)
        row, row_scale = int8_rows(x)
        weight, scale, summand = (
            given[each].double() for each in ("weight", "weight_scale", "scale_bias")
        )
        return PRODUCTS[name](row, weight, scale.squeeze(1), summand.sum(1)) * row_scale

    monkeypatch.setattr(Product, "exact", changed)
    errors = (quantised_hidden_states(made, PROMPT, LAYER_IDS).float() - right).norm(
        dim=-1
    ) / right.norm(dim=-1)
    if name == ROUNDED:
        assert errors.max() < 0.02
    else:
        assert errors[:, 2].median() > 0.06


def test_same_arguments_give_the_same_bytes(source: Path, tmp_path: Path) -> None:
    one, other = (
        write_modelslim(source, tmp_path / name, mixed, rotated=True, seed=3)
        for name in ("one", "other")
    )
    assert digests(one) == digests(other)
    assert digests(
        write_modelslim(source, tmp_path / "third", mixed, rotated=True, seed=4)
    ) != digests(one)


# Rotation


@pytest.mark.parametrize("size", [1, 2, 256, 48])
def test_rotation_is_orthogonal(size: int) -> None:
    rotation = random_rotation(size, seed=1)
    torch.testing.assert_close(
        rotation @ rotation.t(), torch.eye(size).double(), atol=1e-12, rtol=0
    )
    assert not torch.equal(rotation, random_rotation(size, seed=2)) or size == 1


def test_rotation_of_a_power_of_two_has_entries_of_equal_magnitude() -> None:
    assert set(random_rotation(256).flatten().tolist()) == {1 / 16, -1 / 16}


def test_rotated_model_has_rows_x_q_and_the_same_output(exact_source: Path, tmp_path: Path) -> None:
    rotated = written_plain(exact_source, tmp_path / "rotated")
    rotation = rotation_of(rotated)
    rows, expected = (
        reference_hidden_states(each, PROMPT, LAYER_IDS) for each in (rotated, exact_source)
    )
    assert ((rows - expected).norm(dim=-1) / expected.norm(dim=-1)).min() > 0.5
    torch.testing.assert_close(rows, expected @ rotation, atol=1e-4, rtol=0)
    torch.testing.assert_close(rows @ rotation.t(), expected, atol=1e-4, rtol=0)
    with torch.no_grad():
        logits, right = (
            AutoModelForCausalLM.from_pretrained(each)(torch.tensor([PROMPT])).logits
            for each in (rotated, exact_source)
        )
    torch.testing.assert_close(logits, right, atol=1e-4, rtol=1e-4)


KEPT = (
    "q_norm.weight",
    "k_norm.weight",
    "a_layernorm.weight",
    "b_proj.weight",
    "e_score_correction_bias",
)  # not in the residual stream


def test_rotation_sets_norms_of_the_residual_stream_to_one_and_keeps_other_weights(
    exact_source: Path, tmp_path: Path
) -> None:
    rotated = write_modelslim(exact_source, tmp_path / "rotated", plain, rotated=True)
    original = load_file(exact_source / "model.safetensors")
    for name, weight in tensors(rotated).items():
        if name.endswith(
            ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
        ):
            assert (weight == 1).all()
        elif name.endswith(KEPT):
            assert torch.equal(weight, original[name])
        else:
            assert not torch.equal(weight, original[name])


def test_description_has_the_path_of_the_rotation(exact_source: Path, tmp_path: Path) -> None:
    rotated = write_modelslim(exact_source, tmp_path / "rotated", plain, rotated=True)
    path = kinds(rotated)["optional"]["quarot"]["rotation_map"]["global_rotation"]
    assert path == ROTATION
    with safe_open(rotated / path, "pt") as file:
        assert list(file.keys()) == ["global_rotation"]
        assert file.get_tensor("global_rotation").dtype == torch.float32
    # vLLM loads all files that match
    assert list(rotated.glob("*.safetensors")) == [rotated / WEIGHTS]
    assert kinds(rotated)["model_quant_type"] == FLOAT
    assert kinds(write_modelslim(exact_source, tmp_path / "plain", plain))["optional"] == {}


def test_tied_embeddings_get_a_separate_head(tmp_path: Path) -> None:
    source = build_qwen3(tmp_path / "tied", layers=1, dtype="float32")
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    weights = load_file(source / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    rotated = written_plain(source, tmp_path / "rotated")
    with torch.no_grad():
        logits, right = (
            AutoModelForCausalLM.from_pretrained(each)(torch.tensor([PROMPT])).logits
            for each in (rotated, source)
        )
    torch.testing.assert_close(logits, right, atol=1e-4, rtol=1e-4)


# Errors


def test_directory_with_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty"):
        write_modelslim(tmp_path, tmp_path)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda name: "W4A16", "'W4A16' is not one of"),
        (lambda name: STATIC, r"experts\.0\.w1.weight: an expert cannot be W8A8"),
        (
            lambda name: INT4,
            r"self_attn\.\w+\.weight: only an expert can be W4A8_DYNAMIC; choose W8A8_DYNAMIC",
        ),
    ],
)
def test_kind_that_vllm_ascend_refuses_is_an_error(
    choose: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_modelslim(build_minimax_m2(tmp_path / "model", layers=1), tmp_path / "made", choose)


def test_float32_weights_are_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a checkpoint in bfloat16, not torch.float32"):
        write_modelslim(
            build_qwen3(tmp_path / "model", layers=1, dtype="float32"), tmp_path / "made", dynamic
        )


def test_only_the_unmerged_layer_of_an_indexer_is_quantised() -> None:
    prefix = "model.layers.0.self_attn.indexer."
    assert [
        name
        for name in ("wq_b", "wk", "weights_proj", "k_norm")
        if is_linear(f"{prefix}{name}.weight")
    ] == ["wq_b"]


def test_weight_of_another_architecture_is_an_error() -> None:
    known = {"model.embed_tokens.weight": torch.eye(2), "model.norm.weight": torch.ones(2)}
    with pytest.raises(
        ValueError, match="linear_attn.A_log: not a weight of Qwen3, MiniMax-M2 or DeepSeek-V3"
    ):
        rotate({**known, "model.layers.0.linear_attn.A_log": torch.ones(2)}, random_rotation(2))
