"""Commands and options on the README and two of the pages are those of the code and of CI."""

import json
import re
import shlex
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from documents import blocks, page

from vllm_ascend_hsx.cli import demo, plan, serve
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.demo.client import EXTRA_BODY
from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.plan.presets import PRESETS, is_rotated
from vllm_ascend_hsx.protocol.api import EXTRACT_KEY, OUTPUT_KEY
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.target import validate_layer_ids

ROOT = Path(__file__).parents[3]
README = page("README.md")
OPERATIONS = page("operations.md")
MAKEFILE = (ROOT / "Makefile").read_text()


def options_of(command: str) -> dict[str, str]:
    words = shlex.split(command)
    return dict(zip(words, words[1:], strict=False))


def test_the_json_options_are_the_demo_s_and_are_accepted() -> None:
    options = options_of(blocks("README.md", "serve")[0])
    speculative = json.loads(options["--speculative-config"])
    transfer = json.loads(options["--kv-transfer-config"])
    layer_ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert speculative == speculative_config(layer_ids)
    assert transfer == kv_transfer_config(
        transfer["kv_connector_extra_config"]["shared_storage_path"], allow_custom_save_path=True
    )
    HsxConfig.parse(transfer["kv_connector_extra_config"])
    assert validate_layer_ids(layer_ids, 62) == tuple(layer_ids)


def test_hsx_serve_becomes_the_command_with_the_two_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "MiniMaxAI" / "MiniMax-M2"
    model.mkdir(parents=True)
    (model / "config.json").write_text(
        json.dumps(PRESETS["minimax-m2"].config | {"architectures": ["MiniMaxM2ForCausalLM"]})
    )
    monkeypatch.chdir(tmp_path)
    by_hsx, by_hand = (
        shlex.split(blocks("README.md", label)[0].replace("\\\n", " "))
        for label in ("hsx-serve", "serve")
    )
    assert by_hsx[:2] == ["hsx", "serve"]
    assert serve.main(["--dry-run", *by_hsx[2:]]) == 0
    assert sorted(shlex.split(capsys.readouterr().out)) == sorted(by_hand)


def test_the_options_of_the_server_are_options_that_the_demo_gives_it() -> None:
    command = ServeOptions(model="m", storage=Path("/files"), layer_ids=(1,), port=1).command()
    assert {
        word for word in options_of(blocks("README.md", "serve")[0]) if word.startswith("--")
    } <= set(command)


def test_the_request_is_the_demo_s() -> None:
    (code,) = blocks("README.md", "request")
    compile(code, "README.md", "exec")
    assert f"extra_body={json.dumps(EXTRA_BODY).replace('true', 'True')}" in code
    assert 'kv_transfer_params["hidden_states_path"]' in code


def test_reading_works_as_written(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "request.safetensors"
    rows = torch.randn(3, 2, 4).to(torch.bfloat16)
    save_file({"hidden_states": rows, "token_ids": torch.arange(3)}, path, {"layer_ids": "[2, 1]"})
    names: dict[str, object] = {"path": str(path)}
    (code,) = blocks("README.md", "read")
    exec(code.replace("states.layer_ids ", "layer_ids = states.layer_ids "), names)
    assert torch.equal(names["states"].hidden_states, rows)  # type: ignore[attr-defined]
    assert names["layer_ids"] == [2, 1]
    assert not path.exists()


def test_a_file_is_found_as_written(tmp_path: Path) -> None:
    (tmp_path / "cmpl-1-0-0123abcd.safetensors").touch()
    names: dict[str, object] = {"response": SimpleNamespace(id="cmpl-1")}
    (code,) = blocks("requests.md", "find")
    exec(code.replace("/data/hidden_states", str(tmp_path)), names)
    assert names["path"] == tmp_path / "cmpl-1-0-0123abcd.safetensors"


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_states", False), ("include_output_tokens", True)]
)
def test_what_a_request_can_say_is_understood(key: str, value: bool) -> None:
    assert f"| `{key}` | `{json.dumps(value)}`" in page("requests.md")
    assert key in (EXTRACT_KEY, OUTPUT_KEY)


def test_the_demo_command_for_hardware_is_one_that_hsx_accepts() -> None:
    words = shlex.split(blocks("operations.md", "npu-demo")[0])
    assert words[:2] == ["hsx", "demo"]
    assert demo.parse_arguments(words[2:]).device == "npu"


def test_every_demo_command_of_the_hardware_checklist_is_one_that_hsx_accepts() -> None:
    commands = re.findall(r"\| `hsx demo (.*?)` \|", (ROOT / "docs" / "operations.md").read_text())
    assert len(commands) >= 3
    for command in commands:
        assert demo.parse_arguments(shlex.split(command)).device == "npu"


def test_the_plan_command_shows_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = blocks("operations.md", "plan")
    words = shlex.split(command)
    assert words[:2] == ["hsx", "plan"]
    assert plan.main(words[2:]) == 0
    assert capsys.readouterr().out.startswith(
        "MiniMaxAI/MiniMax-M2: layers 2, 31, 59, 62 of 62, TP=8 x DP=2 on 16 NPUs"
    )


