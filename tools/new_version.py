"""Compare new releases of vLLM and vllm-ascend with the installed pair.

Run `python tools/new_version.py 0.31.0 0.31.0rc1` in the environment of the newest checked pair. It
downloads the source distributions with pip, imports neither, and prints a Markdown list for review:
patch points, methods that we override, callers of both, and operators. Without a release of
vllm-ascend it compares only vLLM. The exit code is 1 if there is something to review, and 2 if a
release is not available.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from source_tree import Definition, Tree

import vllm_ascend_hsx.plugin  # noqa: F401 - imports all declarations
from vllm_ascend_hsx.compat.installed import digest_of_body, recorded
from vllm_ascend_hsx.compat.patch_points import POINTS, PatchPoint, Use, mismatch
from vllm_ascend_hsx.compat.versions import installed_pair

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "vllm_ascend_hsx"
SCHEMAS = ROOT / "emulator" / "ascend_npu_emulator" / "ops" / "schemas"
# pip runs a source distribution's setup.py for metadata.
BUILD = {
    "VLLM_TARGET_DEVICE": "empty",
    "CARGO": "no-cargo",
    "COMPILE_CUSTOM_KERNELS": "0",
    "SOC_VERSION": "ascend910b1",
}
_COMMON = 8  # a name defined by more classes does not identify the callee
_OPERATOR = re.compile(r"\btorch_npu\.(npu_\w+)|\btorch\.ops\.(_C_ascend|npu)\.(\w+)")
_SCHEMA = re.compile(r'\bdef\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


class UnavailableError(Exception):
    """A release is not available. The message has the reason."""


class Override(NamedTuple):
    """A method of one of our classes, and the method of vLLM or vllm-ascend that it replaces."""

    ours: str
    module: str
    path: tuple[str, ...]


def overrides(folder: Path) -> Iterator[Override]:
    """Yield each method in the package at `folder` whose class names a base of vLLM or vllm-ascend.

    The base may lack the method.
    """
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] in ("vllm", "vllm_ascend")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = [
                    base.value if isinstance(base, ast.Subscript) else base for base in node.bases
                ]
                bases = [
                    imported[base.id]
                    for base in names
                    if isinstance(base, ast.Name) and base.id in imported
                ]
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                for module, name in bases:
                    yield from (
                        Override(f"{node.name}.{method}", str(module), (name, method))
                        for method in methods
                    )


def patch_points(new: Tree, releases: Mapping[str, Version]) -> Iterator[str]:
    """Yield a line for each patch point that differs from the checked releases."""
    for point in POINTS:
        package = point.module.partition(".")[0]
        if package not in releases or releases[package].base_version not in SpecifierSet(
            point.versions
        ):
            continue
        found = new.find(point.module, point.path)
        difference = _difference(point, found)
        if difference is not None:
            where = "" if found is None else f" ({found.where})"
            yield f"`{point.name}`{where}: {difference}; {point.use.value} so that: {point.why}"


def _difference(point: PatchPoint, found: Definition | None) -> str | None:
    if found is None:
        return "it is missing"
    if (
        found.signature is not None
        and point.use is not Use.NAMED
        and (problem := mismatch(point, found.signature))
    ):
        return problem.text
    known = {
        sources.bodies[point.name]
        for sources in recorded().values()
        if point.name in sources.bodies
    }
    return (
        "its code has changed"
        if found.body is not None and known and found.body not in known
        else None
    )


def overridden(old: Tree, new: Tree) -> Iterator[str]:
    """Yield a line for each overridden method that has changed or is missing."""
    for each in overrides(OURS):
        if each.module.partition(".")[0] not in new.packages:
            continue
        before, after = old.find(each.module, each.path), new.find(each.module, each.path)
        if before is None:  # only our class has the method
            continue
        name = ".".join((each.module, *each.path))
        if after is None:
            yield f"`{name}`: it is missing; `{each.ours}` overrides it"
        elif str(after.signature) != str(before.signature):
            yield (
                f"`{name}` ({after.where}): its parameters are {after.signature}, not "
                f"{before.signature}; `{each.ours}` overrides it"
            )
        elif after.body != before.body:
            yield f"`{name}` ({after.where}): its code has changed; `{each.ours}` overrides it"


def callers(old: Tree, new: Tree, names: Collection[str]) -> Iterator[str]:
    """Yield a line for each function that calls one of `names` and is new or has changed.

    Names that many classes define are ignored.
    """
    defined = Counter(
        name
        for _, text in new.files()
        for name in re.findall(r"^ +(?:async )?def (\w+)\(", text, re.MULTILINE)
    )
    specific = {name for name in names if 0 < defined[name] <= _COMMON}
    before, after = _calling(old, specific), _calling(new, specific)
    for (file, function), (line, called, digest) in after.items():
        known = before.get((file, function))
        if known is None or known[2] != digest:
            yield (
                f"`{function}` ({file}:{line}): {'new' if known is None else 'changed'}; it "
                f"calls {', '.join(sorted(called))}"
            )


def _calling(
    tree: Tree, names: Collection[str]
) -> dict[tuple[str, str], tuple[int, set[str], str]]:
    """Return line, names called and digest of each function that calls one of `names`."""
    found: dict[tuple[str, str], tuple[int, set[str], str]] = {}
    any_of = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\(")
    for file, text in tree.files():
        if not names or not any_of.search(text):
            continue
        module = ast.parse(text)
        for qualified, node in _functions(module, ""):
            called = {
                name
                for call in ast.walk(node)
                if isinstance(call, ast.Call)
                if (name := _called(call)) in names
            }
            if called:
                found[file, qualified] = node.lineno, called, digest_of_body(ast.unparse(node))
    return found


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _functions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _functions(child, prefix)


def operators(old: Tree, new: Tree) -> Iterator[str]:
    """Yield a line for each operator that only the new sources call, with the first call."""
    known = set(_operators(old))
    yield from (
        f"`{name}`: called at {where}"
        for name, where in sorted(_operators(new).items())
        if name not in known
    )


def _operators(tree: Tree) -> dict[str, str]:
    found: dict[str, str] = {}
    for file, text in tree.files():
        for match in _OPERATOR.finditer(text):
            name = match[0].replace("torch.ops.", "")
            found.setdefault(name, f"{file}:{text.count(chr(10), 0, match.start()) + 1}")
    return found


def schemas(source: Path, known: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each operator of vllm-ascend's extension that is new, changed or missing.

    Args:
        source: folder of the source distribution.
        known: schemas by name.
    """
    found = {}
    files = (
        file
        for file in source.rglob("*binding*.cpp")
        if "third_party" not in file.relative_to(source).parts
    )
    for file in sorted(files):
        for match in _SCHEMA.finditer(file.read_text(errors="replace")):
            text = " ".join("".join(_TEXT.findall(match[1])).replace('\\"', '"').split())
            if "(" in text:
                found[text.partition("(")[0]] = text
    for name in sorted(found.keys() | known.keys()):
        if name not in found:
            yield f"`{name}`: missing"
        elif name not in known:
            yield f"`{found[name]}`: new"
        elif _plain(found[name]) != _plain(known[name]):
            yield f"`{found[name]}`: was `{known[name]}`"


