"""Numbers: each option has bounds that its page names, and what lies outside is refused at once, not when it is first used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from vllm_ascend_hsx.config import HsxConfig, HsxConfigError, MooncakeOptions

OPTIONS_PAGE = Path(__file__).parents[2] / "docs" / "options.md"
STORE = {"master_server_address": "store:50051"}
HUGE = 10**5000  # Python refuses to write it down
EXTREMES = [math.inf, -math.inf, math.nan, 1e300, 1e30, 1e20, -1, -1.5, 0, 0.0, 2**31, 2**63, 2**64, 10**400, HUGE, -HUGE, True, False]
NUMBERS = st.one_of(st.sampled_from(EXTREMES), st.floats(), st.integers(), st.booleans())


def numeric(model: type[BaseModel]) -> dict[str, tuple[type, dict[str, float]]]:
    """The options that are numbers: int or float, and their bounds by sign."""
    found = {}
    for name, field in model.model_fields.items():
        kinds = [kind for kind in (int, float) if field.annotation in (kind, kind | None)]
        if kinds:
            bounds = {}
            for each in field.metadata:
                for sign, kind in (("≥", annotated_types.Ge), (">", annotated_types.Gt), ("≤", annotated_types.Le)):
                    if isinstance(each, kind):
                        bounds[sign] = getattr(each, kind.__name__.lower())
            found[name] = kinds[0], bounds
    return found


MODELS = {"": HsxConfig, "mooncake.": MooncakeOptions}
CASES = [(prefix, name, kind, bounds) for prefix, model in MODELS.items() for name, (kind, bounds) in numeric(model).items()]
each_option = pytest.mark.parametrize(("prefix", "name", "kind", "bounds"), CASES, ids=[prefix + name for prefix, name, *_ in CASES])


def parse(prefix: str, name: str, value: object) -> Any:
    if prefix:
        config = HsxConfig.parse({"sink": "mooncake", "mooncake": {**STORE, name: value}})
        return getattr(config.mooncake, name)
    return getattr(HsxConfig.parse({"shared_storage_path": "/data", name: value}), name)


def test_there_are_options_that_are_numbers() -> None:
    assert {"drain_timeout_s", "pinned_ring_bytes", "global_segment_size"} <= {name for _, name, *_ in CASES}


@each_option
def test_every_number_has_an_upper_and_a_lower_bound_which_its_page_names(
    prefix: str, name: str, kind: type, bounds: dict[str, float]
) -> None:
    assert set(bounds) in ({"≥", "≤"}, {">", "≤"})
    page = OPTIONS_PAGE.read_text(encoding="utf-8").partition("\n## mooncake\n")[2 if prefix else 0]
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` ")]
    assert all(f"{sign} {bound}" in row for sign, bound in bounds.items()), row


@each_option
@given(value=NUMBERS)
def test_a_number_is_taken_only_within_its_bounds_and_refused_by_name(
    prefix: str, name: str, kind: type, bounds: dict[str, float], value: float
) -> None:
    right = not isinstance(value, bool) and (kind is float or isinstance(value, int))
    inside = value > bounds[">"] if ">" in bounds else value >= bounds["≥"]
    if right and inside and value <= bounds["≤"]:
        assert parse(prefix, name, value) == value
        return
    with pytest.raises(HsxConfigError) as refusal:
        parse(prefix, name, value)
    message = str(refusal.value)
    assert f"kv_connector_extra_config.{prefix}{name}=" in message
    if abs(value) != HUGE:
        assert f"{name}={value!r} " in message


@pytest.mark.parametrize("digits", [25, 5000])
def test_a_size_in_words_has_the_bounds_of_a_number(digits: int) -> None:
    with pytest.raises(HsxConfigError, match=r"kv_connector_extra_config\.pinned_ring_bytes='9+GiB'"):
        parse("", "pinned_ring_bytes", "9" * digits + "GiB")
