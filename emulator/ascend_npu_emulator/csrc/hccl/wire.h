// What hccl puts on gloo: frames that say what a rank is about to do, and the bytes of its tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <numeric>

#include "hccl/waits.h"
#include "relabel.h"
#include "streams/ordering.h"

namespace emulated_npu {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kFrame = 4096;
constexpr int kMaxDims = 8;

// What a rank says about the operator it entered. Plain bytes on the wire.
struct Description {
  char op[32] = {};
  int32_t reduce = -1, root = -1, dtype = -1, dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t bytes = 0;
  char call[320] = {};  // arguments of a kernel that communicates itself

  Description with_call(const std::string& arguments) const {
    TORCH_CHECK(arguments.size() < sizeof(call), "hccl: too many arguments to compare: ", arguments);
    Description d = *this;
    std::strncpy(d.call, arguments.c_str(), sizeof(d.call) - 1);
    return d;
  }

  std::string text() const {
    std::ostringstream out;
    out << op;
    if (call[0] != '\0') out << "(" << call << ")";
    out << " of ";
    if (dims < 0) {
      out << "nothing";
    } else {
      out << "[";
      for (int d = 0; d < dims; ++d) out << (d ? ", " : "") << sizes[d];
      out << "] " << c10::toString(static_cast<at::ScalarType>(dtype));
    }
    if (root >= 0) out << ", root " << root;
    return out.str();
  }
};
static_assert(sizeof(Description) < 512);
constexpr int64_t kInline = kFrame - static_cast<int64_t>(sizeof(Description));

inline Description describe(const char* op, const at::Tensor& t, int reduce = -1, int root = -1) {
  Description d;
  std::strncpy(d.op, op, sizeof(d.op) - 1);
  d.reduce = reduce;
  d.root = root;
  if (!t.defined()) {
    d.dims = -1;
    return d;
  }
  TORCH_CHECK(t.dim() <= kMaxDims, "hccl: tensors of more than ", kMaxDims, " dimensions are not supported");
  d.dtype = static_cast<int32_t>(t.scalar_type());
  d.dims = static_cast<int32_t>(t.dim());
  for (int i = 0; i < d.dims; ++i) d.sizes[i] = t.size(i);
  d.bytes = static_cast<int64_t>(t.nbytes());
  return d;
}

inline void check_pair(const Description& mine, int my_rank, const Description& theirs, int their_rank) {
  const bool same = std::strcmp(mine.op, theirs.op) == 0 && mine.reduce == theirs.reduce && mine.root == theirs.root &&
      std::strcmp(mine.call, theirs.call) == 0 && mine.dtype == theirs.dtype && mine.dims == theirs.dims && std::equal(mine.sizes, mine.sizes + kMaxDims, theirs.sizes);
  TORCH_CHECK(
      same, "hccl: ranks do not call the same operator: rank ", my_rank, " calls ", mine.text(), ", rank ", their_rank, " calls ",
      theirs.text(), mine.reduce != theirs.reduce ? " with another reduction" : "");
}

// A tensor's bytes as a CPU tensor, without a copy.
inline at::Tensor bytes(const at::Tensor& t) {
  if (t.numel() == 0) return at::empty({0}, at::kByte);
  Relabel relabel(t.device().index());
  return relabel.to_cpu(t).view({-1}).view(at::kByte);
}

inline void write(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() != 0) std::memcpy(to.data_ptr(), from.contiguous().data_ptr(), to.nbytes());
}

inline at::Tensor padded(const at::Tensor& t, int64_t to) {
  return t.numel() < to ? at::cat({t, at::zeros({to - t.numel()}, at::kByte)}) : t;
}

class Wire {
 public:
  Wire(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, Group group)
      : gloo_(std::move(gloo)), rank_(rank), size_(size), group_(std::move(group)) {}

  void set_timeout(std::chrono::milliseconds timeout) { gloo_->setTimeout(timeout); }

  // Every rank's tensor; all have the same shape and type. `call`: of the operator, for errors.
  Tensors gathered(const at::Tensor& mine, const Description& call) {
    std::vector<Tensors> all(1);
    for (int r = 0; r < size_; ++r) all[0].push_back(at::empty_like(mine));
    Tensors in{mine};
    c10d::AllgatherOptions options;
    Wait wait(group_, rank_);
    wait.until_done(*gloo_->allgather(all, in, options), [&] { return call.text(); });
    return all[0];
  }

  // Sends this rank's operator to all ranks, and fails if another's differs. `shapes` false: shapes
  // may.
  std::vector<Description> agree(const Description& mine, const at::Tensor& payload = at::Tensor(), bool shapes = true, Tensors* frames = nullptr) {
    const Tensors all = gathered(frame_of(mine, payload), mine);
    std::vector<Description> said;
    for (const at::Tensor& frame : all) said.push_back(read_description(frame));
    // Every rank reports the same pair: the first rank that differs from rank 0.
    for (int r = 1; r < size_; ++r) {
      Description theirs = said[r];
      if (!shapes) {
        theirs.dims = said[0].dims;
        std::copy_n(said[0].sizes, kMaxDims, theirs.sizes);
      }
      if (std::memcmp(theirs.op, said[0].op, sizeof theirs.op) != 0) theirs = said[r];
      check_pair(said[0], 0, theirs, r);
    }
    if (frames != nullptr) *frames = all;
    return said;
  }

