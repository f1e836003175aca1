"""Judgements about a server's workers: contexts, npu-smi's process table, CPUs and threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_hsx.report import workers
from vllm_ascend_hsx.report.probe import Worker, WorkerProbe, cpu_of_threads
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN

GIB = float(1 << 30)


def worker(npu: int, **changed: Any) -> Worker:
    fields: dict[str, Any] = {
        "pid": 100 + npu,
        "npu": npu,
        "contexts": [npu],
        "cpus": list(range(8)),
        "cpu_seconds": {"main": 5.0, "hsx-writer": 1.0, "hsx-lander": 0.5},
        "threads": {"main": 1, "hsx-writer": 8, "hsx-lander": 1},
    }
    return Worker(**{**fields, **changed})


@pytest.mark.parametrize(
    ("contexts", "outcome", "words"),
    [
        ([1], HELD, "2 workers, each with a context only on its own NPU"),
        ([0, 1], BROKE, "the worker of NPU 1 has contexts on NPUs 0, 1"),
        ([0], BROKE, "the worker of NPU 1 has contexts on NPUs 0:"),
        ([], BROKE, "the worker of NPU 1 has contexts on NPUs none"),
        (None, NOT_RUN, "not measured here"),
    ],
    ids=["its own", "also NPU 0", "only NPU 0", "none", "unknown"],
)
def test_a_worker_with_a_context_on_another_npu_is_named(
    contexts: list[int] | None, outcome: str, words: str
) -> None:
    judgement = workers.contexts([worker(0), worker(1, contexts=contexts)])
    assert judgement.outcome == outcome
    assert judgement.found.startswith(words)


# npu-smi info of 25.x: HBM of NPUs above, then the processes.
TABLE = """
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4711          | VLLMWorker_TP            | 40311                   |
{more}+===========================+===============+====================================================+
| 1       0                 | 4712          | VLLMWorker_TP            | 40309                   |
+===========================+===============+====================================================+
| No running processes found in NPU 2                                                            |
"""
ALONE = TABLE.format(more="")
TWICE = TABLE.format(
    more=(
        "| 0       0                 | 4712          | VLLMWorker_TP            | 107            "
        "         |\n"
    )
)


@pytest.mark.parametrize(
    ("output", "before", "outcome", "words"),
    [
        (ALONE, "", HELD, "2 processes, each on one NPU"),
        (TWICE, "", BROKE, "process 4712 is on 2 NPUs"),
        (TWICE, TWICE, NOT_RUN, "not measured here: npu-smi shows no process of the server"),
        (None, "", NOT_RUN, "not measured here: npu-smi is not on PATH"),
    ],
    ids=["each on one", "one on two", "others only", "no npu-smi"],
)
def test_process_on_two_npus_is_named_unless_it_ran_before(
    output: str | None, before: str, outcome: str, words: str
) -> None:
    judgement = workers.process_table(output, before)
    assert judgement.outcome == outcome
    assert judgement.found.startswith(words)


def test_two_chips_of_one_npu_are_two() -> None:
    """An A3 card has two chips; torch_npu counts each as an NPU."""
    table = ALONE.replace(
        "| 1       0                 | 4712", "| 0       1                 | 4711"
    )
    assert workers.process_table(table, "").outcome == BROKE


@pytest.mark.parametrize(("cpus", "outcome"), [(8, HELD), (7, BROKE), (1, BROKE)])
def test_more_writers_than_cpus_do_not_hold(cpus: int, outcome: str) -> None:
    judgement = workers.cpus([worker(0), worker(1, cpus=list(range(cpus)))])
    assert judgement.outcome == outcome
    assert f"at least {cpus} CPUs for a worker with 8 writers" in judgement.found


def test_cpus_are_found_on_their_numa_nodes(tmp_path: Path) -> None:
    for node, cpus in enumerate(("0-3,8\n", "4-7\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    assert workers._nodes_of([8], tmp_path) == [0]
    assert workers._nodes_of([3, 4], tmp_path) == [0, 1]


def test_plugin_threads_are_measured_per_gib() -> None:
    after = worker(
        0, cpu_seconds={"main": 9.0, "hsx-writer": 3.0, "hsx-lander": 1.5, "hsx-background": 0.1}
    )
    judgement, per_gib = workers.threads([worker(0)], [after], copied=2 * GIB, seconds=10.0)
    assert judgement.outcome == MEASURED
    assert per_gib == {"main": 2.0, "hsx-writer": 1.0, "hsx-lander": 0.5, "hsx-background": 0.05}
    assert "hsx-background 0.05, hsx-lander 0.50, hsx-writer 1.00" in judgement.found


def test_spinning_threads_do_not_hold_except_the_main_thread() -> None:
    main = worker(0, cpu_seconds={"main": 99.0, "hsx-writer": 1.0, "hsx-lander": 0.5})
    assert workers.threads([worker(0)], [main], GIB, 1.0)[0].outcome == MEASURED
    spinning = worker(0, cpu_seconds={"main": 5.0, "hsx-writer": 9.0, "hsx-lander": 0.5})
    judgement, _ = workers.threads([worker(0)], [spinning], GIB, 4.0)
    assert judgement.outcome == BROKE
    assert "keep 2.00 CPUs busy, more than one" in judgement.found


def test_threads_are_not_judged_without_rows() -> None:
    assert workers.threads([worker(0)], [worker(0)], 0.0, 1.0)[0].outcome == BROKE


# The probe


def test_threads_are_grouped_by_name_with_their_cpu_time() -> None:
    done, spun = threading.Event(), threading.Event()

    def spin() -> None:
        sum(range(5_000_000))
        spun.set()
        done.wait()

    threads = [threading.Thread(target=spin, name=f"hsx-example-{index}") for index in range(2)]
    for thread in threads:
        thread.start()
    spun.wait()
    seconds, count = cpu_of_threads()
    done.set()
    for thread in threads:
        thread.join()
    assert (count["main"], count["hsx-example"]) == (1, 2)
    assert seconds["hsx-example"] > 0
    assert sum(count.values()) >= threading.active_count()


def test_a_worker_describes_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    monkeypatch.setattr(
        torch_npu._C, "_npu_hasPrimaryContext", lambda index: index == 0, raising=False
    )
    WorkerProbe().hsx_describe(str(tmp_path))
    monkeypatch.setattr(workers.httpx, "post", lambda *_, **__: _Answered())
    monkeypatch.setattr(workers.tempfile, "TemporaryDirectory", lambda prefix: _Kept(tmp_path))
    (found,) = workers.ask("http://server", 1)
    assert (found.pid, found.npu, found.contexts) == (os.getpid(), 0, [0])
    assert found.cpus == sorted(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match="1 workers described themselves, but the server has 2"):
        workers.ask("http://server", 2)


def test_a_worker_loads_weights_again_under_its_own_configuration() -> None:
    from vllm.config import VllmConfig, get_current_vllm_config

    class Runner:
        def reload_weights(self, weights_iterator: Any = None, weights_path: str = "") -> None:
            self.seen = (weights_path, get_current_vllm_config())

    class LikeVllms(WorkerProbe):
        vllm_config, model_runner = VllmConfig(), Runner()

    LikeVllms().hsx_reload_weights("checkpoint")
    assert LikeVllms.model_runner.seen == ("checkpoint", LikeVllms.vllm_config)


class _Answered:
    def raise_for_status(self) -> None:
        """No error."""


class _Kept:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __enter__(self) -> str:
        return self._path

    def __exit__(self, *_: object) -> None:
        """Keep the test's directory."""
