"""Start-up: invalid settings are refused before weights are loaded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mooncake_master import free_port, require_mooncake
from test_config import vllm_config
from vllm import envs

from vllm_ascend_hsx import transfer_config
from vllm_ascend_hsx.config import LONGEST_WAIT_S, HsxConfig
from vllm_ascend_hsx.drafter.model import AscendExtractHiddenStatesModel
from vllm_ascend_hsx.drafter.ring import PinnedRing, ring_bytes_of
from vllm_ascend_hsx.plan.costs import Request, make_plan
from vllm_ascend_hsx.plan.shape import ModelShape
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.settings import read_settings
from vllm_ascend_hsx.sinks import destination
from vllm_ascend_hsx.sinks.destination import InDirectory


def serve(
    directory: Path | str,
    *,
    connector: str = "AscendHiddenStatesConnector",
    role: str = "kv_producer",
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:
    """Return the part of a VllmConfig that is read."""
    config = vllm_config()
    config.model_config.dtype = dtype
    config.kv_transfer_config = SimpleNamespace(
        kv_connector=connector,
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(directory), **options},
    )
    return config


def test_settings_read_at_start(tmp_path: Path) -> None:
    settings = read_settings(serve(tmp_path / "new"))
    assert settings.destination == InDirectory(tmp_path / "new") and (tmp_path / "new").is_dir()
    assert (
        settings.row_format.row_shape,
        settings.row_format.dtype,
        settings.row_format.layer_ids,
    ) == ((3, 64), "BF16", (34, 2, 36))


def test_options_are_found_inside_multi_connector(tmp_path: Path) -> None:
    config = serve(tmp_path, connector="MultiConnector", role="kv_both")
    ours = {
        "kv_connector": "AscendHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "ours")},
    }
    config.kv_transfer_config.kv_connector_extra_config = {
        "connectors": [{"kv_connector": "OffloadingConnector"}, ours]
    }
    assert read_settings(config).destination.directory == tmp_path / "ours"


def test_vllms_connector_next_to_ours_is_refused(tmp_path: Path) -> None:
    config = serve(tmp_path, connector="MultiConnector")
    names = ("AscendHiddenStatesConnector", "ExampleHiddenStatesConnector")
    config.kv_transfer_config.kv_connector_extra_config = {
        "connectors": [{"kv_connector": name} for name in names]
    }
    with pytest.raises(
        UserError,
        match=r"connectors='ExampleHiddenStatesConnector' reads .* from the KV cache.*Leave it out",
    ):
        read_settings(config)


@pytest.mark.parametrize(
    ("now", "named"),
    [({}, "ascend,ascend_model"), ({"VLLM_PLUGINS": "ascend_hsx,ascend_model"}, "ascend_model")],
)
def test_error_for_another_connector_explains_how_to_disable_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: dict[str, str], named: str
) -> None:
    points = {
        "vllm.platform_plugins": ["ascend"],
        "vllm.general_plugins": ["ascend_hsx", "ascend_model"],
    }
    monkeypatch.setattr(
        transfer_config,
        "entry_points",
        lambda group: [SimpleNamespace(name=name) for name in points.get(group, ())],
    )
    assert transfer_config.plugins_without_ours(now) == named


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"connector": "OffloadingConnector"},
            r"kv_connector='OffloadingConnector' does not take the hidden states",
        ),
        (
            {"connector": "MultiConnector"},
            r"kv_connector='MultiConnector' does not take the hidden states",
        ),
        ({"role": "kv_both"}, r"kv_role='kv_both'.*kv_producer"),
        ({"dtype": torch.float64}, r"dtype='torch.float64' cannot be stored"),
        ({"pinned_ring_bytes": 4096 - 1}, r"pinned_ring_bytes=4095"),
        ({"io": "mmap"}, r"io='mmap' cannot be used"),
        ({"durability": True}, r"durability=True cannot be used"),
        ({"checksum": "md5"}, r"checksum='md5' cannot be used"),
        ({"storage_timeout_s": 0}, r"storage_timeout_s=0 cannot be used"),
        (
            {"storage_timeout_s": 241},
            r"storage_timeout_s=241 cannot be used.*shortest timeout, 300 seconds",
        ),
        ({"drain_timeout_s": -1}, r"drain_timeout_s=-1 cannot be used"),
        ({"num_writers": 3}, r"num_writers=3 is not an option\. Did you mean 'num_writer_threads'"),
    ],
)
def test_invalid_setting_is_refused_at_start(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_settings(serve(tmp_path, **change))


def test_storage_timeout_is_shorter_than_the_timeout_of_the_executor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", raising=False)
    assert (
        envs.environment_variables["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]() == 300 > LONGEST_WAIT_S
    )


@pytest.mark.parametrize("ranks", [1, 8])
def test_slots_and_ring_have_the_sizes_of_the_plan(tmp_path: Path, ranks: int) -> None:
    config = serve(tmp_path)
    config.parallel_config.tensor_parallel_size = ranks
    config.compilation_config = SimpleNamespace(static_forward_context={})
    planned = make_plan(
        Request(
            shape=ModelShape("target", num_layers=36, hidden_size=64, dtype="bfloat16"),
            layer_ids=(34, 2, 36),
            tensor_parallel=ranks,
            data_parallel=1,
            max_num_batched_tokens=8192,
            kv_bytes=1 << 30,
            staging_slots=2,
            ring_bytes=None,
            prompt_tokens=100,
            prompts=1000,
            prefill_speed=500.0,
        )
    )
    settings = read_settings(config)
    assert (
        AscendExtractHiddenStatesModel(vllm_config=config).layer.staging.rows.nbytes
        == planned.staging_bytes
    )
    assert (
        PinnedRing(ring_bytes_of(settings), (3, 64), settings.dtype).pinned_bytes
        == planned.ring_bytes
    )
    config.model_config.get_hidden_size = lambda: 6144
    settings = read_settings(config)
    lacking = 2 * (8192 - 8192 // ranks) * 3 * 6144 * 2
    least = (
        256 << 20 if ranks == 1 else (32 << 20) + lacking
    )  # wide rows, so the ring holds the part that does not fit into the slots
    assert least <= ring_bytes_of(settings) < 2 * least
    assert ring_bytes_of(settings).bit_count() == 1, "torch pins powers of two"
    config.kv_transfer_config.kv_connector_extra_config["pinned_ring_bytes"] = "1MiB"
    assert ring_bytes_of(read_settings(config)) == 1 << 20


def test_ring_for_fewer_than_two_rows_is_refused(tmp_path: Path) -> None:
    config = serve(tmp_path, pinned_ring_bytes=8192)
    config.model_config.get_hidden_size = lambda: 4096
    with pytest.raises(
        UserError,
        match=r"pinned_ring_bytes=8192 does not hold two rows of 24576 bytes. Give at least 49152",
    ):
        read_settings(config)


def test_rows_that_direct_io_cannot_align_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers of 64 elements in bfloat16 make rows of 384 bytes."""
    monkeypatch.setattr("vllm_ascend_hsx.sinks.directory._SECTORS", (512,))
    read_settings(serve(tmp_path, io="buffered"))
    message = r"io='direct' needs rows of a multiple of 512 bytes .* make rows of 384 bytes\. Use \"buffered\""
    with pytest.raises(UserError, match=message):
        read_settings(serve(tmp_path, io="direct"))


