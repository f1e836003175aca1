"""`hsx generate --ray` does each row once on three machines, even if one is switched off."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from generate_files import contents, ledger_lines, right, token_rows, write_jsonl
from ray_cluster import SERVER, Cluster, ray_cluster

pytestmark = pytest.mark.long
CONCURRENCY = 16
TASKS = 15


def command(cluster: Cluster, root: Path, *more: str) -> list[str | Path]:
    words = [
        sys.executable,
        "-m",
        "vllm_ascend_hsx.cli.main",
        "generate",
        "--ray",
        cluster.address,
        "--endpoint",
        SERVER,
    ]
    files = ["--data", root / "data.jsonl", "--output", root / "out"]
    return [*words, *files, "--concurrency", str(CONCURRENCY), "--ray-tasks", str(TASKS), *more]


def wait_for_rows(cluster: Cluster, count: int) -> None:
    """Wait until `count` rows were requested."""
    deadline = time.monotonic() + 300
    while sum(len(cluster.asked(node)) for node in cluster.nodes) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)  # servers are separate processes


def test_dead_machine_loses_no_row_and_repeats_none(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    rows = pytestconfig.getoption("--ray-rows") or 1500
    write_jsonl(tmp_path / "data.jsonl", records := token_rows(rows))
    (tmp_path / "out").mkdir()
    instant, victim = random.randrange(rows // 10, rows * 3 // 4), random.choice((1, 2))
    with ray_cluster(tmp_path / "out", tmp_path) as cluster:
        for _ in range(3):
            cluster.add()
        started = time.monotonic()
        run = cluster.head.start(command(cluster, tmp_path), log=tmp_path / "printed")
        wait_for_rows(cluster, instant)
        cluster.nodes[victim].switch_off()
        code = run.wait(timeout=550)
        seconds = time.monotonic() - started
        asked = [cluster.asked(node) for node in cluster.nodes]
    printed = (tmp_path / "printed").read_text()
    assert code == 0, printed
    wanted = {
        f"hs_{row}.safetensors": right(record["token_ids"]) for row, record in enumerate(records)
    }
    found = contents(tmp_path / "out")
    assert {
        name: tensors for name, tensors in found.items() if not name.startswith("ledger")
    } == wanted
    lines = Counter(
        line["row"]
        for path in (tmp_path / "out").glob("ledger-*.jsonl")
        for line in ledger_lines(path)
    )
    assert set(lines) == set(range(rows))
    times = Counter(row for each in asked for row in each)
    twice = [row for row, count in times.items() if count > 1]
    assert max(times.values()) <= 2 and len(twice) <= CONCURRENCY, (
        "only rows that were under way there are asked for again"
    )
    assert set(twice) <= set(asked[victim])
    share = [len(each) for each in asked]
    print(
        f"\n{rows} rows in {seconds:.0f} s, node{victim + 1} off after {instant}; asked {share}, "
        f"{len(twice)} twice"
    )


def test_joining_machine_is_used_only_with_the_label(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", records := token_rows(1500))
    (tmp_path / "out").mkdir()
    with ray_cluster(tmp_path / "out", tmp_path) as cluster:
        cluster.add()
        cluster.add("--labels", "storage=here")
        run = cluster.head.start(
            command(cluster, tmp_path, "--ray-label", "storage=here"), log=tmp_path / "printed"
        )
        wait_for_rows(cluster, 50)
        cluster.add("--labels", "storage=here")
        code = run.wait(timeout=550)
        asked = [cluster.asked(node) for node in cluster.nodes]
    assert code == 0, (tmp_path / "printed").read_text()
    assert not asked[0] and asked[2]
    assert Counter(asked[1] + asked[2]) == Counter(range(len(records)))
