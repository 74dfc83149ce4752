// Autocast: PyTorch's lists of operators, applied to their arguments on the stack.
#include <ATen/autocast_mode.h>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

template <class F>
void change_tensors(const c10::OperatorHandle& op, Stack* stack, F&& f) {
  const size_t count = op.schema().arguments().size();
  for (auto value = stack->end() - count; value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = f(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> changed;
      for (const Tensor& tensor : value->toTensorVector()) {
        changed.push_back(f(tensor));
      }
      *value = changed;
    }
  }
}

void call_without_autocast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  op.callBoxed(stack);
}

void cast_all(const c10::OperatorHandle& op, Stack* stack, at::ScalarType type) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  change_tensors(op, stack, [type](const Tensor& tensor) {
    return at::autocast::cached_cast(type, tensor, kDevice);
  });
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, Stack* stack) {
  cast_all(op, stack, at::autocast::get_autocast_dtype(kDevice));
}

void single_precision(const c10::OperatorHandle& op, Stack* stack) {
  cast_all(op, stack, at::kFloat);
}

// A result type of float32, if the first argument is eligible and none was given.
void single_precision_result(const c10::OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->end() - arguments.size();
  if (first->isTensor() && at::autocast::is_eligible(first->toTensor(), kDevice)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "dtype" && (first + i)->isNone()) {
        *(first + i) = IValue(static_cast<int64_t>(at::kFloat));
      }
    }
  }
  call_without_autocast(op, stack);
}

void widest(const c10::OperatorHandle& op, Stack* stack) {
  auto type = at::autocast::get_autocast_dtype(kDevice);
  change_tensors(op, stack, [&type](const Tensor& tensor) {
    type = at::autocast::prioritize(type, tensor, kDevice);
    return tensor;
  });
  cast_all(op, stack, type);
}

void refused(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK(
      false, "binary_cross_entropy is unsafe to autocast: use binary_cross_entropy_with_logits");
}

#define SIM_NAME1(OP) #OP
#define SIM_NAME2(OP, OVERLOAD) #OP "." #OVERLOAD
#define SIM_PICK(_1, _2, NAME, ...) NAME
#define SIM_NAME(...) SIM_PICK(__VA_ARGS__, SIM_NAME2, SIM_NAME1)(__VA_ARGS__)
#define SIM_LOWER(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
#define SIM_SINGLE(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&single_precision>());
#define SIM_RESULT(...)          \
  m.impl(                        \
      SIM_NAME(__VA_ARGS__),     \
      torch::CppFunction::makeFromBoxedFunction<&single_precision_result>());
#define SIM_WIDEST(...) \
  m.impl(SIM_NAME(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&widest>());

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_RESULT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
  SIM_SINGLE(norm, Scalar)
  SIM_SINGLE(norm, ScalarOpt_dim)
  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refused>());
}

}  // namespace
}  // namespace sim
