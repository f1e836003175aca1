"""Run the `hsx` command as `python -m vllm_ascend_hsx`, if the script is not on the PATH."""

import sys

from vllm_ascend_hsx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
