"""The tiny models: vllm and transformers read them alike, and wrong rows cannot pass as right."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model_claims import (
    TOLERANCE,
    assert_experts_are_chosen_evenly_and_alike,
    assert_rows_lie_apart,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.tiny_models import build_minimax_m2, build_qwen3

BUILDERS = {"minimax_m2": build_minimax_m2, "qwen3": build_qwen3}


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(100, 640, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=BUILDERS)
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    return path


def test_same_arguments_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    code = f"""
from vllm_ascend_hsx.demo import tiny_models
for name in {list(BUILDERS)}:
    getattr(tiny_models, "build_" + name)({str(tmp_path)!r} + "/there-" + name, layers=2)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for name, build in BUILDERS.items():
        assert digests(build(tmp_path / name, layers=2)) == digests(tmp_path / f"there-{name}")


def test_complete_model_is_reused_unless_the_recipe_changed(tmp_path: Path) -> None:
    path = build_qwen3(tmp_path / "m", layers=1)
    before = path.stat().st_mtime_ns
    assert build_qwen3(path, layers=1).stat().st_mtime_ns == before
    build_qwen3(path, layers=2)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_interrupted_build_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_ascend_hsx.demo.tiny_models.build_tokenizer",
        lambda size: (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        build_qwen3(tmp_path / "m", layers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"dtype": "int8"}, "dtype='int8'.*bfloat16"), ({"layers": 0}, "layers=0.*at least one")],
)
def test_a_wrong_argument_is_named(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build_minimax_m2(tmp_path / "m", **arguments)  # type: ignore[arg-type]


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="holds no tiny model"):
        build_minimax_m2(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_rows_of_different_tokens_and_layers_lie_farther_apart_than_the_tolerance(
    model: Path,
) -> None:
    assert_rows_lie_apart(model, random_ids(300))


def test_a_changed_first_token_changes_the_rows_of_the_last_one(model: Path) -> None:
    """So a key or value lost at a chunk boundary is detected."""
    ids = random_ids(300)
    rows = reference_hidden_states(model, ids, [4])
    other = reference_hidden_states(model, [ids[0] ^ 1, *ids[1:]], [4])
    changed = (rows - other).norm(dim=-1) / rows.norm(dim=-1)
    assert changed[250:].max() > 2 * TOLERANCE


def test_bfloat16_rounding_stays_within_half_of_the_tolerance(model: Path) -> None:
    ids = random_ids(300, seed=1)
    exact = reference_hidden_states(model, ids, range(5))
    rounded = reference_hidden_states(model, ids, range(5), torch.bfloat16).float()
    assert ((exact - rounded).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.6 * TOLERANCE


def test_experts_are_chosen_evenly_and_alike_in_both_precisions(tiny_minimax_m2: Path) -> None:
    assert_experts_are_chosen_evenly_and_alike(tiny_minimax_m2, random_ids(400, seed=2))


def test_any_text_survives_the_tokenizer_and_a_chat_has_its_roles(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("What is the capital of France?", "東京 ☃ \t\n\x00", ""):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "]~!b[]~b]user\nhello[e~[\n]~b]ai\n"
    assert (
        max(tokenizer.get_vocab().values())
        < json.loads((model / "config.json").read_text())["vocab_size"]
    )


def test_the_last_layer_is_taken_before_the_final_norm(model: Path) -> None:
    ids = random_ids(12)
    last = reference_hidden_states(model, ids, [4])[:, 0]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        output = loaded(torch.tensor([ids]), output_hidden_states=True)
        assert torch.allclose(loaded.model.norm(last), output.hidden_states[-1][0], atol=1e-5)
    assert not torch.allclose(last, output.hidden_states[-1][0], atol=1e-2)
    for layer in range(4):
        assert torch.allclose(
            reference_hidden_states(model, ids, [layer])[:, 0],
            output.hidden_states[layer][0],
            atol=1e-5,
        )


def test_reference_layers_are_in_the_requested_order(model: Path) -> None:
    ids = random_ids(5)
    assert torch.equal(
        reference_hidden_states(model, ids, [4, 0])[:, 0],
        reference_hidden_states(model, ids, [4])[:, 0],
    )


@pytest.mark.parametrize(
    ("ids", "layers", "message"),
    [([1], [5], "choose from 0 to 4"), ([1], [-1], "0 to 4"), ([], [1], "empty")],
)
def test_reference_refuses_wrong_layers_and_empty_prompts(
    ids: list[int], layers: list[int], message: str, tiny_qwen3: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        reference_hidden_states(tiny_qwen3, ids, layers)
