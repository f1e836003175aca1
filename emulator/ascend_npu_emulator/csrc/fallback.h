// One boxed kernel for every operator without a kernel of its own: relabel the npu tensors as CPU
// tensors over the same bytes, run the CPU kernel, label the results back. In late mode, on a
// stream other than the default, queue it instead.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "device.h"
#include "graphs/graphs.h"
#include "memory/workspace.h"
#include "relabel.h"
#include "streams/ordering.h"

namespace emulated_npu {

using Stack = torch::jit::Stack;

template <class F>
void for_each_tensor(c10::IValue& value, F&& f) {  // f: const Tensor& -> Tensor
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (at::Tensor t : value.toTensorList()) out.push_back(f(t));
    value = out;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList())
      out.push_back(t.has_value() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    value = out;
  }
}

// What a schema says about an operator, worked out once.
struct OpTraits {
  const std::string* name;
  bool view = false;  // results are views, or only metadata changes
  bool host = false;  // the host needs the result's values or its size
  bool index = false;  // advanced indexing: index tensors may live on the CPU, bool masks need the host
  bool mutates = false, has_out = false;
  int generator = -1;
  Workspace workspace = Workspace::kNone;
  std::vector<bool> written;
};

inline const OpTraits& traits(const c10::OperatorHandle& op) {
  static auto* mutex = new std::mutex();
  static auto* known = new std::unordered_map<c10::OperatorName, std::unique_ptr<OpTraits>>();
  std::lock_guard<std::mutex> lock(*mutex);
  auto& entry = (*known)[op.operator_name()];
  if (entry) return *entry;
  entry = std::make_unique<OpTraits>();
  OpTraits& t = *entry;
  const c10::FunctionSchema& schema = op.schema();
  t.name = intern(c10::toString(op.operator_name()));
  const std::string& name = schema.name();
  t.workspace = workspace_kind(name);
  t.index = name == "aten::index" || name == "aten::_unsafe_index" || name == "aten::index_put" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_" || name == "aten::_unsafe_index_put";
  for (const c10::Argument& a : schema.arguments()) {
    const bool write = a.alias_info() != nullptr && a.alias_info()->isWrite();
    t.written.push_back(write);
    t.mutates |= write;
    t.has_out |= write && a.kwarg_only();
    const auto type = a.type()->kind() == c10::TypeKind::OptionalType ? a.type()->expectRef<c10::OptionalType>().getElementType() : a.type();
    if (type->kind() == c10::TypeKind::GeneratorType) t.generator = static_cast<int>(t.written.size()) - 1;
  }
  for (const c10::Argument& r : schema.returns()) {
    if (r.alias_info() != nullptr && !r.alias_info()->isWrite()) t.view = true;
    const auto kind = r.type()->kind();
    const bool list = kind == c10::TypeKind::ListType && r.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !list) t.host = true;
  }
  if (op.hasTag(at::Tag::inplace_view) || name == "aten::set_" || name == "aten::resize_" || name == "aten::resize_as_") t.view = true;
  if (op.hasTag(at::Tag::data_dependent_output) || (op.hasTag(at::Tag::dynamic_output_shape) && !t.index)) t.host = true;
  return t;
}

// The call's device; every argument checked as hardware would.
struct CallDevice {
  int device = -1;
  bool masks = false;  // indexes with a bool mask
};

inline CallDevice check_arguments(const c10::OperatorHandle& op, const OpTraits& t, const Stack& stack, size_t begin) {
  CallDevice call;
  const auto& arguments = op.schema().arguments();
  at::Tensor stray;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& v = stack[begin + i];
    auto visit = [&](const at::Tensor& x, bool list) {
      if (!x.defined()) return;
      TORCH_CHECK(
          x.layout() == c10::kStrided, *t.name, ": the emulated NPU supports strided tensors only, got layout ", x.layout());
      if (x.device().type() == kNpu) {
        const int d = x.device().index();
        TORCH_CHECK(
            call.device < 0 || call.device == d, "Expected all tensors to be on the same device, but found at least two devices, npu:",
            call.device, " and npu:", d, "! (", *t.name, ")");
        call.device = d;
        if (t.index && list && (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte)) call.masks = true;
      } else if (x.device().is_cpu()) {
        const bool allowed = (x.dim() == 0 && !t.written[i]) || (t.index && list);
        if (!allowed && !stray.defined()) stray = x;
        if (t.index && list && (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte)) call.masks = true;
      } else if (!x.device().is_meta()) {
        stray = x;
      }
    };
    if (v.isTensor()) visit(v.toTensor(), false);
    else if (v.isTensorList()) {
      for (const at::Tensor& x : v.toTensorVector()) visit(x, false);
    } else if (v.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& x : v.toOptionalTensorVector())
        if (x.has_value()) visit(*x, true);
    } else if (v.isDevice() && v.toDevice().type() == kNpu && call.device < 0) {
      const c10::Device d = v.toDevice();
      call.device = d.has_index() ? d.index() : current_device();
    }
  }
  create_context();
  if (call.device < 0) call.device = current_device();
  check_device(call.device);
  TORCH_CHECK(
      !stray.defined(), "Expected all tensors to be on the same device, but found at least two devices, npu:", call.device,
      " and ", stray.defined() ? stray.device().str() : "", "! (", *t.name, ")");
  return call;
}

