// Blocks of device and pinned host memory, and which host bytes they stand for.
//
// Every npu storage's DataPtr carries a Block as its context. Host bytes, and the log of accesses
// to them (races.h), are owned by Memory, which outlives the Block while queued work or a captured
// graph still needs it.
//
// What is allocated while a stream captures a graph comes from the graph's Pool. Freed memory goes
// back to the pool, not to the device, and the next capture that shares the pool may get the same
// bytes: that is how the outputs of one graph come to be overwritten by the replay of another.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/alignment.h>
#include <sys/mman.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/races.h"

namespace emulated_npu {

constexpr size_t kRounding = 512;
constexpr size_t kMapped = size_t(16) << 20;  // blocks from this size on are their own anonymous mapping

// Late mode: the content of memory before it is written, and of reads too late or too early (NaN,
// -1).
constexpr int kGarbage = 0x44, kStale = 0xFF;

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Segment;  // pools.h

// Host bytes that stand for device (or pinned) memory.
struct Memory {
  void* ptr = nullptr;
  size_t bytes = 0;
  bool mapped = false;
  void* mapping = nullptr;  // first byte of the mapping, if that is not ptr
  int device = -1;  // -1: pinned host memory
  std::atomic<bool> freed{false};  // the device may have reused the bytes
  c10::Storage adopted;  // set when a CPU kernel made the bytes
  std::shared_ptr<Segment> segment;  // that the bytes are a part of, in a pool
  AccessLog log;
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (adopted || segment != nullptr) return;
    if (mapped) munmap(mapping != nullptr ? mapping : ptr, bytes);
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

}  // namespace emulated_npu
