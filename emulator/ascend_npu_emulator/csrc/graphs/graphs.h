// torch.npu's graphs: captures, pools, task groups, and recording from Python.
//
// vllm-ascend passes attention parameters to a running replay by external events and task groups:
// the replay waits for an event until the host has recorded it; an update replaces the nodes of a
// task group, in the order of the update's stream. The race detector sees a task group's parameters
// as of the launch of the replay.
#pragma once

#include <torch/extension.h>

#include "graphs/replay.h"

namespace emulated_npu {

// ---- task groups --------------------------------------------------------------------------------

inline Recording& capturing(StreamState& s, const char* what) {
  TORCH_CHECK(capture_of(s) != 0, what, ": the stream captures no graph");
  return *s.recording;
}

inline void begin_task_group(StreamState& s) {
  Recording& r = capturing(s, "graph_task_group_begin");
  TORCH_CHECK(r.group == nullptr, "graph_task_group_begin: the stream has an open task group already");
  r.group = std::make_shared<TaskGroup>();
}

inline std::shared_ptr<TaskGroup> end_task_group(StreamState& s) {
  Recording& r = capturing(s, "graph_task_group_end");
  TORCH_CHECK(r.group != nullptr, "graph_task_group_end: the stream has no open task group");
  auto node = std::make_shared<Node>();
  node->name = intern("graph_task_group");
  node->group = std::move(r.group);
  node->lane = lane_of(r, s);
  r.group = nullptr;
  r.nodes.push_back(node);
  return node->group;
}

inline void begin_task_update(StreamState& s, const std::shared_ptr<TaskGroup>& group) {
  TORCH_CHECK(s.recording == nullptr, "graph_task_update_begin: the stream is capturing or updating already");
  auto* update = new Recording();
  update->owner = std::this_thread::get_id();
  update->group = group;
  Engine::get().set_recording(s, update);
}

inline std::string names(const Nodes& nodes) {
  std::string all;
  for (const auto& node : nodes) all += (all.empty() ? "" : ", ") + *node->name;
  return "[" + all + "]";
}

inline void end_task_update(StreamState& s) {
  static const std::string* name = intern("graph_task_update");
  TORCH_CHECK(s.recording != nullptr && s.recording->capture == 0, "graph_task_update_end: the stream has no open update");
  Engine& engine = Engine::get();
  const std::unique_ptr<Recording> update(s.recording);
  engine.set_recording(s, nullptr);
  const std::string before = names(update->group->get()), after = names(update->nodes);
  TORCH_CHECK(before == after, "graph_task_update_end: the update has the tasks ", after, ", but the group was captured with ", before);
  const Item item{name, [group = update->group, nodes = update->nodes] {
                    std::lock_guard<std::mutex> lock(group->mutex);
                    group->nodes = nodes;
                  }};
  if (!TaskQueue::of(s.device).enter(*name)) return;
  if (engine.defers(s)) {
    engine.push(s, item);
    return;
  }
  engine.settle(s);
  item.run();
}

// ---- torch.npu.NPUGraph -------------------------------------------------------------------------

using PoolId = std::pair<uint64_t, uint64_t>;

inline PoolId new_pool_id(bool by_user) {
  static std::atomic<uint64_t> next{1};
  const uint64_t id = next++;
  return by_user ? PoolId{0, id} : PoolId{id, 0};
}

// The pool of that id on the device; it lives as long as a graph that uses it.
inline std::shared_ptr<Pool> find_pool(int device, PoolId id) {
  static std::mutex mutex;
  static auto* known = new std::map<std::pair<int, PoolId>, std::weak_ptr<Pool>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<Pool>& entry = (*known)[{device, id}];
  auto pool = entry.lock();
  if (pool == nullptr) {
    pool = std::make_shared<Pool>();
    pool->device = device;
    entry = pool;
  }
  return pool;
}

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  ~Graph() { drop(); }

