"""Arguments and steps that all forms of the fused attention kernel share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ascend_npu_emulator.ops.attention.definition import attend, band_of, check_cumulative
from ascend_npu_emulator.ops.checks import check

# Limit of scores in memory. The kernel computes scores block by block and never stores all.
SCORES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class FusedCall:
    """Arguments of ``npu_fused_infer_attention_score`` or of the second version."""

    op: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_rope: torch.Tensor | None
    key_rope: torch.Tensor | None
    mask: torch.Tensor | None
    q_lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None
    block_table: torch.Tensor | None
    heads: int
    kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    layout: str
    sparse_mode: int
    inner_precise: int
    block_size: int
    with_lse: bool
    sink: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def query_spans(self, rows: int) -> list[tuple[int, int]]:
        """Return the rows [first, end) of each sequence. The last span ends at ``rows``."""
        return check_cumulative(self.op, "actual_seq_lengths", self.q_lengths or (), rows)

    def key_spans(self, sequences: int) -> list[tuple[int, int]]:
        """Return the keys [first, end) of each sequence, for keys laid end to end."""
        return check_cumulative(
            self.op, "actual_seq_lengths_kv", self._key_lengths(sequences), self.key.shape[0]
        )

    def cached_lengths(self, table: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return the number of keys of each sequence to read from the cache.

        A sequence without queries gets 0, because the row in ``table`` is undefined.
        """
        lengths = self._key_lengths(len(spans))
        check(
            table.shape[0] >= len(spans),
            self.op,
            "block_table",
            f"{table.shape[0]} rows for {len(spans)} sequences",
        )
        negative = [length for length in lengths if length < 0]
        check(
            not negative, self.op, "actual_seq_lengths_kv", f"{negative[:8]} must not be negative"
        )
        return [
            length if first < last else 0
            for length, (first, last) in zip(lengths, spans, strict=False)
        ]

    def _key_lengths(self, sequences: int) -> list[int]:
        lengths = [int(length) for length in self.kv_lengths or ()]
        check(
            len(lengths) >= sequences,
            self.op,
            "actual_seq_lengths_kv",
            f"{len(lengths)} lengths for {sequences} sequences",
        )
        return lengths

    def attend(
        self,
        rows: torch.Tensor,
        spans: Sequence[tuple[int, int]],
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend ``rows`` [T, heads, D], each sequence with its pair of keys and values.

        Returns:
            The output [T, heads, width] in the query's dtype, and the log-sum-exp [T, heads, 1]
                float32.
        """
        out = torch.empty(*rows.shape[:2], width, dtype=rows.dtype, device=rows.device)
        lse = torch.empty(*rows.shape[:2], 1, dtype=torch.float32, device=rows.device)
        for (first, last), (k, v) in zip(spans, pairs, strict=False):
            band = band_of(
                self.op,
                self.sparse_mode,
                self.pre_tokens,
                self.next_tokens,
                last - first,
                k.shape[0],
            )
            at_once = max(1, SCORES_AT_ONCE // max(1, rows.shape[1] * k.shape[0]))
            for begin in range(first, last, at_once):
                end = min(last, begin + at_once)
                hidden = band._replace(origin=band.origin + begin - first).hidden(
                    end - begin, k.shape[0], rows.device
                )
                seen, sums = attend(rows[begin:end], k, v, self.scale, hidden, self.sink)
                out[begin:end] = seen.to(out.dtype)
                lse[begin:end, :, 0] = sums
        return out, lse
