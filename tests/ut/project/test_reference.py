"""Generated pages and tables match the code."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import api_reference
import options_reference
from documents import DOCS, ROOT, page, rows
from releases import installed_is

import vllm_ascend_hsx
from vllm_ascend_hsx.cli.main import COMMANDS
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.plan.presets import PRESETS, is_rotated
from vllm_ascend_hsx.protocol.api import EXTRACT_KEY, OUTPUT_KEY


def test_the_page_of_options_and_commands_is_current() -> None:
    assert options_reference.TARGET.read_text() == options_reference.reference(), (
        "call `python tools/options_reference.py`"
    )


def test_the_python_api_is_current() -> None:
    text = page("reading.md")
    assert text == api_reference.page(text), "call `python tools/api_reference.py`"


def test_each_public_name_and_each_command_has_a_heading() -> None:
    names = {name for name in vllm_ascend_hsx.__all__ if not name.startswith("_")}
    assert names == set(re.findall(r"^### `(\w+)`$", page("reading.md"), re.MULTILINE))
    commands = re.findall(r"^### hsx ([\w-]+)$", page("options.md"), re.MULTILINE)
    assert commands == list(COMMANDS)


def test_each_option_has_an_anchor() -> None:
    assert set(HsxConfig.model_fields) <= set(re.findall(r'<a id="(\w+)">', page("options.md")))


def test_sizes_have_units() -> None:
    assert options_reference.size_text(0) == 0
    assert options_reference.size_text(4097) == 4097
    assert options_reference.size_text(3 << 29) == "1536MiB"
    assert HsxConfig.parse({"shared_storage_path": "/d", "shard_bytes": "1536MiB"}).shard_bytes == (
        3 << 29
    )


def test_the_options_of_vllms_connector_are_listed() -> None:
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


def test_keys_of_requests_are_listed_with_their_defaults() -> None:
    listed = {row[0].strip("`"): row[1] for row in rows(page("requests.md")) if len(row) > 1}
    assert listed[EXTRACT_KEY].startswith("`false`")
    assert listed[OUTPUT_KEY].startswith("`true`")


def test_kv_cache_table_matches_the_benchmark() -> None:
    """test_capacity.py compares the benchmark with vLLM's planner."""
    cells = json.loads((DOCS / "performance.json").read_text())["capacity"]["cells"]
    kept = {
        (cell["model"], cell["layout"]): "does not start"
        if cell["reason"]
        else f"{cell['kept']:.2%}"
        for cell in cells
    }
    models = {name: PRESETS[name].repository for name in PRESETS if not is_rotated(name)}
    table = [row for row in rows(page("operations.md")) if row[0].lower() in models]
    assert [row[0].lower() for row in table] == list(models)
    for name, *columns in table:
        ours, theirs = (cell.replace(" %", "%") for cell in columns[:2])
        model = models[name.lower()]
        assert (ours, theirs) == (kept[model, "hsx"], kept[model, "upstream"])


def test_documented_make_commands_are_targets() -> None:
    named = set(
        re.findall(r"\bmake ([a-z][\w-]*)(?=[`\s])", page("README.md") + page("contributing.md"))
    )
    assert {"demo", "test"} <= named
    makefile = (ROOT / "Makefile").read_text()
    assert named <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert re.search(r"^docs: setup\n\t@\$\(BIN\)/python -m mkdocs build --strict$", makefile, re.M)
    assert "site/" in (ROOT / ".gitignore").read_text().splitlines()
