"""`--layers DRAFT`: the layers that vLLM reads from the config.json of a draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from releases import only_with
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_ascend_hsx.draft_layers import layers_of_draft
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.target import layer_ids

LAYERS = 36
# The forms of published drafts: the config.json, and the layers to extract.
DRAFTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "EAGLE-3 of speculators": (
        {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
        (2, 18, 33, LAYERS),
    ),
    "EAGLE-3 with the last layer": ({"eagle_aux_hidden_state_layer_ids": [2, 36]}, (2, 36)),
    "DFlash of z-lab": (
        {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25, 33]}},
        (2, 10, 18, 26, 34, LAYERS),
    ),
    "DFlash that reads the last layer": (
        {"dflash_config": {"target_layer_ids": [1, 35]}},
        (2, LAYERS),
    ),
    "DSpark": ({"dspark_target_layer_ids": [0, 11]}, (1, 12, LAYERS)),
    "DSpark of DeepSeek-V4.1": (
        {"model_type": "deepseek_v41", "dspark_target_layer_ids": [1, 11]},
        (1, 11, LAYERS),
    ),
    "DSpark of dense targets": ({"target_layer_ids": [3, 4]}, (4, 5, LAYERS)),
    "EAGLE-3 of ModelOpt": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}},
        (1, 17, 32, LAYERS),
    ),
}
# vLLM converts this form before it reads the ids (transformers_utils/configs/speculators/algos.py).
OF_SPECULATORS = {"aux_hidden_state_layer_ids": [2, 10, 18]}


def draft(directory: Path, config: object) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_selects_its_layers_and_the_last_layer(name: str, tmp_path: Path) -> None:
    config, expected = DRAFTS[name]
    assert layers_of_draft(draft(tmp_path, config), LAYERS) == expected
    assert (
        layer_ids(str(tmp_path), LAYERS)
        == layer_ids(str(tmp_path / "config.json"), LAYERS)
        == expected
    )


def given_by_vllm(config: dict[str, Any], function: Callable[[Any], Any]) -> set[int]:
    """Return the layers that vLLM reads from the configuration of a draft."""
    return set(
        function(
            SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)))
        )
    )


@pytest.mark.parametrize("name", [name for name in DRAFTS if "DSpark" not in name])
def test_layers_match_the_layers_that_vllm_gives_to_the_draft(name: str) -> None:
    config, expected = DRAFTS[name]
    read = GPUModelRunner._get_eagle3_aux_layers_from_config
    assert given_by_vllm(
        config, lambda speculative: read(SimpleNamespace(speculative_config=speculative))
    ) | {LAYERS} == set(expected)


@only_with(">=0.30", "vLLM knows DSpark since 0.30")
@pytest.mark.parametrize("name", [name for name in DRAFTS if "DSpark" in name])
def test_layers_match_the_layers_that_vllm_gives_to_a_dspark_draft(name: str) -> None:
    config, expected = DRAFTS[name]
    assert given_by_vllm(config, eagle3_utils.get_eagle3_aux_layers_from_config) | {LAYERS} == set(
        expected
    )


def test_ids_of_speculators_need_no_offset(tmp_path: Path) -> None:
    assert layers_of_draft(draft(tmp_path, OF_SPECULATORS), LAYERS) == (2, 10, 18, LAYERS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "has no layer ids (none of the keys eagle_aux_hidden_state_layer_ids, ",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
            "Give layer ids, or eagle3 for the default layers.",
        ),
        (
            {"dflash_config": {"target_layer_ids": "1,2"}},
            "has no list of integers under dflash_config.target_layer_ids",
        ),
        ({"target_layer_ids": [1, True]}, "has no list of integers under target_layer_ids"),
        (
            {"target_layer_ids": [1, 36]},
            "selects 2,37,36 of 36 layers, so it has id 37, which the target does not have",
        ),
        ([1], "is not a JSON object"),
    ],
)
def test_a_draft_without_usable_ids_is_refused_by_option_and_path(
    config: object, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        layer_ids(draft(tmp_path, config), LAYERS)
    assert str(refused.value).startswith(f"--layers='{tmp_path}' ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "has no readable config.json"), ("{", "is not JSON")]
)
def test_a_draft_without_a_config_is_refused(
    content: str | None, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=words):
        layer_ids(str(tmp_path), LAYERS)
