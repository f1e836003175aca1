// How streams and the host wait for events and for each other, or ask whether they would have to.
#pragma once

#include "streams/engine.h"

namespace hsx {

constexpr int kPatientQueries = 2;

inline void Engine::record(EventState& e, StreamState& s) {
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

inline void Engine::wait(StreamState& s, const EventState& e) {
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

inline void Engine::wait_stream(StreamState& s, StreamState& on) {
  EventState e;
  record(e, on);
  wait(s, e);
}

inline void Engine::synchronize(EventState& e) {
  if (e.stream == nullptr) return;
  TORCH_CHECK(e.capture == 0, "NPU error: synchronizing an event of a graph capture, ", kCapturedStream);
  drain(*e.stream, e.position);
  auto guard = lock();
  host_saw(e.clock);
}

inline void Engine::synchronize(StreamState& s) {
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
  return query(*e.stream, e.position, e.clock, e.refused_queries);
}

inline bool Engine::query(StreamState& s) {
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

inline bool Engine::query(StreamState& s, uint64_t upto, const Clock& clock, int& refused) {
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

}  // namespace hsx
