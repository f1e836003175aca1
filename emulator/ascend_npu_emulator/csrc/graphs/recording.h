// Recording: work launched while a stream captures or updates a task group is kept and not run.
//
// A recorded operator is a Node: a closure that can run any number of times, and the tensors that
// it touches. Nodes hold bytes (Memory), not blocks, so that what the capture frees goes back to
// the graph's pool (memory/blocks.h).
//
// A stream that waits for an event of a capture joins it, as in CANN (aclmdlRICaptureBegin) and
// CUDA. Each stream is a lane of the graph. Replays run the nodes of all lanes in the order of their
// capture; the race detector sees the lanes as streams that only the captured events order.
#pragma once

#include "relabel.h"
#include "streams/ordering.h"

namespace emulated_npu {

// torch.npu.ExternalEvent: a flag on the device that streams set, clear and wait for. Guarded by
// the engine's lock.
struct External {
  bool set = false;
  Clock clock;  // of the last record
  StreamState* on = nullptr;  // the stream of a record that has not run yet
  uint64_t position = 0;
  std::vector<StreamState*> waiting;  // streams with a wait that precedes its record
  std::condition_variable recorded;
};

struct TaskGroup;

struct Node {
  const std::string* name;
  std::function<void()> run;
  std::vector<Touch> touches;
  std::function<std::vector<bool>()> first_run;  // runs too, and says which touches are writes: for what has no schema
  std::shared_ptr<External> waits;
  std::shared_ptr<TaskGroup> group;
  bool collective = false;
  size_t lane = 0;  // the stream that captured it: index into Recording::streams
  uint64_t records = 0, awaits = 0;  // number of the captured event that it records or waits for
};
using Nodes = std::vector<std::shared_ptr<Node>>;

// Nodes whose arguments may be replaced after the capture.
struct TaskGroup {
  std::mutex mutex;
  Nodes nodes;
  Nodes get() {
    std::lock_guard<std::mutex> lock(mutex);
    return nodes;
  }
};

// What a stream is recording: a graph, or the new nodes of a task group.
struct Recording {
  uint64_t capture = 0;  // 0: an update
  std::shared_ptr<Pool> pool;
  std::string mode;
  std::thread::id owner;
  Nodes nodes;
  std::vector<Touch> touches;  // of the node that comes next
  std::shared_ptr<TaskGroup> group;  // open, or being updated
  std::vector<StreamState*> streams;  // that capture; the first began it
  uint64_t events = 0;
};

inline std::atomic<Recording*>& active_capture() {
  static std::atomic<Recording*> active{nullptr};
  return active;
}

inline uint64_t capture_of(const StreamState& s) { return s.recording == nullptr ? 0 : s.recording->capture; }

inline std::shared_ptr<Pool> pool_of(const StreamState& s) { return s.recording == nullptr ? nullptr : s.recording->pool; }

inline bool is_underway(uint64_t capture) {
  const Recording* active = active_capture();
  return active != nullptr && active->capture == capture;
}

inline void join_capture(StreamState& s) {
  Recording* capture = active_capture();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !s.is_default() && s.id <= kPoolStreams && s.device == capture->streams.front()->device,
      "a graph capture that takes in the default stream, a stream of hccl or one of another NPU is not implemented by the emulated NPU");
  TORCH_CHECK(s.recording == nullptr, "NPU error: a stream joins a graph capture while it updates a task group");
  capture->streams.push_back(&s);
  Engine::get().set_recording(s, capture);
}

inline size_t lane_of(const Recording& r, const StreamState& s) {
  const auto found = std::find(r.streams.begin(), r.streams.end(), &s);
  return found == r.streams.end() ? 0 : static_cast<size_t>(found - r.streams.begin());  // an update has none
}

