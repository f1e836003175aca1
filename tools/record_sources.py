"""Record the sources of the installed vLLM and vllm-ascend as the sources of a checked pair.

Run `hsx emulate -- python tools/record_sources.py` in the environment of the pair, after the tests
have passed. It writes vllm_ascend_hsx/compat/sources.json; see compat/installed.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_ascend_hsx.compat.installed import examined, sources_of
from vllm_ascend_hsx.compat.versions import CHECKED_PAIRS, installed_pair

TARGET = Path(__file__).parents[1] / "vllm_ascend_hsx" / "compat" / "sources.json"


def main() -> None:
    known = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    known[installed_pair().vllm_ascend] = sources_of(examined())._asdict()
    checked = {pair.vllm_ascend for pair in CHECKED_PAIRS}
    TARGET.write_text(
        json.dumps({name: known[name] for name in sorted(checked & known.keys())}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
