// Zero-copy conversion: an npu tensor as a CPU tensor over the same bytes, and back.
#pragma once

#include <ATen/EmptyTensor.h>

#include "streams/hazards.h"

namespace emulated_npu {

// A CPU storage over the same bytes. It keeps the bytes alive, not the block, so that the device
// memory can be freed (and accounted as free) while queued work still uses the bytes.
inline c10::Storage cpu_storage(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr& data = impl->_mutable_data_ptr_no_checks();
  const std::shared_ptr<Memory> memory = memory_of(data);
  TORCH_CHECK(
      memory == nullptr || data.get_deleter() != &drop_weak || !memory->freed,
      "NPU memory was freed, and is used through a weak reference (torch_npu._C._weak_ref_tensor)");
  c10::DataPtr alias = memory == nullptr
      ? c10::DataPtr(data.get(), c10::Device(c10::kCPU))
      : c10::DataPtr(data.get(), new std::shared_ptr<Memory>(memory), &drop_memory, c10::Device(c10::kCPU));
  return c10::Storage(
      c10::Storage::use_byte_size_t(), impl->nbytes(), std::move(alias), c10::GetAllocator(c10::kCPU), /*resizable=*/true);
}

// An npu storage that takes over the bytes a CPU kernel made.
inline c10::Storage npu_storage(const c10::Storage& cpu, int device) {
  const size_t bytes = cpu.nbytes();
  c10::DataPtr data(nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kNpu, static_cast<c10::DeviceIndex>(device)));
  if (bytes != 0) {
    auto memory = std::make_shared<Memory>();
    memory->ptr = cpu.unsafeGetStorageImpl()->mutable_data();
    memory->bytes = bytes;
    memory->adopted = cpu;
    data = new_block(device, bytes, std::move(memory));
  }
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), &npu_allocator(), /*resizable=*/true);
}

inline at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

// Resizes an npu storage in place and keeps its bytes; all its tensors see the new one.
inline void resize_storage(c10::StorageImpl* impl, size_t bytes) {
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  const int device = impl->device().index();
  c10::DataPtr fresh(nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(kNpu, static_cast<c10::DeviceIndex>(device)));
  if (bytes != 0) {
    fresh = new_block(device, bytes, nullptr);
    if (impl->nbytes() != 0) std::memcpy(fresh.get(), impl->data(), std::min(bytes, impl->nbytes()));
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

// One operator call's tensors in both labels.
class Relabel {
 public:
  explicit Relabel(int device) : device_(device) {}

  at::Tensor to_cpu(const at::Tensor& t) {
    if (!t.defined() || t.device().type() != kNpu) return t;
    for (const Pair& p : pairs_)
      if (p.npu.is_same(t)) return p.cpu;
    c10::StorageImpl* impl = t.storage().unsafeGetStorageImpl();
    const c10::Storage* alias = nullptr;
    for (const auto& s : storages_)
      if (s.first.unsafeGetStorageImpl() == impl) alias = &s.second;
    if (alias == nullptr) {
      storages_.emplace_back(t.storage(), cpu_storage(t.storage()));
      alias = &storages_.back().second;
    }
    pairs_.push_back({t, over(*alias, c10::DispatchKey::CPU, t), alias->unsafeGetStorageImpl()->data(), t.storage().nbytes()});
    return pairs_.back().cpu;
  }

  // Applies a kernel's changes of its arguments: resized or swapped storages, sizes, strides.
  void write_back() {
    for (size_t i = 0; i < storages_.size(); ++i) {
      const c10::Storage npu = storages_[i].first, cpu = storages_[i].second;
      if (cpu.data() == npu.data() && cpu.nbytes() == npu.nbytes()) continue;
      if (cpu.nbytes() == 0) {
        resize_storage(npu.unsafeGetStorageImpl(), 0);
        continue;
      }
      c10::StorageImpl* impl = npu.unsafeGetStorageImpl();
      c10::Storage grown = npu_storage(cpu, device_);
      impl->set_data_ptr_noswap(std::move(grown.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      impl->set_nbytes(cpu.nbytes());
    }
    for (const Pair& p : pairs_) {
      c10::TensorImpl* impl = p.npu.unsafeGetTensorImpl();
      const c10::Storage home = find_or_adopt(p.cpu.storage());
      if (home.unsafeGetStorageImpl() != p.npu.storage().unsafeGetStorageImpl()) impl->set_storage_keep_dtype(home);
      if (!p.cpu.sizes().equals(p.npu.sizes()) || !p.cpu.strides().equals(p.npu.strides()) ||
          p.cpu.storage_offset() != p.npu.storage_offset())
        impl->set_sizes_and_strides(p.cpu.sizes(), p.cpu.strides(), p.cpu.storage_offset());
    }
  }

  // A result: an argument itself, a view of one, or new bytes.
  at::Tensor to_npu(const at::Tensor& t) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (const Pair& p : pairs_)
      if (p.cpu.is_same(t)) return p.npu;
    return over(find_or_adopt(t.storage()), c10::DispatchKey::PrivateUse1, t);
  }

 private:
  struct Pair {
    at::Tensor npu, cpu;
    const void* data;
    size_t bytes;
  };

  c10::Storage find_or_adopt(const c10::Storage& cpu) {
    for (const auto& s : storages_)
      if (s.second.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return s.first;
    storages_.emplace_back(npu_storage(cpu, device_), cpu);
    return storages_.back().first;
  }

  int device_;
  std::vector<Pair> pairs_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // (npu, cpu)
};

}  // namespace emulated_npu
