"""The sink looks for a name in the storage directory unless vLLM makes ids unique."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_startup import serve

from vllm_ascend_hsx.settings import read_settings
from vllm_ascend_hsx.sinks.member_names import MemberNames


@pytest.mark.parametrize("sink", ["file", "shard"])
@pytest.mark.parametrize(("value", "random"), [("0", True), ("1", False), (None, True)])
def test_server_asks_vllm_whether_ids_are_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str, value: str | None, random: bool
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    else:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
    settings = read_settings(serve(tmp_path, sink=sink))
    (tmp_path / "hsx-shards").touch()
    with settings.destination.make_sink(settings.row_format, memoryview(b"")) as made:
        looks: list[str] = []
        monkeypatch.setattr(MemberNames, "has", lambda self, name: looks.append(name) or False)
        made.open("cmpl-run-20240101", tmp_path / "cmpl-run-20240101.safetensors").discard()
        assert bool(looks) is not random
