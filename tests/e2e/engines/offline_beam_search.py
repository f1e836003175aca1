"""Search with `LLM`, then generate. Started by test_beam_search.py; not a test.

Usage: offline_beam_search.py JSON, a list of arguments of LLM and tokens of the prompt
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    arguments, prompt = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    prompts = [{"prompt_token_ids": prompt}]
    search = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    (found,) = llm.beam_search(prompts, search)
    assert [len(each.tokens) for each in found.sequences] == [len(prompt) + 5] * 3
    (answer,) = llm.generate(prompts, SamplingParams(max_tokens=1))
    print("\nanswer:", json.dumps(answer.kv_transfer_params))
