"""HsxProposer: finds out who is in the batch, keeps DP ranks in step, and passes the target's rows to the cache-only layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm_ascend.spec_decode.extract_hidden_states_proposer import AscendExtractHiddenStatesProposer

from vllm_ascend_hsx.compat import batch_layout, find_layers, forward_context, keep_until_copied, require_runner_hooks
from vllm_ascend_hsx.spans import select_spans
from vllm_ascend_hsx.startup import read_start_up


class HsxProposer(AscendExtractHiddenStatesProposer):
    """Takes the place of vllm-ascend's proposer for the method extract_hidden_states.

    Args:
        vllm_config: vllm.config.VllmConfig.
        device: the worker's NPU.
        runner: the v1 NPUModelRunner.

    Raises:
        HsxConfigError, StorageDirectoryError: settings that cannot be used; before weights are loaded.
        IncompatibleVersionError: no runner, or one without the methods that keep DP ranks in step.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        require_runner_hooks(runner)
        read_start_up(vllm_config)
        super().__init__(vllm_config, device, runner)
        # Upstream collects rows and slots in buffers of its own; ours go straight from the target's output into the staging slot.
        del self.hidden_states, self._slot_mapping_buffer

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the drafter, and with it the cache-only layer and its staging slots."""
        super().load_model(target_model)
        from vllm_ascend_hsx.attention import AscendCacheOnlyLayer

        (layer,) = find_layers(self.vllm_config, AscendCacheOnlyLayer).values()
        self.staging = layer.staging

    def propose(
        self,
        sampled_token_ids: torch.Tensor,
        target_hidden_states: list[torch.Tensor],
        common_attn_metadata: Any,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Stage the rows of this step.

        Args:
            sampled_token_ids: int [requests, 1 + drafts], what the target sampled, -1 where nothing was.
            target_hidden_states: one [tokens, hidden] per collected layer, ascending, without padding rows.
            common_attn_metadata: layout of the batch; of any KV cache group, for only `query_start_loc_cpu` is read.
            slot_mappings: unused; rows are addressed by request and position, not by KV slot.

        Returns:
            int [requests, 1]: the first sampled token of each request, as its draft.
        """
        num_tokens = target_hidden_states[0].shape[0]
        _, num_tokens_padded, num_tokens_across_dp = self._determine_batch_execution_and_padding(num_tokens)
        spans = []
        if self.staging.wanted:
            layout = batch_layout(self.runner, common_attn_metadata.query_start_loc_cpu)
            spans = select_spans(layout, self.staging.wanted)
        if spans:
            assert self.model is not None
            assert self.attn_metadata_builder is not None
            metadata = self.attn_metadata_builder.build_for_spans(spans)
            with forward_context(metadata, self.vllm_config, num_tokens_padded, num_tokens_across_dp):
                self.model(target_hidden_states, next(iter(metadata.values())))
        return sampled_token_ids[:, :1]

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, use_cudagraphs: bool = True
    ) -> tuple[CUDAGraphMode, int, torch.Tensor | None]:
        """Pad for sequence parallelism, then agree with the other DP ranks through the runner's own [2, dp] collective.

        The one place where the drafter talks to other ranks, for busy and idle ranks alike. Padding comes first, so that what is agreed
        on divides by the TP size; vLLM's own `coordinate_batch_across_dp` would post [4, dp] into the same group.

        Args:
            num_tokens: rows of this rank's batch, without padding.
            use_cudagraphs: as upstream; the drafter has no graph, so the answer does not depend on it.

        Returns:
            Mode NONE; the padded number of tokens of this rank; int32 [dp] on the host, or None with one DP rank.
        """
        num_tokens_padded = self.runner._pad_for_sequence_parallelism(num_tokens)
        mode = CUDAGraphMode.NONE
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            return mode, num_tokens_padded, None
        _, num_tokens_across_dp, _ = self.runner._sync_metadata_across_dp(
            num_tokens=num_tokens_padded, is_draft_model=True, cudagraph_mode=mode, allow_dp_padding=True
        )
        return mode, int(num_tokens_across_dp[self.dp_rank]), num_tokens_across_dp

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """What an idle DP rank does, and every rank while memory is profiled or graphs are captured: only the collectives.

        There is nothing else to run: the staging memory is allocated, the layer has no kernel to warm up and is in no graph.

        Args:
            num_tokens: tokens of the dummy batch.
            args, kwargs: vllm-ascend's further arguments, which concern drafters that compute.
        """
        self._determine_batch_execution_and_padding(num_tokens)

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode) -> None:
        """The drafter takes part in no graph, whatever the target's mode is."""
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_indices: torch.Tensor,
        num_discarded_requests: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token that each request accepted, and how many it accepted.

        Upstream reads column 0 alone (extract_hidden_states_proposer.py:169 in vllm-ascend 0.23.0), so that a second accepted token
        is lost and the generated text is corrupted.

        Args:
            sampled_token_ids: int [requests, 1 + drafts], -1 behind the last accepted token.
            requests: the runner's cached request states by id.
            gpu_input_batch: the runner's input batch.
            discard_request_indices: int [max requests]; requests in the middle of their prompt, whose samples do not count.
            num_discarded_requests: how many of these indices are valid.

        Returns:
            int32 [requests] next token ids; int32 [requests] numbers of accepted tokens.
        """
        num_reqs = gpu_input_batch.num_reqs
        device = sampled_token_ids.device
        last = (gpu_input_batch.num_tokens_no_spec[:num_reqs] - 1).tolist()
        backup = torch.tensor(
            [requests[gpu_input_batch.req_ids[i]].get_token_id(last[i]) for i in range(num_reqs)],
            dtype=torch.int32,
            device=device,
        )
        discarded = torch.zeros(num_reqs, dtype=torch.bool, device=device)
        discarded[discard_request_indices[:num_discarded_requests]] = True
        valid = (sampled_token_ids >= 0) & (sampled_token_ids < gpu_input_batch.vocab_size)
        counts = valid.sum(dim=1, dtype=torch.int32)
        keep_until_copied(self.runner, counts)
        newest = sampled_token_ids.gather(1, (counts.to(torch.int64) - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        next_token_ids = torch.where((counts > 0) & ~discarded, newest.to(torch.int32), backup)
        return next_token_ids, counts
