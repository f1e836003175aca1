"""Everything that the plugin replaces, calls or names in vLLM and vllm-ascend, with the reasons.

No module here imports either at module level, except `qwen3_next`: a general plugin is loaded
before the platform is resolved, and an early import of vllm_ascend would run its patches too soon.
MR in these modules is vllm_ascend/worker/model_runner_v1.py.
"""