  void begin(std::optional<PoolId> pool, const std::string& mode) {
    static std::atomic<uint64_t> captures{0};
    TORCH_CHECK(!captured_ && recording_ == nullptr, "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
    TORCH_CHECK(
        mode == "global" || mode == "thread_local" || mode == "relaxed",
        "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got ", mode);
    device_ = use_device("capture_begin");
    StreamState& s = current_stream(device_);
    TORCH_CHECK(
        !s.is_default(),
        "NPU graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the default stream.)");
    TORCH_CHECK(s.recording == nullptr && active_capture() == nullptr, "only one NPU graph capture may be underway at a time in the process");
    pool_id_ = pool.value_or(new_pool_id(false));
    pool_ = find_pool(device_, pool_id_);
    {
      std::lock_guard<std::mutex> lock(pool_->mutex);
      ++pool_->graphs;
    }
    recording_ = std::make_unique<Recording>();
    recording_->capture = ++captures;
    recording_->pool = pool_;
    recording_->mode = mode;
    recording_->owner = std::this_thread::get_id();
    recording_->streams = {&s};
    Engine::get().set_recording(s, recording_.get());
    active_capture() = recording_.get();
  }

  void end() {
    TORCH_CHECK(recording_ != nullptr, "capture_end without a capture_begin");
    TORCH_CHECK(&current_stream(device_) == recording_->streams.front(), "Capture must end on the same stream it began on.");
    stop_recording();
    const std::unique_ptr<Recording> recording = std::move(recording_);
    TORCH_CHECK(recording->group == nullptr, "the capture ends inside of a task group (graph_task_group_begin without its end)");
    check_joined(*recording);
    nodes_ = std::move(recording->nodes);
    while (lanes_.size() + 1 < recording->streams.size()) lanes_.push_back(&Engine::get().private_stream(device_));
    captured_ = true;
  }

  void replay() {
    TORCH_CHECK(captured_, "Called NPUGraph::replay without a preceding successful capture.");
    StreamState& s = current_stream(device_);
    TORCH_CHECK_NOT_IMPLEMENTED(s.recording == nullptr, "the replay of a graph in another graph's capture is not implemented by the emulated NPU");
    launch_replay(s, nodes_, lanes_);
  }

  void reset() {
    TORCH_CHECK(recording_ == nullptr, "NPUGraph.reset: the graph is being captured");
    drop();
  }

  PoolId pool() const {
    TORCH_CHECK(pool_ != nullptr, "Called NPUGraph::pool() without a preceding successful capture.");
    return pool_id_;
  }

 private:
  void stop_recording() {
    active_capture() = nullptr;
    for (StreamState* s : recording_->streams) Engine::get().set_recording(*s, nullptr);
  }

  void drop() {
    if (recording_ != nullptr) {
      stop_recording();
      recording_ = nullptr;
    }
    captured_ = false;
    nodes_.clear();
    if (pool_ != nullptr) leave_pool(*pool_);
    pool_ = nullptr;
  }

  bool captured_ = false;
  int device_ = -1;
  PoolId pool_id_{0, 0};
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<Recording> recording_;
  Nodes nodes_;
  std::vector<StreamState*> lanes_;  // for all captured streams except the replaying one
};

// ---- what Python records ------------------------------------------------------------------------

// The tensor over the same bytes on the CPU; it keeps the bytes, not the device's memory.
inline at::Tensor host_alias(const at::Tensor& t) {
  c10::InferenceMode off(false);  // so that its version counts the writes
  return held(t);
}

// Records a Python call on the current stream of the device. `call` has no arguments and uses
// tensors of host_alias. `writes` has one flag per tensor; without it the call returns these flags.
inline void record_python(
    const std::string& op, int device, const std::vector<at::Tensor>& tensors, const std::optional<std::vector<bool>>& writes, py::object call) {
  StreamState& s = current_stream(device);
  TORCH_CHECK(s.recording != nullptr, op, ": the stream records nothing");
  std::vector<Touch> touches;
  for (size_t i = 0; i < tensors.size(); ++i) touches.push_back({tensors[i], writes.has_value() && writes->at(i)});
  record_touches(s, touches);
  const std::shared_ptr<py::object> kept(new py::object(std::move(call)), [](py::object* object) {
    if (!Py_IsInitialized()) return;  // the interpreter has freed it
    py::gil_scoped_acquire gil;
    delete object;
  });
  auto node = std::make_shared<Node>();
  node->name = intern(op);
  node->run = [kept] {
    py::gil_scoped_acquire gil;
    (*kept)();
  };
  if (!writes.has_value())
    node->first_run = [kept] {
      py::gil_scoped_acquire gil;
      return (*kept)().cast<std::vector<bool>>();
    };
  record_node(s, std::move(node));
}

inline void bind_graphs(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  const auto of = [](int device, int64_t id) -> StreamState& { return Engine::get().stream(device, id); };
  m.def("recordings", [] { return Engine::get().recordings(); });
  m.def("recording", [](int d) { return current_stream(d).recording != nullptr; });
  m.def("capturing", [](int d) { return context_created() && capture_of(current_stream(d)) != 0; });
  m.def("graph_pool_handle", [] { return new_pool_id(true); });
  m.def("host_alias", &host_alias);
  m.def("weak_ref", &weak_ref);
  m.def("record_python", &record_python);
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay, Released())
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool);
  py::class_<External, std::shared_ptr<External>>(m, "External")
      .def(py::init<>())
      .def("record", [of](const std::shared_ptr<External>& e, int d, int64_t id) { record_external(e, of(d, id)); }, Released())
      .def("wait", [of](const std::shared_ptr<External>& e, int d, int64_t id) { wait_external(e, of(d, id)); }, Released())
      .def("reset", [of](const std::shared_ptr<External>& e, int d, int64_t id) { reset_external(e, of(d, id)); }, Released());
  py::class_<TaskGroup, std::shared_ptr<TaskGroup>>(m, "TaskGroup");
  m.def("task_group_begin", [of](int d, int64_t id) { begin_task_group(of(d, id)); });
  m.def("task_group_end", [of](int d, int64_t id) { return end_task_group(of(d, id)); });
  m.def("task_update_begin", [of](int d, int64_t id, const std::shared_ptr<TaskGroup>& group) { begin_task_update(of(d, id), group); });
  m.def("task_update_end", [of](int d, int64_t id) { end_task_update(of(d, id)); }, Released());
}

}  // namespace emulated_npu
