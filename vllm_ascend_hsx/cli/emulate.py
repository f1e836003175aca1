"""`hsx emulate`: call `npu-emulate` of the package ascend-npu-emulator."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ascend_hsx.cli.output import say


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the command on emulated NPUs. Return an exit code if that fails."""
    try:
        from ascend_npu_emulator.launch import main as npu_emulate
    except ModuleNotFoundError as error:
        if error.name != "ascend_npu_emulator":
            raise
        remedy = "install vllm-ascend-hsx[demo], which brings ascend-npu-emulator"
        say(f"hsx emulate: the emulated NPU is not installed here; {remedy}", error=True)
        return 2
    return npu_emulate(argv)
