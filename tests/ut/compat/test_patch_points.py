"""The declared patch points: complete, used, applied once, and checked by `hsx doctor`."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_ascend_hsx
from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.compat import versions as compat_versions
from vllm_ascend_hsx.compat.patch_points import MARK, POINTS, PatchPoint, Use, problem_of
from vllm_ascend_hsx.compat.runner import RUNNER_HOOKS
from vllm_ascend_hsx.compat.versions import Pair
from vllm_ascend_hsx.doctor import patch_points
from vllm_ascend_hsx.doctor.findings import Finding
from vllm_ascend_hsx.doctor.patch_points import check_patch_points

PACKAGE = Path(vllm_ascend_hsx.__file__).parent
FITTING = [point for point in POINTS if point.fits]


NOT_DECLARING = ("__init__", "installed", "patch_points", "versions", "weights")


def declaring_sources() -> list[str]:
    """Return the sources that access vLLM or vllm-ascend."""
    paths = [path for path in (PACKAGE / "compat").glob("*.py") if path.stem not in NOT_DECLARING]
    return [path.read_text() for path in (*paths, PACKAGE / "plugin.py")]


def test_every_import_from_vllm_is_declared() -> None:
    imported = {
        (node.module, alias.name)
        for source in declaring_sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] in ("vllm", "vllm_ascend")
        for alias in node.names
    }
    assert len(imported) >= 12
    assert imported <= {(point.module, point.path[0]) for point in POINTS}


def test_frame_of_a_replaced_method_has_a_local_self() -> None:
    """vLLM's compiler reads it (compilation/wrapper.py, bytecode_hook)."""

    def find_self(original: Any, self: Any) -> Any:
        return sys._getframe(1).f_locals["self"]

    model = type("Model", (), {"forward": lambda self: None})
    point = PatchPoint(
        "a.b", ("Model", "forward"), Use.REPLACED, ("self",), (), "it compiles", ">=0.23", find_self
    )
    point.apply(SimpleNamespace(Model=model))
    made = model()
    assert made.forward() is made


def test_every_declaration_is_unique_and_used() -> None:
    sources = "\n".join(declaring_sources())
    declared = {point.path[-1] for point in POINTS if not point.replacement} - set(RUNNER_HOOKS)
    assert len(declared) >= 12
    assert not [name for name in declared if len(re.findall(rf"\b{name}\b", sources)) < 2]
    assert len({(point.name, point.versions) for point in POINTS}) == len(POINTS)


def test_patch_parameters_are_read_from_the_function() -> None:
    by_path = {".".join(point.path): point for point in POINTS}
    whole, rest = by_path["Scheduler._connector_finished"], by_path["ServingTokens.serve_tokens"]
    assert (whole.use, whole.takes) == (Use.REPLACED, ("self", "request"))
    assert (rest.use, rest.takes) == (Use.PASSED_ON, ("self", "request"))


