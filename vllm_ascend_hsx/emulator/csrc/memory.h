// Device and pinned host memory: allocation, accounting, and which block a pointer belongs to.
//
// Every npu storage's DataPtr carries a Block as its context. Host bytes, and the log of accesses
// to them (races.h), are owned by Memory, which outlives the Block while queued work or a captured
// graph still needs it.
//
// The accounting follows a caching allocator without fragmentation: sizes are rounded to 512 bytes,
// `reserved` grows in 2 MiB steps and only shrinks through empty_cache() or when the device would
// otherwise be out of memory. Temporaries that a CPU kernel allocates and frees inside one operator
// are not counted. Each process accounts for itself: two processes on the same device do not see
// each other's use.
//
// What is allocated while a stream captures a graph comes from the graph's Pool. Freed memory goes
// back to the pool, not to the device, and the next capture that shares the pool may get the same
// bytes: that is how the outputs of one graph come to be overwritten by the replay of another.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/alignment.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "config.h"
#include "races.h"

namespace hsx {

constexpr size_t kRounding = 512;
constexpr size_t kSegment = size_t(2) << 20;
constexpr size_t kMapped = size_t(16) << 20;  // blocks from this size on are their own anonymous mapping

// Late mode: the content of memory before it is written, and of reads too late or too early (NaN,
// -1).
constexpr int kGarbage = 0x44, kStale = 0xFF;

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Host bytes that stand for device (or pinned) memory.
struct Memory {
  void* ptr = nullptr;
  size_t bytes = 0;
  bool mapped = false;
  int device = -1;  // -1: pinned host memory
  std::atomic<bool> freed{false};  // the device may have reused the bytes
  c10::Storage adopted;  // set when a CPU kernel made the bytes
  AccessLog log;
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (adopted) return;
    if (mapped) munmap(ptr, bytes);
    else std::free(ptr);
  }
};

inline std::shared_ptr<Memory> host_memory(size_t bytes) {
  auto memory = std::make_shared<Memory>();
  memory->bytes = bytes;
  if (bytes >= kMapped) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "emulated NPU: the host has no memory for a block of ", bytes, " bytes");
    memory->ptr = p;
    memory->mapped = true;
  } else {
    TORCH_CHECK(
        posix_memalign(&memory->ptr, c10::gAlignment, std::max<size_t>(bytes, 1)) == 0,
        "emulated NPU: the host has no memory for a block of ", bytes, " bytes");
  }
  return memory;
}

// Memory that captured graphs share. A freed block is reused on the stream of its allocation.
struct Pool {
  struct Idle {
    std::shared_ptr<Memory> memory;
    size_t rounded;
    int owner_slot;
  };
  std::mutex mutex;
  int device = -1;
  int graphs = 0;  // captured or being captured; without any, freed memory goes to the device
  std::vector<Idle> idle;

  // The smallest idle block that is large enough.
  std::optional<Idle> take(size_t rounded, int slot) {
    std::lock_guard<std::mutex> lock(mutex);
    auto best = idle.end();
    for (auto it = idle.begin(); it != idle.end(); ++it)
      if (it->owner_slot == slot && it->rounded >= rounded && (best == idle.end() || it->rounded < best->rounded)) best = it;
    if (best == idle.end()) return std::nullopt;
    Idle found = std::move(*best);
    idle.erase(best);
    return found;
  }
};

struct Block {
  std::shared_ptr<Memory> memory;
  size_t requested = 0;
  size_t rounded = 0;
  int device = -1;  // -1: pinned host memory
  int owner_slot = 0;  // the stream it was allocated on
  std::vector<int> recorded;  // record_stream()
  std::shared_ptr<Pool> pool;  // of a captured graph
};

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
  int64_t pooled = 0;  // bytes that lie idle in the pools of graphs
  int64_t ooms = 0, retries = 0;
  std::vector<FreedBlock> hazards;
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

