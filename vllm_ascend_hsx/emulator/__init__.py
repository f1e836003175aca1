"""An Ascend NPU on a CPU: lets the unmodified vllm-ascend wheel run without hardware.

Started by ``hsx emulate [--npus N] [--hbm SIZE] [--late] -- CMD...`` (launch.py), which only sets the environment: the directory
``site/`` comes first on PYTHONPATH, so that every child process finds the emulated ``torch_npu`` there.

What is emulated and what is not
  * Memory is host memory; operators without a reference of their own run as their CPU kernels over the same bytes (csrc/fallback.h).
  * Device memory is accounted per process and device against HSX_EMULATOR_HBM, without fragmentation (csrc/memory.h). Two
    processes on one device do not see each other's use.
  * Streams and events order work as on hardware (csrc/streams.h).
  * hccl runs over gloo; ranks that disagree about an operator, shape or dtype fail with both named (csrc/hccl.h).
  * A graph's capture runs nothing and its replays are work like any other, of one stream; no random numbers and no copies to the
    host in it (csrc/recording.h, replay.h, graphs.h). torch.compile works where it needs neither npugraph_ex nor torchair.
  * Memory pools of the user's own, handles between processes and profiling raise NotImplementedError with their name.

Late mode (HSX_EMULATOR_LATE=1) makes a missing wait a failing test instead of luck
  * Work on a stream other than the default one runs when something waits for it, not before. A copy into pinned memory is
    invisible to the host until the host waits; a copy out of pinned memory reads it then. query() says no twice, and from the
    third time on also runs one queued item, so that a polling loop ends.
  * Two accesses to the same bytes from two streams, of which one writes, need an order (wait_stream, wait_event, a
    synchronization of the host): without one the second raises RuntimeError "NPU stream race" with streams, operators and shape.
    Tracking starts with the first stream that is made; accesses of the host itself cannot be seen.
  * New device memory holds large finite garbage, new pinned memory 0xFF bytes (NaN). Memory freed while another
    stream still reads it is overwritten with NaN when it may be allocated again (and a warning says so); while another stream
    still writes it, that allocation raises.
  * Operators without a shape function (Meta kernel) and collectives run at the call, after all that their stream has queued.
"""
