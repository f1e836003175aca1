// Reports the accesses of an operator to the race detector.
#pragma once

#include "streams.h"

namespace hsx {

inline std::string shape_text(const at::Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t d = 0; d < t.dim(); ++d) out << (d ? ", " : "") << t.size(d);
  out << "]";
  return out.str();
}

inline Block* block_of(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  const c10::DataPtr& data = t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (t.device().type() == kNpu) return npu_block(data);
  return t.device().is_cpu() && data.get() != nullptr ? pinned_block(data.get()) : nullptr;
}

struct Touch {
  at::Tensor tensor;
  bool write;
};

// Checks and then records what an operator launched on `s` reads and writes. Throws before anything is recorded.
inline void order(StreamState& s, const std::string* op, const std::vector<Touch>& touches) {
  Engine& engine = Engine::get();
  if (!engine.tracking()) return;
  const uint64_t epoch = engine.launch(s);
  struct Found {
    const Access* access;
    const Touch* touch;
  } found{nullptr, nullptr};
  Access earlier;
  std::vector<std::pair<Block*, Region>> where;
  {
    auto guard = engine.lock();
    for (const Touch& t : touches) {
      Block* block = block_of(t.tensor);
      Region region;
      if (block != nullptr) {
        region = region_of(t.tensor);
        if (t.tensor.device().is_cpu()) {
          // A pinned tensor's storage may begin inside its block.
          const int64_t shift = static_cast<const char*>(t.tensor.storage().data()) - static_cast<const char*>(block->memory->ptr);
          region.low += shift;
          region.high += shift;
        }
      }
      where.emplace_back(block, region);
      if (block == nullptr || region.empty()) continue;
      found.access = block->log.conflict(region, t.write, s.slot, s.clock);
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
      shape_text(t.tensor), " (", t.tensor.dtype().name(), ", ", t.tensor.device().str(), ") that ", *earlier.op, " on ",
      engine.describe(earlier.slot), earlier.write ? " wrote" : " read",
      ", and nothing orders the two. Missing: wait_stream, wait_event or synchronize between them.");
}

}  // namespace hsx
