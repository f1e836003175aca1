"""Check that the installed vLLM and vllm-ascend match the patch points.

For each checked release of vllm-ascend and its vLLM, `sources.json` has the SHA-256 of each file
that contains a patch point, and the digest of each function's body (`tools/record_sources.py`). If
all files match, nothing is imported. Otherwise a separate process examines each patch point. This
takes as long as an import of vLLM.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.compat.patch_points import MARK, POINTS, PatchPoint, Use, problem_of
from vllm_ascend_hsx.compat.versions import (
    CHECKED_PAIRS,
    IncompatibleVersionError,
    Pair,
    installed_pair,
)
from vllm_ascend_hsx.config import EXTRA_CONFIG

logger = logging.getLogger(__name__)

OPTION = "allow_unchecked_versions"
# The plugin imports all declarations.
EXAMINE = (
    sys.executable,
    "-c",
    "import vllm_ascend_hsx.plugin, vllm_ascend_hsx.compat.installed as i; i.examine()",
)
_FIRST = "vllm_ascend.ops"  # import it first: modules of vllm_ascend import each other in circles
_DONE = "HSX_CHECKED_VERSIONS"  # environment variable: child processes need not check again
_TIMEOUT_S = 300.0  # an import of vLLM takes half a minute from a cold disk


class Sources(NamedTuple):
    """The recorded sources of one checked pair.

    Attributes:
        files: SHA-256 of each file, by path below site-packages.
        bodies: digest of each function, by patch point.
    """

    files: Mapping[str, str]
    bodies: Mapping[str, str]


class Examined(NamedTuple):
    """A patch point of the installed pair.

    Attributes:
        name, use, why: as in PatchPoint.
        problem: reason why the patch point does not hold, or None; see Problem.
        not_imported: True if the module could not be imported.
        body: digest of the function, or None.
        file: path of the file below site-packages, or None.
    """

    name: str
    use: str
    why: str
    problem: str | None
    not_imported: bool
    body: str | None
    file: str | None


def require_checked(allow_unchecked: bool) -> None:
    """Refuse an installed pair with changed patch points, before weights are loaded.

    Args:
        allow_unchecked: the option `allow_unchecked_versions`: log the reasons instead.

    Raises:
        IncompatibleVersionError: names each patch point that does not hold, and the purpose.
    """
    pair = installed_pair()
    mark = " ".join(pair)
    if os.environ.get(_DONE) == mark:
        return
    if not (pair in CHECKED_PAIRS and _files_are_those_of(pair)):
        _examine_installed(pair, allow_unchecked)
    os.environ[_DONE] = mark


def _files_are_those_of(pair: Pair) -> bool:
    known = recorded().get(pair.vllm_ascend)
    return known is not None and all(
        _digest_of_file(name) == digest for name, digest in known.files.items()
    )


def _examine_installed(pair: Pair, allow_unchecked: bool) -> None:
    what = f"vllm {pair.vllm} with vllm-ascend {pair.vllm_ascend}"
    found = [(point, difference) for point in examined() if (difference := difference_of(point))]
    differences = [
        f"{point.name}: {difference}; {point.use} so that: {point.why}"
        for point, difference in found
    ]
    if not differences:
        why = "files of it were changed" if pair in CHECKED_PAIRS else "it was not checked"
        logger.warning(
            "%s: %s, but every patch point of vllm-ascend-hsx is as in a checked release", what, why
        )
    elif allow_unchecked:
        logger.warning(
            "%s differs from the checked releases, and %s is set: %s",
            what,
            OPTION,
            "; ".join(differences),
        )
    else:
        listed = "".join(f"\n  {each}" for each in differences)
        reason = f"{what} differs from the checked releases:{listed}"
        remedy = (
            f'To start anyway, at the risk of wrong or missing rows, set "{OPTION}": '
            f"true in {EXTRA_CONFIG}."
        )
        raise IncompatibleVersionError(reason, remedy)


def difference_of(point: Examined) -> str | None:
    """Return how a patch point differs from all checked releases; None if it does not."""
    if point.problem is not None:
        return point.problem
    bodies = [sources.bodies.get(point.name) for sources in recorded().values()]
    return None if point.body is None or point.body in bodies else "its code has changed"


@functools.cache
def recorded() -> dict[str, Sources]:
    """Return the recorded sources of each checked release of vllm-ascend."""
    text = resources.files(__package__).joinpath("sources.json").read_text()
    return {release: Sources(**sources) for release, sources in json.loads(text).items()}


def examined(command: tuple[str, ...] = EXAMINE, timeout: float = _TIMEOUT_S) -> list[Examined]:
    """Examine the patch points in another process.

    Importing vllm_ascend may fail or end the process.

    Args:
        command: command that prints the output of `examine`.
        timeout: limit in seconds.

    Raises:
        IncompatibleVersionError: if the patch points could not be examined.
    """
    # Like the command `vllm`, import nothing from the current directory (Python 3.11 and later).
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            list(command),
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise IncompatibleVersionError(
            f"vllm and vllm_ascend could not be imported in {timeout:g} seconds"
        ) from None
    line = next(
        (each for each in reversed(done.stdout.splitlines()) if each.startswith(MARK)), None
    )
    if line is None:
        last = (
            [each.strip() for each in done.stderr.splitlines() if each.strip()]
            or [f"exit code {done.returncode}"]
        )[-1]
        raise IncompatibleVersionError(f"vllm and vllm_ascend could not be imported: {last}")
    return [Examined(*each) for each in json.loads(line.removeprefix(MARK))]


def examine() -> None:
    """Print MARK and, as JSON, each patch point of the installed pair as in Examined."""
    problem_of(
        PatchPoint(_FIRST, (), Use.NAMED, (), (), "", "")
    )  # a failure is reported with the patch points that need it
    print(f"\n{MARK}{json.dumps([_examined(point) for point in POINTS if point.fits])}", flush=True)


def _examined(point: PatchPoint) -> Examined:
    problem = problem_of(point)
    if problem is not None:
        return Examined(
            point.name, point.use.value, point.why, problem.text, problem.not_imported, None, None
        )
    module = importlib.import_module(point.module)
    named: Any = functools.reduce(getattr, point.path, module)
    found = inspect.unwrap(named)
    file, body = Path(module.__file__ or ""), None
    if inspect.isfunction(found) or inspect.isclass(found):
        file = Path(inspect.getsourcefile(found) or file)
        body = digest_of_body(inspect.getsource(found)) if inspect.isfunction(found) else None
    return Examined(
        point.name, point.use.value, point.why, None, False, body, _below_site_packages(file)
    )


def digest_of_body(source: str) -> str:
    """Return the digest of a function's code without comments and docstring, in hex digits."""
    tree = ast.parse(textwrap.dedent(source))
    function = tree.body[0]
    if (
        isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(function, clean=False) is not None
    ):
        function.body = function.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def _below_site_packages(file: Path) -> str | None:
    for package in ("vllm", "vllm_ascend"):
        top = _folder_of(package)
        if top is not None and file.is_relative_to(top):
            return str(file.relative_to(top.parent))
    return None


def _digest_of_file(name: str) -> str | None:
    package, _, below = name.partition("/")
    top = _folder_of(package)
    try:
        return None if top is None else hashlib.sha256((top / below).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


@functools.cache
def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return (
        None
        if spec is None or not spec.submodule_search_locations
        else Path(spec.submodule_search_locations[0])
    )


def sources_of(found: list[Examined]) -> Sources:
    """Return the sources to record for an examined pair.

    Raises IncompatibleVersionError if a patch point does not hold.
    """
    if problems := [
        f"{point.name}: {point.problem}" for point in found if point.problem is not None
    ]:
        raise IncompatibleVersionError("; ".join(problems))
    files = sorted({point.file for point in found if point.file is not None})
    digests = {name: digest for name in files if (digest := _digest_of_file(name)) is not None}
    return Sources(
        digests, {point.name: point.body for point in sorted(found) if point.body is not None}
    )
