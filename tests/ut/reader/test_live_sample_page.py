"""The commands and the loop for live traffic in docs/operations.md work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from documents import blocks
from sink_harness import FORMAT, publish

from vllm_ascend_hsx.cli.main import main
from vllm_ascend_hsx.cli.serve import parse_arguments
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.sinks.file import FileSink

STORAGE = "/data/hidden_states"


def test_documented_server_samples_within_a_budget() -> None:
    (command,) = blocks("operations.md", "sample")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["hsx", "serve"]
    options = parse_arguments(words[2:])
    config = HsxConfig.parse({"shared_storage_path": STORAGE, **dict(options.option)})
    assert (config.extract, config.sample_rate, config.directory_budget_bytes) == (
        "sample",
        0.1,
        64 << 30,
    )


def test_documented_clean_removes_files_of_the_documented_consumer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,), (command,) = blocks("operations.md", "consume"), blocks("operations.md", "clean")
    with FileSink(tmp_path, FORMAT) as sink:
        paths = [publish(sink, tmp_path, name) for name in "ab"]
    seen: list[object] = []
    exec(code.replace(STORAGE, str(tmp_path)), {"train": seen.append})
    assert len(seen) == 2
    words = shlex.split(command.replace(STORAGE, str(tmp_path)))
    assert words[0] == "hsx"
    assert main(words[1:]) == 0
    assert all(path.exists() for path in paths), "they are few and new"
    assert main([word.replace("48GiB", "0").replace("7d", "0s") for word in words[1:]]) == 0
    assert not any(path.exists() for path in paths)
    assert "removed: 2 acknowledged files\n" in capsys.readouterr().out
