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
from vllm_ascend_hsx.reader.load import remove


def resume(options: Options, ledger: Ledger, checked: Checked, console: Console) -> None:
    """Compare the dataset with the finished rows: log the changed ones, and move the moved ones.

    The file of a row that the dataset no longer has, and has no other row for, is removed.

    Raises:
        InputError: the finished rows are of another dataset, or moved and other ranks may run.
        RunError: files cannot be moved or removed.
    """
    marks = ledger.finished.marks
    # With a limit, further rows of the dataset are not known.
    size = (
        len(checked.identities)
        if options.limit is not None
        else max(len(checked.identities), len(marks))
    )
    now, before = np.zeros((2, size), np.uint64)
    now[: len(checked.identities)] = checked.identities
    before[: len(marks)] = marks[:size]
    finished, differ = before != 0, now != before
    lost = np.flatnonzero(finished & differ)
    free: dict[int, list[int]] = {}
    for row in np.flatnonzero(differ & np.isin(now, before[lost])):
        free.setdefault(int(now[row]), []).append(int(row))
    moved = {int(row): free[mark].pop() for row in lost if free.get(mark := int(before[row]))}
    kept = int(finished.sum()) - lost.size + len(moved)
    if 2 * kept < finished.sum():
        problem = (
            f"only {kept:,} of its {int(finished.sum()):,} finished rows are rows of {options.data}"
        )
        raise InputError(f"{options.output} holds rows of another dataset: {problem}; {REMEDY}")
    if moved and options.world_size > 1:
        problem = (
            f"{len(moved):,} finished rows have another place in {options.data} now, and several "
            "ranks cannot rename their files"
        )
        raise InputError(f"{problem}; call once with --world-size 1 --rank 0")
    files = RowFiles(options, ledger)
    try:
        files.set_aside(moved)
        # The moved ones last: a run after a kill must not find too few rows of the dataset.
        for row in sorted(map(int, lost), key=lambda row: row in moved):
            if options.is_ours(row):
                if not now[row]:  # nobody will replace its file
                    remove(files.path(row))
                ledger.append(row, Status.CHANGED, "")
        renamed = files.put_in_place()
    except OSError as error:
        raise RunError(
            describe(f"files in {options.output} could not be renamed or removed", error)
        ) from error
    if lost.size or renamed:
        gone = lost.size - len(moved)
        tell(
            console,
            (
                f"the dataset has changed: {gone:,} finished rows are no longer in it, {renamed:,} "
                "were renamed"
            ),
        )
