"""The compatibility page names existing tests and shows the recorded runs."""

import json
import re
from pathlib import Path

import compatibility
from documents import page, rows

from vllm_ascend_hsx.compat import targets
from vllm_ascend_hsx.compat.targets import SHOWN
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS
from vllm_ascend_hsx.doctor.images import IMAGES

TESTS = Path(__file__).parents[2]


def test_each_feature_that_works_or_is_refused_names_a_test() -> None:
    there = {path.name for path in TESTS.rglob("test_*.py")}
    claims = [
        row for row in rows(page("compatibility.md")) if len(row) > 2 and "test_" in "".join(row)
    ]
    assert set(re.findall(r"`(test_\w+\.py)`", page("compatibility.md"))) <= there
    of_features = rows(
        page("compatibility.md").partition("## Targets")[2].partition("## Counts by")[0]
    )
    for row in of_features:
        state = next(
            (cell for cell in row[1:] if cell.startswith(("works", "refused", "not tested"))), None
        )
        assert state is not None, row
        if state.startswith(("works", "refused")):
            assert row in claims, f"no test is named: {row}"


def test_table_of_runs_is_current_and_covers_each_checked_pair() -> None:
    text = compatibility.PAGE.read_text()
    runs = json.loads(compatibility.COUNTS.read_text())
    assert text == compatibility.page(text, runs), "call `make matrix`"
    assert {run.partition("-")[0] for run in runs} == {pair.vllm_ascend for pair in CHECKED_PAIRS}


def test_report_is_counted_by_file_and_lists_failed_tests(tmp_path: Path) -> None:
    cases = {
        "tests.e2e.test_scenarios": ["", "<failure/>", "<error/>", ""],
        "tests.e2e.test_other_release": ["<skipped/>"],
        "": ["<error/>"],
    }
    xml = "".join(
        (
            f'<testcase classname="{module}" '
            f'name="{"case" if module else "tests.e2e.test_broken"}{place}">{child}</testcase>'
        )
        for module, children in cases.items()
        for place, child in enumerate(children)
    )
    report = tmp_path / "0.30.0rc2-v2.xml"
    report.write_text(f"<testsuites><testsuite>{xml}</testsuite></testsuites>")
    counted = compatibility.read_report(report)
    assert counted == {
        "test_broken0": {"passed": 0, "failed": ["tests.e2e.test_broken0"]},
        "test_scenarios": {"passed": 2, "failed": ["case1", "case2"]},
    }
    lines = compatibility.table({"0.23.0": {}, report.stem: counted}).splitlines()
    assert lines[0] == "| others | 0.23.0 | 0.30.0rc2, V2 |"
    assert "| `test_scenarios.py` |  | 2, 2 failed |" in lines
    assert "* 0.30.0rc2, V2: `test_scenarios.py`, `case1`" in lines
    alike = compatibility.table({"0.23.0": counted, report.stem: counted})
    assert "releases and runners: `test_broken0.py` 0, 1 failed, `test_scenarios.py` 2" in alike


def test_versions_and_classes_of_the_page_match_the_code() -> None:
    text = page("compatibility.md")
    for pair in CHECKED_PAIRS:
        assert f"| {pair.vllm} | {pair.vllm_ascend} | works" in text
    named = re.findall(r"`(\w+For\w+)`", text)
    assert len(named) >= 8
    records = json.loads(
        Path(targets.__file__).with_name("architectures.json").read_text()
    ).values()
    assert set(named) <= {
        name
        for each in records
        for group in (*each["collected"].values(), each["refused"])
        for name in group
    }
    lines = rows(text.partition("## Targets")[2].partition("## Features")[0])
    assert {
        each
        for _, cell, state, _ in lines
        if state.startswith("works")
        for each in re.findall(r"`(\w+)`", cell)
    } == set(SHOWN)


# The core text and multimodal models that vllm-ascend 0.23.0.post1 and 0.30.0rc2 support
# (docs/source/user_guide/support_matrix/supported_models.md of the source distributions).
CORE = (
    "Cohere Transcribe", "DeepSeek-R1", "DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4-Flash", "DeepSeekOCR2", "GLM-4.5", "GLM-5.1",
    "GLM-5.2", "GLM-5.3", "GLM-5.3-Flash", "Gemma4", "Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.6", "Kimi-K3", "MiniMax-M2", "MiniMax-M3",
    "Qwen2.5-Math-RM-72B", "Qwen3, dense", "Qwen3-235B", "Qwen3-30B-A3B", "Qwen3-Coder", "Qwen3-Next", "Qwen3-Omni", "Qwen3-VL-235B",
    "Qwen3-VL-30B-A3B", "Qwen3-VL, dense", "Qwen3.5-27B", "Qwen3.5-397B-A17B", "Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-Flash-Next",
    "V3.1", "V4-Flash-Vision", "V4-Pro", "V4.1",
)  # fmt: skip


def test_each_core_family_of_vllm_ascend_has_a_row() -> None:
    lines = rows(page("compatibility.md").partition("## Targets")[2].partition("## Features")[0])
    named = ", ".join(first for first, *_ in lines)
    assert [name for name in CORE if not re.search(rf"(^|, ){re.escape(name)}(,| |$)", named)] == []


def test_versions_of_images_match_the_doctor_and_our_versions_match_the_pins() -> None:
    section = page("compatibility.md").partition("## Official images")[2].partition("\n## ")[0]
    found = rows(section)
    for image in IMAGES:
        torch_npu = (
            image.torch_npu if "post" in image.torch_npu else f"{image.torch_npu}, a daily build"
        )
        assert [image.vllm_ascend, image.cann, torch_npu, image.triton_ascend] in found
    common = {(image.python, image.torch, image.fastapi, image.mooncake) for image in IMAGES}
    (of_all,) = common
    by_name = {name: cells for name, *cells in found[len(IMAGES) :]}
    assert tuple(by_name[name][0] for name in ("Python", "torch", "fastapi", "Mooncake")) == of_all
    pins = {path.stem: path.read_text() for path in (TESTS.parent / "requirements").glob("*.txt")}
    assert f"torch=={by_name['torch'][1]}\n" in pins["common"]
    assert f"mooncake-transfer-engine-non-cuda=={by_name['Mooncake'][1]}\n" in pins["dev"]
    first, later = re.findall(r"[\d.]+\d", by_name["fastapi"][1])[:2]
    expected = {
        image.vllm_ascend: first if image.vllm_ascend.startswith("0.23") else later
        for image in IMAGES
    }
    assert all(f"fastapi=={fastapi}\n" in pins[release] for release, fastapi in expected.items())


def test_each_upstream_defect_names_releases_and_tests_that_check_the_release() -> None:
    text = page("compatibility.md").partition("## Defects of upstream")[2]
    releases = {pair.vllm_ascend for pair in CHECKED_PAIRS}
    sources = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    defects = rows(text)
    assert len(defects) >= 25
    for _, defect, where, shown in defects:
        named, _, rest = where.partition("; ")
        assert named == "all" or set(named.split(", ")) <= releases, defect
        assert rest in ("", "others not tested"), defect
        tests = re.findall(r"`(test_\w+\.py)`", shown)
        assert tests, defect
        if named != "all" and not rest:
            assert any(
                "installed_is(" in sources[each] or "only_with(" in sources[each] for each in tests
            ), defect
