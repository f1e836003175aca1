"""Unit tests run on emulated NPUs, in late mode, where torch_npu is not installed."""

import os
import sys
from importlib.util import find_spec

if find_spec("torch_npu") is None:
    from vllm_ascend_hsx.emulator.launch import SITE, environment

    os.environ.update({name: value for name, value in environment(npus=8, late=True).items() if name.startswith("HSX_")})
    sys.path.insert(0, str(SITE))
