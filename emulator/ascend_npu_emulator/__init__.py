"""An Ascend NPU on a CPU: runs the unmodified vllm-ascend wheel without hardware.

``npu-emulate [--npus N] [--hbm SIZE] [--late] [--queue] -- CMD...`` (launch.py) only sets
environment variables. The directory ``site/`` comes first on PYTHONPATH, so every child process
finds the emulated ``torch_npu`` there.

Scope of the emulation
* Memory is host memory. Operators without a reference of their own run as their CPU kernels on the
  same bytes (csrc/fallback.h).
* Device memory is accounted per process and device against NPU_EMULATOR_HBM, without fragmentation
  (csrc/memory/). Two processes on one device do not see each other's allocations.
* A process has a context on each NPU that one of its threads has used. It takes 107 MiB, which all
  processes of the machine see (csrc/contexts.h). A thread that sets no device uses NPU 0, as in
  torch_npu: dropping an event is such a use.
* Streams and events order work as on hardware (csrc/streams/).
* hccl runs over gloo. Ranks that disagree about an operator, shape or dtype fail with an error that
  names both (csrc/hccl/).
* Capturing a graph runs nothing. Its replays are ordinary work of one stream, without random
  numbers and copies to the host (csrc/graphs/). torch.compile works if it needs neither
  npugraph_ex nor torchair.
* User-defined memory pools, handles between processes, and profiling raise NotImplementedError with
  their name.

Late mode (NPU_EMULATOR_LATE=1) makes every missing wait fail a test
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

Queue mode (NPU_EMULATOR_QUEUE=1) reports failures as torch_npu's task queue does
* A failed task has not run. The next call that enters the task queue of the NPU raises the error,
  in whatever thread, once. Dropping an event enters the queue, too, and the error is lost there.
* All later operators, copies and records of that NPU are dropped. New tensors hold garbage, others
  keep their bytes. An event that was recorded later never completes: query() returns False, and
  synchronize() blocks for ever.
* NPU_EMULATOR_FAIL="OPERATOR[:N] [WORD ...]" lets the N-th launch of an operator fail.
  NPU_EMULATOR_FAIL_FILE names a file that will hold such a line (csrc/streams/faults.h).
* In late mode, an error of queued work becomes such a failure. Errors that the host can see at the
  call are raised at the call.
* Not emulated: errors of the device itself, after which each synchronization of the host fails.

For tests (ascend_npu_emulator.native.core)
* fail() and reset_tasks() inject failures and forget them; queue_status() is that of an NPU.
* hold() keeps an NPU from running what is launched, until release() or release_after(). 4095 held
  tasks fill the queue: the next record blocks with the GIL held.
* waiters() names the threads inside Event.synchronize and Stream.synchronize, now and at most since
  reset_waiters(). With NPU_EMULATOR_SPIN=1 a thread that waits uses its CPU.
* contexts() tells the contexts of this process, and the thread and calls that created each.
"""
