"""An Ascend NPU on a CPU: lets the unmodified vllm-ascend wheel run without hardware.

Started by ``hsx emulate [--npus N] [--hbm SIZE] [--late] -- CMD...`` (launch.py), which only sets the environment: the directory
``site/`` comes first on PYTHONPATH, so that every child process finds the emulated ``torch_npu`` there.

What is emulated and what is not
  * Memory is host memory; operators without a reference of their own run as their CPU kernels over the same bytes (csrc/fallback.h).
  * Device memory is accounted per process and device against HSX_EMULATOR_HBM, without fragmentation (csrc/memory.h).
  * Streams and events order work as on hardware; late mode (HSX_EMULATOR_LATE=1) delays and checks it (csrc/streams.h).
  * hccl runs over gloo; ranks that disagree about an operator's shape or dtype fail with both named (csrc/hccl.h).
  * Graph capture, memory pools, inter-process handles and profiling raise NotImplementedError with their name.
"""
