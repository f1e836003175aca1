"""Recognise a class that wraps a language model and returns the unchanged output.

    self.language_model = init_vllm_registered_model(..., architectures=["Qwen2ForCausalLM"])

    hidden = self.language_model.model(...)
    return hidden

Most multimodal classes of vLLM are such wrappers. A wrapper is accepted if the language model is.
Code and configuration must name the class in one of these ways; any other wrapper is refused.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_hsx.compat.canonical import (
    NotCanonicalError,
    assignment,
    attribute_of_self,
    class_of,
    collect,
    passed_on,
)
from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23

if TYPE_CHECKING:
    import torch

MAKER = "init_vllm_registered_model"
_WHY = "multimodal targets without SupportsEagle3 can be extracted"
uses(
    "vllm.model_executor.models.utils",
    MAKER,
    SINCE_0_23,
    takes="vllm_config",
    keywords="hf_config architectures",
    why=_WHY,
)


@dataclass(frozen=True)
class Wrapper:
    """The structure of a multimodal class that passes hidden states to a language model.

    Attributes:
        owner: attribute that holds the language model.
        part: attribute of the language model that the wrapper calls; None if it calls the model.
        made: class of the language model, or the architectures that the code names. An empty tuple
            means the architectures of the text config.
    """

    owner: str
    part: str | None
    made: type[torch.nn.Module] | tuple[str, ...]


def wrapper_of(served: type[torch.nn.Module]) -> Wrapper | None:
    """Return the wrapper that a served class is, or None if it calls a decoder.

    Raises:
        NotCanonicalError: if the class is neither.
    """
    callee, part = passed_on(served), None
    if attribute_of_self(callee) is None and isinstance(callee, ast.Attribute):
        part, callee = callee.attr, callee.value
    owner = attribute_of_self(callee)
    if owner is None:
        raise NotCanonicalError(
            f"{served.__name__}.forward calls {ast.unparse(callee)}, which no constructor creates"
        )
    maker, constructor, value = assignment(served, owner)
    if isinstance(value, ast.Call) and ast.unparse(value.func) == MAKER:
        return Wrapper(owner, part, _architectures(value, maker, constructor))
    found = class_of(served, owner)
    if hasattr(found, "compute_logits"):
        # vLLM uses the name in the config, for example to choose weights and caches.
        if not _named_in(value) <= {found.__name__}:
            raise NotCanonicalError(
                f"{maker.__name__} gives {owner} a config that names another class than "
                f"{found.__name__}"
            )
        return Wrapper(owner, part, found)
    if part is None:
        return None
    raise NotCanonicalError(
        f"{served.__name__}.forward calls a part of {found.__name__}, which is not a language model"
    )


def check_part(wrapper: Wrapper, language_model: type[torch.nn.Module]) -> None:
    """Check that the called part of a language model with SupportsEagle3 collects.

    Raises:
        NotCanonicalError: if not.
    """
    decoder = class_of(language_model, wrapper.part) if wrapper.part else None
    if (
        decoder
        and not hasattr(decoder, collect.__name__)
        and "aux_hidden_state" not in inspect.getsource(decoder.forward)
    ):
        raise NotCanonicalError(f"the {wrapper.part} of {language_model.__name__} does not collect")


def _architectures(call: ast.Call, maker: type, constructor: ast.FunctionDef) -> tuple[str, ...]:
    """Return the architectures in a call of MAKER; empty if the text config names them."""
    given = {each.arg: each.value for each in call.keywords}
    inner = given.get("vllm_config")
    if (
        isinstance(inner, ast.Call)
        and ast.unparse(inner.func) == "vllm_config.with_hf_config"
        and inner.args
    ):
        given = {"hf_config": inner.args[0], **{each.arg: each.value for each in inner.keywords}}
    named, config = given.get("architectures"), given.get("hf_config")
    if (
        isinstance(named, ast.List)
        and named.elts
        and all(isinstance(each, ast.Constant) for each in named.elts)
    ):
        return tuple(ast.literal_eval(named))
    if (
        named is None
        and config is not None
        and _traced(config, constructor) == "vllm_config.model_config.hf_config.text_config"
    ):
        return ()
    raise NotCanonicalError(
        f"neither the code of {maker.__name__} nor text_config names the class of its "
        "language model"
    )


def _named_in(call: ast.expr) -> set[str]:
    """Return the architectures in the literal lists of a call."""
    lists = [
        each.value
        for each in ast.walk(call)
        if isinstance(each, ast.keyword) and each.arg == "architectures"
    ]
    return {
        node.value
        for each in lists
        for node in ast.walk(each)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _traced(expression: ast.expr, constructor: ast.FunctionDef) -> str:
    """Replace names that the constructor assigns once by their values."""
    assigned = [
        (ast.unparse(target), node.value)
        for node in ast.walk(constructor)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    text = ast.unparse(expression)
    values = [value for name, value in assigned if name == text]
    if len(values) == 1:
        return _traced(values[0], constructor)
    if isinstance(expression, ast.Attribute) and not values:
        return f"{_traced(expression.value, constructor)}.{expression.attr}"
    return text if not values else ""
