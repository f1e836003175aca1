"""Print vLLM's errors for configurations of engines. Started by test_start_up.py; not a test.

Usage: engine_configs.py JSON, an object of names and EngineArgs
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    refusals: dict[str, str | None] = {}
    for name, options in json.loads(sys.argv[1]).items():
        try:
            arguments = EngineArgs(enforce_eager=True, max_model_len=512, **options)
            arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
            refusals[name] = None
        except Exception as error:  # noqa: BLE001 - the test judges the error
            refusals[name] = str(error)
    print("\nrefusals:" + json.dumps(refusals))
