"""Look up names in the sources of packages without importing them, for new_version.py."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import griffe

from vllm_ascend_hsx.compat.installed import digest_of_body

_KINDS: Mapping[Any, Any] = {
    griffe.ParameterKind.positional_only: inspect.Parameter.POSITIONAL_ONLY,
    griffe.ParameterKind.positional_or_keyword: inspect.Parameter.POSITIONAL_OR_KEYWORD,
    griffe.ParameterKind.var_positional: inspect.Parameter.VAR_POSITIONAL,
    griffe.ParameterKind.keyword_only: inspect.Parameter.KEYWORD_ONLY,
    griffe.ParameterKind.var_keyword: inspect.Parameter.VAR_KEYWORD,
}


class Definition(NamedTuple):
    """A class, function or attribute in the sources.

    Attributes:
        where: path below the tree's folder, and line.
        signature: None if it has no parameters.
        body: digest of a function's code, or None.
    """

    where: str
    signature: inspect.Signature | None
    body: str | None


class Tree:
    """Sources of packages, read without importing them.

    Args:
        packages: folder of each package, by name.
    """

    def __init__(self, packages: Mapping[str, Path]) -> None:
        self.packages = packages
        folders = list(dict.fromkeys(folder.parent for folder in packages.values()))
        self._loader = griffe.GriffeLoader(search_paths=folders, allow_inspection=False)
        for name in packages:
            self._loader.load(name)

    def find(self, module: str, path: Sequence[str]) -> Definition | None:
        """Return the definition of a name, or None.

        Follows imports, base classes, instances of a class, and assignments by a module.
        """
        try:
            found: Any = self._loader.modules_collection[module]
            path = [_assigned(found, path)] if _assigned(found, path) else path
            bound = False
            for name in path:
                if name == "__init__" and name not in found.all_members:  # a dataclass
                    return Definition(self._where(found), None, None)
                found = _target(found.all_members[name])
                if found.is_attribute and isinstance(found.value, griffe.ExprCall):  # an instance
                    found, bound = (
                        _target(found.parent.all_members[str(found.value.function)]),
                        True,
                    )
        except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
            return None
        return self._definition(found, bound)

    def _where(self, found: Any) -> str:
        folder = self.packages[found.package.name].parent
        return f"{Path(found.filepath).relative_to(folder)}:{found.lineno or 1}"

    def _definition(self, found: Any, bound: bool) -> Definition:
        where = self._where(found)
        if not (found.is_function or found.is_class):
            return Definition(where, None, None)
        parameters = (
            [] if found.is_class and "__init__" not in found.all_members else list(found.parameters)
        )
        named = [_parameter(each) for each in parameters]
        if found.is_class or bound or "classmethod" in found.labels:
            named = named[1:]
        body = digest_of_body(found.source) if found.is_function else None
        return Definition(where, inspect.Signature(named), body)

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield the path below the tree's folder and the text of each Python file."""
        for folder in self.packages.values():
            for file in sorted(folder.rglob("*.py")):
                yield str(file.relative_to(folder.parent)), file.read_text(errors="replace")


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _assigned(module: Any, path: Sequence[str]) -> str | None:
    """Return the name of the function that a module assigns over another module's method."""
    for node in ast.parse(module.source).body if len(path) > 1 else ():
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and ast.unparse(node.targets[0]) == ".".join(path)
        ):
            return node.value.id
    return None


def _parameter(found: griffe.Parameter) -> inspect.Parameter:
    kind = _KINDS[found.kind]
    variable = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    default = inspect.Parameter.empty if found.default is None or variable else found.default
    return inspect.Parameter(found.name, kind, default=default)
