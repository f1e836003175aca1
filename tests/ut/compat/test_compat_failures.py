"""A step's exception reaches our connector, and tokens of a failed device are not sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from patching import apply
from vllm.distributed.kv_transfer import kv_transfer_state

from vllm_ascend_hsx.compat import failures
from vllm_ascend_hsx.drafter.landing import DeviceError


class Connector:
    """Records the calls of the patches. `ask_device` raises if the device has failed."""

    def __init__(self, device_error: Exception | None = None) -> None:
        self.failures: list[Exception] = []
        self._device_error = device_error

    def engine_failed(self, error: Exception) -> None:
        self.failures.append(error)

    def ask_device(self) -> None:
        if self._device_error is not None:
            raise self._device_error


def use(monkeypatch: pytest.MonkeyPatch, connector: object, multi: bool) -> None:
    group = SimpleNamespace(_connectors=[object(), connector]) if multi else connector
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", group)


def patched_worker() -> Any:
    class NPUWorker:
        def execute_model(self, scheduler_output: Any) -> str:
            if isinstance(scheduler_output, Exception):
                raise scheduler_output
            return "output"

        sample_tokens = execute_model

    apply(SimpleNamespace(NPUWorker=NPUWorker), failures.report_failed_step)
    return NPUWorker()


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_step_exception_reaches_our_connector_and_is_raised(
    monkeypatch: pytest.MonkeyPatch, method: str, multi: bool
) -> None:
    connector, error = Connector(), RuntimeError("aclnnStack")
    use(monkeypatch, connector, multi)
    step = getattr(patched_worker(), method)
    assert step("a step") == "output"
    assert connector.failures == []
    with pytest.raises(RuntimeError) as raised:
        step(error)
    assert raised.value is error
    assert connector.failures == [error]


def test_a_step_of_a_server_without_connector_raises_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    with pytest.raises(RuntimeError, match="aclnnStack"):
        patched_worker().execute_model(RuntimeError("aclnnStack"))


@pytest.mark.parametrize("name", ["AsyncGPUModelRunnerOutput", "AsyncOutput"])
@pytest.mark.parametrize("error", [None, DeviceError("aclnnStack")], ids=["healthy", "failed"])
def test_tokens_of_a_step_are_sent_only_without_device_error(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception | None
) -> None:
    class Output:
        def get_output(self) -> str:
            return "tokens"

    connector = Connector(error)
    use(monkeypatch, connector, multi=False)
    apply(SimpleNamespace(**{name: Output}), failures.withhold_spoilt_output)
    if error is None:
        assert Output().get_output() == "tokens"
        return
    with pytest.raises(DeviceError):
        Output().get_output()
    assert connector.failures == [error]
