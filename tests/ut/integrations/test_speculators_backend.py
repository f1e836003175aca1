"""The backend `hsx` of speculators starts our server, waits for samples, and cleans up."""

from __future__ import annotations

import argparse
import inspect
import json
import pickle
import re
import sys
import threading
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import page
from packaging.requirements import Requirement
from safetensors.torch import save_file
from sink_harness import FORMAT, listing, make_rows, token_ids, wait_for_sleepers

from vllm_ascend_hsx.cli import speculators as command
from vllm_ascend_hsx.reader.load import HiddenStatesError
from vllm_ascend_hsx.serve.options import kv_transfer_config
from vllm_ascend_hsx.sinks.file import FileSink

if find_spec("hs_connectors") is None:
    pytest.skip(
        "a backend of hs-connectors: pip install --no-deps hs-connectors", allow_module_level=True
    )

from hs_connectors import FileTransfer, HiddenStatesBackend

from vllm_ascend_hsx.integrations.speculators import HsxBackend, HsxTransfer


def launch(*words: str) -> dict[str, Any]:
    """As in launch_vllm.py, every backend adds options to one parser."""
    parser = argparse.ArgumentParser()
    for backend in HiddenStatesBackend.registry.values():
        backend.add_launch_args(parser)
    return HiddenStatesBackend.registry["hsx"].build_kv_transfer_config(parser.parse_args(words))


def train_defaults() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    HsxBackend.add_train_args(parser)
    return parser.parse_args([])


@pytest.fixture
def sink(tmp_path: Path) -> Any:
    sink = FileSink(tmp_path, FORMAT)
    yield sink
    sink.close()


def begun(sink: FileSink, path: Path) -> Any:
    file = sink.open("r", path)
    file.write(0, make_rows(0, 5))
    return file


def test_launched_server_extracts_with_our_connector(tmp_path: Path) -> None:
    config = launch(
        "--hidden-states-path",
        str(tmp_path),
        "--hsx-options",
        '{"io": "direct", "num_writer_threads": 2}',
    )
    expected = kv_transfer_config(tmp_path)
    expected["kv_connector_extra_config"] |= {"io": "direct", "num_writer_threads": 2}
    assert config == expected
    assert config["kv_connector"] == "AscendHiddenStatesConnector"
    assert config["kv_role"] == "kv_producer"


def test_mooncake_server_gets_no_directory() -> None:
    options = {"sink": "mooncake", "mooncake": {"master_server_address": "store:50051"}}
    assert launch("--hsx-options", json.dumps(options))["kv_connector_extra_config"] == options


