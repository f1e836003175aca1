// What torch asks of an accelerator: device guard, hooks, generators.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory/pinned.h"
#include "relabel.h"
#include "streams/events.h"

namespace emulated_npu {

// A generator of an npu: a seed and an offset, as in Philox. A random operator draws from (seed,
// offset) and advances the offset, so resetting the offset repeats the draw: vllm-ascend does so
// for a token whose sample it discards (model_runner_v1.py:2666). Numbers differ from hardware's;
// the steps of the offset do not.
class NpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit NpuGenerator(int device)
      : c10::GeneratorImpl(
            c10::Device(kNpu, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  // The host generator for one operator.
  at::Generator draw() {
    const uint64_t stream = mixed(seed_ ^ mixed(offset_ + 1));
    offset_ += kStep;
    return at::make_generator<at::CPUGeneratorImpl>(stream);
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4, not ", offset);
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof(State), "RNG state has ", state.numel(), " bytes; a state of an npu has ", sizeof(State));
    State read;
    std::memcpy(&read, state.data(), sizeof(read));
    seed_ = read.seed;
    set_offset(read.offset);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const State state{seed_, offset_};
    at::Tensor bytes = at::detail::empty_cpu({static_cast<int64_t>(sizeof(state))}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &state, sizeof(state));
    return bytes.getIntrusivePtr();
  }
  static c10::DeviceType device_type() { return kNpu; }

 private:
  struct State {
    uint64_t seed, offset;
  };
  // torch_npu asks for 10 numbers per element and operator and rounds up to a multiple of 4
  // (NPUGeneratorImpl::philox_engine_inputs).
  static constexpr uint64_t kStep = 12;
  static uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline const at::Generator& default_generator_handle(int device) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> v;
    for (int d = 0; d < kMaxDevices; ++d) v.push_back(at::make_generator<NpuGenerator>(d));
    return v;
  }());
  return all->at(device);
}

// The host generator for an operator on a device that was called with the given npu generator.
inline at::Generator draw_from(const at::Generator& g, int device, const std::string& op) {
  auto* npu = dynamic_cast<NpuGenerator*>(g.unsafeGetGeneratorImpl());
  TORCH_CHECK(npu != nullptr, op, ": Expected a 'npu' device type for generator but found '", g.device().type(), "'");
  TORCH_CHECK(
      g.device().index() == device, op, ": Expected a generator of npu:", device, " but found one of ", g.device().str());
  return npu->draw();
}

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNpu;
  c10::DeviceType type() const override { return kNpu; }
  static int index(c10::Device d) { return d.has_index() ? d.index() : current_device(); }
  static StreamState& state(const c10::Stream& s) { return Engine::get().stream(s.device_index(), s.id()); }
  static c10::Stream handle(const StreamState& s) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, static_cast<c10::DeviceIndex>(s.device)), s.id);
  }

  c10::Device getDevice() const override { return {kNpu, current_device()}; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    if (d.has_index() && d.index() != before.index()) set_device(d.index(), "a device guard");
    return before;
  }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) set_device(d.index(), "a device guard");
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) return_to_device(d.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device d) const override {
    use_device("current_stream");
    return handle(current_stream(index(d)));
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    use_device("default_stream");
    return handle(Engine::get().stream(index(d), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    use_device("a new stream");
    check_device(index(d));
    return handle(Engine::get().new_stream(index(d)));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const int device = s.device_index();
    c10::Stream before = getStream(s.device());
    current_stream_ids().at(device) = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override {
    OnDevice on(s.device_index(), "Stream.query");
    return Engine::get().query(state(s));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    OnDevice on(s.device_index(), "Stream.synchronize");
    const Waiter waiter;
    Engine::get().synchronize(state(s));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    const int before = current_device();
    set_device(d, "synchronize");
    Engine::get().synchronize_device(d);
    set_device(before, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override { npu_allocator().recordStream(data, s); }

  // Record and wait set the device that was current before; they do not only restore it
  // (NPUGuardImpl.cpp:141-187).
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    const int before = current_device();
    set_device(s.device_index(), "Event.record");
    if (*event == nullptr) {
      auto* fresh = new EventState();
      fresh->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = fresh;
    }
    Engine::get().record(*static_cast<EventState*>(*event), state(s));
    set_device(before, "Event.record");
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event == nullptr) return;
    const int before = current_device();
    set_device(s.device_index(), "Event.wait");
    Engine::get().wait(state(s), *static_cast<EventState*>(event));
    set_device(before, "Event.wait");
  }
  bool queryEvent(void* event) const override { return event == nullptr || Engine::get().query(*static_cast<EventState*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Waiter waiter;
    Engine::get().synchronize(*static_cast<EventState*>(event));
  }
  // A task of the event's queue. As there, an error of an earlier task is lost here.
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) return;
    auto* dropped = static_cast<EventState*>(event);
    try {
      use_device("dropping an event");
      TaskQueue::of(device).enter("destroy_event", [&] { return event_task(*dropped->mark); });
    } catch (const std::exception&) {
      // NPUEvent.cpp:68 does so
    }
    delete dropped;
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto* a = static_cast<EventState*>(first);
    const auto* b = static_cast<EventState*>(second);
    TORCH_CHECK(a != nullptr && b != nullptr, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(a->timing && b->timing, "Both events must be created with argument 'enable_timing=True'.");
    for (int d = 0; d < device_count(); ++d) TaskQueue::of(d).report();
    const int64_t from = *a->mark->reached, to = *b->mark->reached;
    TORCH_CHECK(from != 0 && to != 0, "Both events must be completed before calculating elapsed time.");
    return static_cast<double>(to - from) / 1e6;
  }
};

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override { create_context(); }
  bool hasPrimaryContext(c10::DeviceIndex d) const override { return Contexts::get().has(d); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d, "set_device"); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const c10::DeviceIndex before = current_device();
    if (d >= 0) setCurrentDevice(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    const c10::DeviceIndex before = current_device();
    if (d >= 0 && d != before) return_to_device(d);
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    const int device = d < 0 ? current_device() : d;
    check_device(device);
    return default_generator_handle(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<NpuGenerator>(d < 0 ? current_device() : d);
  }
  at::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the emulated NPU has no device pointers of its own");
  }
  bool isPinnedPtr(const void* ptr) const override { return pinned_block(ptr) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace emulated_npu
