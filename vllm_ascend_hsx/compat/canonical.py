"""Recognise a canonical decoder by the source, and collect the stream between the layers.

A canonical decoder calls one layer after the other and then a norm:

    for layer in self.layers:
        hidden, residual = layer(positions, hidden, residual)
    hidden, _ = self.norm(hidden, residual)
    return hidden

The stream after a layer is the input of the next layer. If the layer begins with a norm that adds
the residual, the stream is `hidden + residual`. If the layer overwrites `residual` or takes none,
the stream is `hidden`. The last norm must agree. Any other code is refused, because a guess would
store wrong rows.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23

if TYPE_CHECKING:
    import torch

STATES, INDEX = "_hsx_states", "_hsx_index"  # local variables of the new forward
# Norms of vLLM that return (norm(x + residual), x + residual) when called with a residual
# (model_executor/layers/layernorm.py, 0.23.0).
ADDING_NORMS = ("RMSNorm", "GemmaRMSNorm")
INTERFACES = "vllm.model_executor.models.interfaces"
NORMS = "vllm.model_executor.layers.layernorm"
_WHY = "targets without SupportsEagle3 can be extracted"
uses(NORMS, "RMSNorm", SINCE_0_23, why=_WHY)
uses(NORMS, "GemmaRMSNorm", SINCE_0_23, why=_WHY)
uses("vllm.model_executor.models.utils", "make_layers", SINCE_0_23, why=_WHY)


class NotCanonicalError(Exception):
    """The source of a class is not canonical. The text names the class and the difference."""


@dataclass(frozen=True)
class Decoder:
    """A canonical decoder.

    Attributes:
        owner: attribute of the served class that holds the decoder.
        decoder: class of the decoder.
        layer, forward: class of the layers, and a forward that also returns the collected states.
            None if the decoder collects by itself and only the served class lacks the interface.
    """

    owner: str
    decoder: type[torch.nn.Module]
    layer: type[torch.nn.Module] | None
    forward: Callable[..., Any] | None


@dataclass(frozen=True)
class _Loop:
    """The loop over the layers.

    Attributes:
        function: the forward that contains the loop.
        statement: the `for` statement.
        call: the call of a layer.
        hidden, residual: names of the two tensors; `residual` is None if there is one tensor.
    """

    function: ast.FunctionDef
    statement: ast.For
    call: ast.Call
    hidden: str
    residual: str | None


def recognise(served: type[torch.nn.Module]) -> Decoder:
    """Return the decoder of a served class.

    Args:
        served: class from vLLM's registry, for example Glm4MoeForCausalLM.

    Raises:
        NotCanonicalError: if the class, the decoder or a layer is not canonical.
    """
    owner = attribute_of_self(passed_on(served))
    if owner is None:
        raise NotCanonicalError(
            f"{served.__name__}.forward does not return the unchanged output of a decoder"
        )
    decoder = class_of(served, owner)
    if "_maybe_add_hidden_state" in inspect.getsource(decoder.forward):
        return Decoder(owner, decoder, None, None)
    layer = _class_of_layers(decoder)
    loop = _loop_of(_plain_function(decoder), decoder)
    adds = loop.residual is not None and _adds_residual(loop, layer)
    _check_end(loop, decoder, adds)
    return Decoder(owner, decoder, layer, _with_collection(loop, decoder, adds))


def collect(
    self: Any,
    states: list[torch.Tensor],
    index: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Append the stream after `index` layers to `states` if it is extracted, and return `states`.

    Args:
        self: the decoder. `aux_hidden_state_layers` has the ids to extract.
        states: the streams so far, each [tokens, hidden].
        index: number of layers.
        hidden, residual: [tokens, hidden]; the stream is their sum.
    """
    if index in self.aux_hidden_state_layers:
        # The next layer may write into this tensor.
        states.append(hidden.clone() if residual is None else hidden + residual)
    return states


# The served class


def passed_on(served: type[torch.nn.Module]) -> ast.expr:
    """Return the callee whose unchanged output the forward of a served class returns.

    No other statement of the forward may name the output. The class must not override `__new__`,
    and must have no model state: a model state may call the forward several times (block
    diffusion).
    """
    for each in ("__new__", "get_model_state_cls"):
        if any(
            each in vars(base)
            for base in served.__mro__
            if base.__module__ not in (object.__module__, INTERFACES)
        ):
            raise NotCanonicalError(
                f"{served.__name__} has {each}, so its forward is not the whole computation"
            )
    tree = _parse(_plain_function(served))
    last = tree.body[-1]
    returned = last.value if isinstance(last, ast.Return) else None
    if isinstance(returned, ast.Name):
        name = returned.id
        made = [
            each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and _assigns(each, name)
        ]
        named = [each for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id == name]
        returned = made[0] if len(made) == 1 and len(named) == 2 else None
    returns = [each for each in ast.walk(tree) if isinstance(each, ast.Return)]
    if len(returns) == 1 and isinstance(returned, ast.Call):
        return returned.func
    raise NotCanonicalError(
        f"{served.__name__}.forward does not return the unchanged output of a decoder"
    )


