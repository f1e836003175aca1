"""A torch Dataset of files of hidden states, and a collate function."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from vllm_ascend_hsx.protocol.arguments import require_path, require_whole
from vllm_ascend_hsx.protocol.names import DATA_SUFFIX, SHARDS_MARK
from vllm_ascend_hsx.reader.load import STORAGE_REMEDY, HiddenStates, HiddenStatesError, load
from vllm_ascend_hsx.reader.members import paths_below
from vllm_ascend_hsx.reader.tensors import dequantized


class HiddenStatesDataset(Dataset[dict[str, Any]]):
    """One item per file, memory-mapped on access. Safe in worker processes of a DataLoader.

    Args:
        source: a list of files, or a directory for all complete files and members of shards below
            it, sorted by path.
        layer_ids: residual streams of an item, in this order; None for all layers of the file.
        dtype: dtype to which rows are converted; None for the model's.
        max_tokens: length to which longer sequences are truncated, at least 1; None for no limit.
        verify: whether to verify the checksum of each file when it is loaded.

    An item is a dict:
        hidden_states: [tokens, layers, hidden]. Quantised rows are dequantised.
        token_ids: int64 [tokens].
        is_output: bool [tokens], true for generated tokens.
        is_placeholder: bool [tokens], true for the tokens of images.
        path: the file.

    Raises:
        ValueError: if there are no files or an argument is invalid. On access, if a file lacks a
            layer.
        OSError: if a folder cannot be read.
        HiddenStatesError: on access, if a file is invalid.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
        verify: bool = False,
    ) -> None:
        if max_tokens is not None:
            require_whole("max_tokens", max_tokens, 1, "give a whole number of at least 1, or None")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"dtype={dtype!r}: give a torch dtype of floating-point numbers, such as "
                "torch.float32, or None"
            )
        self.paths = _paths(source)
        self._layer_ids = None if layer_ids is None else _layers(layer_ids)
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._verify = verify

    def __repr__(self) -> str:
        options = (
            f"layer_ids={self._layer_ids}, dtype={self._dtype}, max_tokens={self._max_tokens}, "
            f"verify={self._verify}"
        )
        return f"HiddenStatesDataset({len(self)} files from {str(self.paths[0])!r} on, {options})"

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[operator.index(index)]
        states = load(path, mmap=True, verify=self._verify, dequantize=False)
        rows, token_ids = (
            states.hidden_states[: self._max_tokens],
            states.token_ids[: self._max_tokens],
        )
        if self._layer_ids is not None:
            rows = rows[:, _columns(path, states, self._layer_ids)]
        if states.scales is not None:
            rows = dequantized(rows, states.scales[: self._max_tokens], states.dtype)
        if self._dtype is not None:
            rows = rows.to(self._dtype)
        has_output = "num_prompt_tokens" in states.metadata
        prompt = states.num_prompt_tokens if has_output else len(states.token_ids)
        is_placeholder = torch.zeros(len(token_ids), dtype=torch.bool)
        for _, start, length in states.placeholders:
            is_placeholder[start : start + length] = True
        return {
            "hidden_states": rows,
            "token_ids": token_ids,
            "is_output": torch.arange(len(token_ids)) >= prompt,
            "is_placeholder": is_placeholder,
            "path": str(path),
        }


def _paths(source: Any) -> list[Path]:
    """Return the files that a source names. Raises ValueError."""
    if isinstance(source, Iterable) and not isinstance(source, str | bytes | os.PathLike):
        paths = [
            require_path(f"source[{number}]", path, "give the path of a file")
            for number, path in enumerate(source)
        ]
        if not paths:
            raise ValueError("source=[] names no file. Give at least one.")
        return paths
    directory = require_path("source", source, f"{STORAGE_REMEDY}, or a list of files")
    paths = paths_below(directory, (DATA_SUFFIX,)) if directory.is_dir() else []
    if not paths:
        problem = f"{directory} has no *{DATA_SUFFIX} files, and no shards with members"
        remedy = (
            "Name the directory that the server writes to; shards above it count only beside "
            f"their {SHARDS_MARK}"
        )
        if directory.is_file():
            problem, remedy = (
                f"{directory} is a file",
                "Name the directory that the server writes to, or give a list of files",
            )
        raise ValueError(f"{problem}. {remedy}.")
    return paths


def _layers(layer_ids: Any) -> list[int]:
    """Return the ids of layers as a list. Raises ValueError."""
    remedy = "give a list of at least one layer, such as [2, 31], or None for all layers"
    if (
        isinstance(layer_ids, str)
        or not isinstance(layer_ids, Iterable)
        or not (ids := list(layer_ids))
    ):
        raise ValueError(f"layer_ids={layer_ids!r:.100}: {remedy}")
    for number, layer_id in enumerate(ids):
        require_whole(f"layer_ids[{number}]", layer_id, 0, remedy)
    return ids


def _columns(path: Path, states: HiddenStates, wanted: Sequence[int]) -> list[int]:
    layers = states.hidden_states.shape[1]
    if "layer_ids" not in states.metadata:
        raise HiddenStatesError(
            path, f"it does not state its layer ids, so {list(wanted)} cannot be chosen"
        )
    stored = states.layer_ids
    if len(stored) != layers:
        raise HiddenStatesError(path, f"it names {len(stored)} layer ids, but has {layers} layers")
    if missing := [layer_id for layer_id in wanted if layer_id not in stored]:
        raise ValueError(
            f"{path} has layers {stored}, but not {missing}. Choose from these layers, or extract again."
        )
    return [stored.index(layer_id) for layer_id in wanted]


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch of items of different lengths, padded at the end with zeros.

    Args:
        items: at least one item of a HiddenStatesDataset, all with the same layers.

    Returns:
        hidden_states [batch, longest, layers, hidden], token_ids int64 [batch, longest], is_output,
        is_placeholder and attention_mask bool [batch, longest], lengths int64 [batch], paths.

    Raises:
        ValueError: if there is no item, or layers or dtypes of the items differ.
    """
    if not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(
            f"items={items!r:.100}: give a list of at least one item of a HiddenStatesDataset"
        )
    kinds = {
        f"{list(item['hidden_states'].shape[1:])} {item['hidden_states'].dtype}": item["path"]
        for item in items
    }
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({path})" for kind, path in kinds.items())
        raise ValueError(
            f"rows of one batch have different layers or dtypes: {found}. Select them with "
            "layer_ids and dtype."
        )
    lengths = torch.tensor([len(item["token_ids"]) for item in items])

    def padded(key: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([item[key] for item in items], batch_first=True)

    return {
        **{
            key: padded(key)
            for key in ("hidden_states", "token_ids", "is_output", "is_placeholder")
        },
        "attention_mask": torch.arange(int(lengths.max())) < lengths.unsqueeze(1),
        "lengths": lengths,
        "paths": [item["path"] for item in items],
    }
