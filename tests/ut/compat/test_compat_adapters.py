"""Adapters: fingerprints of the last loaded weights; settings with wrong outputs are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_hsx.compat import adapters
from vllm_ascend_hsx.compat.adapters import adapter_of, name_weights, refuse_wrong_products
from vllm_ascend_hsx.protocol.errors import UserError
from vllm_ascend_hsx.protocol.rows import NO_ADAPTER


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_loaded", {})


def request(path: Path, name: str = "a", number: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path))


def write(
    path: Path, content: str, config: str = "{}", name: str = "adapter_model.safetensors"
) -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text(content)
    (path / "adapter_config.json").write_text(config)
    return path


def loaded(path: Path, **changes: Any) -> str:
    """Load an adapter, and return the weights that files of the requests name."""
    made = object()
    assert name_weights(lambda *_: made, None, request(path, **changes)) is made
    return adapter_of(request(path, **changes)).weights


def test_a_request_without_an_adapter_names_none() -> None:
    assert adapter_of(None) == NO_ADAPTER


def test_adapter_fingerprint_is_of_the_last_load_and_depends_only_on_contents(
    tmp_path: Path,
) -> None:
    first = loaded(write(tmp_path / "a", "one"))
    assert len(first) == 32
    assert loaded(write(tmp_path / "copy", "one"), number=2) == first
    write(tmp_path / "a", "two")  # not loaded yet
    assert adapter_of(request(tmp_path / "a")) == ("a", first)
    assert loaded(tmp_path / "a") not in ("", first)
    assert loaded(write(tmp_path / "a", "one", '{"lora_alpha": 2}')) not in ("", first)
    assert loaded(write(tmp_path / "bin", "one", name="adapter_model.bin"), number=3) not in (
        "",
        first,
    )


def test_unreadable_adapter_weights_are_not_named(tmp_path: Path) -> None:
    assert loaded(write(tmp_path / "a", "one"))
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert loaded(tmp_path / "a") == ""
    assert adapter_of(request(tmp_path, "b", 5)) == ("b", "")


def test_failed_adapter_load_keeps_the_previous_fingerprint(tmp_path: Path) -> None:
    first = loaded(write(tmp_path / "a", "one"))

    def fail(*_: Any) -> Any:
        raise ValueError("its rank is too great")

    write(tmp_path / "a", "two")
    with pytest.raises(ValueError, match="too great"):
        name_weights(fail, None, request(tmp_path / "a"))
    assert adapter_of(request(tmp_path / "a")).weights == first


def config(ranks: int, **lora: Any) -> Any:
    lora_config = SimpleNamespace(**lora) if lora else None
    return SimpleNamespace(
        lora_config=lora_config, parallel_config=SimpleNamespace(tensor_parallel_size=ranks)
    )


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (config(2), None),
        (config(1, fully_sharded_loras=False, max_lora_rank=8), None),
        (config(2, fully_sharded_loras=True, max_lora_rank=16), None),
        (
            config(2, fully_sharded_loras=False, max_lora_rank=16),
            "fully_sharded_loras=False .* Set it, and max_lora_rank to 16",
        ),
        (
            config(4, fully_sharded_loras=True, max_lora_rank=16),
            "max_lora_rank=16 .* Set it to 32 or more",
        ),
    ],
)
def test_adapter_settings_with_wrong_rows_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: Any, refused: str | None
) -> None:
    for release in ("0.23.0", "0.26.0"):
        monkeypatch.setattr(adapters, "release_to_patch", lambda _, release=release: release)
        if refused is None or release != "0.23.0":
            refuse_wrong_products(given)
        else:
            with pytest.raises(UserError, match=refused):
                refuse_wrong_products(given)
