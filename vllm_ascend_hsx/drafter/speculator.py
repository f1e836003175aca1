"""HsxSpeculator, for model runner V2 of vllm 0.30: stage the rows of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_ascend_hsx.compat.drafts import require_no_drafts, without_weights
from vllm_ascend_hsx.compat.runner import batch_layout_v2
from vllm_ascend_hsx.drafter.drafter import Drafter, check_start


class HsxSpeculator(Drafter, DraftModelSpeculator):
    """Replace the speculator of vLLM and vllm-ascend for the method `extract_hidden_states`.

    The speculator issues no collective. This runner agrees with the other DP ranks once per step,
    before the target's forward pass, and passes the result to the speculator on every rank.

    Args:
        vllm_config: vllm.config.VllmConfig.
        device: the worker's NPU.

    Raises:
        UserError: if a setting or the target cannot be used. Raised before weights are loaded.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        check_start(vllm_config)
        require_no_drafts(vllm_config)
        super().__init__(vllm_config, device)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the drafter. This creates the cache-only layer and the staging slots."""
        with without_weights(self.vllm_config):
            return get_model(vllm_config=self.vllm_config, model_config=self.draft_model_config)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.finish_loading(target_model)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the cache-only layer is in no KV cache group."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Keep the drafter out of all graphs, whatever the mode of the target."""

    def capture(self) -> None:
        """Capture nothing."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: Any,
        num_rejected: Any,
        last_sampled: torch.Tensor,
        *args: Any,
        dp_sync: Any = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Stage the rows of this step.

        Args:
            input_batch: AscendInputBatch of the step.
            aux_hidden_states: one [tokens with padding, hidden] per extracted layer, in ascending
                layer order.
            last_sampled: int [requests of the engine, 1], by request state.
            dp_sync: the agreement of the DP ranks, or None with one DP rank.
            dummy_run: whether this is a step of an idle DP rank, or a profile run.

        The other arguments are for drafters that compute.

        Returns:
            int [requests, 0]: no drafts.
        """
        if not dummy_run and self.staging.wanted:
            assert aux_hidden_states is not None
            self.stage(batch_layout_v2(input_batch), aux_hidden_states)
        return last_sampled[input_batch.idx_mapping, :0]
