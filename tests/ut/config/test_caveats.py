"""Caveats are reported exactly where vllm-ascend's sources differ from transformers."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401 - brings torch.npu
import vllm_ascend.ops  # noqa: F401 - vllm-ascend's modules import each other in circles
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_ascend_hsx.caveats import Caveat, caveats_of, logger, warn_of_caveats
from vllm_ascend_hsx.doctor.target import check_target
from vllm_ascend_hsx.drafter import drafter
from vllm_ascend_hsx.serve.command import build

# YaRN

QWEN3 = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
HEAD = 128
ROPES: dict[str, dict[str, Any]] = {
    "as the tutorials extend Qwen3": QWEN3,
    "another base and factor": {
        **QWEN3,
        "rope_theta": 10_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
    "steeper": {**QWEN3, "beta_fast": 8.0, "beta_slow": 2.0},
    "rounded": {**QWEN3, "truncate": True},
    "not rounded, as gpt-oss": {**QWEN3, "truncate": False},
    "of a vision model": {**QWEN3, "mrope_section": [24, 20, 20]},
    "of a vision model, not rounded": {**QWEN3, "mrope_section": [24, 20, 20], "truncate": False},
    "of DeepSeek": {**QWEN3, "rope_type": "deepseek_yarn"},
    "no YaRN": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bounds that need no rounding": {
        **QWEN3,
        "original_max_position_embeddings": 1,
        "beta_fast": 1e9,
        "beta_slow": 1e8,
    },
}


@pytest.fixture
def ascends_embeddings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace vLLM's rotary embeddings with vllm-ascend's, as in a worker."""
    from vllm_ascend import utils

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    monkeypatch.setattr(utils, "_ASCEND_CUSTOMOP_IS_REIGISTERED", False)
    utils.register_ascend_customop(None)
    with set_current_vllm_config(VllmConfig()):
        yield


def served(rope: dict[str, Any]) -> torch.Tensor:
    """Return the frequencies of vllm-ascend."""
    embedding = get_rope(HEAD, 4096, rope_parameters=dict(rope), dtype=torch.float32)
    assert type(embedding).__name__.startswith("Ascend"), "vllm-ascend replaces this class"
    if "inv_freq" in dict(embedding.named_buffers()):
        return embedding.inv_freq.cpu()
    return embedding._compute_inv_freq(rope.get("factor", rope["rope_theta"])).cpu()


def of_transformers(rope: dict[str, Any]) -> torch.Tensor:
    rope = {**rope, "rope_type": rope["rope_type"].removeprefix("deepseek_")}
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, HEAD, 2) / HEAD)
    found: torch.Tensor = ROPE_INIT_FUNCTIONS["yarn"](
        Qwen3Config(head_dim=HEAD, rope_parameters=rope), torch.device("cpu")
    )[0]
    return found


@pytest.mark.usefixtures("ascends_embeddings")
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_upstream_frequencies_differ_by_as_much_as_the_caveat_says(
    rope: dict[str, Any],
) -> None:
    """If a case without `truncate` fails, upstream may have fixed the defect: see caveats.py."""
    difference = float((served(rope) / of_transformers(rope) - 1).abs().max())
    config = {"head_dim": HEAD, "rope_parameters": rope}
    found = caveats_of(config, config)
    assert bool(found) == (difference > 1e-5)
    if found:
        assert len(found) == 1
        assert f"by up to {100 * difference:.2g} %" in found[0].problem
    if found and "mrope_section" not in rope:
        (repaired,) = override_of(found[0]).values()
        assert float((served(repaired) / of_transformers(rope) - 1).abs().max()) < 1e-5
        assert not caveats_of(
            {**config, "rope_parameters": repaired}, {**config, "rope_parameters": repaired}
        )


def override_of(caveat: Caveat) -> dict[str, Any]:
    """Return the value of --hf-overrides in a caveat."""
    (text,) = re.findall(r"--hf-overrides '(.*)'", caveat.remedy)
    found: dict[str, Any] = json.loads(text)
    return found


def test_published_override_of_qwen3_changes_a_frequency_by_almost_five_percent() -> None:
    (caveat,) = caveats_of(
        {"head_dim": HEAD, "rope_parameters": QWEN3}, {"head_dim": HEAD, "rope_parameters": QWEN3}
    )
    assert "by up to 4.7 %" in caveat.problem


