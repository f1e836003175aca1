"""The sixteen prompts: the purpose of each."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.demo.prompts import SHARED_PREFIX, demo_prompts

BUDGET = ServeOptions._field_defaults["max_num_batched_tokens"]


@pytest.mark.parametrize("vocab_size", [300, 640, 200_064])
def test_token_ids_are_reproducible_and_in_the_vocabulary(vocab_size: int) -> None:
    prompts = demo_prompts(vocab_size)
    assert prompts == demo_prompts(vocab_size)
    assert all(
        0 <= token < vocab_size
        for prompt in prompts
        if isinstance(prompt.content, list)
        for token in prompt.content
    )


def test_sixteen_prompts_of_every_kind_have_3_to_300_tokens() -> None:
    prompts = demo_prompts(640)
    lengths = [len(prompt.content) for prompt in prompts if isinstance(prompt.content, list)]
    assert len(prompts) == 16
    assert (min(lengths), max(lengths)) == (3, 300)
    assert {prompt.kind for prompt in prompts} == {"token ids", "text", "chat"}
    assert all(a.wave <= b.wave for a, b in pairwise(prompts))


def test_some_prompts_exceed_a_step_and_run_beside_others() -> None:
    prompts = demo_prompts(640)
    chunked = [
        prompt
        for prompt in prompts
        if len(prompt.content) > 2 * BUDGET and prompt.kind == "token ids"
    ]
    assert len(chunked) >= 2
    assert any(sum(other.wave == prompt.wave for other in prompts) > 4 for prompt in chunked)


def test_nine_prompts_generate_33_tokens_or_more() -> None:
    generating = [prompt for prompt in demo_prompts(640) if prompt.generates]
    assert len(generating) == 9
    assert min(prompt.max_tokens for prompt in generating) == 33
    assert [prompt.wave for prompt in generating] == [0] + [3] * 8
    together = [prompt.max_tokens for prompt in generating[1:]]
    assert len(set(together)) == len(together)


def test_two_prompts_share_a_cacheable_prefix() -> None:
    prompts = demo_prompts(640)
    assert prompts[1].content[:SHARED_PREFIX] == prompts[2].content[:SHARED_PREFIX]
    assert prompts[1].wave < prompts[2].wave


def test_server_command_has_both_json_options_and_chunked_prefill() -> None:
    command = ServeOptions(model="m", storage=Path("/files"), layer_ids=(2, 1), port=1).command()
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [
        2,
        1,
    ]
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/files"}
    assert {
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--enable-expert-parallel",
    } < set(command)
