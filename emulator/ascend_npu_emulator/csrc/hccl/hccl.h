// The c10d backend "hccl": every collective is one exchange of frames over gloo, then plain
// arithmetic on each rank.
//
// A frame starts with a description of the rank's operator. Ranks that disagree fail with an error
// that names both; hardware would hang or corrupt memory. Reductions add in rank order, in float32
// for the half types, so all ranks get the same bits.
//
// Streams: an operator is launched on the current stream (async_op: on a stream of the group that
// first waits for the current one, and wait() makes the current stream wait for it). The bytes move
// at the launch: ranks must meet in launch order, so in late mode the streams involved are drained
// first; a captured operator moves them at the launch of each replay. A receive is queued and
// completed when something waits for it; a send never blocks the host, also where hardware would
// wait for the receiver.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

#include "hccl/tensors.h"
#include "streams/events.h"

namespace emulated_npu {

using c10d::OpType;

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

  HcclBackend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, const Group& group)
      : Backend(rank, size), wire_(std::move(gloo), rank, size, group), name_(group.key) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { wire_.set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  // The name under which kernels that communicate themselves would look the group up.
  std::string comm_name(int) const { return name_; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    const at::Tensor t = single(tensors, "all_reduce");
    const int reduce = checked(o.reduceOp);
    return launch(OpType::ALLREDUCE, "hccl::all_reduce", {t}, {t}, o.asyncOp, [=, this] {
      write(t, reduced(wire_.exchange(describe("all_reduce", t, reduce), t, true), t, reduce));
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    const at::Tensor t = single(tensors, "reduce");
    const int reduce = checked(o.reduceOp);
    const int root = static_cast<int>(o.rootRank);
    return launch(OpType::REDUCE, "hccl::reduce", {t}, rank_ == root ? Tensors{t} : Tensors{}, o.asyncOp, [=, this] {
      const Tensors parts = wire_.exchange(describe("reduce", t, reduce, root), t, true);
      if (rank_ == root) write(t, reduced(parts, t, reduce));
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    const at::Tensor t = single(tensors, "broadcast");
    const int root = static_cast<int>(o.rootRank);
    const bool source = rank_ == root;
    return launch(OpType::BROADCAST, "hccl::broadcast", source ? Tensors{t} : Tensors{}, source ? Tensors{} : Tensors{t}, o.asyncOp, [=, this] {
      const Tensors parts = wire_.exchange(describe("broadcast", t, -1, root), t, true);
      if (!source) write(t, parts[root]);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    const at::Tensor in = single(inputs, "all_gather");
    TORCH_CHECK(outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_, "hccl all_gather: expected ", size_, " output tensors");
    const Tensors out = launched(outputs[0], "all_gather");
    return launch(OpType::ALLGATHER, "hccl::all_gather", {in}, out, o.asyncOp, [=, this] {
      const Tensors parts = wire_.exchange(describe("all_gather", in), in, false);
      for (int r = 0; r < size_; ++r) expect_bytes("all_gather", r, parts[r], rank_, out[r]);
      for (int r = 0; r < size_; ++r) write(out[r], parts[r]);
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    const Tensors both = launched({input, output}, "all_gather_into_tensor");
    const at::Tensor in = both[0], out = both[1];
    TORCH_CHECK(
        out.numel() == in.numel() * size_ && out.scalar_type() == in.scalar_type(),
        "output tensor size must be equal to world_size times input tensor size, and the types the same: output ", shape_text(out), " ",
        out.scalar_type(), ", input ", shape_text(in), " ", in.scalar_type(), ", world_size ", size_);
    return launch(OpType::_ALLGATHER_BASE, "hccl::all_gather_into_tensor", {in}, {out}, o.asyncOp, [=, this] {
      write(out, at::cat(wire_.exchange(describe("all_gather_into_tensor", in), in, true)));
    });
  }

  // The exchange of a kernel that communicates itself: every rank's tensor. `call` has the arguments
  // in which ranks must agree.
  void gather_for_kernel(const std::string& kernel, const std::string& call, const at::Tensor& output, const at::Tensor& input) {
    const Tensors both = launched({input, output}, kernel.c_str());
    const at::Tensor in = both[0], out = both[1];
    TORCH_CHECK(out.nbytes() == in.nbytes() * size_ && out.scalar_type() == in.scalar_type(), kernel, ": output ", shape_text(out), ", input ", shape_text(in));
    launch(OpType::_ALLGATHER_BASE, kernel.c_str(), {in}, {out}, false, [=, this] {
      write(out, at::cat(wire_.exchange(describe(kernel.c_str(), in).with_call(call), in, true)));
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < ins.size(); ++i) last = _allgather_base(outs.at(i), ins[i], o);
    return last;
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    const at::Tensor in = single(inputs, "gather");
    const int root = static_cast<int>(o.rootRank);
    const bool here = rank_ == root;
    Tensors out;
    if (here) {
      TORCH_CHECK(outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_, "hccl gather: expected ", size_, " output tensors at the root");
      out = launched(outputs[0], "gather");
    }
    return launch(OpType::GATHER, "hccl::gather", {in}, out, o.asyncOp, [=, this] {
      const Tensors parts = wire_.exchange(describe("gather", in, -1, root), in, true);
      for (int r = 0; here && r < size_; ++r) {
        expect_bytes("gather", r, parts[r], rank_, out[r]);
        write(out[r], parts[r]);
      }
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    const at::Tensor out = single(outputs, "scatter");
    const int root = static_cast<int>(o.rootRank);
    const bool here = rank_ == root;
    Tensors in;
    if (here) {
      TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_, "hccl scatter: expected ", size_, " input tensors at the root");
      in = launched(inputs[0], "scatter");
      for (const at::Tensor& t : in)
        TORCH_CHECK(t.sizes().equals(out.sizes()) && t.scalar_type() == out.scalar_type(), "hccl scatter: input ", shape_text(t), " does not fit output ", shape_text(out));
    }
    return launch(OpType::SCATTER, "hccl::scatter", in, {out}, o.asyncOp, [=, this] {
      const Description call = describe("scatter", out, -1, root);
      wire_.agree(call);
      at::Tensor payload = at::zeros({static_cast<int64_t>(out.nbytes()) * size_}, at::kByte);
      if (here) {
        Tensors rows;
        for (const at::Tensor& t : in) rows.push_back(bytes(t));
        payload = at::cat(rows);
      }
      const Tensors parts = wire_.gathered(payload, call);
      write(out, parts[root].narrow(0, static_cast<int64_t>(out.nbytes()) * rank_, static_cast<int64_t>(out.nbytes())));
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    const at::Tensor out = single(outputs, "reduce_scatter");
    const int reduce = checked(o.reduceOp);
    TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_, "hccl reduce_scatter: expected ", size_, " input tensors");
    const Tensors in = launched(inputs[0], "reduce_scatter");
    for (const at::Tensor& t : in)
      TORCH_CHECK(t.sizes().equals(out.sizes()) && t.scalar_type() == out.scalar_type(), "hccl reduce_scatter: input ", shape_text(t), " does not fit output ", shape_text(out));
    return launch(OpType::REDUCE_SCATTER, "hccl::reduce_scatter", in, {out}, o.asyncOp, [=, this] {
      Tensors rows;
      for (const at::Tensor& t : in) rows.push_back(bytes(t));
      scatter_reduced(describe("reduce_scatter", out, reduce), out, at::cat(rows));
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    const Tensors both = launched({input, output}, "reduce_scatter_tensor");
    const at::Tensor in = both[0], out = both[1];
    const int reduce = checked(o.reduceOp);
    TORCH_CHECK(
        in.numel() == out.numel() * size_ && out.scalar_type() == in.scalar_type(),
        "input tensor must be the same size as output size times world size, and of the same type: input ", shape_text(in), " ",
        in.scalar_type(), ", output ", shape_text(out), " ", out.scalar_type(), ", world size ", size_);
    return launch(OpType::_REDUCE_SCATTER_BASE, "hccl::reduce_scatter_tensor", {in}, {out}, o.asyncOp, [=, this] {
      scatter_reduced(describe("reduce_scatter_tensor", in, reduce), out, bytes(in));
    });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    WorkPtr last;
    for (size_t i = 0; i < ins.size(); ++i) last = _reduce_scatter_base(outs.at(i), ins[i], o);
    return last;
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& o) override {
    const Tensors both = launched({input, output}, "all_to_all_single");
    const at::Tensor in = both[0], out = both[1];
    TORCH_CHECK(in.scalar_type() == out.scalar_type(), "hccl all_to_all_single: input is ", in.scalar_type(), ", output is ", out.scalar_type());
    const std::vector<int64_t> sends = split_bytes(in, in_splits, "input", size_), receives = split_bytes(out, out_splits, "output", size_);
    return launch(OpType::ALLTOALL_BASE, "hccl::all_to_all_single", {in}, {out}, o.asyncOp, [=, this] {
      write(out, wire_.all_to_all("all_to_all_single", describe_type("all_to_all_single", in), bytes(in), sends, receives));
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    const Tensors ins = launched(inputs, "all_to_all"), outs = launched(outputs, "all_to_all");
    TORCH_CHECK(static_cast<int>(ins.size()) == size_ && static_cast<int>(outs.size()) == size_, "hccl all_to_all: expected ", size_, " input and output tensors");
    return launch(OpType::ALLTOALL, "hccl::all_to_all", ins, outs, o.asyncOp, [=, this] {
      Tensors rows;
      std::vector<int64_t> sends, receives;
      for (const at::Tensor& t : ins) {
        rows.push_back(bytes(t));
        sends.push_back(static_cast<int64_t>(t.nbytes()));
      }
      for (const at::Tensor& t : outs) receives.push_back(static_cast<int64_t>(t.nbytes()));
      const at::Tensor all = wire_.all_to_all("all_to_all", describe_type("all_to_all", ins[0]), at::cat(rows), sends, receives);
      int64_t at = 0;
      for (size_t r = 0; r < outs.size(); ++r) {
        write(outs[r], all.narrow(0, at, receives[r]));
        at += receives[r];
      }
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    const int device = o.device.has_value() && o.device->has_index() ? o.device->index()
        : o.device_ids.empty()                                       ? current_device()
                                                                     : static_cast<int>(o.device_ids[0]);
    OnDevice on(device, "hccl::barrier");
    StreamState& s = current_stream(device);
    if (TaskQueue::of(device).enter("hccl::barrier")) {
      Engine::get().synchronize(s);
      wire_.agree(describe("barrier", at::Tensor()));
    }
    return c10::make_intrusive<HcclWork>(rank_, OpType::BARRIER, s, Tensors{});
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const at::Tensor t = single(tensors, "send");
    return launch(OpType::SEND, "hccl::send", {t}, {}, true, Lane::kSend, [=, this] { wire_.send(describe("send", t), t, to, tag); });
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const at::Tensor t = single(tensors, "recv");
    const int device = t.device().index();
    TORCH_CHECK_NOT_IMPLEMENTED(current_stream(device).recording == nullptr, "hccl::recv in a graph is not implemented by the emulated NPU");
    OnDevice on(device, "hccl::recv");
    StreamState& s = own_stream(device, Lane::kReceive);
    Engine::get().wait_stream(s, current_stream(device));
    if (!TaskQueue::of(device).enter("hccl::recv")) return c10::make_intrusive<HcclWork>(rank_, OpType::RECV, s, tensors);
    order(s, intern("hccl::recv"), {{t, true}});
    Relabel relabel(device);
    Engine::get().push(s, {intern("hccl::recv"), [complete = wire_.receive(describe("send", t), relabel.to_cpu(t), from, tag)] {
                             WithoutGil relaxed;
                             complete();
                           }});
    return c10::make_intrusive<HcclWork>(rank_, OpType::RECV, s, tensors);
  }

 private:
  // The group's own streams. A send must not wait for an earlier receive: its peer may do the same.
  enum class Lane { kCollective, kSend, kReceive };

  template <class Body>
  WorkPtr launch(OpType type, const char* name, const Tensors& reads, const Tensors& writes, bool async, Body body) {
    return launch(type, name, reads, writes, async, Lane::kCollective, body);
  }

  template <class Body>
  WorkPtr launch(OpType type, const char* name, const Tensors& reads, const Tensors& writes, bool async, Lane lane, Body body) {
    const int device = (reads.empty() ? writes : reads).at(0).device().index();
    OnDevice on(device, name);
    ++sequence_;
    Engine& engine = Engine::get();
    StreamState& current = current_stream(device);
    if (current.recording == nullptr) engine.settle(current);
    StreamState& s = async ? own_stream(device, lane) : current;
    if (&s != &current) engine.wait_stream(s, current);
    if (!TaskQueue::of(device).enter(name)) return c10::make_intrusive<HcclWork>(rank_, type, s, writes);
    std::vector<Touch> touches;
    for (const at::Tensor& t : reads) touches.push_back({t, false});
    for (const at::Tensor& t : writes) touches.push_back({t, true});
    order(s, intern(name), touches);
    const auto run = [body] {
      at::AutoDispatchBelowADInplaceOrView below;
      WithoutGil relaxed;
      body();
    };
    if (s.recording != nullptr) {
      record_collective(s, intern(name), run);
    } else {
      engine.drain(s, s.issued);
      run();
    }
    return c10::make_intrusive<HcclWork>(rank_, type, s, writes);
  }

  StreamState& own_stream(int device, Lane lane) {
    auto& s = streams_[{device, lane}];
    if (s == nullptr) s = &Engine::get().private_stream(device);
    return *s;
  }

  void scatter_reduced(const Description& call, const at::Tensor& out, const at::Tensor& in) {
    wire_.agree(call);
    const int64_t share = static_cast<int64_t>(out.nbytes());
    Tensors mine;
    for (const at::Tensor& part : wire_.gathered(in, call)) mine.push_back(part.narrow(0, share * rank_, share).clone().view(out.scalar_type()));
    write(out, reduced(mine, out, call.reduce));
  }

  Wire wire_;
  std::string name_;
  uint64_t sequence_ = 0;
  std::map<std::pair<int, Lane>, StreamState*> streams_;
};

inline void bind_hccl(py::module_& m) {
  const py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<HcclBackend, c10::intrusive_ptr<HcclBackend>>(m, "ProcessGroupHCCL", base)
      .def(
          py::init([](const py::object& store, int rank, int size, const py::object& options) {
            const py::object made = py::module_::import("ascend_npu_emulator.hccl").attr("transport")(store, rank, size, options);
            auto [gloo, key, name, ranks, waits] = made.cast<std::tuple<py::object, std::string, std::string, std::vector<int>, py::object>>();
            return c10::make_intrusive<HcclBackend>(
                gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), rank, size, Group{key, name, ranks, waits.cast<c10::intrusive_ptr<c10d::Store>>()});
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options") = py::none())
      .def("gather_for_kernel", &HcclBackend::gather_for_kernel)
      .def("get_hccl_comm_name", &HcclBackend::comm_name, py::arg("rank"));
}

}  // namespace emulated_npu
