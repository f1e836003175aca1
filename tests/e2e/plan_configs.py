"""Prints the VllmConfig that vLLM makes of each model directory, and the plan for it. Started by test_plan.py; not a test.

Usage: plan_configs.py DIRECTORY ...
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_ascend_hsx.cli import plan as command

    found = {}
    for directory in sys.argv[1:]:
        arguments = EngineArgs(
            model=directory, tensor_parallel_size=4, max_model_len=8192, skip_tokenizer_init=True, language_model_only=True
        )
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        cache, model = config.cache_config, config.model_config
        found[directory] = {
            "block_size": cache.block_size,
            "mamba_block_size": cache.mamba_block_size,
            "mamba_page_size_padded": cache.mamba_page_size_padded,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_concurrent_batches": config.max_concurrent_batches,
            "head_size": model.get_head_size(),
            "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
            "hidden_size": model.get_hidden_size(),
            "num_layers": model.get_total_num_hidden_layers(),
            "attention_layers": model.get_num_layers_by_block_type(config.parallel_config, "attention"),
            "dtype": str(model.dtype).removeprefix("torch."),
            "plan": command.as_json(command.plan(command.parse_arguments([directory]))),
        }
    print("configs:" + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
