"""Check the patch points in the installed vLLM and vllm-ascend."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

from vllm_ascend_hsx.compat.installed import EXAMINE, OPTION, Examined, difference_of, examined
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS, IncompatibleVersionError, installed_pair
from vllm_ascend_hsx.doctor.findings import Finding, Verdict

TOPIC = "patch points"
_FIRST = "Fix the problems above and run again."
_CHANGED = (
    "The version is right, so the code was modified: disable other plugins (VLLM_PLUGINS), or "
    "compare the installed files with the release."
)
_NOT_CHECKED = (
    f'Install a release that was checked, or set "{OPTION}": true at the risk of wrong or '
    "missing rows."
)


def check_patch_points(
    software_is_right: bool = True, command: tuple[str, ...] = EXAMINE, timeout: float | None = None
) -> Iterator[Finding]:
    """Yield a finding for each patch point, or one for all that share a reason not to be checked.

    Args:
        software_is_right: check_software has found no problem that would explain a failure here.
        command, timeout: as for compat.installed.examined.
    """
    try:
        found = examined(command) if timeout is None else examined(command, timeout)
    except IncompatibleVersionError as error:
        yield _not_imported(
            f"patch points could not be checked: {error.reason}",
            software_is_right,
            f"Find out why {shlex.join(command)} fails.",
        )
        return
    causes = Counter(point.problem for point in found if point.not_imported)
    for cause, number in causes.items():
        problem = f"{number} of {len(found)} patch points could not be checked: {cause}"
        yield _not_imported(
            problem, software_is_right, "Find out why python -c 'import vllm_ascend.ops' fails."
        )
    for point in found:
        if not point.not_imported:
            yield _finding(point, software_is_right)


def _finding(point: Examined, software_is_right: bool) -> Finding:
    difference = difference_of(point)
    if difference is None:
        return Finding(TOPIC, point.name, "ok", f"{point.use} so that: {point.why}")
    remedy = _FIRST
    if software_is_right:
        remedy = _CHANGED if installed_pair() in CHECKED_PAIRS else _NOT_CHECKED
    return Finding(
        TOPIC, point.name, "problem", f"{difference}; {point.use} so that: {point.why}", remedy
    )


def _not_imported(problem: str, software_is_right: bool, remedy: str) -> Finding:
    verdict: Verdict = "problem" if software_is_right else "note"
    return Finding(TOPIC, "imports", verdict, problem, remedy if software_is_right else _FIRST)
