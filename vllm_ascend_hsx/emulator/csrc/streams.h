// Streams and events: when work runs, and the known order of work.
//
// Normal mode: every operator runs when it is called, so every stream is always idle. The clocks
// are not used.
//
// Late mode: the default stream runs its operators when they are called, every other stream queues
// them. A queue runs only as far as something needs it: the host synchronizes, or a stream that
// must run now waits for an event. Copies from the default stream into pinned memory are taken at
// once but delivered to the host late, by the same rules. A loop that polls query() ends, because
// from the third false result on each query runs one queued item. A queue longer than kQueueLimit
// runs its oldest items, as a full hardware queue would.
//
// Late mode also checks order. Each stream, each event and the host carry a vector clock; an access
// that conflicts with an earlier one on another stream, and that no wait, event or host
// synchronization orders after it, is an error. What the host itself reads or writes (numpy, CPU
// operators on pinned memory) cannot be seen; a missing wait there shows as stale bytes. The host
// counts as one thread: synchronizing in one thread orders the launches of all.
//
// Graphs (recording.h, replay.h): a stream that captures runs nothing. A replay that waits for an
// external event that the host has not recorded stays with the stream, in both modes. Work that is
// launched after it is queued; once the event is recorded, the next work runs all of it first.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <numeric>
#include <thread>

#include "config.h"
#include "memory.h"
#include "races.h"

namespace hsx {

constexpr int kPoolStreams = 32;  // streams per device before ids are handed out again
constexpr size_t kQueueLimit = 4096;
constexpr int kPatientQueries = 2;

// Gives the GIL back while a thread blocks, so that the thread it waits for can use Python.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

struct Item {
  const std::string* name;
  std::function<void()> run;
  const void* host = nullptr;  // pinned block that a delivery of the default stream writes
  std::function<bool()> stuck;  // whether running it would wait for something that the host has not launched yet
};

struct StreamState;
struct Recording;
struct Replay;

struct Touch {
  at::Tensor tensor;
  bool write;
};

// Implemented in recording.h and replay.h.
void record_touches(StreamState& s, const std::vector<Touch>& touches);
void record_item(StreamState& s, Item item);
void finish_replays(StreamState& s);
bool replay_waits(StreamState& s);  // for an external event that the host has not recorded
uint64_t capture_of(const StreamState& s);  // number of the capture that the stream records, or 0
std::shared_ptr<Pool> pool_of(const StreamState& s);

// What hardware says to a host that waits for work which is only being recorded.
constexpr const char* kCapturedStream = "error code is 107027: stream is captured";

struct StreamState {
  int device = 0;
  c10::StreamId id = 0;
  int slot = 0;  // index into clocks, unique in the process
  std::deque<Item> queue;
  uint64_t issued = 0, executed = 0;
  bool running = false;
  std::thread::id runner;
  Clock clock;
  uint64_t host_version = 0;
  int refused_queries = 0;
  Recording* recording = nullptr;  // launches are recorded here
  std::deque<std::shared_ptr<Replay>> replays;  // not finished yet, of a stream that does not queue
  uint64_t after_replays = 0;  // position of the last work that was queued because one of them waits
  bool is_default() const { return id == 0; }
};

struct EventState {
  bool timing = false;
  StreamState* stream = nullptr;
  uint64_t position = 0;
  Clock clock;
  std::shared_ptr<std::atomic<int64_t>> reached;  // nanoseconds; 0 until the stream got there
  int refused_queries = 0;
  uint64_t capture = 0;  // recorded inside this capture
};

class Engine {
 public:
  static Engine& get() {
    static auto* engine = new Engine();
    return *engine;
  }

  std::unique_lock<std::mutex> lock() {
    std::unique_lock<std::mutex> guard(mutex_, std::try_to_lock);
    if (!guard.owns_lock()) {
      WithoutGil relaxed;
      guard.lock();
    }
    return guard;
  }

  StreamState& stream(int device, c10::StreamId id) {
    auto guard = lock();
    return find(device, id);
  }

  // A stream of the device's pool. Order is tracked from the first one on.
  StreamState& new_stream(int device) {
    auto guard = lock();
    const int n = pool_next_[device]++ % kPoolStreams;
    side_streams_ = true;
    return find(device, n + 1);
  }

  // A stream outside the pool (hccl's own).
  StreamState& private_stream(int device) {
    auto guard = lock();
    side_streams_ = true;
    return find(device, kPoolStreams + 1 + private_next_++);
  }

  bool tracking() const { return side_streams_ && config().late; }
  bool defers(const StreamState& s) const { return s.recording != nullptr || (config().late && !s.is_default()); }

  // How many streams record.
  int recordings() const { return recordings_; }
  void set_recording(StreamState& s, Recording* recording) {
    recordings_ += (recording != nullptr) - (s.recording != nullptr);
    s.recording = recording;
  }

