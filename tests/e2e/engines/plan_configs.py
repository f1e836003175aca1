"""Print vLLM's configuration for each model, and the benchmark's KV cache.

Usage: plan_configs.py JSON DIRECTORY ..., with the fields of EngineOptions, `kv_bytes` and
`staging_bytes`. Started by test_plan.py; not a test.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[3]))  # of benchmarks
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from benchmarks.kv_cache import capacity, vllm_planner
    from benchmarks.kv_cache.model_shape import shape_of
    from benchmarks.kv_cache.server_config import EngineOptions

    asked = json.loads(sys.argv[1])
    memory = {name: asked.pop(name) for name in ("kv_bytes", "staging_bytes")}
    options = EngineOptions(**asked)
    vllm_planner.load()
    found = {}
    for directory in sys.argv[2:]:
        arguments = EngineArgs(
            model=directory,
            tensor_parallel_size=options.tensor_parallel,
            max_model_len=options.max_model_len,
            skip_tokenizer_init=True,
            language_model_only=True,
        )
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        cache, model = config.cache_config, config.model_config
        shape = shape_of(json.loads((Path(directory) / "config.json").read_text()))
        layouts = capacity.capacities(shape, options, num_extracted=3, **memory)
        found[directory] = {
            "block_size": cache.block_size,
            "mamba_block_size": cache.mamba_block_size,
            "mamba_page_size_padded": cache.mamba_page_size_padded,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_concurrent_batches": config.max_concurrent_batches,
            "head_size": model.get_head_size(),
            "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
            "hidden_size": model.get_hidden_size(),
            "num_layers": model.get_total_num_hidden_layers(),
            "attention_layers": model.get_num_layers_by_block_type(
                config.parallel_config, "attention"
            ),
            "dtype": str(model.dtype).removeprefix("torch."),
            "capacities": {
                layout.name.lower(): asdict(each)
                for layout, each in layouts.items()
                if isinstance(each, vllm_planner.Capacity)
            },
        }
    print("configs:" + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
