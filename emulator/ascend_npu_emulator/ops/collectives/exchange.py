"""Send rows to the ranks of their experts and return the results to the senders.

Ranks exchange all rows, and each keeps the rows for local experts. No shape depends on the rows'
values, so graphs can capture the exchange. `groups.gather` names ranks that disagree. Values are
checked in calls that run, not in captures.
"""

from typing import Any

import torch

from ascend_npu_emulator.native import core
from ascend_npu_emulator.ops.checks import check, check_dtype, unsupported
from ascend_npu_emulator.ops.collectives.groups import gather
from ascend_npu_emulator.ops.poison import poisoned


class Exchange:
    """The part of a dispatch or combine call in which all ranks must agree.

    Rank r has the experts ``r * E .. r * E + E - 1``, with E experts on each rank.

    Attributes:
        tokens, top_k, hidden: the sizes BS, K and H.
        local: experts of each rank.
        capacity: rows that a rank can receive.
        ids: the operator's name for ``expert_ids``.
        group: the EP group.
        text: the arguments in which ranks must agree.
        active: bool [tokens], True for tokens that take part.
    """

    def __init__(
        self, op: str, expert_ids: torch.Tensor, hidden: int, x_active_mask: torch.Tensor | None, group: Any, experts: int,
        ids: str = "expert_ids", **agreed: object,
    ) -> None:  # fmt: skip
        self.op, self.ids, self.group, self.size, self.rank, self.experts = (
            op,
            ids,
            group,
            group.size(),
            group.rank(),
            experts,
        )
        (self.tokens, self.top_k), self.hidden = expert_ids.shape, hidden
        self.local = experts // self.size
        self.capacity = self.tokens * self.size * min(self.local, self.top_k)
        self.text = ", ".join(f"{name}={value}" for name, value in agreed.items())
        if x_active_mask is None:
            self.active = torch.ones(self.tokens, dtype=torch.bool, device=expert_ids.device)
        else:
            if x_active_mask.dim() != 1:
                raise unsupported(op, "x_active_mask", x_active_mask)
            check_dtype(op, "x_active_mask", x_active_mask, (torch.bool,))
            given = tuple(x_active_mask.shape)
            check(
                given == (self.tokens,),
                op,
                "x_active_mask",
                f"shape {given} must be ({self.tokens},)",
            )
            self.active = x_active_mask
        if not self.captured(expert_ids):
            self._check_values(expert_ids)

    def captured(self, tensor: torch.Tensor) -> bool:
        """Return whether a graph captures the call. Values are then unknown."""
        return tensor.is_meta or bool(core.recordings() and core.recording(tensor.device.index))

    def _check_values(self, expert_ids: torch.Tensor) -> None:
        for token, (chosen, active) in enumerate(
            zip(expert_ids.tolist(), self.active.tolist(), strict=True)
        ):
            right = all(0 <= expert < self.experts for expert in chosen) and len(
                set(chosen)
            ) == len(chosen)
            right = right or not active
            check(
                right,
                self.op,
                self.ids,
                f"{chosen} of token {token} must be different experts in 0..{self.experts - 1}",
            )

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return gather(self.group, self.op, self.text, mine)

    def receive(self, expert_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the copies of tokens that this rank receives, and their number.

        Three tensors: the indices of the copies among the copies of all ranks, int64 [capacity],
        sorted by expert, then by rank and token; True for received copies, bool [capacity]; the
        number of received copies by expert and sender, int64 [local, size].
        """
        chosen = self.gather(torch.where(self.active[:, None], expert_ids, self.experts)).flatten()
        own = chosen - self.rank * self.local
        own = torch.where(
            (own >= 0) & (own < self.local), own, self.local
        )  # copies for other ranks are last
        copies = torch.sort(own, stable=True).indices[: self.capacity]
        every = torch.arange(self.local, device=own.device).view(1, self.local, 1)
        counts = (own.view(self.size, 1, -1) == every).sum(-1).t()
        return copies, torch.arange(self.capacity, device=own.device) < counts.sum(), counts

    def origins(self, copies: torch.Tensor) -> torch.Tensor:
        """Return rank, token and expert position (0 to K - 1) of each copy, int32 [capacity, 3]."""
        source = copies // self.top_k
        return torch.stack(
            [source // self.tokens, source % self.tokens, copies % self.top_k], 1
        ).int()

    def bring_back(
        self, made: torch.Tensor, live: torch.Tensor, origins: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results for this rank's copies, and the index of each row of all ranks.

        Args:
            made: [capacity, H], results of this rank's experts.
            live: bool [capacity], True for rows that belong to a copy.
            origins: see ``origins``.

        Returns:
            [tokens, top_k, H], undefined without a result. For every row of every rank the index
                into these results, int64; ``tokens * top_k`` for rows of other ranks.
        """
        rows, origins = self.gather(made), self.gather(torch.where(live[:, None], origins, -1))
        beyond = self.tokens * self.top_k  # for rows of other ranks
        place = torch.where(
            origins[:, 0] == self.rank, origins[:, 1] * self.top_k + origins[:, 2], beyond
        ).long()
        returned = poisoned((beyond + 1, self.hidden), made)
        returned[place] = rows
        return returned[:-1].view(self.tokens, self.top_k, self.hidden), place

    def add(self, returned: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows times ``shares``, [tokens, H]; see combine."""
        sums = (returned.float() * shares[..., None]).sum(1).to(returned.dtype)
        return torch.where(self.active[:, None], sums, poisoned((), returned))
