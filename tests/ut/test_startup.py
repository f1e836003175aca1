"""Start-up: each setting that cannot be used is refused before weights are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_config import vllm_config

from vllm_ascend_hsx.config import HsxConfigError
from vllm_ascend_hsx.sinks.directory import StorageDirectoryError
from vllm_ascend_hsx.startup import read_start_up


def serve(
    directory: Path | str,
    *,
    connector: str = "AscendHiddenStatesConnector",
    role: str = "kv_producer",
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:
    """As much of a VllmConfig as is read."""
    config = vllm_config()
    config.model_config.dtype = dtype
    config.kv_transfer_config = SimpleNamespace(
        kv_connector=connector, kv_role=role, kv_connector_extra_config={"shared_storage_path": str(directory), **options}
    )
    return config


def test_what_is_settled_at_start(tmp_path: Path) -> None:
    start_up = read_start_up(serve(tmp_path / "new"))
    assert start_up.directory.is_dir()
    assert (start_up.row_format.row_shape, start_up.row_format.dtype, start_up.row_format.layer_ids) == ((3, 64), "BF16", (34, 2, 36))


def test_our_entry_is_found_inside_a_multi_connector(tmp_path: Path) -> None:
    config = serve(tmp_path, connector="MultiConnector", role="kv_both")
    ours = {
        "kv_connector": "AscendHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "ours")},
    }
    config.kv_transfer_config.kv_connector_extra_config = {"connectors": [{"kv_connector": "OffloadingConnector"}, ours]}
    assert read_start_up(config).directory == tmp_path / "ours"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"connector": "OffloadingConnector"}, r"kv_connector='OffloadingConnector' does not take the hidden states"),
        ({"connector": "MultiConnector"}, r"kv_connector='MultiConnector' does not take the hidden states"),
        ({"role": "kv_both"}, r"kv_role='kv_both'.*kv_producer"),
        ({"dtype": torch.float64}, r"dtype='torch.float64' cannot be stored"),
        ({"pinned_ring_bytes": 4096 - 1}, r"pinned_ring_bytes=4095"),
        ({"io": "mmap"}, r"io='mmap' cannot be used"),
        ({"durability": True}, r"durability=True cannot be used"),
        ({"checksum": "md5"}, r"checksum='md5' cannot be used"),
        ({"storage_patience_s": 0}, r"storage_patience_s=0 cannot be used"),
        ({"drain_timeout_s": -1}, r"drain_timeout_s=-1 cannot be used"),
        ({"num_writers": 3}, r"num_writers=3 is not an option\. Did you mean 'num_writer_threads'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(HsxConfigError, match=message):
        read_start_up(serve(tmp_path, **change))


def test_a_ring_that_holds_less_than_two_rows_is_refused(tmp_path: Path) -> None:
    config = serve(tmp_path, pinned_ring_bytes=8192)
    config.model_config.get_hidden_size = lambda: 4096
    with pytest.raises(HsxConfigError, match=r"pinned_ring_bytes=8192 does not hold two rows of 24576 bytes. Give at least 49152"):
        read_start_up(config)


def test_rows_that_direct_io_cannot_align_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of 64 elements in bfloat16 make rows of 384 bytes."""
    monkeypatch.setattr("vllm_ascend_hsx.sinks.directory._SECTORS", (512,))
    read_start_up(serve(tmp_path, io="buffered"))
    message = r"io='direct' needs rows of a multiple of 512 bytes .* make rows of 384 bytes\. Use \"buffered\""
    with pytest.raises(HsxConfigError, match=message):
        read_start_up(serve(tmp_path, io="direct"))


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageDirectoryError, match="shared_storage_path"):
        read_start_up(serve(tmp_path / "file" / "directory"))
