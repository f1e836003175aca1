"""Compare the dataset with the finished rows of earlier runs, and rename files of moved rows."""

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
    """Compare the dataset with the finished rows. Log changed rows, and rename files of moved rows.

    If the dataset has become shorter, remove the files of rows beyond the end.

    Raises:
        InputError: the finished rows are from another dataset, or rows have moved and other ranks
            may run.
        RunError: files cannot be renamed or removed.
    """
    marks = ledger.finished.marks
    # With a limit, the rows of the dataset beyond it are unknown.
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
        problem = f"only {kept:,} of {int(finished.sum()):,} finished rows are in {options.data}"
        raise InputError(f"{options.output} holds rows of another dataset: {problem}; {REMEDY}")
    if moved and options.world_size > 1:
        problem = (
            f"{len(moved):,} finished rows have moved in {options.data}, and runs of several "
            "ranks cannot rename files"
        )
        raise InputError(f"{problem}; run once with --world-size 1 --rank 0")
    files = RowFiles(options, ledger)
    try:
        files.set_aside(moved)
        # Moved rows last: after a kill, the next run must still find enough rows of the dataset.
        for row in sorted(map(int, lost), key=lambda row: row in moved):
            if options.is_ours(row):
                if not now[row]:  # no new file will replace it
                    remove(files.path(row))
                ledger.append(row, Status.CHANGED, "")
        renamed = files.put_in_place()
    except OSError as error:
        raise RunError(
            describe(f"cannot rename or remove files in {options.output}", error)
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
