"""Targets that vllm-ascend computes differently from transformers: servers log it.

If a test here fails because rows equal the model's, vllm-ascend is fixed, and the caveat
(vllm_ascend_hsx/caveats.py) applies only to earlier releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, run_engine, tokens
from session import WITH_OUTPUT
from tiny_caveats import WINDOW, YARN, build_mistral, build_yarn

from vllm_ascend_hsx.demo.reference import reference_hidden_states

pytestmark = pytest.mark.long

LAYER_IDS = (4, 0, 1, 2)
CHUNK = 64
EXACT = 1e-5  # relative, in float32
PROMPT = tokens(3 * CHUNK + 9)


def serve(directory: Path, model: Path, script: Sequence[Sequence[Any]], **options: Any) -> Run:
    run = run_engine(
        directory,
        model,
        script,
        layer_ids=LAYER_IDS,
        dtype="float32",
        max_num_batched_tokens=CHUNK,
        **options,
    )
    assert run.error is None, run.error
    return run


def errors(run: Run, request_id: str, model: Path) -> torch.Tensor:
    """Return the relative error of each row against a model in transformers, [tokens, layers]."""
    rows, expected = (
        run.rows(request_id)["hidden_states"],
        reference_hidden_states(model, run.sequence(request_id), LAYER_IDS),
    )
    difference: torch.Tensor = (rows - expected).norm(dim=-1) / expected.norm(dim=-1)
    return difference


def overrides(run: Run, caveat: str) -> list[dict[str, Any]]:
    """Return the value of --hf-overrides in each warning of a server that starts with this text."""
    return [
        json.loads(found)
        for found in re.findall(rf"{re.escape(caveat)}.*--hf-overrides '(.*)'", run.log)
    ]


# YaRN

ONE = [["add", "chunked", PROMPT, {"max_tokens": 1}], ["drain"]]


def test_upstream_yarn_is_not_rounded_unless_the_config_says_so_and_the_named_override_repairs_it(
    tmp_path: Path,
) -> None:
    model = build_yarn(tmp_path / "model")
    run = serve(tmp_path / "run", model, ONE)
    assert errors(run, "chunked", model)[1:].max() > 0.1
    assert (
        errors(run, "chunked", build_yarn(tmp_path / "not-rounded", truncate=False)).max() < EXACT
    )
    (override,) = overrides(run, 'YaRN without the key "truncate"')
    assert override == {"rope_parameters": {**YARN, "truncate": True}}
    repaired = serve(tmp_path / "repaired", model, ONE, hf_overrides=override)
    assert errors(repaired, "chunked", model).max() < EXACT
    assert not overrides(repaired, "YaRN")


# Sliding windows

# The decode crosses the position whose oldest key is the last one of a block.
BESIDE = [
    ["add", "decoding", tokens(150), {"max_tokens": 24, **WITH_OUTPUT}],
    ["step", 4],
    ["add", "chunked", PROMPT, {"max_tokens": 1}],
    ["add", "as-long-as-the-window", tokens(WINDOW), {"max_tokens": 1}],
    ["drain"],
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["drain"],
]
REQUESTS = [action[1] for action in BESIDE if action[0] == "add"]


def test_upstream_mistrals_window_is_one_key_wider_and_the_named_override_repairs_it(
    tmp_path: Path,
) -> None:
    model = build_mistral(tmp_path / "model", WINDOW)
    run = serve(tmp_path / "run", model, BESIDE)
    found = errors(run, "chunked", model)
    assert found[:WINDOW].max() < EXACT
    assert (found[WINDOW:, LAYER_IDS.index(1)] > 1e-4).all()
    wider = build_mistral(tmp_path / "wider", WINDOW + 1)
    assert max(float(errors(run, name, wider).max()) for name in REQUESTS) < EXACT
    (override,) = overrides(
        run, f"sliding window of {WINDOW} tokens: vllm-ascend lets each token see {WINDOW + 1}"
    )
    assert override == {"sliding_window": WINDOW - 1}
    repaired = serve(tmp_path / "repaired", model, BESIDE, hf_overrides=override)
    assert max(float(errors(repaired, name, model).max()) for name in REQUESTS) < EXACT
    assert not overrides(repaired, "sliding window")
