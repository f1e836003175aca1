"""Sleep levels and their rows, and checks of a server after a device error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sink_harness import FORMAT

from vllm_ascend_hsx.demo.options import ServeOptions
from vllm_ascend_hsx.report import drills, workers
from vllm_ascend_hsx.report.context import ONE, Context, Sizes
from vllm_ascend_hsx.report.drills import DEVICE_TEXTS, judge_device_error
from vllm_ascend_hsx.report.result import BROKE, HELD, Teller, read_told
from vllm_ascend_hsx.sinks.file import FileSink

GIB = 1 << 30
TEXT = "EZ9999: Inner Error! A failure"
GOOD: dict[str, Any] = {
    "seconds": 4.0,
    "left": 0,
    "answered": 0,
    "reasons": [TEXT, TEXT],
    "undecided": [],
}


def test_server_end_with_the_devices_text_in_each_file_holds() -> None:
    assert judge_device_error(**GOOD) == (
        HELD,
        "ended after 4 s; 2 of 2 files have the device's text",
    )
    assert all(
        judge_device_error(**{**GOOD, "reasons": [f"... {text} ..."]}).outcome == HELD
        for text in DEVICE_TEXTS
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"seconds": 31.0}, "exceeds 30 s"),
        ({"seconds": 90.0, "left": 2}, "2 processes were still running"),
        ({"answered": 1}, "1 requests got an answer or a file afterwards"),
        (
            {"reasons": [TEXT, "the storage did not take 8 bytes"]},
            "another reason is: the storage did not take",
        ),
        ({"reasons": []}, "no file has a reason"),
        ({"undecided": ["a.safetensors: a lock without a file"]}, "a lock without a file"),
    ],
    ids=["late", "never", "an answer", "the storage is blamed", "no reason", "undecided"],
)
def test_problems_after_a_device_error_are_named(wrong: dict[str, Any], words: str) -> None:
    judgement = judge_device_error(**{**GOOD, **wrong})
    assert judgement.outcome == BROKE
    assert words in judgement.found and judgement.found.endswith("paste this report into an issue")


@pytest.mark.parametrize("emulated", [True, False], ids=["emulated", "on NPUs"])
def test_reasons_of_all_files_are_read_after_a_device_error(
    emulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "logs").mkdir()
    environ: dict[str, str] = {}
    called: list[str] = []

    @contextmanager
    def serving(
        context: Context, name: str, serve: ServeOptions, **variables: str
    ) -> Iterator[Any]:
        environ.update(variables)
        with FileSink(serve.storage, FORMAT) as sink:
            for request_id in "ab":
                file = sink.open(request_id, serve.storage / f"{request_id}.safetensors")
                file.fail(f"the engine failed: {TEXT}")
        yield SimpleNamespace(url="http://server", process=SimpleNamespace(pid=1))

    monkeypatch.setattr(drills, "serving", serving)
    monkeypatch.setattr(drills, "in_flight", lambda server, **_: nullcontext([]))
    monkeypatch.setattr(drills, "group_members", lambda group: [])
    monkeypatch.setattr(workers, "call", lambda url, method: called.append(method))
    found = {"npus": {"npus": [{"free": GIB}]}}
    drills.device_error(
        Context(tmp_path, tmp_path, emulated, found=found), Teller(tmp_path / "told")
    )
    (result,), _ = read_told(tmp_path / "told")
    assert result.outcome == HELD
    assert result.data["reasons"] == {f"the engine failed: {TEXT}": 2}
    assert ("hsx_fail" in called, environ.get("TASK_QUEUE_ENABLE") == "2") == (
        not emulated,
        not emulated,
    )
    assert (tmp_path / "logs" / "device-error.fault").exists() == emulated


@pytest.mark.parametrize("experts", [0, 8], ids=["dense", "with experts"])
def test_rows_are_checked_after_both_sleep_levels(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"num_attention_heads": 8, "num_hidden_layers": 4, "num_local_experts": experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    happened: list[str] = []
    served: list[Path] = []

    @contextmanager
    def serving(context: Context, name: str, serve: ServeOptions, **_: str) -> Iterator[Any]:
        assert "--enable-sleep-mode" in serve.command()
        served.append(context.model)
        yield SimpleNamespace(url="http://server")

    def check_rows(
        context: Context, server: Any, layer_ids: Any, line: str, *_: Any, **__: Any
    ) -> None:
        happened.append(line)

    monkeypatch.setattr(drills, "serving", serving)
    monkeypatch.setattr(drills, "check_rows", check_rows)
    monkeypatch.setattr(drills, "_post", lambda server, path: happened.append(path))
    monkeypatch.setattr(workers, "call", lambda url, method, *_: happened.append(method))
    drills.sleep(Context(tmp_path, tmp_path, True), Teller(tmp_path / "told"))
    assert happened == [
        "awake",
        *("/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache", "sleep 1"),
        *(
            "/sleep?level=2",
            "/wake_up?tags=weights",
            "hsx_reload_weights",
            "/wake_up?tags=kv_cache",
        ),
        "sleep 2",
    ]
    assert served == [tmp_path / "files" / "tiny-qwen3" if experts else tmp_path]


@pytest.mark.parametrize(("free", "sizes"), [(60, ONE), (2, Sizes(2, 1, False))])
def test_device_error_is_tested_on_the_smallest_server(
    free: int, sizes: Sizes, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2 * GIB)
    found = {
        "npus": {"npus": [{"free": free * GIB}]},
        "sizes": {"tensor_parallel": 2, "data_parallel": 1, "expert_parallel": False},
    }
    assert Context(tmp_path, tmp_path, False, found=found).least_sizes == sizes
