"""The code of docs/reading.md works as written, in the order of the page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from documents import blocks
from written_files import write

from vllm_ascend_hsx.serve.options import kv_transfer_config, speculative_config

LAYERS = 4  # ids 1 to 4; `run` replaces the ids of the page
STORAGE = "/data/hidden_states"
PAGE_LAYERS = "layer_ids=[2, 31, 59]"


class OfflineLLM:
    """The part of vLLM's `LLM` that the page uses. Each prompt has the same file."""

    path: str = ""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def generate(self, prompts: list[str], sampling: Any) -> list[SimpleNamespace]:
        assert sampling.max_tokens == 1
        return [SimpleNamespace(kv_transfer_params={"hidden_states_path": self.path})] * len(
            prompts
        )


def test_page_examples_load_find_train_and_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = torch.randn(6, LAYERS, 8).bfloat16()
    name = "cmpl-1-0-0123abcd"
    path = write(tmp_path, name, rows, prompt=5)
    write(tmp_path, "other", rows[:3])
    monkeypatch.setitem(sys.modules, "vllm", offline := ModuleType("vllm"))
    monkeypatch.setattr(OfflineLLM, "path", str(path))
    offline.LLM = OfflineLLM  # type: ignore[attr-defined]
    offline.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    response = SimpleNamespace(id="cmpl-1", kv_transfer_params={"hidden_states_path": str(path)})
    names: dict[str, Any] = {"response": response}

    def run(label: str) -> str:
        (code,) = blocks("reading.md", label)
        code = code.replace(PAGE_LAYERS, "layer_ids=[4, 2]").replace(
            "num_workers=2", "num_workers=0"
        )
        exec(code.replace(STORAGE, str(tmp_path)), names)
        return capsys.readouterr().out

    run("load")
    assert torch.equal(names["states"].hidden_states, rows)
    assert names["states"].num_prompt_tokens == 5
    names["path"] = None
    run("find")
    assert names["path"] == path
    assert run("open-dir").splitlines() == [f"{path.name} 6", "other.safetensors 3"]
    run("dataset")
    assert names["rows"].shape == (2, 6, 2, 8) and names["rows"].dtype is torch.bfloat16
    assert sorted(names["loss_mask"].sum(1).tolist()) == [3, 6]
    run("numpy")
    assert names["rows"].dtype == "float16"
    assert run("offline").count(f"HiddenStates(path='{path}'") == 2
    names["path"] = path
    run("remove")
    assert not path.exists() and (tmp_path / "other.safetensors").exists()


def test_page_gives_offline_llm_the_options_of_a_server() -> None:
    (code,) = blocks("reading.md", "offline")
    names: dict[str, Any] = {"LLM": OfflineLLM}
    exec(code.partition("from vllm")[2].partition("\n")[2].partition("prompts =")[0], names)
    options = names["llm"].options
    assert options["speculative_config"] == speculative_config((2, 18, 33, 36))
    assert options["kv_transfer_config"] == kv_transfer_config(STORAGE)
