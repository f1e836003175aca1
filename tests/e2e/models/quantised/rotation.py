"""Rotate the residual stream of a Qwen3, MiniMax-M2 or DeepSeek-V3 checkpoint, as QuaRot does.

A row x of the residual stream becomes x Q. The output of the model stays the same: a norm commutes
with a rotation after the norm's weight is multiplied into the layers that read the norm.
"""

import re
from collections.abc import Mapping

import torch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FINAL_NORM = "model.norm.weight"
_LAYER = r"(?P<layer>model\.layers\.\d+\.)"
_EXPERT = r"(mlp|block_sparse_moe)\.experts\.\d+"
# Linear layers that read the residual stream, by the preceding norm.
_READERS = {
    "input_layernorm": re.compile(
        rf"{_LAYER}self_attn\.([qkv]_proj|q_a_proj|kv_a_proj_with_mqa|indexer\.(wk|weights_proj))\.weight"
    ),
    "post_attention_layernorm": re.compile(
        rf"{_LAYER}(mlp\.(shared_experts\.)?(gate|up)_proj|(mlp|block_sparse_moe)\.gate|{_EXPERT}\.(w[13]|(gate|up)_proj))\.weight"
    ),
}
_UNQUANTISED = re.compile(
    rf"{_LAYER}((mlp|block_sparse_moe)\.gate|self_attn\.indexer\.(wk|weights_proj))\.weight"
)
_WRITER = re.compile(
    rf"{_LAYER}(self_attn\.o_proj|mlp\.(shared_experts\.)?down_proj|{_EXPERT}\.(w2|down_proj))\.weight"
)
_NORM = re.compile(rf"{_LAYER}({'|'.join(_READERS)})\.weight")
# Weights of latents, within a head, over all heads, and of the router's logits. None is in the
# residual stream.
_OF_LATENT = re.compile(rf"{_LAYER}self_attn\.(q_b_proj|kv_b_proj|indexer\.wq_b)\.weight")
_ASIDE = re.compile(
    rf"{_LAYER}(self_attn\.(([qk]_norm|(q|kv)_a_layernorm)\.weight|indexer\.k_norm\.(weight|bias))"
    r"|(mlp\.gate|block_sparse_moe)\.e_score_correction_bias)"
)


def random_rotation(size: int, seed: int = 0) -> torch.Tensor:
    """Return a random orthogonal matrix, float64 [size, size].

    If `size` is a power of two, it is a Hadamard matrix with random signs.
    """
    generator = torch.Generator().manual_seed(seed)
    if size & (size - 1):
        basis, triangle = torch.linalg.qr(
            torch.randn(size, size, generator=generator, dtype=torch.float64)
        )
        return basis * triangle.diagonal().sign()
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < size:
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2.0 - 1.0
    return signs * hadamard / size**0.5


def rotate(weights: Mapping[str, torch.Tensor], rotation: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights of the rotated model. Dtypes stay the same, and weights of norms are 1.

    With tied embeddings, the result has a separate head.

    Args:
        weights: weights of the checkpoint, by name.
        rotation: Q, float64 [hidden, hidden].

    Raises:
        ValueError: for a weight of another architecture.
    """
    head = weights.get(HEAD, weights[EMBEDDING])
    return {
        name: _rotated(name, weight, weights, rotation).to(weight.dtype)
        for name, weight in {**weights, HEAD: head}.items()
    }


def _rotated(
    name: str, weight: torch.Tensor, weights: Mapping[str, torch.Tensor], rotation: torch.Tensor
) -> torch.Tensor:
    exact = weight.double()
    if name == EMBEDDING:
        return exact @ rotation
    if name == HEAD:
        return exact * weights[FINAL_NORM].double() @ rotation
    if name == FINAL_NORM or _NORM.fullmatch(name):
        return torch.ones_like(exact)
    for norm, reader in _READERS.items():
        if match := reader.fullmatch(name):
            return exact * weights[f"{match['layer']}{norm}.weight"].double() @ rotation
    if _WRITER.fullmatch(name):
        return rotation.t() @ exact
    if _ASIDE.fullmatch(name) or _OF_LATENT.fullmatch(name):
        return exact
    raise ValueError(
        f"{name}: not a weight of Qwen3, MiniMax-M2 or DeepSeek-V3; only these can be rotated"
    )


def is_linear(name: str) -> bool:
    """Return True for the weight of a linear layer that may be quantised.

    Exceptions are routers, kv_b_proj of DeepSeek, because vllm-ascend multiplies by parts of it,
    and two layers of an indexer, because vLLM merges them into one without quantisation (Indexer
    in model_executor/models/deepseek_v2.py:636 of 0.23.0).
    """
    reads = any(
        reader.fullmatch(name) for reader in _READERS.values()
    ) and not _UNQUANTISED.fullmatch(name)
    of_latent = _OF_LATENT.fullmatch(name) and not name.endswith("kv_b_proj.weight")
    return reads or bool(of_latent) or is_writer(name)


def is_writer(name: str) -> bool:
    """Return True for the weight of a linear layer that writes to the residual stream."""
    return bool(_WRITER.fullmatch(name))
