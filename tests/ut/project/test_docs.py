"""The documentation says what the code does, and makes a site in which nothing is broken."""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import DOCS, Command, blocks, page, parse_serve, rows
from releases import installed_is
from sink_harness import FORMAT, as_version_1, make_rows, token_ids

from vllm_ascend_hsx.cli import generate, plan, serve
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.demo.client import EXTRA_BODY
from vllm_ascend_hsx.plan.presets import PRESETS
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.protocol.rows import Adapter
from vllm_ascend_hsx.protocol.weights import UNKNOWN, Origin, WeightVersion
from vllm_ascend_hsx.reader.load import HiddenStates, load
from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config
from vllm_ascend_hsx.sinks.file import FileSink
from vllm_ascend_hsx.target import validate_layer_ids

ROOT = Path(__file__).parents[3]
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_options_reference_is_the_one_that_the_code_writes() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "options_reference.py"))
    assert tool["TARGET"].read_text() == tool["reference"](), (
        "call `python tools/options_reference.py`"
    )


# The site


def build_site(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        root / "mkdocs.yml",
        "--site-dir",
        site,
    ]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build_site(ROOT, directory)
    assert done.returncode == 0, done.stdout
    return directory


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    navigation = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == PAGES
    assert all(
        (site / ("" if name == "index.md" else name.removesuffix(".md")) / "index.html").exists()
        for name in PAGES
    )