def _plain(schema: str) -> str:
    return schema.replace(" ", "")


def known_schemas(folder: Path = SCHEMAS) -> dict[str, str]:
    """Return the emulator's schemas for the newest release of vllm-ascend, by name."""
    newest = max(
        folder.glob("_C_ascend-*.txt"),
        key=lambda file: Version(file.stem.removeprefix("_C_ascend-")),
    )
    lines = [line for line in newest.read_text().splitlines() if line and not line.startswith("#")]
    return {line.partition("(")[0]: line for line in lines}


def download(package: str, release: str, folder: Path) -> Path:
    """Unpack a source distribution below `folder`. Return the top folder.

    Raises:
        UnavailableError: pip cannot download it.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    command += ["--no-binary", package, "--dest", str(folder), f"{package}=={release}"]
    environ = {**os.environ, **BUILD, "VLLM_VERSION_OVERRIDE": release}
    print(f"downloading {package} {release} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    archives = list(folder.glob(f"{package.replace('-', '_')}-*.tar.gz"))
    if done.returncode or len(archives) != 1:
        raise UnavailableError(f"{package}=={release} cannot be downloaded:\n{done.stdout.strip()}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    (top,) = (
        path
        for path in folder.iterdir()
        if path.is_dir() and path.name.startswith(f"{package.replace('-', '_')}-")
    )
    return top


def sections(
    old: Tree, new: Tree, releases: Mapping[str, Version], source: Path | None
) -> dict[str, list[str]]:
    """Return the lines of each section of the report, by title."""
    names = {point.path[-1] for point in POINTS if point.replacement} | {
        each.path[-1] for each in overrides(OURS)
    }
    return {
        "Patch points that differ from the checked releases": list(patch_points(new, releases)),
        "Methods that we override": list(overridden(old, new)),
        "Callers of what we patch or override": list(callers(old, new, names)),
        "Operators that only the new sources call": list(operators(old, new)),
        "Schemas of vllm-ascend's extension": []
        if source is None
        else list(schemas(source, known_schemas())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("vllm", help="release of vLLM, for example 0.31.0")
    parser.add_argument(
        "vllm_ascend", nargs="?", help="release of vllm-ascend, for example 0.31.0rc1"
    )
    wanted = {
        name: release for name, release in vars(parser.parse_args()).items() if release is not None
    }
    installed = installed_pair()._asdict()
    with tempfile.TemporaryDirectory(prefix="hsx-new-version-") as folder:
        try:
            tops = {
                name: download(name.replace("_", "-"), release, Path(folder))
                for name, release in wanted.items()
            }
        except UnavailableError as error:
            print(f"new_version: {error}", file=sys.stderr)
            return 2
        print("reading the sources (a minute or two) ...", file=sys.stderr, flush=True)
        old = Tree({name: folder_of(name) for name in wanted})
        new = Tree({name: top / name for name, top in tops.items()})
        releases = {name: Version(release) for name, release in wanted.items()}
        report = sections(old, new, releases, tops.get("vllm_ascend"))
    pair = " and ".join(f"{name} {release}" for name, release in wanted.items())
    print(
        f"# {pair}\n\nCompared with {' and '.join(f'{name} {installed[name]}' for name in wanted)}."
    )
    for title, lines in report.items():
        print(f"\n## {title}: {len(lines)}\n", *(f"* {line}" for line in lines), sep="\n")
    return int(any(report.values()))


def folder_of(package: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


if __name__ == "__main__":
    sys.exit(main())
