"""DP=2 x TP=2 with expert and sequence parallelism: busy and idle ranks agree, files are right."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import check_contexts, compare_file, read_trace, tokens
from launch import FLASHCOMM, START_SECONDS, tiny_server
from prometheus_client.parser import text_string_to_metric_families
from releases import only_on_v1

from vllm_ascend_hsx.demo.metrics import Metrics, parse, settle
from vllm_ascend_hsx.demo.server import Server
from vllm_ascend_hsx.reader.lock_wait import wait_until_released

LAYER_IDS = (4, 1, 3)
ROW_BYTES = 3 * 256 * 2
ENGINES = ("0", "1")
MOST_SETTLED = 100
BLOCK = 128  # tokens in a KV block


def serve(
    directory: Path,
    model: Path,
    instruments: dict[str, Any],
    *,
    late: bool,
    environ: Mapping[str, str] | None = None,
) -> Server:
    parallel = {
        "data_parallel": 2,
        "tensor_parallel": 2,
        "environ": FLASHCOMM | dict(environ or {}),
    }
    return tiny_server(directory, model, LAYER_IDS, instruments=instruments, late=late, **parallel)


def complete(
    server: Server,
    model: Path,
    prompt: list[int],
    *,
    timeout: float = 120,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> Any:
    """POST /v1/completions, and return the JSON answer."""
    response = httpx.post(
        f"{server.url}/v1/completions",
        json={
            "model": str(model),
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            **body,
        },
        headers=headers,
        timeout=timeout,
    )
    response.raise_for_status()
    return response.json()


@dataclass
class Served:
    """Requests to the server and the answers, by name."""

    model: Path
    storage: Path
    prompts: dict[str, list[int]]  # with stored generated tokens
    answers: dict[str, Any]
    trace: dict[int, list[dict[str, Any]]]
    contexts: dict[int, list[dict[str, Any]]]
    log: str
    metrics: str  # of GET /metrics, at the end
    settled: int  # one-token requests to each engine, not extracted


# Alone: the other DP rank is then idle. Afterwards together, with lengths that TP does not divide.
ALONE = {"alone-3": tokens(3), "alone-6": tokens(6), "alone-chunked": tokens(201)}
# Each DP rank decodes one of them, beside the other's prefills.
WITH_OUTPUT = {f"with-output-{length}": tokens(length, seed=2) for length in (9, 70)}
# The same prefix on both DP ranks. They do not share rows: one prompt, then two.
PREFIX = tokens(150, seed=3)
FIRST = {f"first-{engine}": [*PREFIX, *tokens(7)] for engine in ENGINES}
FOLLOWERS = {
    f"follower-{engine}-{length}": [*PREFIX, *tokens(length)]
    for engine in ENGINES
    for length in (9, 70)
}
TOGETHER = {
    f"together-{length}": tokens(length, seed=1) for length in (1, 5, 7, 17, 33, 64, 100, 150)
}


@pytest.fixture(scope="module")
def served(tiny_minimax_m2: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve_requests(tmp_path_factory.mktemp("dp2tp2"), tiny_minimax_m2)


def serve_requests(
    directory: Path, model: Path, environ: Mapping[str, str] | None = None
) -> Served:
    """Send requests to a traced server with the additional environment `environ`."""
    traces, contexts = directory / "traces", directory / "contexts"
    traces.mkdir()
    contexts.mkdir()
    instruments = {"trace_collectives": str(traces), "trace_contexts": str(contexts)}
    with serve(directory, model, instruments, late=True, environ=environ) as server:
        server.wait_ready(START_SECONDS)
        try:
            answers = {name: complete(server, model, prompt) for name, prompt in ALONE.items()}
            hostile = {"X-Request-Id": "a/b/../../c"}
            answers["hostile-id"] = complete(server, model, tokens(12), headers=hostile)
            generating = {
                "max_tokens": 9,
                "ignore_eos": True,
                "kv_transfer_params": {"include_output_tokens": True},
            }
            jobs = [(prompt, generating) for prompt in WITH_OUTPUT.values()] + [
                (prompt, {}) for prompt in TOGETHER.values()
            ]
            with ThreadPoolExecutor(len(jobs)) as pool:
                found = pool.map(lambda job: complete(server, model, job[0], **job[1]), jobs)
                answers |= dict(zip([*WITH_OUTPUT, *TOGETHER], found, strict=True))
            answers |= {
                name: complete(server, model, prompt, headers=on_engine(name))
                for name, prompt in FIRST.items()
            }
            for name in FIRST:
                wait_until_released(
                    Path(answers[name]["kv_transfer_params"]["hidden_states_path"] + ".lock"),
                    timeout=60,
                )
            settle(server.url, ENGINES, timeout=120)
            settled = 1
            with ThreadPoolExecutor(len(FOLLOWERS)) as pool:
                found = pool.map(
                    lambda name: complete(server, model, FOLLOWERS[name], headers=on_engine(name)),
                    FOLLOWERS,
                )
                answers |= dict(zip(FOLLOWERS, found, strict=True))
            for answer in answers.values():
                # Rows of generated tokens are published with the step after the answer.
                wait_until_released(
                    Path(answer["kv_transfer_params"]["hidden_states_path"] + ".lock"), timeout=60
                )
            # A file is counted after the lock is released.
            everything_is_counted = False
            while not everything_is_counted and settled < MOST_SETTLED:
                settle(server.url, ENGINES, timeout=120)
                settled += 1
                metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
                counted = parse(metrics)
                published = counted.total("vllm:hsx_files_total", outcome="published")
                everything_is_counted = (
                    published >= len(answers) and counted.total("vllm:hsx_backlog_bytes") == 0
                )
        except httpx.HTTPError as error:
            raise AssertionError(f"{error!r}\n{server.log_tail()}") from error
    with_output = {
        name: prompt + answers[name]["choices"][0]["token_ids"][:-1]
        for name, prompt in WITH_OUTPUT.items()
    }
    assert {len(with_output[name]) - len(prompt) for name, prompt in WITH_OUTPUT.items()} == {8}
    return Served(
        model,
        directory / "hidden_states",
        {**ALONE, "hostile-id": tokens(12), **TOGETHER, **FIRST, **FOLLOWERS, **with_output},
        answers,
        read_trace(traces),
        read_trace(contexts),
        server.log.read_text(errors="replace"),
        metrics,
        settled,
    )


def on_engine(name: str) -> dict[str, str]:
    return {"X-data-parallel-rank": name.split("-")[1]}


def test_server_of_several_engines_logs_one_start_line(served: Served) -> None:
    assert served.log.count(" extracts layers ") == 1


@pytest.mark.parametrize(
    "name", [*ALONE, "hostile-id", *TOGETHER, *WITH_OUTPUT, *FIRST, *FOLLOWERS]
)
def test_file_holds_the_rows_of_its_own_request(served: Served, name: str) -> None:
    check_file(served, name)


def test_each_worker_has_a_context_only_on_its_own_npu(served: Served) -> None:
    check_contexts(served.contexts, npus=4)


def test_a_prefix_is_copied_on_the_dp_rank_that_has_its_rows(served: Served) -> None:
    reused = {
        name: answer["kv_transfer_params"].get("reused_tokens", 0)
        for name, answer in served.answers.items()
    }
    assert reused == {name: BLOCK if name in FOLLOWERS else 0 for name in served.answers}


def check_file(served: Served, name: str) -> None:
    """Compare a request's file with transformers."""
    path = Path(served.answers[name]["kv_transfer_params"]["hidden_states_path"])
    assert path.parent == served.storage
    comparison = compare_file(path, served.model, served.prompts[name], LAYER_IDS)
    assert comparison.matches, f"{name}: {comparison}"


