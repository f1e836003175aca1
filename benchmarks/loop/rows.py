"""Write rows of transformers and wrong rows, for the training of drafts to compare with ours.

Each kind is a directory with files `hs_<index>.safetensors`, like the output of `hsx generate`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.loop.target import LAYER_IDS, Target
from tests.e2e.models.quantised.reference import rows_in_the_models_basis
from vllm_ascend_hsx.demo.target import reference_for
from vllm_ascend_hsx.demo.verify import Reference
from vllm_ascend_hsx.reader.load import load

ROTATION_SEED = 0
SHIFTED = "shifted by one position"


def file_of(directory: Path, index: int) -> Path:
    return directory / f"hs_{index}.safetensors"


def write_rows(directory: Path, index: int, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Write rows [tokens, layers, hidden] and their token ids, [tokens]."""
    save_file(
        {"hidden_states": rows.contiguous(), "token_ids": token_ids}, file_of(directory, index)
    )


def rows_of_transformers(
    directory: Path, target: Target, dataset: Sequence[Sequence[int]], on_row: Callable[[int], None]
) -> None:
    """Compute rows with the weights of the target, and round them once to bfloat16."""
    if target.quantised:
        compute: Reference = partial(rows_in_the_models_basis, target.directory)
    else:
        compute = reference_for(target.directory)
    directory.mkdir(parents=True)
    for index, token_ids in enumerate(dataset):
        rows = compute(token_ids, LAYER_IDS).to(torch.bfloat16)
        write_rows(directory, index, rows, torch.tensor(token_ids))
        on_row(index + 1)


def read_rows(directory: Path, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows and token ids of each file."""
    found = [load(file_of(directory, index)) for index in range(count)]
    return [(states.hidden_states, states.token_ids) for states in found]


def shifted(all_rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each row one position later. The first row appears twice."""
    return [torch.cat([rows[:1], rows[:-1]]) for rows in all_rows]


def of_other_requests(all_rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give each request the rows of the next two requests, as if a buffer was read too late."""
    found = []
    for index, rows in enumerate(all_rows):
        following = torch.cat([all_rows[(index + n) % len(all_rows)] for n in (1, 2)])
        found.append(following.repeat(-(-len(rows) // len(following)), 1, 1)[: len(rows)])
    return found


def rotated(all_rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return rows in another basis, like rows of a rotated target that were not turned back."""
    hidden = all_rows[0].shape[-1]
    noise = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(ROTATION_SEED))
    basis = torch.linalg.qr(noise).Q
    return [(rows.float() @ basis).to(rows.dtype) for rows in all_rows]


WRONG: dict[str, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = {
    SHIFTED: shifted,
    "of other requests": of_other_requests,
    "in another basis": rotated,
}


def write_wrong(kind: str, source: Path, directory: Path, count: int) -> None:
    """Write the rows of `source` as changed by the function WRONG[kind], with correct tokens."""
    directory.mkdir(parents=True)
    rows, token_ids = zip(*read_rows(source, count), strict=True)
    for index, (wrong, tokens) in enumerate(zip(WRONG[kind](rows), token_ids, strict=True)):
        write_rows(directory, index, wrong, tokens)
