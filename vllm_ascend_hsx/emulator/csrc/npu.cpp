// Registers the emulated NPU with torch and exposes it to vllm_ascend_hsx.emulator. Built by
// build.py.
#include <torch/extension.h>

#include "autocast.h"
#include "device.h"
#include "fallback.h"
#include "graphs/graphs.h"
#include "hccl/hccl.h"
#include "kernels.h"

namespace hsx {

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &npu_allocator());
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Whether `tensor.data = other` may change the device: torch_npu has this operator, too.
bool may_replace_data(const at::Tensor& self, const at::Tensor& other) {
  const auto is_dense = [](const at::Tensor& each) { return each.layout() == at::kStrided && (each.is_cpu() || each.is_privateuseone()); };
  return self.key_set() == other.key_set() || (is_dense(self) && is_dense(other));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_kernel);
  m.impl("empty_strided", empty_strided_kernel);
  m.impl("zeros", zeros_kernel);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item_kernel);
  m.impl("resize_", resize_kernel);
  m.impl("set_.source_Storage_storage_offset", set_storage_kernel);
  m.impl("set_.source_Storage", set_whole_storage_kernel);
  m.impl("view", view_kernel);
  m.impl("as_strided", as_strided_kernel);
  m.impl("_reshape_alias", reshape_alias_kernel);
  m.impl("unfold", at::native::unfold);
  m.impl("zero_", zero_kernel);
  m.impl("histc", histc_kernel);
  m.impl("record_stream", record_stream_kernel);
  m.impl("_has_compatible_shallow_copy_type", may_replace_data);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Devices that are not torch's own get this name for a convolution; over CPU tensors it is one.
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("convolution_overrideable", convolution_kernel); }

// A copy resolves conjugate and negative views itself; torch's own fallbacks would recurse.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

void start(int npus, size_t hbm, bool late) {
  static bool started = false;
  TORCH_CHECK(!started, "the emulated NPU is already running in this process");
  started = true;
  config() = {npus, hbm, late};
  static auto* hooks = new NpuHooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_allocator());
}

}  // namespace hsx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace hsx;
  m.def("start", &start);
  m.def("create_context", &create_context);
  m.def("context_created", &context_created);
  m.def("forked", [] { return process_state().forked.load(); });
  m.def("device_count", &device_count);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int d) {
    create_context();
    check_device(d);
    current_device() = static_cast<c10::DeviceIndex>(d);
  });
  m.def("empty_cache", [] { npu_allocator().emptyCache({0, 0}); });
  m.def("memory_info", [](int d) { return npu_allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(d)); });
  // By torch.Event.event_id; torch's own elapsed_time refuses subclasses of torch.Event.
  m.def("elapsed_time", [](int64_t first, int64_t second) {
    return NpuGuard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0);
  });
  m.def("default_generator", [](int d) { return default_generator_handle(d); });
  m.def("may_overlap", [](const at::Tensor& a, const at::Tensor& b) { return overlap(region_of(a), region_of(b)); });
  m.def("pending", [](int d, int64_t id) { return Engine::get().pending(Engine::get().stream(d, id)); });
  m.def("set_late", [](bool late) { Engine::get().set_late(late); });
  m.def("set_hbm", [](size_t bytes) { config().hbm = bytes; });
  m.def("late", [] { return config().late; });
  bind_graphs(m);
  bind_hccl(m);
}