inline void use_cpu_device(c10::IValue& v) {
  if (v.isDevice() && v.toDevice().type() == kNpu) v = c10::Device(c10::kCPU);
}

inline void use_cpu_generator(const OpTraits& t, Stack& stack, size_t begin, int device) {
  if (t.generator < 0) return;
  c10::IValue& v = stack[begin + t.generator];
  v = draw_from(v.isNone() ? default_generator_handle(device) : v.toGenerator(), device, *t.name);
}

inline void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

inline std::vector<Touch> touches_of(const OpTraits& t, const Stack& stack, size_t begin) {
  std::vector<Touch> touches;
  for (size_t i = 0; i < t.written.size(); ++i) {
    const c10::IValue& v = stack[begin + i];
    auto visit = [&](const at::Tensor& x) {
      if (x.defined() && x.device().type() == kNpu) touches.push_back({x, t.written[i]});
    };
    if (v.isTensor()) visit(v.toTensor());
    else if (v.isTensorList()) {
      for (const at::Tensor& x : v.toTensorVector()) visit(x);
    } else if (v.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& x : v.toOptionalTensorVector())
        if (x.has_value()) visit(*x);
    }
  }
  return touches;
}

inline void run_now(const c10::OperatorHandle& op, const OpTraits& t, Stack* stack, size_t begin, int device, StreamState* track) {
  Relabel relabel(device);
  for (size_t i = begin; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& x) { return relabel.to_cpu(x); });
    use_cpu_device((*stack)[i]);
  }
  use_cpu_generator(t, *stack, begin, device);
  run_on_cpu(op, stack);
  relabel.write_back();
  std::vector<Touch> made;
  for (size_t i = begin; i < stack->size(); ++i)
    for_each_tensor((*stack)[i], [&](const at::Tensor& x) {
      at::Tensor y = relabel.to_npu(x);
      if (track != nullptr && Engine::get().tracking() && !t.view && !t.mutates) made.push_back({y, true});
      return y;
    });
  if (!made.empty()) order(*track, t.name, made);
}

// The results' shapes without running anything. False when the operator has no Meta kernel.
inline bool infer(const c10::OperatorHandle& op, const Stack& stack, size_t begin, Stack& inferred, std::vector<at::Tensor>& out_metas) {
  inferred.clear();
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue v = stack[begin + i];
    const bool write = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    for_each_tensor(v, [&](const at::Tensor& x) {
      if (!x.defined() || (x.device().is_cpu() && x.dim() == 0)) return x;
      at::Tensor m = at::empty_strided(x.sizes(), x.strides(), x.options().device(c10::kMeta).pinned_memory(false));
      if (write) out_metas.push_back(m);
      return m;
    });
    if (v.isDevice()) v = c10::Device(c10::kMeta);
    inferred.push_back(std::move(v));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &inferred);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

