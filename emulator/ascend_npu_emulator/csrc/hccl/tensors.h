// What an hccl call may be given, and the arithmetic of reductions.
#pragma once

#include "graphs/graphs.h"
#include "hccl/wire.h"

namespace emulated_npu {

inline void check_tensors(const Tensors& tensors, const char* op) {
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK(t.device().type() == kNpu, "hccl ", op, ": expected npu tensors, got one on ", t.device().str());
    TORCH_CHECK(t.is_contiguous(), "hccl ", op, ": Tensors must be contiguous, got strides ", t.strides(), " for ", shape_text(t));
    TORCH_CHECK(
        t.device() == tensors[0].device(), "hccl ", op, ": tensors on ", t.device().str(), " and ", tensors[0].device().str(), " in one call");
  }
}

// The checked tensors of a call. A captured call's tensors do not keep the graph's memory in use.
inline Tensors launched(const Tensors& tensors, const char* op) {
  check_tensors(tensors, op);
  if (tensors.empty() || current_stream(tensors[0].device().index()).recording == nullptr) return tensors;
  Tensors weak;
  for (const at::Tensor& t : tensors) weak.push_back(weak_ref(t));
  return weak;
}

inline at::Tensor single(const Tensors& tensors, const char* op) {
  TORCH_CHECK(tensors.size() == 1, "hccl ", op, ": expected one tensor, got ", tensors.size());
  return launched(tensors, op)[0];
}

inline int checked(const c10d::ReduceOp& op) {
  using Kind = c10d::ReduceOp::RedOpType;
  const Kind kind = op.op_;
  TORCH_CHECK(
      kind == Kind::SUM || kind == Kind::PRODUCT || kind == Kind::MAX || kind == Kind::MIN,
      "hccl supports the reductions SUM, PRODUCT, MAX and MIN only");
  return static_cast<int>(kind);
}

inline at::Tensor reduced(const Tensors& parts, const at::Tensor& like, int reduce) {
  using Kind = c10d::ReduceOp::RedOpType;
  const auto dtype = like.scalar_type();
  const auto wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype == at::kBool ? at::kByte : dtype;
  at::Tensor total = parts[0].to(wide);
  for (size_t r = 1; r < parts.size(); ++r) {
    const at::Tensor next = parts[r].to(wide);
    switch (static_cast<Kind>(reduce)) {
      case Kind::SUM: total = total + next; break;
      case Kind::PRODUCT: total = total * next; break;
      case Kind::MAX: total = at::maximum(total, next); break;
      default: total = at::minimum(total, next); break;
    }
  }
  return total.to(dtype);
}

inline Description describe_type(const char* op, const at::Tensor& t) {
  Description d = describe(op, t);
  d.dims = 0;
  std::fill_n(d.sizes, kMaxDims, 0);
  return d;
}

// Bytes for or from each rank; `splits` are rows, and empty if all are equal.
inline std::vector<int64_t> split_bytes(const at::Tensor& t, const std::vector<int64_t>& splits, const char* which, int size) {
  const int64_t rows = t.dim() == 0 ? 1 : t.size(0);
  const int64_t row = rows == 0 ? 0 : static_cast<int64_t>(t.nbytes()) / rows;
  if (splits.empty()) {
    TORCH_CHECK(rows % size == 0, "Tensor's dim 0 does not divide equally across group size: ", which, " ", shape_text(t), ", group size ", size);
    return std::vector<int64_t>(size, rows / size * row);
  }
  TORCH_CHECK(static_cast<int>(splits.size()) == size, "Number of tensor splits not equal to group size: ", splits.size(), " ", which, " splits, group size ", size);
  int64_t sum = 0;
  std::vector<int64_t> out;
  for (int64_t s : splits) {
    sum += s;
    out.push_back(s * row);
  }
  TORCH_CHECK(sum == rows, "Split sizes doesn't match total dim 0 size: ", which, " splits sum to ", sum, ", tensor is ", shape_text(t));
  return out;
}

inline void expect_bytes(const char* op, int from, const at::Tensor& part, int rank, const at::Tensor& out) {
  TORCH_CHECK(
      part.numel() == out.numel() && part.scalar_type() == out.scalar_type(), "hccl ", op, ": rank ", from, " gives ", part.numel(),
      " elements of ", part.scalar_type(), ", but rank ", rank, " has an output of ", shape_text(out), " ", out.scalar_type(), " for it");
}

}  // namespace emulated_npu
