"""Differences between a target on vllm-ascend and the same target in vLLM and transformers.

The differences follow from a model's config.json. Rows match the served model, so no target is
refused. `hsx doctor`, `hsx serve` and the server use the same words. All checked releases have
these differences: tests/ut/config/test_caveats.py compares them with the sources, and
tests/e2e/targets/test_rows_of_caveats.py compares them with rows.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]
_NEGLIGIBLE = 1e-6  # relative difference of a frequency
_LARGEST_HEAD = 1 << 16
_SECTIONS = "mrope_section"
# vLLM's gpt-oss sets the key `truncate` (models/gpt_oss.py:99 in vLLM 0.23.0).
_GIVES_TRUNCATE = frozenset({"gpt_oss"})
# Configs with kv_lora_rank, but plain attention in vLLM (models/minicpm3.py:121 in vLLM 0.23.0).
_NOT_LATENT = frozenset({"minicpm3"})


class Caveat(NamedTuple):
    """A difference, and the remedy.

    Attributes:
        problem: the difference, without a full stop.
        remedy: the remedy, in whole sentences.
    """

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"


def caveats_of(
    whole: Config, text: Config, hf_overrides: object = None, max_tokens: int | None = None
) -> tuple[Caveat, ...]:
    """Return the differences of a target.

    Args:
        whole: config.json, as published or as vLLM reads it.
        text: fields of the language model; equal to `whole` for a text-only model.
        hf_overrides: vLLM's option. Ignored unless it is a mapping.
        max_tokens: longest sequence that the server takes; None for the limit of the model.
    """
    # vLLM replaces whole fields, and merges only `text_config` (ModelConfig._apply_dict_overrides,
    # config/model.py:449 in 0.23.0).
    given = hf_overrides if isinstance(hf_overrides, Mapping) else {}
    nested = isinstance(whole.get("text_config"), Mapping)
    of_text = given.get("text_config", {}) if nested else given
    if isinstance(of_text, Mapping):
        text = {**text, **of_text}
        if "sliding_window" in of_text:  # chosen for vllm-ascend
            text = {**text, "sliding_window": None}
    if not nested:
        whole = {**whole, **given}
    found = (
        _of_yarn(whole, text),
        _of_window(whole, text, max_tokens or text.get("max_position_embeddings")),
    )
    return tuple(each for each in found if each is not None)


def warn_of_caveats(model_config: Any) -> None:
    """Log the differences of the target, once per process.

    Args:
        model_config: vllm.config.ModelConfig.
    """
    whole = {**model_config.hf_config.to_dict(), "architectures": [model_config.architecture]}
    text = model_config.hf_text_config.to_dict()
    for caveat in caveats_of(whole, text, model_config.hf_overrides, model_config.max_model_len):
        _warn(f"{model_config.model}: {caveat}")


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once per process: model runner V2 makes two speculators."""
    logger.warning("%s", message)


def _start_with(whole: Config, override: Config) -> str:
    if isinstance(whole.get("text_config"), Mapping):
        override = {"text_config": override}
    return f"start the server with --hf-overrides '{json.dumps(override)}'."


def _is_latent(text: Config) -> bool:
    """Return whether a target has latent attention (MLA), or the attention of DeepSeek-V4.

    vLLM gives such a target the rotary embedding `deepseek_yarn`. This embedding rounds as
    transformers does (models/deepseek_v2.py in vLLM; AscendDeepseekScalingRotaryEmbedding in
    vllm-ascend, ops/rotary_embedding.py:298 in 0.23.0). The attention has no window (mla_v1.py), or
    a window of the right width (dsa_v1.py:1144 in 0.30.0rc2).
    """
    kind = str(text.get("model_type"))
    return kind.startswith("deepseek_v") or (
        bool(text.get("kv_lora_rank")) and kind not in _NOT_LATENT
    )


# YaRN


