"""`tools/new_version.py` names the changes to review. Two small trees replace the releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import new_version
import pytest
from packaging.version import Version

from vllm_ascend_hsx.compat.installed import Sources, digest_of_body
from vllm_ascend_hsx.compat.patch_points import PatchPoint, Use

RELEASES = {"vllm": Version("0.31.0"), "vllm_ascend": Version("0.31.0rc1")}
STEP = "def step(self, batch, *, force=False):\n        return batch"
SOURCES = {
    "vllm/__init__.py": "from vllm.core import Engine as Engine\n",
    "vllm/base.py": f"class Base:\n    {STEP}\n",
    "vllm/core.py": (
        "from vllm.base import Base\n\n\nclass Engine(Base):\n    limit: int = 1\n\n\nENGINE = "
        "Engine()\n"
    ),
    "vllm/loop.py": (
        "def run(engine):\n    return engine.step(1)\n\n\ndef idle():\n    return "
        "torch_npu.npu_known()\n"
    ),
    "vllm_ascend/__init__.py": "",
    "vllm_ascend/patch.py": (
        "from vllm.base import Base\n\n\ndef _other(self, batch):\n    return "
        "[batch]\n\n\nBase.other = _other\n"
    ),
}


def tree(folder: Path, changes: dict[str, tuple[str, str]] | None = None) -> Any:
    """Write SOURCES with `changes` (file: old text, new text) below `folder`, and read them."""
    for name, text in SOURCES.items():
        before, after = (changes or {}).get(name, ("", ""))
        assert before in text
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(before, after) if before else text)
    return new_version.Tree({name: folder / name for name in RELEASES})


def point(
    name: str, takes: str = "self batch", use: Use = Use.PASSED_ON, versions: str = ">=0.23"
) -> PatchPoint:
    module, path = name.split(":")
    return PatchPoint(
        module,
        tuple(path.split(".")),
        use,
        tuple(takes.split()),
        (),
        "it works",
        versions,
        lambda: None,
    )


POINTS = [
    point("vllm.core:Engine.step"),
    point("vllm:Engine.step"),  # imported
    point("vllm.core:ENGINE.step", "batch", Use.CALLED),  # method of an instance
    point("vllm.core:Engine.__init__", "", Use.NAMED),  # not defined in the source
    point("vllm_ascend.patch:Base.other"),  # assigned by another module
    point("vllm.core:Engine.former", versions="<0.30"),
]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace patch points, recorded digests and overridden methods to match SOURCES."""
    bodies = {each.name: digest_of_body(STEP) for each in POINTS if each.path[-1] == "step"}
    bodies["vllm_ascend.patch.Base.other"] = digest_of_body(
        "def _other(self, batch):\n    return [batch]"
    )
    monkeypatch.setattr(new_version, "POINTS", POINTS)
    monkeypatch.setattr(new_version, "recorded", lambda: {"0.30.0": Sources({}, bodies)})
    monkeypatch.setattr(
        new_version,
        "overrides",
        lambda folder: [new_version.Override("Ours.step", "vllm.core", ("Engine", "step"))],
    )


Change = tuple[str, str, str]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (None, {}),
        (("vllm/base.py", "return batch", "return batch  # a comment"), {}),
        (
            ("vllm/base.py", "return batch", "return None"),
            {"Patch": (3, "its code has changed"), "Methods": (1, "its code has changed")},
        ),
        (
            ("vllm/base.py", "def step", "def advance"),
            {"Patch": (3, "it is missing"), "Methods": (1, "it is missing")},
        ),
        (
            ("vllm/base.py", "self, batch", "self, rows"),
            {"Patch": (3, "its parameters are ("), "Methods": (1, "its parameters are (")},
        ),
        (
            ("vllm/core.py", "Engine(Base)", "Engine"),
            {"Patch": (3, "it is missing"), "Methods": (1, "it is missing")},
        ),
        (
            ("vllm_ascend/patch.py", "[batch]", "batch"),
            {"Patch": (1, "vllm_ascend/patch.py:4): its code has changed")},
        ),
        (
            ("vllm/loop.py", "engine.step(1)", "engine.step(2)"),
            {"Callers": (1, "`run` (vllm/loop.py:1): changed; it calls step")},
        ),
        (
            ("vllm/loop.py", "return torch", "return x.step(), torch"),
            {"Callers": (1, "`idle` (vllm/loop.py:5): new; it calls step")},
        ),
        (
            ("vllm/loop.py", "npu_known", "npu_rotary"),
            {"Operators": (1, "`torch_npu.npu_rotary`: called at vllm/loop.py:6")},
        ),
        (("vllm/loop.py", "def idle", "def rest"), {}),
    ],
)
def test_report_names_each_relevant_change_and_no_other(
    tmp_path: Path, change: Change | None, named: dict[str, tuple[int, str]]
) -> None:
    changes = {change[0]: change[1:]} if change else {}
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new", changes)
    report = {
        title.split()[0]: lines
        for title, lines in new_version.sections(old, new, RELEASES, None).items()
        if lines
    }
    assert {title: len(lines) for title, lines in report.items()} == {
        title: number for title, (number, _) in named.items()
    }
    for title, (_, text) in named.items():
        assert text in report[title][0]


def test_overrides_are_methods_of_classes_with_a_vllm_base(
    tmp_path: Path,
) -> None:
    text = (
        "from vllm.core import Engine as E\nfrom ours import Mixin\n\n\nclass Ours(Mixin, "
        "E[int]):\n    def step(self): ...\n"
    )
    (tmp_path / "ours.py").write_text(text + "\n\nclass Other(Mixin):\n    def step(self): ...\n")
    assert list(new_version.overrides(tmp_path)) == [("Ours.step", "vllm.core", ("Engine", "step"))]


def test_schemas_of_the_extension_are_compared_with_the_emulator(tmp_path: Path) -> None:
    code = (
        'ops.def(\n  "same(Tensor x) -> "\n  "Tensor");\nops.def("other(Tensor x, int n) -> ()");\n'
    )
    code += (
        'ops.def("fresh() -> ()");\nops.def("plain");\nops.def("quoted(str layout=\\"BSND\\") -> '
        '()");\n'
    )
    (tmp_path / "torch_binding.cpp").write_text(code)
    examples = tmp_path / "third_party" / "torch_bindings.cpp"
    examples.parent.mkdir()
    examples.write_text('m.def("example() -> ()");\n')
    known = {
        "same": "same(Tensor x)  -> Tensor",
        "other": "other(Tensor x) -> ()",
        "gone": "gone() -> ()",
    }
    known["quoted"] = 'quoted(str layout="BSND") -> ()'
    assert list(new_version.schemas(tmp_path, known)) == [
        "`fresh() -> ()`: new",
        "`gone`: missing",
        "`other(Tensor x, int n) -> ()`: was `other(Tensor x) -> ()`",
    ]
    assert len(new_version.known_schemas()) > 50


def test_unavailable_release_is_reported_with_the_output_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        new_version.UnavailableError,
        match=r"vllm==0\.0\.1 cannot be downloaded:\n(.*\n)*.*No matching distribution",
    ):
        new_version.download("vllm", "0.0.1", tmp_path)
