"""What the plugin replaces, calls and names inside vLLM and vllm-ascend, each with its reason.

No module here imports either at module level, except `qwen3_next`: a general plugin is loaded
before the platform is resolved, and an early import of vllm_ascend would run its patches too soon.
MR in these modules is vllm_ascend/worker/model_runner_v1.py.
"""
