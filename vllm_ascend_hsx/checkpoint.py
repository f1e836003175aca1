"""The fingerprint of a target's weights, from samples of the checkpoint that vLLM has loaded.

The fingerprint depends only on contents, not on paths or times. All ranks, a restarted server and
another machine compute the same fingerprint from the same checkpoint.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_hsx.protocol.files import open_regular, read_regular
from vllm_ascend_hsx.protocol.strict_json import is_count, parse

logger = logging.getLogger(__name__)

PIECE = 16 << 10  # bytes of one sample
MOST_PIECES = 2048  # samples of a checkpoint: 32 MiB
_MOST_OF_A_FILE = 64  # samples of a file without a header
_LARGEST_HEADER = 16 << 20  # bytes; a file with a longer header is sampled as if it had none
_DIGITS = 32

# Rows depend on these files and on the weights. Optional files are left out, because not every
# machine has downloaded them.
_DESCRIPTIONS = ("config.json", "params.json", "quant_model_description*.json")
_INDEX = "{}.safetensors.index.json"
_CONSOLIDATED = "consolidated*.safetensors"
# Load formats that read files in the model's directory, with patterns in order of preference.
_ANY = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PATTERNS: dict[str, Sequence[str]] = {
    "auto": (_CONSOLIDATED, *_ANY), "mistral": (_CONSOLIDATED,), "pt": ("*.pt",), "npcache": ("*.bin",), "gguf": ("*.gguf",),
    **dict.fromkeys(("hf", "bitsandbytes"), _ANY),
    **dict.fromkeys(
        ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
        ("*.safetensors",),
    ),
}  # fmt: skip
# vLLM does not load these files (model_loader/weight_utils.py:676, vLLM 0.23.0).
_STATE_OF_TRAINING = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)


class Checkpoint(NamedTuple):
    """The files of a checkpoint that vLLM loads.

    Attributes:
        weights: files with weights, sorted by name.
        descriptions: files with the configuration of the model and the quantisation of the weights.
    """

    weights: Sequence[Path]
    descriptions: Sequence[Path]


def weights_of(vllm_config: Any, directory: str | None = None) -> str:
    """Return the fingerprint of a loaded target's weights, or "" if it is unknown.

    Call this after the weights are loaded. Before that, a checkpoint from a hub may be missing on
    this machine.

    Args:
        vllm_config: vllm.config.VllmConfig.
        directory: directory of the checkpoint; None for the checkpoint of the configuration.
    """
    try:
        if directory is None:
            found = local_checkpoint(vllm_config)
        else:
            found = find_checkpoint(Path(directory), str(vllm_config.load_config.load_format))
        return "" if found is None else fingerprint(found)
    except Exception as error:  # noqa: BLE001 - hub libraries raise anything, and rows are right without
        logger.warning(
            "files will not name their weights, because the checkpoint cannot be read: %s", error
        )
        return ""


def local_checkpoint(vllm_config: Any) -> Checkpoint | None:
    """Return the files that vLLM loads, or None if they are not on this machine yet.

    Args:
        vllm_config: vllm.config.VllmConfig.

    Raises:
        OSError, ValueError, KeyError, TypeError: as find_checkpoint.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    path = _local_path(model.model, model.revision, load.download_dir)
    return None if path is None else find_checkpoint(path, str(load.load_format))


