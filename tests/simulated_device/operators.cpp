// Operators that are not run by the CPU's kernels: new tensors, views, copies, convolution.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using c10::IntArrayRef;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// The device on which to make a tensor becomes the current one.
class OnDevice {
 public:
  OnDevice(std::optional<c10::Device> device, std::optional<c10::Layout> layout,
           std::optional<bool> pin_memory)
      : scope_(device.has_value() ? device->index() : DeviceIndex(-1)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        layout.value_or(c10::kStrided) == c10::kStrided, "sim has strided tensors only, not ",
        *layout);
    TORCH_CHECK(!pin_memory.value_or(false), "only memory of the CPU can be pinned");
  }

 private:
  DeviceScope scope_;
};

Tensor empty(
    IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  OnDevice guard(device, layout, pin_memory);
  return at::detail::empty_generic(
      size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  OnDevice guard(device, layout, pin_memory);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), kKeys, c10::dtype_or_default(dtype));
}

std::vector<int64_t> dense_strides(IntArrayRef size, c10::MemoryFormat format) {
  if (format == c10::MemoryFormat::ChannelsLast) {
    return c10::get_channels_last_strides_2d(size);
  }
  if (format == c10::MemoryFormat::ChannelsLast3d) {
    return c10::get_channels_last_strides_3d(size);
  }
  std::vector<int64_t> strides(size.size());
  int64_t stride = 1;
  for (size_t dim = size.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(size[dim], 1);
  }
  return strides;
}

const Tensor& resize_(
    const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != size || format.has_value()) {
    const auto wanted = format.value_or(c10::MemoryFormat::Contiguous);
    resize(self, size, dense_strides(size, wanted));
  }
  return self;
}

Tensor& set_storage_offset_(
    Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  const auto dense = dense_strides(size, c10::MemoryFormat::Contiguous);
  resize(self, size, stride.size() == size.size() ? stride : IntArrayRef(dense));
  return self;
}

Tensor& set_storage_(Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset_(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor_(Tensor& self, const Tensor& source) {
  return set_storage_offset_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_(Tensor& self) {
  OnDevice guard(self.device(), std::nullopt, std::nullopt);
  return set_tensor_(
      self, at::detail::empty_generic({0}, allocator(), kKeys, self.scalar_type(), std::nullopt));
}

void count_copy(const char* direction, const Tensor& tensor) {
  count(std::string("copies\t") + direction);
  count(std::string("bytes\t") + direction, static_cast<int64_t>(tensor.nbytes()));
}

// The host's memory without the tensor, which Python may hold and change meanwhile.
Tensor same_memory(const Tensor& tensor) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    impl->_set_conj(true);
  }
  if (tensor.is_neg()) {
    impl->_set_neg(true);
  }
  return alias;
}

bool pinned(const Tensor& tensor) {
  return is_pinned(tensor.storage().data());
}

// Whether bytes are copied as they lie, as CUDA's copies do without a temporary on either side.
bool as_they_lie(const Tensor& source, const Tensor& target) {
  return source.dtype() == target.dtype() &&
      ((source.is_contiguous() && target.is_contiguous()) ||
       (source.strides() == target.strides() && source.is_non_overlapping_and_dense()));
}

void copy_to_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  count_copy("to the device", target);
  const bool itself = as_they_lie(source, target) ||
      (source.is_contiguous() && source.dtype() == target.dtype());  // rearranged on the device
  const bool later = non_blocking && pinned(source) && itself;
  upload(later ? same_memory(source) : source.clone(), target);
  if (!non_blocking) {
    wait_for_queue(current_queue(target.device().index()), "copy to the device", "");
  }
}

void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  count_copy("to the host", source);
  Queue& queue = current_queue(source.device().index());
  queue.push("copy to the host", [from = host_view(source), to = same_memory(target)] {
    to.copy_(from);
  });
  const bool itself = as_they_lie(source, target) || target.is_contiguous();
  if (!non_blocking || !pinned(target) || !itself) {
    wait_for_queue(queue, "copy to the host", "");
  }
}

void copy_on_devices(const Tensor& source, const Tensor& target) {
  count("launches");
  Queue& from = current_queue(source.device().index());
  Queue& to = current_queue(target.device().index());
  if (&from != &to) {
    from.wait_for(to.mark());
  }
  from.push("copy", [view = host_view(source), out = host_view(target)] { out.copy_(view); });
  if (&from != &to) {
    to.wait_for(from.mark());
  }
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  const Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  if (!source.is_privateuseone()) {
    copy_to_device(source, target, non_blocking);
  } else if (!target.is_privateuseone()) {
    copy_to_host(source, target, non_blocking);
  } else {
    copy_on_devices(source, target);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  wait_for_queue(current_queue(self.device().index()), "item", "");
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

void record_stream_(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

std::tuple<Tensor, Tensor> native_dropout(
    const Tensor& input, double p, std::optional<bool> train) {
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0.0) {
    return {input.clone(), mask.fill_(true)};
  }
  mask.bernoulli_(1.0 - p);
  return {input.mul(mask).mul(p == 1.0 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

// Without the shortcuts of tensors that are known to be zero.
Tensor zeros(
    IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  return empty(size, dtype, layout, device, pin_memory, std::nullopt).zero_();
}

const c10::OperatorHandle& operator_named(const char* name) {
  static std::unordered_map<std::string, c10::OperatorHandle> known;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(name);
  if (found == known.end()) {
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    found = known.emplace(name, handle).first;
  }
  return found->second;
}

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch(op, operator_named("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto weight = torch::jit::peek(*stack, 2, 10).toTensor();
  const bool transposed = torch::jit::peek(*stack, 6, 10).toBool();
  const int64_t groups = torch::jit::peek(*stack, 8, 10).toInt();
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  c10::IValue bias_sizes(std::vector<int64_t>{channels});
  stack->insert(stack->end() - 7, std::move(bias_sizes));  // after grad_output, input and weight
  launch(op, operator_named("aten::convolution_backward"), stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros);
  m.impl("resize_", resize_);
  m.impl("set_", set_);
  m.impl("set_.source_Tensor", set_tensor_);
  m.impl("set_.source_Storage", set_storage_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream_);
  m.impl("native_dropout", native_dropout);
  m.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// The copy itself conjugates and negates, as the CPU's does.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace sim
