// The NPU of a thread, and the contexts of processes on NPUs.
//
// As in torch_npu 2.10.0.post4 (csrc/core/npu/NPUFunctions.cpp): a thread has no NPU until it sets
// one. Its first call that needs a stream or memory gives it NPU 0 (NPUStream.cpp:289
// initNPUStreamsOnce, NPUCachingAllocator.cpp:3622). Dropping an event is such a call
// (NPUEvent.cpp:60). Each NPU that a thread has set gets a context of the process, which takes
// memory of that NPU until the process ends.
//
// The processes of one emulated machine (NPU_EMULATOR_MACHINE) see each other's contexts by locks on
// one empty file. The kernel drops the locks of a process that ends, however it ends.
#pragma once

#include <Python.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "config.h"

namespace emulated_npu {

// vllm-ascend issue 7107: npu-smi shows 107 MB for each process without work on an NPU.
constexpr size_t kContextBytes = size_t(107) << 20;

inline bool python_runs() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// The name of this thread in Python; of a thread that Python does not know, that of the system.
// Takes the GIL: call it without locks of ours.
inline std::string thread_name() {
  if (python_runs()) {
    pybind11::gil_scoped_acquire gil;
    pybind11::error_scope pending;
    const auto threading = pybind11::module_::import("threading");
    const pybind11::object thread = threading.attr("_active").attr("get")(threading.attr("get_ident")());
    if (!thread.is_none()) return thread.attr("name").cast<std::string>();
  }
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

// The innermost calls of Python in this thread, "FILE:LINE in FUNCTION" each. Takes the GIL.
inline std::string python_calls() {
  constexpr int kMost = 8;
  std::string calls;
  if (!python_runs()) return calls;
  pybind11::gil_scoped_acquire gil;
  pybind11::error_scope pending;
  auto frame = pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (int n = 0; n < kMost && frame && !frame.is_none(); ++n, frame = frame.attr("f_back")) {
    const pybind11::object code = frame.attr("f_code");
    calls += pybind11::str("{}:{} in {}\n").format(code.attr("co_filename"), frame.attr("f_lineno"), code.attr("co_name")).cast<std::string>();
  }
  return calls;
}

// Locks of the processes of one machine, as many per NPU as it has contexts.
class ContextLocks {
 public:
  // Adds a context of this process.
  void add(int id) {
    const int file = open_file();
    if (file < 0) return;
    for (off_t place = first(id); place < first(id + 1); ++place) {
      struct flock lock = region(place, 1);
      if (fcntl(file, F_SETLK, &lock) == 0) return;
      TORCH_CHECK(errno == EAGAIN || errno == EACCES, "emulated NPU: cannot lock ", path(), ": ", std::strerror(errno));
    }
  }

  // The number of other processes with a context on the NPU.
  size_t others(int id) {
    const int file = open_file();
    if (file < 0) return 0;
    size_t count = 0;
    for (off_t place = first(id); place < first(id + 1); ++count) {
      struct flock lock = region(place, first(id + 1) - place);
      TORCH_CHECK(fcntl(file, F_GETLK, &lock) == 0, "emulated NPU: cannot read locks of ", path(), ": ", std::strerror(errno));
      if (lock.l_type == F_UNLCK) break;
      place = lock.l_start + lock.l_len;
    }
    return count;
  }

 private:
  static constexpr off_t kProcesses = 1 << 16;  // lock offsets per NPU

  static off_t machine() {
    const char* text = std::getenv("NPU_EMULATOR_MACHINE");
    return text == nullptr ? 0 : std::strtoll(text, nullptr, 10);
  }
  static off_t first(int id) { return (machine() * kMaxDevices + id) * kProcesses; }
  static struct flock region(off_t start, off_t length) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = start;
    lock.l_len = length;
    return lock;
  }
  static std::string path() {
    const char* directory = std::getenv("TMPDIR");
    return std::string(directory == nullptr ? "/tmp" : directory) + "/npu-emulator-" + std::to_string(getuid()) + ".lock";
  }
  // -1: this process is a machine of its own.
  int open_file() {
    if (machine() == 0) return -1;
    std::lock_guard<std::mutex> lock(mutex_);
    if (file_ < 0) file_ = open(path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    TORCH_CHECK(
        file_ >= 0, "emulated NPU: cannot open ", path(), ", in which processes see each other's contexts: ", std::strerror(errno),
        ". Set TMPDIR to a directory of your own.");
    return file_;
  }

  std::mutex mutex_;
  int file_ = -1;  // never closed: that would drop the locks
};

struct Context {
  int device;
  std::string thread, call, python;  // which created it
};

class Contexts {
 public:
  static Contexts& get() {
    static auto* contexts = new Contexts();
    return *contexts;
  }

  bool has(int device) const { return (mask_ >> device & 1) != 0; }

  // Gives this process a context on the NPU, if it has none.
  void create(int device, const char* call) {
    if (has(device)) return;
    const Context made{device, thread_name(), call, python_calls()};
    std::lock_guard<std::mutex> lock(mutex_);
    if (has(device)) return;
    locks_.add(process_state().ids.at(device));
    mask_ |= uint64_t(1) << device;
    all_.push_back(made);
  }

  std::vector<Context> all() {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_;
  }

  // The number of processes of the machine that have a context on the NPU.
  size_t count(int device) {
    if (!context_created()) return 0;
    return locks_.others(process_state().ids.at(device)) + has(device);
  }
  // The memory that they take.
  size_t bytes(int device) { return count(device) * kContextBytes; }

  void forget() {
    mask_ = 0;
    all_.clear();
  }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> mask_{0};
  std::vector<Context> all_;
  ContextLocks locks_;
};

inline void forget_contexts() { Contexts::get().forget(); }

// local_device and targetDeviceIndex of NPUFunctions.cpp.
struct ThreadDevice {
  int local = -1;
  int target = -1;  // to be set by the first use
};

inline ThreadDevice& thread_device() {
  static thread_local ThreadDevice device;
  return device;
}

// GetDevice: NPU 0 for a thread that has set none.
inline c10::DeviceIndex current_device() {
  const ThreadDevice& d = thread_device();
  return static_cast<c10::DeviceIndex>(d.target >= 0 ? d.target : d.local >= 0 ? d.local : 0);
}

// SetDevice.
inline void set_device(int device, const char* call) {
  create_context();
  check_device(device);
  thread_device() = {device, -1};
  Contexts::get().create(device, call);
}

// initNPUStreamsOnce, LazySetDevice: what every use of the current device begins with.
inline int use_device(const char* call) {
  set_device(current_device(), call);
  return current_device();
}

// device_id_ of npu_sys_ctrl.h: what Python has set last in this process.
inline std::atomic<int>& process_device() {
  static std::atomic<int> device{0};
  return device;
}

// Pinned memory: a thread without an NPU sets that of the process (CachingHostAllocator.cpp:206).
inline void use_process_device(const char* call) {
  if (thread_device().local < 0) set_device(process_device(), call);
}

// MaybeSetDevice: how a guard gives back the device that was current before.
inline void return_to_device(int device) {
  if (Contexts::get().has(device)) thread_device() = {device, -1};
  else thread_device().target = device;
}

// Makes a device current within a scope.
class OnDevice {
 public:
  OnDevice(int device, const char* call) : before_(current_device()) {
    if (device != before_ || thread_device().local != device) set_device(device, call);
  }
  ~OnDevice() {
    if (current_device() != before_) return_to_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

}  // namespace emulated_npu
