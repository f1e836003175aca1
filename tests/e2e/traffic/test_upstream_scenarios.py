"""Results of vLLM's own connector in the scenarios of test_scenarios.py, with vllm-ascend 0.30.

The same model and engines, without our plugin, and without late mode: the detector takes the blocks
of two requests for one tensor. Rows are compared with transformers, and text with a server without
extraction. docs/migration.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import scenarios as play
import torch
from oracle import EXACT, LOAD_SECONDS, Reference
from prefix_scenarios import repeated_prompts_at_the_same_time
from releases import only_on_v1, only_with
from safetensors.torch import load_file
from session import EngineError, EngineSession, Request
from stage import Stage, Stages
from test_scenarios import ENGINES, NUM_LAYERS

from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

PAGE = Path(__file__).parents[3] / "docs/migration.md"
LAYER_IDS = (1, 2, 4)  # ascending: upstream does not keep another order (defect 7)
WRONG, GENERATED, MISSING = (
    "wrong rows of prompts",
    "wrong rows of generated tokens",
    "missing rows",
)
LEFT_OVER, STOPS, TEXT = "left-over file", "engine stops", "other text"


def prompts_with_a_cached_prefix(stage: Stage) -> None:
    prompt = play.tokens(3 * play.CHUNK + 20)
    for name in ("first", "again"):
        stage.add(prompt, name=name)
        stage.drain()
    stage.add([*prompt, *play.tokens(30)], name="extended")


def the_prefix_cache_is_reset(stage: Stage) -> None:
    prompt = play.tokens(2 * play.BLOCK + 6)
    stage.add(prompt, name="before-the-reset")
    stage.drain()
    assert stage.session.call("reset_prefix_cache")
    stage.add(prompt, name="after-the-reset")


def preempted_while_they_decode(stage: Stage) -> None:
    play.preempted_while_they_decode(stage, generated=60, more=10)  # shorter ones come out right


# Scenario, engine, and the differences from our connector. Scenarios that stop the engine are last.
TABLE: tuple[tuple[Callable[[Stage], None], str, set[str]], ...] = (
    (play.prompts_around_the_chunk, "async", set()),
    (play.decodes_beside_new_prefills, "async", set()),
    (play.many_short_prompts_in_one_step, "async", set()),
    (play.a_prompt_of_the_greatest_length, "async", set()),
    (prompts_with_a_cached_prefix, "async", set()),
    (repeated_prompts_at_the_same_time, "async", set()),
    (the_prefix_cache_is_reset, "async", set()),
    (play.everything_is_preempted_at_once, "async", {TEXT}),
    (play.aborted_while_its_prompt_is_computed, "async", {LEFT_OVER, MISSING}),
    (play.aborted_while_it_decodes, "async", {LEFT_OVER}),
    (play.aborted_although_it_has_stop_strings, "async", set()),
    (play.aborted_samples, "async", {LEFT_OVER}),
    (play.aborted_after_it_has_finished, "async", set()),
    (play.one_token_and_many, "async", set()),
    (play.rows_of_generated_tokens, "async", {GENERATED, TEXT}),
    (play.several_completions_of_a_prompt, "async", {TEXT}),
    (play.streamed, "async", set()),
    (play.stopped_by_a_string, "async", set()),
    (play.stopped_by_a_token, "async", set()),
    (play.structured_outputs, "async", set()),
    (play.log_probabilities, "async", set()),
    (play.hostile_request_ids, "async", {STOPS}),
    (play.aborted_before_it_is_scheduled, "async", {STOPS}),
    (play.urgent_requests_overtake, "sync", set()),
    (preempted_while_they_decode, "tiny", {GENERATED, TEXT}),
)


class TheirStage(Stage):
    """A stage on an engine without our connector."""

    def settle_in(self) -> None:
        """Do nothing: their engine's resources are not compared."""

    def catch_up(self) -> None:
        """Do nothing: rows are written at the end of a request."""

    def drain(self) -> None:
        """Step until every request is answered, and twice more: the files are written then."""
        super().drain()
        self.step(2)

    def play(self, scenario: Callable[[Stage], None]) -> list[Request]:
        """Play a scenario and return the requests."""
        self.session.call("reset_prefix_cache")
        before = len(self.session.requests)
        scenario(self)
        self.drain()
        return list(self.session.requests.values())[before:]

    def findings(self, request: Request) -> set[str]:
        """Return the mistakes in the request's files."""
        found = set()
        expected = self._expected[request.id]
        for index, internal_id in enumerate(request.internal_ids):
            path = self.session.storage / f"{internal_id}.safetensors"
            lock = path.with_name(path.name + LOCK_SUFFIX)
            if lock.exists():
                wait_until_released(lock, LOAD_SECONDS)
            if not path.exists():
                found |= set() if expected == "nothing" else {MISSING}
                continue
            if expected == "nothing":
                found.add(LEFT_OVER)
            found |= self._rows(
                path, request.sequence(index), len(request.prompt), with_output=expected == "output"
            )
        return found

    def _rows(
        self, path: Path, sequence: list[int], num_prompt: int, *, with_output: bool
    ) -> set[str]:
        tensors = load_file(path)
        token_ids, rows = tensors["token_ids"].tolist(), tensors["hidden_states"]
        if rows.shape[0] < len(token_ids) or len(token_ids) < (
            len(sequence) - 1 if with_output else num_prompt
        ):
            return {MISSING}
        exact = self._reference.rows(token_ids, self.session.layer_ids)
        differs = (rows - exact).abs().amax((1, 2)) > EXACT
        if token_ids[: len(sequence)] != sequence[: len(token_ids)] or differs[:num_prompt].any():
            return {WRONG}
        return {GENERATED} if differs.any() else set()


