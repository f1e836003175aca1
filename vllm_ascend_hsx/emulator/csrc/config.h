// The emulated machine: number of NPUs, their memory, late mode; and whether this process has used
// a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace hsx {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

struct Config {
  int npus = 8;
  size_t hbm = size_t(2) << 30;
  bool late = false;
};

// Set once by runtime.py, which parses and validates the environment.
inline Config& config() {
  static Config c;
  return c;
}

// The number of visible devices: the ids in ASCEND_RT_VISIBLE_DEVICES up to the first invalid one.
inline int visible_devices() {
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (list == nullptr) return config().npus;
  int count = 0;
  for (const char* p = list; *p != '\0';) {
    char* end = nullptr;
    const long id = std::strtol(p, &end, 10);
    if (end == p || id < 0 || id >= config().npus) break;
    ++count;
    p = *end == ',' ? end + 1 : end;
    if (end[0] != ',' && end[0] != '\0') break;
  }
  return count;
}

struct ProcessState {
  std::atomic<int> visible{-1};  // frozen when the first device is used, as the real runtime does
  std::atomic<bool> forked{false};
};

inline ProcessState& process_state() {
  static ProcessState s;
  return s;
}

inline bool context_created() { return process_state().visible.load() >= 0; }

inline int device_count() {
  const int frozen = process_state().visible.load();
  return frozen >= 0 ? frozen : visible_devices();
}

inline c10::DeviceIndex& current_device() {
  static thread_local c10::DeviceIndex device = 0;
  return device;
}

inline void mark_forked() {
  if (context_created()) process_state().forked = true;
}

inline void check_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "Invalid NPU device id ", device, ": ", device_count(),
      " device(s) are visible. Set HSX_EMULATOR_NPUS (hsx emulate --npus) or ASCEND_RT_VISIBLE_DEVICES.");
}

// Called before anything happens on a device.
inline void create_context() {
  TORCH_CHECK(
      !process_state().forked.load(),
      "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the 'spawn' start method");
  if (!context_created()) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &mark_forked); });
    process_state().visible = visible_devices();
  }
}

inline int ready_device() {
  create_context();
  check_device(current_device());
  return current_device();
}

// Makes a device current for a scope, whatever ends it.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) { current_device() = static_cast<c10::DeviceIndex>(device); }
  ~OnDevice() { current_device() = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

}  // namespace hsx
