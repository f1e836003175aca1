"""`hsx plan`: results compared with calculations by hand, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ascend_hsx.cli import plan as command
from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.drafter.rotation import TurnBack
from vllm_ascend_hsx.drafter.shapes import slot_rows, turned_rows
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.plan.costs import Plan, Request, make_plan
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.plan.shape import ModelShape, read_shape
from vllm_ascend_hsx.protocol.errors import UserError

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "torch_dtype": "bfloat16",
}
REQUEST = Request(
    shape=ModelShape("dense", num_layers=2, hidden_size=64, dtype="bfloat16"),
    layer_ids=(0, 1, 2),
    tensor_parallel=1,
    data_parallel=1,
    max_num_batched_tokens=128,
    kv_bytes=1 << 20,
    staging_slots=2,
    ring_bytes=64 << 10,
    prompts=1000,
    prompt_tokens=100,
    prefill_speed=500.0,
)
# Runs `hsx plan` where importing a package that it must not need is an error.
ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torch_npu", "vllm", "vllm_ascend"} or name.startswith("ascend_npu_emulator"):
            raise ModuleNotFoundError(f"{name} is imported", name=name)

sys.meta_path.insert(0, Refuse())
from vllm_ascend_hsx.cli.main import main
sys.exit(main(["plan", *sys.argv[1:]]))
"""


