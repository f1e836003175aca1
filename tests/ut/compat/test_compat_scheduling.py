"""Balance scheduling is refused where vllm-ascend refuses it, with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from releases import installed_is

from vllm_ascend_hsx.compat.scheduling import refuse_balance_scheduling
from vllm_ascend_hsx.protocol.errors import UserError

KEY, VARIABLE = "enable_balance_scheduling", "VLLM_ASCEND_BALANCE_SCHEDULING"


@pytest.mark.parametrize(
    ("config", "environ", "named"),
    [
        ({KEY: True}, {}, f"additional_config.{KEY}=True"),
        ({KEY: 1}, {VARIABLE: "0"}, f"additional_config.{KEY}=1"),
        ({"scheduler_config": {KEY: True}}, {}, f"additional_config.scheduler_config.{KEY}=True"),
        (
            {"scheduler_config": {KEY: True}, KEY: False},
            {},
            f"additional_config.scheduler_config.{KEY}=True",
        ),
    ],
)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_balance_scheduling_is_refused_by_option_value_and_remedy(
    config: dict[str, Any], environ: dict[str, str], named: str, role: str
) -> None:
    with pytest.raises(UserError) as refused:
        refuse_balance_scheduling(config, role, environ)
    assert str(refused.value).startswith(
        f"{named} needs kv_role='kv_both' in vllm-ascend, but this server has {role!r}."
    )
    assert "Remove it, or make this connector a child of a MultiConnector" in str(refused.value)


def test_environment_variable_is_refused_if_vllm_ascend_reads_it() -> None:
    if installed_is(">=0.30"):
        refuse_balance_scheduling({}, "kv_producer", {VARIABLE: "1"})
        return
    with pytest.raises(UserError, match=f"^{VARIABLE}='1' needs kv_role"):
        refuse_balance_scheduling({}, "kv_producer", {VARIABLE: "1"})


@pytest.mark.parametrize(
    ("config", "environ", "role"),
    [
        ({}, {}, "kv_producer"),
        ({KEY: False}, {VARIABLE: "1"}, "kv_producer"),
        ({"scheduler_config": {KEY: False}, KEY: True}, {}, "kv_producer"),
        ({"scheduler_config": None}, {VARIABLE: "0"}, "kv_producer"),
        ({KEY: True}, {VARIABLE: "1"}, "kv_both"),
    ],
)
def test_server_without_balance_scheduling_is_accepted(
    config: dict[str, Any], environ: dict[str, str], role: str
) -> None:
    refuse_balance_scheduling(config, role, environ)
