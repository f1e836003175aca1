"""Train a draft with speculators' own command, on an emulated NPU."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.loop.acceptance import DRAFT_TOKENS
from benchmarks.loop.results import PLAIN, QUAROT, Kind
from benchmarks.loop.target import LAYER_IDS
from vllm_ascend_hsx.demo import DemoError

EAGLE3, DFLASH = "eagle3", "dflash"
# Additional options of each method. vLLM 0.23.0 accepts an EAGLE-3 draft trained with --norm-output
# but ignores `norm_output` (update_eagle3, transformers_utils/configs/speculators/algos.py:16).
# vllm-ascend serves DFlash with bidirectional attention within a block. The trainer does the same
# in layers without a window.
OPTIONS = {
    EAGLE3: ("--no-norm-output",),
    DFLASH: (
        "--block-size",
        str(1 + DRAFT_TOKENS),
        "--max-anchors",
        "64",
        "--num-layers",
        "1",
        "--full-attention-indices",
        "0",
    ),
}
# For a rotated target, vllm-ascend rotates `fc`, the layer of an EAGLE-3 draft that reads rows. The
# result is exact only without a norm before this layer.
OPTIONS_OF_TARGET = {PLAIN: (), QUAROT: ("--no-norm-before-fc",)}
# dtype of training. A CPU without bfloat16 instructions takes twice as long with bfloat16.
TRAINED_IN = "float32"
# The trainer packs as many stories into a batch as fit into this many rows.
BATCH_TOKENS = 512
LEARNING_RATE = "2e-3"


def write_dataset(directory: Path, dataset: Sequence[Sequence[int]]) -> None:
    """Write token ids like `speculators prepare-data`, with a loss mask of ones."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    columns = {
        "input_ids": dataset,
        "loss_mask": [[1] * len(row) for row in dataset],
        "seq_len": list(map(len, dataset)),
    }
    Dataset.from_dict(columns).with_format("torch").save_to_disk(directory)


def train_command(
    kind: Kind, model: Path, dataset: Path, rows: Path, draft: Path, *, epochs: int, seed: int
) -> list[str]:
    """Return the `hsx speculators train` command with implementations that an NPU can run.

    Args:
        model: directory of the target before quantisation, for embedding and head of the draft.
    """
    return [
        *(
            sys.executable,
            "-m",
            "vllm_ascend_hsx.cli.main",
            "speculators",
            "train",
            "--hidden-states-backend",
            "hsx",
        ),
        *(
            "--verifier-name-or-path",
            str(model),
            "--data-path",
            str(dataset),
            "--hidden-states-path",
            str(rows),
        ),
        *("--save-path", str(draft), "--speculator-type", kind.method, "--on-missing", "raise"),
        *("--target-layer-ids", *map(str, LAYER_IDS[:-1])),
        *(
            *OPTIONS[kind.method],
            *OPTIONS_OF_TARGET[kind.target],
            "--draft-attn-impl",
            "eager",
            "--loss-implementation",
            "eager",
        ),
        *(
            "--epochs",
            str(epochs),
            "--checkpoint-freq",
            "1",
            "--lr",
            LEARNING_RATE,
            "--total-seq-len",
            str(BATCH_TOKENS),
        ),
        *("--hidden-states-dtype", TRAINED_IN),
        *("--num-workers", "0", "--train-data-ratio", "0.9", "--seed", str(seed)),
    ]


def finished_epochs(draft: Path) -> int:
    """Return the number of epochs with a checkpoint."""
    return sum(path.parent.name.isdigit() for path in draft.glob("*/training_state.json"))


def checkpoint(draft: Path) -> Path:
    """Return the directory of the epoch with the least validation loss.

    Other epochs may lack the file with the validation loss. Raise DemoError without a checkpoint.
    """
    directory = draft / "checkpoint_best"
    if not (directory / "config.json").is_file():
        raise DemoError(f"speculators wrote no checkpoint to {directory}")
    return directory


def validation_loss(directory: Path) -> float:
    """Return the loss of a checkpoint on the tenth of the dataset held out from training."""
    loss: float = json.loads((directory / "val_metrics.json").read_text())["loss_epoch"]
    return loss