def _of_yarn(whole: Config, text: Config) -> Caveat | None:
    """Return the difference of a target with YaRN.

    Reason: YaRN keeps the frequencies below a lower bound, scales the frequencies above an upper
    bound, and interpolates in between. AscendYaRNRotaryEmbedding does not round the bounds unless
    the key `truncate` is true (ops/rotary_embedding.py:269 in 0.23.0 and :344 in 0.30.0rc2). vLLM
    and transformers round by default (layers/rotary_embedding/yarn_scaling_rope.py:31,
    modeling_rope_utils.py:450). For positions with sections (mrope), vLLM derives the bounds from
    four times the model's length (layers/rotary_embedding/mrope.py:238 in 0.23.0).
    """
    architectures = whole.get("architectures")
    if isinstance(architectures, list) and str(next(iter(architectures), "")).startswith(
        "Transformers"
    ):
        return None  # vLLM runs the code of transformers
    if text.get("model_type") in _GIVES_TRUNCATE or _is_latent(text):
        return None
    ropes = dict(_ropes(text))
    differences = {
        kind: difference
        for kind, rope in ropes.items()
        if (difference := _difference(rope, text)) > _NEGLIGIBLE
    }
    if not differences:
        return None
    percent = f"{100 * max(differences.values()):.2g} %"
    if any(_SECTIONS in ropes[kind] for kind in differences):
        return Caveat(
            f"YaRN with {_SECTIONS}: vLLM assumes four times the model's length. Rows are computed "
            f"with frequencies that differ from transformers by up to {percent}",
            "No option of vLLM changes this.",
        )
    repaired = {
        kind: {**rope, "truncate": True} if kind in differences else rope
        for kind, rope in ropes.items()
    }
    return Caveat(
        'YaRN without the key "truncate": vllm-ascend does not round as vLLM and transformers '
        f"do. Rows are computed with frequencies that differ by up to {percent}",
        "To use the frequencies of the model, "
        + _start_with(whole, {"rope_parameters": repaired.get("", repaired)}),
    )


def _ropes(text: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield rope_parameters in the current form, by type of layer; "" stands for all layers."""
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(found, Mapping):
        return
    by_layer = all(isinstance(each, Mapping) for each in found.values())
    for kind, rope in found.items() if by_layer else (("", found),):
        outside = {
            key: text[key]
            for key in ("rope_theta", "original_max_position_embeddings")
            if text.get(key) is not None
        }
        renamed = {"rope_type" if key == "type" else key: value for key, value in rope.items()}
        yield kind, outside | renamed


def _difference(rope: Config, text: Config) -> float:
    """Return the largest relative difference of a frequency; 0 without YaRN."""
    numbers: list[Any] = [
        _rotary_size(rope, text),
        rope.get("rope_theta", 10_000),
        rope.get("factor"),
        rope.get("original_max_position_embeddings"),
        rope.get("beta_fast") or 32,
        rope.get("beta_slow") or 1,
    ]
    head, base, factor, length, *turns = numbers
    usable = all(isinstance(each, int | float) and each > 0 for each in numbers)
    if (
        rope.get("rope_type") != "yarn" or not usable or base <= 1 or head > _LARGEST_HEAD
    ):  # vLLM refuses odd numbers
        return 0.0

    def scales(length: float, rounds: bool) -> list[float]:
        """Return the factor of each frequency."""
        low, high = (
            head * math.log(length / (each * 2 * math.pi)) / (2 * math.log(base)) for each in turns
        )
        low, high = (math.floor(low), math.ceil(high)) if rounds else (low, high)
        low, high = max(low, 0), min(high, head - 1)
        ramp = (
            min(max((index - low) / (high - low or 0.001), 0), 1) for index in range(int(head) // 2)
        )
        return [1 - share + share / factor for share in ramp]

    sections = _SECTIONS in rope
    served = scales(4 * length if sections else length, rope.get("truncate", sections))
    own = scales(length, rope.get("truncate", True))
    return max(
        (abs(ours / right - 1) for ours, right in zip(served, own, strict=True)), default=0.0
    )


def _rotary_size(rope: Config, text: Config) -> Any:
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    divided = (
        hidden // heads
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0
        else None
    )
    head = text.get("qk_rope_head_dim") or text.get("head_dim") or divided
    share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if not isinstance(head, int) or not isinstance(share, int | float):
        return text.get("rotary_dim") or head
    return int(head * share)


# Sliding windows


def _of_window(whole: Config, text: Config, max_tokens: Any) -> Caveat | None:
    """Return the difference of a target with a sliding window that sequences can leave.

    Reason: vllm-ascend passes the window to CANN as `pre_tokens` (attention/attention_v1.py:837 and
    1290 in 0.23.0, :634 and 928 in 0.30.0rc2). CANN counts only the keys before the key of the
    query.
    """
    window = text.get("sliding_window")
    if (
        not isinstance(window, int)
        or window < 2
        or not _slides(text)
        or (isinstance(max_tokens, int) and max_tokens <= window)
    ):
        return None
    return Caveat(
        f"sliding window of {window} tokens: vllm-ascend lets each token see {window + 1}, so "
        f"from position {window} on, rows match a model with a window of {window + 1}",
        "To use the window of the model, " + _start_with(whole, {"sliding_window": window - 1}),
    )


def _slides(text: Config) -> bool:
    """Return whether some layers have the window of the config."""
    if text.get("use_sliding_window") is False or _is_latent(text):
        return False
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return "sliding_attention" in kinds
    # In Qwen2, the first `max_window_layers` layers do not slide.
    full, layers = text.get("max_window_layers"), text.get("num_hidden_layers")
    return not (isinstance(full, int) and isinstance(layers, int) and full >= layers)
