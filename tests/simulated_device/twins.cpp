// Tensors over the readable arena, on Meta, and new ones on the device.
#include "tensors.h"

#include <ATen/EmptyTensor.h>

namespace sim {
namespace {

size_t bytes_spanned(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::detail::computeStorageNbytes(
      size, stride, tensor.dtype().itemsize(), tensor.storage_offset());
}

}  // namespace

c10::Storage Twins::storage_of(const at::Tensor& tensor) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(impl);
  if (found != storages_.end()) {
    return found->second;
  }
  const bool cpu = type_ == c10::DeviceType::CPU;
  void* data = cpu ? host(impl->data()) : nullptr;
  c10::Storage made(
      c10::Storage::use_byte_size_t(), impl->nbytes(), c10::DataPtr(data, c10::Device(type_)),
      cpu ? nullptr : c10::GetAllocator(type_), !cpu);
  storages_.emplace(impl, made);
  return made;
}

at::Tensor Twins::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided, "sim has strided tensors only, not ", tensor.layout());
  const auto key =
      type_ == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  auto twin = at::detail::make_tensor<c10::TensorImpl>(
      storage_of(tensor), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = twin.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  if (tensor.is_conj()) {
    impl->_set_conj(true);
  }
  if (tensor.is_neg()) {
    impl->_set_neg(true);
  }
  return twin;
}

at::Tensor host_view(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_privateuseone(), "a tensor on sim is expected, not on ", tensor.device());
  return Twins(c10::DeviceType::CPU).of(tensor);
}

at::Tensor empty_like_this(const at::Tensor& shape, DeviceIndex device) {
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(
      shape.sizes(), shape.strides(), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type());
}

void resize(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const size_t bytes = bytes_spanned(tensor, size, stride);
  if (bytes > tensor.storage().nbytes()) {
    resize_bytes(tensor.storage(), bytes);
  }
  impl->set_sizes_and_strides(size, stride);
}

void upload(at::Tensor source, const at::Tensor& target) {
  if (target.numel() == 0) {
    return;
  }
  current_queue(target.device().index())
      .push("copy to the device", [source = std::move(source), view = host_view(target)] {
        view.copy_(source);
      });
}

}  // namespace sim
