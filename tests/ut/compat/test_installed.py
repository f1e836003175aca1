"""The installed pair is checked before weights are loaded: names, parameters and code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from changed_packages import Change, copy_installed
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_ascend_hsx import plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.compat import installed
from vllm_ascend_hsx.compat.installed import Examined, digest_of_body, recorded, require_checked
from vllm_ascend_hsx.compat.patch_points import POINTS
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS, IncompatibleVersionError, Pair

POINT = Examined("a.f", "called", "rows are right", None, False, "0" * 16, "vllm/a.py")
KNOWN = {
    "0.23.0": installed.Sources({}, {"a.f": "0" * 16}),
    "0.26.0rc1": installed.Sources({}, {"a.f": "1" * 16}),
}


@pytest.fixture(autouse=True)
def not_checked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_CHECKED_VERSIONS", "")


def test_every_checked_pair_is_recorded() -> None:
    assert recorded().keys() == {pair.vllm_ascend for pair in CHECKED_PAIRS}
    for sources in recorded().values():
        assert len(sources.files) >= 25
        assert len(sources.bodies) >= 40


@pytest.mark.parametrize("pair", CHECKED_PAIRS, ids=lambda pair: pair.vllm_ascend)
def test_exactly_the_functions_of_patch_points_are_recorded_per_release(
    pair: Pair,
) -> None:
    """Otherwise a new function, or one for other releases than before, is not checked at start."""
    with_code = {name for sources in recorded().values() for name in sources.bodies}
    releases = {
        package: Version(release).base_version for package, release in pair._asdict().items()
    }
    named = {
        point.name
        for point in POINTS
        if releases[point.module.partition(".")[0]] in SpecifierSet(point.versions)
    }
    assert recorded()[pair.vllm_ascend].bodies.keys() == named & with_code


def test_installed_pair_matches_the_record_so_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "examined", lambda: pytest.fail("it looks closer"))
    require_checked(False)
    assert os.environ["HSX_CHECKED_VERSIONS"] == " ".join(installed.installed_pair())
    monkeypatch.setattr(
        installed, "_files_are_those_of", lambda pair: pytest.fail("it looks again")
    )
    require_checked(False)


@pytest.mark.parametrize(
    ("point", "difference"),
    [
        (POINT, None),
        (POINT._replace(body="1" * 16), None),  # as in another checked release
        (POINT._replace(body="2" * 16), "its code has changed"),
        (POINT._replace(body=None, problem="a.f is not there"), "a.f is not there"),
        (
            POINT._replace(body=None, problem="ModuleNotFoundError: a", not_imported=True),
            "ModuleNotFoundError: a",
        ),
        (POINT._replace(body=None), None),  # a constant
    ],
)
@pytest.mark.parametrize("pair", [Pair("0.31.0", "0.31.0rc1"), CHECKED_PAIRS[0]])
def test_unchecked_or_changed_pair_starts_if_all_patch_points_hold(
    pair: Pair,
    point: Examined,
    difference: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(installed, "installed_pair", lambda: pair)
    monkeypatch.setattr(installed, "recorded", lambda: KNOWN)
    monkeypatch.setattr(installed, "_files_are_those_of", lambda pair: False)
    monkeypatch.setattr(installed, "examined", lambda: [POINT, point])
    releases = f"vllm {pair.vllm} with vllm-ascend {pair.vllm_ascend}"
    if difference is None:
        require_checked(False)
        assert (
            f"{releases}: " in caplog.text
            and "every patch point of vllm-ascend-hsx is as in a checked release" in caplog.text
        )
    else:
        with pytest.raises(IncompatibleVersionError) as refused:
            require_checked(False)
        assert (
            f"{releases} differs from the checked releases:\n  a.f: {difference}; called so that: rows "
            "are right"
        ) in str(refused.value)
        assert '"allow_unchecked_versions": true' in str(refused.value)
        assert os.environ["HSX_CHECKED_VERSIONS"] == ""
        require_checked(True)
        assert difference in caplog.text
    assert len(caplog.records) == 1


def test_digest_covers_only_the_code() -> None:
    source = (
        '    def f(self, a, b="x"):\n        """Do it."""\n        # now\n        return a + b\n'
    )
    same = "def f(self, a, b='x'):\n\n    return (a + b)"
    assert digest_of_body(source) == digest_of_body(same)
    assert digest_of_body(source) != digest_of_body(source.replace("a + b", "b + a"))
    assert digest_of_body(source) != digest_of_body(source.replace('b="x"', 'b="y"'))
    assert digest_of_body("def f():\n    '''Nothing.'''") == digest_of_body("def f(): pass")


CHECK = (
    "import vllm_ascend_hsx.plugin, vllm_ascend_hsx.compat.installed as i; i.require_checked(False)"
)
STATE = "vllm/distributed/kv_transfer/kv_transfer_state.py"
LINE = "    return _KV_CONNECTOR_AGENT is not None\n"
CHANGES = [
    Change(
        "vllm/v1/engine/core.py",
        "def _handle_shutdown(",
        "def _handle_end(",
        "_handle_shutdown: it is missing",
    ),
    Change(
        "vllm/v1/engine/utils.py",
        "def shutdown(self, timeout: float | None = None)",
        "def shutdown(self)",
        "its parameters are (self), not",
    ),
    Change(
        "vllm_ascend/worker/worker.py",
        "def sleep(self, level",
        "def slumber(self, level",
        "NPUWorker.sleep: it is missing",
    ),
    Change(
        STATE,
        LINE,
        "    return bool(_KV_CONNECTOR_AGENT)\n",
        "has_kv_transfer_group: its code has changed",
    ),
]
UNRELATED = [
    Change(STATE, "\ndef has_kv_transfer_group(", "\nunrelated = 1\n\n\ndef has_kv_transfer_group(")
]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        pytest.param(CHANGES, True, id="relevant changes"),
        pytest.param(UNRELATED, False, id="unrelated changes", marks=pytest.mark.long),
    ],
)
def test_changes_in_a_copy_of_the_packages_are_reported_with_their_consequence(
    changes: list[Change], refused: bool, tmp_path: Path
) -> None:
    environ = copy_installed(tmp_path, changes)
    hsx = str(Path(sys.executable).with_name("hsx"))
    done = subprocess.run(
        [hsx, "emulate", "--", sys.executable, "-c", CHECK],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == refused, printed
    if refused:
        lines = printed.partition("differs from the checked releases:\n")[2].splitlines()[
            : len(changes)
        ]
        assert all(" so that: " in line for line in lines), printed
        assert all(any(change.report in line for line in lines) for change in changes), printed
    else:
        assert (
            "files of it were changed, but every patch point of vllm-ascend-hsx is as in" in printed
        )
