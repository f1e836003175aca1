"""Defects of vLLM's connector: tests that fail there and pass with ours, on the same stack.

The numbers are from docs/compatibility.md. "Upstream" is vllm's ExampleHiddenStatesConnector and
vllm-ascend's proposer, unmodified, without our plugin. If a release has fixed a defect, the test
shows that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, compare_file, run_engine, tokens
from releases import installed_is
from safetensors.torch import load_file
from session import upstream_transfer_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from vllm_ascend_hsx.demo.tiny_models import build_model, draw_weights

pytestmark = pytest.mark.long
# Since 0.26 vLLM's connector reads rows from the KV cache when a request has ended.
MENDED = installed_is(">=0.26")

SINGLE = [["add", "single", tokens(20), {"max_tokens": 1}], ["drain"]]
DECODE_AND_PREFILL = [
    ["add", "decoding", tokens(10), {"max_tokens": 12}],
    ["step", 3],
    ["add", "new", tokens(17), {"max_tokens": 1}],
    ["drain"],
]
REPEATED = tokens(2 * 128 + 5)
REPEAT = [
    ["add", "first", REPEATED, {"max_tokens": 1}],
    ["drain"],
    ["add", "again", REPEATED, {"max_tokens": 1}],
    ["drain"],
]
CHUNKED = [["add", "chunked", tokens(200), {"max_tokens": 1}], ["drain"]]
ABORTED = [
    ["add", "aborted", tokens(200, seed=1), {"max_tokens": 1}],
    ["step", 2],
    ["abort", "aborted"],
]
BEHIND_IT = [["add", "behind-it", tokens(9), {"max_tokens": 1}], ["drain"]]
SLASH = [["add", "a/b", tokens(9), {"max_tokens": 1}], ["drain"]]
OUTSIDE = [["add", "../outside", tokens(9), {"max_tokens": 1}], ["drain"]]
# Steps after the last request, without tokens: since 0.26 upstream writes with the first one.
WRITTEN = [["step", 2]]


def upstream(directory: Path, model: Path, script: list, **options: Any) -> Run:
    return run_engine(directory, model, script, ours=False, **options)


@pytest.fixture(scope="module")
def broken(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Upstream without defect 1: real events, and no late mode."""
    script = [["real_events"], *SINGLE, *DECODE_AND_PREFILL, *REPEAT, *WRITTEN]
    run = upstream(tmp_path_factory.mktemp("upstream"), tiny_qwen3, script, late=False)
    assert run.error is None, run.error
    return run


