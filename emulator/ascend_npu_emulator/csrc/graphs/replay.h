// Replays of recorded work on a stream, and external events, at which a replay waits for the host.
//
// At its launch a replay is checked for order like any other work, node by node. It then runs as
// other work of its stream would: at once on a stream that does not queue, else when something
// waits for it. Nodes that have not run stay with the stream.
#pragma once

#include "graphs/recording.h"

namespace emulated_npu {

// How long a thread waits for another one to record an external event before it reports a hang.
constexpr auto kExternalPatience = std::chrono::seconds(60);

// One launch of a graph (or a bare wait for an external event) on a stream.
struct Replay {
  Nodes nodes;
  StreamState* stream;
  std::vector<StreamState*> lanes;  // of nodes beyond the first lane
  std::thread::id launcher = std::this_thread::get_id();
  size_t next = 0;
  bool collective = false;
  std::mutex mutex;

  // Continues to the end or, unless forced, to an external event that is not recorded. True at the
  // end.
  bool advance(bool must) {
    std::unique_lock<std::mutex> guard(mutex, std::try_to_lock);
    if (!guard.owns_lock()) {
      WithoutGil relaxed;
      guard.lock();
    }
    for (; next < nodes.size(); ++next) {
      const std::shared_ptr<Node> node = nodes[next];
      if (node->waits != nullptr && !arrive(*node->waits, must)) return false;
      try {
        if (node->group == nullptr) run(*node, on(*node));
        else
          for (const auto& inner : node->group->get()) run(*inner, on(*node));
      } catch (...) {
        next = nodes.size();  // the rest of a replay that failed is not run
        throw;
      }
    }
    return true;
  }

  bool stuck() {
    std::unique_lock<std::mutex> guard(mutex, std::try_to_lock);
    if (!guard.owns_lock()) return true;
    if (next == nodes.size() || nodes[next]->waits == nullptr) return false;
    const External& e = *nodes[next]->waits;
    auto engine = Engine::get().lock();
    return !e.set && (e.on == nullptr || e.on->executed >= e.position);
  }

  StreamState& on(const Node& node) const { return node.lane == 0 ? *stream : *lanes.at(node.lane - 1); }

 private:
  bool arrive(External& e, bool must) {
    Engine& engine = Engine::get();
    const auto deadline = std::chrono::steady_clock::now() + kExternalPatience;
    while (true) {
      auto guard = engine.lock();
      if (e.set) return true;
      if (e.on != nullptr && e.on->executed < e.position) {
        StreamState& on = *e.on;
        const uint64_t position = e.position;
        guard.unlock();
        engine.drain(on, position);
        continue;
      }
      if (!must) return false;
      // The event should have been recorded by the thread that launched the wait; others may still
      // do so.
      bool hangs = launcher == std::this_thread::get_id();
      if (!hangs) {
        WithoutGil relaxed;
        hangs = e.recorded.wait_until(guard, deadline) == std::cv_status::timeout;
      }
      if (hangs) {
        guard.unlock();
        next = nodes.size();
        TORCH_CHECK(
            false, "NPU error: ", engine.describe(stream->slot),
            " waits for an external event (torch.npu.ExternalEvent) that nothing records: the device would hang");
      }
    }
  }