@pytest.mark.parametrize(
    ("installed", "versions", "fits"),
    [
        ("0.23.0+empty", ">=0.23,<0.24", True),
        ("0.23.0.post1", ">=0.23,<0.24", True),
        ("0.26.0rc1", ">=0.26,<0.30", True),
        ("0.26.0rc1", ">=0.23,<0.24", False),
        (
            "0.27.0",
            ">=0.26,<0.27",
            True,
        ),  # not checked: treated as the newest checked release before it
        ("0.9.0", ">=0.23,<0.24", True),  # like the oldest
        (None, ">=0.26,<0.27", True),  # not installed, so never imported
    ],
)
def test_patch_applies_only_to_the_named_releases(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, versions: str, fits: bool
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(compat_versions, "version", version)
    monkeypatch.setattr(
        compat_versions,
        "CHECKED_PAIRS",
        (Pair("0.23.0", "0.23.0.post1"), Pair("0.26.0", "0.26.0rc1")),
    )
    compat_versions.release_to_patch.cache_clear()
    try:
        for module in ("vllm.config", "vllm_ascend.worker"):
            assert PatchPoint(module, ("f",), Use.NAMED, (), (), "it works", versions).fits is fits
    finally:
        compat_versions.release_to_patch.cache_clear()


REGISTER = """
import sys
import wrapt
from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.compat import patch_points

other = patch_points.PatchPoint("vllm_ascend.worker.worker", ("f",), patch_points.Use.REPLACED, (), (), "", ">=99", print)
patch_points.POINTS.append(other)
hooked = []
register = wrapt.register_post_import_hook
wrapt.register_post_import_hook = lambda hook, name: (hooked.append((hook, name)), register(hook, name))
plugin.register()
plugin.register()
ours = [(point.apply, point.module) for point in patch_points.POINTS if point.replacement and point.fits]
early = [name for name in sys.modules if name.startswith(("vllm_ascend.worker", "vllm_ascend.patch", "vllm_ascend.ops"))]
from vllm.v1.core.sched.scheduler import Scheduler
print("FOUND", len(ours) >= 28, hooked == ours, early, Scheduler._connector_finished.__wrapped__.__name__)
"""


def test_the_plugin_applies_every_patch_once_when_its_module_is_imported() -> None:
    """It imports nothing that vllm-ascend patches: a general plugin is loaded before."""
    hsx = [str(Path(sys.executable).with_name("hsx")), "emulate", "--"]
    done = subprocess.run(
        [*hsx, sys.executable, "-c", REGISTER], capture_output=True, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found == ["FOUND True True [] _connector_finished"], done.stdout + done.stderr


def exact(self: Any, timeout: Any) -> None: ...
def renamed(self: Any, seconds: Any) -> None: ...
def one_more(self: Any, timeout: Any, force: bool = False) -> None: ...
def one_required(self: Any, timeout: Any, force: bool) -> None: ...


@pytest.mark.parametrize(
    ("use", "function", "holds"),
    [
        (Use.REPLACED, exact, True),
        (Use.REPLACED, renamed, False),
        (Use.REPLACED, one_more, False),
        (Use.PASSED_ON, one_required, True),
        (Use.PASSED_ON, renamed, False),
        (Use.CALLED, one_more, True),
        (Use.CALLED, one_required, False),
        (Use.NAMED, renamed, True),
    ],
)
def test_patch_point_holds_if_the_used_part_of_the_signature_matches(
    use: Use, function: Callable[..., None], holds: bool
) -> None:
    point = PatchPoint("module", ("Class", "method"), use, ("self", "timeout"), (), "it stops", "")
    module = SimpleNamespace(Class=SimpleNamespace(method=function))
    assert (problem_of(point, lambda name: module) is None) is holds


def test_keyword_argument_must_be_a_parameter() -> None:
    point = PatchPoint("module", ("f",), Use.CALLED, ("self",), ("timeout",), "it stops", "")
    assert problem_of(point, lambda name: SimpleNamespace(f=exact)) is None
    assert problem_of(point, lambda name: SimpleNamespace(f=renamed)) is not None


def write_tree(directory: Path, leave_out: str = "", rename: tuple[str, str] = ("", "")) -> None:
    """Create modules with every declaration; without one of them, or with another parameter."""
    sources: dict[str, dict[str, list[str]]] = {"vllm_ascend.ops": {}}
    for point in FITTING:
        classes = sources.setdefault(point.module, {})
        if point.name == leave_out:
            continue
        parameters = ", ".join((*point.takes, *point.keywords))
        if rename[0] == point.name:
            parameters = parameters.replace(*rename[1].split("="))
        owner, name = (
            (point.path[0], point.path[1]) if len(point.path) == 2 else ("", point.path[0])
        )
        body = classes.setdefault(owner, [])
        body.append(
            f"{name} = 1"
            if point.use is Use.NAMED and not name.startswith("__")
            else f"def {name}({parameters}): ..."
        )
    for module, classes in sources.items():
        path = directory.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        lines = [line for name, body in classes.items() if not name for line in body]
        for name, body in classes.items():
            lines += [f"class {name}:", *(f"    {line}" for line in body)] if name else []
        (path / "__init__.py").write_text("\n".join(lines) + "\n")
    for path in directory.rglob("*"):
        if path.is_dir():
            (path / "__init__.py").touch()


def check_tree(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(PACKAGE.parent)]))
    monkeypatch.setattr(
        patch_points, "difference_of", lambda point: point.problem
    )  # the functions have no code
    return list(check_patch_points())


