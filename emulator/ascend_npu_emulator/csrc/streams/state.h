// What is known of a stream and of an event (engine.h), and the work that a stream has queued.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <functional>
#include <thread>

#include "memory/blocks.h"

namespace emulated_npu {

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
  uint64_t number = 0;  // in the order of launches
};

struct StreamState;
struct Recording;
struct Replay;

struct Touch {
  at::Tensor tensor;
  bool write;
};

// Implemented in graphs/recording.h and graphs/replay.h.
void record_touches(StreamState& s, const std::vector<Touch>& touches);
void record_item(StreamState& s, Item item);
void finish_replays(StreamState& s);
bool replay_waits(StreamState& s);  // for an external event that the host has not recorded
uint64_t capture_of(const StreamState& s);  // number of the capture that the stream records, or 0
std::shared_ptr<Pool> pool_of(const StreamState& s);
bool is_underway(uint64_t capture);
void join_capture(StreamState& s);  // the stream captures, too, from here on
uint64_t record_in_capture(StreamState& s);  // number of the event among those of the capture
void wait_in_capture(StreamState& s, uint64_t event);

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

// What tasks know of an event; it outlives the event.
struct Mark {
  StreamState* stream = nullptr;  // of the last record that was taken
  uint64_t position = 0;
  std::shared_ptr<std::atomic<int64_t>> reached = std::make_shared<std::atomic<int64_t>>(0);  // nanoseconds; 0 until the stream got there
  int unrecorded = 0;  // records that are not taken, if `cleared` is the present number of clears
  uint64_t cleared = 0;
};

struct EventState {
  bool timing = false;
  StreamState* stream = nullptr;  // of the last record; nullptr: never recorded
  Clock clock;
  std::shared_ptr<Mark> mark = std::make_shared<Mark>();
  int refused_queries = 0;
  uint64_t capture = 0;  // recorded inside this capture
  uint64_t captured = 0;  // its number there
};

}  // namespace emulated_npu
