// How streams and the host wait for events and for each other, or ask whether they would have to.
#pragma once

#include "streams/engine.h"

namespace emulated_npu {

constexpr int kPatientQueries = 2;

inline void Engine::record(EventState& e, StreamState& s) {
  {
    auto guard = lock();
    e.stream = &s;
    e.capture = capture_of(s);
    if (e.capture != 0) {
      e.captured = record_in_capture(s);
      return;
    }
  }
  TaskQueue& tasks = TaskQueue::of(s.device);
  tasks.count_record(*e.mark);
  if (!tasks.enter("record_event", [&] { return event_task(*e.mark); })) return;
  {
    auto guard = lock();
    see_host(s);
    if (tracking()) s.clock.set(s.slot, s.clock.get(s.slot) + 1);
    e.clock = s.clock;
    e.refused_queries = 0;
  }
  tasks.submit([this, &s, mark = e.mark] {
    {
      auto guard = lock();
      auto reached = std::make_shared<std::atomic<int64_t>>(0);
      if (s.queue.empty() && !s.running) {
        *reached = now();
      } else {
        s.queue.push_back({intern("record_event"), [reached] { *reached = now(); }});
        ++s.issued;
      }
      mark->reached = reached;
      mark->stream = &s;
      mark->position = s.issued;
    }
    TaskQueue::of(s.device).uncount_record(*mark);
  });
}

inline void Engine::wait(StreamState& s, const EventState& e) {
  if (e.stream == nullptr) return;
  const uint64_t here = capture_of(s);
  if (here != 0 || e.capture != 0) {
    TORCH_CHECK(
        here == 0 || here == e.capture, "NPU error: a stream that captures a graph waits for an event that was recorded outside of the capture");
    TORCH_CHECK(is_underway(e.capture), "NPU error: the event was recorded in a graph capture that has ended, and stands for nothing outside of it");
    if (here == 0) join_capture(s);
    wait_in_capture(s, e.captured);
    return;
  }
  TaskQueue& tasks = TaskQueue::of(s.device);
  if (!tasks.enter("wait_event", [&] { return event_task(*e.mark); })) return;
  {
    auto guard = lock();
    see_host(s);
    s.clock.join(e.clock);
  }
  tasks.submit([this, &s, mark = e.mark] {
    if (mark->stream == nullptr) return;
    StreamState& on = *mark->stream;
    const uint64_t position = mark->position;
    {
      auto guard = lock();
      if (&on == &s || on.executed >= position) return;
      if (defers(s)) {
        s.queue.push_back({intern("wait_event"), [this, &on, position] { drain(on, position); }});
        ++s.issued;
        return;
      }
    }
    drain(on, position);
  });
}

inline void Engine::wait_stream(StreamState& s, StreamState& on) {
  EventState e;
  record(e, on);
  wait(s, e);
}

inline void Engine::synchronize(EventState& e) {
  if (e.stream == nullptr) return;
  TORCH_CHECK(e.capture == 0, "NPU error: synchronizing an event of a graph capture, ", kCapturedStream);
  TaskQueue::of(e.stream->device).wait_recorded(*e.mark);
  if (e.mark->stream == nullptr) return;
  drain(*e.mark->stream, e.mark->position);
  auto guard = lock();
  host_saw(e.clock);
}

inline void Engine::synchronize(StreamState& s) {
  TORCH_CHECK(capture_of(s) == 0, "NPU error: synchronizing stream ", s.id, ", ", kCapturedStream);
  TaskQueue& tasks = TaskQueue::of(s.device);
  tasks.report();
  tasks.wait_taken();
  uint64_t upto;
  Clock clock;
  {
    auto guard = lock();
    upto = s.issued;
    clock = s.clock;
  }
  drain(s, upto);
  tasks.report();
  auto guard = lock();
  host_saw(clock);
}

inline void Engine::synchronize_device(int device) {
  std::vector<StreamState*> all;
  {
    auto guard = lock();
    for (auto& entry : streams_)
      if (entry.first.first == device) all.push_back(entry.second.get());
  }
  for (StreamState* s : all) synchronize(*s);
}

inline bool Engine::query(EventState& e) {
  if (e.stream == nullptr) return true;
  TORCH_CHECK(e.capture == 0, "NPU error: querying an event of a graph capture, ", kCapturedStream);
  if (!TaskQueue::recorded(*e.mark)) return false;
  if (e.mark->stream == nullptr) return true;
  return query(*e.mark->stream, e.mark->position, e.clock, e.refused_queries);
}

inline bool Engine::query(StreamState& s) {
  TORCH_CHECK(capture_of(s) == 0, "NPU error: querying stream ", s.id, ", ", kCapturedStream);
  TaskQueue& tasks = TaskQueue::of(s.device);
  tasks.report();
  if (tasks.held_or_busy()) return false;
  uint64_t upto;
  Clock clock;
  {
    auto guard = lock();
    upto = s.issued;
    clock = s.clock;
  }
  return query(s, upto, clock, s.refused_queries);
}

inline bool Engine::query(StreamState& s, uint64_t upto, const Clock& clock, int& refused) {
  std::function<bool()> stuck;
  {
    auto guard = lock();
    if (s.executed >= upto) {
      refused = 0;
      host_saw(clock);
      return true;
    }
    if (TaskQueue::of(s.device).held() || refused++ < kPatientQueries || s.running) return false;
    stuck = s.queue.front().stuck;
    upto = s.executed + 1;
  }
  if (stuck && stuck()) return false;
  drain(s, upto);
  return false;
}

}  // namespace emulated_npu
