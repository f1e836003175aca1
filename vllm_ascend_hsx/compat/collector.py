"""Make a served class return hidden states, with or without vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_ascend_hsx.compat.canonical import INTERFACES, NotCanonicalError, collect, recognise
from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23
from vllm_ascend_hsx.compat.wrappers import Wrapper, check_part, wrapper_of

if TYPE_CHECKING:
    import torch

BACKEND = "vllm.model_executor.models.transformers"
_WHY = "targets without SupportsEagle3 can be extracted"
uses(
    INTERFACES,
    "supports_eagle3",
    SINCE_0_23,
    takes="model",
    why="the runner can ask whether a target collects",
)
uses(INTERFACES, "SupportsEagle3", SINCE_0_23, why=_WHY)


class Collection(Enum):
    """The code that collects the hidden states of a served class.

    ITSELF: the class has SupportsEagle3. BACKEND: vLLM's Transformers backend collects with hooks.
    OURS: our calls between the layers of a canonical decoder collect. LANGUAGE_MODEL: the class
    wraps a language model that collects. The text config names the class of the language model.
    """

    ITSELF = "the class itself"
    BACKEND = "vLLM's Transformers backend"
    OURS = "the collector"
    LANGUAGE_MODEL = "its language model"


# Returns the class of the first architecture that vLLM registers. Without architectures: the class
# that the text config names, or None without a text config.
Resolve = Callable[[Sequence[str]], "type[torch.nn.Module] | None"]


def collection_of(served: type[torch.nn.Module], resolve: Resolve) -> Collection:
    """Return the collector of a served class. Raises NotCanonicalError if there is none."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if supports_eagle3(served):
        return Collection.BACKEND if served.__module__.startswith(BACKEND) else Collection.ITSELF
    wrapper = wrapper_of(served)
    if wrapper is None:
        recognise(served)
        return Collection.OURS
    language_model = _language_model(wrapper, resolve)
    if language_model is not None:
        _check_language_model(wrapper, language_model, resolve)
    return Collection.OURS if wrapper.made else Collection.LANGUAGE_MODEL


def make_collecting(served: type[torch.nn.Module], resolve: Resolve) -> Collection:
    """Make a served class return hidden states. Call it before the class is instantiated.

    Reason: the runner calls `supports_eagle3` and `set_aux_hidden_state_layers` (MR:3758 and the
    lines after it). `support_torch_compile` compiles the forward that the class has when an
    instance is created (vllm/compilation/wrapper.py:127, 0.23.0).

    Raises:
        NotCanonicalError: if the class has neither the interface nor a canonical decoder.
    """
    collection = collection_of(served, resolve)
    if collection in (Collection.ITSELF, Collection.BACKEND):
        return collection
    if (wrapper := wrapper_of(served)) is None:
        _make_decoder_collecting(served)
        return collection
    language_model = _language_model(wrapper, resolve)
    if language_model is None:
        raise NotCanonicalError(
            f"the configuration of {served.__name__} does not name the class of its language model"
        )
    make_collecting(language_model, resolve)
    _delegate(served, wrapper.owner, language_model)
    return collection


def _language_model(wrapper: Wrapper, resolve: Resolve) -> type[torch.nn.Module] | None:
    return resolve(wrapper.made) if isinstance(wrapper.made, tuple) else wrapper.made


def _check_language_model(
    wrapper: Wrapper, language_model: type[torch.nn.Module], resolve: Resolve
) -> None:
    """Check that the callee of a wrapper returns hidden states. Raises NotCanonicalError if not."""
    collection = collection_of(language_model, resolve)
    if collection is Collection.ITSELF:
        check_part(wrapper, language_model)
    elif collection is not Collection.OURS or wrapper_of(language_model) is not None:
        raise NotCanonicalError(
            f"the language model {language_model.__name__} wraps another language model, "
            "or is vLLM's backend"
        )
    elif wrapper.part not in (None, recognise(language_model).owner):
        raise NotCanonicalError(
            f"the {wrapper.part} of {language_model.__name__} is not its decoder"
        )


def _make_decoder_collecting(served: type[torch.nn.Module]) -> None:
    found = recognise(served)
    if found.forward is not None:
        decoder: Any = found.decoder
        decoder.forward, decoder.collect, decoder.aux_hidden_state_layers = (
            found.forward,
            collect,
            (),
        )

    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        decoder = getattr(self, found.owner)
        found_there = {
            type(decoder),
            *(type(each) for each in decoder.layers if found.layer is not None),
        }
        if other := found_there - {found.decoder, found.layer}:
            names = ", ".join(sorted(each.__name__ for each in other))
            raise NotCanonicalError(
                f"{type(self).__name__} has {names}, but other attributes were checked"
            )
        decoder.aux_hidden_state_layers = layers

    _add_interface(served, set_aux_hidden_state_layers)


def _delegate(served: type[torch.nn.Module], owner: str, language_model: Any) -> None:
    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        found = getattr(self, owner)
        if type(found) is not language_model:
            raise NotCanonicalError(
                f"{type(self).__name__} has {type(found).__name__}, but "
                f"{language_model.__name__} was checked"
            )
        found.set_aux_hidden_state_layers(layers)

    _add_interface(served, set_aux_hidden_state_layers)


def _add_interface(
    served: Any, set_aux_hidden_state_layers: Callable[[Any, tuple[int, ...]], None]
) -> None:
    """Give a class vLLM's interface SupportsEagle3 (models/interfaces.py:1317, 0.23.0)."""
    from vllm.model_executor.models.interfaces import SupportsEagle3

    served.supports_eagle3 = True
    served.has_own_lm_head = served.has_own_embed_tokens = False
    served.set_aux_hidden_state_layers = set_aux_hidden_state_layers
    served.get_eagle3_default_aux_hidden_state_layers = (
        SupportsEagle3.get_eagle3_default_aux_hidden_state_layers
    )
