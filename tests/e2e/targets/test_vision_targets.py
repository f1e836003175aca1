"""Qwen2.5-VL and Qwen3-VL with images in prompts: rows and image placeholders are right.

In float32, and in late mode. A token before each image identifies it for the reference.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from harness import tokens
from launch import START_SECONDS, run_module, tiny_server
from oracle import EXACT
from session import Request
from stage import Stage, Stages
from tiny_vision import (
    IMAGE_PAD,
    NO_VIDEOS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    VisionReference,
    build_qwen2_5_vl,
    build_qwen3_vl,
    mark,
    picture,
    seeds_in,
)

from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.load import HiddenStates, load

LAYER_IDS = (4, 0, 2, 1, 3)  # not ascending: the file has the user's order
CHUNK = 64
BLOCK = 128
BUILD = {"qwen2_5_vl": build_qwen2_5_vl, "qwen3_vl": build_qwen3_vl}
# Images by number of tokens.
OF_12, OF_20, OF_81 = 0, 1, 2


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VisionReference]:
    directory = tmp_path_factory.mktemp("models")
    return {
        name: VisionReference(build(directory / name), 4, torch.float32)
        for name, build in BUILD.items()
    }


class Play:
    """A stage with images in prompts, and the placeholders that each file must name."""

    def __init__(self, stage: Stage, reference: VisionReference) -> None:
        self.stage = stage
        self._reference = reference
        self.unit = reference.unit
        self._ranges: dict[str, list[tuple[str, int, int]]] = {}

    def add(self, prompt: Sequence[int], **options: Any) -> Request:
        """Add a request with the images named by `mark` in the prompt."""
        pictures = [[seed, self._reference.unit] for seed in seeds_in(prompt)]
        request = self.stage.add(prompt, options={"pictures": pictures}, **options)
        request.prompt[:], self._ranges[request.id] = self._reference.expand(prompt)
        return request

    def check(self) -> None:
        """Compare rows, token ids and placeholders of all files."""
        self.stage.check()
        for request_id, ranges in self._ranges.items():
            for path in filter(
                Path.exists, self.stage.session.paths(self.stage.session.requests[request_id])
            ):
                states = load(path)
                assert states.placeholders == ranges, request_id
                assert ("placeholders" in states.metadata) == bool(ranges)
                pads = (states.token_ids == IMAGE_PAD).nonzero().flatten().tolist()
                assert pads == [
                    row for _, start, length in ranges for row in range(start, start + length)
                ]


def an_image_first_last_and_alone(play: Play) -> None:
    play.add([*tokens(5), *mark(OF_12), *tokens(7)], name="within")
    play.add([*mark(OF_20), *tokens(3)], name="first")
    play.add([*tokens(3), *mark(OF_12 + 3)], name="last", max_tokens=5, expect="output")


def several_images_of_different_sizes(play: Play) -> None:
    three = [*tokens(4), *mark(OF_12), *tokens(2), *mark(OF_20), *mark(OF_12 + 6), *tokens(9)]
    play.add(three, name="three", max_tokens=9, expect="output")


def a_chunk_ends_within_an_image(play: Play) -> None:
    """Also the second of two images, if the first one ends just before the chunk."""
    long = play.add([*tokens(20), *mark(OF_81), *tokens(30)], name="one-image")
    play.stage.until_mid_prefill(long)
    assert play.stage.progress(long)["computed"] == CHUNK
    play.add(
        [*tokens(20), *mark(OF_20), *tokens(7), *mark(OF_81 + 3), *tokens(5)], name="two-images"
    )


def the_same_image_in_other_prompts(play: Play) -> None:
    """The features come from the encoder cache, but rows depend on the tokens before them."""
    first = play.add([*tokens(6), *mark(OF_20 + 3), *tokens(4)], name="first", max_tokens=2)
    play.stage.drain()
    play.add([*tokens(9), *mark(OF_20 + 3), *tokens(4)], name="elsewhere")
    play.add([*tokens(2), *mark(OF_20 + 3), *mark(OF_20 + 3)], name="twice")
    again = play.add([*tokens(6), *mark(OF_20 + 3), *tokens(4)], name="again", max_tokens=2)
    play.stage.drain()
    assert again.tokens == first.tokens


def text_beside_images(play: Play) -> None:
    decoding = play.add(tokens(30), name="text", max_tokens=20, expect="output")
    play.stage.until_mid_decode(decoding)
    play.add(
        [*tokens(8), *mark(OF_81 + 6), *tokens(8)], name="image", max_tokens=6, expect="output"
    )
    play.add(tokens(40), name="more-text")
    play.add(
        [*tokens(8), *mark(OF_12 + 9), *tokens(8)],
        name="not-extracted",
        params={"hidden_states": False},
        expect="nothing",
    )


def prefixes_with_images_are_cached(play: Play) -> None:
    prompt = [*tokens(30), *mark(OF_81 + 9), *tokens(60)]
    plain = play.add(
        prompt, name="ordinary", params={"hidden_states": False}, expect="nothing", max_tokens=3
    )
    play.stage.drain()
    extracted = play.add(prompt, name="extracted", max_tokens=3)
    cached = play.add(
        prompt, name="cached", params={"hidden_states": False}, expect="nothing", max_tokens=3
    )
    play.stage.drain()
    assert (extracted.num_cached_tokens, cached.num_cached_tokens) == (0, BLOCK)
    assert extracted.tokens == cached.tokens == plain.tokens


def rows_of_a_prefix_with_an_image_are_copied(play: Play) -> None:
    """Text and image must be the same. Here no token identifies the image."""
    prompt = [*tokens(30), *mark(OF_81 + 12), *tokens(60)]
    source = play.add(prompt, name="source")
    play.stage.session.settle()
    copied = play.add([*prompt, *tokens(9)], name="copied", max_tokens=3)
    another_image = play.add([*tokens(30), *mark(OF_81 + 15), *tokens(60)], name="another-image")
    hidden = play.stage.add(
        prompt,
        name="its-token-is-the-first-one's",
        options={"pictures": [[OF_81 + 15, play.unit]]},
        expect="nothing",
    )
    play.stage.session.settle()
    assert [each.reused for each in (source, copied, another_image, hidden)] == [0, BLOCK, 0, 0]
    (path,), (of_source,) = play.stage.session.paths(hidden), play.stage.session.paths(source)
    differs = (load(path).hidden_states != load(of_source).hidden_states).any(-1).any(-1)
    assert differs.nonzero()[0] == len(tokens(30)) + 2
    path.unlink()
    path.with_name(path.name + LOCK_SUFFIX).unlink()


def aborted_and_preempted_with_images(play: Play) -> None:
    aborted = play.add([*tokens(21), *mark(OF_81), *tokens(30)], name="aborted")
    play.stage.until_mid_prefill(aborted)
    play.stage.abort(aborted)
    decoding = play.add(
        [*tokens(3), *mark(OF_12), *tokens(3)], name="preempted", max_tokens=12, expect="output"
    )
    play.stage.until_mid_decode(decoding)
    assert play.stage.session.call("reset_prefix_cache", reset_running_requests=True)


SCENARIOS: tuple[Callable[[Play], None], ...] = (
    an_image_first_last_and_alone,
    several_images_of_different_sizes,
    a_chunk_ends_within_an_image,
    the_same_image_in_other_prompts,
    text_beside_images,
    prefixes_with_images_are_cached,
    rows_of_a_prefix_with_an_image_are_copied,
    aborted_and_preempted_with_images,
)


def stage_of(stages: Stages, references: dict[str, VisionReference], name: str) -> Stage:
    return stages.get(
        name, references[name], layer_ids=LAYER_IDS, enable_mm_embeds=True, **NO_VIDEOS
    )


def cases() -> Iterator[Any]:
    for name in BUILD:
        for play in SCENARIOS:
            yield pytest.param(
                name,
                play,
                id=f"{name}-{play.__name__}",
                marks=() if name == "qwen3_vl" else pytest.mark.long,
            )


@pytest.mark.parametrize(("name", "play"), cases())
def test_rows_and_placeholders_are_right_in_scenario(
    stages: Stages, references: dict[str, VisionReference], name: str, play: Callable[[Play], None]
) -> None:
    playing = Play(stage_of(stages, references, name), references[name])
    play(playing)
    playing.check()


@pytest.mark.long
def test_video_is_refused_with_the_reason_but_generates(
    stages: Stages, references: dict[str, VisionReference]
) -> None:
    """Passed as embeddings, because the emulated set-up cannot read videos."""
    stage = stage_of(stages, references, "qwen2_5_vl")
    prompt = [*tokens(5), VISION_START, VIDEO_PAD, VISION_END, *tokens(4)]
    video = stage.add(
        prompt, name="video", expect="nothing", max_tokens=3, options={"clip": [6, 512]}
    )
    stage.drain()
    assert video.kv_transfer_params == {
        "hidden_states_error": "a prompt with video is not extracted; images are the only supported media"
    }
    assert len(video.tokens) == 3
    stage.check()


def test_rows_of_qwen3_vl_include_the_added_visual_features(
    references: dict[str, VisionReference],
) -> None:
    """transformers' own hidden_states are taken before the addition, as the file format says."""
    reference = references["qwen3_vl"]
    prompt, ((_, start, length),) = reference.expand([*tokens(4), *mark(OF_12), *tokens(4)])
    rows, theirs = reference.rows(prompt, range(4)), reference.hidden_states(prompt)
    image = torch.zeros(len(prompt), dtype=torch.bool)
    image[start : start + length] = True
    for layer_id in range(4):
        differs = (rows[:, layer_id] - theirs[layer_id]).abs().amax(-1) > 0.1
        assert torch.equal(differs, image if layer_id in (1, 2) else torch.zeros_like(image)), (
            layer_id
        )


