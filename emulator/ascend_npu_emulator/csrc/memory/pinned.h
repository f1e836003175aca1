// Pinned host memory: its allocator, and which block an address belongs to.
//
// Sizes are rounded up to a power of two, and freed blocks are kept for requests of the same rounded
// size (torch 2.10.0, ATen/core/CachingHostAllocator.h: CachingHostAllocatorImpl::allocate and
// ::free). torch_npu 2.10.0.post4 overrides only the allocation itself
// (csrc/core/npu/CachingHostAllocator.cpp:197).
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/llvmMathExtras.h>
#include <unistd.h>

#include <array>
#include <map>

#include "contexts.h"
#include "memory/blocks.h"

namespace emulated_npu {

// Whole pages are mapped here. The documentation of aclrtMallocHost (CANN 8.0) promises 64 bytes.
constexpr size_t kPinnedAlignment = 4096, kPromisedAlignment = 64;

// For tests: how the next allocations behave.
enum class PinnedFault { kNone, kNull, kUnaligned };

struct PinnedMemory {
  std::mutex mutex;
  std::map<uintptr_t, Block*> blocks;  // by first byte
  std::multimap<size_t, std::shared_ptr<Memory>> idle;  // freed blocks, by rounded size
  at::HostStats stats;
  int64_t requested = 0;  // bytes that holders of blocks asked for
  PinnedFault fault = PinnedFault::kNone;
};

inline PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory();
  return *memory;
}

inline Block* pinned_block(const void* ptr) {
  PinnedMemory& pinned = pinned_memory();
  std::lock_guard<std::mutex> lock(pinned.mutex);
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  auto after = pinned.blocks.upper_bound(address);
  if (after == pinned.blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < reinterpret_cast<uintptr_t>(block->memory->ptr) + block->rounded ? block : nullptr;
}

// Pinned pages cannot be swapped out: a machine grants no more than it has.
inline void require_host_memory(int64_t held, size_t rounded) {
  static const int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  TORCH_CHECK(
      rounded <= static_cast<size_t>(physical - std::min(held, physical)),
      "NPU function error: aclrtMallocHostWithCfg, error code is 207001: ", rounded, " bytes of pinned memory and ", held,
      " that are held are more than the ", physical, " of this machine");
}

inline std::shared_ptr<Memory> new_pinned_memory(size_t rounded, PinnedFault fault) {
  auto memory = std::make_shared<Memory>();
  if (fault == PinnedFault::kNull) return memory;
  const size_t shift = fault == PinnedFault::kUnaligned ? kPromisedAlignment : 0;
  const size_t bytes = std::max(rounded, kPinnedAlignment) + shift;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(
      p != MAP_FAILED, "NPU function error: aclrtMallocHostWithCfg, error code is 207001: the host has no memory for ", bytes,
      " bytes");
  memory->ptr = static_cast<char*>(p) + shift;
  memory->bytes = bytes;
  memory->mapped = true;
  memory->mapping = p;
  return memory;
}

// A kept block of this size that no queued copy uses, as the events of the real allocator tell.
inline std::shared_ptr<Memory> take_idle(PinnedMemory& pinned, size_t rounded) {
  const auto [first, last] = pinned.idle.equal_range(rounded);
  for (auto it = first; it != last; ++it) {
    if (it->second.use_count() != 1) continue;
    std::shared_ptr<Memory> memory = std::move(it->second);
    pinned.idle.erase(it);
    memory->log = {};
    return memory;
  }
  return nullptr;
}

inline void release_pinned(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  PinnedMemory& pinned = pinned_memory();
  std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.blocks.erase(reinterpret_cast<uintptr_t>(block->memory->ptr));
  pinned.requested -= static_cast<int64_t>(block->requested);
  pinned.stats.active_requests.decrease(1);
  pinned.stats.active_bytes.decrease(block->rounded);
  if (block->memory->ptr == nullptr) return;
  // Kept memory holds old bytes on hardware. Here the host gets the pages of large blocks back.
  if (block->rounded >= kMapped && block->memory.use_count() == 1) madvise(block->memory->ptr, block->rounded, MADV_DONTNEED);
  pinned.idle.emplace(block->rounded, std::move(block->memory));
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    use_process_device("pinned memory");
    auto block = std::make_unique<Block>();
    block->requested = bytes;
    block->rounded = c10::llvm::PowerOf2Ceil(bytes);
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    block->memory = take_idle(pinned, block->rounded);
    if (block->memory == nullptr) {
      require_host_memory(pinned.stats.allocated_bytes.current, block->rounded);
      block->memory = new_pinned_memory(block->rounded, pinned.fault);
      pinned.stats.allocations.increase(1);
      pinned.stats.allocated_bytes.increase(block->rounded);
    }
    pinned.requested += static_cast<int64_t>(bytes);
    pinned.stats.active_requests.increase(1);
    pinned.stats.active_bytes.increase(block->rounded);
    void* ptr = block->memory->ptr;
    // In late mode a copy that has not arrived must not be mistaken for data.
    if (config().late && ptr != nullptr && block->rounded < kMapped) std::memset(ptr, kStale, block->rounded);
    if (ptr != nullptr) pinned.blocks[reinterpret_cast<uintptr_t>(ptr)] = block.get();
    return {ptr, block.release(), &release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  // Queued copies hold their host memory themselves (Memory): take_idle does not hand it out.
  bool record_event(void* ptr, void*, c10::Stream) override { return pinned_block(ptr) != nullptr; }
  void empty_cache() override {
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    for (auto it = pinned.idle.begin(); it != pinned.idle.end();) {
      if (it->second.use_count() != 1) {
        ++it;
        continue;
      }
      pinned.stats.allocations.decrease(1);
      pinned.stats.allocated_bytes.decrease(it->first);
      it = pinned.idle.erase(it);
    }
  }
  at::HostStats get_stats() override {
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    pinned.stats.num_host_alloc = pinned.stats.allocations.allocated;
    pinned.stats.num_host_free = pinned.stats.allocations.freed;
    return pinned.stats;
  }
  void reset_accumulated_stats() override {
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    for (auto* stat : gauges(pinned.stats)) stat->reset_accumulated();
  }
  void reset_peak_stats() override {
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    for (auto* stat : gauges(pinned.stats)) stat->reset_peak();
  }

 private:
  static std::array<c10::CachingAllocator::Stat*, 4> gauges(at::HostStats& stats) {
    return {&stats.allocations, &stats.allocated_bytes, &stats.active_requests, &stats.active_bytes};
  }
};

inline PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

}  // namespace emulated_npu
