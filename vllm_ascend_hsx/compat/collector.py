"""Have a served class return hidden states, whether or not it has vLLM's interface for them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_ascend_hsx.compat.canonical import Decoder, NotCanonicalError, collect, recognise
from vllm_ascend_hsx.compat.patch_points import uses
from vllm_ascend_hsx.compat.versions import SINCE_0_23

if TYPE_CHECKING:
    import torch

INTERFACES = "vllm.model_executor.models.interfaces"
BACKEND = "vllm.model_executor.models.transformers"
_WHY = "targets without SupportsEagle3 are collected"
uses(INTERFACES, "supports_eagle3", SINCE_0_23, takes="model", why="the runner asks whether a target collects")
uses(INTERFACES, "SupportsEagle3", SINCE_0_23, why=_WHY)


class Collection(Enum):
    """Who collects the hidden states of a served class.

    ITSELF: the class, which has SupportsEagle3. BACKEND: vLLM's Transformers backend, by hooks.
    OURS: our calls between the layers of a canonical decoder.
    """

    ITSELF = "the class itself"
    BACKEND = "vLLM's Transformers backend"
    OURS = "the collector"


def collection_of(served: type[torch.nn.Module]) -> Collection:
    """Return who collects the states of a served class. Raises NotCanonicalError if nobody does."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if supports_eagle3(served):
        return Collection.BACKEND if served.__module__.startswith(BACKEND) else Collection.ITSELF
    recognise(served)
    return Collection.OURS


def make_collecting(served: type[torch.nn.Module]) -> Collection:
    """Have a served class return hidden states. Call it before the class is instantiated.

    Reason: the runner asks `supports_eagle3` and calls `set_aux_hidden_state_layers` (MR:3758 and
    the lines after it). `support_torch_compile` compiles the forward that the class has when an
    instance is made (vllm/compilation/wrapper.py:127, 0.23.0).

    Raises:
        NotCanonicalError: if the class has neither the interface nor a canonical decoder.
    """
    collection = collection_of(served)
    if collection is Collection.OURS:
        found = recognise(served)
        if found.forward is not None:
            decoder: Any = found.decoder
            decoder.forward, decoder.collect, decoder.aux_hidden_state_layers = found.forward, collect, ()
        _add_interface(served, found)
    return collection


def _add_interface(served: Any, found: Decoder) -> None:
    """Give a class vLLM's interface SupportsEagle3 (models/interfaces.py:1317, 0.23.0)."""
    from vllm.model_executor.models.interfaces import SupportsEagle3

    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        decoder = getattr(self, found.owner)
        found_there = {type(decoder), *(type(each) for each in decoder.layers if found.layer is not None)}
        if other := found_there - {found.decoder, found.layer}:
            names = ", ".join(sorted(each.__name__ for each in other))
            raise NotCanonicalError(f"{type(self).__name__} has {names}, and others were checked")
        decoder.aux_hidden_state_layers = layers

    served.supports_eagle3 = True
    served.has_own_lm_head = served.has_own_embed_tokens = False
    served.set_aux_hidden_state_layers = set_aux_hidden_state_layers
    served.get_eagle3_default_aux_hidden_state_layers = SupportsEagle3.get_eagle3_default_aux_hidden_state_layers
