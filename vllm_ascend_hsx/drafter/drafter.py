"""Drafter: the common part of the drafters for both model runners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_ascend_hsx.caveats import warn_of_caveats
from vllm_ascend_hsx.compat.adapters import refuse_wrong_products
from vllm_ascend_hsx.compat.rotation import refuse_undeclared_rotation
from vllm_ascend_hsx.compat.runner import BatchRow, find_layers, tensor_parallel_rank
from vllm_ascend_hsx.compat.targets import require_collecting_target
from vllm_ascend_hsx.drafter.attention import AscendCacheOnlyLayer, CacheOnlyMetadata
from vllm_ascend_hsx.drafter.self_test import run_self_test
from vllm_ascend_hsx.drafter.spans import select_spans
from vllm_ascend_hsx.drafter.staging import StagingCache
from vllm_ascend_hsx.settings import read_settings


def check_start(vllm_config: Any) -> None:
    """Refuse unusable settings and targets, before weights are loaded.

    Only one rank of the server logs the caveats of the target.

    Raises:
        UserError: if a setting or the target cannot be used.
    """
    settings = read_settings(vllm_config)
    require_collecting_target(vllm_config.model_config, settings.target.layer_ids)
    refuse_wrong_products(vllm_config)
    if vllm_config.parallel_config.data_parallel_rank == 0 and tensor_parallel_rank() == 0:
        warn_of_caveats(vllm_config.model_config)


class Drafter:
    """Base of HsxProposer and HsxSpeculator.

    Attributes:
        vllm_config: vllm.config.VllmConfig.
        model: AscendExtractHiddenStatesModel, or None before loading.
        staging: staging slots of the model.
    """

    vllm_config: Any
    model: Any
    staging: StagingCache

    def finish_loading(self, target: torch.nn.Module) -> None:
        """Set and test `staging`, after target and drafter are loaded.

        Args:
            target: the loaded model.

        Raises:
            UserError: if the target is rotated without a declared rotation.
            SelfTestError: if known rows do not arrive unchanged on the host.
        """
        settings = read_settings(self.vllm_config)
        if settings.config.rotation == "undo" and not settings.row_format.basis:
            refuse_undeclared_rotation(self.vllm_config.model_config, target)
        (layer,) = find_layers(self.vllm_config, AscendCacheOnlyLayer).values()
        self.staging = layer.staging
        run_self_test(self.staging)

    def stage(self, layout: Iterable[BatchRow], target_rows: Sequence[torch.Tensor]) -> None:
        """Stage the rows of a step that this rank extracts.

        Args:
            layout: the requests of the batch and their rows.
            target_rows: one [tokens, hidden] per extracted layer, in ascending layer order. Rows
                may be padded at the end.
        """
        spans = select_spans(layout, self.staging.wanted)
        if spans:
            self.model(target_rows, CacheOnlyMetadata(spans))