def test_relative_directory_is_resolved_by_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch("--hidden-states-path", "files") == kv_transfer_config(tmp_path / "files")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("io", "Expecting value"),
        ("[1]", r"\[1\] is not an object"),
        ('{"num_writer_thread": 2}', "Did you mean 'num_writer_threads'"),
        ('{"io": "fast"}', "kv_connector_extra_config.io='fast'"),
        ('{"shared_storage_path": "/elsewhere"}', "--hidden-states-path"),
    ],
)
def test_a_wrong_option_is_refused_before_the_server_starts(
    options: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        launch("--hsx-options", options)
    assert re.search(complaint, capsys.readouterr().err)


def test_training_options_have_types_that_speculators_copies() -> None:
    """Only type, choices and help; others change the meaning (train/config/resolution.py:248)."""
    parser = argparse.ArgumentParser(add_help=False)
    HsxBackend.add_train_args(parser)
    for action in parser._actions:
        assert type(action).__name__ == "_StoreAction"
        assert action.nargs is None
        assert action.option_strings == ["--" + action.dest.replace("_", "-")]


def test_samples_have_the_paths_of_the_file_backend(tmp_path: Path) -> None:
    args = train_defaults()
    assert HsxBackend.from_train_args(args, "/data").directory == Path("/data/hidden_states")
    args.hidden_states_path = str(tmp_path)
    args.hsx_timeout = 5.0
    transfer = HsxBackend.from_train_args(args, "/data")
    assert (transfer.directory, transfer.timeout) == (tmp_path, 5.0)
    assert transfer.get_cached(3) is None
    sample = {"hidden_states": torch.randn(4, 2, 8), "token_ids": torch.arange(4)}
    save_file(sample, tmp_path / "hs_3.safetensors")
    for reader in (transfer, FileTransfer(tmp_path), pickle.loads(pickle.dumps(transfer))):
        found = reader.get_cached(3)
        assert found.keys() == sample.keys()
        assert all(torch.equal(found[key], sample[key]) for key in sample)


def test_damaged_sample_raises_instead_of_missing(tmp_path: Path) -> None:
    (tmp_path / "hs_0.safetensors").write_bytes(b"half a file")
    with pytest.raises(HiddenStatesError, match="not a file of hidden states"):
        HsxTransfer(tmp_path).get_cached(0)


def test_reader_waits_for_the_server_and_leaves_no_files(sink: FileSink, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    file = begun(sink, path)
    transfer = HsxTransfer(tmp_path)
    samples: list[dict[str, torch.Tensor]] = []
    thread = threading.Thread(
        target=lambda: samples.append(transfer.get_generated({"hidden_states_path": str(path)}))
    )
    thread.start()
    wait_for_sleepers(Path(f"{path}.lock"))
    assert samples == []
    file.commit(token_ids(5), 5)
    thread.join(30)
    (sample,) = samples
    assert sample["token_ids"].tolist() == token_ids(5).tolist()
    assert (sample["hidden_states"].view(torch.uint16).numpy() == make_rows(0, 5)).all()
    transfer.delete(str(path))
    assert listing(tmp_path) == []


def test_reader_waits_for_the_given_time(sink: FileSink, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    begun(sink, path)
    with pytest.raises(TimeoutError):
        HsxTransfer(tmp_path, timeout=0).get_generated({"hidden_states_path": str(path)})


def test_missing_sample_raises_with_the_reason(sink: FileSink, tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    begun(sink, path).fail("the disk is full")
    params = {"hidden_states_path": str(path)}
    transfer = HsxTransfer(tmp_path)
    with pytest.raises(HiddenStatesError, match="the disk is full"):
        transfer.get_generated(params)
    assert FileTransfer(tmp_path).get_generated(params) is None
    transfer.delete(str(path))
    assert listing(tmp_path) == []


def test_missing_packages_and_scripts_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "vllm_ascend_hsx.integrations.speculators")
    monkeypatch.setitem(sys.modules, "hs_connectors", None)
    assert command.main(["train"]) == 1
    assert "install hs-connectors" in capsys.readouterr().err


def test_script_can_use_the_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "launch.py"
    lines = [
        "import sys",
        "from hs_connectors import HiddenStatesBackend",
        "print(sys.argv[1:], 'hsx' in HiddenStatesBackend.registry)",
    ]
    script.write_text("\n".join([*lines, "assert __name__ == '__main__'"]))
    assert command.main([str(script), "model", "--", "--port"]) == 0
    assert capsys.readouterr().out == "['model', '--', '--port'] True\n"


def test_command_without_arguments_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out.count("hsx speculators COMMAND") == 2


def test_requirements_of_speculators_are_installed_except_unused_ones() -> None:
    """speculators is installed without requirements: torchvision and torchaudio have gigabytes."""
    missing = {
        each.name
        for package in ("speculators", "hs-connectors", "datasets", "pandas", "multiprocess")
        for each in map(Requirement, requires(package) or [])
        if each.marker is None or each.marker.evaluate({"extra": ""})
        if not satisfied(each)
    }
    assert missing == {"torchaudio", "torchvision"}


def satisfied(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name).partition("+")[0])
    except PackageNotFoundError:
        return False


def test_documented_wait_of_speculators_reader_is_correct() -> None:
    from hs_connectors.transfer import wait_for_lock

    assert inspect.signature(wait_for_lock).parameters["timeout"].default == 10.0
    line = inspect.getsourcelines(wait_for_lock)[1]
    claim = (
        "at most 10 s and then raises `Timed out waiting for lock` "
        f"(`hs_connectors/transfer.py:{line}`"
    )
    assert claim in " ".join(page("speculators.md").split())
