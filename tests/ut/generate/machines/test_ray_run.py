"""`hsx generate --ray` does the rows of each rank, however tasks end."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from documents import blocks, page
from fakes.inline_ray import InlineRay, node
from generate_bench import Bench
from generate_files import change_a_bit, contents, ledger_lines, right, token_rows
from generate_harness import FakeServer

from vllm_ascend_hsx.cli.generate import parse_arguments
from vllm_ascend_hsx.generate.errors import InputError
from vllm_ascend_hsx.generate.options import RayCluster

MODULE = "vllm_ascend_hsx.generate.machines.ray_run"
# The first task does 16 rows alone. Then there are four, each of which does 16 of 64 rows.
RAY = ("--ray", "auto", "--ray-tasks", 4)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> InlineRay:
    made = InlineRay()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return made


def rows_logged(bench: Bench) -> Counter[int]:
    """Return the lines about rows in all ledgers."""
    return Counter(
        line["row"] for path in bench.output.glob("ledger-*.jsonl") for line in ledger_lines(path)
    )


def check(bench: Bench, records: int) -> None:
    """Check that all rows have the right files."""
    wanted = {
        f"hs_{row}.safetensors": right(each["token_ids"])
        for row, each in enumerate(token_rows(records))
    }
    assert {
        name: tensors
        for name, tensors in contents(bench.output).items()
        if not name.startswith("ledger")
    } == wanted


def test_every_row_is_done_once_and_has_one_line(bench: Bench, ray: InlineRay) -> None:
    code, printed = bench.run(*RAY, "--validate", records=100)
    assert code == 0, printed
    check(bench, 100)
    assert bench.server.asked == rows_logged(bench) == Counter(range(100))
    assert re.search("generated │ 100 │", printed) and re.search(
        "finished before │ 0 │", printed
    ), printed
    assert ray.most_at_once == 4 and not ray.connected, "two on each of two nodes"
    assert len(ray.asked) == 5 and all(
        each["max_retries"] == 10 and each["scheduling_strategy"] == "SPREAD" for each in ray.asked
    )
    # The second run finds all files and adds no lines.
    code, printed = bench.run(*RAY, records=100)
    assert code == 0 and re.search("finished before │ 100 │", printed), printed
    assert rows_logged(bench) == Counter(range(100)) == bench.server.asked


def test_task_of_a_lost_node_is_repeated_and_its_files_are_kept(
    bench: Bench, ray: InlineRay
) -> None:
    ray.lose = lambda task, attempt: task == 3 and attempt < 2
    code, printed = bench.run(*RAY, records=100)
    assert code == 0, printed
    check(bench, 100)
    assert bench.server.asked == rows_logged(bench) == Counter(range(100))


def test_permanently_lost_task_ends_the_run_and_keeps_finished_rows(
    bench: Bench, ray: InlineRay
) -> None:
    ray.lose = lambda task, attempt: task == 3
    code, printed = bench.run(*RAY, records=100)
    assert (
        code == 1 and "stopped: Ray: the node of the task died; finished rows are kept" in printed
    ), printed
    ray.lose = lambda task, attempt: False
    assert bench.run(*RAY, records=100)[0] == 0
    check(bench, 100)


def test_rows_are_found_with_other_numbers_of_tasks_and_without_a_cluster(
    bench: Bench, ray: InlineRay
) -> None:
    records = [{"prompt": f"text {row}"} for row in range(40)]
    for arguments in (RAY, ("--ray", "auto", "--ray-tasks", 2), ()):
        assert bench.run(*arguments, records=records)[0] == 0
    assert bench.server.asked == Counter(range(40))


def test_a_changed_dataset_keeps_the_files_of_rows_that_moved(bench: Bench, ray: InlineRay) -> None:
    records = [{"prompt": f"text {row}"} for row in range(100)]
    assert bench.run(*RAY, records=records)[0] == 0
    bench.server.seen.clear()
    code, printed = bench.run(*RAY, records=[*records[1:], {"prompt": "new"}])
    assert code == 0 and list(bench.server.asked) == [99], printed


def test_unrenamable_files_end_the_run_with_one_line(
    bench: Bench, ray: InlineRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(here: Path, there: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(here))

    records = [{"prompt": f"text {row}"} for row in range(6)]
    assert bench.run(*RAY, records=records)[0] == 0
    monkeypatch.setattr(os, "rename", refuse)
    code, printed = bench.run(*RAY, records=records[1:])
    assert (
        code == 1
        and f"stopped: cannot rename or remove files in {bench.output}: Read-only file system"
        in printed
    ), printed


def test_a_wrong_file_is_replaced(bench: Bench, ray: InlineRay) -> None:
    assert bench.run(*RAY, records=30)[0] == 0
    change_a_bit(bench.output / "hs_7.safetensors")
    code, printed = bench.run(*RAY, "--validate", records=30)
    assert code == 0 and bench.server.asked[7] == 2, printed
    check(bench, 30)


def test_failed_rows_are_counted_and_other_rows_are_done(bench: Bench, ray: InlineRay) -> None:
    bench.server.behave = lambda seen: 400 if seen.row in (3, 50) else "ok"
    code, printed = bench.run(*RAY, records=60)
    assert (
        code == 1 and "row 3: " in printed and "row 50: " in printed and "failed │ 2 │" in printed
    ), printed
    assert bench.rows == [row for row in range(60) if row not in (3, 50)]


def test_task_with_a_failing_server_is_repeated_elsewhere(bench: Bench, ray: InlineRay) -> None:
    def behave(seen: Any) -> str | int:
        return 502 if seen.row == 40 and seen.time <= 2 else "ok"

    bench.server.behave = behave
    code, printed = bench.run(*RAY, "--max-retries", 0, "--max-consecutive-errors", 1, records=60)
    assert code == 0, printed
    check(bench, 60)


def test_task_whose_servers_fail_everywhere_ends_the_run(bench: Bench, ray: InlineRay) -> None:
    bench.server.behave = lambda seen: 502 if seen.row >= 40 else "ok"
    code, printed = bench.run(*RAY, "--max-retries", 0, "--max-consecutive-errors", 1, records=60)
    assert (
        code == 1 and "stopped: 1 errors in a row (--max-consecutive-errors), the last: " in printed
    ), printed
    assert "Traceback" not in printed
    assert bench.rows[:16] == list(range(16)), "finished rows are kept"


def test_unusable_servers_are_reported_by_the_first_task_without_retries(
    bench: Bench, ray: InlineRay
) -> None:
    bench.server.behave = lambda seen: 502
    code, printed = bench.run(*RAY, "--max-retries", 0, "--max-consecutive-errors", 1, records=60)
    assert code == 1 and "stopped: 1 errors in a row" in printed and "Traceback" not in printed, (
        printed
    )
    assert [each["retry_exceptions"] for each in ray.asked] == [False]
    assert len(bench.server.seen) == 1


def test_error_of_a_node_is_reported_without_traceback(
    bench: Bench, ray: InlineRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/data")

    importlib.import_module(MODULE)
    monkeypatch.setattr(f"{MODULE}.do_here", fail)
    code, printed = bench.run(*RAY)
    assert (
        code == 1
        and (
            "stopped: a node of the cluster: [Errno 5] Input/output error: '/data'; finished rows "
            "are kept"
        )
        in printed
    ), printed
    assert "Traceback" not in printed


def test_a_server_of_other_layers_ends_the_run(bench: Bench, ray: InlineRay) -> None:
    assert bench.run(*RAY, "--limit", 10, records=30)[0] == 0
    with FakeServer(bench.output, layer_ids=(0, 2)) as other:
        code, printed = bench.run(*RAY, records=30, endpoint=other.url)
    assert code == 2 and "holds rows of another server: layer_ids was" in printed, printed


def test_a_node_that_does_not_see_the_storage_ends_the_run(
    bench: Bench, ray: InlineRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert bench.run(*RAY)[0] == 0
    # The node has another disk, with rows of the same dataset.
    (on_node := tmp_path / "on_node").mkdir()
    with FakeServer(on_node) as server:
        assert bench.run("--output", on_node, endpoint=server.url)[0] == 0
    importlib.import_module(MODULE)
    monkeypatch.setattr(
        f"{MODULE}.open_regular", lambda path: os.open(on_node / path.name, os.O_RDONLY)
    )
    bench.server.seen.clear()
    code, printed = bench.run(*RAY)
    assert (
        code == 2
        and "does not see the run's" in printed
        and "with --ray-label KEY=VALUE" in printed
    ), printed
    assert not bench.server.seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_run_and_the_next_run_continues(
    bench: Bench, ray: InlineRay, number: signal.Signals
) -> None:
    handlers = signal.getsignal(number)

    def at(seen: Any, stage: str) -> None:
        if seen.row == 40 and stage == "asked":
            os.kill(os.getpid(), number)

    bench.server.at = at
    code, printed = bench.run(*RAY, records=100)
    assert (
        code == 128 + number
        and "interrupted; finished rows are kept; run again to continue" in printed
    ), printed
    assert bench.rows[:16] == list(range(16)) and len(bench.rows) < 100 and not ray.connected
    assert signal.getsignal(number) == handlers
    bench.server.at = lambda seen, stage: None
    assert bench.run(*RAY, records=100)[0] == 0
    check(bench, 100)


def test_only_nodes_with_the_label_and_a_cpu_count(bench: Bench, ray: InlineRay) -> None:
    ray.nodes_now = [
        node("a"),
        node("b", Labels={}),
        node("c", Alive=False),
        node("head", Resources={}),
    ]
    assert bench.run(*RAY, "--ray-label", "storage=here", records=200)[0] == 0
    assert ray.most_at_once == 2
    assert all(each["label_selector"] == {"storage": "here"} for each in ray.asked)


def test_a_list_of_servers_is_read_before_each_task(
    bench: Bench, ray: InlineRay, tmp_path: Path
) -> None:
    listed = tmp_path / "servers"
    with FakeServer(bench.output) as second:
        listed.write_text(bench.server.url)

        def at(seen: Any, stage: str) -> None:
            if seen.row == 10 and stage == "asked":
                listed.write_text(second.url)
            if seen.row == 40 and stage == "asked":
                listed.unlink()

        bench.server.at = second.at = at
        code, printed = bench.run(*RAY, records=100, endpoint=f"@{listed}")
        assert (
            code == 0
            and second.seen
            and printed.count("the servers listed before are still used") == 1
        ), printed
        assert bench.server.asked + second.asked == Counter(range(100))


def test_unreachable_address_is_refused_immediately(bench: Bench, ray: InlineRay) -> None:
    code, printed = bench.run("--ray", "127.0.0.1:1")
    assert (
        code == 2
        and "--ray 127.0.0.1:1: [Errno 111] Connection refused; run this command on a node"
        in printed
    ), printed
    ray.refuse = ConnectionError("no running cluster")
    code, printed = bench.run("--ray", "auto")
    assert code == 2 and "--ray auto: no running cluster; run this command on a node" in printed, (
        printed
    )


@pytest.mark.parametrize("refused_by", ["the cluster", "the first task"])
def test_refused_run_leaves_no_ledger_and_no_directory(
    bench: Bench, ray: InlineRay, tmp_path: Path, refused_by: str
) -> None:
    """A ledger would refuse the corrected command, because the fields of requests differ."""
    ray.refuse = ConnectionError("no running cluster") if refused_by == "the cluster" else None
    bench.output = tmp_path / "elsewhere" / "below"  # the server refuses this path
    code, printed = bench.run(*RAY)
    assert code == 2 and "Traceback" not in printed, printed
    assert not (tmp_path / "elsewhere").exists()


def test_missing_ray_is_reported_with_install_command(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    code, printed = bench.run(*RAY)
    assert (
        code == 2
        and "--ray needs ray: pip install 'vllm-ascend-hsx[ray]', here and on all nodes" in printed
    ), printed


def test_documented_command_is_accepted() -> None:
    (command,) = blocks("generate.md", "ray")
    options = parse_arguments(shlex.split(command)[2:])
    assert options.ray == RayCluster("auto", ("storage", "here"), 64)
    assert "(64)" in page("generate.md") and "up to ten times" in page("generate.md")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ray-label", "a=b"], "give it with --ray"),
        (["--ray-tasks", "3"], "give it with --ray"),
        (["--ray", ""], "--ray: the value is empty"),
        (["--ray", "auto", "--ray-label", "a"], "--ray-label a: give KEY=VALUE"),
        (["--ray", "auto", "--ray-label", "=b"], "--ray-label =b: give KEY=VALUE"),
        (
            ["--ray", "auto", "--data", "-"],
            "--ray with --data -: the nodes of a cluster read the dataset themselves",
        ),
    ],
)
def test_invalid_cluster_options_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        parse_arguments(["--data", "d", "--output", "o", *words])


def test_launcher_variables_are_ignored_with_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    options = parse_arguments(["--data", "d", "--output", "o", "--ray", "auto"])
    assert (options.world_size, options.rank) == (1, 0)
