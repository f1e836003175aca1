// Pools (torch.npu.memory.MemPool): segments of device memory that blocks are cut from, and that can
// be unmapped while tensors use them (mapping.h).
//
// The rules are those of torch_npu 2.10.0.post4 (torch_npu/csrc/core/npu/NPUCachingAllocator.cpp):
// * Within use_mem_pool every allocation on the device is made in the pool, by whatever thread
//   (get_pool, line 2490; the filter of npu/Module.cpp:541 accepts every stream).
// * Blocks of at most 1 MiB share segments of 2 MiB, those below 10 MiB share segments of 20 MiB, and
//   larger ones have a segment rounded up to 2 MiB (get_allocation_size, 2534; should_split, 2524).
// * The pool's allocator is asked for segments only, and only by the thread that is within
//   use_mem_pool. Other threads get segments from the device (alloc_block, 2721).
// * No cached memory is given back to make room for a segment (malloc, 1261).
// * Freed blocks stay in the pool. torch_npu returns no segment (releasePool has no caller here).
#pragma once

#include <sys/mman.h>

#include <functional>

#include "memory/accounting.h"

namespace emulated_npu {

constexpr size_t kSmallBlock = size_t(1) << 20, kSmallSegment = size_t(2) << 20;
constexpr size_t kMiddleBlock = size_t(10) << 20, kMiddleSegment = size_t(20) << 20;

// Maps `bytes` at `address` to memory in which every byte is `byte`, without using host memory for it.
inline void fill_by_mapping(char* address, size_t bytes, int byte) {
  static auto* patterns = new std::map<int, int>();  // descriptors of kSegment bytes, by byte
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  auto known = patterns->find(byte);
  if (known == patterns->end()) {
    const std::string pattern(kSegment, static_cast<char>(byte));
    const int fd = memfd_create("npu-pattern", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && write(fd, pattern.data(), kSegment) == ssize_t(kSegment), "emulated NPU: the host has no memory for a pattern");
    known = patterns->emplace(byte, fd).first;
  }
  for (size_t at = 0; at < bytes; at += kSegment) {
    void* mapped = mmap(address + at, kSegment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, known->second, 0);
    TORCH_CHECK(mapped != MAP_FAILED, "emulated NPU: the host cannot map a segment of ", bytes, " bytes");
  }
}

// Device memory that is mapped and unmapped as a whole.
struct Segment {
  int device = 0;
  int slot = 0;  // the stream that it was allocated on
  char* address = nullptr;
  size_t bytes = 0;
  bool mapped = false;
  bool is_small = false;
  std::map<size_t, size_t> idle;  // offset and bytes of what is not in use
  std::vector<std::weak_ptr<Memory>> blocks;  // cut from it, and perhaps still in use
};

// All segments of the process. They live as long as it does.
struct Segments {
  std::mutex mutex;
  std::map<char*, std::shared_ptr<Segment>> by_address;
  std::atomic<bool> any{false};

  std::shared_ptr<Segment> holding(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = by_address.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == by_address.begin()) return nullptr;
    const auto& segment = std::prev(after)->second;
    return pointer < segment->address + segment->bytes ? segment : nullptr;
  }
};

inline Segments& segments() {
  static auto* all = new Segments();
  return *all;
}

// Takes physical memory for a segment. Returns false if the device has too little.
inline bool charge_segment(Segment& segment) {
  DeviceMemory& m = device_memory(segment.device);
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.physical() + m.workspace_bytes() + segment.bytes > capacity(segment.device)) return false;
  m.unmapped -= segment.bytes;
  return true;
}

inline void refund_segment(Segment& segment) {
  DeviceMemory& m = device_memory(segment.device);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.unmapped += segment.bytes;
}

// An address range that belongs to the caching allocator, with nothing mapped.
inline std::shared_ptr<Segment> reserve_segment(int device, int slot, size_t bytes, bool is_small) {
  auto segment = std::make_shared<Segment>();
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "emulated NPU: the host has no addresses for a segment of ", bytes, " bytes");
  segment->device = device;
  segment->slot = slot;
  segment->address = static_cast<char*>(address);
  segment->bytes = bytes;
  segment->is_small = is_small;
  segment->idle[0] = bytes;
  {
    DeviceMemory& m = device_memory(device);
    std::lock_guard<std::mutex> lock(m.mutex);
    m.reserved.add(bytes);
    m.segments.add(1);
    m.pooled += bytes;
    m.unmapped += bytes;
  }
  std::lock_guard<std::mutex> lock(segments().mutex);
  segments().by_address[segment->address] = segment;
  segments().any = true;
  return segment;
}

// The address range goes back, because nothing could be mapped there.
inline void drop_segment(Segment& segment) {
  {
    DeviceMemory& m = device_memory(segment.device);
    std::lock_guard<std::mutex> lock(m.mutex);
    m.reserved.sub(segment.bytes);
    m.segments.sub(1);
    m.pooled -= segment.bytes;
    m.unmapped -= segment.bytes;
  }
  munmap(segment.address, segment.bytes);
  std::lock_guard<std::mutex> lock(segments().mutex);
  segments().by_address.erase(segment.address);
}

// Maps memory at the segment's address. The content is garbage. Returns false if the device has too little.
inline bool map_segment(Segment& segment, int content) {
  if (!charge_segment(segment)) return false;
  fill_by_mapping(segment.address, segment.bytes, content);
  segment.mapped = true;
  return true;
}

// Implemented in mapping.h: vllm-ascend's my_malloc.
std::shared_ptr<Segment> malloc_and_tell_python(int device, int slot, size_t bytes, bool is_small);

