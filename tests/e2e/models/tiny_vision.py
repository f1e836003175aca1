"""Build tiny Qwen2.5-VL and Qwen3-VL with processors, and their references for images."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import WIDER, Reference
from PIL import Image
from quantised.modelslim import DESCRIPTION, FLOAT, INDEX, WEIGHTS
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vllm_ascend_hsx.demo.reference import hidden_states_of
from vllm_ascend_hsx.demo.tiny_models import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    build_model,
    common_config,
    draw_weights,
)
from vllm_ascend_hsx.demo.tokenizer import BOS, EOS, ROLE, build_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(VOCAB_SIZE - len(VISION_TOKENS), VOCAB_SIZE)
_FIRST_MARK = 600
MERGE = 2  # patches per side of a token
MOST_TOKENS = 100  # of an image
# The emulated torchvision has no videos; otherwise vLLM tries one at start-up.
NO_VIDEOS = {"limit_mm_per_prompt": {"video": 0}}
CHAT_TEMPLATE = (
    f"{{{{ '{BOS}' }}}}{{% for message in messages %}}{{{{ '{ROLE}' + message.role + '\n' }}}}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in "
    "message.content %}"
    f"{{% if part.type == 'image' %}}{VISION_TOKENS[0]}{VISION_TOKENS[2]}{VISION_TOKENS[1]}"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    f"{{{{ '{EOS}\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{ROLE}ai\n' }}}}{{% "
    f"endif %}}"
)


def build_qwen2_5_vl(
    directory: Path, *, dtype: str = "float32", layers: int = 4, seed: int = 0
) -> Path:
    """Build a Qwen2.5-VL with windows, heads and rotation as in the published models."""
    return _with_processor(
        build_model(directory, "qwen2_5_vl", _qwen2_5_vl, dtype=dtype, layers=layers, seed=seed),
        14,
        "Qwen2_5_VL",
    )


def build_qwen3_vl(
    directory: Path, *, dtype: str = "float32", layers: int = 4, seed: int = 0
) -> Path:
    """Build a Qwen3-VL that adds visual features after the first two layers."""
    return _with_processor(
        build_model(directory, "qwen3_vl", _qwen3_vl, dtype=dtype, layers=layers, seed=seed),
        16,
        "Qwen3VL",
    )


_IDS = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def _qwen2_5_vl(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    # Heads of 128 and these sections: for others vllm-ascend does not use npu_mrope.
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
    config = Qwen2_5_VLConfig(
        text_config={
            **common_config(layers, heads=4, kv_heads=2),
            "hidden_size": 512,
            "intermediate_size": 512,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 160,  # heads of 80; vllm-ascend pads them to 128
            "intermediate_size": 160,
            "num_heads": 2,
            "window_size": 112,  # 4 tokens: images have several
            "fullatt_block_indexes": [1],
            "out_hidden_size": 512,
        },
        **_IDS,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    draw_weights(model, generator)
    with torch.no_grad():
        model.model.visual.merger.ln_q.weight.fill_(1.0)
    _quieten(model)
    return model, {}


def _qwen3_vl(layers: int, generator: torch.Generator) -> tuple[PreTrainedModel, dict[str, Any]]:
    rope = {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={
            **common_config(layers, heads=4, kv_heads=2),
            "head_dim": 128,
            "intermediate_size": 512,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 144,  # heads of 72
            "intermediate_size": 144,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "out_hidden_size": HIDDEN_SIZE,
        },
        **_IDS,
    )
    model = Qwen3VLForConditionalGeneration(config)
    draw_weights(model, generator)
    _quieten(model)
    return model, {}


@torch.no_grad()
def _quieten(model: PreTrainedModel) -> None:
    """Make rows, and so their rounding, a quarter as large, and generate no image tokens."""
    for name, weight in model.named_parameters():
        writes = name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight"))
        if writes or (
            "merger" in name
            and name.endswith((".2.weight", ".2.bias", "linear_fc2.weight", "linear_fc2.bias"))
        ):
            weight.mul_(0.25)
    model.lm_head.weight[VISION_START:] = 0.0


def _with_processor(directory: Path, patch: int, family: str) -> Path:
    """Add tokenizer and processors, unless they are there."""
    token = (patch * MERGE) ** 2  # pixels
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{family}Processor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": token, "longest_edge": MOST_TOKENS * token},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    kind = "Qwen3VLVideoProcessor" if family == "Qwen3VL" else "Qwen2VLVideoProcessor"
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "video_preprocessor_config.json").write_text(
        json.dumps({**images, "video_processor_type": kind})
    )
    tokenizer = build_tokenizer(VISION_START)
    # The text has too few words for the whole vocabulary; image tokens are the last ones.
    tokenizer.add_tokens([f"<|unused_{index}|>" for index in range(len(tokenizer), VISION_START)])
    tokenizer.add_tokens(list(VISION_TOKENS), special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(VISION_TOKENS[0]) == VISION_START
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def dress_as_qwen3_vl_moe(text: Path, directory: Path) -> Path:
    """Write msmodelslim's checkpoint of a Qwen3-MoE as the text part of a Qwen3-VL-MoE.

    It has no vision tower: serve it `language_model_only`. Rows equal the Qwen3-MoE's, because all
    three positions of a text token are the same.
    """
    shutil.copytree(text, directory)
    config = json.loads((text / "config.json").read_text())
    rope = {**config["rope_parameters"], "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    vision = {
        "depth": 1,
        "hidden_size": 144,
        "num_heads": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "deepstack_visual_indexes": [0],
    }
    whole = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "dtype": config["dtype"],
        "text_config": {**config, "model_type": "qwen3_vl_moe_text", "rope_parameters": rope},
        "vision_config": {**vision, "model_type": "qwen3_vl_moe"},
        "tie_word_embeddings": False,
        **_IDS,
    }
    (directory / "config.json").write_text(json.dumps(whole))
    with torch.device("meta"):
        tower = Qwen3VLMoeForConditionalGeneration(
            Qwen3VLMoeConfig(**whole)
        ).model.visual.state_dict()
    described = {
        f"model.visual.{name}": FLOAT for name in tower
    }  # vllm-ascend reads it, although it loads none
    described |= _within_the_whole(json.loads((text / DESCRIPTION).read_text()))
    (directory / DESCRIPTION).write_text(json.dumps(described))
    tensors = _within_the_whole(load_file(text / WEIGHTS))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, WEIGHTS)})
    )
    return _with_processor(directory, 16, "Qwen3VL")


def _within_the_whole(named: dict[str, Any]) -> dict[str, Any]:
    """Rename the parts of the text model."""
    return {
        re.sub(r"^model\.", "model.language_model.", name): value for name, value in named.items()
    }


def picture(seed: int, unit: int) -> Image.Image:
    """Return an image of coloured noise, of 12, 20 or 81 tokens of `unit` x `unit` pixels.

    Nothing resizes it. Different seeds share no patch.
    """
    width, height = ((3, 4), (5, 4), (9, 9))[seed % 3]
    pixels = np.random.default_rng(seed).integers(
        0, 256, (height * unit, width * unit, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def mark(seed: int) -> list[int]:
    """Return an image in a prompt as sent by clients, after a token that identifies it."""
    return [_FIRST_MARK + seed, VISION_START, IMAGE_PAD, VISION_END]


def seeds_in(token_ids: Sequence[int]) -> list[int]:
    """Return the seeds of the images in a prompt built with `mark`."""
    return [
        before - _FIRST_MARK
        for before, token in itertools.pairwise(token_ids)
        if token == VISION_START
    ]


def embedded_clip(count: int, hidden_size: int) -> dict[str, torch.Tensor]:
    """Return a video of `count` tokens in one row, as embeddings."""
    return {
        "video_embeds": torch.zeros(count, hidden_size),
        "video_grid_thw": torch.tensor([[1, MERGE, MERGE * count]]),
    }


class VisionReference(Reference):
    """The rows of prompts with images. Their marks identify the images."""

    def __init__(self, model: Path, num_layers: int, dtype: torch.dtype) -> None:
        super().__init__(model, num_layers, dtype)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(model)
        self.unit = self._processor.patch_size * MERGE
        self._target = AutoModelForImageTextToText.from_pretrained(
            model, dtype=WIDER[dtype], local_files_only=True
        ).eval()

    def expand(self, token_ids: Sequence[int]) -> tuple[list[int], list[tuple[str, int, int]]]:
        """Return a prompt with a token for each part of the images, and the placeholders."""
        grids = iter(
            self._images(token_ids)["image_grid_thw"].tolist() if IMAGE_PAD in token_ids else []
        )
        expanded: list[int] = []
        ranges = []
        for token in token_ids:
            count = math.prod(next(grids)) // MERGE**2 if token == IMAGE_PAD else 1
            if token == IMAGE_PAD:
                ranges.append(("image", len(expanded), count))
            expanded += [token] * count
        return expanded, ranges

    def _images(self, token_ids: Sequence[int]) -> Any:
        return self._processor(
            [picture(seed, self.unit) for seed in seeds_in(token_ids)], return_tensors="pt"
        )

    def hidden_states(self, token_ids: Sequence[int]) -> list[torch.Tensor]:
        """Return transformers' own hidden states of a prompt, [tokens, hidden] for each layer."""
        with torch.no_grad():
            output = self._target(
                torch.tensor([token_ids]),
                **self._inputs(token_ids),
                output_hidden_states=True,
                use_cache=False,
            )
        return [each[0] for each in output.hidden_states]

    def _inputs(self, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        if IMAGE_PAD not in token_ids:
            return {}
        images = {
            **self._images(token_ids),
            "mm_token_type_ids": (torch.tensor([token_ids]) == IMAGE_PAD).int(),
        }
        return {**images, "pixel_values": images["pixel_values"].to(self._target.dtype)}

    def _compute(self, token_ids: Sequence[int]) -> torch.Tensor:
        return hidden_states_of(self._target, token_ids, self._layer_ids, **self._inputs(token_ids))