def test_direct_io_has_no_effect_on_shards_and_the_server_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that direct I/O cannot align are accepted, and writers do not wait for the disk."""
    monkeypatch.setattr("vllm_ascend_hsx.sinks.directory._SECTORS", (512,))
    for _ in range(3):  # proposer, drafter, connector
        settings = read_settings(serve(tmp_path, io="direct", sink="shard"))
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "kv_connector_extra_config.io='direct' has no effect with sink='shard'"
        in warning.getMessage()
    )
    assert not settings.destination.waits
    caplog.clear()
    read_settings(serve(tmp_path, io="buffered", sink="shard"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(torch.bfloat16, 384), (torch.float16, 384), (torch.float32, 768)]
)
def test_fp8_stores_one_byte_per_element_of_any_dtype(
    tmp_path: Path, dtype: torch.dtype, row_bytes: int
) -> None:
    row_format = read_settings(serve(tmp_path, dtype=dtype, quantization="fp8")).row_format
    assert (row_format.row_bytes, row_format.stored_row_bytes, row_format.stored_dtype) == (
        row_bytes,
        192,
        "F8_E4M3",
    )


def test_direct_io_aligns_stored_rows_not_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_ascend_hsx.sinks.directory._SECTORS", (512,))
    config = serve(tmp_path, io="direct", quantization="fp8")
    config.model_config.get_hidden_size = lambda: 256
    with pytest.raises(
        UserError,
        match=r"io='direct' needs rows of a multiple of 512 bytes .* make rows of 768 bytes",
    ):
        read_settings(config)
    config.kv_transfer_config.kv_connector_extra_config["quantization"] = "none"
    assert read_settings(config).row_format.row_bytes == 1536


def test_fp8_rows_that_misalign_the_token_ids_are_refused(tmp_path: Path) -> None:
    config = serve(tmp_path, quantization="fp8")
    config.model_config.get_hidden_size = lambda: 60
    with pytest.raises(
        UserError,
        match=r"quantization='fp8' needs rows of a multiple of 8 elements, but 3 layers of 60 make 180",
    ):
        read_settings(config)


def test_storage_is_probed_once_per_process_unless_the_probe_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[Path] = []
    check = destination.check_directory
    monkeypatch.setattr(
        destination,
        "check_directory",
        lambda path, **options: probed.append(path) or check(path, **options),
    )
    for _ in range(3):  # proposer, drafter, connector
        read_settings(serve(tmp_path / "a"))
    read_settings(serve(tmp_path / "a", use_synchronization_lock=False))  # another configuration
    assert probed == [tmp_path / "a"] * 2
    (tmp_path / "b").write_text("")
    for _ in range(2):
        with pytest.raises(UserError, match="is not a directory"):
            read_settings(serve(tmp_path / "b"))
    (tmp_path / "b").unlink()
    assert read_settings(serve(tmp_path / "b")).row_format.row_bytes


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="shared_storage_path"):
        read_settings(serve(tmp_path / "file" / "directory"))


def test_unreachable_mooncake_store_is_refused_before_weights_are_loaded() -> None:
    require_mooncake()
    address = f"127.0.0.1:{free_port()}"
    config = serve("/nowhere", sink="mooncake", mooncake={"master_server_address": address})
    with pytest.raises(
        UserError, match=r"cannot be reached: Connection refused\. Start `mooncake_master`"
    ) as refusal:
        read_settings(config)
    assert f"kv_connector_extra_config.mooncake.master_server_address='{address}'" in str(
        refusal.value
    )
    assert not Path("/nowhere").exists()


def test_without_mooncakes_package_the_sink_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    config = serve(
        "/nowhere", sink="mooncake", mooncake={"master_server_address": "localhost:50051"}
    )
    with pytest.raises(
        UserError,
        match=r"sink='mooncake' cannot be used: Mooncake's package cannot be imported.*\[mooncake\]",
    ):
        read_settings(config)


def test_at_least_four_writers_serve_a_store(tmp_path: Path) -> None:
    settings = read_settings(serve(tmp_path))
    assert settings.num_writers(10_000)() == 2
    store = HsxConfig.parse(
        {"sink": "mooncake", "mooncake": {"master_server_address": "localhost:50051"}}
    )
    assert replace(settings, config=store).num_writers(10_000)() == 4