def test_missing_patch_point_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "vllm.v1.core.sched.scheduler.Scheduler.update_from_output"
    write_tree(tmp_path, leave_out=gone)
    found = check_tree(tmp_path, monkeypatch)
    (problem,) = [each for each in found if each.verdict != "ok"]
    assert (problem.name, problem.verdict) == (gone, "problem")
    assert "is missing" in problem.found and "names the failure of the file" in problem.found
    assert "The version is right" in problem.what_to_do
    assert len(found) == len(FITTING)


def test_a_patch_point_with_other_parameters_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = "vllm.sampling_params.SamplingParams._validate_spec_decode"
    write_tree(tmp_path, rename=(changed, "speculative_config=config"))
    (problem,) = [each for each in check_tree(tmp_path, monkeypatch) if each.verdict != "ok"]
    assert problem.name == changed
    assert problem.found.startswith(
        "its parameters are (self, config), not (self, speculative_config);"
    )


def test_failed_import_is_one_finding_with_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path)
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("import libascendcl_that_is_not_there\n")
    problems = [each for each in check_tree(tmp_path, monkeypatch) if each.verdict != "ok"]
    number = sum(point.module.startswith("vllm_ascend.") for point in FITTING)
    assert [each.name for each in problems] == ["imports"]
    assert problems[0].found.startswith(
        f"{number} of {len(FITTING)} patch points could not be checked: ModuleNotFoundError"
    )
    assert "libascendcl_that_is_not_there" in problems[0].found


def test_dead_process_is_a_finding_with_the_last_line() -> None:
    code = (
        "import os, sys; sys.stderr.write('loading\\nlibhccl.so: undefined symbol\\n'); "
        "sys.stderr.flush(); os._exit(9)"
    )
    (found,) = check_patch_points(command=(sys.executable, "-c", code))
    assert found.verdict == "problem" and found.found.endswith("libhccl.so: undefined symbol")
    (consequence,) = check_patch_points(False, (sys.executable, "-c", code))
    assert (consequence.verdict, consequence.what_to_do) == (
        "note",
        "Fix the problems above and run again.",
    )
    (silent,) = check_patch_points(command=(sys.executable, "-c", "import os; os._exit(9)"))
    assert silent.found.endswith("exit code 9")


IMPORTS_FAIL = [
    [
        "a.b",
        "called",
        "it works",
        "ModuleNotFoundError: No module named 'torch_npu'",
        True,
        None,
        None,
    ]
]
CHANGED = [["a.b", "called", "it works", "a.b is missing", False, None, None]]
OTHER_CODE = [["a.b", "called", "it works", None, False, "0123456789abcdef", "vllm/b.py"]]


@pytest.mark.parametrize(
    ("found", "software_is_right", "verdict", "remedy"),
    [
        (IMPORTS_FAIL, False, "note", "Fix the problems above and run again."),
        (IMPORTS_FAIL, True, "problem", "Find out why python -c 'import vllm_ascend.ops' fails."),
        (CHANGED, False, "problem", "Fix the problems above and run again."),
        (OTHER_CODE, True, "problem", "The version is right"),
        (
            CHANGED,
            True,
            "problem",
            (
                "The version is right, so the code was modified: disable other plugins "
                "(VLLM_PLUGINS)"
            ),
        ),
    ],
)
def test_failed_patch_point_has_a_remedy_unless_the_packages_explain_it(
    found: list[Any], software_is_right: bool, verdict: str, remedy: str
) -> None:
    code = f"print({MARK + json.dumps(found)!r})"
    (finding,) = check_patch_points(software_is_right, (sys.executable, "-c", code))
    assert (finding.verdict, finding.what_to_do[: len(remedy)]) == (verdict, remedy)


def test_failed_patch_point_of_an_unchecked_release_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_pair", lambda: ("0.31.0", "0.31.0"))
    (finding,) = check_patch_points(
        command=(sys.executable, "-c", f"print({MARK + json.dumps(OTHER_CODE)!r})")
    )
    assert finding.verdict == "problem" and '"allow_unchecked_versions": true' in finding.what_to_do


def test_hanging_process_is_a_finding() -> None:
    (found,) = check_patch_points(
        command=(sys.executable, "-c", "import signal; signal.pause()"), timeout=0.5
    )
    assert found.verdict == "problem" and "0.5 seconds" in found.found