@pytest.fixture(scope="module")
def chunking(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with chunks of 64 tokens. vLLM 0.23 refuses them for its connector by name."""
    directory = tmp_path_factory.mktemp("chunking")
    transfer = upstream_transfer_config(directory / "hidden_states") | {
        "kv_connector": "RenamedHiddenStatesConnector",
        "kv_connector_module_path": "renamed_connector",
    }
    options = {
        "kv_transfer_config": transfer,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 64,
    }
    run = upstream(
        directory,
        tiny_qwen3,
        [["real_events"], *CHUNKED, *ABORTED, *BEHIND_IT, *WRITTEN],
        late=False,
        **options,
    )
    assert run.error is None, run.error
    return run


@pytest.fixture(scope="module")
def ours(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    script = [
        *SINGLE,
        *DECODE_AND_PREFILL,
        *REPEAT,
        *CHUNKED,
        *ABORTED,
        *BEHIND_IT,
        *SLASH,
        *OUTSIDE,
    ]
    run = run_engine(tmp_path_factory.mktemp("ours"), tiny_qwen3, script)
    assert run.error is None, run.error
    return run


def is_right(run: Run, request_id: str) -> bool:
    comparison = run.compare(request_id)
    assert comparison.matches, comparison
    return True


def test_control_upstream_is_right_in_the_simplest_case_without_late_mode(broken: Run) -> None:
    # Without this, the failures below could be faults of the harness.
    assert is_right(broken, "single")


def test_defect_1_placeholder_events_order_nothing(
    ours: Run, tiny_qwen3: Path, tmp_path: Path
) -> None:
    late = upstream(tmp_path, tiny_qwen3, [*SINGLE, *WRITTEN])
    if MENDED:
        assert late.error is None, late.error
        assert is_right(late, "single")
        return
    assert late.error is not None
    # The copy stream reads slots and rows before any event reports that they were written.
    assert re.search(
        r"NPU stream race: .* that aten::copy_ on the default stream .* wrote, and nothing orders the two",
        late.error,
    )
    assert is_right(ours, "single")


def test_defect_5_a_new_prompt_gets_the_rows_of_a_running_decode(broken: Run, ours: Run) -> None:
    assert broken.compare("new").matches == MENDED
    assert is_right(ours, "new")


def test_defect_6_rows_of_a_cached_prefix_are_missing(broken: Run, ours: Run) -> None:
    assert is_right(broken, "first")
    assert (
        is_right(broken, "again")
        if MENDED
        else "shape [5, 3, 256], expected [261, 3, 256]" in broken.compare("again").reason
    )
    assert is_right(ours, "again")


def test_defect_6_rows_of_later_chunks_are_missing(chunking: Run, ours: Run) -> None:
    assert (
        is_right(chunking, "chunked")
        if MENDED
        else "shape [64, 3, 256], expected [200, 3, 256]" in chunking.compare("chunked").reason
    )
    assert is_right(ours, "chunked")


@pytest.mark.parametrize("layer_ids", [(2, 99), (4, 2)])
def test_defect_7_layer_ids_are_not_checked(
    tiny_qwen3: Path, tmp_path: Path, layer_ids: tuple[int, ...]
) -> None:
    broken = upstream(
        tmp_path / "upstream",
        tiny_qwen3,
        [["real_events"], *SINGLE, *WRITTEN],
        layer_ids=layer_ids,
        late=False,
    )
    right = run_engine(tmp_path / "ours", tiny_qwen3, SINGLE, layer_ids=layer_ids)
    if 99 in layer_ids:
        assert "99" not in (broken.error or "")  # no error names the missing layer
        assert right.error is not None
        assert re.search(
            r"eagle_aux_hidden_state_layer_ids=\[2, 99\] has id 99, which the target does not have",
            right.error + right.log,
        )
    else:
        assert broken.error is None, broken.error
        assert not broken.compare("single").matches
        assert right.error is None, right.error
        assert is_right(right, "single")


@pytest.fixture
def one_kv_head_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose two tensor-parallel ranks share a KV head, for context parallelism."""

    def create(layers: int, generator: torch.Generator) -> tuple[Qwen3ForCausalLM, dict[str, Any]]:
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 32,
        }
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=640, num_hidden_layers=layers, max_position_embeddings=4096, **sizes
            )
        )
        draw_weights(model, generator)
        return model, {}

    return build_model(
        tmp_path_factory.mktemp("models") / "one-kv-head",
        "qwen3",
        create,
        dtype="bfloat16",
        layers=4,
        seed=0,
    )


def test_defect_8_with_decode_context_parallelism_each_rank_stores_its_own_part(
    one_kv_head_qwen3: Path, tmp_path: Path
) -> None:
    parallel = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 128,
    }
    broken = upstream(
        tmp_path / "upstream",
        one_kv_head_qwen3,
        [["real_events"], *CHUNKED, *WRITTEN],
        late=False,
        **parallel,
    )
    assert broken.error is None, broken.error
    assert not broken.compare("chunked").matches
    # The emulated NPU has no kernel for these decodes, so ours is not shown to be right, and
    # reports this.
    refused = run_engine(tmp_path / "ours", one_kv_head_qwen3, CHUNKED, **parallel)
    assert (
        "decode_context_parallel_size=2 has not been shown to keep the order of the rows"
        in (refused.error or "") + refused.log
    )
    assert "Starting to load model" not in refused.log