inline void record_event_node(StreamState& s, const char* name, uint64_t records, uint64_t awaits) {
  auto node = std::make_shared<Node>();
  node->name = intern(name);
  node->lane = lane_of(*s.recording, s);
  node->records = records;
  node->awaits = awaits;
  s.recording->nodes.push_back(std::move(node));
}

inline uint64_t record_in_capture(StreamState& s) {
  const uint64_t event = ++s.recording->events;
  record_event_node(s, "record_event", event, 0);
  return event;
}

inline void wait_in_capture(StreamState& s, uint64_t event) { record_event_node(s, "wait_event", 0, event); }

// Called at the end of a capture: the stream that began it has waited for all that the others did.
inline void check_joined(const Recording& r) {
  using Progress = std::vector<uint64_t>;  // nodes of each lane
  const size_t lanes = r.streams.size();
  std::vector<Progress> seen(lanes, Progress(lanes));
  std::map<uint64_t, Progress> at;
  for (const auto& node : r.nodes) {
    Progress& own = seen[node->lane];
    if (node->records != 0) {
      at[node->records] = own;
      continue;
    }
    ++own[node->lane];
    if (node->awaits == 0) continue;
    const Progress& other = at.at(node->awaits);
    for (size_t lane = 0; lane < lanes; ++lane) own[lane] = std::max(own[lane], other[lane]);
  }
  for (size_t lane = 1; lane < lanes; ++lane)
    TORCH_CHECK(
        seen[0][lane] == seen[lane][lane], "NPU error: the capture ends, and the stream that began it has not waited for all that stream ",
        r.streams[lane]->id, " has captured");
}

// A synchronous copy during a capture: refused in mode "global" for every thread, in "thread_local"
// for the capturing one.
inline void refuse_synchronous_copy(const char* what) {
  const Recording* capture = active_capture();
  if (capture == nullptr || capture->mode == "relaxed") return;
  TORCH_CHECK(
      capture->mode == "thread_local" && capture->owner != std::this_thread::get_id(), "NPU error: ", what,
      " while a graph is captured, error code is 107030: the current capture mode does not support this operation");
}

inline at::Tensor held(const at::Tensor& t) {
  if (!t.defined() || t.device().type() != kNpu) return t;
  Relabel relabel(t.device().index());
  return relabel.to_cpu(t);
}

inline void record_touches(StreamState& s, const std::vector<Touch>& touches) {
  for (const Touch& t : touches) s.recording->touches.push_back({held(t.tensor), t.write});
}

inline void record_node(StreamState& s, std::shared_ptr<Node> node) {
  Recording& r = *s.recording;
  node->touches = std::move(r.touches);
  r.touches.clear();
  node->lane = lane_of(r, s);
  if (r.capture != 0 && r.group != nullptr) r.group->nodes.push_back(std::move(node));
  else r.nodes.push_back(std::move(node));
}

inline void record_item(StreamState& s, Item item) {
  auto node = std::make_shared<Node>();
  node->name = item.name;
  node->run = std::move(item.run);
  record_node(s, std::move(node));
}

inline void record_collective(StreamState& s, const std::string* name, std::function<void()> run) {
  auto node = std::make_shared<Node>();
  node->name = name;
  node->run = std::move(run);
  node->collective = true;
  record_node(s, std::move(node));
}

// The tensor over the same bytes, which does not keep the memory from being freed.
inline at::Tensor weak_ref(const at::Tensor& t) {
  if (t.device().type() != kNpu) return t;
  c10::StorageImpl* impl = t.storage().unsafeGetStorageImpl();
  c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  const auto memory = memory_of(data);
  c10::DataPtr weak = memory == nullptr
      ? c10::DataPtr(data.get(), t.device())
      : c10::DataPtr(data.get(), new std::shared_ptr<Memory>(memory), &drop_weak, t.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), impl->nbytes(), std::move(weak), &npu_allocator(), /*resizable=*/false);
  return over(std::move(storage), c10::DispatchKey::PrivateUse1, t);
}

}  // namespace emulated_npu
