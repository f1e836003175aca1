// torch.autocast("npu"): operations in the lower precision, in float32, and in the widest type of
// their arguments.
// torch's lists, of which torch_npu's own is an older copy (torch_npu/csrc/aten/AutoCastOps.cpp).
#pragma once

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace emulated_npu {

inline at::Tensor refuse_binary_cross_entropy(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast; use binary_cross_entropy_with_logits");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;  // of the types in the last list
#define NPU_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define NPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define NPU_FP32_UNLESS_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define NPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
#define NPU_FP32_APPENDED(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(NPU_LOWER)
  AT_FORALL_FP32(NPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(NPU_FP32_UNLESS_GIVEN)
  AT_FORALL_PROMOTE(NPU_PROMOTE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(NPU_FP32_APPENDED)
  m.impl("binary_cross_entropy", refuse_binary_cross_entropy);
#undef NPU_LOWER
#undef NPU_FP32
#undef NPU_FP32_UNLESS_GIVEN
#undef NPU_PROMOTE
#undef NPU_FP32_APPENDED
}

}  // namespace emulated_npu
