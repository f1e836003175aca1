"""Check which patch points hold in the installed vLLM and vllm-ascend.

In a process of its own: importing vllm_ascend may fail, or end the process.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from vllm_ascend_hsx.compat.patch_points import MARK
from vllm_ascend_hsx.doctor.findings import Finding, Verdict

TOPIC = "patch points"
# The plugin imports all declarations.
_CODE = "import vllm_ascend_hsx.plugin, vllm_ascend_hsx.compat.patch_points as p; p.report()"
_COMMAND = (sys.executable, "-c", _CODE)
_FIRST = "Mend what is wrong above, and look again."
_CHANGED = (
    "Its version is right, so something has changed it: leave other plugins out (VLLM_PLUGINS), or compare the installed files "
    "with the release's."
)
_SECONDS = 300.0  # an import of vLLM takes half a minute from a cold disk


def check_patch_points(software_is_right: bool = True, command: Sequence[str] = _COMMAND, timeout: float = _SECONDS) -> Iterator[Finding]:
    """Yield a finding for each checked patch point, and for each reason why others were not.

    Args:
        software_is_right: check_software has found no problem, which would explain a failure here.
        command: prints the patch points, as `compat.patch_points.report` does.
        timeout: most seconds that the command may take.
    """
    # Like the command `vllm`, import nothing from the current directory (Python 3.11 and later).
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(list(command), env=environ, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        problem = f"vllm and vllm_ascend could not be imported in {timeout:g} seconds"
        yield Finding(TOPIC, "imports", "problem", problem, "Find out what python -c 'import vllm_ascend.ops' waits for.")
        return
    line = next((each for each in reversed(done.stdout.splitlines()) if each.startswith(MARK)), None)
    if line is None:
        last = ([each.strip() for each in done.stderr.splitlines() if each.strip()] or [f"exit code {done.returncode}"])[-1]
        yield _not_imported(f"they could not be checked: {last}", software_is_right, f"Make {shlex.join(command)} run.")
        return
    found = json.loads(line.removeprefix(MARK))
    causes = Counter(problem[0] for _, _, _, problem in found if problem is not None and problem[1])
    for cause, number in causes.items():
        problem = f"{number} of {len(found)} patch points could not be checked: {cause}"
        yield _not_imported(problem, software_is_right, "Find out why python -c 'import vllm_ascend.ops' fails.")
    for name, use, why, problem in found:
        if problem is None:
            yield Finding(TOPIC, name, "ok", f"{use} so that: {why}")
        elif not problem[1]:
            remedy = _CHANGED if software_is_right else _FIRST
            yield Finding(TOPIC, name, "problem", f"{problem[0]}; {use} so that: {why}", remedy)


def _not_imported(problem: str, software_is_right: bool, remedy: str) -> Finding:
    verdict: Verdict = "problem" if software_is_right else "note"
    return Finding(TOPIC, "imports", verdict, problem, remedy if software_is_right else _FIRST)
