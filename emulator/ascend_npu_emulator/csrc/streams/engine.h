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
// Graphs (graphs/recording.h, graphs/replay.h): a stream that captures runs nothing. A replay that
// waits for an external event that the host has not recorded stays with the stream, in both modes.
// Work that is launched after it is queued; once the event is recorded, the next work runs all of
// it first.
#pragma once

#include <chrono>

#include "streams/tasks.h"

namespace emulated_npu {

constexpr int kPoolStreams = 32;  // streams per device before ids are handed out again
constexpr size_t kQueueLimit = 4096;

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
  bool queues(StreamState& s) {
    return defers(s) || TaskQueue::of(s.device).held_or_busy() || (unfinished_ != 0 && replay_waits(s));
  }

  // Called before something runs on s at once.
  void settle(StreamState& s) {
    TaskQueue::of(s.device).wait_taken();
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
    TaskQueue& tasks = TaskQueue::of(s.device);
    if (!tasks.held_or_busy()) {
      append(s, std::move(item));
      return;
    }
    tasks.submit([this, &s, item = std::move(item)]() mutable {
      const bool waits = defers(s) || item.host != nullptr || !s.replays.empty();
      append(s, std::move(item));
      if (!waits) drain(s, s.issued);
    });
  }

  // Queues work on the stream.
  void append(StreamState& s, Item item) {
    auto guard = lock();
    item.number = ++items_;
    s.queue.push_back(std::move(item));
    ++s.issued;
    if (!s.replays.empty()) s.after_replays = s.issued;
    if (s.queue.size() > kQueueLimit) {
      const uint64_t upto = s.executed + s.queue.size() / 2;
      guard.unlock();
      drain(s, upto);
    }
  }

  // Runs the stream's queue up to a position. Errors of the queued work surface here, but in queue
  // mode with a later launch.
  void drain(StreamState& s, uint64_t upto) {
    TaskQueue::of(s.device).wait_released();
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
      item.run = nullptr;  // releases its memory before the item counts as done
      guard = lock();
      s.running = false;
      ++s.executed;
      idle_.notify_all();
      if (!failure) continue;
      if (config().queue) drop_after(item.number, s.device);
      guard.unlock();
      if (!config().queue) rethrow(failure, *item.name, s);
      TaskQueue::of(s.device).fail(operator_task(*item.name), text_of(failure));
      guard.lock();
    }
  }

  // In events.h.
  void record(EventState& e, StreamState& s);
  // Work launched on s from here on runs after e has happened.
  void wait(StreamState& s, const EventState& e);
  // Work launched on s from here on runs after all work launched on `on` so far.
  void wait_stream(StreamState& s, StreamState& on);
  void synchronize(EventState& e);
  void synchronize(StreamState& s);
  void synchronize_device(int device);
  bool query(EventState& e);
  bool query(StreamState& s);

  // Delivers pending copies of the default stream to this pinned block, or (nullptr) to all.
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

  // What the host knows to have completed.
  Clock host_clock() {
    auto guard = lock();
    return host_;
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

  // Work of the device that was launched later does nothing.
  void drop_after(uint64_t number, int device) {
    for (auto& entry : streams_)
      if (entry.first.first == device)
        for (Item& item : entry.second->queue)
          if (item.number > number) item.run = [] {};
  }

  static std::string text_of(const std::exception_ptr& failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const c10::Error& e) {
      return e.what_without_backtrace();
    } catch (const std::exception& e) {
      return e.what();
    }
  }

  bool query(StreamState& s, uint64_t upto, const Clock& clock, int& refused);

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
  uint64_t items_ = 0;
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

}  // namespace emulated_npu
