"""DeepSeek's model returns the residual stream at both ends on request; otherwise it is vLLM's.

vLLM 0.23 collects neither end, 0.26 the last state.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patching import apply

from vllm_ascend_hsx.compat.targets import collect_both_ends, collect_embedding

LAYERS = 3
# The embedding, and the addition of each layer to the stream. All states are different numbers.
EMBEDDED, ADDED = 1, (10, 100, 1000)
STREAM = {0: 1, 1: 11, 2: 111, 3: 1111}


def module(config: Any = None) -> Any:
    """Return a model with vLLM's interfaces that records the calls of forward."""

    class DeepseekV2Model:
        aux_hidden_state_layers: tuple[int, ...] = ()

        def __init__(self) -> None:
            self.config = config or SimpleNamespace()
            self.scalings: list[Any] = []
            self.layers = [self._layer(added) for added in ADDED]

        def _layer(self, added: int) -> Any:
            def layer(
                positions: Any, stream: int, residual: int | None, scaling: Any
            ) -> tuple[int, int]:
                self.scalings.append(scaling)
                return added, stream if residual is None else stream + residual

            return layer

        def embed_input_ids(self, input_ids: int) -> int:
            return EMBEDDED * input_ids

        def norm(self, stream: int, residual: int) -> tuple[int, int]:
            return -(stream + residual), stream + residual

        def forward(
            self,
            input_ids: Any,
            positions: Any,
            intermediate_tensors: Any,
            inputs_embeds: Any = None,
        ) -> Any:
            return "vLLM's own", (input_ids, positions, intermediate_tensors, inputs_embeds)

    found = SimpleNamespace(DeepseekV2Model=DeepseekV2Model)
    apply(found, collect_both_ends)
    return found


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 3), (0, 1, 2, 3), (2, 3), (3, 0, 1)])
def test_states_are_returned_in_layer_order_with_both_ends(wanted: tuple[int, ...]) -> None:
    model = module().DeepseekV2Model()
    model.aux_hidden_state_layers = wanted
    assert model.forward(1, "positions", None) == (
        -STREAM[LAYERS],
        [STREAM[layer] for layer in sorted(wanted)],
    )


def test_given_embeddings_are_not_computed_again() -> None:
    model = module().DeepseekV2Model()
    model.aux_hidden_state_layers = (0, 3)
    assert model.forward(None, "positions", None, 5) == (-1115, [5, 1115])


@pytest.mark.parametrize("wanted", [(), (1,), (2, 1)])
def test_model_without_requested_ends_is_called_unchanged(wanted: tuple[int, ...]) -> None:
    model = module().DeepseekV2Model()
    model.aux_hidden_state_layers = wanted
    assert model.forward("ids", "positions", "intermediate", inputs_embeds="given") == (
        "vLLM's own",
        ("ids", "positions", "intermediate", "given"),
    )


@pytest.mark.parametrize(
    ("options", "scaling"),
    [(None, None), ({"original_max_position_embeddings": 8, "beta": 0.1}, (8, 0.1, "positions"))],
)
def test_layers_get_the_models_scaling(
    monkeypatch: pytest.MonkeyPatch, options: Any, scaling: Any
) -> None:
    monkeypatch.setattr(
        "vllm.model_executor.models.deepseek_v2._get_llama_4_scaling", lambda *arguments: arguments
    )
    model = module(SimpleNamespace(llama_4_scaling=options)).DeepseekV2Model()
    model.aux_hidden_state_layers = (3,)
    model.forward(1, "positions", None)
    assert model.scalings == [scaling] * LAYERS


class CollectingModel:
    """The model of vLLM 0.26, whose layers write into their input tensor."""

    aux_hidden_state_layers: tuple[int, ...] = ()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.float()

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> Any:
        stream = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        collected = []
        for index, added in enumerate((*ADDED, 0)):
            if index in self.aux_hidden_state_layers:
                assert index > 0, "the residual is None"
                collected.append(stream.clone())
            stream += added
        return (stream, collected) if collected else stream


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 3), (0, 1, 2, 3), (2, 3), (3, 0, 1), ()])
@pytest.mark.parametrize("given", [False, True])
def test_embedding_is_added_to_the_collected_states(wanted: tuple[int, ...], given: bool) -> None:
    found = SimpleNamespace(DeepseekV2Model=type("DeepseekV2Model", (CollectingModel,), {}))
    apply(found, collect_embedding)
    model, ones = found.DeepseekV2Model(), torch.ones(2)
    model.aux_hidden_state_layers = wanted
    output = (
        model.forward(None, "positions", None, ones)
        if given
        else model.forward(ones, "positions", None)
    )
    last, collected = output if isinstance(output, tuple) else (output, [])
    assert last.tolist() == [STREAM[LAYERS]] * 2
    assert [each.tolist() for each in collected] == [
        [STREAM[layer]] * 2 for layer in sorted(wanted)
    ]
    assert model.aux_hidden_state_layers == wanted
