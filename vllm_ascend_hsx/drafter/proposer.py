"""HsxProposer, for model runner V1: keep DP ranks in step, and stage the rows of each step."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm_ascend.spec_decode.extract_hidden_states_proposer import AscendExtractHiddenStatesProposer

from vllm_ascend_hsx.compat.drafts import without_weights
from vllm_ascend_hsx.compat.runner import batch_layout, require_runner_hooks
from vllm_ascend_hsx.drafter.drafter import Drafter, check_start


class HsxProposer(Drafter, AscendExtractHiddenStatesProposer):
    """Replace vllm-ascend's proposer for the method `extract_hidden_states`.

    Args:
        vllm_config: vllm.config.VllmConfig.
        device: the worker's NPU.
        runner: the v1 NPUModelRunner.

    Raises:
        UserError: if a setting or the target cannot be used. Raised before weights are loaded.
        IncompatibleVersionError: if there is no runner, or the runner lacks the methods that keep
            DP ranks in step.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        require_runner_hooks(runner)
        check_start(vllm_config)
        super().__init__(vllm_config, device, runner)
        # Upstream gathers rows and slots in these buffers. We write rows directly from the target's
        # output into a staging slot.
        del self.hidden_states, self._slot_mapping_buffer

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the drafter. This creates the cache-only layer and the staging slots."""
        with without_weights(self.vllm_config):
            super().load_model(target_model)
        self.finish_loading(target_model)

    def propose(
        self,
        num_speculative_tokens: int = 0,
        *,
        sampled_token_ids: torch.Tensor,
        target_hidden_states: list[torch.Tensor],
        common_attn_metadata: Any,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Stage the rows of this step.

        Args:
            num_speculative_tokens: 0. vllm-ascend 0.26 passes it (MR:1587), 0.23 does not.
            sampled_token_ids: int [requests, 1], the tokens that the target sampled.
            target_hidden_states: one [tokens, hidden] per extracted layer, in ascending layer
                order, without padding rows.
            common_attn_metadata: layout of the batch, for any KV cache group. Only
                `query_start_loc_cpu` is read.
            slot_mappings: unused. Rows are addressed by request and position, not by KV slot.

        Returns:
            int [requests, 0]: no drafts.
        """
        self._determine_batch_execution_and_padding(target_hidden_states[0].shape[0])
        if self.staging.wanted:
            layout = batch_layout(self.runner, common_attn_metadata.query_start_loc_cpu)
            self.stage(layout, target_hidden_states)
        return sampled_token_ids[:, :0]

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, torch.Tensor | None]:
        """Pad for sequence parallelism, then agree with the other DP ranks on the number of tokens.

        The ranks agree through the runner's [2, dp] collective. This is the only communication
        between ranks in the drafter, on busy and idle ranks. Padding comes first, because the
        agreed number must be a multiple of the TP size. vLLM's `coordinate_batch_across_dp` would
        post [4, dp] into the same group.

        Args:
            num_tokens: rows of this rank's batch, without padding.
            use_cudagraphs: ignored, because the drafter has no graph.

        Returns:
            Mode NONE; the padded number of tokens of this rank; and the numbers of all ranks, int32
            [dp] on the host, or None with one DP rank.
        """
        num_tokens_padded = self.runner._pad_for_sequence_parallelism(num_tokens)
        mode = CUDAGraphMode.NONE
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            return mode, num_tokens_padded, None
        _, num_tokens_across_dp, _ = self.runner._sync_metadata_across_dp(
            num_tokens=num_tokens_padded, is_draft_model=True, cudagraph_mode=mode
        )
        return mode, int(num_tokens_across_dp[self.dp_rank]), num_tokens_across_dp

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Use the batch layout of KV cache group 0, because the cache-only layer is in no group.

        Upstream would raise (vllm/v1/spec_decode/extract_hidden_states.py:401, 0.26). Since 0.30
        the runner passes the metadata of this group to the drafter (MR:3870), and does not call a
        drafter without a group. All groups have the same layout.
        """
        self.kv_cache_gid = 0

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Issue the collectives of a step, and nothing else.

        Idle DP ranks call this. Every rank calls this while memory is profiled or graphs are
        captured. Staging memory is already allocated, the self-test has launched the kernels of
        the layer, and the layer is in no graph. The other arguments are for drafters that compute.
        """
        self._determine_batch_execution_and_padding(num_tokens)

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Keep the drafter out of all graphs, whatever the mode of the target."""
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_indices: torch.Tensor,
        num_discarded_requests: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next input token of each request. The runner discards it (MR:1644).

        Upstream builds this on the host and copies it to the device in each step
        (extract_hidden_states_proposer.py:169).

        Args:
            sampled_token_ids: int [requests, 1], the tokens that the target sampled.
            requests, gpu_input_batch, discard_request_indices, num_discarded_requests: unused.

        Returns:
            int [requests], the sampled tokens, twice. Upstream returns the number of accepted
            tokens as the second value, and the runner does not read it.
        """
        assert sampled_token_ids.shape[1] == 1, "draft tokens were scheduled"
        return sampled_token_ids[:, 0], sampled_token_ids[:, 0]