// Counts a block in; throws OutOfMemoryError when the device has no room for it.
inline void charge(int device, size_t requested, size_t rounded) {
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  const size_t limit = config().hbm;
  const size_t cached = m.reserved.current - m.allocated.current - m.pooled;
  if (rounded > cached) {
    size_t more = round_up(rounded - cached, kSegment);
    if (m.reserved.current + more > limit) {
      // What a caching allocator does before it gives up: hand back what it holds unused.
      ++m.retries;
      const size_t least = round_up(m.allocated.current + m.pooled + rounded, kSegment);
      if (least > limit) {
        ++m.ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", human(requested), " (NPU ", device, "; ",
            human(limit), " total capacity; ", human(m.allocated.current), " already allocated; ",
            human(limit - m.allocated.current - m.pooled), " free; ", human(m.reserved.current),
            " reserved in total by PyTorch). The capacity of an emulated NPU is set by HSX_EMULATOR_HBM or hsx emulate --hbm.");
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
  const int64_t least = round_up(m.allocated.current + m.pooled, kSegment);
  if (least < m.reserved.current) m.reserved.sub(m.reserved.current - least);
  m.segments.current = m.reserved.current / kSegment;
}

// Implemented in hazards.h, which knows the streams.
int current_slot(int device);
std::shared_ptr<Pool> capturing_pool(int device);
void keep_hazards(Block& block);
void check_hazards(int device, int slot, size_t rounded);
void poison_fresh(int device, Memory& memory);

inline void release_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  refund(block->device, block->requested, block->rounded);
  if (block->pool != nullptr) {
    Pool& pool = *block->pool;
    std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.graphs > 0) {
      count_pooled(block->device, static_cast<int64_t>(block->rounded));
      pool.idle.push_back({block->memory, block->rounded, block->owner_slot});
      return;
    }
  }
  keep_hazards(*block);
  block->memory->freed = true;
}

inline Block* npu_block(const c10::DataPtr& data) {
  return data.get_deleter() == &release_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

// Contexts that keep bytes alive but are no blocks: CPU tensors over device memory, weak
// references.
inline void drop_memory(void* context) { delete static_cast<std::shared_ptr<Memory>*>(context); }
inline void drop_weak(void* context) { delete static_cast<std::shared_ptr<Memory>*>(context); }

// The bytes of one of our pointers, or nullptr. Pinned memory is found by its address
// (pinned_block).
inline std::shared_ptr<Memory> memory_of(const c10::DataPtr& data) {
  if (const Block* block = npu_block(data)) return block->memory;
  if (data.get_deleter() == &drop_memory || data.get_deleter() == &drop_weak)
    return *static_cast<std::shared_ptr<Memory>*>(data.get_context());
  return nullptr;
}

inline c10::DataPtr new_block(int device, size_t bytes, std::shared_ptr<Memory> memory) {
  auto block = std::make_unique<Block>();
  block->requested = bytes;
  block->rounded = round_up(std::max<size_t>(bytes, 1), kRounding);
  block->device = device;
  block->owner_slot = current_slot(device);
  if (memory == nullptr) block->pool = capturing_pool(device);
  std::optional<Pool::Idle> idle;
  if (block->pool != nullptr) idle = block->pool->take(block->rounded, block->owner_slot);
  if (idle.has_value()) {
    block->rounded = idle->rounded;
    recharge(device, bytes, block->rounded);
    memory = std::move(idle->memory);
  } else {
    if (block->pool == nullptr) check_hazards(device, block->owner_slot, block->rounded);
    charge(device, bytes, block->rounded);
  }
  if (memory == nullptr) {
    memory = host_memory(block->pool == nullptr ? bytes : block->rounded);
    poison_fresh(device, *memory);
  }
  memory->device = device;
  block->memory = std::move(memory);
  void* ptr = block->memory->ptr;
  return {ptr, block.release(), &release_block, c10::Device(kNpu, static_cast<c10::DeviceIndex>(device))};
}

struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = ready_device();
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kNpu, static_cast<c10::DeviceIndex>(device))};
    return new_block(device, bytes, nullptr);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return context_created(); }
  void emptyCache(c10::MempoolId_t) override {
    for (int d = 0; d < device_count(); ++d) empty_device_cache(d);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    DeviceMemory& m = device_memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](const Gauge& gauge, c10::CachingAllocator::StatArray& array) { copy_gauge(gauge, array[0]); };
    fill(m.blocks, stats.allocation);
    fill(m.blocks, stats.active);
    fill(m.segments, stats.segment);
    fill(m.allocated, stats.allocated_bytes);
    fill(m.allocated, stats.active_bytes);
    fill(m.reserved, stats.reserved_bytes);
    fill(m.requested, stats.requested_bytes);
    stats.num_alloc_retries = m.retries;
    stats.num_ooms = m.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    DeviceMemory& m = device_memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    for (Gauge* g : {&m.blocks, &m.allocated, &m.requested, &m.reserved, &m.segments}) g->reset_accumulated();
    m.ooms = m.retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    DeviceMemory& m = device_memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    for (Gauge* g : {&m.blocks, &m.allocated, &m.requested, &m.reserved, &m.segments}) g->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    DeviceMemory& m = device_memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    return {config().hbm - std::min<size_t>(config().hbm, m.reserved.current), config().hbm};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is a Block, not the pointer
};

inline NpuAllocator& npu_allocator() {
  static auto* allocator = new NpuAllocator();
  return *allocator;
}

// ---- pinned host memory -------------------------------------------------------------------------

struct PinnedIndex {
  std::mutex mutex;
  std::map<uintptr_t, Block*> blocks;  // by first byte
};

inline PinnedIndex& pinned_index() {
  static auto* index = new PinnedIndex();
  return *index;
}

inline Block* pinned_block(const void* ptr) {
  PinnedIndex& index = pinned_index();
  std::lock_guard<std::mutex> lock(index.mutex);
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  auto after = index.blocks.upper_bound(address);
  if (after == index.blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < reinterpret_cast<uintptr_t>(block->memory->ptr) + block->rounded ? block : nullptr;
}

inline void release_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    PinnedIndex& index = pinned_index();
    std::lock_guard<std::mutex> lock(index.mutex);
    index.blocks.erase(reinterpret_cast<uintptr_t>(block->memory->ptr));
  }
  delete block;
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_unique<Block>();
    block->requested = bytes;
    block->rounded = std::max<size_t>(bytes, 1);
    block->memory = host_memory(block->rounded);
    // In late mode a copy that has not arrived must not be mistaken for data.
    if (config().late && !block->memory->mapped) std::memset(block->memory->ptr, kStale, block->rounded);
    void* ptr = block->memory->ptr;
    {
      PinnedIndex& index = pinned_index();
      std::lock_guard<std::mutex> lock(index.mutex);
      index.blocks[reinterpret_cast<uintptr_t>(ptr)] = block.get();
    }
    return {ptr, block.release(), &release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  // Queued copies hold their host memory themselves (Memory), so a block is never reused under one.
  bool record_event(void* ptr, void*, c10::Stream) override { return pinned_block(ptr) != nullptr; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

}  // namespace hsx
