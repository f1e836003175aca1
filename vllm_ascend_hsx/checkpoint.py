"""The fingerprint of a target's weights, from samples of the checkpoint that vLLM has loaded.

It depends on contents alone: neither on paths nor on times, so that all ranks, a restarted server
and another machine with the same checkpoint find the same one.
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
MOST_PIECES = 2048  # of a checkpoint: 32 MiB
_MOST_OF_A_FILE = 64  # pieces of a file that has no header
_LARGEST_HEADER = 16 << 20  # bytes; a file with a longer one is sampled as if it had none
_DIGITS = 32

# What rows depend on beside the weights. Optional files are left out: of a checkpoint from a hub,
# only some machines have them.
_DESCRIPTIONS = ("config.json", "params.json", "quant_model_description*.json")
_INDEX = "{}.safetensors.index.json"
_CONSOLIDATED = "consolidated*.safetensors"
# Load formats that read files of the model's directory, and in which order of preference.
_ANY = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_PATTERNS: dict[str, Sequence[str]] = {
    "auto": (_CONSOLIDATED, *_ANY), "mistral": (_CONSOLIDATED,), "pt": ("*.pt",), "npcache": ("*.bin",), "gguf": ("*.gguf",),
    **dict.fromkeys(("hf", "bitsandbytes"), _ANY),
    **dict.fromkeys(
        ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
        ("*.safetensors",),
    ),
}  # fmt: skip
# Not loaded by vLLM either (model_loader/weight_utils.py:676, vLLM 0.23.0).
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
        weights: in the order of their names.
        descriptions: the model's configuration, and how its weights are quantised.
    """

    weights: Sequence[Path]
    descriptions: Sequence[Path]


def weights_of(vllm_config: Any, directory: str | None = None) -> str:
    """Return the fingerprint of a loaded target's weights; empty if it is unknown.

    Call it when the weights are loaded: only then is a checkpoint from a hub on this machine.

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
    except Exception as error:  # noqa: BLE001 - hub libraries raise anything, and the rows do not depend on it
        logger.warning(
            "files will not name their weights, whose checkpoint cannot be read: %s", error
        )
        return ""


def local_checkpoint(vllm_config: Any) -> Checkpoint | None:
    """Return the files that vLLM loads a target from; None if they are not on this machine yet.

    Args:
        vllm_config: vllm.config.VllmConfig.

    Raises:
        OSError, ValueError, KeyError, TypeError: as find_checkpoint.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    place = _local_place(model.model, model.revision, load.download_dir)
    return None if place is None else find_checkpoint(place, str(load.load_format))


def _local_place(model: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the directory or file that vLLM has loaded a model from, without using the network."""
    if os.path.exists(model):
        return Path(model)
    from vllm import envs

    if envs.VLLM_USE_MODELSCOPE:
        from modelscope.hub.snapshot_download import snapshot_download as of_modelscope

        try:
            # vLLM passes no download_dir on (model_loader/default_loader.py:109, vLLM 0.23.0).
            return Path(of_modelscope(model, revision=revision, local_files_only=True))
        except ValueError:  # nothing of it is there (hub/snapshot_download.py, modelscope 016d22d)
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
    """Return the files that vLLM loads; None if there are none, or it loads from elsewhere.

    Args:
        place: directory of the model, or its one file.
        load_format: vLLM's.

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
    """Return 32 hexadecimal digits that differ, as far as samples show, if the weights do.

    Reads the descriptions and the headers of safetensors files, and at most MOST_PIECES pieces of
    PIECE bytes, or one of each file if there are more files.

    Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()

    def add(*parts: bytes) -> None:
        for part in parts:  # with its length, so that no two sequences of parts are alike
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
    """Add a file's header, if it has one, and some of its pieces."""
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
    """Return the bytes before the tensors of a safetensors file; empty for other files."""
    length = os.pread(fd, 8, 0)
    end = 8 + int.from_bytes(length, "little")
    return length + os.pread(fd, end - 8, 8) if end <= min(size, _LARGEST_HEADER) else b""


def _pieces_of_tensors(header: bytes, pieces: int) -> Iterable[int]:
    """Return where to read: in the middle of each tensor, as long as there are not too many.

    Of more tensors those are read whose names have the smallest digests. So no kind of layer is
    left out because of its place among the others.

    Raises ValueError, TypeError, KeyError or AttributeError if it is no header.
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
            raise ValueError(f"{name} is nowhere")
        places.append(len(header) + max(begin, (begin + end - PIECE) // 2))
    return places


def _pieces_of_bytes(size: int, pieces: int) -> Iterable[int]:
    """Return where to read: evenly over the file, its first and last bytes included."""
    count = min(pieces, _MOST_OF_A_FILE, -(-size // PIECE))
    last = max(0, size - PIECE)
    return [last * index // max(1, count - 1) for index in range(count)]
