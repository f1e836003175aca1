"""An Ascend NPU on a CPU: runs the unmodified vllm-ascend wheel without hardware.

``hsx emulate [--npus N] [--hbm SIZE] [--late] -- CMD...`` (launch.py) only sets environment
variables. The directory ``site/`` comes first on PYTHONPATH, so every child process finds the
emulated ``torch_npu`` there.

Scope of the emulation
* Memory is host memory. Operators without a reference of their own run as their CPU kernels on the
  same bytes (csrc/fallback.h).
* Device memory is accounted per process and device against HSX_EMULATOR_HBM, without fragmentation
  (csrc/memory/). Two processes on one device do not see each other's use.
* Streams and events order work as on hardware (csrc/streams/).
* hccl runs over gloo. Ranks that disagree about an operator, shape or dtype fail with an error that
  names both (csrc/hccl/).
* Capturing a graph runs nothing. Its replays are ordinary work of one stream, without random
  numbers and copies to the host (csrc/graphs/). torch.compile works if it needs neither
  npugraph_ex nor torchair.
* User-defined memory pools, handles between processes, and profiling raise NotImplementedError with
  their name.

Late mode (HSX_EMULATOR_LATE=1) makes every missing wait fail a test
* Work on a stream other than the default one runs only when something waits for it. A copy into
  pinned memory is invisible to the host until the host waits; a copy out of pinned memory reads it
  at that time. query() returns False twice; from the third call on it also runs one queued item, so
  that polling loops end.
* Two accesses to the same bytes from two streams, at least one of which writes, must be ordered
  (wait_stream, wait_event, or a synchronization of the host). Otherwise the second raises
  RuntimeError "NPU stream race" with streams, operators and shape. Tracking starts with the first
  stream that is created. Accesses by the host itself are not tracked.
* New device memory holds large finite garbage; new pinned memory holds 0xFF bytes (NaN). If memory
  is freed while another stream still reads it, it is overwritten with NaN once it may be allocated
  again, with a warning. If another stream still writes it, that allocation raises.
* Operators without a shape function (Meta kernel) and collectives run when they are called, after
  all work queued on their stream.
"""
