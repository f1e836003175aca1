"""`python -m vllm_ascend_hsx`: the `hsx` command, where the script is not on the PATH."""

import sys

from vllm_ascend_hsx.cli.main import main

sys.exit(main())
