// The task queue of an NPU: how launches reach the device, and how they fail.
//
// As in torch_npu 2.10.0.post4 (csrc/core/npu/NPUQueue.cpp). Each launch (operator, copy, event) is
// a task. One thread per NPU takes the tasks in order and launches them on their streams. Here the
// task is taken at once, unless a test holds the NPU: then tasks wait, and 4095 of them fill the
// queue. The next launch blocks then, with the GIL if its caller holds it (NPUQueue.cpp:604-621).
//
// Queue mode (NPU_EMULATOR_QUEUE=1): a failed task ends the queue. What follows it in the queue is
// dropped (ReadQueue, :453-469). The first caller of Enqueue (:543) or MakeSureQueueEmpty (:315)
// gets the error, in whatever thread. Later launches are dropped (:569): destinations keep their
// bytes, new tensors hold garbage.
//
// Events (NPUEventManager.cpp): a record counts from its launch until it is taken. The count of a
// dropped record stays (AsyncTaskQueueInterface.cpp:201), so the event never completes. A failure
// clears all counts: an event whose record was in the queue shows its earlier state, and the state
// of an event that was never recorded is complete (CANN runtime, event.cc:1189).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <thread>

#include "streams/faults.h"
#include "streams/state.h"

namespace emulated_npu {

constexpr size_t kTaskQueueCapacity = 4095;  // of 4096 places one stays empty (NPUQueue.cpp:787)

// RUN, ERROR_EXIT and CAN_EXIT of NPUQueue.h.
enum class QueueStatus { kRun, kErrorExit, kCanExit };

// How an error names a task (NPUQueue.cpp:184 get_func_error_msg).
inline std::string operator_task(const std::string& name) { return "the current working operator name is " + name; }
inline std::string copy_task(size_t bytes, int kind) {
  const std::string length = std::to_string(bytes);
  return "the current copy params are srclen=" + length + ", dstlen=" + length + ", kind=" + std::to_string(kind);
}
inline std::string event_task(const Mark& mark) { return c10::str("the current working event is ", static_cast<const void*>(&mark)); }

// Threads in Event.synchronize and Stream.synchronize.
class Waiters {
 public:
  static Waiters& get() {
    static auto* waiters = new Waiters();
    return *waiters;
  }
  struct Count {
    std::vector<std::string> now, peak;  // names of threads
  };
  Count count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    count_.peak = count_.now;
  }
  void enter(const std::string& thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    count_.now.push_back(thread);
    if (count_.now.size() > count_.peak.size()) count_.peak = count_.now;
  }
  void leave(const std::string& thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    count_.now.erase(std::find(count_.now.begin(), count_.now.end(), thread));
  }

 private:
  std::mutex mutex_;
  Count count_;
};

class Waiter {
 public:
  Waiter() : thread_(thread_name()) { Waiters::get().enter(thread_); }
  ~Waiter() { Waiters::get().leave(thread_); }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

 private:
  std::string thread_;
};

// Waits until the condition holds, as a spinning thread if so configured.
template <class Condition>
void wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Condition condition) {
  while (!condition()) {
    if (!config().spin) {
      changed.wait(lock);
      continue;
    }
    lock.unlock();
    lock.lock();
  }
}

class TaskQueue {
 public:
  explicit TaskQueue(int device) : device_(device) {}

  static TaskQueue& of(int device) {
    static auto* all = new std::vector<std::unique_ptr<TaskQueue>>([] {
      std::vector<std::unique_ptr<TaskQueue>> v;
      for (int d = 0; d < kMaxDevices; ++d) v.push_back(std::make_unique<TaskQueue>(d));
      return v;
    }());
    return *all->at(device);
  }

  QueueStatus status() const { return status_; }
  bool exited() const { return status_ == QueueStatus::kCanExit; }
  // Whether a queue has ended.
  static bool any_exited() { return exits() != 0; }

  // MakeSureQueueEmpty's report: throws the error of a failed task, once.
  void report() {
    QueueStatus failed = QueueStatus::kErrorExit;
    if (!status_.compare_exchange_strong(failed, QueueStatus::kCanExit)) return;
    ++exits();
    std::lock_guard<std::mutex> lock(mutex_);
    throw std::runtime_error(
        "The Inner error is reported as above. The process exits for this inner error, and " + task_ +
        ".\nSince the operator is called asynchronously, the stacktrace may be inaccurate. If you want to get the accurate stacktrace, "
        "please set the environment variable ASCEND_LAUNCH_BLOCKING=1.\nNote: ASCEND_LAUNCH_BLOCKING=1 will force ops to run in "
        "synchronous mode, resulting in performance degradation. Please unset ASCEND_LAUNCH_BLOCKING in time after debugging.\n"
        "[ERROR] (PID:" + std::to_string(getpid()) + ", Device:" + std::to_string(device_) + ") ERR00100 PTA call acl api failed.\n" + text_);
  }

