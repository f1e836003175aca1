// Memory that is freed while another stream still uses it (declared in memory/allocator.h).
#pragma once

#include "memory/allocator.h"
#include "streams/engine.h"

namespace emulated_npu {

inline int current_slot(int device) { return Engine::get().tracking() ? current_stream(device).slot : 0; }

inline std::shared_ptr<Pool> capturing_pool(int device) {
  Engine& engine = Engine::get();
  return engine.recordings() == 0 ? nullptr : pool_of(current_stream(device));
}

// A freed block goes back to the pool of the stream it was allocated on. Accesses by other streams
// that are not ordered before are recorded: the next allocation may receive these bytes. A stream
// that still writes them is an error. One that still reads them gets poison, and a warning: it is
// harmless if the result is not used (vllm-ascend 0.23.0 drops the output of ranks that do not
// report it, worker/model_runner_v1.py, while the copy of its token ids is under way).
inline void keep_hazards(Block& block) {
  Engine& engine = Engine::get();
  if (!engine.tracking() || block.memory->log.accesses.empty()) return;
  const Clock owner = engine.clock_of(engine.by_slot(block.owner_slot));
  FreedBlock freed{block.rounded, block.owner_slot, {}, {}};
  if (block.recorded.empty()) freed.memory = block.memory;  // else a stream that may still read it would get poison too
  for (const Access& a : block.memory->log.accesses) {
    const bool recorded = std::find(block.recorded.begin(), block.recorded.end(), a.slot) != block.recorded.end();
    if (a.slot != block.owner_slot && !recorded && a.epoch > owner.get(a.slot)) freed.accesses.push_back(a);
  }
  if (freed.accesses.empty()) return;
  DeviceMemory& m = device_memory(block.device);
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.hazards.size() >= AccessLog::kLimit) m.hazards.erase(m.hazards.begin());
  m.hazards.push_back(std::move(freed));
}

inline void check_hazards(int device, int slot, size_t rounded) {
  Engine& engine = Engine::get();
  if (!engine.tracking()) return;
  DeviceMemory& m = device_memory(device);
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    if (m.hazards.empty()) return;
  }
  const Clock owner = engine.clock_of(engine.by_slot(slot));
  std::optional<FreedBlock> reused;
  const Access* use = nullptr;
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    for (auto it = m.hazards.begin(); it != m.hazards.end() && !reused;) {
      it->accesses.erase(
          std::remove_if(it->accesses.begin(), it->accesses.end(), [&](const Access& a) { return a.epoch <= owner.get(a.slot); }),
          it->accesses.end());
      const bool ours = it->owner_slot == slot;
      if (ours && !it->accesses.empty() && it->rounded >= rounded) reused = *it;
      it = ours && (it->accesses.empty() || reused) ? m.hazards.erase(it) : it + 1;
    }
  }
  if (!reused) return;
  for (const Access& a : reused->accesses)
    if (use == nullptr || a.write) use = &a;
  const std::string message = c10::str(
      "a block of ", reused->rounded, " bytes was freed while ", *use->op, " on ", engine.describe(use->slot), " may still ",
      use->write ? "write" : "read", " it, and ", engine.describe(slot),
      " now allocates memory that may be the same bytes. Use Tensor.record_stream(), or wait for that stream first.");
  TORCH_CHECK(!use->write, "NPU stream race: ", message);
  TORCH_WARN_ONCE("NPU stream race: ", message, " What is read late reads garbage.");
  if (const auto memory = reused->memory.lock()) std::memset(memory->ptr, kStale, memory->bytes);
}

// New device memory holds no zeros: every float type reads a large finite number (784 in bfloat16),
// every integer type an invalid index. Not NaN, which the host's allocator may hand out again:
// vllm-ascend leaves padding rows of attention unwritten and multiplies their results by routing
// weights of 0, which is right for any finite number. Large blocks, which are mapped as zeros, are
// filled in late mode alone.
inline void poison_fresh(int device, Memory& memory) {
  if (!memory.mapped || (config().late && Engine::get().defers(current_stream(device)))) std::memset(memory.ptr, kGarbage, memory.bytes);
}

inline void NpuAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  Block* block = npu_block(data);
  if (block == nullptr || !Engine::get().tracking()) return;
  block->recorded.push_back(Engine::get().stream(stream.device_index(), stream.id()).slot);
}

}  // namespace emulated_npu
