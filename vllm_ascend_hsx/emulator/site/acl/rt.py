"""acl.rt, as far as vllm-ascend imports it."""

from vllm_ascend_hsx.emulator.missing import NotEmulated

memcpy = NotEmulated("acl.rt.memcpy")
