"""Each numeric option has documented bounds and refuses a value outside them at once."""

from __future__ import annotations

import fcntl
import math
import os
import threading
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from documents import rows
from hypothesis import given
from hypothesis import strategies as st
from options_reference import is_size, size_text
from pydantic import BaseModel

from vllm_ascend_hsx import find, load
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.mooncake.store import MooncakeOptions
from vllm_ascend_hsx.reader.dataset import HiddenStatesDataset

OPTIONS_PAGE = Path(__file__).parents[3] / "docs" / "options.md"
STORE = {"master_server_address": "store:50051"}
HUGE = 10**5000  # Python refuses to convert it to a string
EXTREMES = [
    math.inf,
    -math.inf,
    math.nan,
    1e300,
    1e30,
    1e20,
    -1,
    -1.5,
    0,
    0.0,
    2**31,
    2**63,
    2**64,
    10**400,
    HUGE,
    -HUGE,
    True,
    False,
]
NUMBERS = st.one_of(st.sampled_from(EXTREMES), st.floats(), st.integers(), st.booleans())


def numeric(model: type[BaseModel]) -> dict[str, tuple[type, dict[str, float]]]:
    """Return the numeric options: int or float, and the bounds by sign."""
    found = {}
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (int, float) if field.annotation in (kind, kind | None)]
        if kinds:
            bounds = {}
            for each in field.metadata:
                for sign, kind in (
                    ("≥", annotated_types.Ge),
                    (">", annotated_types.Gt),
                    ("≤", annotated_types.Le),
                ):
                    if isinstance(each, kind):
                        bounds[sign] = getattr(each, kind.__name__.lower())
            found[name] = kinds[0], bounds
    return found


MODELS = {"": HsxConfig, "mooncake.": MooncakeOptions}
CASES = [
    (prefix, name, kind, bounds)
    for prefix, model in MODELS.items()
    for name, (kind, bounds) in numeric(model).items()
]
each_option = pytest.mark.parametrize(
    ("prefix", "name", "kind", "bounds"), CASES, ids=[prefix + name for prefix, name, *_ in CASES]
)


def parse(prefix: str, name: str, value: object) -> Any:
    if prefix:
        config = HsxConfig.parse({"sink": "mooncake", "mooncake": {**STORE, name: value}})
        return getattr(config.mooncake, name)
    needed = {"extract": "sample"} if name == "sample_rate" else {}
    return getattr(HsxConfig.parse({"shared_storage_path": "/data", **needed, name: value}), name)


def test_some_options_are_numbers() -> None:
    assert {"drain_timeout_s", "pinned_ring_bytes", "global_segment_size"} <= {
        name for _, name, *_ in CASES
    }


@each_option
def test_every_number_has_documented_upper_and_lower_bounds(
    prefix: str, name: str, kind: type, bounds: dict[str, float]
) -> None:
    assert set(bounds) in ({"≥", "≤"}, {">", "≤"})
    page = OPTIONS_PAGE.read_text(encoding="utf-8").partition("\n## mooncake\n")[2 if prefix else 0]
    (row,) = [cells for cells in rows(page) if cells[0].endswith(f"`{name}`")]
    model = MooncakeOptions if prefix else HsxConfig
    unit = size_text if is_size(model.model_fields[name]) else str
    assert all(f"{sign} {unit(bound)}" in row[1] for sign, bound in bounds.items()), row


@each_option
@given(value=NUMBERS)
def test_number_outside_its_bounds_is_refused_by_name(
    prefix: str, name: str, kind: type, bounds: dict[str, float], value: float
) -> None:
    right = not isinstance(value, bool) and (kind is float or isinstance(value, int))
    inside = value > bounds[">"] if ">" in bounds else value >= bounds["≥"]
    if right and inside and value <= bounds["≤"]:
        assert parse(prefix, name, value) == value
        return
    with pytest.raises(UserError) as refusal:
        parse(prefix, name, value)
    message = str(refusal.value)
    assert f"kv_connector_extra_config.{prefix}{name}=" in message
    if abs(value) != HUGE:
        assert f"{name}={value!r} " in message


@pytest.mark.parametrize("digits", [25, 5000])
def test_size_with_a_unit_has_the_same_bounds_as_a_number(digits: int) -> None:
    with pytest.raises(UserError, match=r"kv_connector_extra_config\.pinned_ring_bytes='9+GiB'"):
        parse("", "pinned_ring_bytes", "9" * digits + "GiB")


# Arguments of readers


def held_lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.mark.parametrize("timeout", [math.nan, -math.inf, -1, -0.5, True, -(10**400)])
@pytest.mark.parametrize("locked", [True, False])
def test_invalid_timeout_is_refused_even_without_anything_to_wait_for(
    tmp_path: Path, timeout: float, locked: bool
) -> None:
    fd = held_lock(tmp_path / "a.safetensors.lock") if locked else None
    with pytest.raises(
        ValueError, match=r"^timeout=.*give seconds, 0 or more; None or math\.inf waits forever$"
    ):
        load(tmp_path / "a.safetensors", timeout)
    if fd is not None:
        os.close(fd)


@pytest.mark.parametrize(
    "timeout",
    [None, math.inf, 1e300, threading.TIMEOUT_MAX, threading.TIMEOUT_MAX - 1, 10**400, 2**31, 3600],
)
def test_reader_accepts_an_infinite_timeout(tmp_path: Path, timeout: float | None) -> None:
    fd = held_lock(tmp_path / "a.safetensors.lock")
    said: list[BaseException] = []

    def wait() -> None:
        try:
            load(tmp_path / "a.safetensors", timeout)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            said.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert not said, "it waits"
    (tmp_path / "a.safetensors.error").write_text('{"reason": "the disk is full"}')
    os.close(fd)
    waiting.join(60)
    assert [str(each) for each in said] == [f"{tmp_path}/a.safetensors: the disk is full"]


@pytest.mark.parametrize("value", [math.nan, -1, True])
def test_speculators_transfer_refuses_an_invalid_timeout_when_it_is_created(
    tmp_path: Path, value: float
) -> None:
    pytest.importorskip(
        "hs_connectors", reason="hs-connectors is only in the environment of the tests"
    )
    from vllm_ascend_hsx.integrations.speculators import HsxTransfer

    with pytest.raises(ValueError, match="give seconds"):
        HsxTransfer(tmp_path, value)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, math.inf])
def test_dataset_is_truncated_to_a_whole_number_of_tokens(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^max_tokens=.*: give a whole number of at least 1, or None"
    ):
        HiddenStatesDataset([tmp_path / "a.safetensors"], max_tokens=value)


@pytest.mark.parametrize("name", ["prompt", "sample"])
@pytest.mark.parametrize("value", [-1, True, 1.5, math.nan])
def test_prompts_and_samples_are_counted_from_0(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*: give a whole number, counted from 0$"):
        find(tmp_path, "cmpl-1", **{name: value})