def test_defect_9_the_next_step_overwrites_what_the_copy_reads(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    # With real events, and without the side stream of asynchronous scheduling, the slot mapping
    # remains: the next step fills the buffer while the copy stream may still read it.
    steps = [
        ["add", "first", tokens(30), {"max_tokens": 1}],
        ["step", 1],
        ["add", "second", tokens(25), {"max_tokens": 1}],
        ["step", 1],
    ]
    broken = upstream(
        tmp_path / "upstream",
        tiny_qwen3,
        [["real_events"], *steps],
        instruments={"held_writers": True},
        async_scheduling=False,
    )
    race = re.search(
        r"NPU stream race: aten::copy_ on the default stream .*long int.* that aten::[\w.]+ on stream",
        broken.error or "",
    )
    # Since 0.26 the copy has slots of its own. The detector still takes the blocks of two requests
    # for one tensor, and reports that: upstream keeps a request's blocks until the copy is done.
    assert (race is None) == MENDED, broken.error
    right = run_engine(tmp_path / "ours", tiny_qwen3, [*steps, ["drain"]], async_scheduling=False)
    assert right.error is None, right.error
    assert is_right(right, "first")
    assert is_right(right, "second")


def test_defect_10_abort_during_a_prompt_leaves_an_incomplete_file(
    chunking: Run, ours: Run
) -> None:
    (left_over,) = chunking.storage.glob("aborted-*.safetensors")
    if MENDED:  # it has the tokens of the whole prompt, and the previous contents of the blocks
        assert len(load_file(left_over)["token_ids"]) == 200
        assert not compare_file(
            left_over, chunking.model, ABORTED[0][2], chunking.layer_ids
        ).matches
    else:
        assert {name: len(tensor) for name, tensor in load_file(left_over).items()} == {
            "token_ids": 200,
            "hidden_states": 64,
        }
    assert list(ours.storage.glob("*aborted*")) == []
    assert is_right(ours, "behind-it")


def test_defect_13_pipeline_parallelism_is_refused_for_the_wrong_reason(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    parallel = {"pipeline_parallel_size": 2}
    script = [["add", "single", tokens(20), {"max_tokens": 3}], ["drain"]]
    plain = upstream(tmp_path / "plain", tiny_qwen3, script, extract=False, late=False, **parallel)
    assert plain.error is None, plain.error
    assert len(plain.texts["single"]) == 3
    for ours in (False, True):
        refused = run_engine(
            tmp_path / f"ours-{ours}", tiny_qwen3, [], ours=ours, late=False, **parallel
        )
        # vLLM asks the drafter's class, before our plugin sees the configuration.
        assert "Pipeline parallelism is not supported for this model" in (refused.error or "")
        assert "Starting to load model" not in refused.log


def test_defect_16_the_method_is_refused_on_model_runner_v2(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    run = upstream(
        tmp_path,
        tiny_qwen3,
        [*SINGLE, *WRITTEN],
        late=False,
        environ={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    )
    if installed_is(">=0.30"):
        assert run.error is None, run.error
        assert is_right(run, "single")
    else:
        assert (
            "Model Runner V2 does not yet support: speculative method 'extract_hidden_states'"
            in (run.error or "")
        )


def test_an_abort_of_a_request_that_was_never_scheduled_stops_the_engine(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    script = [
        ["real_events"],
        ["add", "never", tokens(9), {"max_tokens": 1}],
        ["abort", "never"],
        *BEHIND_IT,
        *WRITTEN,
    ]
    broken = upstream(tmp_path / "upstream", tiny_qwen3, script, late=False)
    if MENDED:
        # request_finished takes the name that a request gets when it is scheduled (:520 in 0.30).
        assert "KeyError: 'never" in (broken.error or "")
    else:
        assert broken.error is None, broken.error
    right = run_engine(tmp_path / "ours", tiny_qwen3, script[1:-1])
    assert right.error is None, right.error
    assert is_right(right, "behind-it")


def test_a_name_that_is_too_long_stops_the_engine(tiny_qwen3: Path, tmp_path: Path) -> None:
    script = [["add", "a" * 300, tokens(9), {"max_tokens": 1}], ["drain"]]
    broken = upstream(
        tmp_path / "upstream", tiny_qwen3, [["real_events"], *script, *WRITTEN], late=False
    )
    assert "File name too long" in (broken.error or "")
    right = run_engine(tmp_path / "ours", tiny_qwen3, script)
    assert right.error is None, right.error
    assert is_right(right, "a" * 300)


def test_defect_14_a_slash_in_the_request_id_stops_the_engine_or_leads_out_of_the_directory(
    ours: Run, tiny_qwen3: Path, tmp_path: Path
) -> None:
    script = [["real_events"], *(OUTSIDE if MENDED else SLASH), *WRITTEN]
    broken = upstream(tmp_path / "upstream", tiny_qwen3, script, late=False)
    if MENDED:
        assert broken.error is None, broken.error
        (outside,) = broken.storage.parent.glob("outside-*.safetensors")
        assert set(load_file(outside)) == {"hidden_states", "token_ids"}
    else:
        assert broken.error is not None
        assert "No such file or directory" in broken.error
    for name in ("a/b", "../outside"):
        assert ours.path(name).parent == ours.storage
        assert is_right(ours, name)
