// Reports the accesses of an operator to the race detector.
#pragma once

#include "memory/allocator.h"
#include "memory/pinned.h"
#include "streams/engine.h"

namespace emulated_npu {

inline std::string shape_text(const at::Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t d = 0; d < t.dim(); ++d) out << (d ? ", " : "") << t.size(d);
  out << "]";
  return out.str();
}

// The bytes of a tensor on the device, of a CPU tensor over such bytes, or of a pinned one.
inline std::shared_ptr<Memory> memory_of(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  const c10::DataPtr& data = t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (auto memory = memory_of(data)) return memory;
  if (!t.device().is_cpu() || data.get() == nullptr) return nullptr;
  const Block* block = pinned_block(data.get());
  return block == nullptr ? nullptr : block->memory;
}

inline std::string device_text(const Memory& memory) { return memory.device < 0 ? "cpu" : "npu:" + std::to_string(memory.device); }

// Checks, then records what an operator on `s` reads and writes. Throws before anything is
// recorded. On a recording stream the accesses are kept with the operator and checked at each
// replay.
inline void order(StreamState& s, const std::string* op, const std::vector<Touch>& touches) {
  Engine& engine = Engine::get();
  if (s.recording != nullptr) {
    record_touches(s, touches);
    return;
  }
  if (!engine.tracking()) return;
  const uint64_t epoch = engine.launch(s);
  struct Found {
    const Access* access;
    const Touch* touch;
  } found{nullptr, nullptr};
  Access earlier;
  std::vector<std::pair<std::shared_ptr<Memory>, Region>> where;
  {
    auto guard = engine.lock();
    for (const Touch& t : touches) {
      std::shared_ptr<Memory> memory = memory_of(t.tensor);
      Region region;
      if (memory != nullptr) {
        region = region_of(t.tensor);
        if (t.tensor.device().is_cpu()) {
          // A pinned tensor's storage may begin inside its block.
          const int64_t shift = static_cast<const char*>(t.tensor.storage().data()) - static_cast<const char*>(memory->ptr);
          region.low += shift;
          region.high += shift;
        }
      }
      where.emplace_back(memory, region);
      if (memory == nullptr || region.empty()) continue;
      found.access = memory->log.conflict(region, t.write, s.slot, s.clock);
      if (found.access != nullptr) {
        found.touch = &t;
        earlier = *found.access;
        break;
      }
    }
    if (found.touch == nullptr) {
      for (size_t i = 0; i < touches.size(); ++i)
        if (where[i].first != nullptr && !where[i].second.empty())
          where[i].first->log.add(where[i].second, touches[i].write, s.slot, epoch, op);
      return;
    }
  }
  const Touch& t = *found.touch;
  TORCH_CHECK(
      false, "NPU stream race: ", *op, " on ", engine.describe(s.slot), t.write ? " writes" : " reads", " a tensor of shape ",
      shape_text(t.tensor), " (", t.tensor.dtype().name(), ", ", device_text(*memory_of(t.tensor)), ") that ", *earlier.op, " on ",
      engine.describe(earlier.slot), earlier.write ? " wrote" : " read",
      ", and nothing orders the two. Missing: wait_stream, wait_event or synchronize between them.");
}

}  // namespace emulated_npu