def write(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def run(*words: str) -> Plan:
    return command.plan(command.parse_arguments(words))


# By hand


def test_plan_matches_a_calculation_by_hand() -> None:
    result = make_plan(REQUEST)
    assert result.row_bytes == 3 * 64 * 2
    assert result.staging_bytes == 2 * 128 * 384 == 98304
    assert (
        result.collected_bytes == 2 * 128 * 64 * 2 == 32768
    )  # ids 0 and 1; the state after the last layer needs no additional memory
    assert result.kept == 1 - 98304 / (1 << 20) == 0.90625
    assert result.kept_at_least == 1 - (98304 + 32768) / (1 << 20) == 0.875
    assert result.ring_bytes == 64 << 10
    # A page for the header, and 8 bytes for the token id of each row.
    assert result.stored_bytes == 384 + 8
    assert result.prompts_bytes == 1000 * (4096 + 100 * (384 + 8))
    assert result.prompts_seconds == 1000 * 100 / 500
    assert result.write_bytes_per_second == 500 * (384 + 8)


def test_files_and_time_are_those_of_the_given_number_of_prompts() -> None:
    few, many = make_plan(REQUEST), make_plan(replace(REQUEST, prompts=3000))
    assert (many.prompts_bytes, many.prompts_seconds) == (
        3 * few.prompts_bytes,
        3 * few.prompts_seconds,
    )
    assert (
        replace(
            many,
            request=REQUEST,
            prompts_bytes=few.prompts_bytes,
            prompts_seconds=few.prompts_seconds,
        )
        == few
    )


def test_turning_rows_back_takes_the_rotation_and_two_buffers() -> None:
    rotated, plain = make_plan(replace(REQUEST, rotated=True)), make_plan(REQUEST)
    taken = 64 * 64 * 4 + 2 * 128 * 64 * 4
    assert (rotated.turn_back_bytes, plain.turn_back_bytes) == (taken, 0)
    assert (rotated.turn_back_flops, plain.turn_back_flops) == (3 * 2 * 64 * 64, 0)
    assert rotated.kept == 1 - (98304 + taken) / (1 << 20)
    assert rotated.row_bytes == plain.row_bytes and rotated.staging_bytes == plain.staging_bytes
    turn = TurnBack(torch.eye(64), turned_rows(128), torch.device("meta"))
    assert (
        sum(each.numel() * each.element_size() for each in vars(turn).values() if each.is_meta)
        == taken
    )
    with pytest.raises(UserError, match="MiB of the staging slots and the rotation"):
        make_plan(replace(REQUEST, rotated=True, kv_bytes=98304 + taken))


def test_kept_share_is_at_least_zero() -> None:
    result = make_plan(replace(REQUEST, kv_bytes=98304 + 32768 - 1))
    assert result.kept > 0 and result.kept_at_least == 0


def test_ring_has_the_size_of_the_connector() -> None:
    for given in (64 << 10, 65_000, (64 << 10) + 1):
        planned = make_plan(replace(REQUEST, ring_bytes=given)).ring_bytes
        assert planned == PinnedRing(planned, (3, 64), torch.bfloat16).pinned_bytes
        assert given <= planned < 2 * given, "rounded up to a power of two, as torch pins it"


def test_tensor_parallel_ranks_share_a_step_and_keep_the_rest_of_their_rows_on_the_host() -> None:
    one, three = (
        make_plan(replace(REQUEST, ring_bytes=None)),
        make_plan(replace(REQUEST, ring_bytes=None, tensor_parallel=3)),
    )
    assert (three.slot_rows, three.staging_bytes) == (43, 2 * 43 * 384), (
        "a third of 128 tokens, rounded up"
    )
    assert (one.waiting_bytes, three.waiting_bytes) == (0, (128 - 2 * 43) * 384)
    assert one.ring_bytes == three.ring_bytes == 256 << 20, (
        "more than slots of whole steps would hold"
    )
    assert make_plan(replace(REQUEST, tensor_parallel=3)).ring_bytes == 64 << 10, (
        "a given ring is what it is"
    )
    rotated = make_plan(replace(REQUEST, tensor_parallel=3, rotated=True))
    assert rotated.turn_back_bytes == 64 * 64 * 4 + 2 * 43 * 64 * 4


@pytest.mark.parametrize("width", [7168, 64], ids=["as published", "at reduced width"])
def test_plan_matches_the_shape_of_vllm_49310(width: int, tmp_path: Path) -> None:
    """TP8 x DP2, four layers of 7,168, prompts of 65,536 tokens in steps of 8,192."""
    words = [
        write(tmp_path, {**DENSE, "hidden_size": width, "num_hidden_layers": 61}),
        "--layers",
        "2,30,58,61",
        "--dp",
        "2",
    ]
    words += [
        "--max-num-batched-tokens",
        "8192",
        "--prompt-tokens",
        "65536",
        "--kv-memory",
        "30GiB",
    ]
    alone, shared = run(*words, "--tp", "1"), run(*words, "--tp", "8")
    mib = width / 7168
    assert [plan.staging_bytes / 2**20 for plan in (alone, shared)] == [896 * mib, 112 * mib]
    assert shared.waiting_bytes / 2**20 == 336 * mib, "of the 448 of a step that one prompt fills"
    assert alone.ring_bytes == 256 << 20
    held_otherwise = alone.staging_bytes - shared.staging_bytes
    assert shared.ring_bytes == (1 << 30 if width == 7168 else 256 << 20)
    assert shared.ring_bytes >= (32 << 20) + held_otherwise
    if width == 64:
        shape = {"num_layers": 4, "hidden_size": width, "layer_order": range(4)}
        rows = StagingCache(
            num_slots=2,
            slot_rows=slot_rows(8192, 8),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            **shape,
        ).rows
        assert rows.nbytes == shared.staging_bytes
        assert (
            PinnedRing(shared.ring_bytes, rows.shape[2:], rows.dtype).pinned_bytes
            == shared.ring_bytes
        )


def test_every_npu_holds_whole_rows_but_files_have_them_once() -> None:
    one, two = make_plan(REQUEST), make_plan(replace(REQUEST, data_parallel=2))
    assert (one.num_npus, two.num_npus) == (1, 2)
    assert replace(two, request=REQUEST) == one


def test_float32_checkpoint_is_served_in_bfloat16_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, {**DENSE, "torch_dtype": "float32"})
    assert read_shape(path).dtype == "bfloat16"
    assert run(path, "--dtype", "float32").row_bytes == 4 * 64 * 4  # ids 2, 3, 4 and 7


@pytest.mark.parametrize(
    "cache",
    [
        {"layer_types": ["sliding_attention", "kda"], "sliding_window": 32},
        {"kv_lora_rank": 8, "index_topk": 4},
        {"hybrid_override_pattern": "M*", "mamba_d_state": 16},
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "hidden_size": 7,
            "text_config": {"hidden_size": 64},
        },
    ],
)
def test_a_model_can_be_planned_whatever_its_kv_cache_is(
    cache: dict[str, Any], tmp_path: Path
) -> None:
    assert read_shape(write(tmp_path, {**DENSE, **cache})) == ModelShape(
        tmp_path.name, 7, 64, "bfloat16"
    )