class MemPool {
 public:
  explicit MemPool(bool has_allocator) : has_allocator(has_allocator) {}
  const bool has_allocator;

  struct Piece {
    std::shared_ptr<Segment> segment;
    size_t offset, bytes;
  };

  // The smallest idle piece that is large enough, of a new segment if there is none.
  Piece take(int device, int slot, size_t rounded, bool ask_allocator) {
    const bool is_small = rounded <= kSmallBlock;
    if (auto found = take_idle(slot, rounded, is_small)) return *found;
    const size_t bytes = is_small ? kSmallSegment : rounded < kMiddleBlock ? kMiddleSegment : round_up(rounded, kSegment);
    std::shared_ptr<Segment> segment;
    if (has_allocator && ask_allocator) {
      segment = malloc_and_tell_python(device, slot, bytes, is_small);
    } else {
      segment = reserve_segment(device, slot, bytes, is_small);
      if (!map_segment(*segment, kGarbage)) {
        drop_segment(*segment);
        TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", human(bytes), " (NPU ", device, ") in a MemPool");
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      segments_.push_back(segment);
    }
    return *take_idle(slot, rounded, is_small);
  }

 private:
  std::optional<Piece> take_idle(int slot, size_t rounded, bool is_small) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::optional<Piece> best;
    for (const auto& segment : segments_) {
      if (segment->slot != slot || segment->is_small != is_small) continue;
      std::lock_guard<std::mutex> hold(segments().mutex);
      for (const auto& [offset, bytes] : segment->idle)
        if (bytes >= rounded && (!best || bytes < best->bytes)) best = Piece{segment, offset, bytes};
    }
    if (!best) return std::nullopt;
    std::lock_guard<std::mutex> hold(segments().mutex);
    best->segment->idle.erase(best->offset);
    const size_t rest = best->bytes - rounded;
    if (is_small ? rest >= kRounding : rest > kSmallBlock) {
      best->segment->idle[best->offset + rounded] = rest;
      best->bytes = rounded;
    }
    return best;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Segment>> segments_;
};

// The pools that allocations go to, by device; the first one that was begun counts.
struct ActivePools {
  std::mutex mutex;
  std::map<int, std::vector<std::shared_ptr<MemPool>>> by_device;
  std::atomic<int> count{0};
};

inline ActivePools& active_pools() {
  static auto* pools = new ActivePools();
  return *pools;
}

// Whether this thread is within use_mem_pool of a pool with an allocator.
inline int& own_pools() {
  static thread_local int count = 0;
  return count;
}

inline std::shared_ptr<MemPool> active_pool(int device) {
  ActivePools& pools = active_pools();
  if (pools.count == 0) return nullptr;
  std::lock_guard<std::mutex> lock(pools.mutex);
  const auto& active = pools.by_device[device];
  return active.empty() ? nullptr : active.front();
}

inline void begin_pool(int device, const std::shared_ptr<MemPool>& pool) {
  ActivePools& pools = active_pools();
  std::lock_guard<std::mutex> lock(pools.mutex);
  auto& active = pools.by_device[device];
  TORCH_CHECK(std::find(active.begin(), active.end(), pool) == active.end(), "beginAllocateToPool: already recording to mempool_id");
  active.push_back(pool);
  ++pools.count;
  own_pools() += pool->has_allocator;
}

inline void end_pool(int device, const std::shared_ptr<MemPool>& pool) {
  ActivePools& pools = active_pools();
  std::lock_guard<std::mutex> lock(pools.mutex);
  auto& active = pools.by_device[device];
  const auto found = std::find(active.begin(), active.end(), pool);
  TORCH_CHECK(found != active.end(), "endAllocatePool: not currently recording to mempool_id");
  active.erase(found);
  --pools.count;
  own_pools() -= pool->has_allocator;
}

// The bytes of a block in a pool. What a CPU kernel made is copied there.
inline void place_in_pool(Block& block, MemPool& pool, const Memory* made) {
  const MemPool::Piece piece = pool.take(block.device, block.owner_slot, block.rounded, own_pools() > 0);
  block.rounded = piece.bytes;
  recharge(block.device, block.requested, block.rounded);
  auto memory = std::make_shared<Memory>();
  memory->ptr = piece.segment->address + piece.offset;
  memory->bytes = block.requested;
  memory->device = block.device;
  memory->segment = piece.segment;
  memory->mapped = memory->bytes >= kMapped;
  if (made != nullptr) std::memcpy(memory->ptr, made->ptr, memory->bytes);
  block.memory = memory;
  std::lock_guard<std::mutex> lock(segments().mutex);
  auto& blocks = piece.segment->blocks;
  blocks.erase(std::remove_if(blocks.begin(), blocks.end(), [](const auto& each) { return each.expired(); }), blocks.end());
  blocks.push_back(memory);
}

// A freed block of a pool becomes idle, together with what is idle beside it.
inline void return_to_pool(const Block& block) {
  count_pooled(block.device, static_cast<int64_t>(block.rounded));
  Segment& segment = *block.memory->segment;
  size_t offset = static_cast<char*>(block.memory->ptr) - segment.address, bytes = block.rounded;
  std::lock_guard<std::mutex> lock(segments().mutex);
  auto after = segment.idle.lower_bound(offset);
  if (after != segment.idle.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = segment.idle.erase(after);
  }
  if (after != segment.idle.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
    }
  }
  segment.idle[offset] = bytes;
}

}  // namespace emulated_npu