# Over HTTP


def part(seed: int, unit: int) -> list[dict[str, Any]]:
    """Return an image and the text that identifies it, as parts of a message."""
    data = io.BytesIO()
    picture(seed, unit).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return [
        {"type": "text", "text": f"<|unused_{mark(seed)[0]}|>"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


def assert_right(states: HiddenStates, reference: VisionReference, sizes: Sequence[int]) -> None:
    """Compare a file with the images that its tokens name, of `sizes` tokens."""
    token_ids = states.token_ids.tolist()
    starts = [row + 1 for row, token in enumerate(token_ids) if token == VISION_START]
    assert states.placeholders == [
        ("image", start, size) for start, size in zip(starts, sizes, strict=True)
    ]
    assert (
        states.hidden_states.double() - reference.rows(token_ids, LAYER_IDS)
    ).abs().max() <= EXACT


def test_chats_with_images_are_extracted_over_http_and_by_hsx_generate(
    references: dict[str, VisionReference], tmp_path: Path
) -> None:
    reference = references["qwen3_vl"]
    text = {"type": "text", "text": "What is the capital of France?"}
    chats = [
        [{"role": "user", "content": [*part(OF_81, reference.unit), text]}],
        [
            {
                "role": "user",
                "content": [text, *part(OF_12, reference.unit), *part(OF_20, reference.unit)],
            }
        ],
        [{"role": "user", "content": "No image."}],
    ]
    sizes = [[81], [12, 20], []]
    extra = (
        "--dtype",
        "float32",
        "--limit-mm-per-prompt",
        json.dumps(NO_VIDEOS["limit_mm_per_prompt"]),
    )
    connector = {"allow_custom_save_path": True}
    with tiny_server(
        tmp_path,
        reference.model,
        LAYER_IDS,
        connector=connector,
        extra=extra,
        expert_parallel=False,
    ) as server:
        server.wait_ready(START_SECONDS)
        for messages, expected in zip(chats, sizes, strict=True):
            body = {
                "model": str(reference.model),
                "messages": messages,
                "max_tokens": 2,
                "temperature": 0,
                "return_token_ids": True,
            }
            answer = (
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
                .raise_for_status()
                .json()
            )
            states = load(answer["kv_transfer_params"]["hidden_states_path"])
            assert states.token_ids.tolist() == answer["prompt_token_ids"]
            assert_right(states, reference, expected)
        data, output = tmp_path / "chats.jsonl", tmp_path / "hidden_states" / "rows"
        data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
        arguments = (
            "generate",
            "--data",
            str(data),
            "--output",
            str(output),
            "--endpoint",
            server.url,
            "--validate",
        )
        code, printed = run_module("vllm_ascend_hsx.cli.main", *arguments)
        assert code == 0, printed
    for row, expected in enumerate(sizes):
        assert_right(load(output / f"hs_{row}.safetensors"), reference, expected)