def test_metrics_count_what_each_dp_rank_wrote(served: Served) -> None:
    """Compare with vLLM's series: a row per prompt token, and per generated token but the last."""
    vllms: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(served.metrics):
        for sample in family.samples:
            vllms[sample.name, sample.labels.get("engine", "")] += sample.value
    ours = parse(served.metrics)
    assert ours.engines == [*ENGINES]
    by_engine = {
        engine: Metrics([each for each in ours.counts if each.engine == engine], [])
        for engine in ENGINES
    }
    for engine, counted in by_engine.items():
        requests = vllms["vllm:request_success_total", engine]
        # Requests without stored output generate one token; the settling ones have no file.
        rows = (
            vllms["vllm:prompt_tokens_total", engine]
            - served.settled
            + vllms["vllm:generation_tokens_total", engine]
            - requests
        )
        assert (
            counted.total("vllm:hsx_files_total", outcome="published")
            == requests - served.settled
            > 0
        )
        assert counted.total("vllm:hsx_published_bytes_total") == rows * ROW_BYTES
        assert counted.total("vllm:hsx_reused_tokens_total") == 2 * BLOCK
        assert counted.total("vllm:hsx_written_bytes_total") >= (rows - 2 * BLOCK) * ROW_BYTES
        assert (
            counted.total("vllm:hsx_files_total", outcome="failed")
            == counted.total("vllm:hsx_files_total", outcome="aborted")
            == 0
        )
        assert counted.total("vllm:hsx_backlog_bytes") == 0
        assert {
            each.labels["tp_rank"]
            for each in counted.counts
            if each.name == "vllm:hsx_ring_fill_ratio"
        } == {"0", "1"}
    assert ours.total("vllm:hsx_files_total", outcome="published") == len(served.answers)
    assert (
        ours.total("vllm:hsx_published_bytes_total")
        == sum(map(len, served.prompts.values())) * ROW_BYTES
    )
    publishes = {
        each.engine: each.observations
        for each in ours.latencies
        if each.name == "vllm:hsx_publish_seconds"
    }
    assert publishes == {
        engine: counted.total("vllm:hsx_files_total", outcome="published")
        for engine, counted in by_engine.items()
    }


