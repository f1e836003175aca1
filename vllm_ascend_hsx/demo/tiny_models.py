"""Build tiny models of real architectures with random weights, for both vllm and transformers."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_ascend_hsx.demo.tokenizer import build_tokenizer

MARKER = "hsx_tiny_model.json"
RECIPE_VERSION = 1  # increment with each change that affects a weight or a config key

VOCAB_SIZE = 640
HIDDEN_SIZE = 256
NUM_HEADS = 8  # with 4 KV heads: divisible by TP 2 and 4
NUM_KV_HEADS = 4
HEAD_DIM = 32
ROTARY_DIM = 16  # half of the head, as MiniMax-M2's 64 of 128
NUM_EXPERTS = 8  # divisible by EP 2, 4 and 8
EXPERTS_PER_TOKEN = 2
MAX_POSITIONS = 4096
# Coordinates of the residual stream that determine a token's experts.
ROUTING = slice(HIDDEN_SIZE - NUM_EXPERTS, HIDDEN_SIZE)


def build_minimax_m2(
    directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0
) -> Path:
    """Build a MiniMax-M2 of about 5 MB and return the directory. An existing model is kept.

    The same arguments give the same bytes. Raises ValueError if the directory has other contents,
    or for a wrong dtype or number of layers.
    """
    return build_model(directory, "minimax_m2", _minimax_m2, dtype=dtype, layers=layers, seed=seed)


def cached_minimax_m2() -> Path:
    """Return the directory of the demo's model. It is built once per user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return build_minimax_m2(cache / "vllm-ascend-hsx" / "tiny-minimax-m2")


def build_qwen3(
    directory: str | Path, *, dtype: str = "bfloat16", layers: int = 4, seed: int = 0
) -> Path:
    """Build a dense Qwen3 of about 4 MB. Otherwise like build_minimax_m2."""
    return build_model(directory, "qwen3", _qwen3, dtype=dtype, layers=layers, seed=seed)


def build_model(
    directory: str | Path,
    model_type: str,
    create: Callable[[int, torch.Generator], tuple[PreTrainedModel, dict[str, Any]]],
    *,
    dtype: str,
    layers: int,
    seed: int,
) -> Path:
    """Build a model of any architecture. Otherwise like build_minimax_m2.

    `create` gets the number of layers and a generator, and returns the model and further config
    keys.
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={dtype!r}: choose one of bfloat16, float16, float32")
    if layers < 1:
        raise ValueError(f"layers={layers}: a model needs at least one layer")
    target = Path(directory)
    recipe = {
        "version": RECIPE_VERSION,
        "model_type": model_type,
        "dtype": dtype,
        "layers": layers,
        "seed": seed,
    }
    if target.exists() and any(target.iterdir()):
        found = _recipe_of(target)
        if found == recipe:
            return target
        if found is None:
            raise ValueError(
                f"{target} is not empty and holds no tiny model; give an empty or new directory"
            )
        shutil.rmtree(target)
    model, extra_config = create(layers, torch.Generator().manual_seed(seed))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary directory and renamed: an interrupted build never looks like a model.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        model.to(getattr(torch, dtype)).save_pretrained(scratch)
        build_tokenizer(VOCAB_SIZE).save_pretrained(scratch)
        _extend_json(scratch / "config.json", extra_config)
        (scratch / MARKER).write_text(json.dumps(recipe))
        scratch.chmod(0o755)
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _recipe_of(directory: Path) -> dict[str, Any] | None:
    try:
        recipe: dict[str, Any] = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return recipe


def _extend_json(path: Path, extra: dict[str, Any]) -> None:
    content = json.loads(path.read_text())
    content.update(extra)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def common_config(
    layers: int, heads: int = NUM_HEADS, kv_heads: int = NUM_KV_HEADS
) -> dict[str, Any]:
    """Return the configuration keys that all tiny models share."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _minimax_m2(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = MiniMaxM2Config(
        **common_config(layers),
        intermediate_size=128,
        head_dim=HEAD_DIM,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        # transformers 5.5.4 reads the partial rotary factor from this key only; vllm 0.23.0 prefers
        # it to rotary_dim.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": ROTARY_DIM / HEAD_DIM,
        },
    )
    model = MiniMaxM2ForCausalLM(config)
    draw_weights(model, generator)
    _widen_routing_margins(model, generator)
    # Keys of the published config.json that transformers' class does not write. vllm reads them
    # (model_executor/models/minimax_m2.py, 0.23.0), or they describe the architecture.
    return model, {
        "attn_type_list": [1] * layers,
        "qk_norm_type": "per_layer",
        "num_mtp_modules": 0,  # the published config has three, without weights in the checkpoint
        "rotary_dim": ROTARY_DIM,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": False,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def _qwen3(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = Qwen3Config(
        **common_config(layers),
        intermediate_size=512,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    model = Qwen3ForCausalLM(config)
    draw_weights(model, generator)
    return model, {}


@torch.no_grad()
def draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw parameters that make each layer add about as much as the residual stream holds.

    Rows of different tokens, positions and layers are then far apart: a row in the wrong place
    differs by far more than rounding.
    """
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            # Above one, to make attention select tokens. An average over the whole prompt would
            # hide a wrong row.
            parameter.copy_(1.5 + 0.1 * noise)
        elif "norm" in name:
            parameter.copy_(1.0 + 0.1 * noise)
        elif "embed_tokens" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)


@torch.no_grad()
def choose_experts(embedding: torch.Tensor, generator: torch.Generator) -> None:
    """Write the experts of each token into ROUTING of `embedding` [VOCAB_SIZE, HIDDEN_SIZE].

    With random routers about one token in fifteen has two experts so close that two correct
    bfloat16 implementations choose differently. The token's rows then differ by far more than
    rounding. So routers follow this choice (follow_choice), and layers write little into ROUTING.
    Context still affects the router's logits, and so the weights of the chosen experts, but not the
    choice.
    """
    chosen = torch.stack(
        [
            torch.randperm(NUM_EXPERTS, generator=generator)[:EXPERTS_PER_TOKEN]
            for _ in range(VOCAB_SIZE)
        ]
    )
    embedding[:, ROUTING] = torch.full((VOCAB_SIZE, NUM_EXPERTS), -1.5).scatter_(1, chosen, 3.0)


@torch.no_grad()
def follow_choice(router: torch.Tensor, own: float, generator: torch.Generator) -> None:
    """Make `router` [NUM_EXPERTS, HIDDEN_SIZE] read ROUTING, newly permuted.

    Scale the router's own weights by `own`.
    """
    router *= own
    router[:, ROUTING] = torch.eye(NUM_EXPERTS)[torch.randperm(NUM_EXPERTS, generator=generator)]


@torch.no_grad()
def _widen_routing_margins(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Make the choice of experts balanced and robust to rounding."""
    choose_experts(model.get_input_embeddings().weight, generator)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[ROUTING] *= 0.1
        layer.mlp.experts.down_proj[:, ROUTING] *= 0.1
        follow_choice(layer.mlp.gate.weight, 0.3, generator)
        layer.mlp.e_score_correction_bias.copy_(
            0.02 * torch.randn(NUM_EXPERTS, generator=generator)
        )