def assignment(
    served: type[torch.nn.Module], attribute: str
) -> tuple[type, ast.FunctionDef, ast.expr]:
    """Return class and constructor that assign an attribute, and the assigned value."""
    for owner, constructor in _constructors(served):
        for node in ast.walk(constructor):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if attribute in map(attribute_of_self, targets):
                return owner, constructor, node.value
    raise NotCanonicalError(f"no constructor of {served.__name__} assigns {attribute}")


def class_of(served: type[torch.nn.Module], attribute: str) -> type[torch.nn.Module]:
    """Return the class of an attribute, from the assignment in a constructor."""
    owner, constructor, value = assignment(served, attribute)
    made = value.func if isinstance(value, ast.Call) else value
    method = getattr(served, attribute_of_self(made) or "", None)
    found = (
        _returned_by(method)
        if isinstance(method, FunctionType)
        else _resolved(made, owner, constructor, owner is served)
    )
    if _is_module(found):
        return found
    raise NotCanonicalError(f"{owner.__name__} creates {attribute} with {ast.unparse(made)}")


def _returned_by(method: FunctionType) -> object:
    """Return the class that a method instantiates and returns, or None."""
    returns = [each.value for each in ast.walk(_parse(method)) if isinstance(each, ast.Return)]
    made = returns[0].func if len(returns) == 1 and isinstance(returns[0], ast.Call) else None
    return None if made is None else vars(sys.modules[method.__module__]).get(ast.unparse(made))


# The decoder