  void run(Node& node, StreamState& lane) {
    if (!node.first_run) {
      if (node.run) node.run();
      return;
    }
    const std::vector<bool> written = node.first_run();
    std::vector<Touch> writes;
    for (size_t i = 0; i < node.touches.size(); ++i)
      if ((node.touches[i].write = written.at(i))) writes.push_back(node.touches[i]);
    node.first_run = nullptr;
    if (!Engine::get().defers(*stream)) order(lane, node.name, writes);
  }
};

inline bool replay_waits(StreamState& s) {
  std::shared_ptr<Replay> replay;
  {
    auto guard = Engine::get().lock();
    if (s.replays.empty()) return false;
    replay = s.replays.front();
  }
  return replay->stuck();
}

inline void finish_replays(StreamState& s) {
  Engine& engine = Engine::get();
  while (true) {
    std::shared_ptr<Replay> replay;
    {
      auto guard = engine.lock();
      if (s.replays.empty()) break;
      replay = s.replays.front();
    }
    const auto done = [&] {
      auto guard = engine.lock();
      if (s.replays.empty() || s.replays.front() != replay) return;
      s.replays.pop_front();
      --engine.unfinished();
    };
    try {
      replay->advance(true);
    } catch (...) {
      done();
      throw;
    }
    done();
  }
  // In late mode later copies to the host are still under way; else the stream is idle again.
  engine.drain(s, config().late ? s.after_replays : s.issued);
}

inline void check_alive(const Node& node) {
  for (const Touch& t : node.touches) {
    const auto memory = memory_of(t.tensor);
    TORCH_CHECK(
        memory == nullptr || !memory->freed, "NPU error: the replay of a graph runs ", *node.name, " on a tensor of shape ",
        shape_text(t.tensor), " (", t.tensor.dtype().name(), ") whose memory was freed after the capture");
  }
}

inline void launch_replay(StreamState& s, Nodes nodes, const std::vector<StreamState*>& lanes = {}) {
  static const std::string* name = intern("replay");
  if (!TaskQueue::of(s.device).enter(*name)) return;
  Engine& engine = Engine::get();
  const bool defers = engine.defers(s);
  if (!defers) engine.settle(s);
  auto replay = std::make_shared<Replay>();
  replay->stream = &s;
  replay->lanes = lanes;
  std::map<uint64_t, Clock> events;
  for (const auto& node : nodes) {
    if (node->records != 0 || node->awaits != 0) {
      StreamState& lane = replay->on(*node);
      if (node->records != 0 && engine.tracking()) engine.launch(lane);
      auto guard = engine.lock();
      if (node->records != 0) events[node->records] = lane.clock;
      else lane.clock.join(events.at(node->awaits));
      continue;
    }
    if (node->waits != nullptr) {
      External& e = *node->waits;
      auto guard = engine.lock();
      if (e.set || e.on != nullptr) s.clock.join(e.clock);
      else e.waiting.push_back(&s);
    }
    for (const auto& part : node->group == nullptr ? Nodes{node} : node->group->get()) {
      replay->collective |= part->collective;
      check_alive(*part);
      if (!part->touches.empty()) order(replay->on(*node), part->name, part->touches);
    }
  }
  replay->nodes = std::move(nodes);
  const Item item{name, [replay] { replay->advance(true); }, nullptr, [replay] { return replay->stuck(); }};
  if (defers) {
    engine.push(s, item);
    if (replay->collective) engine.drain(s, s.issued);  // ranks meet in the order of their launches
  } else if (!replay->advance(false)) {
    {
      auto guard = engine.lock();
      s.replays.push_back(replay);
      ++engine.unfinished();
    }
    engine.push(s, item);  // so that events and the host wait for it
  }
}

// A replay with collectives goes on by itself: other ranks wait for it while this host may wait for
// them. A rank without requests launches nothing after its replay.
inline void go_on(StreamState& s) {
  std::shared_ptr<Replay> replay;
  {
    auto guard = Engine::get().lock();
    if (s.replays.empty() || !s.replays.front()->collective) return;
    replay = s.replays.front();
  }
  if (replay->advance(false)) finish_replays(s);
}

inline void mark_external(const std::shared_ptr<External>& e) {
  auto guard = Engine::get().lock();
  e->set = true;
  e->on = nullptr;
  e->recorded.notify_all();
}

inline void record_external(const std::shared_ptr<External>& e, StreamState& s) {
  static const std::string* name = intern("ExternalEvent.record");
  TORCH_CHECK_NOT_IMPLEMENTED(s.recording == nullptr, "torch.npu.ExternalEvent.record in a graph is not implemented by the emulated NPU");
  if (!TaskQueue::of(s.device).enter("external_event")) return;
  Engine& engine = Engine::get();
  if (!engine.defers(s)) engine.settle(s);
  if (engine.tracking()) engine.launch(s);
  std::vector<StreamState*> waiting;
  {
    auto guard = engine.lock();
    e->clock = s.clock;
    waiting.swap(e->waiting);
    for (StreamState* w : waiting) w->clock.join(e->clock);
  }
  if (!engine.defers(s)) {
    mark_external(e);
  } else {
    engine.push(s, {name, [e] { mark_external(e); }});
    auto guard = engine.lock();
    if (!e->set) {
      e->on = &s;
      e->position = s.issued;
      e->recorded.notify_all();  // a waiting thread can continue the replay
    }
  }
  for (StreamState* w : waiting) go_on(*w);
}

inline void wait_external(const std::shared_ptr<External>& e, StreamState& s) {
  auto node = std::make_shared<Node>();
  node->name = intern("ExternalEvent.wait");
  node->waits = e;
  if (s.recording != nullptr) record_node(s, std::move(node));
  else launch_replay(s, {std::move(node)});
}

inline void reset_external(const std::shared_ptr<External>& e, StreamState& s) {
  if (!TaskQueue::of(s.device).enter("external_event")) return;
  Engine& engine = Engine::get();
  const Item item{intern("ExternalEvent.reset"), [e] {
                    auto guard = Engine::get().lock();
                    e->set = false;
                  }};
  if (engine.defers(s)) {
    engine.push(s, item);
    return;
  }
  engine.settle(s);
  item.run();
}

}  // namespace emulated_npu
