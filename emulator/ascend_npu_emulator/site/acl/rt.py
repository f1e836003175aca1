"""The part of acl.rt that vllm-ascend imports."""

from ascend_npu_emulator.native import core


def memcpy(dst, dest_max, src, count, kind):
    """Copy `count` bytes between two addresses; kind 1: to the NPU, 2: to the host. Return 0."""
    return core.memcpy(dst, dest_max, src, count, kind)
