// What is allocated and reserved on each device.
//
// The accounting follows a caching allocator without fragmentation: sizes are rounded to 512 bytes,
// `reserved` grows in 2 MiB steps and only shrinks through empty_cache() or when the device would
// otherwise be out of memory. Temporaries that a CPU kernel allocates and frees inside one operator
// are not counted. Each process accounts for itself. Of other processes it sees the contexts on the
// device (contexts.h), but not their allocations.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>

#include "contexts.h"
#include "memory/blocks.h"

namespace emulated_npu {

constexpr size_t kSegment = size_t(2) << 20;

struct Gauge {
  int64_t current = 0, peak = 0, total = 0, freed = 0;
  void add(int64_t n) {
    current += n;
    total += n;
    peak = std::max(peak, current);
  }
  void sub(int64_t n) {
    current -= n;
    freed += n;
  }
  void reset_peak() { peak = current; }
  void reset_accumulated() { total = freed = 0; }
};

inline void copy_gauge(const Gauge& from, c10::CachingAllocator::Stat& to) {
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.total;
  to.freed = from.freed;
}

struct FreedBlock {
  size_t rounded;
  int owner_slot;
  std::vector<Access> accesses;
  std::weak_ptr<Memory> memory;  // alive while queued work still uses it
};

struct DeviceMemory {
  std::mutex mutex;
  Gauge blocks, allocated, requested, reserved, segments;
  int64_t pooled = 0;  // bytes that lie idle in the pools of graphs, and in MemPools
  std::map<int, int64_t> workspaces;  // kept for operators, by stream (workspace.h)
  int64_t workspace_bytes() const {
    int64_t sum = 0;
    for (const auto& [slot, bytes] : workspaces) sum += bytes;
    return sum;
  }
  int64_t unmapped = 0;  // of `reserved`, in segments that have no memory (pools.h)
  int64_t ooms = 0, retries = 0;
  std::vector<FreedBlock> hazards;
  size_t physical() const { return reserved.current - unmapped; }
};

inline DeviceMemory& device_memory(int device) {
  static auto* all = new std::vector<std::unique_ptr<DeviceMemory>>([] {
    std::vector<std::unique_ptr<DeviceMemory>> v;
    for (int i = 0; i < kMaxDevices; ++i) v.push_back(std::make_unique<DeviceMemory>());
    return v;
  }());
  return *all->at(device);
}

inline std::string human(size_t bytes) {
  char text[32];
  if (bytes >= (size_t(1) << 30)) snprintf(text, sizeof text, "%.2f GiB", bytes / double(1 << 30));
  else snprintf(text, sizeof text, "%.2f MiB", bytes / double(1 << 20));
  return text;
}

// Memory of the device that contexts leave for allocations.
inline size_t capacity(int device) { return config().hbm - std::min(config().hbm, Contexts::get().bytes(device)); }

// Adds a block; throws OutOfMemoryError when the device has no room for it.
inline void charge(int device, size_t requested, size_t rounded) {
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  const size_t cached = m.reserved.current - m.allocated.current - m.pooled;
  if (rounded > cached) {
    const size_t limit = capacity(device) + m.unmapped;  // beside contexts
    size_t more = round_up(rounded - cached, kSegment);
    if (m.reserved.current + m.workspace_bytes() + more > limit) {
      // What a caching allocator does before it gives up: hand back what it holds unused, and the
      // workspaces (torch_npu 2.10.0.post4, csrc/core/npu/NPUCachingAllocator.cpp:1274).
      ++m.retries;
      m.workspaces.clear();
      const size_t least = round_up(m.allocated.current + m.pooled + rounded, kSegment);
      if (least > limit) {
        ++m.ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", human(requested), " (NPU ", device, "; ",
            human(config().hbm), " total capacity; ", human(config().hbm + m.unmapped - limit), " in contexts; ", human(m.allocated.current),
            " already allocated; ", human(limit - std::min<size_t>(limit, m.allocated.current + m.pooled)), " free; ", human(m.reserved.current),
            " reserved in total by PyTorch). The capacity of an emulated NPU is set by NPU_EMULATOR_HBM or npu-emulate --hbm.");
      }
      const int64_t target = std::max<int64_t>(least, 0);
      if (target < m.reserved.current) m.reserved.sub(m.reserved.current - target);
      else m.reserved.add(target - m.reserved.current);
    } else {
      m.reserved.add(more);
      m.segments.add(1);
    }
  }
  m.blocks.add(1);
  m.allocated.add(rounded);
  m.requested.add(requested);
}

inline void refund(int device, size_t requested, size_t rounded) {
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.blocks.sub(1);
  m.allocated.sub(rounded);
  m.requested.sub(requested);
}

// Idle memory of a pool becomes a block again.
inline void recharge(int device, size_t requested, size_t rounded) {
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.pooled -= rounded;
  m.blocks.add(1);
  m.allocated.add(rounded);
  m.requested.add(requested);
}

inline void count_pooled(int device, int64_t bytes) {
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.pooled += bytes;
}

// A graph that used the pool is gone; with the last one goes the idle memory.
inline void leave_pool(Pool& pool) {
  std::vector<Pool::Idle> idle;
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    if (--pool.graphs == 0) idle.swap(pool.idle);
  }
  for (const Pool::Idle& block : idle) {
    block.memory->freed = true;
    count_pooled(pool.device, -static_cast<int64_t>(block.rounded));
  }
}

inline void empty_device_cache(int device) {
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.workspaces.clear();  // NPUCachingAllocator.cpp:1661
  const int64_t least = round_up(m.allocated.current + m.pooled, kSegment);
  if (least < m.reserved.current) m.reserved.sub(m.reserved.current - least);
  m.segments.current = m.reserved.current / kSegment;
}

}  // namespace emulated_npu
