// Kernels that are not the CPU's: allocation, copies between host and device, metadata, host waits,
// and counts of integers.
#pragma once

#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace emulated_npu {

inline int target_device(std::optional<c10::Device> device) {
  create_context();
  const int index = device.has_value() && device->has_index() ? device->index() : current_device();
  check_device(index);
  return index;
}

inline void refuse_pinned(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

inline at::Tensor empty_kernel(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin);
  OnDevice on(target_device(device), "an allocation");
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), &npu_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      at::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided_kernel(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  return empty_npu(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), at::dtype_or_default(dtype), target_device(device));
}

// torch_npu makes zeros by an operator of its own that passes on neither layout nor pin_memory (op-plugin,
// ZerosKernelNpuOpApi.cpp): unlike empty it takes pin_memory, and the tensor is an ordinary one.
inline at::Tensor zeros_kernel(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool>) {
  return at::empty_symint(sizes, dtype, std::nullopt, device, std::nullopt, std::nullopt).zero_();
}

inline const std::string* copy_name() {
  static const std::string* name = intern("aten::copy_");
  return name;
}

inline bool needs_temporary(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() != to.scalar_type() || !from.is_contiguous() || !to.is_contiguous() || !from.sizes().equals(to.sizes()) ||
      from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg();
}

inline void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

// Lets an asynchronous copy between host and device enter the task queue. False: it is dropped.
inline bool enter_copy(int device, const at::Tensor& to, const char* name, int kind) {
  return TaskQueue::of(device).enter(name, [&] { return copy_task(to.nbytes(), kind); });
}
constexpr int kHostToDevice = 1, kDeviceToHost = 2;  // aclrtMemcpyKind

// A pinned tensor as queued work sees it: its bytes kept alive, its sizes as they are now.
inline at::Tensor pinned_view(const at::Tensor& t, const Block& block) {
  return at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), [keep = block.memory](void*) {}, t.options().pinned_memory(false));
}

inline void device_to_device(const at::Tensor& from, const at::Tensor& to) {
  Engine& engine = Engine::get();
  StreamState& s = current_stream(from.device().index());
  StreamState& d = current_stream(to.device().index());
  TORCH_CHECK_NOT_IMPLEMENTED(
      &s == &d || (s.recording == nullptr && d.recording == nullptr), "a copy between devices in a graph is not implemented by the emulated NPU");
  if (!TaskQueue::of(s.device).enter("device_to_device", [] { return operator_task("aclnnInplaceCopy"); })) return;
  if (config().late && &s != &d) engine.wait_stream(s, d);
  order(s, copy_name(), {{from, false}, {to, true}});
  note_launch(s.device, *copy_name(), {from}, to);
  if (s.recording == nullptr && &s == &d) take_workspace(s.device, s.slot, copy_workspace(from, to));
  Relabel relabel(to.device().index());
  const at::Tensor a = relabel.to_cpu(from), b = relabel.to_cpu(to);
  if (engine.queues(s)) {
    engine.push(s, {copy_name(), [a, b] { copy_bytes(b, a); }});
  } else {
    engine.settle(s);
    engine.settle(d);
    copy_bytes(b, a);
  }
  if (config().late && &s != &d) engine.wait_stream(d, s);
}

// As copy_between_host_and_device_opapi of torch_npu (CopyKernelOpApi.cpp:37): a copy that blocks
// synchronizes the stream and then moves bytes without the task queue.
inline void host_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Engine& engine = Engine::get();
  OnDevice on(to.device().index(), "a copy");
  StreamState& s = current_stream(to.device().index());
  const bool async = non_blocking && from.is_pinned() && !needs_temporary(from, to);
  if (!async) refuse_synchronous_copy("a synchronous copy from the host");
  TORCH_CHECK(async || s.recording == nullptr, "NPU error: a synchronous copy from the host, ", kCapturedStream);
  if (!non_blocking) TaskQueue::of(s.device).report();
  else if (!enter_copy(s.device, to, "host_to_device", kHostToDevice)) return;
  order(s, copy_name(), {{from, false}, {to, true}});
  Relabel relabel(to.device().index());
  const at::Tensor b = relabel.to_cpu(to);
  if (async) {
    if (engine.queues(s)) {
      engine.push(s, {copy_name(), [a = pinned_view(from, *pinned_block(from.data_ptr())), b] { copy_bytes(b, a); }});
      return;
    }
    engine.settle(s);
    if (config().late) engine.deliver(s, pinned_block(from.data_ptr()));
    copy_bytes(b, from);
    return;
  }
  engine.settle(s);
  if (config().late) engine.synchronize(s);
  if (!to.is_contiguous() && TaskQueue::of(s.device).exited()) return;  // its second part is an operator
  copy_bytes(b, from);
}

