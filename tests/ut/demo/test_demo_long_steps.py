"""Long steps, eager and with graphs: sizes that fill the ring, options, and agreement of rows."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_hsx.demo.client import Answer
from vllm_ascend_hsx.demo.long_steps import EMULATED, REAL, LongSteps, Mode, agree, environment
from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.demo.prompts import GENERATED, Prompt
from vllm_ascend_hsx.drafter.shapes import ring_shape, slot_rows
from vllm_ascend_hsx.plan.shape import read_shape

BOTH = pytest.mark.parametrize("sizes", [REAL, EMULATED], ids=["on NPUs", "emulated"])
LAYERS = 4


@BOTH
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_a_prompt_fills_the_ring_and_several_chunks_of_a_slot(
    sizes: LongSteps, tensor_parallel: int, tiny_qwen3: Path
) -> None:
    row_bytes = LAYERS * read_shape(str(tiny_qwen3)).layer_bytes
    made = sizes.serve_options(str(tiny_qwen3), LAYERS, Mode.EAGER, emulated=True)
    ring_bytes = made["connector_options"]["pinned_ring_bytes"]
    assert ring_bytes.bit_count() == 1, "torch would round it up"
    ring, chunk = ring_shape(ring_bytes, row_bytes)
    assert max(sizes.lengths) > 1.5 * ring
    assert slot_rows(sizes.max_num_batched_tokens, tensor_parallel) >= 4 * chunk


@BOTH
def test_prompts_take_three_steps_and_generate_33_tokens_or_more(
    sizes: LongSteps, tiny_qwen3: Path
) -> None:
    prompts = sizes.prompts(640)
    assert sum(sizes.lengths) > 2 * sizes.max_num_batched_tokens
    assert [len(prompt.content) for prompt in prompts] == list(sizes.lengths)
    assert min(prompt.max_tokens for prompt in prompts) >= GENERATED
    assert len({prompt.max_tokens for prompt in prompts}) == len(prompts)
    # Chunks end within prompts.
    assert sizes.max_num_batched_tokens not in accumulate(sizes.lengths)
    longest = max(len(prompt.content) + prompt.max_tokens for prompt in prompts)
    made = sizes.serve_options(str(tiny_qwen3), LAYERS, Mode.EAGER, emulated=False)
    assert made["max_model_len"] >= longest


@pytest.mark.parametrize(
    ("mode", "emulated"), [(mode, emulated) for mode in Mode for emulated in (False, True)]
)
def test_only_the_eager_server_is_without_graphs(
    mode: Mode, emulated: bool, tiny_qwen3: Path
) -> None:
    made = REAL.serve_options(str(tiny_qwen3), LAYERS, mode, emulated)
    command = ServeOptions(
        model="m", storage=Path("/files"), layer_ids=(1,), port=1, **made
    ).command()
    assert ("--enforce-eager" in command) == (mode is Mode.EAGER)
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    quarter = 2048 * LAYERS * read_shape(str(tiny_qwen3)).layer_bytes
    ring_bytes = transfer["kv_connector_extra_config"]["pinned_ring_bytes"]
    assert quarter // 2 < ring_bytes <= quarter
    changed = emulated and mode is Mode.GRAPHS
    assert bool(environment(mode, emulated)) == ("--compilation-config" in command) == changed
    if changed:
        additional = json.loads(command[command.index("--additional-config") + 1])
        assert additional["ascend_compilation_config"]["enable_npugraph_ex"] is False


# Agreement


@pytest.fixture
def answer(tmp_path: Path) -> Any:
    """Return a function that creates an answer with a file: three tokens and the generated ones."""

    def make(name: str, generated: list[int], change: Any = None) -> Answer:
        prompt = [1, 2, 3]
        tokens = torch.tensor(prompt + generated[:-1])
        rows = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0))[: len(tokens)]
        if change is not None:
            rows[change] *= -1
        path = tmp_path / name
        save_file(
            {"hidden_states": rows.bfloat16(), "token_ids": tokens}, path, {"layer_ids": "[1, 2]"}
        )
        return Answer(Prompt("token ids", prompt, 0, len(generated)), prompt, generated, path)

    return make


def test_equal_rows_agree(answer: Any) -> None:
    agreement = agree([answer("a", [4, 5, 6])], [answer("b", [4, 5, 6])], [1, 2])
    assert agreement.holds
    assert (agreement.generated, agreement.of, agreement.max_difference) == (2, 2, 0.0)


@pytest.mark.parametrize("row", [0, 3, 4], ids=["prompt", "first generated", "last generated"])
def test_a_row_that_differs_is_named(row: int, answer: Any) -> None:
    agreement = agree([answer("a", [4, 5, 6])], [answer("b", [4, 5, 6], row)], [1, 2])
    assert not agreement.holds
    assert f"request 1: row {row} is wrong" in str(agreement)


@pytest.mark.parametrize(
    ("tokens", "compared", "holds"), [([4, 9, 6], 1, True), ([9, 5, 6], 0, False)]
)
def test_rows_are_compared_up_to_the_first_different_token(
    tokens: list[int], compared: int, holds: bool, answer: Any
) -> None:
    """The rows of other tokens differ without a mistake."""
    agreement = agree(
        [answer("a", [4, 5, 6])], [answer("b", tokens, slice(3 + compared, None))], [1, 2]
    )
    assert (agreement.generated, agreement.holds) == (compared, holds)
    assert ("diverge too early" in str(agreement)) == (not holds)


def test_other_prompts_do_not_agree(answer: Any) -> None:
    other = answer("b", [4, 5, 6])
    other = other._replace(prompt_ids=[1, 2, 9])
    assert "request 1: the prompts differ from token 2 on" in str(
        agree([answer("a", [4, 5, 6])], [other], [1, 2])
    )
