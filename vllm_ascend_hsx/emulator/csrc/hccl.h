// The c10d backend "hccl": every collective is one exchange of frames over gloo, then plain arithmetic on each rank.
//
// A frame starts with a description of what the rank is about to do. Ranks that disagree fail with both named, where hardware
// would hang or corrupt memory. Reductions add in rank order, in float32 for the half types, so all ranks get the same bits.
//
// Streams: an operator is launched on the current stream (async_op: on a stream of the group that first waits for the current
// one, and wait() makes the current stream wait for it). The bytes move at the launch: ranks must meet in launch order, so in
// late mode the streams involved are drained first. A receive is queued and completed when something waits for it; a send
// never blocks the host, also where hardware would wait for the receiver.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include "ordering.h"
#include "relabel.h"

namespace hsx {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kFrame = 4096;
constexpr int kMaxDims = 8;

// What a rank says about the operator it entered. Plain bytes on the wire.
struct Description {
  char op[32] = {};
  int32_t reduce = -1, root = -1, dtype = -1, dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t bytes = 0;

  std::string text() const {
    std::ostringstream out;
    out << op << " of ";
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

class HcclWork final : public c10d::Work {
 public:
  HcclWork(int rank, OpType type, StreamState& on, Tensors results) : Work(rank, type), device_(on.device), results_(std::move(results)) {
    Engine::get().record(event_, on);
  }
  bool isCompleted() override { return Engine::get().query(event_); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results_; }
  void synchronize() override { Engine::get().wait(current_stream(device_), event_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (opType_ == OpType::BARRIER) Engine::get().synchronize(event_);
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(kNpu, static_cast<c10::DeviceIndex>(device_))});
    synchronize();
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  int device_;
  EventState event_;
  Tensors results_;
};

class HcclBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  HcclBackend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::string name)
      : Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // The name under which kernels that communicate themselves would look the group up.
  std::string comm_name(int) const { return name_; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    at::Tensor& t = single(tensors, "all_reduce");
    const int reduce = checked(o.reduceOp);
    return launch(OpType::ALLREDUCE, "hccl::all_reduce", {t}, {t}, o.asyncOp, [&] {
      write(t, reduced(exchange(describe("all_reduce", t, reduce), t, true), t, reduce));
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    at::Tensor& t = single(tensors, "reduce");
    const int reduce = checked(o.reduceOp);
    const int root = static_cast<int>(o.rootRank);
    return launch(OpType::REDUCE, "hccl::reduce", {t}, rank_ == root ? Tensors{t} : Tensors{}, o.asyncOp, [&] {
      const Tensors parts = exchange(describe("reduce", t, reduce, root), t, true);
      if (rank_ == root) write(t, reduced(parts, t, reduce));
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    at::Tensor& t = single(tensors, "broadcast");
    const int root = static_cast<int>(o.rootRank);
    const bool source = rank_ == root;
    return launch(OpType::BROADCAST, "hccl::broadcast", source ? Tensors{t} : Tensors{}, source ? Tensors{} : Tensors{t}, o.asyncOp, [&] {
      const Tensors parts = exchange(describe("broadcast", t, -1, root), t, true);
      if (!source) write(t, parts[root]);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    at::Tensor& in = single(inputs, "all_gather");
    TORCH_CHECK(outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_, "hccl all_gather: expected ", size_, " output tensors");
    Tensors& out = outputs[0];
    check_tensors(out, "all_gather");
    return launch(OpType::ALLGATHER, "hccl::all_gather", {in}, out, o.asyncOp, [&] {
      const Tensors parts = exchange(describe("all_gather", in), in, false);
      for (int r = 0; r < size_; ++r) expect_bytes("all_gather", r, parts[r], out[r]);
      for (int r = 0; r < size_; ++r) write(out[r], parts[r]);
    });
  }

  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    check_tensors({in, out}, "all_gather_into_tensor");
    TORCH_CHECK(
        out.numel() == in.numel() * size_ && out.scalar_type() == in.scalar_type(),
        "output tensor size must be equal to world_size times input tensor size, and the types the same: output ", shape_text(out), " ",
        out.scalar_type(), ", input ", shape_text(in), " ", in.scalar_type(), ", world_size ", size_);
    return launch(OpType::_ALLGATHER_BASE, "hccl::all_gather_into_tensor", {in}, {out}, o.asyncOp, [&] {
      write(out, at::cat(exchange(describe("all_gather_into_tensor", in), in, true)));
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < ins.size(); ++i) last = _allgather_base(outs.at(i), ins[i], o);
    return last;
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    at::Tensor& in = single(inputs, "gather");
    const int root = static_cast<int>(o.rootRank);
    const bool here = rank_ == root;
    if (here) {
      TORCH_CHECK(outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_, "hccl gather: expected ", size_, " output tensors at the root");
      check_tensors(outputs[0], "gather");
    }
    return launch(OpType::GATHER, "hccl::gather", {in}, here ? outputs[0] : Tensors{}, o.asyncOp, [&] {
      const Tensors parts = exchange(describe("gather", in, -1, root), in, true);
      for (int r = 0; here && r < size_; ++r) {
        expect_bytes("gather", r, parts[r], outputs[0][r]);
        write(outputs[0][r], parts[r]);
      }
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    at::Tensor& out = single(outputs, "scatter");
    const int root = static_cast<int>(o.rootRank);
    const bool here = rank_ == root;
    at::Tensor all;
    if (here) {
      TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_, "hccl scatter: expected ", size_, " input tensors at the root");
      check_tensors(inputs[0], "scatter");
      for (const at::Tensor& t : inputs[0])
        TORCH_CHECK(t.sizes().equals(out.sizes()) && t.scalar_type() == out.scalar_type(), "hccl scatter: input ", shape_text(t), " does not fit output ", shape_text(out));
    }
    return launch(OpType::SCATTER, "hccl::scatter", here ? inputs[0] : Tensors{}, {out}, o.asyncOp, [&] {
      agree(describe("scatter", out, -1, root));
      at::Tensor payload = at::zeros({static_cast<int64_t>(out.nbytes()) * size_}, at::kByte);
      if (here) {
        Tensors rows;
        for (const at::Tensor& t : inputs[0]) rows.push_back(bytes(t));
        payload = at::cat(rows);
      }
      const Tensors parts = gathered(payload);
      write(out, parts[root].narrow(0, static_cast<int64_t>(out.nbytes()) * rank_, static_cast<int64_t>(out.nbytes())));
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    at::Tensor& out = single(outputs, "reduce_scatter");
    const int reduce = checked(o.reduceOp);
    TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_, "hccl reduce_scatter: expected ", size_, " input tensors");
    Tensors& in = inputs[0];
    check_tensors(in, "reduce_scatter");
    for (const at::Tensor& t : in)
      TORCH_CHECK(t.sizes().equals(out.sizes()) && t.scalar_type() == out.scalar_type(), "hccl reduce_scatter: input ", shape_text(t), " does not fit output ", shape_text(out));
    return launch(OpType::REDUCE_SCATTER, "hccl::reduce_scatter", in, {out}, o.asyncOp, [&] {
      agree(describe("reduce_scatter", out, reduce));
      Tensors rows;
      for (const at::Tensor& t : in) rows.push_back(bytes(t));
      scatter_reduced(out, at::cat(rows), reduce);
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    check_tensors({in, out}, "reduce_scatter_tensor");
    const int reduce = checked(o.reduceOp);
    TORCH_CHECK(
        in.numel() == out.numel() * size_ && out.scalar_type() == in.scalar_type(),
        "input tensor must be the same size as output size times world size, and of the same type: input ", shape_text(in), " ",
        in.scalar_type(), ", output ", shape_text(out), " ", out.scalar_type(), ", world size ", size_);
    return launch(OpType::_REDUCE_SCATTER_BASE, "hccl::reduce_scatter_tensor", {in}, {out}, o.asyncOp, [&] {
      agree(describe("reduce_scatter_tensor", in, reduce));
      scatter_reduced(out, bytes(in), reduce);
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < ins.size(); ++i) last = _reduce_scatter_base(outs.at(i), ins[i], o);
    return last;
  }

  WorkPtr alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    check_tensors({in, out}, "all_to_all_single");
    TORCH_CHECK(in.scalar_type() == out.scalar_type(), "hccl all_to_all_single: input is ", in.scalar_type(), ", output is ", out.scalar_type());
    const std::vector<int64_t> sends = split_bytes(in, in_splits, "input"), receives = split_bytes(out, out_splits, "output");
    return launch(OpType::ALLTOALL_BASE, "hccl::all_to_all_single", {in}, {out}, o.asyncOp, [&] {
      write(out, all_to_all("all_to_all_single", describe_type("all_to_all_single", in), bytes(in), sends, receives));
    });
  }

  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& o) override {
    check_tensors(ins, "all_to_all");
    check_tensors(outs, "all_to_all");
    TORCH_CHECK(static_cast<int>(ins.size()) == size_ && static_cast<int>(outs.size()) == size_, "hccl all_to_all: expected ", size_, " input and output tensors");
    return launch(OpType::ALLTOALL, "hccl::all_to_all", ins, outs, o.asyncOp, [&] {
      Tensors rows;
      std::vector<int64_t> sends, receives;
      for (const at::Tensor& t : ins) {
        rows.push_back(bytes(t));
        sends.push_back(static_cast<int64_t>(t.nbytes()));
      }
      for (const at::Tensor& t : outs) receives.push_back(static_cast<int64_t>(t.nbytes()));
      const at::Tensor all = all_to_all("all_to_all", describe_type("all_to_all", ins[0]), at::cat(rows), sends, receives);
      int64_t at = 0;
      for (size_t r = 0; r < outs.size(); ++r) {
        write(outs[r], all.narrow(0, at, receives[r]));
        at += receives[r];
      }
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    const int device = o.device.has_value() && o.device->has_index() ? o.device->index()
        : o.device_ids.empty()                                       ? ready_device()
                                                                     : static_cast<int>(o.device_ids[0]);
    create_context();
    check_device(device);
    StreamState& s = current_stream(device);
    Engine::get().synchronize(s);
    agree(describe("barrier", at::Tensor()));
    return c10::make_intrusive<HcclWork>(rank_, OpType::BARRIER, s, Tensors{});
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    at::Tensor& t = single(tensors, "send");
    return launch(OpType::SEND, "hccl::send", {t}, {}, true, Lane::kSend, [&] {
      const int64_t n = sent_[{to, tag}]++;
      reap();
      at::Tensor frame = frame_of(describe("send", t), t);
      post_send(frame, to, wire_tag(tag, n, 0));
      if (static_cast<int64_t>(t.nbytes()) > kInline) post_send(bytes(t).clone(), to, wire_tag(tag, n, 1));
    });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    at::Tensor& t = single(tensors, "recv");
    const int64_t n = received_[{from, tag}]++;
    const Description mine = describe("send", t);
    // Posted now, so that it can meet its sender; completed when something waits for the stream.
    StreamState& s = own_stream(t.device().index(), Lane::kReceive);
    Engine::get().wait_stream(s, current_stream(t.device().index()));
    order(s, intern("hccl::recv"), {{t, true}});
    Relabel relabel(t.device().index());
    const at::Tensor target = relabel.to_cpu(t);
    auto frame = std::make_shared<Tensors>(Tensors{at::empty({kFrame}, at::kByte)});
    auto posted = gloo_->recv(*frame, from, wire_tag(tag, n, 0));
    Engine::get().push(s, {intern("hccl::recv"), [this, target, frame, posted, mine, from, tag, n] {
                             WithoutGil relaxed;
                             posted->wait();
                             const Description theirs = read_description((*frame)[0]);
                             check_pair(mine, rank_, theirs, from);
                             Tensors payload{frame->at(0).narrow(0, sizeof(Description), std::min(mine.bytes, kInline))};
                             if (mine.bytes > kInline) {
                               payload = {at::empty({mine.bytes}, at::kByte)};
                               gloo_->recv(payload, from, wire_tag(tag, n, 1))->wait();
                             }
                             std::memcpy(target.data_ptr(), payload[0].data_ptr(), mine.bytes);
                           }});
    return c10::make_intrusive<HcclWork>(rank_, OpType::RECV, s, tensors);
  }

 private:
  // Streams of the group's own. A send must not wait for a receive that was posted before it: its peer may do the same.
  enum class Lane { kCollective, kSend, kReceive };

  template <class Body>
  WorkPtr launch(OpType type, const char* name, const Tensors& reads, const Tensors& writes, bool async, Body body) {
    return launch(type, name, reads, writes, async, Lane::kCollective, body);
  }

  template <class Body>
  WorkPtr launch(OpType type, const char* name, const Tensors& reads, const Tensors& writes, bool async, Lane lane, Body body) {
    const int device = (reads.empty() ? writes : reads).at(0).device().index();
    create_context();
    ++sequence_;
    Engine& engine = Engine::get();
    StreamState& current = current_stream(device);
    StreamState& s = async ? own_stream(device, lane) : current;
    if (&s != &current) engine.wait_stream(s, current);
    std::vector<Touch> touches;
    for (const at::Tensor& t : reads) touches.push_back({t, false});
    for (const at::Tensor& t : writes) touches.push_back({t, true});
    order(s, intern(name), touches);
    engine.drain(s, s.issued);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      WithoutGil relaxed;
      body();
    }
    return c10::make_intrusive<HcclWork>(rank_, type, s, writes);
  }

  StreamState& own_stream(int device, Lane lane) {
    auto& s = streams_[{device, lane}];
    if (s == nullptr) s = &Engine::get().private_stream(device);
    return *s;
  }

  static void check_tensors(const Tensors& tensors, const char* op) {
    for (const at::Tensor& t : tensors) {
      TORCH_CHECK(t.device().type() == kNpu, "hccl ", op, ": expected npu tensors, got one on ", t.device().str());
      TORCH_CHECK(t.is_contiguous(), "hccl ", op, ": Tensors must be contiguous, got strides ", t.strides(), " for ", shape_text(t));
      TORCH_CHECK(
          t.device() == tensors[0].device(), "hccl ", op, ": tensors on ", t.device().str(), " and ", tensors[0].device().str(), " in one call");
    }
  }

  static at::Tensor& single(Tensors& tensors, const char* op) {
    TORCH_CHECK(tensors.size() == 1, "hccl ", op, ": expected one tensor, got ", tensors.size());
    check_tensors(tensors, op);
    return tensors[0];
  }

  static int checked(const c10d::ReduceOp& op) {
    using Kind = c10d::ReduceOp::RedOpType;
    const Kind kind = op.op_;
    TORCH_CHECK(
        kind == Kind::SUM || kind == Kind::PRODUCT || kind == Kind::MAX || kind == Kind::MIN,
        "hccl supports the reductions SUM, PRODUCT, MAX and MIN only");
    return static_cast<int>(kind);
  }

  // A tensor's bytes as a CPU tensor, without a copy.
  static at::Tensor bytes(const at::Tensor& t) {
    if (t.numel() == 0) return at::empty({0}, at::kByte);
    Relabel relabel(t.device().index());
    return relabel.to_cpu(t).view({-1}).view(at::kByte);
  }

  static void write(const at::Tensor& to, const at::Tensor& from) {
    if (to.numel() != 0) std::memcpy(to.data_ptr(), from.contiguous().data_ptr(), to.nbytes());
  }

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

  Tensors gathered(const at::Tensor& mine) {
    std::vector<Tensors> all(1);
    for (int r = 0; r < size_; ++r) all[0].push_back(at::empty_like(mine));
    Tensors in{mine};
    c10d::AllgatherOptions options;
    gloo_->allgather(all, in, options)->wait();
    return all[0];
  }

  static void check_pair(const Description& mine, int my_rank, const Description& theirs, int their_rank) {
    const bool same = std::strcmp(mine.op, theirs.op) == 0 && mine.reduce == theirs.reduce && mine.root == theirs.root &&
        mine.dtype == theirs.dtype && mine.dims == theirs.dims && std::equal(mine.sizes, mine.sizes + kMaxDims, theirs.sizes);
    TORCH_CHECK(
        same, "hccl: ranks do not call the same operator: rank ", my_rank, " calls ", mine.text(), ", rank ", their_rank, " calls ",
        theirs.text(), mine.reduce != theirs.reduce ? " with another reduction" : "");
  }

  // Tells every rank what this one does and fails when another does something else. `shapes` false: shapes may differ.
  std::vector<Description> agree(const Description& mine, const at::Tensor& payload = at::Tensor(), bool shapes = true, Tensors* frames = nullptr) {
    const Tensors all = gathered(frame_of(mine, payload));
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
      at::Tensor padded = bytes(t);
      if (padded.numel() < most) padded = at::cat({padded, at::zeros({most - padded.numel()}, at::kByte)});
      raw = gathered(padded);
    }
    Tensors parts;
    for (int r = 0; r < size_; ++r) {
      const at::Tensor flat = most > kInline ? raw[r].narrow(0, 0, said[r].bytes) : frames[r].narrow(0, sizeof(Description), said[r].bytes);
      parts.push_back(flat.clone().view(t.scalar_type()));
    }
    return parts;
  }

  static at::Tensor reduced(const Tensors& parts, const at::Tensor& like, int reduce) {
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

  void scatter_reduced(at::Tensor& out, const at::Tensor& in, int reduce) {
    const int64_t share = static_cast<int64_t>(out.nbytes());
    Tensors mine;
    for (const at::Tensor& part : gathered(in)) mine.push_back(part.narrow(0, share * rank_, share).clone().view(out.scalar_type()));
    write(out, reduced(mine, out, reduce));
  }

  static Description describe_type(const char* op, const at::Tensor& t) {
    Description d = describe(op, t);
    d.dims = 0;
    std::fill_n(d.sizes, kMaxDims, 0);
    return d;
  }

  std::vector<int64_t> split_bytes(const at::Tensor& t, const std::vector<int64_t>& splits, const char* which) const {
    const int64_t rows = t.dim() == 0 ? 1 : t.size(0);
    const int64_t row = rows == 0 ? 0 : static_cast<int64_t>(t.nbytes()) / rows;
    if (splits.empty()) {
      TORCH_CHECK(rows % size_ == 0, "Tensor's dim 0 does not divide equally across group size: ", which, " ", shape_text(t), ", group size ", size_);
      return std::vector<int64_t>(size_, rows / size_ * row);
    }
    TORCH_CHECK(static_cast<int>(splits.size()) == size_, "Number of tensor splits not equal to group size: ", splits.size(), " ", which, " splits, group size ", size_);
    int64_t sum = 0;
    std::vector<int64_t> out;
    for (int64_t s : splits) {
      sum += s;
      out.push_back(s * row);
    }
    TORCH_CHECK(sum == rows, "Split sizes doesn't match total dim 0 size: ", which, " splits sum to ", sum, ", tensor is ", shape_text(t));
    return out;
  }

  at::Tensor all_to_all(const char* op, const Description& d, const at::Tensor& in, const std::vector<int64_t>& sends, const std::vector<int64_t>& receives) {
    agree(d);
    at::Tensor plan = at::empty({2 * size_}, at::kLong);
    for (int r = 0; r < size_; ++r) {
      plan.data_ptr<int64_t>()[r] = sends[r];
      plan.data_ptr<int64_t>()[size_ + r] = receives[r];
    }
    const Tensors plans = gathered(plan);
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
    at::Tensor padded = in;
    if (padded.numel() < most) padded = at::cat({padded, at::zeros({most - padded.numel()}, at::kByte)});
    const Tensors all = gathered(padded);
    Tensors mine;
    for (int from = 0; from < size_; ++from) {
      const int64_t* p = plans[from].data_ptr<int64_t>();
      mine.push_back(all[from].narrow(0, std::accumulate(p, p + rank_, int64_t(0)), p[rank_]));
    }
    return at::cat(mine);
  }

  void expect_bytes(const char* op, int from, const at::Tensor& part, const at::Tensor& out) const {
    TORCH_CHECK(
        part.numel() == out.numel() && part.scalar_type() == out.scalar_type(), "hccl ", op, ": rank ", from, " gives ", part.numel(),
        " elements of ", part.scalar_type(), ", but rank ", rank_, " has an output of ", shape_text(out), " ", out.scalar_type(), " for it");
  }

  static int wire_tag(int tag, int64_t n, int part) { return ((tag & 0xFF) << 22) | static_cast<int>((2 * n + part) & 0x3FFFFF); }

  void post_send(const at::Tensor& t, int to, int tag) {
    auto tensors = std::make_shared<Tensors>(Tensors{t});
    sending_.push_back({gloo_->send(*tensors, to, tag), tensors});
  }

  void reap() {
    sending_.erase(
        std::remove_if(sending_.begin(), sending_.end(), [](const auto& s) { return s.first->isCompleted(); }), sending_.end());
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  uint64_t sequence_ = 0;
  std::map<std::pair<int, Lane>, StreamState*> streams_;
  std::map<std::pair<int, int>, int64_t> sent_, received_;
  std::vector<std::pair<WorkPtr, std::shared_ptr<Tensors>>> sending_;
};

inline void bind_hccl(py::module_& m) {
  const py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<HcclBackend, c10::intrusive_ptr<HcclBackend>>(m, "ProcessGroupHCCL", base)
      .def(
          py::init([](const py::object& store, int rank, int size, const py::object& options) {
            const py::object made = py::module_::import("vllm_ascend_hsx.emulator.hccl").attr("transport")(store, rank, size, options);
            const auto parts = made.cast<std::pair<py::object, std::string>>();
            return c10::make_intrusive<HcclBackend>(parts.first.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size, parts.second);
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options") = py::none())
      .def("get_hccl_comm_name", &HcclBackend::comm_name, py::arg("rank"));
}

}  // namespace hsx