inline void device_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Engine& engine = Engine::get();
  OnDevice on(from.device().index(), "a copy");
  StreamState& s = current_stream(from.device().index());
  const bool async = non_blocking && to.is_pinned() && to.is_contiguous();
  if (!async) refuse_synchronous_copy("a synchronous copy to the host");
  TORCH_CHECK(async || s.recording == nullptr, "NPU error: a synchronous copy to the host, ", kCapturedStream);
  TORCH_CHECK_NOT_IMPLEMENTED(s.recording == nullptr, "a copy to the host in a graph is not implemented by the emulated NPU");
  TaskQueue& tasks = TaskQueue::of(s.device);
  if (!non_blocking) tasks.report();
  else if (!enter_copy(s.device, to, "device_to_host", kDeviceToHost)) return;
  order(s, copy_name(), {{from, false}, {to, true}});
  if (!engine.defers(s) && !async) engine.settle(s);
  Relabel relabel(from.device().index());
  const at::Tensor a = relabel.to_cpu(from);
  if (async && (config().late || tasks.held_or_busy())) {
    const Block* block = pinned_block(to.data_ptr());
    const at::Tensor b = pinned_view(to, *block);
    tasks.submit([&engine, &s, a, b, block] {
      // The default stream has run all that was launched before.
      const at::Tensor source = s.is_default() ? a.clone() : a;
      engine.append(s, {copy_name(), [source, b] { copy_bytes(b, source); }, block});
      if (!config().late) engine.drain(s, s.issued);
    });
    return;
  }
  if (async) engine.settle(s);
  if (config().late && !async) engine.synchronize(s);
  if (tasks.exited() && !from.is_contiguous() && !async) {
    std::memset(to.data_ptr(), kGarbage, to.nbytes());  // of a contiguous copy that was dropped
    return;
  }
  copy_bytes(to, a);
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool from_npu = from.device().type() == kNpu, to_npu = to.device().type() == kNpu;
  for (const at::Tensor& t : {from, to}) {
    TORCH_CHECK(
        t.device().type() == kNpu || t.device().is_cpu(), "copies between npu and ", t.device().type(), " are not supported");
    TORCH_CHECK(t.layout() == c10::kStrided, "the emulated NPU supports strided tensors only, got layout ", t.layout());
  }
  create_context();
  if (to.numel() == 0) return to;
  for (const at::Tensor& t : {from, to}) refuse_unmapped(t, *copy_name());
  if (from_npu && to_npu) {
    device_to_device(from, to);
  } else if (to_npu) {
    host_to_device(from, to, non_blocking);
  } else {
    device_to_host(from, to, non_blocking);
  }
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar item_kernel(const at::Tensor& t) {
  static const std::string* name = intern("aten::_local_scalar_dense");
  OnDevice on(t.device().index(), name->c_str());
  StreamState& s = current_stream(t.device().index());
  TORCH_CHECK(s.recording == nullptr, "NPU error: ", *name, " (Tensor.item) needs the value on the host, ", kCapturedStream);
  refuse_synchronous_copy("Tensor.item");
  TaskQueue::of(s.device).report();
  refuse_unmapped(t, *name);
  order(s, name, {{t, false}});
  Engine::get().settle(s);
  if (config().late) Engine::get().synchronize(s);
  Relabel relabel(t.device().index());
  return relabel.to_cpu(t).item();
}

inline const at::Tensor& resize_kernel(const at::Tensor& t, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (t.sizes().equals(sizes) && !format.has_value()) return t;
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = t.numel() == 0 ? 0 : (t.storage_offset() + t.numel()) * t.dtype().itemsize();
  if (needed > t.storage().nbytes()) resize_storage(t.storage().unsafeGetStorageImpl(), needed);
  return t;
}

inline at::Tensor& set_storage_kernel(at::Tensor& t, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(
      t, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

inline at::Tensor& set_whole_storage_kernel(at::Tensor& t, at::Storage source) {
  const int64_t n = static_cast<int64_t>(source.nbytes() / t.dtype().itemsize());
  return at::native::set_storage_cpu_(t, std::move(source), 0, {n}, {1});
}

inline at::Tensor view_kernel(const at::Tensor& t, c10::SymIntArrayRef sizes) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(sizes)); }

inline at::Tensor as_strided_kernel(const at::Tensor& t, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      t, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

inline at::Tensor reshape_alias_kernel(const at::Tensor& t, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

// Pages of an anonymous mapping are zero once they are released; those of a segment have a pattern (pools.h).
inline bool zero_pages(const Memory& memory, char* page, size_t bytes) {
  if (memory.segment == nullptr) return madvise(page, bytes, MADV_DONTNEED) == 0;
  return mmap(page, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == page;
}

// Zeroes large blocks by releasing their pages: a KV cache takes host memory only where it is used.
inline at::Tensor& zero_kernel(at::Tensor& t) {
  const std::shared_ptr<Memory> memory = memory_of(t);
  const size_t bytes = t.numel() * t.dtype().itemsize();
  StreamState& s = current_stream(t.device().index());
  if (memory == nullptr || !memory->mapped || !t.is_contiguous() || bytes < kMapped || Engine::get().queues(s)) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::zero_", "");
    Stack stack{t};
    fallback(op, &stack);
    return t;
  }
  static const std::string* name = intern("aten::zero_");
  OnDevice on(t.device().index(), name->c_str());
  if (!TaskQueue::of(s.device).enter(*name)) return t;
  refuse_unmapped(t, *name);
  order(s, name, {{t, true}});
  Engine::get().settle(s);
  char* first = static_cast<char*>(t.data_ptr());
  constexpr size_t kPage = 4096;
  char* page = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(first), kPage));
  const size_t whole = (first + bytes - page) / kPage * kPage;
  std::memset(first, 0, page - first);
  if (!zero_pages(*memory, page, whole)) std::memset(page, 0, whole);
  std::memset(page + whole, 0, first + bytes - (page + whole));
  return t;
}

// The device counts integers, too, which torch's CPU kernel refuses.
inline at::Tensor histc_kernel(const at::Tensor& t, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  const bool whole = at::isIntegralType(t.scalar_type(), false);
  Stack stack{whole ? t.to(at::kDouble) : t, bins, min, max};
  fallback(op, &stack);
  const at::Tensor counts = stack.back().toTensor();
  return whole ? counts.to(t.scalar_type()) : counts;
}

inline at::Tensor convolution_kernel(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  return at::convolution_symint(input, weight, bias, stride, padding, dilation, transposed, output_padding, std::move(groups));
}

inline void record_stream_kernel(at::Tensor& t, c10::Stream stream) {
  npu_allocator().recordStream(t.storage().data_ptr(), stream);
}

}  // namespace emulated_npu
