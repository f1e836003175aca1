"""Run `hsx`, and record each batch that an EAGLE-3 draft is trained on or validated with.

Usage: recorded_training.py FILE ARGUMENT ..., with arguments as for `hsx`. FILE becomes a list of
batches (torch.save). Each batch has the arguments of the draft's forward pass on the CPU, and
`training`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from speculators.models.eagle3.core import Eagle3DraftModel

from vllm_ascend_hsx.cli.main import main

NAMES = ("input_ids", "loss_mask", "document_ids", "hidden_states", "verifier_last_hidden_states")


def record(path: str) -> None:
    """Write the batches of this process to `path` from now on."""
    batches: list[dict[str, Any]] = []
    forward = Eagle3DraftModel.forward

    def recorded(self: Eagle3DraftModel, **batch: Any) -> Any:
        tensors = {name: batch[name].cpu() for name in NAMES}
        batches.append({"training": self.training, **tensors})
        torch.save(batches, path)
        return forward(self, **batch)

    Eagle3DraftModel.forward = recorded


if __name__ == "__main__":
    record(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