@pytest.mark.parametrize(
    ("name", "row_bytes", "staging_mib", "collected_mib"),
    [
        ("minimax-m2", 24576, 24, 36),
        ("qwen3.5-35b-a3b", 16384, 16, 24),
        ("qwen3.5-27b", 40960, 40, 60),
        ("qwen3-next-80b-a3b", 16384, 16, 24),
        ("deepseek-v3", 57344, 56, 84),
    ],
)
def test_every_preset_keeps_99_percent_with_staging(
    name: str, row_bytes: int, staging_mib: int, collected_mib: int
) -> None:
    result = run(name)
    assert result.request.kv_bytes == 30 << 30
    assert (result.row_bytes, result.staging_bytes, result.collected_bytes) == (
        row_bytes,
        staging_mib << 20,
        collected_mib << 20,
    )
    assert result.kept == 1 - staging_mib / (30 << 10) > 0.99


def test_rows_of_float8_take_half_the_disk_and_as_much_memory_as_others() -> None:
    plain, quantised = (
        run("minimax-m2", "--prompt-tokens", "2048"),
        run("minimax-m2", "--prompt-tokens", "2048", "--quantization", "fp8"),
    )
    header = 4096
    assert (plain.stored_bytes, quantised.stored_bytes) == (24576 + 8, 24576 // 2 + 8 + 4)
    assert plain.prompts_bytes == 1000 * (header + 2048 * (24576 + 8))
    assert quantised.prompts_bytes == 1000 * (header + 2048 * (24576 // 2 + 8 + 4)), (
        "a token's id, and its scale"
    )
    assert quantised.write_bytes_per_second / plain.write_bytes_per_second == pytest.approx(
        12300 / 24584
    )
    assert (quantised.row_bytes, quantised.staging_bytes, quantised.ring_bytes) == (
        plain.row_bytes,
        plain.staging_bytes,
        plain.ring_bytes,
    )


@pytest.mark.parametrize("model", ["minimax-m2", "{}"])
def test_plan_needs_no_torch_vllm_or_emulator(model: str, tmp_path: Path) -> None:
    write(tmp_path, DENSE)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, model.format(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert "hidden states of a token" in done.stdout


# Refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["minimax-m3"],
            ["MODEL='minimax-m3' is neither a preset nor a file", "minimax-m2, minimax-m2.5-w8a8"],
        ),
        (
            ["minimax-m2", "--layers", "2,63"],
            ["--layers='2,63' has id 63, which the target does not have", "from 0", "to 62"],
        ),
        (["minimax-m2", "--layers", "2,2"], ["--layers='2,2' has id 2 twice", "distinct"]),
        (
            ["minimax-m2", "--kv-memory", "24MiB"],
            ["--kv-memory=24MiB is not more than the 24.0 MiB of the staging slots", "lower --max"],
        ),
        (
            ["minimax-m2", "--kv-memory", "0"],
            ["--kv-memory=0 is not more than the", "of the staging slots", "Raise it"],
        ),
        (
            ["minimax-m2", "--ring", "10000"],
            ["--ring=10000 does not hold two rows of 24576 bytes", "at least 49152"],
        ),
        (
            ["minimax-m2", "--ring", "1B"],
            ["--ring=1B cannot be used", "greater than or equal to 4096"],
        ),
        (
            ["minimax-m2", "--ring", "0.03125MiB"],
            ["--ring=0.03125MiB does not hold two rows of 24576 bytes", "at least 49152"],
        ),
    ],
)
def test_invalid_input_gives_one_line_with_option_value_and_remedy(
    words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("hsx plan: ") and output.err.count("\n") == 1
    for part in says:
        assert part in output.err


def test_rows_too_large_for_a_file_are_refused_with_their_layers(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^--layers='1' cannot be stored: .*multiple of 8 bytes\. Choose other layers\.$",
    ):
        run(write(tmp_path, {**DENSE, "hidden_size": 3}), "--layers", "1")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON (it nests too deep)"),
        ("[]", "not a JSON object"),
        ("{}", "has no num_hidden_layers"),
        (
            json.dumps({**DENSE, "text_config": "none", "num_hidden_layers": None}),
            "has no num_hidden_layers",
        ),
        (json.dumps({**DENSE, "hidden_size": "large"}), "has 'large' for hidden_size"),
        (json.dumps({**DENSE, "hidden_size": 0}), "has 0 for hidden_size"),
        (json.dumps({**DENSE, "num_hidden_layers": 10**100}), "for num_hidden_layers"),
        (json.dumps({**DENSE, "torch_dtype": "float8_e4m3fn"}), "has dtype 'float8_e4m3fn'"),
    ],
)
def test_invalid_config_is_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="^MODEL=") as caught:
        read_shape(str(tmp_path))
    assert says in str(caught.value)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 300, "{}/loop"])