def _class_of_layers(decoder: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class that a decoder passes to make_layers (model_executor/models/utils.py)."""
    for owner, constructor in _constructors(decoder):
        for node in ast.walk(constructor):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "make_layers":
                maker = node.args[1] if len(node.args) > 1 else None
                if isinstance(maker, ast.Lambda) and isinstance(maker.body, ast.Call):
                    found = _resolved(maker.body.func, owner, constructor, owner is decoder)
                    if _is_module(found):
                        return found
                raise NotCanonicalError(f"{owner.__name__} makes layers of more than one class")
    raise NotCanonicalError(f"{decoder.__name__} does not create its layers with make_layers")


def _loop_of(function: Callable[..., Any], decoder: type[torch.nn.Module]) -> _Loop:
    """Return the only loop of a forward. It must only call a layer."""
    tree = _parse(function)
    loops = [
        node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.comprehension)
    ]
    loop = loops[0] if len(loops) == 1 else None
    if (
        not isinstance(loop, ast.For)
        or loop not in tree.body
        or not (layer := _layer_variable(loop))
    ):
        raise NotCanonicalError(
            f"{decoder.__name__}.forward has no loop that only calls its layers"
        )
    body = loop.body[0]
    if len(loop.body) == 1 and isinstance(body, ast.Assign) and isinstance(body.value, ast.Call):
        names, given = (
            _names(body.targets[0]),
            [*body.value.args, *(each.value for each in body.value.keywords)],
        )
        read = [each.id for each in given if isinstance(each, ast.Name)]
        if (
            ast.unparse(body.value.func) == layer
            and 1 <= len(names) <= 2
            and all(read.count(name) == 1 for name in names)
        ):
            return _Loop(tree, loop, body.value, names[0], names[1] if len(names) == 2 else None)
    raise NotCanonicalError(
        f"the loop of {decoder.__name__}.forward does more than `hidden, residual = layer(..., "
        "hidden, residual)`"
    )


def _layer_variable(loop: ast.For) -> str | None:
    """Return the loop variable that holds the layer if the loop visits all layers in order."""
    over, target = loop.iter, loop.target
    if (
        isinstance(over, ast.Call)
        and ast.unparse(over.func) == "enumerate"
        and isinstance(target, ast.Tuple)
    ):
        over, target = over.args[0], target.elts[1]
    whole = (
        "self.layers",
        "islice(self.layers, self.start_layer, self.end_layer)",
        "self.layers[self.start_layer:self.end_layer]",
    )
    return target.id if isinstance(target, ast.Name) and ast.unparse(over) in whole else None


def _adds_residual(loop: _Loop, layer: type[torch.nn.Module]) -> bool:
    """Return True if a layer adds the residual, False if it overwrites it."""
    function = _plain_function(layer)
    parameters = list(inspect.signature(function).parameters)[1:]
    names = {
        each.id: name
        for each, name in zip(loop.call.args, parameters, strict=False)
        if isinstance(each, ast.Name)
    }
    names |= {
        each.value.id: each.arg
        for each in loop.call.keywords
        if isinstance(each.value, ast.Name) and each.arg
    }
    hidden, residual = names[loop.hidden], names[loop.residual or ""]
    first = next(
        (each for each in _body(_parse(function)) if residual in _read_or_written(each)), None
    )
    if (
        isinstance(first, ast.Assign)
        and _assigns(first, residual)
        and residual not in _read_or_written(first.value)
    ):
        return False
    if (
        isinstance(first, ast.If)
        and (norm := _norm_that_adds(first, hidden, residual))
        and _is_adding(layer, norm)
    ):
        return True
    raise NotCanonicalError(
        f"{layer.__name__}.forward does not begin with a norm that adds the residual"
    )


def _norm_that_adds(branch: ast.If, hidden: str, residual: str) -> str | None:
    """Return N of `if residual is None: ... else: hidden, residual = N(hidden, residual)`."""
    if (
        ast.unparse(branch.test) != f"{residual} is None"
        or len(branch.body) != 2
        or len(branch.orelse) != 1
    ):
        return None
    kept, normed = map(ast.unparse, branch.body)
    added = branch.orelse[0]
    norm = (
        attribute_of_self(added.value.func)
        if isinstance(added, ast.Assign) and isinstance(added.value, ast.Call)
        else None
    )
    is_canonical = (
        kept in (f"{residual} = {hidden}", f"{residual} = {hidden}.clone()")
        and normed == f"{hidden} = self.{norm}({hidden})"
        and ast.unparse(added) == f"{hidden}, {residual} = self.{norm}({hidden}, {residual})"
    )
    return norm if is_canonical else None


def _check_end(loop: _Loop, decoder: type[torch.nn.Module], adds: bool) -> None:
    """Check that a forward ends with the norm of the stream and returns the result.

    Raises:
        NotCanonicalError: if not.
    """
    hidden, residual = loop.hidden, loop.residual
    summed = (f"{hidden} = {hidden} + {residual}", f"{residual} = {hidden}")
    end = [
        each
        for each in loop.function.body[loop.function.body.index(loop.statement) + 1 :]
        if not _ends_a_stage(each)
    ]
    texts = [ast.unparse(each) for each in end]
    is_summed = adds and tuple(texts[: len(summed)]) == summed
    if is_summed:
        end, texts = end[len(summed) :], texts[len(summed) :]
    norm = _last_norm(end[0]) if len(end) == 2 and texts[-1] == f"return {hidden}" else None
    alone, added = (
        f"{hidden} = self.{norm}({hidden})",
        f"{hidden}, _ = self.{norm}({hidden}, {residual})",
    )
    either = (
        f"if {residual} is None:\n    {alone}\nelse:\n    {added}",
        f"if {residual} is not None:\n    {added}\nelse:\n    {alone}",
    )
    if (
        norm
        and adds
        and not is_summed
        and texts[0] in (added, *either)
        and _is_adding(decoder, norm)
    ):
        return
    if norm and (is_summed or not adds) and texts[0] == alone:
        return
    raise NotCanonicalError(
        f"{decoder.__name__}.forward does not end with the norm of its layers' output"
    )


def _ends_a_stage(statement: ast.stmt) -> bool:
    """Return True for a statement that serves pipeline stages. Extraction has one stage."""
    return (
        isinstance(statement, ast.If)
        and ast.unparse(statement.test) == "not get_pp_group().is_last_rank"
        and not statement.orelse
    )


def _last_norm(statement: ast.stmt) -> str | None:
    """Return the attribute of `self` that a statement calls."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return next(filter(None, map(attribute_of_self, calls)), None)


def _is_adding(owner: type[torch.nn.Module], attribute: str) -> bool:
    """Return True if an attribute is one of vLLM's ADDING_NORMS."""
    found = class_of(owner, attribute)
    return found.__module__ == NORMS and found.__name__ in ADDING_NORMS


def _with_collection(loop: _Loop, decoder: type[torch.nn.Module], adds: bool) -> Callable[..., Any]:
    """Compile a decoder's forward with calls of `collect` inserted."""
    original = _plain_function(decoder)
    residual = loop.residual if adds else "None"
    begin = (
        f"{INDEX} = 0\n{STATES} = self.{collect.__name__}([], {INDEX}, {loop.hidden}, {residual})"
    )
    step = f"{INDEX} += 1\nself.{collect.__name__}({STATES}, {INDEX}, {loop.hidden}, {residual})"
    tree = loop.function
    tree.decorator_list, tree.returns = [], None
    for argument in (
        *tree.args.posonlyargs,
        *tree.args.args,
        *tree.args.kwonlyargs,
        tree.args.vararg,
        tree.args.kwarg,
    ):
        if argument is not None:
            argument.annotation = None
    loop.statement.body += ast.parse(step).body
    at = tree.body.index(loop.statement)
    tree.body[at:at] = ast.parse(begin).body
    tree.body[-1:] = ast.parse(
        f"return ({loop.hidden}, {STATES}) if {STATES} else {loop.hidden}"
    ).body
    # Keep the original line numbers for tracebacks and inspect.getsource.
    module = ast.increment_lineno(
        ast.fix_missing_locations(ast.Module([tree], [])),
        original.__code__.co_firstlineno - tree.lineno,
    )
    made: dict[str, Callable[..., Any]] = {}
    exec(
        compile(module, inspect.getfile(original), "exec", dont_inherit=True),
        original.__globals__,
        made,
    )
    function = made[tree.name]
    function.__qualname__, function.__module__ = original.__qualname__, original.__module__
    return function


# Source code


def _plain_function(owner: type[torch.nn.Module]) -> FunctionType:
    """Return the forward of a class if the source can be compiled alone."""
    function: Any = owner.forward
    if (
        isinstance(function, FunctionType)
        and function.__closure__ is None
        and not hasattr(function, "__wrapped__")
    ):
        return function
    raise NotCanonicalError(f"{owner.__name__}.forward is wrapped")


def _parse(function: Callable[..., Any]) -> ast.FunctionDef:
    """Parse a method inside of a class statement, because the source is indented."""
    ((tree,),) = (
        each.body
        for each in ast.parse(f"class _:\n{inspect.getsource(function)}").body
        if isinstance(each, ast.ClassDef)
    )
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _constructors(owner: type[torch.nn.Module]) -> Iterator[tuple[type, ast.FunctionDef]]:
    """Yield the constructors of a class and base classes, from the sources of the classes.

    The decorator `support_torch_compile` replaces a constructor (compilation/decorators.py).
    """
    for each in owner.__mro__:
        if each.__module__.partition(".")[0] not in ("torch", "builtins", "typing"):
            (tree,) = ast.parse(inspect.getsource(each)).body
            assert isinstance(tree, ast.ClassDef)
            yield from (
                (each, node)
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name == "__init__"
            )


def _resolved(
    expression: ast.expr, owner: type, constructor: ast.FunctionDef, with_defaults: bool
) -> object:
    """Return the object of a name in a constructor: a global, or the default of a parameter.

    Args:
        expression: the name.
        owner: class of the constructor.
        constructor: constructor of the class.
        with_defaults: False for the constructor of a base class, because a subclass may pass other
            values.
    """
    arguments = constructor.args
    parameters = (*arguments.posonlyargs, *arguments.args)
    defaults = dict(
        zip((each.arg for each in parameters[::-1]), arguments.defaults[::-1], strict=False)
    )
    defaults |= {
        each.arg: value
        for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    }
    name = ast.unparse(expression)
    default = defaults.get(name)
    if default is not None and not with_defaults:
        return None
    return vars(sys.modules[owner.__module__]).get(
        name if default is None else ast.unparse(default)
    )


def _is_module(found: object) -> TypeGuard[type[torch.nn.Module]]:
    import torch

    return isinstance(found, type) and issubclass(found, torch.nn.Module)


def _body(tree: ast.FunctionDef) -> Sequence[Any]:
    """Return the statements of a function without the docstring."""
    return tree.body[1:] if ast.get_docstring(tree) is not None else tree.body


def attribute_of_self(expression: ast.AST) -> str | None:
    if (
        isinstance(expression, ast.Attribute)
        and isinstance(expression.value, ast.Name)
        and expression.value.id == "self"
    ):
        return expression.attr
    return None


def _assigns(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and [
        ast.unparse(each) for each in statement.targets
    ] == [name]


def _names(target: ast.expr) -> list[str]:
    """Return the names of an assignment's target; empty if it contains anything else."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return (
        [each.id for each in parts if isinstance(each, ast.Name)]
        if all(isinstance(each, ast.Name) for each in parts)
        else []
    )


def _read_or_written(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
