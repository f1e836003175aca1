"""Qwen3-Next with the interface by which a runner requests hidden states.

In vllm 0.23.0 its model collects them (model_executor/models/qwen3_next.py:523), but the class
around it lacks the interface, and the runner refuses it before the first step (MR:3758).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, supports_eagle3
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM as VllmQwen3NextForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextModel

from vllm_ascend_hsx.compat.versions import IncompatibleVersionError

if TYPE_CHECKING or not supports_eagle3(VllmQwen3NextForCausalLM):
    if not issubclass(Qwen3NextModel, EagleModelMixin):
        raise IncompatibleVersionError("vllm.model_executor.models.qwen3_next.Qwen3NextModel collects no hidden states")

    class Qwen3NextForCausalLM(VllmQwen3NextForCausalLM, SupportsEagle3):
        """vLLM's class with the interface, whose methods use the model."""

else:  # vLLM's class has it, as in 0.26
    Qwen3NextForCausalLM = VllmQwen3NextForCausalLM
