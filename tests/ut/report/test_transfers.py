"""Steps that move bytes: wrong copies, pinned memory, direct writes; and the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_hsx.drafter.ring import PinnedRing
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.report import machine, transfers
from vllm_ascend_hsx.report.context import Context
from vllm_ascend_hsx.report.result import BROKE, HELD, MEASURED, NOT_RUN, Result, Teller, read_told
from vllm_ascend_hsx.sinks.file import FileSink

MODEL = {"hidden_size": 256, "num_hidden_layers": 4, "dtype": "bfloat16"}


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(transfers, "COPIED_EMULATED", 8 << 20)
    monkeypatch.setattr(transfers, "RING_EMULATED", 1 << 20)
    monkeypatch.setattr(transfers, "REPEATS", 1)
    return Context(tmp_path, tmp_path, emulated=True)


def results(step: Any, context: Context) -> dict[str, Result]:
    told = context.output / "told"
    step(context, Teller(told))
    return {result.line: result for result in read_told(told)[0]}


def test_copies_of_one_npu_and_of_all_are_measured(context: Context) -> None:
    found = results(transfers.copies, context)
    assert {line: result.outcome for line, result in found.items()} == {
        "copies": HELD,
        "copies of all": HELD,
    }
    assert found["copies"].data["chunk"] == 4 << 20
    assert found["copies of all"].data["npus"] == transfers.npu().device_count() > 1


def test_different_copy_on_any_npu_does_not_hold(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(transfers._Link):
        @property
        def is_right(self) -> bool:
            return self.index != 1

    monkeypatch.setattr(transfers, "_Link", Wrong)
    found = results(transfers.copies, context)
    assert (found["copies"].outcome, found["copies of all"].outcome) == (HELD, BROKE)
    assert found["copies of all"].found.startswith("copies of NPUs [1] differ")


@pytest.mark.parametrize(("share", "outcome"), [(1.0, HELD), (2.0, BROKE), (0.0, BROKE)])
def test_ring_takes_exactly_the_requested_pinned_memory(
    share: float, outcome: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old behaviour was a power of two: twice the ring."""
    taken = 0

    class Counted(PinnedRing):
        def __init__(self, *arguments: Any) -> None:
            nonlocal taken
            super().__init__(*arguments)
            taken = int(share * transfers.RING_EMULATED)

    monkeypatch.setattr(transfers, "PinnedRing", Counted)
    stats = lambda: {"allocated_bytes.current": taken}  # noqa: E731
    monkeypatch.setattr(transfers.npu(), "host_memory_stats", stats, raising=False)
    result = results(transfers.pinned, context)["pinned"]
    assert (result.outcome, result.data["got"]) == (outcome, int(share * result.data["asked"]))


def test_pinned_memory_is_not_measured_without_torch_npu_statistics(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(transfers.npu(), "host_memory_stats", raising=False)
    assert results(transfers.pinned, context)["pinned"].outcome == NOT_RUN


# Direct writes


class Plain(FileSink):
    """Writes through the page cache. The test needs no filesystem with O_DIRECT."""

    refuses: tuple[bool, bool] = (False, False)  # memory of the ring, other memory

    def __init__(self, directory: Path, row_format: Any, options: Any, memory: Any = None) -> None:
        if self.refuses[memory is None]:
            raise UserError(
                "shared_storage_path",
                str(directory),
                "does not accept direct writes: Bad address",
                "Set io.",
            )
        super().__init__(directory, row_format)


def direct(context: Context, monkeypatch: pytest.MonkeyPatch, sink: type[Plain]) -> Result:
    monkeypatch.setattr(transfers, "FileSink", sink)
    return results(transfers.direct, context)["direct"]


def test_a_file_from_pinned_memory_is_read_and_compared(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct(context, monkeypatch, Plain).outcome == HELD

    class Other(Plain):
        def open(self, request_id: str, path: Path, tokens: int = 0) -> Any:
            file = super().open(request_id, path, tokens)
            write = file.write
            file.write = lambda first, data: write(first, memoryview(bytes(len(data))))
            return file

    result = direct(context, monkeypatch, Other)
    assert result.outcome == BROKE
    assert result.found.startswith("the file differs from the memory")


@pytest.mark.parametrize(
    ("refused", "outcome", "words"),
    [
        (
            (True, False),
            BROKE,
            "only from pinned memory, --output does not accept direct writes: Bad address.",
        ),
        (
            (True, True),
            NOT_RUN,
            "not measured here: --output does not accept direct writes: Bad address. Name a directory",
        ),
    ],
    ids=["from pinned memory alone", "from any memory"],
)
def test_missing_direct_io_is_distinguished_from_unreadable_pinned_memory(
    refused: tuple[bool, bool],
    outcome: str,
    words: str,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(Plain):
        refuses = refused

    result = direct(context, monkeypatch, Refusing)
    assert result.outcome == outcome
    assert result.found.startswith(words)


# The environment


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [
        ("TASK_QUEUE_ENABLE", "2", MEASURED),
        ("TASK_QUEUE_ENABLE", "0", BROKE),
        ("ASCEND_LAUNCH_BLOCKING", "1", BROKE),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", MEASURED),
        ("HCCL_BUFFSIZE", "512", MEASURED),
    ],
)
def test_variables_are_shown_and_slow_settings_do_not_hold(
    name: str, value: str, outcome: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = results(machine.environment, _only(context, monkeypatch, {name: value}))["environment"]
    assert result.outcome == outcome
    assert f"{name}={value}" in result.found and "pages of" in result.found


def test_addresses_and_directories_stay_out_of_the_report(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_ = {
        "HCCL_IF_IP": "10.1.2.3",
        "HCCL_SOCKET_IFNAME": "eth7",
        "LD_PRELOAD": "/opt/secret/liba.so:/b/libc.so",
        "HCCL_WHITELIST_FILE": "/opt/secret/list",
    }
    result = results(machine.environment, _only(context, monkeypatch, set_))["environment"]
    assert "LD_PRELOAD=liba.so:libc.so" in result.found
    assert "HCCL_WHITELIST_FILE=list" in result.found
    assert not any(
        word in json.dumps(result.data) + result.found for word in ("10.1.2.3", "eth7", "secret")
    )


def _only(context: Context, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> Context:
    monkeypatch.setattr(machine.os, "environ", variables)
    return context
