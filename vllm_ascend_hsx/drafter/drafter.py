"""Drafter: what the drafters of both model runners do with the rows of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_ascend_hsx.compat.adapters import refuse_wrong_products
from vllm_ascend_hsx.compat.models import require_collecting_target
from vllm_ascend_hsx.compat.runner import BatchRow, find_layers, forward_context
from vllm_ascend_hsx.drafter.spans import select_spans
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.settings import read_settings


def check_start(vllm_config: Any) -> None:
    """Refuse settings and targets that cannot be used, before weights are loaded.

    Raises:
        UserError: one cannot.
    """
    read_settings(vllm_config)
    require_collecting_target(vllm_config.model_config)
    refuse_wrong_products(vllm_config)


class Drafter:
    """Base of HsxProposer and HsxSpeculator.

    Attributes:
        vllm_config: vllm.config.VllmConfig.
        model: AscendExtractHiddenStatesModel, or None before it is loaded.
        staging: its staging slots.
        attn_metadata_builder: AscendCacheOnlyMetadataBuilder of its layer, or None.
    """

    vllm_config: Any
    model: Any
    staging: StagingCache
    attn_metadata_builder: Any

    def find_staging(self) -> None:
        """Set `staging`, once the model is loaded."""
        from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer

        (layer,) = find_layers(self.vllm_config, AscendCacheOnlyLayer).values()
        self.staging = layer.staging

    def stage(
        self,
        layout: Iterable[BatchRow],
        target_rows: Sequence[torch.Tensor],
        num_tokens: int,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        """Stage the rows of a step that this rank extracts.

        Args:
            layout: the requests of the batch and their rows.
            target_rows: one [tokens, hidden] per extracted layer, in ascending layer order. Rows
                after those of the batch are padding.
            num_tokens: of this rank, with padding.
            num_tokens_across_dp: int32 [dp] on the host, or None with one DP rank.
        """
        spans = select_spans(layout, self.staging.wanted)
        if not spans:
            return
        assert self.model is not None
        assert self.attn_metadata_builder is not None
        metadata = self.attn_metadata_builder.build_for_spans(spans)
        with forward_context(metadata, self.vllm_config, num_tokens, num_tokens_across_dp):
            self.model(target_rows, next(iter(metadata.values())))
