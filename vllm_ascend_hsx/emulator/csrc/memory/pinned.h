// Pinned host memory: its allocator, and which block an address belongs to.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>

#include "contexts.h"
#include "memory/blocks.h"

namespace hsx {

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
    use_process_device("pinned memory");
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
