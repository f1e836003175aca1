"""DeepSeek's model returns the residual stream at both ends on request, and else stays vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from patching import apply

from vllm_ascend_hsx.compat.models import collect_both_ends

LAYERS = 3
# What layer i adds to the stream, and the embedding: every state is another number.
EMBEDDED, ADDED = 1, (10, 100, 1000)
STREAM = {0: 1, 1: 11, 2: 111, 3: 1111}


def module(config: Any = None) -> Any:
    """A model with vLLM's interfaces whose forward says that it was called."""

    class DeepseekV2Model:
        aux_hidden_state_layers: tuple[int, ...] = ()

        def __init__(self) -> None:
            self.config = config or SimpleNamespace()
            self.scalings: list[Any] = []
            self.layers = [self._layer(added) for added in ADDED]

        def _layer(self, added: int) -> Any:
            def layer(positions: Any, stream: int, residual: int | None, scaling: Any) -> tuple[int, int]:
                self.scalings.append(scaling)
                return added, stream if residual is None else stream + residual

            return layer

        def embed_input_ids(self, input_ids: int) -> int:
            return EMBEDDED * input_ids

        def norm(self, stream: int, residual: int) -> tuple[int, int]:
            return -(stream + residual), stream + residual

        def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> Any:
            return "vLLM's own", (input_ids, positions, intermediate_tensors, inputs_embeds)

    found = SimpleNamespace(DeepseekV2Model=DeepseekV2Model)
    apply(found, collect_both_ends)
    return found


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 3), (0, 1, 2, 3), (2, 3), (3, 0, 1)])
def test_states_are_returned_in_layer_order_with_both_ends(wanted: tuple[int, ...]) -> None:
    model = module().DeepseekV2Model()
    model.aux_hidden_state_layers = wanted
    assert model.forward(1, "positions", None) == (-STREAM[LAYERS], [STREAM[layer] for layer in sorted(wanted)])


def test_embeddings_that_are_given_are_not_computed() -> None:
    model = module().DeepseekV2Model()
    model.aux_hidden_state_layers = (0, 3)
    assert model.forward(None, "positions", None, 5) == (-1115, [5, 1115])


@pytest.mark.parametrize("wanted", [(), (1,), (2, 1)])
def test_a_model_that_is_asked_for_neither_end_is_untouched(wanted: tuple[int, ...]) -> None:
    model = module().DeepseekV2Model()
    model.aux_hidden_state_layers = wanted
    assert model.forward("ids", "positions", "intermediate", inputs_embeds="given") == (
        "vLLM's own", ("ids", "positions", "intermediate", "given")
    )


@pytest.mark.parametrize(
    ("options", "scaling"), [(None, None), ({"original_max_position_embeddings": 8, "beta": 0.1}, (8, 0.1, "positions"))]
)
def test_the_layers_get_the_scaling_of_the_model(monkeypatch: pytest.MonkeyPatch, options: Any, scaling: Any) -> None:
    monkeypatch.setattr("vllm.model_executor.models.deepseek_v2._get_llama_4_scaling", lambda *arguments: arguments)
    model = module(SimpleNamespace(llama_4_scaling=options)).DeepseekV2Model()
    model.aux_hidden_state_layers = (3,)
    model.forward(1, "positions", None)
    assert model.scalings == [scaling] * LAYERS
