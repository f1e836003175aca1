"""Options: invalid values are refused with option, value and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_hsx.config import HsxConfig
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.target import read_target, validate_layer_ids
from vllm_ascend_hsx.transfer_config import require_producer

GOOD = {"shared_storage_path": "/data/hidden_states"}


def test_defaults_need_only_the_directory() -> None:
    config = HsxConfig.parse(GOOD)
    assert config.shared_storage_path == "/data/hidden_states"
    assert config.pinned_ring_bytes is None
    assert config.use_synchronization_lock is True


@pytest.mark.parametrize(
    ("given_options", "option", "value", "remedy"),
    [
        ({}, "shared_storage_path", None, "directory of the files"),
        ({"shared_storage_path": "relative"}, "shared_storage_path", "'relative'", "absolute path"),
        ({"shared_storage_path": 7}, "shared_storage_path", "7", "Directory for the files"),
        (
            GOOD | {"num_writer_thread": 8},
            "num_writer_thread",
            "8",
            "Did you mean 'num_writer_threads'?",
        ),
        (
            GOOD | {"file_mode": 640},
            "file_mode",
            "640",
            "is a number; write the octal digits as a string, such as '0640'",
        ),
        (
            GOOD | {"file_mode": "7777"},
            "file_mode",
            "'7777'",
            "is not a mode of three octal digits",
        ),
        (GOOD | {"zzz": 1}, "zzz", "1", "The options are: shared_storage_path"),
        (GOOD | {"num_writer_threads": "8"}, "num_writer_threads", "'8'", "Threads per worker"),
        (GOOD | {"num_writer_threads": 0}, "num_writer_threads", "0", "greater than or equal to 1"),
        (GOOD | {"staging_slots": 1.5}, "staging_slots", "1.5", "Number of device buffers"),
        (GOOD | {"use_synchronization_lock": "no"}, "use_synchronization_lock", "'no'", "flock"),
        (GOOD | {"pinned_ring_bytes": "32MB"}, "pinned_ring_bytes", "'32MB'", "KiB, MiB or GiB"),
        (GOOD | {"pinned_ring_bytes": "٣GiB"}, "pinned_ring_bytes", "'٣GiB'", "KiB, MiB or GiB"),
        (
            {"shared_storage_path": "/a\0b"},
            "shared_storage_path",
            r"'/a\x00b'",
            "Directory for the files",
        ),
        (
            {"shared_storage_path": "/\ud800"},
            "shared_storage_path",
            r"'/\ud800'",
            "Directory for the files",
        ),
        (GOOD | {"\ud800": 1}, r"\ud800", "1", "The options are: shared_storage_path"),
        (GOOD | {"a\nb": 1}, r"a\nb", "1", "The options are: shared_storage_path"),
        (GOOD | {1: 2}, "1", "2", "The options are: shared_storage_path"),
        (
            {"sink": "mooncake", "mooncake": {1: 2}},
            "mooncake.1",
            "2",
            "The options are: master_server_address",
        ),
        (
            {"sink": "mooncake", "mooncake": {"\ud800": 2}},
            r"mooncake.\ud800",
            "2",
            "The options are: master_server_address",
        ),
        (GOOD | {"pinned_ring_bytes": -1}, "pinned_ring_bytes", "-1", "Pinned host memory"),
    ],
)
def test_bad_option_is_refused_with_name_value_and_remedy(
    given_options: dict[str, Any], option: str, value: str, remedy: str
) -> None:
    with pytest.raises(UserError) as refusal:
        HsxConfig.parse(given_options)
    message = str(refusal.value)
    assert f"kv_connector_extra_config.{option}={value}" in message
    assert remedy in message
    assert "\n" not in message


MASTER = {"master_server_address": "store:50051"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            (
                "kv_connector_extra_config.shared_storage_path=None is missing. Set it to the "
                "directory"
            ),
        ),
        (
            {"sink": "shard"},
            (
                "kv_connector_extra_config.shared_storage_path=None is missing. Set it to the "
                "directory"
            ),
        ),
        (
            {"sink": "mooncake"},
            (
                "kv_connector_extra_config.mooncake=None is missing, but sink is 'mooncake'. Set "
                "it "
                "to {"
            ),
        ),
        (
            {"sink": "shards"},
            (
                "kv_connector_extra_config.sink='shards' cannot be used: Input should be 'file', "
                "'shard' or 'mooncake'"
            ),
        ),
        (
            {"quantization": "int8"},
            (
                "kv_connector_extra_config.quantization='int8' cannot be used: Input should be "
                "'none' or 'fp8'"
            ),
        ),
        (
            GOOD | {"extract": "sample"},
            (
                "sample_rate=None is missing, but extract is 'sample'. Set it to the share of "
                "requests to"
            ),
        ),
        (
            GOOD | {"sample_rate": 0.5},
            (
                "sample_rate=0.5 has no effect, because extract is 'all'. Set extract to 'sample', "
                "or leave sample_rate out."
            ),
        ),
        (
            GOOD | {"extract": "sample", "sample_rate": 0},
            "sample_rate=0 cannot be used: Input should be greater than 0",
        ),
        (
            GOOD | {"sink": "shard", "directory_budget_bytes": "1GiB"},
            (
                "directory_budget_bytes=1073741824 is not supported with sink 'shard': a shard "
                "holds its space until the whole tar file"
            ),
        ),
        (
            {"sink": "mooncake", "mooncake": MASTER, "directory_budget_bytes": 1},
            (
                "directory_budget_bytes=1 is not supported with sink 'mooncake': the store has "
                "no directory"
            ),
        ),
        (
            {"shard_bytes": 100},
            (
                "kv_connector_extra_config.shard_bytes=100 cannot be used: Input should be greater "
                "than or"
            ),
        ),
        ({"shard_bytes": "4 gigs"}, "kv_connector_extra_config.shard_bytes='4 gigs' is not a size"),
        (
            {"mooncake": "store:50051"},
            "kv_connector_extra_config.mooncake='store:50051' cannot be used",
        ),
        (
            {"mooncake": {}},
            (
                "kv_connector_extra_config.mooncake.master_server_address=None is missing. "
                "master_server_address: host:port"
            ),
        ),
        (
            {"mooncake": {**MASTER, "protocol": "udp"}},
            "kv_connector_extra_config.mooncake.protocol='udp' cannot be used",
        ),
        (
            {"mooncake": {**MASTER, "divice_name": "mlx5_0"}},
            "mooncake.divice_name='mlx5_0' is not an option. Did you mean 'device_name'?",
        ),
        (
            {"mooncake": {**MASTER, "local_buffer_size": "2"}},
            "kv_connector_extra_config.mooncake.local_buffer_size='2' cannot be used",
        ),
    ],
)
def test_sink_without_a_required_option_is_refused_with_the_remedy(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as refusal:
        HsxConfig.parse(options)
    assert said in str(refusal.value)


def test_a_mooncake_store_needs_no_directory() -> None:
    config = HsxConfig.parse(
        {"sink": "mooncake", "mooncake": {**MASTER, "global_segment_size": "1 GiB"}}
    )
    assert config.mooncake is not None
    assert config.mooncake.global_segment_size == 1 << 30


@pytest.mark.parametrize(
    ("text", "size"), [("32MiB", 32 << 20), ("1 GiB", 1 << 30), ("8192", 8192), (65536, 65536)]
)
def test_sizes_are_bytes_or_have_a_unit(text: object, size: int) -> None:
    assert HsxConfig.parse(GOOD | {"pinned_ring_bytes": text}).pinned_ring_bytes == size


@pytest.mark.parametrize(
    ("layer_ids", "problem"),
    [
        (None, "is not a list of layer ids"),
        ([], "is not a list of layer ids"),
        ("2,3", "is not a list of layer ids"),
        ([1, "2"], "is not a list of layer ids"),
        ([1, True], "is not a list of layer ids"),
        ([2, 99], "has id 99, which the target does not have"),
        ([-1, 2], "has id -1, which the target does not have"),
        ([2, 3, 2], "has id 2 twice"),
    ],
)
def test_unusable_layer_ids_are_refused(layer_ids: object, problem: str) -> None:
    with pytest.raises(UserError, match=r"from 0 \(the embedding output\) to 36") as refusal:
        validate_layer_ids(layer_ids, 36)
    assert problem in str(refusal.value)


@given(st.permutations(range(9)))
def test_layer_ids_keep_the_order_of_the_user(layer_ids: list[int]) -> None:
    assert validate_layer_ids(layer_ids, 8) == tuple(layer_ids)


def vllm_config(layer_ids: object = (34, 2, 36), **changes: Any) -> Any:
    """Return the part of a VllmConfig that is read."""
    parallel = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    }
    parallel["tensor_parallel_size"] = 1
    speculative = SimpleNamespace(
        method=changes.get("method", "extract_hidden_states"),
        disable_padded_drafter_batch=changes.get("disable_padded_drafter_batch", False),
        draft_model_config=SimpleNamespace(
            hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=layer_ids)
        ),
    )
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(
            **{name: changes.get(name, size) for name, size in parallel.items()}
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        model_config=SimpleNamespace(
            model="/models/target",
            served_model_name="target",
            quantization=None,
            architecture="Qwen3ForCausalLM",
            get_hidden_size=lambda: 64,
            get_total_num_hidden_layers=lambda: 36,
        ),
    )


def test_layer_order_maps_ascending_layers_to_the_order_of_the_user() -> None:
    target = read_target(vllm_config((34, 2, 36)))
    assert target.layer_ids == (34, 2, 36)
    # The target collects 2, 34, 36; the first layer of a row, 34, is the second of these.
    assert target.layer_order == (1, 0, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": "eagle3"}, "produces no hidden states"),
        ({"disable_padded_drafter_batch": True}, "without the layout of the batch"),
        ({"pipeline_parallel_size": 2}, "its own layers only"),
        ({"prefill_context_parallel_size": 2}, "reorders the tokens"),
        ({"decode_context_parallel_size": 2}, "order of the rows"),
    ],
)
def test_unsupported_settings_are_refused_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    ((option, value),) = change.items()
    with pytest.raises(UserError, match=reason) as refusal:
        read_target(vllm_config(**change))
    assert f"{option}={value!r}" in str(refusal.value)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both", None])
def test_consumer_role_is_refused(role: str | None) -> None:
    with pytest.raises(UserError, match=r'Set "kv_role": "kv_producer"'):
        require_producer(role)


def test_producer_role_is_accepted() -> None:
    require_producer("kv_producer")
