"""One declaration for each patch point: what we replace, call or name in vLLM and vllm-ascend.

A replacement is declared by the decorator `patch`, anything else by `uses` beside the code that
uses it. Both add to POINTS. `plugin.register` applies the patches when their modules are imported;
`hsx doctor` checks all points.
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
    """How a patch point is used, which decides what its signature may be.

    REPLACED: the replacement takes exactly these parameters. PASSED_ON: it takes these and passes
    any others on. CALLED: we call it with these; it may have other, optional ones. NAMED: it must
    exist.
    """

    REPLACED = "replaced"
    PASSED_ON = "replaced, the rest passed on"
    CALLED = "called"
    NAMED = "used"


class Problem(NamedTuple):
    """Why a patch point does not hold, in one line, and whether its module failed to import."""

    text: str
    not_imported: bool = False


class PatchPoint(NamedTuple):
    """One attribute of vLLM or vllm-ascend that we rely on.

    Attributes:
        module: name of the module that has it.
        path: name of the attribute, or of a class and its attribute.
        use: how it is used.
        takes: parameters that we give or take by position, in order, `self` included.
        keywords: parameters that we give or take by name.
        why: what does not work without it.
        versions: releases of vllm or vllm-ascend, whichever has the module, for which this holds
            (">=0.23,<0.24").
        replacement: called in its place with the original as first argument; None if nothing is
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
        """Put the replacement in place, if the module has the attribute.

        Otherwise the module stays as it is, for a server that extracts nothing; one that does is
        refused by `installed.require_checked`.

        Args:
            module: the imported module.
        """
        owner, original, replacement = None, module, self.replacement
        assert replacement is not None
        for name in self.path:
            owner, original = original, getattr(original, name, None)
            if original is None:
                logger.warning(
                    "%s is not there; extraction needs it so that: %s", self.name, self.why
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

    The function is called with the original first and then as the original was. Its own parameters
    after the first are what the original must take: exactly these, or these and others if the
    function has `*args` or `**kwargs`.

    Args:
        module, path, versions, why: as in PatchPoint; `path` with dots.
        takes: parameters of the original, separated by spaces, where they are not those of the
            function.
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
        takes: parameters that we give by position, separated by spaces; None if we do not call it.
        keywords: parameters that we give by name, separated by spaces.
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
    """Return what differs from the declaration; None if the patch point holds.

    Args:
        point: what to check.
        load: imports a module by its name.
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
            return Problem(f"{'it' if missing == point.name else missing} is not there")
    if point.use is Use.NAMED:
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError) as error:
        return Problem(f"it has no signature: {_one_line(error)}")
    return mismatch(point, signature)


def mismatch(point: PatchPoint, signature: inspect.Signature) -> Problem | None:
    """Return how a signature differs from the declaration; None if it does not."""
    parameters = signature.parameters
    names, expected = tuple(parameters), point.takes
    # An argument given by position does not depend on the parameter's name, but another name mostly
    # has another meaning.
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
