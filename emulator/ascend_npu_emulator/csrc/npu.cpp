// Registers the emulated NPU with torch and exposes it to ascend_npu_emulator. Built by
// build.py.
#include <torch/extension.h>

#include "autocast.h"
#include "device.h"
#include "fallback.h"
#include "graphs/graphs.h"
#include "hccl/hccl.h"
#include "kernels.h"
#include "memory/mapping.h"

namespace emulated_npu {

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
  m.impl("stack", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("stack.out", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("record_stream", record_stream_kernel);
  m.impl("_has_compatible_shallow_copy_type", may_replace_data);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // One operator each on the device (op_plugin_functions.yaml:4939), not torch's composition.
  m.impl("stack", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("stack.out", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Devices that are not torch's own get this name for a convolution; over CPU tensors it is one.
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("convolution_overrideable", convolution_kernel); }

// A copy resolves conjugate and negative views itself; torch's own fallbacks would recurse.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

void start(int npus, size_t hbm) {
  static bool started = false;
  TORCH_CHECK(!started, "the emulated NPU is already running in this process");
  started = true;
  config().npus = npus;
  config().hbm = hbm;
  static auto* hooks = new NpuHooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_allocator());
}

void bind_contexts(py::module_& m) {
  m.def("has_context", [](int d) {
    check_device(d);
    return Contexts::get().has(d);
  });
  m.def("processes_on", [](int d) {
    check_device(d);
    return Contexts::get().count(d);
  });
  // Of this process: device, thread, call and Python calls that created it.
  m.def("contexts", [] {
    std::vector<std::tuple<int, std::string, std::string, std::string>> all;
    for (const Context& c : Contexts::get().all()) all.emplace_back(c.device, c.thread, c.call, c.python);
    return all;
  });
}

// For tests. A test that has made a launch fail ends with reset_tasks.
void bind_tasks(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("set_queue", [](bool queue) { config().queue = queue; });
  m.def("queue", [] { return config().queue; });
  m.def("set_spin", [](bool spin) { config().spin = spin; });
  // Whether the task that the caller launches may go on; throws the error of an earlier one.
  m.def("enter", [](int d, const std::string& operation) { return TaskQueue::of(d).enter(operation); }, Released());
  m.def("fail", [](const std::string& launch, const std::string& text) { Faults::get().add(launch, text); }, py::arg("launch"), py::arg("text") = Faults::kInjected);
  m.def("watch_for_fault", [](const std::string& file) { Faults::get().watch(file); });
  m.def("reset_tasks", &TaskQueue::reset_all, Released());
  m.def("queue_status", [](int d) {
    static const std::map<QueueStatus, std::string> names{
        {QueueStatus::kRun, "run"}, {QueueStatus::kErrorExit, "error"}, {QueueStatus::kCanExit, "exit"}};
    return names.at(TaskQueue::of(d).status());
  });
  m.def("queues_ended", &TaskQueue::any_exited);
  m.def("hold", [](int d) { TaskQueue::of(d).hold(); });
  m.def("release", [](int d) { TaskQueue::of(d).release(); }, Released());
  m.def("release_after", [](int d, double seconds) {
    std::thread([d, seconds] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      TaskQueue::of(d).release();
    }).detach();
  });
  // Names of the threads inside Event.synchronize and Stream.synchronize: now, and at the peak.
  m.def("waiters", [] {
    const Waiters::Count count = Waiters::get().count();
    return std::make_pair(count.now, count.peak);
  });
  m.def("reset_waiters", [] { Waiters::get().reset(); });
}

}  // namespace emulated_npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated_npu;
  m.def("start", &start);
  m.def("create_context", &create_context);
  m.def("context_created", &context_created);
  m.def("forked", [] { return process_state().forked.load(); });
  m.def("device_count", &device_count);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int d) {
    set_device(d, "set_device");
    process_device() = d;
  });
  // -1: the thread has set none.
  m.def("device_without_set", [] {
    const ThreadDevice& d = thread_device();
    return d.target >= 0 ? d.target : d.local;
  });
  m.def("return_to_device", &return_to_device);
  m.def("use_device", [](const std::string& call) { use_device(call.c_str()); });
  m.def("empty_cache", [] { npu_allocator().emptyCache({0, 0}); });
  m.def("memory_info", [](int d) { return npu_allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(d)); });
  // By torch.Event.event_id; torch's own elapsed_time refuses subclasses of torch.Event.
  m.def("elapsed_time", [](int64_t first, int64_t second) {
    return NpuGuard().elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0);
  });
  // torch's own methods do not call the backend for an event whose record threw.
  m.def("query_event", [](int64_t event) { return NpuGuard().queryEvent(reinterpret_cast<void*>(event)); });
  m.def(
      "synchronize_event", [](int64_t event) { NpuGuard().synchronizeEvent(reinterpret_cast<void*>(event)); },
      py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int d) { return default_generator_handle(d); });
  m.def("may_overlap", [](const at::Tensor& a, const at::Tensor& b) { return overlap(region_of(a), region_of(b)); });
  m.def("host_memory_stats", [] {
    const at::HostStats stats = pinned_allocator().get_stats();
    std::map<std::string, std::map<std::string, int64_t>> all;
    const auto add = [&](const char* name, const c10::CachingAllocator::Stat& stat) {
      all[name] = {{"current", stat.current}, {"peak", stat.peak}, {"allocated", stat.allocated}, {"freed", stat.freed}};
    };
    add("allocations", stats.allocations);
    add("allocated_bytes", stats.allocated_bytes);
    add("active_requests", stats.active_requests);
    add("active_bytes", stats.active_bytes);
    return all;
  });
  m.def("host_empty_cache", [] { pinned_allocator().empty_cache(); });
  // Bytes requested for pinned memory in use. torch_npu does not report them.
  m.def("pinned_bytes_asked", [] {
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    return pinned.requested;
  });
  py::enum_<PinnedFault>(m, "PinnedFault").value("NONE", PinnedFault::kNone).value("NULL", PinnedFault::kNull).value("UNALIGNED", PinnedFault::kUnaligned);
  m.def("set_pinned_fault", [](PinnedFault fault) {
    PinnedMemory& pinned = pinned_memory();
    std::lock_guard<std::mutex> lock(pinned.mutex);
    pinned.fault = fault;
  });
  m.def("first_launches", [] {
    FirstLaunches& launches = first_launches();
    std::lock_guard<std::mutex> lock(launches.mutex);
    return launches.order;
  });
  m.def("pending", [](int d, int64_t id) { return Engine::get().pending(Engine::get().stream(d, id)); });
  m.def("set_late", [](bool late) { Engine::get().set_late(late); });
  m.def("set_hbm", [](size_t bytes) { config().hbm = bytes; });
  m.def("late", [] { return config().late; });
  bind_contexts(m);
  bind_tasks(m);
  bind_graphs(m);
  bind_hccl(m);
  bind_pools(m);
}