def test_missing_path_gives_one_line_and_exit_code_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert command.main([model.format(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hsx plan: MODEL=") and said.count("\n") == 1


def test_unreadable_config_gives_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    model = write(tmp_path, DENSE)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert command.main([model]) == 2
    assert capsys.readouterr().err == (
        f"hsx plan: MODEL={model!r} cannot be read (Permission denied). Give the config.json "
        "of a model.\n"
    )


def test_a_published_config_may_have_a_number_that_is_not_finite(tmp_path: Path) -> None:
    """For example time_step_limit of models with Mamba layers, as transformers writes it."""
    assert (
        read_shape(write(tmp_path, {**DENSE, "time_step_limit": [0.0, float("inf")]})).num_layers
        == 7
    )


@pytest.mark.parametrize(("name", "shown"), [("[red]x", "[red]x"), ("\x1b[31mx", "\\x1b[31mx")])
def test_the_name_of_a_directory_is_shown_as_it_is(
    name: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).mkdir()
    assert command.main([str(tmp_path / name)]) == 2
    assert shown in capsys.readouterr().err
    write(tmp_path / name, DENSE)
    assert command.main([str(tmp_path / name)]) == 0
    assert capsys.readouterr().out.startswith(f"{shown}: layers ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["minimax-m2", "--tp", "0"], "argument --tp: '0' is not a whole number from 1 to 4096"),
        (
            ["minimax-m2", "--staging-slots", "9"],
            "argument --staging-slots: '9' is not a whole number from 1 to 8",
        ),
        (["minimax-m2", "--kv-memory", "many"], "argument --kv-memory: 'many' is not a size"),
        (["minimax-m2", "--prefill-speed", "1_000"], "'1_000' is not a number above 0"),
        (["minimax-m2", "--prefill-speed", "\u0663"], "'\u0663' is not a number above 0"),
        (
            ["minimax-m2", "--prefill-speed", "-1"],
            "'-1' is not a number above 0 and at most 1000000000000",
        ),
    ],
)
def test_invalid_option_gives_exit_code_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.parse_arguments(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


# Output


@pytest.mark.parametrize("name", PRESETS)
def test_table_has_all_numbers_of_the_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name]) == 0
    output = capsys.readouterr().out
    result = run(name)
    assert output.startswith(PRESETS[name].repository)
    assert f"{result.row_bytes:,} bytes" in output
    for number in (result.staging_bytes, result.collected_bytes, result.ring_bytes):
        assert f" {number / 2**20:,.1f} MiB " in output


@pytest.mark.parametrize("tokens", ["--tokens", "--prompt-tokens"])
def test_table_has_sizes_per_token_and_of_all_prompts(
    tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command.main(
            ["minimax-m2", "--prompts", "100000", tokens, "4096", "--prefill-speed", "20000"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "hidden states of a token  24,576 bytes " in printed
    assert (
        "... in a file             24,584 bytes  with the token's id; `hsx generate "
        "--bytes-per-token`"
    ) in printed
    assert "files of 100,000 prompts  9,378.43 GiB  of 4,096 tokens each" in printed
    assert "their prefill             5.7 hours     at 20,000 tokens/s of prefill" in printed


def test_kept_share_is_rounded_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("qwen3.5-35b-a3b").kept_at_least == pytest.approx(0.998698, abs=1e-6)
    assert command.main(["qwen3.5-35b-a3b"]) == 0
    assert "... at least              99.86%  " in capsys.readouterr().out


def test_json_has_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["qwen3.5-27b", "--layers", "64,2,32", "--dp", "2", "--kv-memory", "20GiB"]
    assert command.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    result = run(*words)
    assert found["request"]["layer_ids"] == [64, 2, 32]
    assert found["request"]["kv_bytes"] == 20 << 30
    assert found["request"]["shape"] == {
        "name": "Qwen/Qwen3.5-27B",
        "num_layers": 64,
        "hidden_size": 5120,
        "dtype": "bfloat16",
    }
    numbers = {name: value for name, value in vars(result).items() if name != "request"}
    assert {name: value for name, value in found.items() if name != "request"} == numbers


def test_the_published_w8a8_weights_are_planned_as_rotated() -> None:
    quantised, rotated, plain = (
        run("minimax-m2.7-w8a8"),
        run("minimax-m2", "--rotated"),
        run("minimax-m2"),
    )
    assert quantised.turn_back_bytes == rotated.turn_back_bytes > 0
    assert plain.turn_back_bytes == 0
