"""Which targets can be extracted, and what is added to the class of one that could not."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from releases import installed_is

from vllm_ascend_hsx.compat.targets import ARCHITECTURES, SHOWN, UNSERVABLE, refuse_unservable_target, require_collecting_target
from vllm_ascend_hsx.protocol.errors import UserError

OURS = {"Qwen3NextForCausalLM"} if installed_is("<0.26") else set[str]()  # vllm 0.26 has the interface itself
# Tables of vLLM's registry that list targets; the others have drafts and non-generating models.
TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")


def collecting_architectures() -> set[str]:
    """Those of vLLM's registry whose class has SupportsEagle3 among its bases, by the sources."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model_executor" / "models"
    bases: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        origin = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                origin |= {alias.asname or alias.name: (node.module.rpartition(".")[2], alias.name) for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0] for base in node.bases]
                bases[path.stem, node.name] = [origin.get(name, (path.stem, name)) for name in names]

    def collects(key: tuple[str, str]) -> bool:
        return key[1] == "SupportsEagle3" or any(collects(base) for base in bases.get(key, []) if base != key)

    found = set()
    for node in ast.parse((folder / "registry.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in TABLES:
            for name, place in ast.literal_eval(node.value).items():
                if collects(tuple(place)):
                    found.add(name)
    return found


# Classes that vLLM 0.30 has elsewhere than the others: by transformers, or per platform.
ELSEWHERE = (
    set[str]()
    if installed_is("<0.30")
    else {
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HunYuanVLForConditionalGeneration",
    }
)


def test_the_list_of_targets_is_vllms_and_what_we_add() -> None:
    of_vllm = collecting_architectures()
    assert set(ARCHITECTURES) == (of_vllm | OURS | ELSEWHERE) - set(UNSERVABLE)
    assert set(UNSERVABLE) <= of_vllm
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)
    assert not OURS & of_vllm  # else ours is no longer needed


def test_what_the_tests_have_shown_is_a_part_of_the_list() -> None:
    assert set(SHOWN) < set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", UNSERVABLE)
def test_a_target_that_cannot_be_served_is_refused_by_its_configuration(architecture: str) -> None:
    refuse_unservable_target(SimpleNamespace(architecture="Qwen3ForCausalLM"))
    with pytest.raises(UserError, match=rf"model='{architecture}' cannot be served: .*0\.23\.0.* Choose another target"):
        refuse_unservable_target(SimpleNamespace(architecture=architecture))


def source(package: str, *path: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*path).read_text())


def function(tree: ast.Module, class_name: str, name: str) -> str:
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == class_name)
    return next(ast.unparse(each) for each in found.body if isinstance(each, ast.FunctionDef) and each.name == name)


def test_the_reasons_why_nemotron_h_cannot_be_served_still_hold() -> None:
    """Of the sources. If one fails, a version serves what we refuse: look at UNSERVABLE again."""
    runner = function(source("vllm_ascend", "worker", "model_runner_v1.py"), "NPUModelRunner", "initialize_kv_cache")
    assert "initialize_mamba_ssu_backend" not in runner and "super()" not in runner
    assert "initialize_mamba_ssu_backend" in function(
        source("vllm", "v1", "worker", "gpu_model_runner.py"), "GPUModelRunner", "initialize_kv_cache"
    )
    if installed_is("<0.26"):
        experts = function(source("vllm", "model_executor", "layers", "fused_moe", "layer.py"), "FusedMoE", "__init__")
    else:
        experts = function(source("vllm", "model_executor", "layers", "fused_moe", "config.py"), "FusedMoEConfig", "__post_init__")
    assert "is_act_and_mul=False is supported only for CUDA" in experts
    nemotron = ast.unparse(source("vllm", "model_executor", "models", "nemotron_h.py"))
    assert "MambaMixer2(" in nemotron
    assert ("is_act_and_mul=False" if installed_is("<0.26") else "activation_without_mul(config.mlp_hidden_act)") in nemotron


class Collecting:
    """What SupportsEagle3 asks for."""

    supports_eagle3 = True
    has_own_lm_head = has_own_embed_tokens = False

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None: ...

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return (1,)


def model_config(model_class: type) -> Any:
    def resolve(architectures: list[str], model_config: Any) -> tuple[type, str]:
        return model_class, architectures[0]

    return SimpleNamespace(architectures=["OlmoForCausalLM"], registry=SimpleNamespace(resolve_model_cls=resolve))


def test_a_target_that_collects_nothing_is_refused_with_the_list_of_those_that_do() -> None:
    require_collecting_target(model_config(Collecting))
    with pytest.raises(UserError, match=r"model='OlmoForCausalLM' collects no hidden states.* are Afmoe.*, Qwen3NextForCausalLM, .*"):
        require_collecting_target(model_config(object))


def test_qwen3_next_collects_with_our_class() -> None:
    from vllm.model_executor.models import qwen3_next
    from vllm.model_executor.models.interfaces import supports_eagle3

    from vllm_ascend_hsx.compat.qwen3_next import Qwen3NextForCausalLM

    assert supports_eagle3(Qwen3NextForCausalLM)
    assert issubclass(Qwen3NextForCausalLM, qwen3_next.Qwen3NextForCausalLM)
    is_needed = "Qwen3NextForCausalLM" in OURS
    assert is_needed != supports_eagle3(qwen3_next.Qwen3NextForCausalLM)
    assert is_needed != (Qwen3NextForCausalLM is qwen3_next.Qwen3NextForCausalLM)