  // Whether work that is launched on s now is queued, if that does not need values on the host.
  bool queues(StreamState& s) { return defers(s) || (unfinished_ != 0 && replay_waits(s)); }

  // Called before something runs on s at once.
  void settle(StreamState& s) {
    if (unfinished_ != 0 && !s.replays.empty()) finish_replays(s);
  }
  std::atomic<int>& unfinished() { return unfinished_; }

  // Called for each operator launched on s, before it runs or is queued.
  uint64_t launch(StreamState& s) {
    auto guard = lock();
    see_host(s);
    const uint64_t epoch = s.clock.get(s.slot) + 1;
    s.clock.set(s.slot, epoch);
    return epoch;
  }

  void push(StreamState& s, Item item) {
    if (s.recording != nullptr) {
      record_item(s, std::move(item));
      return;
    }
    auto guard = lock();
    s.queue.push_back(std::move(item));
    ++s.issued;
    if (!s.replays.empty()) s.after_replays = s.issued;
    if (s.queue.size() > kQueueLimit) {
      const uint64_t upto = s.executed + s.queue.size() / 2;
      guard.unlock();
      drain(s, upto);
    }
  }

  // Runs the stream's queue up to a position. Errors of the queued work surface here.
  void drain(StreamState& s, uint64_t upto) {
    auto guard = lock();
    if (s.executed >= upto) return;
    const auto self = std::this_thread::get_id();
    while (s.executed < upto) {
      if (s.running) {
        TORCH_CHECK(s.runner != self, "emulated NPU: a queued operator waits for its own stream");
        WithoutGil relaxed;
        idle_.wait(guard);
        continue;
      }
      Item item = std::move(s.queue.front());
      s.queue.pop_front();
      s.running = true;
      s.runner = self;
      guard.unlock();
      std::exception_ptr failure;
      try {
        item.run();
      } catch (...) {
        failure = std::current_exception();
      }
      item.run = nullptr;  // lets go of its memory before anybody can see the item as done
      guard = lock();
      s.running = false;
      ++s.executed;
      idle_.notify_all();
      if (failure) {
        guard.unlock();
        rethrow(failure, *item.name, s);
      }
    }
  }

  void record(EventState& e, StreamState& s) {
    auto guard = lock();
    e.capture = capture_of(s);
    if (e.capture != 0) {
      e.stream = &s;
      return;
    }
    see_host(s);
    if (tracking()) s.clock.set(s.slot, s.clock.get(s.slot) + 1);
    e.stream = &s;
    e.clock = s.clock;
    e.refused_queries = 0;
    auto reached = std::make_shared<std::atomic<int64_t>>(0);
    e.reached = reached;
    if (s.queue.empty() && !s.running) {
      *reached = now();
    } else {
      s.queue.push_back({intern("record_event"), [reached] { *reached = now(); }});
      ++s.issued;
    }
    e.position = s.issued;
  }

  // s does nothing that is launched from here on before e has happened.
  void wait(StreamState& s, const EventState& e) {
    if (e.stream == nullptr) return;
    StreamState& on = *e.stream;
    const uint64_t here = capture_of(s);
    if (here != 0 || e.capture != 0) {
      // Within one stream a capture is in order by itself.
      if (here == e.capture) return;
      TORCH_CHECK(here == 0, "NPU error: a stream that captures a graph waits for an event that was recorded outside of the capture");
      TORCH_CHECK_NOT_IMPLEMENTED(
          capture_of(on) != e.capture, "a graph capture that takes in a second stream is not implemented by the emulated NPU");
      TORCH_CHECK(false, "NPU error: the event was recorded in a graph capture that has ended, and stands for nothing outside of it");
    }
    const uint64_t position = e.position;
    {
      auto guard = lock();
      see_host(s);
      s.clock.join(e.clock);
      if (&on == &s || on.executed >= position) return;
      if (defers(s)) {
        s.queue.push_back({intern("wait_event"), [this, &on, position] { drain(on, position); }});
        ++s.issued;
        return;
      }
    }
    drain(on, position);
  }

  // s does nothing that is launched from here on before all that was launched on `on`.
  void wait_stream(StreamState& s, StreamState& on) {
    EventState e;
    record(e, on);
    wait(s, e);
  }

  void synchronize(EventState& e) {
    if (e.stream == nullptr) return;
    TORCH_CHECK(e.capture == 0, "NPU error: synchronizing an event of a graph capture, ", kCapturedStream);
    drain(*e.stream, e.position);
    auto guard = lock();
    host_saw(e.clock);
  }

  void synchronize(StreamState& s) {
    TORCH_CHECK(capture_of(s) == 0, "NPU error: synchronizing stream ", s.id, ", ", kCapturedStream);
    uint64_t upto;
    Clock clock;
    {
      auto guard = lock();
      upto = s.issued;
      clock = s.clock;
    }
    drain(s, upto);
    auto guard = lock();
    host_saw(clock);
  }