  // Every rank's tensor, flat, in the type it has there.
  Tensors exchange(const Description& mine, const at::Tensor& t, bool shapes) {
    Tensors frames;
    const std::vector<Description> said = agree(mine, t, shapes, &frames);
    int64_t most = 0;
    for (const Description& d : said) most = std::max(most, d.bytes);
    Tensors raw;
    if (most > kInline) {
      raw = gathered(padded(bytes(t), most), mine);
    }
    Tensors parts;
    for (int r = 0; r < size_; ++r) {
      const at::Tensor flat = most > kInline ? raw[r].narrow(0, 0, said[r].bytes) : frames[r].narrow(0, sizeof(Description), said[r].bytes);
      parts.push_back(flat.clone().view(t.scalar_type()));
    }
    return parts;
  }

  // The other ranks' bytes for this rank, in rank order; `sends` and `receives` are bytes per rank.
  at::Tensor all_to_all(const char* op, const Description& d, const at::Tensor& in, const std::vector<int64_t>& sends, const std::vector<int64_t>& receives) {
    agree(d);
    at::Tensor plan = at::empty({2 * size_}, at::kLong);
    for (int r = 0; r < size_; ++r) {
      plan.data_ptr<int64_t>()[r] = sends[r];
      plan.data_ptr<int64_t>()[size_ + r] = receives[r];
    }
    const Tensors plans = gathered(plan, d);
    int64_t most = 0;
    for (int from = 0; from < size_; ++from) {
      const int64_t* p = plans[from].data_ptr<int64_t>();
      most = std::max(most, std::accumulate(p, p + size_, int64_t(0)));
      for (int to = 0; to < size_; ++to)
        TORCH_CHECK(
            p[to] == plans[to].data_ptr<int64_t>()[size_ + from], "hccl ", op, ": rank ", from, " sends ", p[to], " bytes to rank ", to,
            ", which expects ", plans[to].data_ptr<int64_t>()[size_ + from]);
    }
    if (most == 0) return at::empty({0}, at::kByte);
    const Tensors all = gathered(padded(in, most), d);
    Tensors mine;
    for (int from = 0; from < size_; ++from) {
      const int64_t* p = plans[from].data_ptr<int64_t>();
      mine.push_back(all[from].narrow(0, std::accumulate(p, p + rank_, int64_t(0)), p[rank_]));
    }
    return at::cat(mine);
  }

  void send(const Description& d, const at::Tensor& t, int to, int tag) {
    sending_.erase(
        std::remove_if(sending_.begin(), sending_.end(), [](const auto& s) { return s.first->isCompleted(); }), sending_.end());
    const int64_t n = sent_[{to, tag}]++;
    post(frame_of(d, t), to, wire_tag(tag, n, 0));
    if (d.bytes > kInline) post(bytes(t).clone(), to, wire_tag(tag, n, 1));
  }

  // Posts a receive now, for its sender; returns a function that completes it into `target`, a CPU
  // tensor.
  std::function<void()> receive(const Description& mine, const at::Tensor& target, int from, int tag) {
    const int64_t n = received_[{from, tag}]++;
    auto frame = std::make_shared<Tensors>(Tensors{at::empty({kFrame}, at::kByte)});
    auto posted = gloo_->recv(*frame, from, wire_tag(tag, n, 0));
    return [gloo = gloo_, rank = rank_, mine, target, frame, posted, from, tag, n] {
      posted->wait();
      check_pair(mine, rank, read_description(frame->at(0)), from);
      Tensors payload{frame->at(0).narrow(0, sizeof(Description), std::min(mine.bytes, kInline))};
      if (mine.bytes > kInline) {
        payload = {at::empty({mine.bytes}, at::kByte)};
        gloo->recv(payload, from, wire_tag(tag, n, 1))->wait();
      }
      std::memcpy(target.data_ptr(), payload[0].data_ptr(), mine.bytes);
    };
  }

 private:
  static at::Tensor frame_of(const Description& d, const at::Tensor& payload) {
    at::Tensor frame = at::zeros({kFrame}, at::kByte);
    std::memcpy(frame.data_ptr(), &d, sizeof d);
    if (payload.defined() && d.bytes != 0 && d.bytes <= kInline)
      std::memcpy(static_cast<char*>(frame.data_ptr()) + sizeof d, payload.data_ptr(), d.bytes);
    return frame;
  }

  static Description read_description(const at::Tensor& frame) {
    Description d;
    std::memcpy(static_cast<void*>(&d), frame.data_ptr(), sizeof d);
    return d;
  }

  // gloo matches messages by tag alone, so every message between two ranks has one of its own.
  static int wire_tag(int tag, int64_t n, int part) { return ((tag & 0xFF) << 22) | static_cast<int>((2 * n + part) & 0x3FFFFF); }

  void post(const at::Tensor& t, int to, int tag) {
    auto tensors = std::make_shared<Tensors>(Tensors{t});
    sending_.push_back({gloo_->send(*tensors, to, tag), tensors});
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  int rank_, size_;
  Group group_;
  std::map<std::pair<int, int>, int64_t> sent_, received_;
  std::vector<std::pair<c10::intrusive_ptr<c10d::Work>, std::shared_ptr<Tensors>>> sending_;
};

}  // namespace emulated_npu