class TheirStages(Stages):
    """Stages on engines without our plugin."""

    def make(self, directory: Path, reference: Reference, options: dict[str, Any]) -> Stage:
        session = EngineSession(
            directory,
            reference.model,
            dtype="float32",
            max_num_seqs=16,
            ours=False,
            late=False,
            **options,
        )
        return TheirStage(self._engine.enter_context(session), reference)


@pytest.fixture(scope="module")
def reference(float32_qwen3: Path) -> Reference:
    return Reference(float32_qwen3, NUM_LAYERS, torch.float32)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with closing(TheirStages(tmp_path_factory.mktemp("theirs"))) as stages:
        yield stages


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with closing(TheirStages(tmp_path_factory.mktemp("plain"))) as stages:
        yield stages


@pytest.mark.long
@only_on_v1("docs/migration.md has what it makes of them on V1")
@only_with(">=0.30", "docs/compatibility.md lists the defects of earlier releases")
@pytest.mark.parametrize(
    ("scenario", "engine", "expected"), [pytest.param(*each, id=each[0].__name__) for each in TABLE]
)
def test_upstream_result_in_scenario(
    theirs: Stages,
    plain: Stages,
    reference: Reference,
    scenario: Callable[[Stage], None],
    engine: str,
    expected: set[str],
) -> None:
    options = {
        "max_num_batched_tokens": play.CHUNK,
        "layer_ids": LAYER_IDS,
        "enable_chunked_prefill": True,
        **ENGINES[engine],
    }
    options.pop("connector_options", None)
    if engine == "tiny":
        options["num_gpu_blocks_override"] += 2  # a request takes blocks for hidden states, too
    stage = theirs.get(engine, reference, **options)
    assert isinstance(stage, TheirStage)
    try:
        requests = stage.play(scenario)
    except EngineError:
        found = {STOPS}
    else:
        found = set().union(*(stage.findings(each) for each in requests))
        other = plain.get(engine, reference, extract=False, **options)
        assert isinstance(other, TheirStage)
        for request, alike in zip(requests, other.play(scenario), strict=True):
            if (
                request.finished
                and not request.aborted
                and request.completions != alike.completions
            ):
                found.add(TEXT)
    assert found == expected


def test_the_page_has_what_is_not_right_in_this_table() -> None:
    lines = []
    for scenario, _, found in TABLE:
        if not found:
            continue
        rows = (
            "the engine stops"
            if STOPS in found
            else ", ".join(sorted({WRONG, GENERATED, MISSING} & found)) or "right"
        )
        beside = "a file is left over" if LEFT_OVER in found else ""
        text = "" if STOPS in found else "differs" if TEXT in found else "the same"
        lines.append(f"| {scenario.__name__.replace('_', ' ')} | {rows} | {text} | {beside} |")
    table = "\n".join(["| situation | rows | text | |", "|---|---|---|---|", *lines])
    page = PAGE.read_text()
    assert f"{table}\n\n" in page and f"all {len(TABLE)} scenarios" in page
