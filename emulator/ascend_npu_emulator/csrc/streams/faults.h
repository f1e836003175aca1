// Failures that tests inject: which launches fail, and with what text.
//
// A fault is "OPERATOR[:N] [WORD ...]": the N-th launch (default: the first) of an operator whose
// name contains OPERATOR fails. A WORD "npu:D" counts launches on that NPU only. Any other WORD is a
// part of the thread's name or of its innermost Python calls (a file). Names are those of operators
// as they reach the device (aten::stack.out; a sum of tensors is aten::add.out), and for all else
//   device_to_host, host_to_device, device_to_device   copies
//   record_event, wait_event, destroy_event            events
//   replay, external_event, graph_task_update          graphs
//   hccl::all_reduce, ...                              collectives
#pragma once

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "contexts.h"

namespace emulated_npu {

struct Fault {
  std::string name;
  int64_t left = 1;  // launches until it strikes
  std::vector<std::string> words;
  std::string text;  // of the driver

  static Fault parse(const std::string& specification, std::string text) {
    Fault fault;
    fault.text = std::move(text);
    std::istringstream in(specification);
    in >> fault.name;
    for (std::string word; in >> word;) fault.words.push_back(word);
    const size_t colon = fault.name.find_last_of(':');
    const bool counts = colon != std::string::npos && colon + 1 < fault.name.size() &&
        fault.name.find_first_not_of("0123456789", colon + 1) == std::string::npos;
    if (counts) {
      fault.left = std::stoll(fault.name.substr(colon + 1));
      fault.name.resize(colon);
    }
    TORCH_CHECK(!fault.name.empty() && fault.left > 0, "emulated NPU: '", specification, "' names no launch to fail: give OPERATOR[:N] [THREAD]");
    return fault;
  }

  bool matches(int device, const std::string& launched) const {
    return launched.find(name) != std::string::npos && std::all_of(words.begin(), words.end(), [&](const std::string& word) {
             return word.rfind("npu:", 0) != 0 || word == "npu:" + std::to_string(device);
           });
  }
  // `caller` is the thread's name and its Python calls.
  bool is_by(const std::string& caller) const {
    return std::all_of(words.begin(), words.end(), [&](const std::string& word) {
      return word.rfind("npu:", 0) == 0 || caller.find(word) != std::string::npos;
    });
  }
};

class Faults {
 public:
  static Faults& get() {
    static auto* faults = new Faults();
    return *faults;
  }

  void add(const std::string& specification, const std::string& text) {
    TORCH_CHECK(config().queue, "emulated NPU: a launch can fail in queue mode only (NPU_EMULATOR_QUEUE=1)");
    const Fault fault = Fault::parse(specification, text);
    std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(fault);
    any_ = true;
  }

  // Adds the fault that the file holds once there is one.
  void watch(const std::string& file) {
    std::lock_guard<std::mutex> lock(mutex_);
    file_ = file;
    any_ = true;
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.clear();
    file_.clear();
    any_ = false;
  }

  // The text of a fault that strikes this launch. A fault strikes once.
  std::optional<std::string> strike(int device, const std::string& launched) {
    if (!any_) return std::nullopt;
    std::unique_lock<std::mutex> lock(mutex_);
    read_file();
    const auto matches = [&](const Fault& fault) { return fault.matches(device, launched); };
    if (std::none_of(all_.begin(), all_.end(), matches)) return std::nullopt;
    lock.unlock();
    const std::string caller = thread_name() + "\n" + python_calls();
    lock.lock();
    for (auto it = all_.begin(); it != all_.end(); ++it) {
      if (!matches(*it) || !it->is_by(caller) || --it->left > 0) continue;
      const std::string text = it->text;
      all_.erase(it);
      any_ = !all_.empty() || !file_.empty();
      return text;
    }
    return std::nullopt;
  }

 private:
  void read_file() {
    if (file_.empty() || access(file_.c_str(), R_OK) != 0) return;
    std::ifstream in(file_);
    std::string line;
    std::getline(in, line);
    if (line.empty()) return;  // still being written
    all_.push_back(Fault::parse(line, kInjected));
    file_.clear();
  }

 public:
  static constexpr const char* kInjected = "EZ9999: Inner Error! A failure that NPU_EMULATOR_FAIL or NPU_EMULATOR_FAIL_FILE has injected.";

 private:
  std::mutex mutex_;
  std::atomic<bool> any_{false};
  std::string file_;
  std::vector<Fault> all_;
};

}  // namespace emulated_npu
