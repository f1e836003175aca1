"""What `hsx plan` reckons, against numbers made by hand, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ascend_hsx.cli import plan as command
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.plan import vllm_planner
from vllm_ascend_hsx.plan.capacity import Plan, Request, make_plan
from vllm_ascend_hsx.plan.errors import PlanError
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.plan.server_config import EngineOptions, Layout, UnknownFieldError
from vllm_ascend_hsx.plan.shape import read_shape
from vllm_ascend_hsx.plan.weights import count_parameters

# A token has 2 layers x keys and values x 2 heads x 16 elements x 2 bytes = 256 bytes of KV cache, a block of 128 tokens 32 KiB.
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {**DENSE, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "intermediate_size": 64}


@pytest.fixture(scope="module", autouse=True)
def planner() -> None:
    vllm_planner.load()


def write(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


def dense_request(directory: Path, **changes: Any) -> Request:
    request = Request(
        shape=read_shape(str(write(directory, DENSE))),
        layer_ids=(0, 1, 2),
        engine=EngineOptions(tensor_parallel=1, max_model_len=256, max_num_batched_tokens=128, block_size=None, prefix_caching=True),
        data_parallel=1,
        kv_bytes=1 << 20,
        staging_slots=2,
        ring_bytes=64 << 10,
        prompt_tokens=100,
        prefill_speed=500.0,
    )
    return replace(request, **changes)


def run(*words: str) -> Plan:
    return command.plan(command.parse_arguments(words))


# By hand


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    result = make_plan(dense_request(tmp_path))
    assert result.row_bytes == 3 * 64 * 2
    assert result.staging_bytes == 2 * 128 * 384 == 3 * 32768
    assert result.collected_bytes == 2 * 128 * 64 * 2 == 32768  # ids 0 and 1; the state after the last layer comes when all else is gone
    assert result.ring_bytes == 170 * 384  # whole rows
    tokens = {layout: each.capacity and each.capacity.tokens for layout, each in result.layouts.items()}
    blocks = {layout: each.capacity and each.capacity.num_blocks for layout, each in result.layouts.items()}
    # 32 blocks in 1 MiB; a request of 256 tokens takes two. Staging takes three, what is collected one. Upstream's block is
    # 128 x 384 bytes larger, so there are 12, and still 12 without the 64 KiB that it collects in a step of 256 tokens.
    assert blocks == {Layout.PLAIN: 32, Layout.HSX: 29, Layout.UPSTREAM: 12}
    assert tokens == {Layout.PLAIN: 32 * 128, Layout.HSX: 29 * 128, Layout.UPSTREAM: 12 * 128}
    assert [each.kept for each in result.layouts.values()] == [1.0, 29 / 32, 12 / 32]
    assert [each.kept_at_least for each in result.layouts.values()] == [1.0, 28 / 32, 12 / 32]
    # A page for the header, and a token id of 8 bytes with each row.
    assert result.prompts_bytes == 1000 * (4096 + 100 * (384 + 8))
    assert result.write_bytes_per_second == 500 * (384 + 8)


def test_the_ring_is_as_large_as_the_connector_makes_it(tmp_path: Path) -> None:
    result = make_plan(dense_request(tmp_path))
    assert result.ring_bytes == PinnedRing(64 << 10, (3, 64), torch.bfloat16).num_bytes


def test_tensor_parallel_ranks_share_the_kv_cache_and_hold_all_hidden_states(tmp_path: Path) -> None:
    request = dense_request(tmp_path)
    one = make_plan(request)
    two = make_plan(replace(request, engine=replace(request.engine, tensor_parallel=2)))
    assert two.layouts[Layout.PLAIN].capacity.num_blocks == 2 * one.layouts[Layout.PLAIN].capacity.num_blocks  # type: ignore[union-attr]
    assert two.staging_bytes == one.staging_bytes


def test_a_hybrid_model_by_hand() -> None:
    capacity = run("qwen3-next-80b-a3b", "--kv-memory", "30GiB", "--tp", "4").layouts[Layout.PLAIN].capacity
    assert capacity is not None
    state, keys = 8 * 128 * 128 * 2, 256 * 2  # recurrent state of a layer; keys of a token
    convolution = (2 * 16 * 128 + 32 * 128) // 4 * 3 * 2
    assert capacity.block_size == state // keys == 512
    page = 512 * 2 * keys + convolution
    assert capacity.block_bytes == 12 * page
    assert capacity.num_blocks == (30 << 30) // (12 * page)
    assert capacity.groups == ((12, 512), *3 * ((12, 8192),))
    # A request of 8,192 tokens takes 16 blocks of attention and one state of each of the three groups.
    assert capacity.tokens == int(capacity.num_blocks / 19 * 8192)


def test_ours_has_no_state_for_drafts_and_upstream_has_one() -> None:
    layouts = run("qwen3-next-80b-a3b", "--max-model-len", "512").layouts
    plain, ours, upstream = (layouts[layout].capacity for layout in Layout)
    assert plain and ours and upstream
    # Of 512 tokens: one block of attention and three states; upstream has six states, and 16 blocks of 33 tokens with hidden states.
    assert plain.tokens == int(plain.num_blocks / 4 * 512)
    assert ours.tokens == int(ours.num_blocks / 4 * 512)
    assert upstream.tokens == int(upstream.num_blocks / (1 + 6 + 16) * 512)
    assert (ours.block_bytes, ours.groups) == (plain.block_bytes, plain.groups)
    assert upstream.groups[-1] == (1, 33)


def test_prefix_caching_of_a_hybrid_model_takes_two_states() -> None:
    with_it = run("qwen3-next-80b-a3b", "--prefix-caching").layouts[Layout.PLAIN].capacity
    assert with_it is not None
    assert with_it.tokens == int(with_it.num_blocks / (16 + 3 * 2) * 8192)


def test_a_block_size_is_what_vllm_ascend_makes_of_it() -> None:
    for option, model, expected in ((64, "minimax-m2", 128), (64, "qwen3-next-80b-a3b", 512), (1024, "qwen3-next-80b-a3b", 1024)):
        capacity = run(model, "--block-size", str(option)).layouts[Layout.HSX].capacity
        assert capacity is not None and capacity.block_size == expected


def test_a_float32_checkpoint_is_served_in_bfloat16_unless_told_otherwise(tmp_path: Path) -> None:
    path = str(write(tmp_path, {**DENSE, "torch_dtype": "float32"}))
    assert read_shape(path).dtype == "bfloat16"
    assert run(path, "--tp", "1", "--dtype", "float32").row_bytes == 2 * 64 * 4  # two layers: ids 1 and 2


def test_upstream_does_not_start_where_hidden_states_share_a_tensor_with_attention(tmp_path: Path) -> None:
    result = make_plan(dense_request(tmp_path, shape=read_shape(str(write(tmp_path, GPT_OSS)))))
    assert result.layouts[Layout.UPSTREAM].capacity is None
    assert "_reshape_kv_cache_tensors" in (result.layouts[Layout.UPSTREAM].reason or "")
    assert result.layouts[Layout.HSX].capacity is not None


def test_what_the_stand_in_lacks_is_not_taken_for_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_planner.server_config

    def without_parallel_config(*arguments: Any) -> Any:
        config = made(*arguments)
        del config.parallel_config
        return config

    monkeypatch.setattr(vllm_planner, "server_config", without_parallel_config)
    with pytest.raises(UnknownFieldError, match="gives vLLM no 'parallel_config'"):
        make_plan(dense_request(tmp_path))


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_keeps_99_percent_with_ours(name: str) -> None:
    """At the conditions of docs/design.md: 30 GiB, four tensor-parallel ranks, requests of 8,192 tokens."""
    result = run(name)
    assert result.request.kv_bytes == 30 << 30
    assert (result.request.engine.tensor_parallel, result.request.engine.max_model_len) == (4, 8192)
    assert 0.99 <= result.layouts[Layout.HSX].kept < 1
    upstream = result.layouts[Layout.UPSTREAM]
    if name == "deepseek-v3":
        assert upstream.capacity is None
        assert upstream.reason == "AttributeError: 'HiddenStateCacheSpec' object has no attribute 'scale_dim'"
    else:
        assert 0.034 <= upstream.kept <= 0.721


@pytest.mark.parametrize(
    ("name", "hidden_states", "kv_cache"),
    [("minimax-m2", 24576, 63488), ("deepseek-v3", 57344, 70272)],
)
def test_bytes_of_a_token_are_the_published_ones(name: str, hidden_states: int, kv_cache: int) -> None:
    result = run(name)
    capacity = result.layouts[Layout.PLAIN].capacity
    assert capacity is not None
    assert result.row_bytes == hidden_states
    assert capacity.block_bytes == 128 * kv_cache


def test_rows_of_float8_take_half_the_disk_and_as_much_memory_as_others() -> None:
    plain, quantised = run("minimax-m2", "--prompt-tokens", "2048"), run("minimax-m2", "--prompt-tokens", "2048", "--quantization", "fp8")
    header = 4096
    assert plain.prompts_bytes == 1000 * (header + 2048 * (24576 + 8))
    assert quantised.prompts_bytes == 1000 * (header + 2048 * (24576 // 2 + 8 + 4)), "a token's id, and its scale"
    assert quantised.write_bytes_per_second / plain.write_bytes_per_second == pytest.approx(12300 / 24584)
    assert (quantised.row_bytes, quantised.staging_bytes, quantised.ring_bytes) == (plain.row_bytes, plain.staging_bytes, plain.ring_bytes)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Of the text model: what the models are called by, and for DeepSeek-V3 what its README_WEIGHTS.md says without MTP.
    [("minimax-m2", 230), ("qwen3.5-35b-a3b", 35), ("qwen3.5-27b", 27), ("qwen3-next-80b-a3b", 80), ("deepseek-v3", 671)],
)
def test_the_weights_of_a_preset_are_as_many_as_its_name_says(name: str, billions: int) -> None:
    parameters = count_parameters(read_shape(name))
    assert parameters.shared + parameters.experts == pytest.approx(billions * 1e9, rel=0.02)


def test_weights_of_a_dense_model_by_hand(tmp_path: Path) -> None:
    parameters = count_parameters(read_shape(str(write(tmp_path, DENSE))))
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert parameters == (2 * 100 * 64 + 2 * (attention + 3 * 64 * 128), 0)


def test_memory_for_the_kv_cache_is_what_weights_and_reserve_leave() -> None:
    parameters = count_parameters(read_shape("minimax-m2"))
    weights = 2 * (-(-parameters.shared // 8) + -(-parameters.experts // 16))
    result = run("minimax-m2", "--memory", "64GiB", "--tp", "8", "--dp", "2", "--gpu-memory-utilization", "0.9", "--reserve", "3GiB")
    assert result.request.kv_bytes == int((64 << 30) * 0.9) - weights - (3 << 30)
    assert result.num_npus == 16


# Refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["minimax-m3"], ["MODEL minimax-m3: neither a preset nor a file", "minimax-m2, qwen3.5-35b-a3b"]),
        (["minimax-m2", "--layers", "2,63"], ["--layers 2,63: has id 63, which the target does not have", "from 0", "to 62"]),
        (["minimax-m2", "--layers", "2,2"], ["--layers 2,2: has id 2 twice", "distinct"]),
        (["minimax-m2", "--tp", "3"], ["--tp 3: does not divide", "48 attention heads", "give one of 1, 2, 4, 8, 16"]),
        (["qwen3-next-80b-a3b", "--tp", "32"], ["--tp 32", "16 key and 32 value heads", "give one of 1, 2, 4, 8, 16"]),
        (["minimax-m2", "--kv-memory", "256MiB"], ["--kv-memory 256MiB", "0.25 GiB", "8192", "lower --max-model-len"]),
        (["minimax-m2", "--memory", "64GiB"], ["--memory 64GiB", "nothing for the KV cache", "raise --tp or --dp, or give --weights"]),
        (["minimax-m2", "--kv-memory", "500MiB"], ["--staging-slots 2: 96.0 MiB", "lower --max-num-batched-tokens"]),
        (["minimax-m2", "--ring", "10000"], ["--ring 10000: a row has 24576 bytes", "at least 49152"]),
        (["minimax-m2", "--ring", "1B"], ["--ring 1B: the connector does not take it", "greater than or equal to 4096"]),
        (["minimax-m2", "--ring", "0.03125MiB"], ["--ring 0.03125MiB: a row has 24576 bytes", "at least 49152"]),
    ],
)
def test_a_wrong_input_is_one_line_with_option_value_and_remedy(
    words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("hsx plan: ") and output.err.count("\n") == 1
    for part in says:
        assert part in output.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "says nothing of num_hidden_layers"),
        (json.dumps({**DENSE, "hidden_size": "large"}), "has 'large' for hidden_size"),
        (json.dumps({**DENSE, "layer_types": ["full_attention"]}), "has 2 layers and 1 layer_types"),
        (json.dumps({**DENSE, "layer_types": ["full_attention", "chunked_attention"]}), "layers of another kind (chunked_attention)"),
        (json.dumps({**DENSE, "layer_types": ["full_attention", "linear_attention"]}), "says nothing of linear_num_key_heads"),
        (json.dumps({**DENSE, "kv_lora_rank": 8, "index_topk": 4}), "sparse attention with an indexer (index_topk)"),
        (json.dumps({**DENSE, "hybrid_override_pattern": "M*"}), "Mamba layers"),
        (json.dumps({**DENSE, "torch_dtype": "float8_e4m3fn"}), "is of dtype 'float8_e4m3fn'"),
    ],
)
def test_a_file_that_cannot_be_planned_with_is_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match="^MODEL ") as caught:
        read_shape(str(tmp_path))
    assert says in str(caught.value)


def test_a_model_that_no_server_starts_with_is_refused_with_vllm_s_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    hybrid = {**DENSE, **heads, "linear_conv_kernel_dim": 4, "full_attention_interval": 2}
    assert command.main([str(write(tmp_path, hybrid)), "--tp", "1"]) == 2
    error = capsys.readouterr().err
    assert "a server with --tp 1 does not start" in error
    assert "Cannot align ssm_page_size and attn_page_size" in error
    assert "memory" not in error


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the directory has no config.json"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["minimax-m2", "--tp", "0"], "argument --tp: '0' is not a whole number from 1 to 4096"),
        (["minimax-m2", "--staging-slots", "9"], "argument --staging-slots: '9' is not a whole number from 1 to 8"),
        (["minimax-m2", "--kv-memory", "many"], "argument --kv-memory: 'many' is not a size"),
        (["minimax-m2", "--layers", "a"], "argument --layers: 'a' is not a list of ids"),
        (["minimax-m2", "--prefill-speed", "-1"], "'-1' is not a number above 0 and at most 1000000000000"),
        (["minimax-m2", "--gpu-memory-utilization", "92"], "'92' is not a number above 0 and at most 1"),
        (["minimax-m2", "--memory", "64GiB", "--kv-memory", "30GiB"], "--kv-memory and --memory say the same thing twice"),
        (["minimax-m2", "--weights", "1GiB"], "--weights is for reckoning with --memory"),
    ],
)
def test_an_option_that_cannot_be_read_ends_with_code_two(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse_arguments(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["vllm", "vllm_ascend"])
def test_without_vllm_it_says_so_in_one_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = vllm_planner.find_spec
    monkeypatch.setattr(vllm_planner, "find_spec", lambda name: None if name == missing else found(name))
    assert command.main(["minimax-m2"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"and {missing} is not installed here: install vllm 0.23.0 with vllm-ascend 0.23.0" in error


# What is shown


@pytest.mark.parametrize("name", PRESETS)
def test_the_tables_hold_the_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name]) == 0
    output = capsys.readouterr().out
    result = run(name)
    assert output.startswith(PRESETS[name].repository)
    assert f"{result.row_bytes:,} bytes" in output
    assert f"{result.staging_bytes / 2**20:,.1f} MiB" in output
    rows = {line.split("│")[1].strip(): line for line in output.splitlines() if line.startswith("│")}
    assert list(rows) == [layout.value for layout in Layout]
    for layout, each in result.layouts.items():
        if each.capacity is None:
            assert "does not start" in rows[layout.value]
            assert f"upstream does not start: {each.reason}" in output
        else:
            for shown in (f"{each.capacity.num_blocks:,}", f"{each.capacity.tokens:,}", f"{each.kept:.2%}"):
                assert f" {shown} " in rows[layout.value]


def test_json_holds_all_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["qwen3.5-27b", "--layers", "64,2,32", "--dp", "2", "--memory", "64GiB", "--prefix-caching"]
    assert command.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    result = run(*words)
    assert found == command.as_json(result)
    assert found["request"]["layer_ids"] == [64, 2, 32]
    assert found["request"]["shape"]["layers"].count("full_attention") == 16
    assert found["request"]["npu_memory"]["total"] == 64 << 30
    for layout, name in ((Layout.PLAIN, "plain"), (Layout.HSX, "hsx"), (Layout.UPSTREAM, "upstream")):
        capacity = result.layouts[layout].capacity
        assert capacity is not None
        assert found["layouts"][name]["capacity"]["tokens"] == capacity.tokens
        assert found["layouts"][name]["kept"] == result.layouts[layout].kept


def test_the_default_layers_are_those_of_speculators() -> None:
    assert command.default_layers(61) == (2, 30, 58, 61)
    assert command.default_layers(4) == (1, 2, 4)
    assert command.default_layers(2) == (1, 2)
    assert command.default_layers(1) == (1,)