class Requests(HTMLParser):
    """What a browser would fetch for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get("src") if tag != "link" else values.get("href")
        if address is not None:
            self.found.append(address)


def test_pages_ask_no_other_host_for_anything(site: Path) -> None:
    for path in site.rglob("*.html"):
        requests = Requests()
        requests.feed(path.read_text())
        assert requests.found
        assert [address for address in requests.found if re.match(r"(https?:)?//", address)] == []
    # The theme fetches mermaid from a foreign host as soon as a page has such a diagram.
    assert all("```mermaid" not in page(name) for name in PAGES)


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("[gone](gone.md)", "'gone.md'"),
        ("[gone](options.md#gone)", "'options.md#gone'"),
        ("", 'not included in the "nav" configuration'),
    ],
    ids=[
        "a page that is not there",
        "a heading that is not there",
        "a page that is not in the navigation",
    ],
)
def test_a_mistake_fails_the_build(mistake: str, complaint: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "docs" / ("index.md" if mistake else "another.md")).write_text(
        f"# A page\n\n{mistake}\n"
    )
    done = build_site(tmp_path, tmp_path / "built")
    assert done.returncode != 0
    assert complaint in done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_links_work_where_the_files_are_read_as_they_are(name: str) -> None:
    for address in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if not address.startswith(("https://", "#")):
            assert (DOCS / name).parent.joinpath(address.partition("#")[0]).is_file(), address


def test_make_docs_builds_the_site_and_git_ignores_it() -> None:
    assert re.search(
        r"^docs: setup\n\t@\$\(BIN\)/python -m mkdocs build --strict$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    assert "site/" in (ROOT / ".gitignore").read_text().splitlines()


# Quick start and migration


NODES = {"minimax-m2-tp8-dp2": 2, "minimax-m2-tp4-dp4": 2, "qwen3.5-35b-a3b-tp4-dp2": 1}
COMMANDS = {
    name: [parse_serve(block) for block in blocks("serve.md", f"serve {name}")] for name in NODES
}
QUANTISED = {
    name: parse_serve(blocks("serve.md", f"serve {name}")[0])
    for name in ("minimax-m2.7-w8a8-a2", "minimax-m2.7-w8a8-a3")
}
OTHERS = [
    parse_serve(block)
    for name in ("migration.md", "upstream/hidden_states_extraction.md")
    for block in blocks(name, "serve")
]
EVERY_COMMAND = [
    *(each for nodes in COMMANDS.values() for each in nodes),
    *QUANTISED.values(),
    *OTHERS,
]


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_the_json_options_are_accepted(command: Command) -> None:
    speculative = json.loads(command.options["--speculative-config"])
    transfer = json.loads(command.options["--kv-transfer-config"])
    layer_ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert speculative == speculative_config(layer_ids)
    extra = transfer["kv_connector_extra_config"]
    chosen = (
        {"allow_custom_save_path": True} if "allow_custom_save_path" in extra else {}
    )  # migration.md does without
    assert transfer == kv_transfer_config(extra["shared_storage_path"], **chosen)
    HsxConfig.parse(transfer["kv_connector_extra_config"])
    (layers,) = (each.layers for each in PRESETS.values() if each.repository == command.model)
    assert validate_layer_ids(layer_ids, layers) == (2, layers // 2, layers - 3, layers)


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_every_option_is_one_of_vllms(command: Command) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    vllm = Path(spec.submodule_search_locations[0])
    server = "openai" if installed_is("<0.30") else "launchers"
    known = (vllm / "engine" / "arg_utils.py").read_text() + (
        vllm / "entrypoints" / server / "cli_args.py"
    ).read_text()
    for option in {*command.options, *command.switches}:
        field = option.removeprefix("--").replace("-", "_")
        assert f'"{option}"' in known or re.search(rf"^    {field}: ", known, re.MULTILINE), option


@pytest.mark.parametrize(("name", "nodes"), NODES.items())
def test_the_nodes_of_a_deployment_fill_their_npus_and_share_the_ranks(
    name: str, nodes: int
) -> None:
    commands = COMMANDS[name]
    first = commands[0].options
    tp, dp = int(first["--tensor-parallel-size"]), int(first["--data-parallel-size"])
    assert name.endswith(f"tp{tp}-dp{dp}")
    assert (len(commands), tp * dp) == (nodes, 8 * nodes)
    own = {"--data-parallel-start-rank", "--api-server-count"}
    rank = 0
    for command in commands:
        assert command.model == commands[0].model
        assert {k: v for k, v in command.options.items() if k not in own} == {
            k: v for k, v in first.items() if k not in own
        }
        # Without --headless vLLM takes a start rank as the sign of an external load balancer
        # (engine/arg_utils.py:1888); a headless node has no API servers.
        assert command.switches - commands[0].switches == ({"--headless"} if rank else set())
        assert command.options.get("--data-parallel-start-rank") == (str(rank) if rank else None)
        assert ("--api-server-count" in command.options) == (rank == 0)
        rank += int(command.options.get("--data-parallel-size-local", dp))
    assert rank == dp


def test_the_commands_of_hsx_are_ones_that_it_accepts() -> None:
    plans = [shlex.split(command) for command in blocks("serve.md", "plan")]
    served = {
        **{name: COMMANDS[name][0] for name in NODES},
        "minimax-m2.7-w8a8-a2": QUANTISED["minimax-m2.7-w8a8-a2"],
    }
    for words in plans:
        assert words[:2] == ["hsx", "plan"]
        arguments = plan.parse_arguments(words[2:])
        model = PRESETS[arguments.model].repository
        name = next(name for name, command in served.items() if command.model == model)
        options = served.pop(name).options
        assert (str(arguments.tp), str(arguments.dp)) == (
            options["--tensor-parallel-size"],
            options.get("--data-parallel-size", "1"),
        )
        assert options.get("--max-num-batched-tokens", "2048") == str(
            arguments.max_num_batched_tokens
        )
    assert not served
    (command,) = blocks("serve.md", "generate")
    assert shlex.split(command)[:2] == ["hsx", "generate"]
    assert generate.parse_arguments(shlex.split(command)[2:]).validate


def test_hsx_serve_makes_the_command_that_the_page_shows(tmp_path: Path) -> None:
    shown = COMMANDS["minimax-m2-tp8-dp2"][0]
    (block,) = blocks("serve.md", "hsx-serve")
    words = shlex.split(block.replace("\\\n", " "))
    assert words[:3] == ["hsx", "serve", shown.model]
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["minimax-m2"].config))
    asked = serve.parse_arguments(words[2:])
    made = parse_serve(
        shlex.join(
            serve.build(
                str(tmp_path), asked.layers, asked.out, dict(asked.option), asked.vllm, {}
            ).arguments
        )
    )
    assert (made.options, made.switches) == (shown.options, shown.switches)


def test_the_request_is_the_demos() -> None:
    (code,) = blocks("serve.md", "request")
    compile(code, "serve.md", "exec")
    assert f"extra_body={json.dumps(EXTRA_BODY).replace('true', 'True')}" in code
    assert all(hasattr(HiddenStates, name) for name in re.findall(r"states\.(\w+)", code))


def test_nobody_is_led_to_believe_that_it_ran_on_hardware() -> None:
    for name in (
        "index.md",
        "serve.md",
        "compatibility.md",
        "upstream/hidden_states_extraction.md",
    ):
        assert re.search(r"run\s+(it )?on\s+hardware\s+yet", page(name).replace("\n> ", "\n")), name
        assert "(operations.md)" in page(name) or name.startswith("upstream/")


def test_the_options_of_vllms_connector_are_all_there_is_of_them() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    connector = Path(
        spec.submodule_search_locations[0],
        "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py",
    )
    text = page("migration.md").partition("<!-- options -->")[2].partition("\n\n")[0] + "\n"
    named = {row[0].strip("`") for row in rows(text)}
    of_later_releases = {"allow_custom_save_path"} if installed_is("<0.26") else set()
    assert named - of_later_releases == set(
        re.findall(r'get_from_extra_config\(\s*"(\w+)"', connector.read_text())
    )
    assert named <= set(HsxConfig.model_fields)


# File format


def keys(label: str) -> list[str]:
    text = page("file-format.md").partition(f"<!-- {label} -->\n")[2].partition("\n\n")[0] + "\n"
    return [row[0].strip("`") for row in rows(text)]


def test_the_metadata_is_what_a_file_has(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    of_files = []
    for row_format in (FORMAT, replace(FORMAT, quantization="fp8", basis="model")):
        with FileSink(tmp_path, row_format) as sink:
            more = {"arrived_ns": 1, "adapter": Adapter("a", "0a" * 16)} if row_format.basis else {}
            file = sink.open("one", path, **more)
            file.placeholders = [Placeholder("image", 1, 2)] if row_format.basis else ()
            file.origin = (
                Origin([WeightVersion(fingerprint="0a" * 16)], is_aborted=True)
                if row_format.basis
                else UNKNOWN
            )
            file.write(0, make_rows(0, 5))
            file.commit(token_ids(5), num_prompt_tokens=4)
        of_files.append(load(path, verify=True).metadata)
        content = path.read_bytes()
        path.unlink()
    plain, metadata = of_files
    assert keys("metadata") == list(metadata)
    of_some = (
        "quantization",
        "weights",
        "lora",
        "lora_weights",
        "basis",
        "arrived_ns",
        "placeholders",
        "weight_versions",
        "aborted",
    )
    assert [key for key in metadata if key not in of_some] == list(plain)
    assert "format version 2." in page("file-format.md") and metadata["format_version"] == "2"
    for key in ("format_version", "producer", "quantization", "checksum_algorithm"):
        assert f"| `{key}` | `{metadata[key]}`" in page("file-format.md")
    assert int.from_bytes(content[:8], "little") % 4096 == 4096 - 8


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_checksum_can_be_compared_as_the_page_says(tmp_path: Path, version: str) -> None:
    path = tmp_path / "one.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        file = sink.open('","checksum":"', path)
        file.write(0, make_rows(0, 5))
        file.commit(token_ids(5), num_prompt_tokens=4)
    good = path.read_bytes() if version == "2" else as_version_1(path.read_bytes())
    path.write_bytes(good)
    (code,) = blocks("file-format.md", "checksum")
    names: dict[str, Any] = {"path": str(path)}
    exec(code, names)
    assert names["metadata"]["format_version"] == version
    for changed in (good.index(b"[2, 0, 3]") + 1, len(good) - 1):
        path.write_bytes(good[:changed] + bytes([good[changed] ^ 1]) + good[changed + 1 :])
        if version == "2" or changed > 4096:
            with pytest.raises(AssertionError, match="not as it was written"):
                exec(code, {"path": str(path)})


def test_an_error_file_is_as_the_page_says_and_is_raised_by_its_reader(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        sink.open("one", path, arrived_ns=1).fail("as a test")
    assert keys("error") == list(json.loads((tmp_path / "one.safetensors.error").read_text()))
    (code,) = blocks("file-format.md", "read")
    with pytest.raises(RuntimeError, match="^as a test$"):
        exec(code, {"path": str(path)})


def test_a_file_can_be_read_as_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    with FileSink(tmp_path, FORMAT) as sink:
        file = sink.open("one", path)
        file.write(0, make_rows(0, 5))
        file.commit(token_ids(5), num_prompt_tokens=5)
    names: dict[str, object] = {"path": str(path)}
    (code,) = blocks("file-format.md", "read")
    exec(code, names)
    assert names["hidden_states"].equal(load(path).hidden_states)  # type: ignore[attr-defined]
    assert np.array_equal(names["token_ids"].numpy(), token_ids(5))  # type: ignore[attr-defined]
    assert names["layer_ids"] == list(FORMAT.layer_ids)


# Troubleshooting


def texts(path: Path) -> list[str]:
    """Every string of a source file, adjacent ones as one, with … for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sdrx]", "…", node.value))
        elif isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            )
    return found


def test_the_words_of_every_symptom_are_those_of_the_code() -> None:
    sources = [*(ROOT / "vllm_ascend_hsx").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    said = [text for path in sources for text in texts(path)]
    symptoms = [row[0] for row in rows(page("troubleshooting.md"))]
    words = [found[1] for symptom in symptoms if (found := re.match(r"`([^`]+)`", symptom))]
    assert len(words) > 40
    # A metric's name is composed of a prefix and its series; PermissionError is Python's.
    ours = [
        re.sub(r"^vllm:hsx_(\w+?)(_total)?$", r"\1", each)
        for each in words
        if each != "PermissionError"
    ]
    assert [each for each in ours if not any(each in text for text in said)] == []
