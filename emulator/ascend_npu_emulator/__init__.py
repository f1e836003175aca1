"""Emulate Ascend NPUs on a CPU, to run the unmodified vllm-ascend wheel without hardware.

``npu-emulate [--npus N] [--hbm SIZE] [--late] [--queue] -- CMD...`` (launch.py) only sets
environment variables. The directory ``site/`` comes first on PYTHONPATH, so every child process
finds the emulated ``torch_npu`` there.

Scope of the emulation
* Memory is host memory. An operator without a reference runs as its CPU kernel on the same bytes
  (csrc/fallback.h).
* Device memory is accounted per process and device against NPU_EMULATOR_HBM, without fragmentation
  (csrc/memory/). Two processes on one device do not see each other's allocations.
* A process has a context on each NPU that one of its threads has used. A context takes 107 MiB,
  visible to all processes of the machine (csrc/contexts.h). A thread that sets no device uses NPU
  0, as in torch_npu. Dropping an event counts as a use.
* Streams and events order work as on hardware (csrc/streams/).
* hccl runs over gloo. If ranks disagree about an operator, shape or dtype, the error names both
  (csrc/hccl/).
* Capturing a graph runs nothing. Replays are ordinary work of one stream, without random numbers
  and copies to the host (csrc/graphs/). torch.compile works if it needs neither npugraph_ex nor
  torchair.
* User-defined memory pools, handles between processes, and profiling raise NotImplementedError with
  the missing name.

Late mode (NPU_EMULATOR_LATE=1) makes every missing wait fail a test
* Work on a stream other than the default one runs only when something waits for it. A copy into
  pinned memory is invisible to the host until the host waits. A copy out of pinned memory reads the
  bytes when it runs. query() returns False twice; each later call also runs one queued item, so
  that polling loops end.
* If two streams access the same bytes and at least one writes, the accesses must be ordered
  (wait_stream, wait_event, or a synchronization of the host). Otherwise the second access raises
  RuntimeError "NPU stream race" with streams, operators and shape. Tracking starts with the first
  stream that is created. Accesses by the host are not tracked.
* New device memory holds large finite garbage; new pinned memory holds 0xFF bytes (NaN). Memory
  that is freed while another stream still reads it is overwritten with NaN, with a warning, once it
  may be allocated again. If another stream still writes it, the new allocation raises.
* Collectives, and operators without a shape function (Meta kernel), run at the call, after all work
  queued on the stream.

Queue mode (NPU_EMULATOR_QUEUE=1) reports failures as torch_npu's task queue does
* A failed task has not run. The next call that enters the task queue of the NPU raises the error
  once, in any thread. Dropping an event also enters the queue, and then the error is lost.
* All later operators, copies and records of that NPU are dropped. New tensors hold garbage, older
  ones keep their bytes. An event recorded after the failure never completes: query() returns False,
  and synchronize() blocks forever.
* NPU_EMULATOR_FAIL="OPERATOR[:N] [WORD ...]" makes the N-th launch of an operator fail.
  NPU_EMULATOR_FAIL_FILE names a file from which this line is read once the file exists
  (csrc/streams/faults.h).
* In late mode, an error of queued work also becomes a failed task. Errors that the host can detect
  at the call are raised at the call.
* Not emulated: errors of the device, after which each synchronization of the host fails.

For tests (ascend_npu_emulator.native.core)
* fail() injects a failure and reset_tasks() clears failures. queue_status() returns the status of
  an NPU's task queue.
* hold() stops an NPU from running launched work until release() or release_after(). 4095 held tasks
  fill the queue: the next record blocks and keeps the GIL.
* waiters() returns the names of the threads inside Event.synchronize and Stream.synchronize: now,
  and at the peak since reset_waiters(). With NPU_EMULATOR_SPIN=1 a waiting thread spins.
* contexts() lists the contexts of this process, each with the thread and the calls that created it.
"""
