"""A decoder with canonical code is collected. Another decoder is refused with the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from record_architectures import registered
from torch import nn

from vllm_ascend_hsx.compat.canonical import NotCanonicalError, recognise
from vllm_ascend_hsx.compat.collector import Collection, collection_of, make_collecting

TOKENS, HIDDEN, LAYERS = 5, 8, 3


class RMSNorm(nn.Module):
    """Like vLLM's, with the same name: adds a residual, normalises, and returns the sum."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = drawn(seed, HIDDEN)

    def forward(self, x: Any, residual: Any = None) -> Any:
        total = x if residual is None else x + residual
        normed = total / total.pow(2).mean(-1, keepdim=True).sqrt() * self.weight
        return normed if residual is None else (normed, total)


class LayerNorm(RMSNorm):
    """Like Cohere's in vLLM: takes a residual, and does not add it."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        return super().forward(x), residual


RMSNorm.__module__ = "vllm.model_executor.layers.layernorm"


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layers(number: int, make: Callable[[int], nn.Module]) -> tuple[int, int, nn.ModuleList]:
    return 0, number, nn.ModuleList(make(index) for index in range(number))


def get_pp_group() -> Any:
    return SimpleNamespace(is_first_rank=True, is_last_rank=True)


class Base(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.mix = drawn(seed, HIDDEN, HIDDEN) / HIDDEN**0.5
        self.norm = RMSNorm(seed + 100)


class PreNormLayer(Base):
    """Like Qwen2-MoE, Mixtral or GLM-4.x."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        return hidden_states @ self.mix, residual


class PostNormLayer(Base):
    """Like EXAONE-4: it ignores the residual."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        hidden_states = residual + self.norm(hidden_states @ self.mix)
        return hidden_states, residual


class OneTensorLayer(Base):
    """Like OLMo-2; writes into the input tensor."""

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        hidden_states += self.norm(hidden_states @ self.mix)
        return hidden_states


class Decoder(nn.Module):
    embed_scale = 3.0

    def embed_input_ids(self, input_ids: Any) -> Any:
        return drawn(7, 100, HIDDEN)[input_ids]


class PreNormModel(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: PreNormLayer(index)
        )
        self.norm = RMSNorm(50)

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Any:
        """Compute."""
        if get_pp_group().is_first_rank:
            hidden_states = (
                self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            )
            hidden_states = hidden_states * self.embed_scale
            residual = None
        else:
            residual = intermediate_tensors["residual"]
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            return {"residual": residual}
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class PostNormModel(Decoder):
    def __init__(self, layer_type: type[nn.Module] = PostNormLayer) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: layer_type(index)
        )
        self.norm = RMSNorm(50)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for _, layer in enumerate(self.layers):
            hidden_states, residual = layer(
                hidden_states=hidden_states, positions=positions, residual=residual
            )
        hidden_states = self.norm(hidden_states)
        return hidden_states


class SummedModel(PreNormModel):
    """Like Hy3."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for _, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer)):
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states


class OneTensorModel(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: OneTensorLayer(index)
        )
        self.norm = RMSNorm(50)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids)
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states = layer(positions, hidden_states)
        hidden_states = self.norm(hidden_states)
        return hidden_states


class Served(nn.Module):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.model(input_ids, positions)
        return hidden_states


class PreNorm(Served):
    def __init__(self) -> None:
        super().__init__()
        self.model = PreNormModel()


class PostNorm(Served):
    def __init__(self) -> None:
        super().__init__()
        self.model = PostNormModel()


class Summed(Served):
    def __init__(self) -> None:
        super().__init__()
        self.model = SummedModel()


class OneTensor(Served):
    def __init__(self) -> None:
        super().__init__()
        self.model = OneTensorModel()

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.model(input_ids, positions)


SERVED = {
    PreNormModel: PreNorm,
    PostNormModel: PostNorm,
    SummedModel: Summed,
    OneTensorModel: OneTensor,
}