  void synchronize_device(int device) {
    std::vector<StreamState*> all;
    {
      auto guard = lock();
      for (auto& entry : streams_)
        if (entry.first.first == device) all.push_back(entry.second.get());
    }
    for (StreamState* s : all) synchronize(*s);
  }

  bool query(EventState& e) {
    if (e.stream == nullptr) return true;
    TORCH_CHECK(e.capture == 0, "NPU error: querying an event of a graph capture, ", kCapturedStream);
    return query(*e.stream, e.position, e.clock, e.refused_queries);
  }

  bool query(StreamState& s) {
    TORCH_CHECK(capture_of(s) == 0, "NPU error: querying stream ", s.id, ", ", kCapturedStream);
    uint64_t upto;
    Clock clock;
    {
      auto guard = lock();
      upto = s.issued;
      clock = s.clock;
    }
    return query(s, upto, clock, s.refused_queries);
  }

  // Delivers what the default stream still owes to this pinned block, or (nullptr) to anybody.
  void deliver(StreamState& s, const void* host) {
    uint64_t upto = 0;
    {
      auto guard = lock();
      uint64_t position = s.executed + (s.running ? 1 : 0);
      for (const Item& item : s.queue) {
        ++position;
        if (item.host == host) upto = position;
      }
    }
    drain(s, upto);
  }

  Clock clock_of(const StreamState& s) {
    auto guard = lock();
    Clock clock = s.clock;
    clock.join(host_);
    return clock;
  }

  // The stream whose clock component is `slot`.
  std::string describe(int slot) {
    auto guard = lock();
    const StreamState& s = *by_slot_.at(slot);
    return (s.is_default() ? "the default stream" : "stream " + std::to_string(s.id)) + " of npu:" + std::to_string(s.device);
  }

  StreamState& by_slot(int slot) {
    auto guard = lock();
    return *by_slot_.at(slot);
  }

  // For tests: late mode can change while nothing is queued.
  void set_late(bool late) {
    auto guard = lock();
    for (auto& entry : streams_)
      TORCH_CHECK(entry.second->queue.empty(), "emulated NPU: late mode cannot change while work is queued");
    config().late = late;
  }

  size_t pending(const StreamState& s) {
    auto guard = lock();
    return s.queue.size();
  }

  // Work of a stream is ordered from here on after what the clock has seen.
  void join(StreamState& s, const Clock& clock) {
    auto guard = lock();
    s.clock.join(clock);
  }

 private:
  StreamState& find(int device, c10::StreamId id) {
    auto& entry = streams_[{device, id}];
    if (!entry) {
      entry = std::make_unique<StreamState>();
      entry->device = device;
      entry->id = id;
      entry->slot = static_cast<int>(by_slot_.size());
      by_slot_.push_back(entry.get());
    }
    return *entry;
  }

  void see_host(StreamState& s) {
    if (s.host_version == host_version_) return;
    s.clock.join(host_);
    s.host_version = host_version_;
  }

  void host_saw(const Clock& clock) {
    if (!tracking()) return;
    host_.join(clock);
    ++host_version_;
  }

  bool query(StreamState& s, uint64_t upto, const Clock& clock, int& refused) {
    std::function<bool()> stuck;
    {
      auto guard = lock();
      if (s.executed >= upto) {
        refused = 0;
        host_saw(clock);
        return true;
      }
      if (refused++ < kPatientQueries || s.running) return false;
      stuck = s.queue.front().stuck;
      upto = s.executed + 1;
    }
    if (stuck && stuck()) return false;
    drain(s, upto);
    return false;
  }

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  [[noreturn]] static void rethrow(const std::exception_ptr& failure, const std::string& name, const StreamState& s) {
    try {
      std::rethrow_exception(failure);
    } catch (const c10::Error& e) {
      TORCH_CHECK(
          false, "NPU error of ", name, ", launched earlier on stream ", s.id, " of npu:", s.device,
          " and reported where the host waited for it: ", e.what_without_backtrace());
    }
  }

  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<std::pair<int, c10::StreamId>, std::unique_ptr<StreamState>> streams_;
  std::vector<StreamState*> by_slot_;
  std::map<int, int> pool_next_;
  int private_next_ = 0;
  Clock host_;
  uint64_t host_version_ = 0;
  std::atomic<bool> side_streams_{false};
  std::atomic<int> recordings_{0}, unfinished_{0};
};

inline std::vector<c10::StreamId>& current_stream_ids() {
  static thread_local std::vector<c10::StreamId> ids(kMaxDevices, 0);
  return ids;
}

inline StreamState& current_stream(int device) { return Engine::get().stream(device, current_stream_ids()[device]); }

}  // namespace hsx
