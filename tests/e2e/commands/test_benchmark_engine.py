"""Engine benchmarks run: without extraction, with our connector and with vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import process_environment

from benchmarks.pipeline import conversations, engine, slow_storage


@pytest.mark.long
def test_three_engines_serve_the_same_requests_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in process_environment(npus=1, late=False).items():
        monkeypatch.setenv(name, value)
    traffics = (
        engine.Traffic("short", 3, 8, 9, max_tokens=4),
        engine.Traffic("long", 3, 32, 300, max_tokens=1),
    )
    result = engine.run(engine.Scale(starts=2, rounds=1, traffics=traffics), tmp_path, print)
    for traffic in traffics:
        cells = {cell.extraction: cell for cell in result.cells if cell.traffic == traffic.name}
        assert set(cells) == {engine.OFF, engine.OURS, engine.VLLM}
        assert cells[engine.OFF].requests_per_s == cells[engine.OFF].cpu_per_step == [1.0, 1.0]
        assert all(
            len(cell.requests_per_s) == len(cell.cpu_per_step) == 2 for cell in cells.values()
        )
        assert len({cell.steps for cell in cells.values()}) == 1  # extraction adds none
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_stream_is_measured_beside_extraction_to_slow_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in process_environment(npus=1, late=False).items():
        monkeypatch.setenv(name, value)
    result = slow_storage.run(
        slow_storage.Scale(seconds=0.5, in_flight=4, tokens=40), tmp_path, print
    )
    storages = list(slow_storage.SHARES)
    expected = [
        (setting, storage)
        for setting in (slow_storage.WAIT, slow_storage.FAIL)
        for storage in storages
    ]
    assert [
        (cell.setting, cell.storage) for cell in result.cells if cell.setting in result.needed
    ] == expected
    assert all(cell.longest >= cell.p99 >= cell.p50 > 0 for cell in result.cells)
    assert [cell.failed for cell in result.cells if cell.storage == "as it is"] == [0.0] * 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_conversations_are_extracted_right_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in process_environment(npus=1, late=False).items():
        monkeypatch.setenv(name, value)
    scale = conversations.Scale(
        conversations=3, rounds=1, system=300, least=130, most=200, concurrency=4
    )
    result = conversations.run(scale, tmp_path, print, python=tmp_path / "not-installed")
    cells = {cell.name: cell for cell in result.cells}
    off, ours, without = (
        cells[name] for name in (conversations.OFF, conversations.OURS, conversations.WITHOUT)
    )
    assert (ours.files, ours.right, without.files, without.right) == (12, 12, 12, 12)
    assert result.distinct <= off.computed < off.prompt == without.computed
    assert ours.copied == ours.prompt - ours.computed
    assert cells[conversations.VLLM].reason.startswith("needs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_engine_that_does_not_start_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in process_environment(npus=1, late=False).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="exit code 1(.|\\n)*no-such-model"):
        engine.Engine({"model": str(tmp_path / "no-such-model")}, {}, tmp_path / "log")