def test_the_kv_cache_that_is_left_is_what_the_benchmark_says() -> None:
    """test_capacity.py compares the benchmark's page with vLLM's planner."""
    counted = json.loads((ROOT / "docs" / "performance.json").read_text())["capacity"]
    options = counted["options"]
    conditions = (
        counted["kv_bytes"] >> 30,
        options["tensor_parallel"],
        options["max_model_len"],
        options["max_num_batched_tokens"],
    )
    assert conditions == (30, 4, 8192, 2048)
    kept = {
        (cell["model"], cell["layout"]): "does not start"
        if cell["reason"]
        else f"{cell['kept']:.2%}"
        for cell in counted["cells"]
    }
    table = re.findall(
        r"^\| (\S+) \| (\S+) % \| (.+?) \| .+ \|$", OPERATIONS, re.MULTILINE
    )  # of 0.23.0
    assert [name.lower() for name, _, _ in table] == [
        name for name in PRESETS if not is_rotated(name)
    ]
    for name, ours, upstream in table:
        model = PRESETS[name.lower()].repository
        assert (f"{ours}%", upstream.replace(" %", "%")) == (
            kept[model, "hsx"],
            kept[model, "upstream"],
        )


def test_what_is_said_of_upstreams_share_of_the_kv_cache_is_what_the_table_says() -> None:
    rows = re.findall(r"^\| \S+ \| \S+ % \| (.+?) \| \S+ % \| (.+?) \|$", OPERATIONS, re.MULTILINE)
    old, new = (
        [float(cell.removesuffix(" %")) for cell in column if cell.endswith("%")]
        for column in zip(*rows, strict=True)
    )
    assert f"[{min(old + new):.0f} to {max(old + new):.0f} % of the KV cache]" in README.replace(
        "\n  ", " "
    )
    assert f"[{100 - max(new):.0f} to {100 - min(new):.0f} % of the KV cache]" in page(
        "migration.md"
    )


def test_what_a_server_keeps_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "docs" / "performance.json").read_text())
    served = [
        100 * statistics.median(cell["requests_per_s"])
        for cell in measured["engine"]["cells"]
        if cell["extraction"] == "ours"
    ]
    kept = [
        1000 * cell["kept"] for cell in measured["capacity"]["cells"] if cell["layout"] == "hsx"
    ]
    readme, chinese = README.replace("\n  ", " "), page("README.zh.md")
    least, most = f"{min(served):.0f}", f"{max(served):.0f}"
    is_one = least == most
    english, in_chinese = (
        (least, f"{least}%") if is_one else (f"{least} to {most}", f"{least}% 到 {most}%")
    )
    assert f"[{english} % of the requests per second](docs/performance.md)" in readme
    assert f"{in_chinese}](docs/performance.md)" in chinese
    assert f"{min(kept) // 1 / 10} % of the KV cache is left" in readme
    assert f"KV cache 保留 {min(kept) // 1 / 10}%" in chinese


def test_what_is_kept_at_least_is_what_the_plan_says() -> None:
    least = {
        name: plan.plan(plan.parse_arguments([name, "--kv-memory", "30GiB"])).kept_at_least
        for name in PRESETS
    }
    exception = re.search(
        r"hsx keeps (\S+) % for DeepSeek-V3 and more for the others", " ".join(OPERATIONS.split())
    )
    assert exception is not None
    least_of_all = least.pop("deepseek-v3")
    assert 0 <= least_of_all - float(exception[1]) / 100 < 1e-4
    assert min(least.values()) > least_of_all


def test_every_make_command_is_a_target() -> None:
    named = set(re.findall(r"\bmake ([a-z][\w-]*)(?=[`\s])", README + page("contributing.md")))
    assert {"demo", "test", "lint"} <= named
    assert named <= set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))


def test_ci_runs_the_readme_s_test_command() -> None:
    (test,) = blocks("contributing.md", "test")
    assert f"`{test.strip()}`" in README
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith(f"exec {test.strip()}")


def test_the_readme_fits_on_two_screens_and_says_first_what_has_not_run() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert "**Nothing here has run on Ascend hardware yet.**" in "\n".join(lines[:20])


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\]\((?!http)([^)#]+)", README + page("README.zh.md"))))
)
def test_every_link_leads_to_a_file(name: str) -> None:
    assert (ROOT / name).exists()


def test_the_workflow_runs_the_two_commands_with_which_the_readme_begins() -> None:
    first = [
        line.partition(" #")[0].strip() for line in blocks("README.md", "commands")[0].splitlines()
    ]
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["command"] == first == ["make demo", "make test"]
    assert job["steps"][-1] == {"run": "${{ matrix.command }}"}


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [(hook["entry"], hook["pass_filenames"]) for hook in repository["hooks"]] == [
        ("make lint", False)
    ]