# Forms of a config.json, and the override that repairs it; None if no repair is needed.
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
REPAIRED = {**QWEN3, "truncate": True}
SIZES = {"hidden_size": 2048, "num_attention_heads": 16}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "older names": (
        {
            **SIZES,
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        {"rope_parameters": REPAIRED},
    ),
    "by type of layer": (
        {**SIZES, "rope_parameters": {"full_attention": QWEN3, "sliding_attention": DEFAULT}},
        {"rope_parameters": {"full_attention": REPAIRED, "sliding_attention": DEFAULT}},
    ),
    "of a multimodal model": (
        {"text_config": {**SIZES, "rope_parameters": QWEN3}, "vision_config": {}},
        {"text_config": {"rope_parameters": REPAIRED}},
    ),
    "half of the head": (
        {"head_dim": 256, "rope_parameters": {**QWEN3, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {**REPAIRED, "partial_rotary_factor": 0.5}},
    ),
    "rotary_dim": (
        {"head_dim": 256, "rotary_dim": 128, "rope_parameters": QWEN3},
        {"rope_parameters": REPAIRED},
    ),
    "null": ({**SIZES, "rope_parameters": None, "rope_scaling": None}, None),
    "gpt-oss": ({**SIZES, "model_type": "gpt_oss", "rope_parameters": QWEN3}, None),
    "Kimi-K2": (
        {**SIZES, "model_type": "kimi_k2", "kv_lora_rank": 512, "rope_parameters": QWEN3},
        None,
    ),
    "DeepSeek-V4": ({**SIZES, "model_type": "deepseek_v4", "rope_parameters": QWEN3}, None),
    "MiniCPM3": (
        {
            "qk_rope_head_dim": HEAD,
            "model_type": "minicpm3",
            "kv_lora_rank": 256,
            "rope_parameters": QWEN3,
        },
        {"rope_parameters": REPAIRED},
    ),
    "Transformers backend": (
        {**SIZES, "architectures": ["TransformersForCausalLM"], "rope_parameters": QWEN3},
        None,
    ),
    **{
        f"{key}: {value!r:.20}": (
            {"head_dim": HEAD, "rope_parameters": {**QWEN3, key: value}},
            None,
        )
        for key, value in (
            ("factor", "4"),
            ("factor", None),
            ("rope_theta", 1),
            ("original_max_position_embeddings", -1),
        )
    },
    "a head without bounds": ({"head_dim": 10**12, "rope_parameters": QWEN3}, None),
    "a list": ({"head_dim": HEAD, "rope_parameters": [QWEN3]}, None),
}


@pytest.mark.parametrize(("config", "override"), FORMS.values(), ids=FORMS)
def test_override_keeps_all_parameters_of_any_form_of_config(
    config: dict[str, Any], override: dict[str, Any] | None
) -> None:
    found = caveats_of(config, {**config, **config.get("text_config", {})})
    assert [override_of(each) for each in found] == ([] if override is None else [override])


def test_upstream_modules_with_another_rounding_are_known() -> None:
    """If a module is new, check whether it computes YaRN like vllm-ascend."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model_executor/models"
    own = {path.stem for path in folder.glob("*.py") if "deepseek_yarn" in path.read_text()}
    assert own - {"deepseek_eagle3"} == {"AXK1", "deepseek_v2", "openpangu", "sarvam"}
    gives = {path.stem for path in folder.glob("*.py") if '"truncate":' in path.read_text()}
    assert gives == {"gpt_oss"}


# Sliding windows

MISTRAL = {
    "model_type": "mistral",
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 32,
}
QWEN2 = {**MISTRAL, "model_type": "qwen2", "max_window_layers": 32}
WINDOWS: dict[str, tuple[dict[str, Any], int | None, bool]] = {
    "Mistral": (MISTRAL, None, True),
    "gpt-oss": ({**MISTRAL, "layer_types": ["sliding_attention", "full_attention"]}, None, True),
    "Phi-3-mini-4k": (
        {**MISTRAL, "sliding_window": 2047, "max_position_embeddings": 4096},
        None,
        True,
    ),
    "Qwen2 whose layers all slide": (
        {**QWEN2, "max_window_layers": 0, "use_sliding_window": True},
        None,
        True,
    ),
    "Qwen2 as published": ({**QWEN2, "use_sliding_window": False}, None, False),
    "Qwen2 whose layers do not": ({**QWEN2, "use_sliding_window": True}, None, False),
    "no layer slides": ({**MISTRAL, "layer_types": ["full_attention"]}, None, False),
    "no window": ({**MISTRAL, "sliding_window": None}, None, False),
    "a window of 0 (none)": ({**MISTRAL, "sliding_window": 0}, None, False),
    "a window that the model's sequences fit into": (
        {**MISTRAL, "max_position_embeddings": 4096},
        None,
        False,
    ),
    "a window that the server's sequences fit into": (MISTRAL, 4096, False),
    "sequences that are one longer": (MISTRAL, 4097, True),
    "DeepSeek-V4, whose attention has the right width": (
        {**MISTRAL, "model_type": "deepseek_v4"},
        None,
        False,
    ),
    "latent attention without a window": ({**MISTRAL, "kv_lora_rank": 512}, None, False),
}


@pytest.mark.parametrize(("config", "max_tokens", "wider"), WINDOWS.values(), ids=WINDOWS)
def test_window_is_reported_if_sequences_can_be_longer(
    config: dict[str, Any], max_tokens: int | None, wider: bool
) -> None:
    found = caveats_of(config, config, None, max_tokens)
    assert bool(found) == wider
    if wider:
        window = config["sliding_window"]
        assert f"from position {window} on" in found[0].problem
        assert override_of(found[0]) == {"sliding_window": window - 1}
        assert not caveats_of(config, config, override_of(found[0]), max_tokens), (
            "the window is chosen for vllm-ascend"
        )


def test_upstream_passes_the_unchanged_window_to_cann() -> None:
    """If this fails, upstream may have fixed the defect: run test_rows_of_caveats.py."""
    spec = importlib.util.find_spec("vllm_ascend")
    assert spec is not None and spec.origin is not None
    attention = (Path(spec.origin).parent / "attention/attention_v1.py").read_text()
    assert "pre_tokens = self.sliding_window or SWA_INT_MAX" in attention
    assert (
        "pre_tokens=self.sliding_window if self.sliding_window is not None else SWA_INT_MAX"
        in attention
    )
    assert "sliding_window - 1" not in attention


# Doctor, `hsx serve` and server

BOTH = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "dtype": "bfloat16",
    **MISTRAL,
    "rope_parameters": QWEN3,
}


def test_doctor_serve_and_server_report_the_same_caveats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BOTH))
    said = caveats_of(BOTH, BOTH)
    assert len(said) == 2
    by_doctor = [each for each in check_target(str(tmp_path)) if each.name == "rows"]
    assert [(each.found, each.what_to_do) for each in by_doctor] == [
        (f"{tmp_path.name}: {each.problem}", each.remedy) for each in said
    ]
    by_serve = build(tmp_path, "1", tmp_path / "out", {}, [], {}).notes
    assert by_serve == tuple(map(str, said))
    config = SimpleNamespace(to_dict=lambda: BOTH)
    model = {
        "model": "m",
        "architecture": "MistralForCausalLM",
        "max_model_len": 8192,
        "hf_overrides": {},
    }
    with caplog.at_level("WARNING", logger.name):
        for _ in range(2):  # two speculators
            warn_of_caveats(SimpleNamespace(**model, hf_config=config, hf_text_config=config))
    assert [record.getMessage() for record in caplog.records] == [f"m: {each}" for each in by_serve]


@pytest.mark.parametrize(
    ("whole", "overrides", "names"),
    [
        (BOTH, {"rope_parameters": REPAIRED}, ["sliding window"]),
        (BOTH, {"sliding_window": None}, ["YaRN"]),
        (BOTH, {"sliding_window": 4095}, ["YaRN"]),
        (
            {**BOTH, "rope_parameters": DEFAULT, "sliding_window": None},
            {"rope_parameters": QWEN3},
            ["YaRN"],
        ),
        (
            {**BOTH, "text_config": {"rope_parameters": QWEN3}},
            {"text_config": {"rope_parameters": REPAIRED}},
            ["sliding window"],
        ),
        (
            {**BOTH, "text_config": {"rope_parameters": QWEN3}},
            {"rope_parameters": REPAIRED},
            ["YaRN", "sliding window"],
        ),
        (
            {**BOTH, "text_config": {"rope_parameters": QWEN3}},
            {"text_config": {"sliding_window": 4095}},
            ["YaRN"],
        ),
        (BOTH, "no JSON", ["YaRN", "sliding window"]),
        (BOTH, "[]", ["YaRN", "sliding window"]),
    ],
)
def test_serve_applies_overrides_before_reporting_caveats(
    tmp_path: Path, whole: dict[str, Any], overrides: Any, names: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(whole))
    text = overrides if isinstance(overrides, str) else json.dumps(overrides)
    notes = build(tmp_path, "1", tmp_path / "out", {}, ["--hf-overrides", text], {}).notes
    assert [
        next(name for name in ("YaRN", "sliding window") if note.startswith(name)) for note in notes
    ] == names


@pytest.mark.parametrize(
    ("data_rank", "tensor_rank", "warns"),
    [(0, 0, True), (0, 1, False), (1, 0, False), (1, 1, False)],
)
def test_one_rank_of_a_server_warns(
    monkeypatch: pytest.MonkeyPatch, data_rank: int, tensor_rank: int, warns: bool
) -> None:
    warned: list[Any] = []
    monkeypatch.setattr(
        drafter,
        "read_settings",
        lambda config: SimpleNamespace(target=SimpleNamespace(layer_ids=(1,))),
    )
    for name in ("require_collecting_target", "refuse_wrong_products"):
        monkeypatch.setattr(drafter, name, lambda *arguments: None)
    monkeypatch.setattr(drafter, "tensor_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(drafter, "warn_of_caveats", warned.append)
    drafter.check_start(
        SimpleNamespace(
            model_config="of the target",
            parallel_config=SimpleNamespace(data_parallel_rank=data_rank),
        )
    )
    assert warned == (["of the target"] if warns else [])
