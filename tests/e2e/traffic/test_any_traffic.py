"""Random traffic on a live engine in late mode: every file is right, and nothing is left over.

hypothesis draws arrivals, lengths, aborts, preemptions and files that cannot be opened. One engine
per configuration serves all runs, so each run starts with the leftovers of earlier runs in staging
slots, pinned ring, KV cache and prefix cache. `--traffic-runs N` plays N runs instead of RUNS of
each configuration, with other traffic each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import depth, is_long
from harness import tokens
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from oracle import Reference
from session import EngineSession, Request
from stage import Stage

from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, ERROR_SUFFIX, LOCK_SUFFIX

# Most for the configuration with the shortest runs; a mixture of experts differs only in the
# target.
RUNS = {"cramped": depth(110), "synchronous": depth(150), "moe": depth(50)}
STEPS = 14  # actions of a run
CHUNK = 32
NUM_LAYERS = 4
LAYER_IDS = (4, 1, 2)
MOST_TOKENS = 300
# Prompts are beginnings of these, to share prefixes.
TEXTS = [tokens(MOST_TOKENS, seed=seed) for seed in range(3)]

# A float32 row of three layers has 3 KiB: the ring of "cramped" holds eight rows, one per buffer.
ROW_BYTES = len(LAYER_IDS) * 256 * 4
ENGINES: dict[str, dict[str, Any]] = {
    "cramped": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 6,
        "connector_options": {
            "staging_slots": 1,
            "pinned_ring_bytes": 8 * ROW_BYTES,
            "num_writer_threads": 1,
        },
    },
    "synchronous": {
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "num_gpu_blocks_override": 8,
        "connector_options": {
            "staging_slots": 2,
            "pinned_ring_bytes": 40 * ROW_BYTES,
            "num_writer_threads": 3,
        },
    },
    "moe": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 12,
        "connector_options": {"staging_slots": 3},
    },
}


@pytest.fixture
def stage(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    moe = engine == "moe"
    model = request.getfixturevalue("tiny_minimax_m2" if moe else "float32_qwen3")
    with start_stage(
        tmp_path, model, torch.bfloat16 if moe else torch.float32, **ENGINES[engine]
    ) as stage:
        yield stage


@contextmanager
def start_stage(directory: Path, model: Path, dtype: torch.dtype, **engine: Any) -> Iterator[Stage]:
    """Start an engine for traffic; `engine` has further options of EngineSession."""
    options = {
        "layer_ids": LAYER_IDS,
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 6,
    }
    with EngineSession(directory, model, **options, **engine) as session:
        yield Stage(session, Reference(model, NUM_LAYERS, dtype))


class Traffic(RuleBasedStateMachine):
    """One run: some requests are aborted, preempted or cannot have a file."""

    stage: Stage  # set by the test, like:
    totals: Counter[str]

    @initialize()
    def begin(self) -> None:
        self.added: list[Request] = []
        self.prompt_only: list[Request] = []
        self.opted_out: list[Request] = []
        self.blocked: list[Path] = []

    def add(
        self, text: int, length: int, steps: int, *, expect: Any = "prompt", **options: Any
    ) -> Request:
        request = self.stage.add(TEXTS[text][:length], expect=expect, **options)
        if expect != "error":
            self.added.append(request)
        if expect == "prompt":
            self.prompt_only.append(request)
        self.stage.step(steps)
        return request

    # Lengths near the edges of chunks and blocks, and long ones that need several steps.
    steps = st.integers(0, 2)
    lengths = st.sampled_from(
        [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 127, 128, 129]
    ) | st.integers(1, MOST_TOKENS)
    texts = st.integers(0, len(TEXTS) - 1)

    @rule(
        text=texts,
        length=lengths,
        steps=steps,
        max_tokens=st.integers(1, 7),
        priority=st.integers(0, 2),
    )
    def prompt(self, text: int, length: int, steps: int, max_tokens: int, priority: int) -> None:
        self.add(text, length, steps, max_tokens=max_tokens, options=self.priority(priority))

    @rule(
        text=texts,
        length=lengths,
        steps=steps,
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        seeded=st.booleans(),
    )
    def prompt_and_output(
        self, text: int, length: int, steps: int, max_tokens: int, priority: int, seeded: bool
    ) -> None:
        sampling = {"temperature": 1.0, "seed": 7} if seeded else {}
        self.add(
            text,
            length,
            steps,
            expect="output",
            max_tokens=max_tokens,
            options=self.priority(priority),
            **sampling,
        )

    @rule(text=texts, length=lengths, steps=steps, n=st.integers(2, 3))
    def samples(self, text: int, length: int, steps: int, n: int) -> None:
        self.add(text, length, steps, n=n, max_tokens=3, temperature=1.0, seed=1)

    @rule(text=texts, length=lengths, steps=steps, max_tokens=st.integers(1, 7))
    def ordinary(self, text: int, length: int, steps: int, max_tokens: int) -> None:
        self.opted_out.append(
            self.add(
                text,
                length,
                steps,
                expect="nothing",
                params={"hidden_states": False},
                max_tokens=max_tokens,
            )
        )

    @rule(text=texts, length=lengths, steps=steps)
    def prompt_whose_file_cannot_be_opened(self, text: int, length: int, steps: int) -> None:
        request = self.add(text, length, 0, expect="error", max_tokens=2)
        for path in self.stage.session.paths(request):
            lock = Path(f"{path}{LOCK_SUFFIX}")
            lock.mkdir()
            self.blocked.append(lock)
        self.stage.step(steps)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.stage.step(count)

    # hypothesis must not draw depending on the engine's progress: it varies with writes.
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        running = [request for request in self.added if request.ended is None]
        if running:
            request = running[which % len(running)]
            # Rows of a prompt may have been complete before; rows of generated tokens never were.
            self.stage.abort(request, expect="either" if request in self.prompt_only else "nothing")

    @rule()
    def preempt_everything(self) -> None:
        self.stage.session.call("reset_prefix_cache", reset_running_requests=True)

    def priority(self, value: int) -> dict[str, Any]:
        return {"priority": value} if not self.stage.session.facts["async_scheduling"] else {}

    def teardown(self) -> None:
        self.stage.check()
        for path in self.blocked:
            path.rmdir()
        self.count()
        self.stage.clear()

    def count(self) -> None:
        """Check that each extracted request is counted once: committed, failed or aborted."""
        requests = [
            request
            for request in self.stage.session.requests.values()
            if request not in self.opted_out
        ]
        names = [path.name for path in self.stage.session.storage.iterdir()]
        paths = [
            path
            for request in requests
            if request.aborted
            for path in self.stage.session.paths(request)
        ]
        found = Counter(
            committed=sum(name.endswith(DATA_SUFFIX) for name in names),
            failed=sum(name.endswith(ERROR_SUFFIX) for name in names),
            aborted=sum(not path.exists() for path in paths),
        )
        assert found.total() == sum(request.n for request in requests), found
        self.totals.update(found)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "engine",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ("cramped", "synchronous")), "moe"],
)
def test_any_traffic_leaves_right_files_and_nothing_else(
    engine: str, stage: Stage, request: pytest.FixtureRequest
) -> None:
    play_traffic(stage, RUNS[engine], asked=request.config.getoption("traffic_runs"))


def play_traffic(stage: Stage, runs: int, *, asked: int) -> None:
    """Play runs on a stage: `runs` with the same traffic each time, or the requested number."""
    runs = asked or runs

    class OnThisStage(Traffic):
        pass

    OnThisStage.stage, OnThisStage.totals = stage, Counter()
    run_state_machine_as_test(
        OnThisStage,
        settings=settings(
            max_examples=runs,
            stateful_step_count=STEPS,
            derandomize=not asked,
            deadline=None,
            database=None,
            # A failing run is not shrunk, because the engine's state has changed. It is printed
            # whole.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    # In a short search the first, simple examples outweigh the others.
    least = runs // 4 if asked or is_long() else 0
    assert (
        min(OnThisStage.totals[outcome] for outcome in ("committed", "failed", "aborted")) > least
    ), OnThisStage.totals
    print(f"{runs} runs: {dict(OnThisStage.totals)}, {len(stage.session.preemptions)} preemptions")