  // Enqueue, up to where the task has a place: throws the error of an earlier task once, returns
  // false if the task is dropped, and blocks while the queue is full. `describe` returns how an error
  // names the task.
  template <class Describe>
  bool enter(const std::string& name, Describe describe) {
    report();
    if (exited()) return false;
    if (held_or_busy()) {
      std::unique_lock<std::mutex> lock(mutex_);
      wait_for(changed_, lock, [&] { return tasks_.size() + taking_ < kTaskQueueCapacity; });
      if (status_ != QueueStatus::kRun) return false;  // an earlier task has failed meanwhile (:599)
    }
    const std::optional<std::string> text = Faults::get().strike(device_, name);
    if (!text.has_value()) return true;
    submit([this, task = describe(), text = *text] { fail(task, text); });
    return false;
  }

  bool enter(const std::string& operation) {
    return enter(operation, [&] { return operator_task(operation); });
  }

  // Takes the task: now, or after those that wait.
  void submit(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (status_ != QueueStatus::kRun) return;
      if (held_ || busy_) {
        tasks_.push_back(std::move(task));
        return;
      }
    }
    task();
  }

  // A task has failed.
  void fail(const std::string& task, const std::string& text) {
    std::deque<std::function<void()>> dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (status_ != QueueStatus::kRun) return;
      task_ = task;
      text_ = text;
      dropped.swap(tasks_);
      std::lock_guard<std::mutex> counts(marks());
      ++clears();
      status_ = QueueStatus::kErrorExit;
    }
    notify_all();
  }

  // Whether launches wait in the queue.
  bool held_or_busy() const { return held_ || busy_; }
  bool held() const { return held_; }

  void hold() {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = true;
  }

  // Takes the tasks that wait, in this thread.
  void release() {
    std::unique_lock<std::mutex> lock(mutex_);
    held_ = false;
    changed_.notify_all();
    if (busy_) return;
    busy_ = true;
    taker_ = std::this_thread::get_id();
    while (!held_ && !tasks_.empty()) {
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      taking_ = 1;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      taking_ = 0;
      changed_.notify_all();
    }
    busy_ = false;
    taker_ = std::thread::id();
    changed_.notify_all();
  }

  // Blocks while the NPU is held.
  void wait_released() {
    if (!held_) return;
    WithoutGil relaxed;
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for(changed_, lock, [&] { return !held_; });
  }

  // Blocks until all tasks have been taken. The thread that takes them does not wait for itself.
  void wait_taken() {
    if (!held_or_busy() || taker_ == std::this_thread::get_id()) return;
    WithoutGil relaxed;
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for(changed_, lock, [&] { return !held_ && !busy_; });
  }

  // ---- records that are not taken yet ----

  void count_record(Mark& mark) {
    std::lock_guard<std::mutex> lock(marks());
    if (mark.cleared != clears()) mark.unrecorded = 0;
    mark.cleared = clears();
    ++mark.unrecorded;
  }
  void uncount_record(Mark& mark) {
    {
      std::lock_guard<std::mutex> lock(marks());
      if (mark.cleared == clears() && mark.unrecorded > 0) --mark.unrecorded;
    }
    notify();
  }
  static bool recorded(const Mark& mark) {
    std::lock_guard<std::mutex> lock(marks());
    return mark.cleared != clears() || mark.unrecorded == 0;
  }
  // Blocks until the event's records have been taken: for ever, if one was dropped.
  void wait_recorded(const Mark& mark) {
    if (recorded(mark)) return;
    WithoutGil relaxed;
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for(changed_, lock, [&] { return recorded(mark); });
  }

  // For tests: all queues are as new.
  static void reset_all() {
    Faults::get().clear();
    for (int d = 0; d < kMaxDevices; ++d) {
      TaskQueue& queue = of(d);
      queue.release();
      queue.status_ = QueueStatus::kRun;
    }
    exits() = 0;
    {
      std::lock_guard<std::mutex> lock(marks());
      ++clears();
    }
    notify_all();
  }

 private:
  static std::atomic<int>& exits() {
    static std::atomic<int> count{0};
    return count;
  }
  static std::mutex& marks() {
    static std::mutex mutex;
    return mutex;
  }
  // How often all counts were cleared (ClearUnrecordedCount).
  static std::atomic<uint64_t>& clears() {
    static std::atomic<uint64_t> count{0};
    return count;
  }
  void notify() {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  static void notify_all() {
    for (int d = 0; d < kMaxDevices; ++d) of(d).notify();
  }

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t taking_ = 0;  // the task that runs keeps its place (ReadQueue, :448, :489)
  std::atomic<QueueStatus> status_{QueueStatus::kRun};
  std::string task_, text_;  // of the failure
  std::atomic<bool> held_{false}, busy_{false};
  std::atomic<std::thread::id> taker_{};
};

}  // namespace emulated_npu
