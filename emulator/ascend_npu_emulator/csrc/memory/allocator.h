// The allocator of device memory.
#pragma once

#include "memory/pools.h"

namespace emulated_npu {

// Implemented in streams/hazards.h, which knows the streams.
int current_slot(int device);
std::shared_ptr<Pool> capturing_pool(int device);
void keep_hazards(Block& block);
void check_hazards(int device, int slot, size_t rounded);
void poison_fresh(int device, Memory& memory);

inline void release_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  refund(block->device, block->requested, block->rounded);
  if (block->memory->segment != nullptr) {
    return_to_pool(*block);
    block->memory->freed = true;
    return;
  }
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
// (pinned.h).
inline std::shared_ptr<Memory> memory_of(const c10::DataPtr& data) {
  if (const Block* block = npu_block(data)) return block->memory;
  if (data.get_deleter() == &drop_memory || data.get_deleter() == &drop_weak)
    return *static_cast<std::shared_ptr<Memory>*>(data.get_context());
  return nullptr;
}

// Called before an operator uses the tensor's values; a view of unmapped memory is none.
inline void refuse_unmapped(const at::Tensor& t, const std::string& op) {
  if (!segments().any || !t.defined() || t.device().type() != kNpu || t.numel() == 0) return;
  const auto memory = memory_of(t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
  TORCH_CHECK(
      memory == nullptr || memory->segment == nullptr || memory->segment->mapped, "NPU error: ", op,
      " uses device memory that is unmapped, because the engine sleeps");
}

inline c10::DataPtr device_pointer(std::unique_ptr<Block> block) {
  const c10::Device device(kNpu, static_cast<c10::DeviceIndex>(block->device));
  void* ptr = block->memory->ptr;
  return {ptr, block.release(), &release_block, device};
}

inline c10::DataPtr new_block(int device, size_t bytes, std::shared_ptr<Memory> memory) {
  auto block = std::make_unique<Block>();
  block->requested = bytes;
  block->rounded = round_up(std::max<size_t>(bytes, 1), kRounding);
  block->device = device;
  block->owner_slot = current_slot(device);
  if (memory == nullptr) block->pool = capturing_pool(device);
  if (const auto pool = block->pool == nullptr ? active_pool(device) : nullptr) {
    place_in_pool(*block, *pool, memory.get());
    return device_pointer(std::move(block));
  }
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
  return device_pointer(std::move(block));
}

struct NpuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = use_device("an allocation");
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kNpu, static_cast<c10::DeviceIndex>(device))};
    return new_block(device, bytes, nullptr);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return context_created(); }
  void emptyCache(c10::MempoolId_t) override {
    // As synchronize_and_free_events (NPUCachingAllocator.cpp:2996) of torch_npu 2.10.0.post4.
    TORCH_CHECK(active_pools().count == 0, "captures_underway.empty() INTERNAL ASSERT FAILED: empty_cache within use_mem_pool");
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
    const size_t room = capacity(device), taken = m.physical() + m.workspace_bytes();
    return {room - std::min<size_t>(room, taken), config().hbm};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is a Block, not the pointer
};

inline NpuAllocator& npu_allocator() {
  static auto* allocator = new NpuAllocator();
  return *allocator;
}

}  // namespace emulated_npu
