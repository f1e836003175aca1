"""A profile's files: Stack kernels are counted, and copy overlap is measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.profile import KERNELS, TRACE, Span, judge, merge, overlap, profile
from vllm_ascend_hsx.report.result import BROKE, MEASURED, NOT_RUN, Teller, read_told

# torch_npu/profiler/analysis/prof_common_func/_csv_headers.py of 2.10.0.post4.
HEADERS = [
    "Device_id",
    "Name",
    "Type",
    "Accelerator Core",
    "Start Time(us)",
    "Duration(us)",
    "Wait Time(us)",
    "Block Num",
]


def write(
    directory: Path,
    rank: int,
    kernels: list[tuple[str, float, float]],
    copies: list[tuple[float, float]],
) -> None:
    """Write a rank's files: (type, start, duration) of kernels, (start, duration) of copies."""
    output = directory / f"rank{rank}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    with (output / KERNELS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADERS)
        for kind, start, duration in kernels:
            writer.writerow(
                [rank, f"aclnn_{kind}", kind, "AI_VECTOR_CORE", f"{start}\t", duration, 0, 40]
            )
    events = [
        {"ph": "X", "name": "MEMCPY_ASYNC", "ts": str(start), "dur": duration}
        for start, duration in copies
    ]
    events += [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "MatMulV3", "ts": "0", "dur": 1},
    ]
    (output / TRACE).write_text(json.dumps(events))


STEP = [("MatMulV3", 0.0, 100.0), ("Pack", 100.0, 10.0), ("MatMulV3", 120.0, 80.0)]


def test_stack_kernels_and_copy_overlap_are_measured(tmp_path: Path) -> None:
    write(tmp_path, 0, STEP, [(110.0, 20.0), (190.0, 20.0)])
    write(tmp_path, 1, [*STEP, ("Pack", 300.0, 1.0)], [])
    judgement = judge(tmp_path)
    assert judgement.outcome == MEASURED
    assert judgement.found == (
        "1 Stack kernels, 0.0 ms of copies, 50% of it overlapped with kernels; "
        "2 Stack kernels, 0.0 ms of copies, "
        "no MEMCPY_ASYNC in trace_view.json, so overlap is not measured"
    )


def test_a_profile_without_a_stack_kernel_does_not_hold(tmp_path: Path) -> None:
    write(tmp_path, 0, [("ConcatD", 0.0, 10.0)], [(0.0, 5.0)])
    assert judge(tmp_path).outcome == BROKE
    assert "CANN stacks rows in another way" in judge(tmp_path).found


def test_a_profile_without_files_does_not_hold(tmp_path: Path) -> None:
    assert judge(tmp_path) == (
        BROKE,
        "the profiler wrote no kernel_details.csv: check the server's log",
    )


@pytest.mark.parametrize(
    ("span", "seconds"),
    [
        (Span(0, 1), 0),
        (Span(0, 3), 1),
        (Span(2, 4), 2),
        (Span(3, 9), 4),
        (Span(5, 6), 0),
        (Span(0, 20), 6),
        (Span(4.5, 7.5), 1),
    ],
)
def test_overlap_is_the_time_within_any_other_span(span: Span, seconds: float) -> None:
    busy = merge([Span(7, 8), Span(2, 4), Span(3, 5), Span(8, 10)])
    assert busy == [Span(2, 5), Span(7, 10)]
    assert overlap(span, busy) == pytest.approx(seconds)


def test_line_says_that_an_emulated_npu_has_no_profiler(tmp_path: Path) -> None:
    profile(Context(tmp_path, tmp_path, emulated=True), Teller(tmp_path / "told"))
    (result,), _ = read_told(tmp_path / "told")
    assert (result.outcome, result.found) == (
        NOT_RUN,
        "not measured here: the emulated NPU has no profiler",
    )
