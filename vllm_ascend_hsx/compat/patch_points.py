"""Declare each patch point: each attribute of vLLM or vllm-ascend that we replace, call or name.

The decorator `patch` declares a replacement. `uses`, beside the code that uses the attribute,
declares anything else. Both add to POINTS. `plugin.register` applies the patches when their modules
are imported; `hsx doctor` checks all points.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.compat.versions import release_to_patch

logger = logging.getLogger(__name__)

MARK = "hsx-patch-points: "  # begins the line for `hsx doctor`; imported modules may print too
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

F = TypeVar("F", bound=Callable[..., Any])


class Use(Enum):
    """The use of a patch point. It decides which signatures are accepted.

    REPLACED: the replacement takes exactly these parameters. PASSED_ON: it takes these and passes
    any others on. CALLED: we call it with these; it may have other, optional ones. NAMED: it must
    exist.
    """

    REPLACED = "replaced"
    PASSED_ON = "replaced, the rest passed on"
    CALLED = "called"
    NAMED = "used"


class Problem(NamedTuple):
    """One line on why a patch point does not hold, and whether the module failed to import."""

    text: str
    not_imported: bool = False


class PatchPoint(NamedTuple):
    """One attribute of vLLM or vllm-ascend that we rely on.

    Attributes:
        module: name of the module that has it.
        path: name of the attribute, or names of a class and an attribute.
        use: how it is used.
        takes: parameters that we pass or accept by position, in order, `self` included.
        keywords: parameters that we pass or accept by name.
        why: purpose: a statement that is false without the patch point.
        versions: releases of the package that has the module (">=0.23,<0.24").
        replacement: called instead, with the original as first argument; None if nothing is
            replaced.
    """

    module: str
    path: tuple[str, ...]
    use: Use
    takes: tuple[str, ...]
    keywords: tuple[str, ...]
    why: str
    versions: str
    replacement: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The full name, as in "vllm.v1.core.sched.scheduler.Scheduler.update_from_output"."""
        return ".".join((self.module, *self.path))

    @property
    def fits(self) -> bool:
        """True if this declaration is for the installed release."""
        return release_to_patch(self.module.partition(".")[0]) in SpecifierSet(self.versions)

    def apply(self, module: Any) -> None:
        """Install the replacement if the module has the attribute.

        Otherwise leave the module unchanged, for servers that do not extract.
        `installed.require_checked` refuses servers that do.

        Args:
            module: the imported module.
        """
        owner, original, replacement = None, module, self.replacement
        assert replacement is not None
        for name in self.path:
            owner, original = original, getattr(original, name, None)
            if original is None:
                logger.warning(
                    "%s is missing; extraction needs it so that: %s", self.name, self.why
                )
                return

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        # vLLM looks for a local named `self` in the frame of a forward that it compiles
        # (compilation/wrapper.py, bytecode_hook).
        def replaced_method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, self, *args, **kwargs)

        function = replaced_method if isinstance(owner, type) else replaced
        updated = () if isinstance(original, type) else functools.WRAPPER_UPDATES
        setattr(owner, self.path[-1], functools.update_wrapper(function, original, updated=updated))


POINTS: list[PatchPoint] = []


def patch(
    module: str, path: str, versions: str, *, why: str, takes: str | None = None, keywords: str = ""
) -> Callable[[F], F]:
    """Declare that the decorated function replaces an attribute of vLLM or vllm-ascend.

    The function is called with the original first, then with the original's arguments. Parameters
    of the function after the first are the parameters that the original must take: exactly these,
    or these and others if the function has `*args` or `**kwargs`.

    Args:
        module, path, versions, why: as in PatchPoint; `path` with dots.
        takes: parameters of the original, separated by spaces, if they differ from the function's.
        keywords: further parameters that the function takes by name, separated by spaces.
    """

    def declare(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        own = [each.name for each in parameters if each.kind not in _VARIABLE]
        use = Use.REPLACED if len(own) == len(parameters) else Use.PASSED_ON
        names = own if takes is None else takes.split()
        point = PatchPoint(
            module,
            _parts(path),
            use,
            tuple(names),
            tuple(keywords.split()),
            why,
            versions,
            function,
        )
        POINTS.append(point)
        return function

    return declare


def uses(
    module: str, path: str, versions: str, *, why: str, takes: str | None = None, keywords: str = ""
) -> None:
    """Declare that we call or name an attribute of vLLM or vllm-ascend without replacing it.

    Args:
        module, path, versions, why: as in PatchPoint; `path` with dots.
        takes: parameters that we pass by position, separated by spaces; None if we do not call it.
        keywords: parameters that we pass by name, separated by spaces.
    """
    use = Use.NAMED if takes is None else Use.CALLED
    names = tuple((takes or "").split())
    POINTS.append(
        PatchPoint(module, _parts(path), use, names, tuple(keywords.split()), why, versions)
    )


def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def problem_of(
    point: PatchPoint, load: Callable[[str], Any] = importlib.import_module
) -> Problem | None:
    """Return the difference from the declaration; None if the patch point holds.

    Args:
        point: patch point to check.
        load: function that imports a module by name.
    """
    try:
        found = load(point.module)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        return Problem(_one_line(error), not_imported=True)
    for index, name in enumerate(point.path):
        try:
            found = getattr(found, name)
        except AttributeError:
            missing = ".".join((point.module, *point.path[: index + 1]))
            return Problem(f"{'it' if missing == point.name else missing} is missing")
    if point.use is Use.NAMED:
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return Problem(f"it has no signature: {_one_line(error)}")
    return mismatch(point, signature)


def mismatch(point: PatchPoint, signature: inspect.Signature) -> Problem | None:
    """Return the difference between a signature and the declaration; None if there is none."""
    parameters = signature.parameters
    names, expected = tuple(parameters), point.takes
    # A positional argument does not depend on the parameter's name, but another name usually means
    # another parameter.
    wrong = names[: len(expected)] != expected or not set(point.keywords) <= set(names)
    others = [parameters[name] for name in names[len(expected) :] if name not in point.keywords]
    if point.use is Use.REPLACED:
        wrong = wrong or bool(others)
    elif point.use is Use.CALLED:
        wrong = wrong or any(
            each.default is inspect.Parameter.empty and each.kind not in _VARIABLE
            for each in others
        )
    if not wrong:
        return None
    rest = {Use.REPLACED: "", Use.PASSED_ON: ", ...", Use.CALLED: ", optional ones"}[point.use]
    wanted = ", ".join((*expected, *point.keywords)) + rest
    return Problem(f"its parameters are ({', '.join(names)}), not ({wanted})")


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__
