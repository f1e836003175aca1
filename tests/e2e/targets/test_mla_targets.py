"""DeepSeek-V3, with latent attention (MLA) and experts in groups: rows are right in late mode.

In bfloat16: vllm-ascend 0.23.0 computes prefill attention in it for every dtype
(attention/mla_v1.py:1265), and CANN's kernels for latent attention do not accept float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, run_engine, tokens
from releases import installed_is
from session import NOT_EXTRACTED, WITH_OUTPUT
from tiny_deepseek_v3 import DENSE_LAYERS, EXPERTS_PER_TOKEN, NUM_EXPERTS, build_deepseek_v3
from tiny_model_claims import TOLERANCE, assert_rows_lie_apart
from transformers import AutoModelForCausalLM, PreTrainedModel

from vllm_ascend_hsx.demo.reference import reference_hidden_states

LAYER_IDS = (
    4,
    0,
    2,
    1,
)  # not ascending: the file has the user's order; both ends, which vLLM's DeepSeek does not return by itself
CHUNK = 64
LONG = tokens(3 * CHUNK + 9)

SCRIPT = [
    # A last chunk of one token attends to the latents; longer chunks compute keys from them.
    ["add", "one-past-a-chunk", tokens(CHUNK + 1), {"max_tokens": 1}],
    ["drain"],
    ["add", "decoding", tokens(10), {"max_tokens": 24, **WITH_OUTPUT}],
    ["step", 3],
    ["add", "beside-a-decode", tokens(17), {"max_tokens": 2}],
    ["add", "one-token", tokens(1), {"max_tokens": 2}],
    ["step", 1],
    ["add", "chunked", LONG, {"max_tokens": 1}],
    # Shares steps with chunks of a partly cached prompt: only one of the two has earlier keys.
    ["add", "behind-a-chunk", tokens(5), {"max_tokens": 1}],
    ["step", 2],
    ["add", "chunked-too", tokens(100), {"max_tokens": 1}],
    ["add", "same-prompt-again", LONG, {"max_tokens": 1}],
    ["add", "longer-prompt", LONG + tokens(30), {"max_tokens": 1}],
    ["drain"],
    # Not earlier: slow storage holds back only the others.
    ["add", "opts-out", LONG, {"max_tokens": 4, **NOT_EXTRACTED}],
    ["drain"],
    # The worker learns with the next step that a request with generated tokens has ended.
    ["add", "last", tokens(5), {"max_tokens": 1}],
    ["settle"],
    ["add", "copied", LONG + tokens(40), {"max_tokens": 1}],
    ["drain"],
]
EXTRACTED = [action[1] for action in SCRIPT if action[0] == "add" and action[1] != "opts-out"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_deepseek_v3(tmp_path_factory.mktemp("models") / "deepseek_v3")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_engine(
        tmp_path_factory.mktemp("run"),
        model,
        SCRIPT,
        layer_ids=LAYER_IDS,
        max_num_batched_tokens=CHUNK,
    )
    assert run.error is None, run.error
    return run


@pytest.mark.parametrize("request_id", EXTRACTED)
def test_file_holds_the_rows_of_its_own_request(run: Run, request_id: str) -> None:
    comparison = run.compare(request_id)
    assert comparison.matches, comparison


def test_the_layer_of_the_drafter_is_in_no_kv_cache_group(run: Run) -> None:
    assert run.result["kv_groups"] == [
        [f"model.layers.{layer}.self_attn.attn" for layer in range(4)]
    ]


def test_requests_hit_the_prefix_cache_as_far_as_rows_are_reusable(run: Run) -> None:
    assert (
        run.requests["opts-out"]["num_cached_tokens"] == 128
    )  # the first block, of 128 tokens, of 201
    assert run.requests["copied"]["num_cached_tokens"] == 128
    assert run.requests["copied"]["kv_transfer_params"]["reused_tokens"] == 128


def test_generated_text_is_that_of_a_server_without_extraction(
    run: Run, model: Path, tmp_path: Path
) -> None:
    # With extraction vllm-ascend uses another layout for decodes (attention/mla_v1.py:1450), and
    # prompts read no cached prefix.
    plain = [
        [*each[:3], {"max_tokens": each[3]["max_tokens"]}] if each[0] == "add" else each
        for each in SCRIPT
        if each != ["settle"]
    ]
    without = run_engine(tmp_path, model, plain, extract=False, max_num_batched_tokens=CHUNK)
    assert without.error is None, without.error
    prompts = {action[1]: action[2] for action in SCRIPT if action[0] == "add"}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, request in without.requests.items():
        assert_texts_part_at_a_tie_only(
            reference, prompts[name], request["tokens"], run.requests[name]["tokens"]
        )


@torch.inference_mode()
def assert_texts_part_at_a_tie_only(
    reference: PreTrainedModel, prompt: list[int], text: list[int], other: list[int]
) -> None:
    """Compare two texts; bfloat16 rounding, which also depends on the CPU, may decide a tie."""
    assert len(text) == len(other)
    at = next(
        (i for i, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), None
    )
    if at is not None:
        logits = reference(torch.tensor([prompt + text[:at]])).logits[0, -1]
        below_the_best = (logits.max() - logits[[text[at], other[at]]]) / logits.std()
        assert below_the_best.max() <= TOLERANCE, (text, other, below_the_best)


def test_rows_are_right_with_tensor_expert_and_sequence_parallelism(
    model: Path, tmp_path: Path
) -> None:
    layer_ids = (
        4,
        0,
        2,
    )  # both ends, which are collected where each rank has a share of the tokens
    script = [
        ["add", "decoding", tokens(10), {"max_tokens": 6}],
        ["step", 2],
        *(["add", f"r{length}", tokens(length), {"max_tokens": 1}] for length in (1, 7, 101)),
        ["drain"],
    ]
    run = run_engine(
        tmp_path,
        model,
        script,
        layer_ids=layer_ids,
        environ={"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"},
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    )
    assert run.error is None, f"{run.error}\n{run.log[-4000:]}"
    for request_id in ("decoding", "r1", "r7", "r101"):
        comparison = run.compare(request_id)
        assert comparison.matches, f"{request_id}: {comparison}"


@pytest.mark.long
def test_queries_without_a_latent_of_their_own_are_served_too(tmp_path: Path) -> None:
    # As in DeepSeek-V2-Lite: q_lora_rank is null.
    target = build_deepseek_v3(tmp_path / "model", layers=2, q_lora_rank=None)
    chunked, last = (
        ["add", "chunked", tokens(90), {"max_tokens": 3, **WITH_OUTPUT}],
        ["add", "last", tokens(3), {"max_tokens": 1}],
    )
    script = [chunked, ["drain"], last, ["drain"]]
    run = run_engine(
        tmp_path / "run", target, script, layer_ids=(2, 1), max_num_batched_tokens=CHUNK
    )
    assert run.error is None, run.error
    comparison = run.compare("chunked")
    assert comparison.matches, comparison


@pytest.mark.long
def test_defect_11_upstream_does_not_start_before_0_26(model: Path, tmp_path: Path) -> None:
    # The planner merges the drafter's spec with latent attention's specs
    # (core/kv_cache_interface.py:200).
    script = [
        ["real_events"],
        ["add", "short", tokens(20), {"max_tokens": 1}],
        ["drain"],
        ["step", 2],
    ]
    theirs = run_engine(tmp_path, model, script, ours=False, late=False)
    if installed_is(">=0.26"):
        assert theirs.error is None, theirs.error
        assert theirs.compare("short").matches
    else:
        assert theirs.error is not None
        assert (
            "AttributeError: 'HiddenStateCacheSpec' object has no attribute 'scale_dim'"
            in theirs.error
        )


# The tiny model: properties without which the comparisons above would prove too little.


def test_rows_of_different_tokens_and_layers_lie_farther_apart_than_the_tolerance(
    model: Path,
) -> None:
    assert_rows_lie_apart(model, tokens(300))


def test_a_changed_first_token_changes_the_rows_of_the_last_one(model: Path) -> None:
    rows = reference_hidden_states(model, LONG, [4])
    other = reference_hidden_states(model, [LONG[0] ^ 1, *LONG[1:]], [4])
    assert ((rows - other).norm(dim=-1) / rows.norm(dim=-1))[150:].max() > 2 * TOLERANCE


def test_experts_are_chosen_by_groups_evenly_and_alike_in_both_precisions(model: Path) -> None:
    ids = torch.tensor([tokens(400)])
    chosen: dict[torch.dtype, list[torch.Tensor]] = {torch.float32: [], torch.bfloat16: []}
    without_groups = []
    for dtype, choices in chosen.items():
        target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        outputs: list[Any] = []
        experts = [layer.mlp for layer in target.model.layers[DENSE_LAYERS:]]
        for each in experts:
            each.gate.register_forward_hook(
                lambda _module, _arguments, out, outputs=outputs: outputs.append(out)
            )
        with torch.no_grad():
            target(ids)
            for each, out in zip(experts, outputs, strict=True):
                # In transformers 5.14 the gate chooses by itself; in 5.5 it returns only logits.
                scores, indices = (
                    (out[0], out[2])
                    if isinstance(out, tuple)
                    else (out, each.route_tokens_to_experts(out)[0])
                )
                choices.append(indices.sort(-1).values)
                biased = scores.sigmoid() + each.gate.e_score_correction_bias
                without_groups.append(biased.topk(EXPERTS_PER_TOKEN).indices.sort(-1).values)
    exact, rounded = (torch.stack(choices) for choices in chosen.values())
    assert torch.equal(exact, rounded)
    share = torch.bincount(exact.flatten(), minlength=NUM_EXPERTS) / exact.numel()
    assert share.min() > 0.5 / NUM_EXPERTS
    assert (torch.stack(without_groups[: len(exact)]) != exact).any(-1).float().mean() > 0.9
