"""The code accepts the commands, JSON options and Python code of the pages."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from documents import BLOCK, PAGES, ROOT, Command, blocks, command_lines, page, parse_serve

from vllm_ascend_hsx.cli import demo, plan, serve
from vllm_ascend_hsx.cli.main import COMMANDS
from vllm_ascend_hsx.config import CONNECTOR_NAME, HsxConfig
from vllm_ascend_hsx.demo.client import EXTRA_BODY
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.reader.load import HiddenStates
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.target import validate_layer_ids

API = re.compile("<!-- api -->.*<!-- /api -->", re.DOTALL)  # signatures, not programs
END_OF_COMMAND = {"&&", "||", "|", ";", "&", ">"}


def pages_with(pattern: str) -> list[str]:
    return [name for name in PAGES if re.search(pattern, page(name), re.MULTILINE)]


def commands_of(name: str, program: str) -> list[list[str]]:
    """Return the arguments of each command of a page that runs `program`."""
    found = []
    for _, language, text in BLOCK.findall(page(name)):
        for words in command_lines(text) if language == "bash" else []:
            starts = [n for n, word in enumerate(words) if Path(word).name == program]
            for start in starts[:1]:
                rest = words[start + 1 :]
                end = next((n for n, word in enumerate(rest) if word in END_OF_COMMAND), len(rest))
                found.append(rest[:end])
    return found


def accept(words: list[str]) -> None:
    """Parse the words of an hsx command. Raises SystemExit for an invalid one."""
    name, arguments = words[0], words[1:]
    assert name in COMMANDS
    module = importlib.import_module(COMMANDS[name].target.partition(":")[0])
    if hasattr(module, "parse_arguments"):
        module.parse_arguments(arguments)


@pytest.mark.parametrize("name", pages_with(r"^(\S*/)?hsx "))
def test_hsx_accepts_the_commands_of_the_page(name: str) -> None:
    for words in commands_of(name, "hsx"):
        accept(words)


def test_misspelt_option_is_refused() -> None:
    with pytest.raises(SystemExit):
        accept(["generate", "--data", "a", "--output", "b", "--validat3"])


@pytest.mark.parametrize("name", pages_with(r"^```python"))
def test_python_code_compiles(name: str) -> None:
    for label, language, text in BLOCK.findall(API.sub("", page(name))):
        if language == "python":
            compile(text, f"{name} {label}", "exec")


@pytest.mark.parametrize("name", pages_with(r"^```json"))
def test_json_is_valid_and_options_of_our_connector_are_accepted(name: str) -> None:
    def check(value: object) -> None:
        if isinstance(value, dict) and value.get("kv_connector") == CONNECTOR_NAME:
            HsxConfig.parse(value["kv_connector_extra_config"])
        for each in value.values() if isinstance(value, dict) else value or ():  # type: ignore[attr-defined]
            if isinstance(each, dict | list):
                check(each)

    for _, language, text in BLOCK.findall(page(name)):
        if language == "json":
            check(json.loads(text))


# vllm serve

LABELS = [
    (name, label)
    for name in PAGES
    for label in dict.fromkeys(
        label
        for label, _, text in BLOCK.findall(page(name))
        if text.startswith("vllm serve") and "extract_hidden_states" in text
    )
]
SERVED = [
    pytest.param(parse_serve(block), id=f"{name} {label} {number}")
    for name, label in LABELS
    for number, block in enumerate(blocks(name, label))
]


@pytest.mark.parametrize("command", SERVED)
def test_json_options_of_vllm_serve_are_accepted(command: Command) -> None:
    speculative = json.loads(command.options["--speculative-config"])
    transfer = json.loads(command.options["--kv-transfer-config"])
    layer_ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert speculative == speculative_config(layer_ids)
    extra = transfer["kv_connector_extra_config"]
    HsxConfig.parse(extra)
    if "shared_storage_path" in extra:  # a Mooncake store has no directory
        directory = extra.pop("shared_storage_path")
        assert transfer == {**kv_transfer_config(directory), "kv_connector_extra_config": extra}
    layers = [each.layers for each in PRESETS.values() if each.repository == command.model]
    if layers:
        assert validate_layer_ids(layer_ids, layers[0]) == tuple(layer_ids)


@pytest.mark.parametrize("command", SERVED)
def test_vllm_has_every_option(command: Command) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    vllm = Path(spec.submodule_search_locations[0])
    known = (vllm / "engine" / "arg_utils.py").read_text() + "".join(
        path.read_text() for path in vllm.glob("entrypoints/*/cli_args.py")
    )
    for option in {*command.options, *command.switches}:
        field = option.removeprefix("--").replace("-", "_")
        assert f'"{option}"' in known or re.search(rf"^    {field}: ", known, re.MULTILINE), option


DEPLOYMENTS = [
    (name, label) for name, label in LABELS if re.fullmatch(r"serve \S+-tp\d+-dp\d+", label)
]


@pytest.mark.parametrize(("name", "label"), DEPLOYMENTS)
def test_the_nodes_of_a_deployment_share_the_ranks(name: str, label: str) -> None:
    commands = [parse_serve(block) for block in blocks(name, label)]
    first = commands[0].options
    tp, dp = int(first["--tensor-parallel-size"]), int(first["--data-parallel-size"])
    assert label.endswith(f"-tp{tp}-dp{dp}") and tp * dp == 8 * len(commands)
    own = {"--data-parallel-start-rank", "--api-server-count"}
    rank = 0
    for command in commands:
        assert command.model == commands[0].model
        assert {k: v for k, v in command.options.items() if k not in own} == {
            k: v for k, v in first.items() if k not in own
        }
        # With a start rank and without --headless, vLLM expects an external load balancer
        # (engine/arg_utils.py:1888). A headless node has no API servers.
        assert command.switches - commands[0].switches == ({"--headless"} if rank else set())
        assert command.options.get("--data-parallel-start-rank") == (str(rank) if rank else None)
        assert ("--api-server-count" in command.options) == (rank == 0)
        rank += int(command.options.get("--data-parallel-size-local", dp))
    assert rank == dp


@pytest.mark.parametrize("name", pages_with("<!-- hsx-serve -->"))
def test_hsx_serve_builds_a_command_of_the_page(name: str, tmp_path: Path) -> None:
    (block,) = blocks(name, "hsx-serve")
    asked = serve.parse_arguments(shlex.split(block.replace("\\\n", " "))[2:])
    (preset,) = [each for each in PRESETS.values() if each.repository == asked.model]
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MiniMaxM2ForCausalLM"], **preset.config})
    )
    built = serve.build(
        str(tmp_path), asked.layers, asked.out, dict(asked.option), asked.vllm, {}
    ).arguments
    made = parse_serve(shlex.join(built))
    shown = [
        parse_serve(text) for page, label in LABELS if page == name for text in blocks(page, label)
    ]
    assert (made.options, made.switches) in [(each.options, each.switches) for each in shown]


def test_each_plan_matches_a_deployment_of_the_page() -> None:
    for words in commands_of("serve.md", "hsx"):
        if words[0] == "plan":
            asked = plan.parse_arguments(words[1:])
            model = PRESETS[asked.model].repository
            assert any(
                (str(asked.tp), str(asked.dp))
                == (
                    each.options["--tensor-parallel-size"],
                    each.options.get("--data-parallel-size", "1"),
                )
                for each in (parse_serve(text) for text in _texts("serve.md"))
                if each.model == model
            )


def _texts(name: str) -> list[str]:
    return [text for page, label in LABELS if page == name for text in blocks(page, label)]


# Requests and readers


@pytest.mark.parametrize("name", pages_with("<!-- request -->"))
def test_documented_request_has_the_extra_body_of_the_demo(name: str) -> None:
    (code,) = blocks(name, "request")
    assert f"extra_body={json.dumps(EXTRA_BODY).replace('true', 'True')}" in code
    assert 'kv_transfer_params["hidden_states_path"]' in code
    assert all(hasattr(HiddenStates, each) for each in re.findall(r"states\.(\w+)", code))


def test_documented_code_reads_and_removes_a_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "request.safetensors"
    rows = torch.randn(3, 2, 4).to(torch.bfloat16)
    save_file({"hidden_states": rows, "token_ids": torch.arange(3)}, path, {"layer_ids": "[2, 1]"})
    names: dict[str, object] = {"path": str(path)}
    (code,) = blocks("README.md", "read")
    exec(code, names)
    assert torch.equal(names["states"].hidden_states, rows)  # type: ignore[attr-defined]
    assert not path.exists()


def test_documented_code_finds_a_file_by_the_response_id(tmp_path: Path) -> None:
    (tmp_path / "cmpl-1-0-0123abcd.safetensors").touch()
    names: dict[str, object] = {"response": SimpleNamespace(id="cmpl-1")}
    (name,) = pages_with("<!-- find -->")
    (code,) = blocks(name, "find")
    exec(code.replace("/data/hidden_states", str(tmp_path)), names)
    assert names["path"] == tmp_path / "cmpl-1-0-0123abcd.safetensors"


# Hardware and continuous integration


def test_demo_commands_for_hardware_use_npus() -> None:
    commands = re.findall(r"`hsx demo (--device .*?)`", page("operations.md"))
    assert len(commands) >= 3
    for command in [
        *commands,
        *(each.removeprefix("hsx demo ") for each in blocks("operations.md", "npu-demo")),
    ]:
        assert demo.parse_arguments(shlex.split(command)).device == "npu"


def test_continuous_integration_runs_the_first_commands_of_the_readme() -> None:
    first = [shlex.join(words) for words in command_lines(blocks("README.md", "commands")[0])]
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"]["command"] == first == ["make demo", "make test"]
    assert job["steps"][-1] == {"run": "${{ matrix.command }}"}
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")


def test_pre_commit_runs_make_lint() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [(hook["entry"], hook["pass_filenames"]) for hook in repository["hooks"]] == [
        ("make lint", False)
    ]
