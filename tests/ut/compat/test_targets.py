"""Targets that can be extracted, and changes to classes without the interface."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from releases import installed_is, only_with

from vllm_ascend_hsx.compat import targets
from vllm_ascend_hsx.compat.targets import (
    SHOWN,
    UNSERVABLE,
    layer_id_meaning,
    refuse_architecture,
    require_collecting_target,
)
from vllm_ascend_hsx.compat.versions import release_to_patch
from vllm_ascend_hsx.doctor.target import check_target
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import RowFormat
from vllm_ascend_hsx.serve.command import build

NAMED = ("BloomForCausalLM", "NemotronHForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def judged() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The record of the installed release, and a server's reasons to refuse: with id 1, with 0."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(Path(__file__).with_name("judge_architectures.py"))]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("judged: "))
    found, verdicts = json.loads(line.removeprefix("judged: "))
    return found, verdicts


def test_recorded_architectures_match_the_installed_classes(
    judged: tuple[dict[str, Any], dict[str, list[str]]],
) -> None:
    record = Path(targets.__file__).with_name("architectures.json")
    assert judged[0] == json.loads(record.read_text())[str(release_to_patch("vllm"))], (
        "call tools/record_architectures.py"
    )
    assert len(judged[0]["collected"]["OURS"]) >= 60
    assert len(judged[0]["collected"]["LANGUAGE_MODEL"]) >= 30


def test_doctor_serve_and_server_agree_on_every_class(
    judged: tuple[dict[str, Any], dict[str, list[str]]], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    for names, (with_one, with_zero) in judged[1].items():
        architecture, *named = names.split()
        text = {"num_hidden_layers": 4, "hidden_size": 8, "architectures": named}
        config.write_text(
            json.dumps({**text, "architectures": [architecture], "text_config": text})
        )
        finding = next(iter(check_target(str(tmp_path))))
        assert (finding.verdict == "problem") == bool(with_one), architecture
        assert with_one in finding.found
        assert ("does not return layer id 0" in finding.found) == (
            bool(with_zero) and not with_one
        ), architecture
        for layers, refusal in (("1", with_one), ("0", with_zero)):
            with pytest.raises(UserError, match=re.escape(refusal)) if refusal else nullcontext():
                build(tmp_path, layers, tmp_path / "rows", {}, (), {})


def test_wrapper_is_accepted_if_its_language_model_is(
    judged: tuple[dict[str, Any], dict[str, list[str]]],
) -> None:
    for name in judged[0]["collected"]["LANGUAGE_MODEL"]:
        verdicts = {
            language_model: judged[1][f"{name} {language_model}"] for language_model in NAMED
        }
        assert (
            "BloomModel.forward has no loop that only calls its layers"
            in verdicts["BloomForCausalLM"][0]
        )
        assert "never initialises vLLM's state update" in verdicts["NemotronHForCausalLM"][0]
        assert verdicts["MixtralForCausalLM"] == verdicts["Qwen3ForCausalLM"] == ["", ""], name


def test_unservable_targets_would_otherwise_be_collected(
    judged: tuple[dict[str, Any], dict[str, list[str]]],
) -> None:
    itself = {name for release in (judged[0],) for name in release["collected"]["ITSELF"]}
    assert {name for name in UNSERVABLE if name.startswith("Nemotron")} <= itself
    if installed_is(">=0.30"):
        assert {*UNSERVABLE, *targets.OF_STREAMS} <= itself


def test_targets_shown_by_tests_are_collected() -> None:
    assert list(SHOWN) == sorted(SHOWN)
    records = json.loads(
        Path(targets.__file__).with_name("architectures.json").read_text()
    ).values()
    groups = ("ITSELF", "OURS", "LANGUAGE_MODEL")
    assert set(SHOWN) <= {
        name for record in records for group in groups for name in record["collected"][group]
    }


def test_refusal_and_doctor_name_only_targets_of_the_installed_release(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (nameless,) = check_target(str(tmp_path))
    with pytest.raises(UserError) as refused:
        refuse_architecture(next(iter(targets.recorded_architectures().refused)), (1,))
    others = (
        {"Qwen3OmniMoeForConditionalGeneration"}
        if installed_is("<0.30")
        else {"HunYuanMoEV1ForCausalLM", "Olmo2ForCausalLM"}
    )
    for remedy in (nameless.what_to_do, refused.value.remedy):
        assert set(re.findall(r"\w+For\w+", remedy)) & {*others, "Qwen3ForCausalLM"} == {
            "Qwen3ForCausalLM"
        }


@pytest.mark.parametrize("architecture", UNSERVABLE)
def test_unservable_target_is_refused_by_architecture(architecture: str) -> None:
    refuse_architecture("Qwen3ForCausalLM", (0, 1))
    refuse_architecture("OfAnotherPlugin", (0, 1))
    with pytest.raises(
        UserError,
        match=rf"model='{architecture}' cannot be served: .*0\.\d\d\.0.* Choose another target",
    ):
        refuse_architecture(architecture, (1,))


def source(package: str, *path: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*path).read_text())


def function(tree: ast.Module, class_name: str, name: str) -> str:
    (found,) = (
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == class_name
    )
    return next(
        ast.unparse(each)
        for each in found.body
        if isinstance(each, ast.FunctionDef) and each.name == name
    )


def test_the_reasons_why_nemotron_h_cannot_be_served_still_hold() -> None:
    """Checks the sources. If it fails, a version serves a refused target: update UNSERVABLE."""
    runner = function(
        source("vllm_ascend", "worker", "model_runner_v1.py"),
        "NPUModelRunner",
        "initialize_kv_cache",
    )
    assert "initialize_mamba_ssu_backend" not in runner and "super()" not in runner
    assert "initialize_mamba_ssu_backend" in function(
        source("vllm", "v1", "worker", "gpu_model_runner.py"),
        "GPUModelRunner",
        "initialize_kv_cache",
    )
    if installed_is("<0.26"):
        experts = function(
            source("vllm", "model_executor", "layers", "fused_moe", "layer.py"),
            "FusedMoE",
            "__init__",
        )
    else:
        experts = function(
            source("vllm", "model_executor", "layers", "fused_moe", "config.py"),
            "FusedMoEConfig",
            "__post_init__",
        )
    assert "is_act_and_mul=False is supported only for CUDA" in experts
    nemotron = ast.unparse(source("vllm", "model_executor", "models", "nemotron_h.py"))
    assert "MambaMixer2(" in nemotron
    assert (
        "is_act_and_mul=False"
        if installed_is("<0.26")
        else "activation_without_mul(config.mlp_hidden_act)"
    ) in nemotron


@only_with(">=0.30", "earlier ones have no such classes")
def test_the_reasons_about_classes_of_vllm_ascend_0_30_still_hold() -> None:
    minimax = ast.unparse(source("vllm_ascend", "models", "minimax_m3", "minimax_m3.py"))
    assert "EagleModelMixin._set_aux_hidden_state_layers(self, ())" in minimax
    for path in (("deepseek_v4", "model.py"), ("deepseek_v41", "model.py")):
        assert "layer.layer_idx + 1 in self.aux_hidden_state_layers" in ast.unparse(
            source("vllm_ascend", "models", *path)
        )
    assert "materialized_aux and layer_idx in self.aux_hidden_state_layers" in ast.unparse(
        source("vllm_ascend", "models", "kimi_k3.py")
    )


def test_file_of_a_target_with_several_streams_states_the_mean() -> None:
    assert "mean over the residual streams" in layer_id_meaning("DeepseekV4ForCausalLM")
    assert layer_id_meaning("Qwen3ForCausalLM") == RowFormat((1,), 8, "BF16").layer_id_meaning


class Uncollected(torch.nn.Module):
    def forward(self, input_ids: Any) -> Any:
        return input_ids * 2


def model_config(model_class: type) -> Any:
    def resolve(architectures: list[str], model_config: Any) -> tuple[type, str]:
        return model_class, architectures[0]

    return SimpleNamespace(
        architectures=["OwnForCausalLM"], registry=SimpleNamespace(resolve_model_cls=resolve)
    )


def test_target_without_collector_is_refused_with_the_reason() -> None:
    problem = (
        "model='OwnForCausalLM' collects no hidden states: its class lacks the interface "
        "SupportsEagle3, and "
        "Uncollected.forward does not return the unchanged output of a decoder. Our tests "
        "have served these targets: Deep"
    )
    with pytest.raises(UserError, match=problem):
        require_collecting_target(model_config(Uncollected), (1,))


def test_transformers_backend_is_refused_only_for_layer_0() -> None:
    from vllm.model_executor.models.transformers import TransformersForCausalLM

    require_collecting_target(model_config(TransformersForCausalLM), (1, 2))
    problem = r"eagle_aux_hidden_state_layer_ids=\[1, 0\] has id 0, .* the class OwnForCausalLM does not return it. Remove id 0"
    with pytest.raises(UserError, match=problem):
        require_collecting_target(model_config(TransformersForCausalLM), (1, 0))
