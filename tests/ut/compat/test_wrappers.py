"""A class that wraps a language model collects through it, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_canonical import (
    LAYERS,
    TOKENS,
    AddingModel,
    Decoder,
    OneTensorLayer,
    OneTensorModel,
    PreNormModel,
    RMSNorm,
    make_layers,
    streams,
)
from torch import nn

from vllm_ascend_hsx.compat.canonical import NotCanonicalError
from vllm_ascend_hsx.compat.collector import Collection, collection_of, make_collecting

INPUT_IDS, POSITIONS = torch.arange(TOKENS) * 7, torch.arange(TOKENS)
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(hf_config=SimpleNamespace(text_config="", vision_config=""))
)


class Language(nn.Module):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.model(input_ids, positions)

    def compute_logits(self) -> None:
        """Every language model of vLLM has it."""


class TextForCausalLM(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = PreNormModel()


class DeepstackForCausalLM(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = AddingModel()


def init_vllm_registered_model(
    vllm_config: Any, hf_config: Any = None, architectures: Any = None
) -> nn.Module:
    return TextForCausalLM()


def resolve(architectures: Sequence[str]) -> Any:
    return globals()[architectures[0]] if architectures else TextForCausalLM


class Wrapper(nn.Module):
    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any = None) -> Any:
        if intermediate_tensors is not None:
            input_ids = None
        hidden_states = self.language_model.model(input_ids, positions)
        self.features = None
        return hidden_states


class NamedInCode(Wrapper):
    """Like Qwen2-VL."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, architectures=["TextForCausalLM"]
        )


class NamedInConfig(Wrapper):
    """Like DeepSeek-OCR."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.text_config = config.text_config
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=self.text_config
        )


class NamedAsClass(Wrapper):
    """Like PaddleOCR-VL: it calls the whole language model."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model: nn.Module = TextForCausalLM()

    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.language_model(input_ids, positions)


class MadeByMethod(Wrapper):
    """Like MiniCPM-V."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model = self.init_llm()

    def init_llm(self) -> nn.Module:
        return TextForCausalLM()


WRAPPERS = {
    NamedInCode: Collection.OURS,
    NamedInConfig: Collection.LANGUAGE_MODEL,
    NamedAsClass: Collection.OURS,
    MadeByMethod: Collection.OURS,
}


@pytest.mark.parametrize("served", WRAPPERS, ids=lambda each: each.__name__)
def test_a_wrapper_returns_the_streams_of_its_language_model(served: Any) -> None:
    plain = served(CONFIG)
    output, expected = plain(INPUT_IDS, POSITIONS), streams(plain.language_model, INPUT_IDS)
    assert collection_of(served, resolve) is WRAPPERS[served]
    make_collecting(served, resolve)
    model = served(CONFIG)
    model.set_aux_hidden_state_layers((LAYERS, 0))
    same, collected = model(INPUT_IDS, POSITIONS)
    assert torch.equal(same, output)
    torch.testing.assert_close(collected, [expected[0], expected[LAYERS]])


def test_unchecked_class_of_a_language_model_is_refused() -> None:
    class Given(NamedInCode):
        def __init__(self) -> None:
            super().__init__(CONFIG)
            self.language_model = DeepstackForCausalLM()

    make_collecting(NamedInCode, resolve)
    with pytest.raises(
        NotCanonicalError, match="Given has DeepstackForCausalLM, but TextForCausalLM was checked"
    ):
        Given().set_aux_hidden_state_layers((1,))  # type: ignore[operator]


def test_config_without_language_model_is_recorded_but_refused() -> None:
    assert collection_of(Plain, lambda names: None) is Collection.LANGUAGE_MODEL
    with pytest.raises(
        NotCanonicalError,
        match="the configuration of Plain does not name the class of its language model",
    ):
        make_collecting(Plain, lambda names: None)


# Refused code


class Plain(Wrapper):
    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=vllm_config.model_config.hf_config.text_config
        )


class Changed(Plain):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.language_model.model(input_ids, positions)
        hidden_states += self.features
        return hidden_states


class Twofold(Plain):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        if input_ids is None:
            return positions
        hidden_states = self.language_model.model(input_ids, positions)
        return hidden_states


class Handed(Plain):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.language_model.model(input_ids, positions)
        self.features.add(hidden_states)
        return hidden_states


class OtherPart(Plain):
    def forward(self, input_ids: Any, positions: Any) -> Any:
        return self.language_model.norm(input_ids, positions)


class OtherConfig(Wrapper):
    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=config.vision_config
        )


class AnyConfig(Wrapper):
    """An attribute that the constructor assigns twice may be either value."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        if vllm_config:
            config = vllm_config.other
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, hf_config=config.text_config
        )


