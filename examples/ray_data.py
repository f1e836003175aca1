"""Read rows of hidden states into a Ray Dataset for a training loop.

    python examples/ray_data.py /data/hidden_states

The nodes of the cluster read the files, so all nodes must see the directory under the same path.
Install the packages with `pip install 'vllm-ascend-hsx[ray,reader]' 'ray[data]'`. To generate rows
on the cluster, use `hsx generate --ray`.
"""

from __future__ import annotations

import sys
from typing import Any

import ray.data
import torch

from vllm_ascend_hsx import HiddenStatesDataset, load


def read(row: dict[str, Any]) -> dict[str, Any]:
    """Load one file, or one member of a shard, on the node of the task.

    Returns:
        path; token_ids, int64 [tokens]; hidden_states, the bits of bf16 [tokens, layers, hidden] as
        int16, because numpy has no bf16.
    """
    states = load(row["item"])
    bits = states.hidden_states.to(torch.bfloat16).view(torch.int16)
    return {
        "path": row["item"],
        "token_ids": states.token_ids.numpy(),
        "hidden_states": bits.numpy(),
    }


def rows_in(directory: str) -> ray.data.Dataset:
    """Return a dataset with a row for each file below a directory."""
    paths = [str(path) for path in HiddenStatesDataset(directory).paths]
    return ray.data.from_items(paths).map(read)


def main() -> None:
    tokens = 0
    for row in rows_in(sys.argv[1]).iter_rows():
        hidden_states = torch.from_numpy(row["hidden_states"].copy()).view(
            torch.bfloat16
        )  # Ray's arrays are read-only
        tokens += len(hidden_states)  # put a training step here
    print(f"{tokens:,} tokens")


if __name__ == "__main__":
    main()
