"""The Python API accepts paths as strings and as pathlib.Path."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
from written_files import rows_of, write

import vllm_ascend_hsx
from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.api import ParamsError, ServerParams, read_params
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.reader.dataset import HiddenStatesDataset
from vllm_ascend_hsx.serve.command import build
from vllm_ascend_hsx.serve.options import kv_transfer_config

KINDS = [str, Path, PurePath]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@each_kind
def test_readers_and_remove_accept_strings_and_paths(
    kind: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = write(tmp_path, "cmpl-1-0", rows_of(5))
    assert len(vllm_ascend_hsx.load(kind(path)).token_ids) == 5
    assert vllm_ascend_hsx.find(kind(tmp_path), "cmpl-1") == path
    assert [found for found, _ in vllm_ascend_hsx.open_dir(kind(tmp_path))] == [path]
    assert len(HiddenStatesDataset(kind(tmp_path))) == len(HiddenStatesDataset([kind(path)])) == 1
    vllm_ascend_hsx.remove(kind(path))
    assert not path.exists()


@each_kind
def test_llm_configuration_accepts_a_directory_as_string_or_path(
    kind: Callable[[Path], Any], tmp_path: Path
) -> None:
    assert HsxConfig.parse({"shared_storage_path": kind(tmp_path)}).shared_storage_path == str(
        tmp_path
    )
    config = kv_transfer_config(kind(tmp_path))
    assert json.loads(json.dumps(config))["kv_connector_extra_config"][
        "shared_storage_path"
    ] == str(tmp_path)
    with pytest.raises(UserError, match="is not an absolute path"):
        HsxConfig.parse({"shared_storage_path": kind(Path("rows"))})


@each_kind
def test_request_may_choose_a_file_as_string_or_path(
    kind: Callable[[Path], Any], tmp_path: Path
) -> None:
    server = ServerParams(tmp_path, allow_path=True)
    for chosen in (tmp_path / "a.safetensors", Path("a.safetensors")):
        assert (
            read_params({"hidden_states_path": kind(chosen)}, server).path
            == tmp_path / "a.safetensors"
        )
    with pytest.raises(
        ParamsError,
        match=r"hidden_states_path is '/elsewhere/a\.safetensors', which is outside the storage directory",
    ):
        read_params({"hidden_states_path": kind(Path("/elsewhere/a.safetensors"))}, server)


@each_kind
def test_serve_accepts_strings_and_paths(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 62, "architectures": ["MiniMaxM2ForCausalLM"]}'
    )
    assert str(build(kind(tmp_path), "mtp", kind(tmp_path / "rows"), {}, (), {})) == str(
        build(str(tmp_path), "mtp", tmp_path / "rows", {}, (), {})
    )


@each_kind
def test_speculators_transfer_accepts_strings_and_paths(
    kind: Callable[[Path], Any], tmp_path: Path
) -> None:
    pytest.importorskip(
        "hs_connectors", reason="hs-connectors is only in the environment of the tests"
    )
    from vllm_ascend_hsx.integrations.speculators import HsxTransfer

    path = write(tmp_path, "hs_0", rows_of(5))
    transfer = HsxTransfer(kind(tmp_path))
    cached = transfer.get_cached(0)
    assert cached is not None and len(cached["token_ids"]) == 5
    assert len(transfer.get_generated({"hidden_states_path": kind(path)})["token_ids"]) == 5
    transfer.delete(kind(path))
    assert not path.exists()
