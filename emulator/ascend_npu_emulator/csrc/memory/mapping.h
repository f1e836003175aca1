// vllm-ascend's allocator for sleep mode, and acl.rt.memcpy: vllm_ascend/device_allocator/camem.py
// calls them. The rules are those of csrc/camem_allocator.cpp, the same file in vllm-ascend 0.23.0 to
// 0.30.0rc2.
//
// Unmapped memory holds no data, and neither does memory that is mapped again. An operator that uses
// unmapped memory is an error here. A kernel of the NPU would fail with an address that it cannot
// access, and end the device's context.
#pragma once

#include <torch/extension.h>

#include "memory/pinned.h"
#include "streams/hazards.h"

namespace emulated_npu {

// The functions of CaMemAllocator (init_module). The C library holds borrowed references.
struct Callbacks {
  py::object on_malloc, on_free;
};

inline Callbacks& callbacks() {
  static auto* all = new Callbacks();
  return *all;
}

// my_malloc (camem_allocator.cpp:127): reserves an address, tells Python, and maps memory there.
// Python learns the address before memory is mapped there.
inline std::shared_ptr<Segment> malloc_and_tell_python(int device, int slot, size_t bytes, bool is_small) {
  auto segment = reserve_segment(device, slot, bytes, is_small);
  {
    py::gil_scoped_acquire gil;
    callbacks().on_malloc(py::make_tuple(
        device, bytes, reinterpret_cast<uintptr_t>(segment->address), reinterpret_cast<uintptr_t>(segment.get())));
  }
  if (!map_segment(*segment, kGarbage)) {
    drop_segment(*segment);
    throw std::runtime_error("aclrtMallocPhysical failed with acl error code: 207001(OOM: Out of Memory, allocation failed)");
  }
  return segment;
}

inline Segment& segment_at(uintptr_t address, uintptr_t handle, const char* function) {
  const auto segment = segments().holding(reinterpret_cast<void*>(address));
  TORCH_CHECK(
      segment != nullptr && reinterpret_cast<uintptr_t>(segment->address) == address && reinterpret_cast<uintptr_t>(segment.get()) == handle,
      function, " failed: no memory was allocated at this address with this handle");
  return *segment;
}

// In late mode: no stream may still use the memory. Neither aclrtUnmapMem nor aclrtMemcpy waits for streams.
inline void check_idle(Segment& segment, const char* verb) {
  Engine& engine = Engine::get();
  if (!engine.tracking()) return;
  std::vector<std::shared_ptr<Memory>> blocks;
  {
    std::lock_guard<std::mutex> lock(segments().mutex);
    for (const auto& each : segment.blocks)
      if (auto memory = each.lock()) blocks.push_back(std::move(memory));
  }
  const Clock seen = engine.host_clock();
  std::optional<Access> open;
  {
    auto guard = engine.lock();
    for (const auto& memory : blocks)
      for (const Access& a : memory->log.accesses)
        if (a.epoch > seen.get(a.slot)) open = a;
  }
  TORCH_CHECK(
      !open, "NPU stream race: the host ", verb, " memory that ", *open->op, " on ", engine.describe(open->slot), " may still ",
      open->write ? "write" : "read", ". Missing: synchronize before it.");
}

inline void unmap_and_release(int, size_t, uintptr_t address, uintptr_t handle) {
  Segment& segment = segment_at(address, handle, "aclrtUnmapMem");
  TORCH_CHECK(segment.mapped, "aclrtUnmapMem failed: nothing is mapped at this address");
  check_idle(segment, "unmaps");
  segment.mapped = false;
  fill_by_mapping(segment.address, segment.bytes, kStale);
  refund_segment(segment);
}

inline void create_and_map(int, size_t, uintptr_t address, uintptr_t handle) {
  Segment& segment = segment_at(address, handle, "aclrtMapMem");
  TORCH_CHECK(!segment.mapped, "aclrtMapMem failed: memory is mapped at this address already");
  if (!map_segment(segment, kStale))
    throw std::runtime_error("aclrtMallocPhysical failed with acl error code: 207001(OOM: Out of Memory, allocation failed)");
}

// aclrtMemcpy between the host and memory of a pool. It returns when the bytes are there, and waits for no stream.
inline int memcpy_sync(uintptr_t to, size_t most, uintptr_t from, size_t bytes, int kind) {
  constexpr int kHostToDevice = 1, kDeviceToHost = 2;
  TORCH_CHECK_NOT_IMPLEMENTED(kind == kHostToDevice || kind == kDeviceToHost, "acl.rt.memcpy of kind ", kind, " is not implemented by the emulated NPU");
  TORCH_CHECK(bytes <= most, "acl.rt.memcpy: ", bytes, " bytes do not fit into ", most);
  const uintptr_t device = kind == kHostToDevice ? to : from;
  const auto segment = segments().holding(reinterpret_cast<void*>(device));
  TORCH_CHECK(
      segment != nullptr && device + bytes <= reinterpret_cast<uintptr_t>(segment->address) + segment->bytes,
      "acl.rt.memcpy: the emulated NPU knows no device memory of a pool at this address");
  TORCH_CHECK(segment->mapped, "acl.rt.memcpy: nothing is mapped at this address");
  check_idle(*segment, "copies");
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}

inline void bind_pools(py::module_& m) {
  py::class_<MemPool, std::shared_ptr<MemPool>>(m, "MemPool").def(py::init<bool>(), py::arg("has_allocator"));
  m.def("begin_pool", &begin_pool);
  m.def("end_pool", &end_pool);
  m.def("init_module", [](py::object on_malloc, py::object on_free) { callbacks() = {std::move(on_malloc), std::move(on_free)}; });
  m.def("unmap_and_release", &unmap_and_release);
  m.def("create_and_map", &create_and_map);
  m.def("memcpy", &memcpy_sync);
}

}  // namespace emulated_npu
