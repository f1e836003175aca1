"""Communication of tokens to experts, DP=2 x TP=2 with expert and sequence parallelism.

vllm-ascend selects a method for each step, by generation of the NPUs and number of tokens. With
extraction it selects the same method as without, all ranks agree, and the rows are right.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from harness import read_trace, tokens
from launch import FLASHCOMM, START_SECONDS, tiny_server
from quantised.modelslim import write_modelslim
from quantised.reference import rows_in_the_models_basis
from releases import only_with

from vllm_ascend_hsx import find, load
from vllm_ascend_hsx.demo.compare import QUANTISED, compare
from vllm_ascend_hsx.demo.reference import reference_hidden_states
from vllm_ascend_hsx.demo.server import Server
from vllm_ascend_hsx.demo.tiny_models import EXPERTS_PER_TOKEN
from vllm_ascend_hsx.protocol.names import LOCK_SUFFIX
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

pytestmark = only_with("<0.26", "what selects the method is instrumented in that release")
LAYER_IDS = (4, 1, 3)
CHUNK = 64
RANKS = [(0, 0), (0, 1), (1, 0), (1, 1)]  # DP, TP


class Method(NamedTuple):
    """A server, and the expected selection.

    Attributes:
        soc: generation of the NPUs.
        small, large: selections for steps of up to `capacity` tokens, and of more.
        quantised: True if the target is W8A8 and rotated.
        additional: vllm-ascend's --additional-config.
    """

    soc: str
    small: str
    large: str
    quantised: bool = False
    additional: Mapping[str, Any] = {}


CAPACITY = 16  # of MC2: the maximum number of requests
SEQUENCES = 16
EVERY_SIZE = {"enable_prefill_mc2": True}
METHODS = {
    "ALLGATHER": Method("a2", "ALLGATHER", "ALLGATHER"),
    "MC2, ALLTOALL": Method("a3", "MC2", "ALLTOALL"),
    "MC2, W8A8": Method("a3", "MC2", "MC2", quantised=True, additional=EVERY_SIZE),
    "MC2, ALLTOALL, W8A8": Method("a3", "MC2", "ALLTOALL", quantised=True),
    "FUSED_MC2, W8A8": Method(
        "a3", "FUSED_MC2", "FUSED_MC2", quantised=True, additional={"enable_fused_mc2": True}
    ),
}
SHORT_RUN = "MC2, ALLTOALL"
WITH_MASK = {"MC2", "FUSED_MC2"}


class Job(NamedTuple):
    prompt: list[int]
    generated: int
    dp_rank: int


class Done(NamedTuple):
    """A served request. `sequence` are the tokens of the rows in the file."""

    sequence: list[int]
    response_id: str


class Step(NamedTuple):
    """A forward pass of a rank.

    Attributes:
        kind: "busy" or "idle". scheduled: tokens without padding, 0 if idle.
        selections: (padded tokens of each DP rank, method) of each forward context.
        layers: calls of each layer. received: rows for this rank's experts, of each layer.
    """

    kind: str
    scheduled: int
    time: float
    selections: tuple[tuple[tuple[int, ...], str], ...]
    layers: tuple[str, ...]
    received: tuple[int, ...]


class Served(NamedTuple):
    """Results of a server.

    Attributes:
        done: by kind of traffic. spans: start and end of each kind, of time.monotonic.
        steps: the forward passes that ranks do together, of each rank in the order of RANKS.
    """

    method: Method
    model: Path
    storage: Path
    done: dict[str, list[Done]]
    spans: dict[str, tuple[float, float]]
    steps: list[tuple[Step, ...]]

    def during(self, traffic: str) -> list[tuple[Step, ...]]:
        """Return the steps of this traffic in which a rank was busy."""
        begin, end = self.spans[traffic]
        busy = (
            together for together in self.steps if any(step.kind == "busy" for step in together)
        )
        return [together for together in busy if begin <= together[0].time <= end]


def send(server: Server, model: Path, job: Job, began: threading.Event | None = None) -> Done:
    """Send a request to a DP rank; set `began` with the first token."""
    body = {"model": str(model), "prompt": job.prompt, "max_tokens": job.generated, "ignore_eos": True, "temperature": 0, "stream": True,
            "return_token_ids": True, "kv_transfer_params": {"include_output_tokens": True}}  # fmt: skip
    generated: list[int] = []
    headers = {"X-data-parallel-rank": str(job.dp_rank)}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=120
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "choices" in chunk, chunk
                generated += chunk["choices"][0].get("token_ids") or []
                if began is not None:
                    began.set()
    assert len(generated) == job.generated
    return Done(job.prompt + generated[:-1], chunk["id"])


def busy_and_idle(server: Server, model: Path) -> list[Done]:
    """Send one request after the other to each rank, while the other rank is idle."""
    return [
        send(server, model, Job(tokens(length, seed=rank), 3, rank))
        for length in (3, 13, 75)
        for rank in (0, 1)
    ]


def busy_and_busy(server: Server, model: Path) -> list[Done]:
    """Send requests to both ranks together, of lengths that TP does not divide.

    Then one alone: the others may share all steps, four tokens a rank, without padding.
    """

    def serve_others(seed: int) -> list[Done]:
        jobs = [
            Job(tokens(length + rank, seed), 3, rank)
            for length in (1, 4, 16, 70)
            for rank in (0, 1)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(lambda job: send(server, model, job), jobs))

    return [
        *while_a_rank_decodes(server, model, serve_others),
        send(server, model, Job(tokens(1, seed=2), 3, 0)),
    ]


def prefill_and_decode(server: Server, model: Path) -> list[Done]:
    """One rank decodes; then the other rank serves a long prompt, and finishes it first."""
    return while_a_rank_decodes(
        server, model, lambda seed: [send(server, model, Job(tokens(2 * CHUNK + 9, seed), 1, 1))]
    )


def while_a_rank_decodes(
    server: Server, model: Path, serve_others: Callable[[int], list[Done]]
) -> list[Done]:
    """Rank 0 decodes; then other requests are served, and finish first.

    On a busy machine they may be late: then rank 0 decodes for longer. Each try has another seed.
    """
    for generated in (30, 120, 480):
        began = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            decoding = pool.submit(
                send, server, model, Job(tokens(5, seed=generated), generated, 0), began
            )
            while not began.wait(1):
                assert not decoding.done(), decoding.result()
            others = serve_others(generated)
            in_time = not decoding.done()
            done = [decoding.result(), *others]
        if in_time:
            return done
    pytest.fail(f"{generated} tokens were decoded before the others had been served")


TRAFFIC = {
    "busy/idle": busy_and_idle,
    "busy/busy": busy_and_busy,
    "prefill/decode": prefill_and_decode,
}


def serve(directory: Path, method: Method, model: Path, *, extract: bool) -> Served:
    traces = directory / "traces"
    traces.mkdir(parents=True)
    extra = (
        ("--additional-config", json.dumps(dict(method.additional))) if method.additional else ()
    )
    extra = (*extra, *(("--quantization", "ascend") if method.quantised else ()))
    done, spans = {}, {}
    with tiny_server(
        directory, model, LAYER_IDS, data_parallel=2, tensor_parallel=2, soc=method.soc, extract=extract, environ=FLASHCOMM, extra=extra,
        instruments={"trace_experts": str(traces)}, max_num_seqs=SEQUENCES, max_num_batched_tokens=CHUNK,
    ) as server:  # fmt: skip
        server.wait_ready(START_SECONDS)
        for name, play in TRAFFIC.items():
            begin = time.monotonic()
            try:
                done[name] = play(server, model)
            except httpx.HTTPError as error:
                raise AssertionError(f"{name}: {error!r}\n{server.log_tail()}") from error
            spans[name] = begin, time.monotonic()
        if extract:  # rows of generated tokens are published with the step after the answer
            for each in itertools.chain(*done.values()):
                wait_until_released(
                    Path(f"{find(directory / 'hidden_states', each.response_id)}{LOCK_SUFFIX}"),
                    timeout=60,
                )
    by_rank = dict(steps_of(events) for events in read_trace(traces).values() if events)
    assert sorted(by_rank) == RANKS
    lengths = [len(by_rank[rank]) for rank in RANKS]
    assert max(lengths) - min(lengths) <= 1, lengths  # ranks are killed one after the other
    steps = list(zip(*(by_rank[rank] for rank in RANKS), strict=False))
    return Served(method, model, directory / "hidden_states", done, spans, steps)


def steps_of(events: Sequence[dict[str, Any]]) -> tuple[tuple[int, int], list[Step]]:
    """Return a worker's ranks and steps; the server's end may cut off the last one."""
    starts = [index for index, event in enumerate(events) if "batch" in event]
    found = []
    for start, end in itertools.pairwise(starts):
        batch, own = events[start], events[start + 1 : end]
        selected = [event for event in own if "selected" in event]
        layers = [
            f"{kind} {event[kind]}"
            for event in own
            for kind in ("dispatched", "combined")
            if kind in event
        ]
        received = tuple(event["received"] for event in own if "dispatched" in event)
        selections = tuple((tuple(event["tokens"]), event["selected"]) for event in selected)
        found.append(
            Step(
                batch["batch"],
                batch["scheduled"],
                selected[0]["time"],
                selections,
                tuple(layers),
                received,
            )
        )
    return (events[starts[0]]["dp_rank"], events[starts[0]]["tp_rank"]), found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == SHORT_RUN else pytest.mark.long) for name in METHODS
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    method: str = request.param
    return method


@pytest.fixture(scope="module")
def model(name: str, tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not METHODS[name].quantised:
        return tiny_minimax_m2
    return write_modelslim(
        tiny_minimax_m2, tmp_path_factory.mktemp("quantised") / "checkpoint", rotated=True
    )


@pytest.fixture(scope="module")
def served(name: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("extracting"), METHODS[name], model, extract=True)


@pytest.fixture(scope="module")
def without(name: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The same server without extraction."""
    return serve(tmp_path_factory.mktemp("serving"), METHODS[name], model, extract=False)


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_rows_are_right(served: Served, traffic: str) -> None:
    for done in served.done[traffic]:
        states = load(find(served.storage, done.response_id), 60)
        assert states.token_ids.tolist() == done.sequence
        if served.method.quantised:
            expected, roundings = (
                rows_in_the_models_basis(served.model, done.sequence, LAYER_IDS),
                QUANTISED,
            )
        else:
            expected, roundings = (
                reference_hidden_states(served.model, done.sequence, LAYER_IDS),
                1.0,
            )
        comparison = compare(states.hidden_states, expected, LAYER_IDS, roundings)
        assert comparison.matches, f"{len(done.sequence)} rows: {comparison}"


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_all_ranks_select_and_call_the_same_method_in_each_step(
    served: Served, traffic: str
) -> None:
    """The traffic has steps of both sizes, to make the selection change if the method has two."""
    large, small, kinds = set(), set(), set()
    for together in served.during(traffic):
        kinds.add((together[0].kind, together[2].kind))
        ((across_dp, selected),) = together[
            0
        ].selections  # one forward context: the drafter has none
        (large if max(across_dp) > CAPACITY else small).add(selected)
        assert len(together[0].layers) == 8  # dispatch and combine of four layers
        assert all(
            (step.selections, step.layers) == (together[0].selections, together[0].layers)
            for step in together
        )
    assert (
        ("busy", "busy") in kinds
        if traffic != "busy/idle"
        else {("busy", "idle"), ("idle", "busy")} <= kinds
    )
    assert (small, large) == ({served.method.small}, {served.method.large})


