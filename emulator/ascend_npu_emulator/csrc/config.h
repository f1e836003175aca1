// The emulated machine: number of NPUs, their memory, modes; and whether this process has used a
// device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace emulated_npu {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

struct Config {
  int npus = 8;
  size_t hbm = size_t(2) << 30;
  bool late = false;
  bool queue = false;  // a failed task ends the task queue of its NPU (streams/tasks.h)
  bool spin = false;  // a thread that waits uses its CPU
};

// Set once by runtime.py, which parses and validates the environment.
inline Config& config() {
  static Config c;
  return c;
}

// The visible devices: the ids in ASCEND_RT_VISIBLE_DEVICES up to the first invalid one.
inline std::vector<int> visible_ids() {
  std::vector<int> ids;
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int id = 0; id < config().npus; ++id) ids.push_back(id);
    return ids;
  }
  for (const char* p = list; *p != '\0';) {
    char* end = nullptr;
    const long id = std::strtol(p, &end, 10);
    if (end == p || id < 0 || id >= config().npus) break;
    ids.push_back(static_cast<int>(id));
    p = *end == ',' ? end + 1 : end;
    if (end[0] != ',' && end[0] != '\0') break;
  }
  return ids;
}

struct ProcessState {
  std::atomic<int> visible{-1};  // frozen when the first device is used, as the real runtime does
  std::vector<int> ids;  // of the visible devices, on the machine
  std::atomic<bool> forked{false};
};

inline ProcessState& process_state() {
  static ProcessState s;
  return s;
}

inline bool context_created() { return process_state().visible.load() >= 0; }

inline int device_count() {
  const int frozen = process_state().visible.load();
  return frozen >= 0 ? frozen : static_cast<int>(visible_ids().size());
}

void forget_contexts();  // contexts.h

inline void mark_forked() {
  if (!context_created()) return;
  process_state().forked = true;
  forget_contexts();
}

inline void check_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "Invalid NPU device id ", device, ": ", device_count(),
      " device(s) are visible. Set NPU_EMULATOR_NPUS (npu-emulate --npus) or ASCEND_RT_VISIBLE_DEVICES.");
}

// Called before anything happens on a device.
inline void create_context() {
  TORCH_CHECK(
      !process_state().forked.load(),
      "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' start method");
  if (!context_created()) {
    static std::once_flag once;
    std::call_once(once, [] {
      pthread_atfork(nullptr, nullptr, &mark_forked);
      process_state().ids = visible_ids();
      process_state().visible = static_cast<int>(process_state().ids.size());
    });
  }
}

}  // namespace emulated_npu