Collective = tuple[str, tuple[int, ...], str]  # name, shape, dtype
# One per batch, from the target's runner. The drafter has no MoE and adds none.
METADATA: Collective = ("all_reduce", (2, 2), "torch.int32")


@dataclass
class Batch:
    """A step of one rank: "busy" or "idle", the issued collectives, and the number completed."""

    kind: str
    issued: list[Collective]
    completed: int = 0


def batches(events: list[dict[str, Any]]) -> list[Batch]:
    """Return the steps of a rank, in order."""
    found: list[Batch] = []
    for event in events:
        if "batch" in event:
            found.append(Batch(event["batch"], []))
        elif "collective" in event:
            found[-1].issued.append((event["collective"], tuple(event["shape"]), event["dtype"]))
        else:
            found[-1].completed += 1
    return found


@only_on_v1("test_model_runner_v2.py has V2's collectives")
def test_busy_and_idle_ranks_issue_the_same_collectives(served: Served) -> None:
    check_collectives(served.trace, METADATA)


def check_collectives(trace: Mapping[int, list[dict[str, Any]]], metadata: Collective) -> None:
    """Check that each batch of each rank, busy or idle, issued only `metadata`."""
    by_rank: dict[tuple[int, int], list[Batch]] = {}
    for events in trace.values():
        if events:
            first = next(event for event in events if "batch" in event)
            by_rank[first["dp_rank"], first["tp_rank"]] = batches(events)
    assert sorted(by_rank) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for found in by_rank.values():
        assert {batch.kind for batch in found} == {"busy", "idle"}
        # The server is killed during idle steps: only a rank's last step may be cut off.
        *whole, last = found
        assert all(batch.issued == [metadata] and batch.completed == 1 for batch in whole)
        assert last.issued in ([], [metadata])
    for tp_rank in (0, 1):
        one, other = (by_rank[dp_rank, tp_rank] for dp_rank in (0, 1))
        issued = [sum(len(batch.issued) for batch in found) for found in (one, other)]
        completed = [sum(batch.completed for batch in found) for found in (one, other)]
        # Both ranks issued every completed collective; the rank that dies first leaves one
        # incomplete.
        assert max(completed) <= min(issued) and max(issued) - min(issued) <= 1, (issued, completed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "symptom"),
    [
        # vllm-ascend #9689: 2 x 2 and 4 x 2 int32 in one gloo group.
        pytest.param(
            "coordinate", r"op\.preamble\.length <= op\.nbytes\. 8 vs 4", id="vLLM's own collective"
        ),
        # The runner's collective without padding, and none from idle ranks: they wait for each
        # other. (#9689's assertion of reduce_scatter: 0.23.0 pads first, ops/linear_op.py:556.)
        pytest.param("unpadded", r"timed out", id="idle ranks are silent"),
    ],
)
def test_upstreams_collective_method_stops_the_server(
    tiny_minimax_m2: Path, tmp_path: Path, how: str, symptom: str
) -> None:
    with serve(tmp_path, tiny_minimax_m2, {"unfixed_proposer": how}, late=False) as server:
        server.wait_ready(START_SECONDS)
        with pytest.raises(httpx.HTTPError) as failure:
            for length in (7, 9, 5, 12):
                complete(server, tiny_minimax_m2, tokens(length), timeout=40)
        server.stop()
        found = f"{failure.value!r}\n{server.log.read_text(errors='replace')}"
    assert re.search(symptom, found), found[-4000:]