def _local_path(model: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the directory or file from which vLLM loads a model. Does not use the network."""
    if os.path.exists(model):
        return Path(model)
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        from modelscope.hub.snapshot_download import snapshot_download as of_modelscope

        try:
            # vLLM ignores download_dir (model_loader/default_loader.py:109, vLLM 0.23.0).
            return Path(of_modelscope(model, revision=revision, local_files_only=True))
        except ValueError:  # not downloaded (hub/snapshot_download.py, modelscope 016d22d)
            return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, cache_dir=cache, revision=revision, local_files_only=True)
        )
    except (HFValidationError, LocalEntryNotFoundError):  # an object store, for instance
        return None


def find_checkpoint(place: Path, load_format: str) -> Checkpoint | None:
    """Return the files that vLLM loads, or None if it loads no files of this directory.

    Args:
        place: directory of the model, or the only file of the model.
        load_format: vLLM's option.

    Raises:
        OSError: if the directory or an index cannot be read.
        ValueError, KeyError, TypeError: if an index is invalid.
    """
    patterns = _PATTERNS.get(load_format)
    if patterns is None:
        return None
    if place.is_file():
        return Checkpoint([place], [])
    names = sorted(path.name for path in place.iterdir() if not path.is_dir())
    weights: list[str] = []
    for pattern in patterns:
        weights = [
            name for name in fnmatch.filter(names, pattern) if name not in _STATE_OF_TRAINING
        ]
        if weights:
            index = _INDEX.format("consolidated" if pattern == _CONSOLIDATED else "model")
            if index in names and pattern.endswith(".safetensors"):
                wanted = set(parse((place / index).read_bytes())["weight_map"].values())
                weights = [name for name in weights if name in wanted]
            break
    described = [
        name
        for pattern in _DESCRIPTIONS
        for name in fnmatch.filter(names, pattern)
        if (place / name).is_file()
    ]
    return (
        Checkpoint([place / name for name in weights], [place / name for name in described])
        if weights
        else None
    )


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 32 hexadecimal digits that differ if the sampled parts of the weights differ.

    Reads the descriptions and the headers of safetensors files, and at most MOST_PIECES samples of
    PIECE bytes. If there are more files, reads one sample of each file.

    Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()

    def add(*parts: bytes) -> None:
        for part in parts:  # with the length, because parts could be split in several ways
            digest.update(len(part).to_bytes(8, "little") + part)

    for path in checkpoint.descriptions:
        add(path.name.encode(), read_regular(path))
    pieces = max(1, MOST_PIECES // len(checkpoint.weights))
    for path in checkpoint.weights:
        fd = open_regular(path)
        try:
            size = os.fstat(fd).st_size
            add(path.name.encode(), str(size).encode())
            _add_samples(fd, size, pieces, add)
        finally:
            os.close(fd)
    return digest.hexdigest()[:_DIGITS]


def _add_samples(fd: int, size: int, pieces: int, add: Callable[[bytes], None]) -> None:
    """Add the header of a file, if there is one, and samples."""
    header = _header(fd, size)
    try:
        places = _pieces_of_tensors(header, pieces)
    except (ValueError, TypeError, KeyError, AttributeError):  # not safetensors
        places = _pieces_of_bytes(size, pieces)
    else:
        add(header)
    for begin in places:
        add(os.pread(fd, PIECE, begin))


def _header(fd: int, size: int) -> bytes:
    """Return the bytes before the tensors of a safetensors file, or b"" for other files."""
    length = os.pread(fd, 8, 0)
    end = 8 + int.from_bytes(length, "little")
    return length + os.pread(fd, end - 8, 8) if end <= min(size, _LARGEST_HEADER) else b""


def _pieces_of_tensors(header: bytes, pieces: int) -> Iterable[int]:
    """Return the offsets of the samples: one in the middle of each tensor.

    If there are more than `pieces` tensors, the tensors whose names have the smallest digests are
    sampled. This selection does not depend on the kind or position of a layer.

    Raises ValueError, TypeError, KeyError or AttributeError if `header` is invalid.
    """
    tensors = parse(header[8:])
    tensors.pop("__metadata__", None)
    names = sorted(tensors)
    if len(names) > pieces:
        names = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:pieces]
    places = []
    for name in names:
        begin, end = tensors[name]["data_offsets"]
        if not is_count(begin) or not is_count(end):
            raise ValueError(f"{name} has invalid data_offsets")
        places.append(len(header) + max(begin, (begin + end - PIECE) // 2))
    return places


def _pieces_of_bytes(size: int, pieces: int) -> Iterable[int]:
    """Return the offsets of the samples: evenly spaced, with the first and last bytes."""
    count = min(pieces, _MOST_OF_A_FILE, -(-size // PIECE))
    last = max(0, size - PIECE)
    return [last * index // max(1, count - 1) for index in range(count)]
