"""Compare the dataset with the finished rows of earlier runs, and move files of rows that moved."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from vllm_ascend_hsx.generate.dataset import Checked
from vllm_ascend_hsx.generate.errors import InputError, RunError
from vllm_ascend_hsx.generate.files import RowFiles
from vllm_ascend_hsx.generate.ledger import REMEDY, Ledger, Status
from vllm_ascend_hsx.generate.options import Options
from vllm_ascend_hsx.generate.progress import tell
from vllm_ascend_hsx.protocol.files import describe


def resume(options: Options, ledger: Ledger, checked: Checked, console: Console) -> None:
    """Compare the dataset with the finished rows; log the changed ones, and move the moved ones.

    Raises:
        InputError: the finished rows are of another dataset, or moved and other ranks may run.
        RunError: files cannot be moved.
    """
    now = np.array(checked.identities, np.uint64)
    before = np.array(ledger.finished.marks, np.uint64)
    if options.limit is not None:
        before = before[: len(now)]  # further rows of the dataset are not known
    places = np.zeros_like(before)
    places[: len(now)] = now[: len(before)]
    finished = before != 0
    lost = np.flatnonzero(finished & (before != places))
    if not lost.size:
        return
    free = {int(now[row]): int(row) for row in np.flatnonzero(now) if row >= len(before) or before[row] != now[row]}
    moved = {int(row): free[int(before[row])] for row in lost if int(before[row]) in free}
    kept = int(finished.sum()) - lost.size + len(moved)
    if 2 * kept < finished.sum():
        problem = f"only {kept:,} of its {int(finished.sum()):,} finished rows are rows of {options.data}"
        raise InputError(f"{options.output} holds rows of another dataset: {problem}; {REMEDY}")
    if moved and options.world_size > 1:
        problem = f"{len(moved):,} finished rows have another place in {options.data} now, and several ranks cannot rename their files"
        raise InputError(f"{problem}; call once with --world-size 1 --rank 0")
    for row in lost:
        if options.is_ours(int(row)):
            ledger.append(int(row), Status.CHANGED, "")
    try:
        RowFiles(options, ledger).move(moved)
    except OSError as error:
        raise RunError(describe(f"files in {options.output} could not be renamed", error)) from error
    tell(console, f"the dataset has changed: {lost.size - len(moved):,} finished rows are other ones now, {len(moved):,} were renamed")
