// Device memory that operators take for themselves, and which of them ran for the first time.
//
// With TASK_QUEUE_ENABLE=1, torch_npu's default and that of vllm-ascend's images, an operator's
// workspace is a tensor of the caching allocator that is freed once the operator is launched, so
// torch's counters see it (op-plugin 8b9c8534, utils/op_api_common.h:341). With 2 it comes from
// NPUWorkspaceAllocator (op_api_common.h:415): one block per stream, which grows to the largest
// request and is kept until the cache is emptied. torch's counters do not see that one; the free
// memory of the device does (torch_npu 2.10.0.post4, csrc/core/npu/NPUWorkspaceAllocator.cpp:75).
// Operators in a captured graph take none here.
//
// Sizes: mm and its relatives reserve 20 MiB whatever their size (ops-nn 9.1.0,
// mat_mul_v3/op_host/op_tiling/matmul_v3_base_tiling.cpp:2819). stack joins at most 32 inputs in
// one kernel; more go to temporaries of 32 and from there to the output (ops-math 9.1.0,
// conversion/pack/op_api/aclnn_stack.cpp:157, SplitToStack). The last kernel of an operator writes into the
// output if that is contiguous, else into a temporary
// (conversion/contiguous/op_host/op_api/contiguous.cpp:670, ViewCopy). A copy needs one temporary
// for a source that is not contiguous and one for a cast
// (conversion/view_copy/op_api/aclnn_copy.cpp:106).
#pragma once

#include <cstdlib>
#include <string_view>

#include "memory/accounting.h"

namespace emulated_npu {

constexpr size_t kMatmulWorkspace = size_t(20) << 20;
constexpr size_t kStackedAtOnce = 32;
constexpr size_t kWorkspaceExtra = 32;  // NPUWorkspaceAllocator.cpp:81

enum class Workspace { kNone, kMatmul, kStack };

inline Workspace workspace_kind(std::string_view name) {
  for (const char* each : {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
    if (name == each) return Workspace::kMatmul;
  return name == "aten::stack" ? Workspace::kStack : Workspace::kNone;
}

// An undefined `out` is a new tensor, which is contiguous.
inline size_t stack_workspace(at::TensorList tensors, const at::Tensor& out) {
  size_t inputs = 0, elements = 0, gathered = 0;
  for (const at::Tensor& each : tensors) {
    if (each.numel() == 0) continue;
    ++inputs;
    elements += each.numel();
    if (!each.is_contiguous()) gathered += each.nbytes();
  }
  if (inputs == 0) return 0;
  const size_t stacked = elements * (out.defined() ? out : tensors[0]).dtype().itemsize();
  const bool contiguous = !out.defined() || out.is_contiguous();
  return gathered + (inputs > kStackedAtOnce ? stacked : 0) + (contiguous ? 0 : stacked);
}

inline size_t copy_workspace(const at::Tensor& from, const at::Tensor& to) {
  size_t bytes = 0, last = 0;
  if (!from.is_contiguous()) bytes += last = from.nbytes();
  if (from.scalar_type() != to.scalar_type()) bytes += last = from.numel() * to.dtype().itemsize();
  if (!from.sizes().equals(to.sizes())) bytes += last = to.nbytes();
  return to.is_contiguous() ? bytes - last : bytes;
}

inline bool keeps_workspaces() {
  const char* mode = std::getenv("TASK_QUEUE_ENABLE");
  return mode != nullptr && std::string_view(mode) == "2";
}

// Takes the workspace of an operator that is launched on the stream with this slot.
inline void take_workspace(int device, int slot, size_t bytes) {
  if (bytes == 0) return;
  if (!keeps_workspaces()) {
    const size_t rounded = round_up(bytes, kRounding);
    charge(device, bytes, rounded);
    refund(device, bytes, rounded);
    return;
  }
  DeviceMemory& m = device_memory(device);
  std::lock_guard<std::mutex> lock(m.mutex);
  int64_t& kept = m.workspaces[slot];
  const int64_t wanted = round_up(bytes + kWorkspaceExtra, kSegment);
  if (wanted <= kept) return;
  kept = 0;
  const int64_t free = static_cast<int64_t>(capacity(device)) - static_cast<int64_t>(m.physical()) - m.workspace_bytes();
  TORCH_CHECK_WITH(
      OutOfMemoryError, wanted <= free, "NPU out of memory. NPUWorkspaceAllocator tried to allocate ", human(bytes), "(NPU ", device,
      "; ", human(config().hbm), " total capacity; ", human(std::max<int64_t>(free, 0)),
      " free). If you want to reduce memory usage, take a try to set the environment variable TASK_QUEUE_ENABLE=1.");
  kept = wanted;
}

// First launches: on hardware an operator's binary is loaded with its first launch on a device, for
// each combination of dtypes (opbase 9.1.0, composite_op/aclnn_engine/op_kernel.cpp:404).
struct FirstLaunches {
  std::mutex mutex;
  std::unordered_set<std::string> known;
  std::vector<std::string> order;  // "npu:0 aten::copy_ BFloat16 Float"
};

inline FirstLaunches& first_launches() {
  static auto* launches = new FirstLaunches();
  return *launches;
}

// `tensors`: the arguments. Of a list, whose length does not matter, each dtype counts once in a row.
inline void note_launch(int device, const std::string& op, at::TensorList tensors, const at::Tensor& out) {
  std::string launch = "npu:" + std::to_string(device) + " " + op, last;
  const auto add = [&](const at::Tensor& each) {
    if (!each.defined() || last == c10::toString(each.scalar_type())) return;
    last = c10::toString(each.scalar_type());
    (launch += ' ') += last;
  };
  for (const at::Tensor& each : tensors) add(each);
  add(out);
  FirstLaunches& launches = first_launches();
  std::lock_guard<std::mutex> lock(launches.mutex);
  if (launches.known.insert(launch).second) launches.order.push_back(launch);
}

}  // namespace emulated_npu