inline at::Tensor empty_npu(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device) {
  OnDevice on(device, "an allocation");
  return at::detail::empty_strided_generic(
      sizes, strides, &npu_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// The results of an operator that writes its arguments: these, in order. False if a result is another
// tensor.
inline bool written_arguments(const c10::OperatorHandle& op, const OpTraits& t, const Stack& stack, size_t begin, std::vector<c10::IValue>& returned) {
  const auto& schema = op.schema();
  for (const c10::Argument& r : schema.returns()) {
    bool matched = false;
    for (size_t i = 0; i < t.written.size() && !matched; ++i) {
      if (!t.written[i] || r.alias_info() == nullptr) continue;
      if (*schema.arguments()[i].alias_info() == *r.alias_info()) {
        returned.push_back(stack[begin + i]);
        matched = true;
      }
    }
    if (!matched) return false;
  }
  return true;
}

// Queues the call; returns false when it cannot be queued faithfully and must run now.
inline bool queue(const c10::OperatorHandle& op, const OpTraits& t, Stack* stack, size_t begin, int device, StreamState& s) {
  const std::vector<Touch> touches = touches_of(t, *stack, begin);
  if (t.generator >= 0) {
    // Random numbers are drawn now, in launch order; only pure fills can be drawn without reading
    // the device.
    for (const Touch& touch : touches)
      if (!touch.write) return false;
    if (touches.size() != 1) return false;
    order(s, t.name, touches);
    const at::Tensor target = touches[0].tensor;
    Stack drawn(stack->begin() + begin, stack->end());
    const at::Tensor scratch = at::empty(target.sizes(), target.options().device(c10::kCPU));
    for (c10::IValue& v : drawn) for_each_tensor(v, [&](const at::Tensor&) { return scratch; });
    use_cpu_generator(t, drawn, 0, device);
    run_on_cpu(op, &drawn);
    Relabel relabel(device);
    const at::Tensor to = relabel.to_cpu(target);
    Engine::get().push(s, {t.name, [to, scratch] {
                             at::AutoDispatchBelowADInplaceOrView below;
                             to.copy_(scratch);
                           }});
    torch::jit::drop(*stack, stack->size() - begin);
    if (!op.schema().returns().empty()) stack->push_back(target);
    return true;
  }

  Stack shapes;
  std::vector<at::Tensor> out_metas;
  if (!t.mutates || t.has_out) {
    if (!infer(op, *stack, begin, shapes, out_metas)) return false;
  }
  order(s, t.name, touches);

  if (t.has_out) {
    size_t k = 0;
    for (const Touch& touch : touches) {
      if (!touch.write) continue;
      const at::Tensor& meta = out_metas.at(k++);
      if (!meta.sizes().equals(touch.tensor.sizes())) touch.tensor.resize_(meta.sizes());
    }
  }

  auto deferred = std::make_shared<Stack>();
  Relabel relabel(device);
  for (size_t i = begin; i < stack->size(); ++i) {
    c10::IValue v = (*stack)[i];
    for_each_tensor(v, [&](const at::Tensor& x) {
      // What the host holds is read at the launch, as a kernel argument is.
      if (x.defined() && x.device().is_cpu()) return x.unsafeGetTensorImpl()->is_wrapped_number() ? x : x.clone();
      return relabel.to_cpu(x);
    });
    use_cpu_device(v);
    deferred->push_back(std::move(v));
  }

  if (t.mutates) {
    std::vector<c10::IValue> returned;
    if (!written_arguments(op, t, *stack, begin, returned)) return false;
    Engine::get().push(s, {t.name, [op, deferred] {
                             Stack run = *deferred;
                             run_on_cpu(op, &run);
                           }});
    torch::jit::drop(*stack, stack->size() - begin);
    for (c10::IValue& v : returned) stack->push_back(std::move(v));
    return true;
  }

  std::vector<at::Tensor> targets;
  std::vector<Touch> made;
  for (c10::IValue& v : shapes)
    for_each_tensor(v, [&](const at::Tensor& m) {
      if (!m.defined()) return m;
      at::Tensor y = empty_npu(m.sizes(), m.strides(), m.scalar_type(), device);
      targets.push_back(relabel.to_cpu(y));
      made.push_back({y, true});
      return y;
    });
  order(s, t.name, made);
  Engine::get().push(s, {t.name, [op, deferred, targets] {
                           Stack run = *deferred;
                           run_on_cpu(op, &run);
                           size_t k = 0;
                           at::AutoDispatchBelowADInplaceOrView below;
                           for (c10::IValue& v : run)
                             for_each_tensor(v, [&](const at::Tensor& x) {
                               if (x.defined()) targets.at(k++).copy_(x);
                               return x;
                             });
                         }});
  torch::jit::drop(*stack, stack->size() - begin);
  for (c10::IValue& v : shapes) stack->push_back(std::move(v));
  return true;
}

inline void fill_with_garbage(const at::Tensor& t) {
  if (t.defined() && t.numel() != 0 && t.device().type() == kNpu) std::memset(t.storage().mutable_data(), kGarbage, t.storage().nbytes());
}

// The call does nothing on the device: what it writes keeps its bytes, and new tensors hold garbage.
inline void drop(const c10::OperatorHandle& op, const OpTraits& t, Stack* stack, size_t begin, const CallDevice& call) {
  std::vector<c10::IValue> results;
  if (t.mutates && written_arguments(op, t, *stack, begin, results)) {
    torch::jit::drop(*stack, stack->size() - begin);
    for (c10::IValue& v : results) stack->push_back(std::move(v));
    return;
  }
  Stack shapes;
  std::vector<at::Tensor> out_metas;
  if (!t.host && !call.masks && infer(op, *stack, begin, shapes, out_metas)) {
    torch::jit::drop(*stack, stack->size() - begin);
    for (c10::IValue& v : shapes) {
      for_each_tensor(v, [&](const at::Tensor& m) { return m.defined() ? empty_npu(m.sizes(), m.strides(), m.scalar_type(), call.device) : m; });
      stack->push_back(std::move(v));
    }
  } else {
    run_now(op, t, stack, begin, call.device, nullptr);  // its shapes depend on values
  }
  for (size_t i = begin; i < stack->size(); ++i)
    for_each_tensor((*stack)[i], [&](const at::Tensor& made) {
      fill_with_garbage(made);
      return made;
    });
}

// Records the launch, and allocates the workspace of the operator.
inline void prepare_launch(const OpTraits& t, const Stack& stack, size_t begin, const StreamState& s) {
  std::vector<at::Tensor> inputs;
  at::Tensor out;
  for (size_t i = 0; i < t.written.size(); ++i) {
    const c10::IValue& v = stack[begin + i];
    if (v.isTensor() && t.written[i]) out = v.toTensor();
    else if (v.isTensor()) inputs.push_back(v.toTensor());
    else if (v.isTensorList()) for (const at::Tensor& x : v.toTensorVector()) inputs.push_back(x);
  }
  note_launch(s.device, *t.name, inputs, out);
  if (t.workspace == Workspace::kMatmul) take_workspace(s.device, s.slot, kMatmulWorkspace);
  else if (t.workspace == Workspace::kStack) take_workspace(s.device, s.slot, stack_workspace(inputs, out));
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const OpTraits& t = traits(op);
  const size_t begin = stack->size() - op.schema().arguments().size();
  const CallDevice call = check_arguments(op, t, *stack, begin);
  Engine& engine = Engine::get();
  if (t.view) {
    run_now(op, t, stack, begin, call.device, nullptr);
    return;
  }
  OnDevice on(call.device, t.name->c_str());
  for (size_t i = begin; i < stack->size(); ++i) {
    const c10::IValue& v = (*stack)[i];
    if (v.isTensor()) refuse_unmapped(v.toTensor(), *t.name);
    else if (v.isTensorList())
      for (const at::Tensor& x : v.toTensorVector()) refuse_unmapped(x, *t.name);
  }
  StreamState& s = current_stream(call.device);
  const bool host = t.host || call.masks;
  if (host) refuse_synchronous_copy(t.name->c_str());
  if (!TaskQueue::of(call.device).enter(*t.name)) {
    drop(op, t, stack, begin, call);
    return;
  }
  if (s.recording != nullptr) {
    TORCH_CHECK(!host, "NPU error: ", *t.name, " needs values on the host, ", kCapturedStream);
    TORCH_CHECK_NOT_IMPLEMENTED(t.generator < 0, *t.name, ": random numbers in a graph are not implemented by the emulated NPU");
    TORCH_CHECK_NOT_IMPLEMENTED(
        queue(op, t, stack, begin, call.device, s), *t.name, " cannot be captured in a graph of the emulated NPU: it has no shape function");
    return;
  }
  prepare_launch(t, *stack, begin, s);
  if (!host && engine.queues(s) && queue(op, t, stack, begin, call.device, s)) return;
  engine.settle(s);
  if (!config().late) {
    run_now(op, t, stack, begin, call.device, nullptr);
    return;
  }
  if (engine.tracking()) order(s, t.name, touches_of(t, *stack, begin));
  if (host) engine.synchronize(s);
  else if (engine.defers(s)) engine.drain(s, s.issued);
  run_now(op, t, stack, begin, call.device, &s);
}

}  // namespace emulated_npu
