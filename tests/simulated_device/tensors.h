// Tensors of the simulated accelerator as the operators' files share them.
#pragma once

#include "sim.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <unordered_map>

namespace sim {

// The same tensors on another device: on the CPU over the readable arena, owning nothing and
// waiting for nothing, or on Meta. Tensors that share a storage share it there too.
class Twins {
 public:
  explicit Twins(c10::DeviceType type) : type_(type) {}
  at::Tensor of(const at::Tensor& tensor);

 private:
  c10::Storage storage_of(const at::Tensor& tensor);
  const c10::DeviceType type_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

at::Tensor host_view(const at::Tensor& tensor);
at::Tensor empty_like_this(const at::Tensor& shape, DeviceIndex device);  // sizes, strides, type
void resize(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride);
void upload(at::Tensor source, const at::Tensor& target);  // in the order of the current stream

uint64_t draw_seed(const at::Generator& generator);
at::Generator generator_of(DeviceIndex device);

// A value, or values, with every tensor in them replaced.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    return f(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(f(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor.has_value() ? std::make_optional(f(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

template <class F>
torch::jit::Stack map_tensors(const torch::jit::Stack& values, F&& f) {
  torch::jit::Stack mapped;
  mapped.reserve(values.size());
  for (const c10::IValue& value : values) {
    mapped.push_back(map_tensors(value, f));
  }
  return mapped;
}

// Shapes of an operator's results and of its out arguments, as tensors on Meta; null if its kernel
// for Meta fails or is missing, and the CPU's must find out.
struct Shapes {
  torch::jit::Stack results;
  torch::jit::Stack outs;
};
std::shared_ptr<const Shapes> shapes_of(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

// Runs an operator: its result's shape from Meta, its numbers later on the CPU. `named` is the
// operator that was called, `run` the one whose kernels do the work.
void launch(
    const c10::OperatorHandle& named, const c10::OperatorHandle& run, torch::jit::Stack* stack);
std::vector<std::string> synchronous_operators();

}  // namespace sim
