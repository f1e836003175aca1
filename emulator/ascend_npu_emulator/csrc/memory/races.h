// The last accesses to the bytes of a block, by stream, and their proven order (vector clocks).
//
// A Region is exact for the layouts that occur in practice: contiguous bytes, or rows of a fixed
// pitch of which each holds one contiguous run. Anything more scattered is taken as its hull.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace emulated_npu {

// Component s: number of operators of the stream with slot s that are known to have completed.
struct Clock {
  std::vector<uint64_t> at;
  uint64_t get(int slot) const { return static_cast<size_t>(slot) < at.size() ? at[slot] : 0; }
  void set(int slot, uint64_t value) {
    if (at.size() <= static_cast<size_t>(slot)) at.resize(slot + 1, 0);
    at[slot] = value;
  }
  void join(const Clock& other) {
    if (at.size() < other.at.size()) at.resize(other.at.size(), 0);
    for (size_t i = 0; i < other.at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

struct Region {
  int64_t low = 0, high = 0;  // hull, bytes from the start of the block
  int64_t pitch = 0, run = 0;  // pitch 0: every byte of the hull; else runs of `run` bytes at low, low + pitch, ...
  bool empty() const { return low >= high; }
};

inline bool run_meets(const Region& rows, int64_t low, int64_t high) {
  if (high - low >= rows.pitch) return true;
  const int64_t phase = ((low - rows.low) % rows.pitch + rows.pitch) % rows.pitch;
  return phase < rows.run || low + (rows.pitch - phase) < high;
}

inline bool overlap(const Region& a, const Region& b) {
  const int64_t low = std::max(a.low, b.low), high = std::min(a.high, b.high);
  if (low >= high) return false;
  if (a.pitch == 0 && b.pitch == 0) return true;
  if (a.pitch != 0 && b.pitch == 0) return run_meets(a, low, high);
  if (a.pitch == 0) return run_meets(b, low, high);
  if (a.pitch != b.pitch) return true;
  const int64_t shift = ((b.low - a.low) % a.pitch + a.pitch) % a.pitch;
  return shift < a.run || shift + b.run > a.pitch;
}

inline bool covers(const Region& outer, const Region& inner) {
  if (outer.pitch != 0)
    return outer.pitch == inner.pitch && outer.low == inner.low && outer.high >= inner.high && outer.run >= inner.run;
  return outer.low <= inner.low && outer.high >= inner.high;
}

inline Region region_of(const at::Tensor& t) {
  Region r;
  const int64_t item = static_cast<int64_t>(t.dtype().itemsize());
  r.low = t.storage_offset() * item;
  if (t.numel() == 0) return r;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride in bytes, size)
  int64_t span = item;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 1 || t.stride(d) == 0) continue;
    dims.emplace_back(t.stride(d) * item, t.size(d));
    span += (t.size(d) - 1) * t.stride(d) * item;
  }
  r.high = r.low + span;
  std::sort(dims.begin(), dims.end());
  int64_t run = item;
  size_t d = 0;
  for (; d < dims.size() && dims[d].first <= run; ++d) run = std::max(run, run + (dims[d].second - 1) * dims[d].first);
  if (d == dims.size()) return r;
  const int64_t pitch = dims[d].first;
  if (std::all_of(dims.begin() + d, dims.end(), [&](const auto& dim) { return dim.first % pitch == 0; })) {
    r.pitch = pitch;
    r.run = run;
  }
  return r;
}

// A copy of the name that lives as long as the process.
inline const std::string* intern(const std::string& name) {
  static auto* mutex = new std::mutex();
  static auto* names = new std::unordered_set<std::string>();
  std::lock_guard<std::mutex> lock(*mutex);
  return &*names->insert(name).first;
}

struct Access {
  Region region;
  int slot = 0;
  uint64_t epoch = 0;
  const std::string* op = nullptr;  // interned
  bool write = false;
};

// Recent accesses to one block. The oldest are dropped first: a race may be missed, never invented.
struct AccessLog {
  static constexpr size_t kLimit = 64;
  std::vector<Access> accesses;

  // The first earlier access that conflicts with this one and is not in `seen`, or nullptr.
  const Access* conflict(const Region& region, bool write, int slot, const Clock& seen) const {
    for (const Access& a : accesses)
      if ((write || a.write) && a.slot != slot && a.epoch > seen.get(a.slot) && overlap(a.region, region)) return &a;
    return nullptr;
  }

  void add(const Region& region, bool write, int slot, uint64_t epoch, const std::string* op) {
    // A checked write is ordered after all it covers; a read replaces the same stream's earlier
    // reads.
    accesses.erase(
        std::remove_if(
            accesses.begin(), accesses.end(),
            [&](const Access& a) { return (write || (!a.write && a.slot == slot)) && covers(region, a.region); }),
        accesses.end());
    if (accesses.size() >= kLimit) accesses.erase(accesses.begin());
    accesses.push_back({region, slot, epoch, op, write});
  }
};

}  // namespace emulated_npu
