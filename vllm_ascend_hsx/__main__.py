"""`python -m vllm_ascend_hsx`: the `hsx` command, where the script is not on the PATH."""

import sys

from vllm_ascend_hsx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
