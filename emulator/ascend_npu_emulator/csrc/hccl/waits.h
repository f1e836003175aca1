// Detects and names ranks that wait for each other forever in different groups.
//
// A rank that still waits after kPoll posts in which exchange of which group it does, and how many
// exchanges of each group it has entered, and reads what the others posted. A waits for B if A's
// record is of an exchange of a group with B that B's counts say B has not entered. Counts only
// grow and a rank enters exchanges in order, from one thread; so the ranks of a cycle of such
// records wait for ever, whenever each record was written and read. Time decides only when to look.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <thread>

namespace emulated_npu {

constexpr std::chrono::milliseconds kPoll{2000};

// How many exchanges of each group this process has entered.
class Entered {
 public:
  static Entered& get() {
    static Entered entered;
    return entered;
  }
  int64_t enter(const std::string& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    threads_.insert(std::this_thread::get_id());
    return ++counts_[group];
  }
  std::map<std::string, int64_t> counts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }
  // With several threads a wait says nothing about what the rank does next.
  bool in_order() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return threads_.size() == 1;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
  std::set<std::thread::id> threads_;
};

// A group as all its ranks know it. `ranks`: those of the processes that share the store `waits`.
struct Group {
  std::string key, name;
  std::vector<int> ranks;
  c10::intrusive_ptr<c10d::Store> waits;

  std::string text() const {
    std::ostringstream out;
    out << "group " << name << " (ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) out << (i ? ", " : "") << ranks[i];
    out << ")";
    return out.str();
  }
};

// What a waiting rank posts.
struct WaitRecord {
  std::string call;  // operator and group, for people
  std::string group;
  int64_t exchange = 0;
  std::vector<int> ranks;
  std::map<std::string, int64_t> counts;

  bool waits_for(int rank, const WaitRecord& its) const {
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) return false;
    const auto found = its.counts.find(group);
    return found == its.counts.end() || found->second < exchange;
  }

  std::string written() const {
    std::ostringstream out;
    out << call << '\n' << group << ' ' << exchange << ' ' << ranks.size();
    for (int rank : ranks) out << ' ' << rank;
    for (const auto& [name, count] : counts) out << ' ' << name << ' ' << count;
    return out.str();
  }

  static WaitRecord read(const std::string& text) {
    WaitRecord record;
    std::istringstream in(text);
    size_t size = 0;
    std::getline(in, record.call);
    in >> record.group >> record.exchange >> size;
    record.ranks.resize(size);
    for (int& rank : record.ranks) in >> rank;
    TORCH_CHECK(in, "hccl: not a record of a waiting rank: ", text);
    std::string name;
    for (int64_t count = 0; in >> name >> count;) record.counts[name] = count;
    return record;
  }
};

// One rank's wait in one exchange.
class Wait {
 public:
  Wait(const Group& group, int rank) : group_(group), me_(group.ranks.at(rank)), exchange_(Entered::get().enter(group.key)) {}
  Wait(const Wait&) = delete;

  // Waits for `work`, and fails if it cannot complete because ranks wait for each other. `call`
  // says what this rank calls.
  void until_done(c10d::Work& work, const std::function<std::string()>& call) {
    while (!done(work)) {
      if (!Entered::get().in_order()) continue;
      std::string cycle;
      try {
        cycle = look(call);
      } catch (const c10::DistError&) {
        work.wait();  // the store ended with its rank: gloo has the error to report
        return;
      }
      // The record stays: it remains true, and the other ranks need it.
      TORCH_CHECK(cycle.empty(), "hccl: ranks wait for each other in different groups: ", cycle);
    }
    if (posted_) withdraw();
  }

 private:
  // Whether the work is done, after kPoll at most. A wait that timed out can be repeated.
  static bool done(c10d::Work& work) {
    try {
      return work.wait(kPoll);
    } catch (const std::exception&) {
      if (!work.isCompleted()) return false;
    }
    return work.wait();  // done meanwhile, or failed with its own error
  }

  static std::string key(int rank) { return std::to_string(rank); }

  // Posts this rank's record, and returns a cycle of waiting ranks that it can see, in words.
  std::string look(const std::function<std::string()>& call) {
    if (!posted_) {
      mine_ = {call() + " in " + group_.text(), group_.key, exchange_, group_.ranks, Entered::get().counts()};
      // A connection of its own: another thread may block the other one.
      store_ = group_.waits->clone();
      store_->set(key(me_), mine_.written());
      posted_ = true;
    }
    std::map<int, WaitRecord> records{{me_, mine_}};
    std::vector<int> path{me_};
    std::set<int> seen{me_};
    return follow(records, path, seen);
  }

  // Depth first along the waits from the end of `path`.
  std::string follow(std::map<int, WaitRecord>& records, std::vector<int>& path, std::set<int>& seen) {
    const WaitRecord& from = records.at(path.back());
    for (int rank : from.ranks) {
      if (rank == path.back() || (records.count(rank) == 0 && !fetch(rank, records)) || !from.waits_for(rank, records.at(rank))) continue;
      const auto on_path = std::find(path.begin(), path.end(), rank);
      if (on_path != path.end()) return named(records, {on_path, path.end()});
      if (!seen.insert(rank).second) continue;
      path.push_back(rank);
      const std::string found = follow(records, path, seen);
      if (!found.empty()) return found;
      path.pop_back();
    }
    return "";
  }

  bool fetch(int rank, std::map<int, WaitRecord>& records) {
    if (!store_->check({key(rank)})) return false;
    const std::string text = store_->get_to_str(key(rank));
    if (text == kWithdrawn) return false;
    records[rank] = WaitRecord::read(text);
    return true;
  }

  static std::string named(const std::map<int, WaitRecord>& records, std::vector<int> cycle) {
    std::rotate(cycle.begin(), std::min_element(cycle.begin(), cycle.end()), cycle.end());
    std::ostringstream out;
    for (size_t i = 0; i < cycle.size(); ++i) out << (i ? ", " : "") << "rank " << cycle[i] << " calls " << records.at(cycle[i]).call;
    return out.str();
  }

  // Not deleted: a rank that has seen the key would wait for it.
  void withdraw() {
    try {
      store_->set(key(me_), kWithdrawn);
    } catch (const c10::DistError&) {  // the store ended with its rank: nobody reads the record
    }
  }

  static constexpr const char* kWithdrawn = "-";
  const Group& group_;
  int me_;
  int64_t exchange_;
  WaitRecord mine_;
  bool posted_ = false;
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace emulated_npu
