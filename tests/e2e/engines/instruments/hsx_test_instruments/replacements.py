"""Instruments that replace a function or module."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hsx_test_instruments.hooks import after_import


def another_method(gate: str) -> None:
    """Make the last rank choose ALLTOALL for experts, in steps that begin once `gate` exists."""

    def wrap(context: Any) -> None:
        from vllm.distributed import get_ep_group

        select = context.select_moe_comm_method

        @functools.wraps(select)
        def selected(*args: Any, **kwargs: Any) -> Any:
            last = get_ep_group().is_last_rank and Path(gate).exists()
            return context.MoECommType.ALLTOALL if last else select(*args, **kwargs)

        context.select_moe_comm_method = selected

    after_import("vllm_ascend.ascend_forward_context", wrap)


def unfixed_proposer(how: str) -> None:
    """Undo vllm-ascend #9689: a busy rank coordinates, an idle rank does not.

    "coordinate": vLLM's own `_determine_batch_execution_and_padding`: no padding, and a [4, dp]
    collective in the group of the runner's [2, dp] collectives. "unpadded": the runner's collective
    without padding for sequence parallelism.
    """

    def unpadded(self: Any, num_tokens: int, use_cudagraphs: bool = True) -> Any:
        from vllm.config import CUDAGraphMode

        _, across_dp, mode = self.runner._sync_metadata_across_dp(num_tokens=num_tokens)
        assert mode == CUDAGraphMode.NONE
        return mode, int(across_dp[self.dp_rank]), across_dp

    def swap(proposer_module: Any) -> None:
        from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

        methods = {
            "coordinate": ExtractHiddenStatesProposer._determine_batch_execution_and_padding,
            "unpadded": unpadded,
        }
        proposer_module.HsxProposer._determine_batch_execution_and_padding = methods[how]
        proposer_module.HsxProposer.dummy_run = lambda self, *args, **kwargs: None

    after_import("vllm_ascend_hsx.drafter.proposer", swap)


def importable_mooncake(_: Any) -> None:
    """Let vllm-ascend's MultiConnector import mooncake's engine; it is not used here."""

    class TransferEngine:
        def __init__(self, *args: Any) -> None:
            raise NotImplementedError("mooncake is not installed")

    for name in ("mooncake", "mooncake.engine"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["mooncake.engine"].TransferEngine = TransferEngine  # type: ignore[attr-defined]
