"""Files of hidden states as a torch Dataset."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from written_files import rows_of, write, write_member

from vllm_ascend_hsx import HiddenStatesDataset, collate
from vllm_ascend_hsx.protocol.placeholders import Placeholder
from vllm_ascend_hsx.reader.load import HiddenStatesError

LENGTHS = {"a": 9, "b": 3, "c": 17}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, tokens in LENGTHS.items():
        write(tmp_path / "files", name, rows_of(tokens), prompt=tokens - 1)
    return tmp_path / "files"


def test_item_is_a_file(directory: Path) -> None:
    dataset = HiddenStatesDataset(directory)
    assert len(dataset) == 3
    item = dataset[2]
    assert torch.equal(item["hidden_states"], rows_of(17))
    assert item["token_ids"].tolist() == list(range(17))
    assert item["is_output"].tolist() == [False] * 16 + [True]
    assert item["path"] == str(directory / "c.safetensors")


def test_items_select_layers_and_convert_and_truncate_rows(directory: Path) -> None:
    item = HiddenStatesDataset(directory, layer_ids=[4], dtype=torch.float32, max_tokens=5)[2]
    assert torch.equal(item["hidden_states"], rows_of(17)[:5, 1:].float())
    assert len(item["token_ids"]) == len(item["is_output"]) == 5


def test_placeholders_are_masked_in_items_and_batches(
    tmp_path: Path,
) -> None:
    images = [Placeholder("image", 1, 3), Placeholder("image", 6, 2)]
    paths = [
        write(tmp_path, "images", rows_of(9), images=images),
        write(tmp_path, "text", rows_of(4)),
    ]
    masks = [list(map(int, item["is_placeholder"])) for item in HiddenStatesDataset(paths)]
    assert masks == [[0, 1, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0]]
    batch = collate([HiddenStatesDataset(paths, max_tokens=7)[index] for index in range(2)])
    assert batch["is_placeholder"].int().tolist() == [[0, 1, 1, 1, 0, 0, 1], [0] * 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_pad_and_mask_batches(directory: Path, workers: int) -> None:
    loader = DataLoader(
        HiddenStatesDataset(directory),
        batch_size=3,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    (batch,) = list(loader)
    assert batch["hidden_states"].shape == (3, 17, 2, 8)
    assert batch["lengths"].tolist() == [9, 3, 17]
    assert batch["attention_mask"].sum(1).tolist() == [9, 3, 17]
    for index, tokens in enumerate(LENGTHS.values()):
        assert torch.equal(batch["hidden_states"][index, :tokens], rows_of(tokens))
        assert not batch["hidden_states"][index, tokens:].any()
        assert batch["token_ids"][index, :tokens].tolist() == list(range(tokens))
    assert batch["is_output"].sum().item() == 3
    assert [Path(path).stem for path in batch["paths"]] == list(LENGTHS)


def test_missing_layer_is_named(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"a.safetensors has layers \[2, 4\], but not \[3\]"):
        HiddenStatesDataset(directory, layer_ids=[2, 3])[0]


@pytest.mark.parametrize("source", ["empty", []])
def test_empty_dataset_is_refused(tmp_path: Path, source: str | list[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no \\*.safetensors files|names no file"):
        HiddenStatesDataset(tmp_path / source if isinstance(source, str) else source)


def test_changed_file_is_found_with_verify(directory: Path) -> None:
    path = directory / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    HiddenStatesDataset([path])[0]
    with pytest.raises(HiddenStatesError, match="changed since it was written"):
        HiddenStatesDataset([path], verify=True)[0]


def test_reading_needs_neither_vllm_nor_torch_npu() -> None:
    code = """
import sys
import vllm_ascend_hsx
assert "torch" not in sys.modules
vllm_ascend_hsx.load, vllm_ascend_hsx.find, vllm_ascend_hsx.HiddenStatesDataset, vllm_ascend_hsx.collate
import vllm_ascend_hsx.cli.verify, vllm_ascend_hsx.cli.inspect
assert not {"vllm", "vllm_ascend", "torch_npu", "pydantic"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


KEEPER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from vllm_ascend_hsx import HiddenStatesDataset, load

def mapped():
    return sum(line.rstrip().endswith((".safetensors", ".tar")) for line in open("/proc/self/maps"))

paths = sys.argv[1:]
dataset = HiddenStatesDataset(paths)
items = [dataset[index % len(paths)] for index in range(600)]
states = [load(paths[index % len(paths)], mmap=True) for index in range(600)]
for index in range(len(items)):
    assert items[index]["hidden_states"].equal(states[index % len(paths)].hidden_states), index
    assert items[index]["token_ids"].equal(states[index].token_ids), index
kept, descriptors = mapped(), len(os.listdir("/proc/self/fd"))
del items, states
print(descriptors, kept, mapped())
"""


def test_item_holds_no_descriptor_and_frees_its_mapping(tmp_path: Path) -> None:
    fp8 = write(tmp_path / "fp8", "a", rows_of(3), quantization="fp8")
    paths = [write(tmp_path / "files", "a", rows_of(3)), write_member(tmp_path), fp8]
    done = subprocess.run([sys.executable, "-c", KEEPER, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    descriptors, kept, left = map(int, done.stdout.split())
    assert descriptors < 20 and kept > 1200 and left == 0