@pytest.mark.long  # a second server
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_selected_method_is_as_without_extraction(
    served: Served, without: Served, traffic: str
) -> None:
    ours, theirs = (
        [
            tuple((step.selections, step.layers) for step in together)
            for together in each.during(traffic)
        ]
        for each in (served, without)
    )
    if traffic == "busy/idle":  # all steps, except for the number of equal steps in a row
        assert [step for step, _ in itertools.groupby(ours)] == [
            step for step, _ in itertools.groupby(theirs)
        ]
    else:  # the arrival of requests decides which steps two ranks share, but not the selection
        of_ours, of_theirs = (
            {
                (max(across_dp) > CAPACITY, selected, *layers)
                for steps in each
                for ((across_dp, selected),), layers in steps
            }
            for each in (ours, theirs)
        )
        assert of_ours == of_theirs


@pytest.mark.long
def test_rank_with_another_method_is_named(tiny_minimax_m2: Path, tmp_path: Path) -> None:
    """MC2 has a group of its own: the ranks wait in different groups."""
    gate = tmp_path / "gate"
    with tiny_server(
        tmp_path, tiny_minimax_m2, LAYER_IDS, data_parallel=2, tensor_parallel=2, soc="a3", environ=FLASHCOMM,
        instruments={"another_method": str(gate)}, max_num_seqs=SEQUENCES, max_num_batched_tokens=CHUNK,
    ) as server:  # fmt: skip
        server.wait_ready(START_SECONDS)
        send(server, tiny_minimax_m2, Job(tokens(5, seed=4), 2, 0))
        gate.touch()
        with pytest.raises((httpx.HTTPError, AssertionError)):  # the server ends
            send(server, tiny_minimax_m2, Job(tokens(5, seed=4), 2, 0))
        log = server.log.read_text()
    everyone = r"in group \S+ \(ranks 0, 1, 2, 3\)"
    dispatch = (
        rf"rank [0-2] calls npu_moe_distribute_dispatch_v2\(.*\) of \[.*\] BFloat16 {everyone}"
    )
    counts = rf"rank 3 calls all_gather_into_tensor of \[.*\] \w+ {everyone}"
    assert re.search(
        f"hccl: ranks wait for each other in different groups: {dispatch}, {counts}", log
    ), log[-4000:]


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_no_padding_reaches_an_expert_with_mc2(served: Served, traffic: str) -> None:
    """An idle rank's own tokens, which keep it in step, are not padding."""
    padded = 0
    for together in served.during(traffic):
        ((across_dp, selected),) = together[0].selections
        if selected not in WITH_MASK:
            continue
        real = sum(
            step.scheduled or across_dp[dp]
            for (dp, tp), step in zip(RANKS, together, strict=True)
            if tp == 0
        )
        padded += sum(across_dp) - real
        for received in zip(*(step.received for step in together), strict=True):
            assert sum(received) == EXPERTS_PER_TOKEN * real, (across_dp, together)
    assert padded > 0 or not WITH_MASK & {served.method.small, served.method.large}