class ByType(Wrapper):
    """Like GLM-4.1V: it has a condition."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        names = ["TextForCausalLM"]
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, architectures=names
        )


class OfDeepstack(Wrapper):
    """Like Granite 4 Vision: features are added between the layers."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model = init_vllm_registered_model(
            vllm_config=vllm_config, architectures=["DeepstackForCausalLM"]
        )


class Misnamed(Wrapper):
    """Like Cosmos3-Edge."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model = Made(
            vllm_config.with_hf_config(vllm_config, architectures=["OtherForCausalLM"])
        )


class Made(TextForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__()


class Nested(Wrapper):
    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model = Inner(vllm_config)


class Inner(Plain):
    def compute_logits(self) -> None:
        """Of a language model."""


class Choosing(Plain):
    """Like MiniCPM-o: the instance has another class."""

    def __new__(cls, vllm_config: Any) -> Any:
        return TextForCausalLM()


class Diffusing(Plain):
    """Like DiffusionGemma: several steps compute a token."""

    def get_model_state_cls(self) -> None:
        """Return the class of the steps' state."""


class OfNoLanguageModel(Wrapper):
    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        self.language_model: nn.Module = OneTensorModel()


class Local(Plain):
    """Like Ultravox."""

    def forward(self, input_ids: Any, positions: Any) -> Any:
        model = self.language_model
        return model.model(input_ids, positions)


NEITHER = "neither the code of {} nor text_config names the class of its language model"
REFUSED: dict[type[nn.Module], str] = {
    Changed: "Changed.forward does not return the unchanged output of a decoder",
    Twofold: "Twofold.forward does not return the unchanged output of a decoder",
    Handed: "Handed.forward does not return the unchanged output of a decoder",
    OtherPart: "the norm of Uncollected is not its decoder",
    OtherConfig: NEITHER.format("OtherConfig"),
    AnyConfig: NEITHER.format("AnyConfig"),
    ByType: NEITHER.format("ByType"),
    OfDeepstack: "the loop of AddingModel.forward does more than",
    Misnamed: "Misnamed gives language_model a config that names another class than Made",
    Nested: "the language model Inner wraps another language model",
    Choosing: "Choosing has __new__",
    Diffusing: "Diffusing has get_model_state_cls",
    OfNoLanguageModel: "OfNoLanguageModel.forward calls a part of OneTensorModel, which is not a language model",
    Local: "Local.forward calls model, which no constructor creates",
}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda each: each.__name__)
def test_unrecognised_wrapper_is_refused_with_the_reason(
    refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TextForCausalLM", Uncollected)
    with pytest.raises(NotCanonicalError) as error:
        collection_of(refused, resolve)
    assert REFUSED[refused] in str(error.value)


class UncollectedModel(Decoder):
    """A canonical decoder. No test makes this class or a base class collect."""

    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer, self.layers = make_layers(
            LAYERS, lambda index: OneTensorLayer(index)
        )
        self.norm = RMSNorm(50)

    def forward(self, input_ids: Any, positions: Any) -> Any:
        hidden_states = self.embed_input_ids(input_ids)
        for layer in self.layers:
            hidden_states = layer(positions, hidden_states)
        hidden_states = self.norm(hidden_states)
        return hidden_states


class Uncollected(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = UncollectedModel()


def test_called_part_of_a_class_with_the_interface_must_collect() -> None:
    """Like the thinker of Qwen3-Omni in vllm 0.23.0, whose decoder replaces a collecting one."""

    with pytest.raises(NotCanonicalError, match="the model of Claims does not collect"):
        collection_of(Plain, lambda names: Claims)


class Claims(Uncollected):
    supports_eagle3 = True
    has_own_lm_head = has_own_embed_tokens = False

    def set_aux_hidden_state_layers(self, layers: Any) -> None:
        """Do nothing."""

    def get_eagle3_default_aux_hidden_state_layers(self) -> None:
        """Do nothing."""
