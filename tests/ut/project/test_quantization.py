"""The tables of quantization are current, and the claims about float8 hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from documents import rows

from benchmarks.pipeline import quantization
from benchmarks.pipeline.quantization import PAGE, Case, Load, errors, store

Table = dict[str, list[str]]


def tables(text: str) -> list[Table]:
    """Return the tables of the page, each with rows by the first cell."""
    found = re.findall(r"<!-- quantization: \w+ -->\n(.*?)<!-- /quantization", text, re.DOTALL)
    return [{name: cells for name, *cells in rows(table)} for table in found]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quantization.page(
        PAGE.read_text(), tmp_path_factory.mktemp("page"), Load(repetitions=1, files=1, tokens=128)
    )


def test_the_tables_are_current(measured: str) -> None:
    """Ignore the cost, and allow 2 %: processors differ in speed and in the order of sums."""
    *written, written_cost = tables(PAGE.read_text())
    *made, made_cost = tables(measured)
    assert len(written) == len(made) == 2
    for table, anew in zip(written, made, strict=True):
        assert list(table) == list(anew)
        for name, cells in table.items():
            assert [_number(cell) for cell in cells] == pytest.approx(
                [_number(cell) for cell in anew[name]], rel=0.02, abs=0.015
            ), name
    assert list(written_cost) == list(made_cost) == ["none", "fp8"]

    def words(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith(("|", "Measured on"))]

    assert words(PAGE.read_text()) == words(measured)


def _number(cell: str) -> float:
    return float(cell.rstrip("%").replace(",", "")) if cell else 0.0


def test_quantised_file_has_half_the_bytes(measured: str) -> None:
    sizes = tables(measured)[0]
    assert sizes
    for bfloat16, fp8, share in sizes.values():
        assert _number(fp8) / _number(bfloat16) == pytest.approx(0.5, abs=0.001)
        assert 50 < _number(share) < 50.1


def test_rows_without_outliers_lose_less_than_3_percent(measured: str) -> None:
    without = [row for row in tables(measured)[1].values() if not row[3]]
    assert len(without) == 2 and all(_number(row[1]) < 3 for row in without)


def test_element_loses_at_most_a_sixteenth_above_the_documented_size() -> None:
    largest = 1000.0
    elements = torch.logspace(0, -6, 4096, dtype=torch.float64).float() * largest
    rows = elements.bfloat16().float().view(1, 1, -1)
    lost = (store(rows).float() - rows).abs()
    large = rows > largest / 28_672
    # Both factors and their product are rounded to bfloat16.
    assert bool((lost[large] <= rows[large] * (1 / 16 + 1.1 / 256)).all())
    assert bool((lost[large] > rows[large] / 20).any())
    step = largest / 229_376
    assert bool((lost[~large] <= step / 2 * 1.01 + rows[~large] * 1.1 / 256).all())
    assert bool((store(rows)[rows < step * 0.49] == 0).all())
    assert bool((store(rows)[rows > step * 0.51] > 0).all())


def test_rows_exact_in_float8_have_no_errors() -> None:
    rows = torch.tensor([448.0, -1.0, 2**-9, 0.0]).repeat(2, 3, 2)
    (found,) = errors(Case("exact", rows, outliers=1))
    assert (found.bfloat16, found.fp8, found.worst, found.ordinary, found.lost) == (0, 0, 0, 0, 0)


def test_elements_that_become_zero_are_counted(tmp_path: Path) -> None:
    rows = torch.tensor([448.0, 2**-11, 0.0, 1.0]).repeat(2, 1, 2)
    (found,) = errors(Case("one in four", rows, ["only"], outliers=1))
    assert found.lost == 0.25
    assert found.fp8 == pytest.approx(2**-11 / 448, rel=1e-3)