def streams(served: Any, input_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the embedding and the stream after each layer, computed layer by layer."""
    decoder = served.model
    stream = decoder.embed_input_ids(input_ids)
    if type(decoder) is PreNormModel:
        stream = stream * decoder.embed_scale
    found = [stream]
    for layer in decoder.layers:
        if isinstance(layer, PreNormLayer):
            stream = stream + layer.norm(stream) @ layer.mix
        else:
            stream = stream + layer.norm(stream @ layer.mix)
        found.append(stream)
    return found


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (1,), (3,), (0, 3)])
@pytest.mark.parametrize("served", SERVED.values())
def test_stream_after_each_extracted_layer_is_collected_and_output_is_unchanged(
    served: Any, wanted: tuple[int, ...]
) -> None:
    input_ids, positions = torch.arange(TOKENS) * 7, torch.arange(TOKENS)
    plain = served()
    expected, output = streams(plain, input_ids), plain(input_ids, positions)
    found = recognise(served) if not hasattr(served, "supports_eagle3") else None
    make_collecting(served, registered)
    model = served()
    assert torch.equal(model(input_ids, positions), output)  # nothing is extracted yet
    model.set_aux_hidden_state_layers(wanted)
    same, collected = model(input_ids, positions)
    assert torch.equal(same, output)
    assert len(collected) == len(wanted)
    for index, rows in zip(wanted, collected, strict=True):
        torch.testing.assert_close(rows, expected[index])
    assert found is None or (found.owner, found.decoder) == ("model", type(model.model))


def test_unchecked_layer_classes_are_refused() -> None:
    class Given(PostNorm):
        def __init__(self) -> None:
            super().__init__()
            self.model = PostNormModel(PreNormLayer)

    make_collecting(PostNorm, registered)
    with pytest.raises(
        NotCanonicalError, match="Given has PreNormLayer, but other attributes were checked"
    ):
        Given().set_aux_hidden_state_layers((1,))  # type: ignore[operator]


# Refused code


class Wrapped(PreNorm):
    forward = functools.wraps(PreNorm.forward)(lambda self, *arguments: self.model(*arguments))


class Scaled(PreNorm):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.model(input_ids, positions)
        return hidden_states * 2


class Unnamed(Served):
    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.model = decoder()


class LoopedModel(PreNormModel):
    """Like Ouro: the layers are called several times."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for _ in range(2):
            for layer in self.layers:
                hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class HyperConnectionModel(OneTensorModel):
    """Like DeepSeek-V4: several streams per token, joined after the last layer."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids).unsqueeze(1).repeat(1, 4, 1)
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states)
        hidden_states = hidden_states.mean(1)
        hidden_states = self.norm(hidden_states)
        return hidden_states


class SkippingModel(PreNormModel):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for layer in self.layers[1:]:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class AddingModel(PreNormModel):
    """Like StableLM in vLLM 0.23: it adds after each layer."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
            hidden_states = hidden_states * 0.5
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class ForgetfulModel(PreNormModel):
    """The last norm does not add the residual that the layers add."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states = self.norm(hidden_states)
        return hidden_states


class CohereModel(PostNormModel):
    """The last norm takes a residual and ignores it."""

    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: PostNormLayer(index)
        )
        self.norm = LayerNorm(50)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states, residual = self.embed_input_ids(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class OddNormLayer(Base):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.norm = LayerNorm(seed)

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        return hidden_states @ self.mix, residual


class OddNormModel(PreNormModel):
    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: OddNormLayer(index)
        )


class HybridModel(PreNormModel):
    def __init__(self) -> None:
        super().__init__()
        kinds = {0: PreNormLayer, 1: PostNormLayer}
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: kinds[index % 2](index)
        )


class GivenLayers(PostNormModel):
    """A subclass passes another layer than the default of the base class."""

    def __init__(self) -> None:
        super().__init__(layer_type=PreNormLayer)


REFUSED = {
    Wrapped: "Wrapped.forward is wrapped",
    Scaled: "Scaled.forward does not return the unchanged output of a decoder",
    Unnamed: "Unnamed creates model with decoder",
    LoopedModel: "LoopedModel.forward has no loop that only calls its layers",
    SkippingModel: "SkippingModel.forward has no loop that only calls its layers",
    AddingModel: "the loop of AddingModel.forward does more than",
    HyperConnectionModel: "HyperConnectionModel.forward does not end with the norm",
    ForgetfulModel: "ForgetfulModel.forward does not end with the norm",
    CohereModel: "CohereModel.forward does not end with the norm",
    OddNormModel: "OddNormLayer.forward does not begin with a norm that adds the residual",
    HybridModel: "HybridModel makes layers of more than one class",
    GivenLayers: "PostNormModel makes layers of more than one class",
}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda each: each.__name__)
def test_noncanonical_code_is_refused_with_the_reason(
    refused: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = refused
    if issubclass(refused, Decoder):
        served = PreNorm
        monkeypatch.setitem(globals(), "PreNormModel", refused)
    with pytest.raises(NotCanonicalError) as error:
        recognise(served)
    assert REFUSED[refused] in str(error.value)


def test_collector_of_a_vllm_class_is_ours_or_the_class_itself() -> None:
    from vllm.model_executor.models.mixtral import MixtralForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    assert collection_of(MixtralForCausalLM, registered) is Collection.OURS
    assert collection_of(Qwen3ForCausalLM, registered) is Collection.ITSELF
