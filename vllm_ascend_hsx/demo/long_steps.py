"""A server with long steps, once eager and once with graphs: options, prompts, and agreement.

A prompt fills several chunks of a staging slot. The pinned ring holds at most a quarter of the rows
of a step, so copies of one step are still running when the next step is staged. The ring's size is
a power of two: torch pins no other size.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet

from vllm_ascend_hsx.compat.versions import BEFORE_0_30, release_to_patch
from vllm_ascend_hsx.demo.client import Answer
from vllm_ascend_hsx.demo.compare import compare
from vllm_ascend_hsx.demo.prompts import GENERATED, Prompt, draw_tokens
from vllm_ascend_hsx.demo.verify import READ_SECONDS
from vllm_ascend_hsx.plan.shape import read_shape
from vllm_ascend_hsx.reader.load import load

# Share of the generated tokens that both runs must have in common. If the scores of two tokens
# differ by less than rounding, greedy texts diverge; later rows belong to different texts.
COMMON_SHARE = 0.5
_EMULATED_MEMORY = ("--gpu-memory-utilization", "0.3")
# npugraph_ex and the fusions that import it are not emulated.
_NOT_EMULATED = ("enable_npugraph_ex", "fuse_norm_quant", "fuse_qknorm_rope", "fuse_muls_add")
_NOT_EMULATED_BEFORE_0_30 = ("fuse_allreduce_rms",)  # since then vllm-ascend refuses it as unknown
_EMULATED_GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


class Mode(str, Enum):
    """Execution of a server's steps: eager or as graphs."""

    EAGER = "eager"
    GRAPHS = "graphs"  # vllm-ascend's default


@dataclass(frozen=True)
class LongSteps:
    """Sizes of a run.

    Attributes:
        max_num_batched_tokens: tokens per step.
        lengths: of the prompts, in tokens. All are sent at the same time.
    """

    max_num_batched_tokens: int
    lengths: tuple[int, ...]

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Return prompts of ordinary tokens; each generates 33 tokens or more."""
        drawn = enumerate(draw_tokens(random.Random(1), self.lengths, vocab_size))
        return [Prompt("token ids", tokens, 0, GENERATED + index) for index, tokens in drawn]

    def serve_options(
        self, model: str, num_layers: int, mode: Mode, emulated: bool
    ) -> dict[str, Any]:
        """Return fields of ServeOptions.

        Args:
            model: directory of the target.
            num_layers: number of extracted layers.
            mode: mode of the server.
            emulated: True if the NPUs are emulated.
        """
        row_bytes = num_layers * read_shape(model).layer_bytes
        quarter = self.max_num_batched_tokens // 4 * row_bytes
        return {
            "max_model_len": max(self.lengths) + GENERATED + len(self.lengths),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "connector_options": {"pinned_ring_bytes": 1 << quarter.bit_length() - 1},
            "additional": _emulated_compilation() if emulated and mode is Mode.GRAPHS else {},
            "extra": _mode_options(mode, emulated),
        }


REAL = LongSteps(8192, (4000, 3900, 4100, 3000, 2000, 1500, 700, 130))
EMULATED = LongSteps(512, (400, 390, 410, 300, 200, 150, 70, 13))


def environment(mode: Mode, emulated: bool) -> dict[str, str]:
    """Return environment variables of the server."""
    if not emulated or mode is Mode.EAGER:
        return {}
    # The compiler of vllm-ascend 0.23.0 returns no artifact without npugraph_ex.
    return {"VLLM_USE_MEGA_AOT_ARTIFACT": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}


def _mode_options(mode: Mode, emulated: bool) -> tuple[str, ...]:
    memory = _EMULATED_MEMORY if emulated else ()
    if mode is Mode.EAGER:
        return ("--enforce-eager", *memory)
    return ("--compilation-config", json.dumps(_EMULATED_GRAPHS), *memory) if emulated else ()


def _emulated_compilation() -> Mapping[str, Any]:
    old = release_to_patch("vllm_ascend") in SpecifierSet(BEFORE_0_30)
    names = _NOT_EMULATED + (_NOT_EMULATED_BEFORE_0_30 if old else ())
    return {"ascend_compilation_config": dict.fromkeys(names, False)}


class Agreement(NamedTuple):
    """Comparison of two runs' rows, up to the first different token.

    Attributes:
        generated: number of compared rows of generated tokens. of: number of all such rows of a
            run.
        differences: one description per request with different rows.
        max_difference: largest |difference| of an element.
    """

    generated: int
    of: int
    differences: tuple[str, ...]
    max_difference: float

    @property
    def holds(self) -> bool:
        return not self.differences and self.generated >= COMMON_SHARE * self.of

    def __str__(self) -> str:
        compared = f"prompts and {self.generated} of {self.of} generated tokens compared"
        if not self.differences and not self.holds:
            return f"{compared}: the texts diverge too early, so few rows of decodes are covered"
        return "; ".join([compared, *self.differences])


def agree(eager: Sequence[Answer], graphs: Sequence[Answer], layer_ids: Sequence[int]) -> Agreement:
    """Compare the rows of two runs of the same prompts.

    Rows are compared up to the first token that differs. The row of that token is excluded.

    Raises:
        HiddenStatesError, OSError: a file cannot be read.
    """
    generated, of, differences, largest = 0, 0, [], 0.0
    for number, (one, other) in enumerate(zip(eager, graphs, strict=True), start=1):
        common = _common(one.token_ids, other.token_ids)
        a, b = (load(each.path, READ_SECONDS).hidden_states[:common] for each in (one, other))
        result = compare(b, a, layer_ids)
        generated += max(0, common - len(one.prompt_ids))
        of += len(one.token_ids) - len(one.prompt_ids)
        if not math.isnan(result.max_abs_difference):
            largest = max(largest, result.max_abs_difference)
        if common < len(one.prompt_ids):
            differences.append(f"request {number}: the prompts differ from token {common} on")
        elif not result.matches:
            differences.append(f"request {number}: {result.reason}")
    return Agreement(generated, of, tuple(differences), largest)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal leading tokens."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
