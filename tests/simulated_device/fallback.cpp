// Every other operator: the shape of its result from Meta at once, its numbers later on the CPU.
//
// What is queued owns no memory of the device, as a kernel of a GPU does not: a tensor that is
// freed while another stream still uses it reads as NaN there.
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <cstring>
#include <set>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

template <class F>
void each_tensor(const Stack& values, F&& f) {
  map_tensors(values, [&](const Tensor& tensor) {
    if (tensor.defined()) {
      f(tensor);
    }
    return tensor;
  });
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

std::mutex synchronous_mutex;
std::set<std::string> synchronous;

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& named, const c10::OperatorHandle& run, Stack* stack)
      : name_(toString(named.operator_name())), op_(run), schema_(run.schema()), stack_(stack) {
    const size_t inputs = schema_.arguments().size();
    arguments_.assign(stack->end() - inputs, stack->end());
    stack->erase(stack->end() - inputs, stack->end());
    TORCH_CHECK_NOT_IMPLEMENTED(
        run.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "operator ", name_,
        " is not implemented for sim: it has no kernel for the CPU");
    find_device();
    move_indices();
    check_devices();
    make_generators();
  }

  void execute() {
    DeviceScope scope(device_);
    if (depends_on_data()) {
      run_now("operator");
    } else if (const auto shapes = shapes_of(op_, arguments_)) {
      resize_outs(shapes->outs);
      run_later(shapes->results);
    } else if (changes_arguments_only()) {
      run_later({});
    } else {
      run_now("no shape on Meta");
      std::lock_guard<std::mutex> lock(synchronous_mutex);
      synchronous.insert(name_);
    }
  }

 private:
  const c10::Argument& argument(size_t i) const {
    return schema_.arguments()[i];
  }

  void find_device() {
    each_tensor(arguments_, [&](const Tensor& tensor) {
      if (device_ < 0 && tensor.is_privateuseone()) {
        device_ = tensor.device().index();
      }
    });
    for (const IValue& value : arguments_) {
      if (device_ < 0 && value.isDevice()) {
        device_ = value.toDevice().index();
      }
    }
    device_ = device_ < 0 ? current_device() : device_;
  }

  // Indices may lie on the CPU, as they may for a GPU.
  void move_indices() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].isOptionalTensorList()) {
        arguments_[i] = map_tensors(arguments_[i], [&](const Tensor& tensor) {
          return tensor.defined() && tensor.is_cpu() ? tensor.to(as_device(device_)) : tensor;
        });
      }
    }
  }

  void check_devices() {
    each_tensor(arguments_, [&](const Tensor& tensor) {
      const bool number = tensor.is_cpu() && tensor.dim() == 0;
      TORCH_CHECK(
          number || tensor.device() == as_device(device_),
          "Expected all tensors to be on the same device, but found at least two devices, sim:",
          int(device_), " and ", tensor.device(), "! (operator ", name_, ")");
    });
  }

  void make_generators() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!is_generator(argument(i))) {
        continue;
      }
      const IValue& given = arguments_[i];
      generator_at_ = static_cast<int>(i);
      generator_ = at::detail::createCPUGenerator(
          given.isNone() ? draw_seed(device_) : draw_seed(given.toGenerator()));
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        generator_at_ >= 0 || !op_.hasTag(at::Tag::nondeterministic_seeded) ||
            name_.find("scaled_dot_product") != std::string::npos,
        "operator ", name_, " draws random numbers without a generator: not possible on sim");
  }

  bool depends_on_data() const {
    if (name_.rfind("aten::index.Tensor", 0) == 0 || name_ == "aten::_index_put_impl_") {
      bool masked = false;
      each_tensor({arguments_[1]}, [&](const Tensor& index) {
        masked |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      });
      return masked;
    }
    return op_.hasTag(at::Tag::dynamic_output_shape) ||
        op_.hasTag(at::Tag::data_dependent_output);
  }

  bool changes_arguments_only() const {
    bool only = true;
    for (const auto& returned : schema_.returns()) {
      only &= returned.alias_info() != nullptr && returned.alias_info()->isWrite();
    }
    for (const auto& argument : schema_.arguments()) {
      only &= !argument.is_out();
    }
    return only;
  }

  void resize_outs(const Stack& metas) {
    size_t next = 0;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (argument(i).is_out()) {
        const IValue& meta = metas[next++];
        if (meta.isTensor() && meta.toTensor().sizes() != arguments_[i].toTensor().sizes()) {
          resize(arguments_[i].toTensor(), meta.toTensor().sizes(), meta.toTensor().strides());
        }
      }
    }
  }

  Stack on_host() {
    Twins twins(c10::DeviceType::CPU);
    Stack mapped = map_tensors(arguments_, [&](const Tensor& tensor) {
      const bool number = tensor.defined() && tensor.is_cpu() &&
          !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return number ? tensor.clone() : twins.of(tensor);
    });
    for (size_t i = 0; i < mapped.size(); ++i) {
      if (mapped[i].isDevice()) {
        mapped[i] = c10::Device(c10::DeviceType::CPU);
      } else if (static_cast<int>(i) == generator_at_) {
        mapped[i] = generator_;
      }
    }
    return mapped;
  }

  // The argument that a returned value is, or -1 for a new tensor.
  int returned_argument(size_t i) const {
    const auto* alias = schema_.returns()[i].alias_info();
    if (alias == nullptr) {
      return -1;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), "view ", name_, " is not implemented for sim");
    for (size_t a = 0; a < arguments_.size(); ++a) {
      const auto* other = argument(a).alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        return static_cast<int>(a);
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, "no argument of ", name_, " is its result ", i);
  }

  void run_later(const Stack& metas) {
    std::vector<Tensor> outputs;  // over the host's arena; undefined where none is wanted
    std::vector<size_t> wanted;   // which results go into them
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const int same = returned_argument(i);
      if (same >= 0) {
        stack_->push_back(arguments_[same]);
        continue;
      }
      wanted.push_back(i);
      stack_->push_back(map_tensors(metas[i], [&](const Tensor& meta) {
        if (!meta.defined()) {
          outputs.emplace_back();
          return Tensor();
        }
        Tensor made = empty_like_this(meta, device_);
        outputs.push_back(host_view(made));
        return made;
      }));
      if (metas[i].isNone()) {
        stack_->back() = Tensor();
        outputs.emplace_back();
      }
    }
    count("launches");
    current_queue(device_).push(
        name_, [op = op_, arguments = on_host(), outputs = std::move(outputs), wanted]() mutable {
          op.callBoxed(arguments);
          store(arguments, wanted, outputs);
        });
  }

  static void store(
      const Stack& results, const std::vector<size_t>& wanted, const std::vector<Tensor>& outputs) {
    size_t next = 0;
    for (size_t i : wanted) {
      const IValue& value = results[i];
      if (value.isNone()) {
        ++next;
      }
      map_tensors(value, [&](const Tensor& result) {
        const Tensor& output = outputs.at(next++);
        const bool left_out = !result.defined() || result.numel() == 0;  // it stays NaN
        if (output.defined() && !left_out) {
          TORCH_CHECK(
              output.sizes() == result.sizes(), "result ", i, " has size ", result.sizes(),
              " on the CPU and ", output.sizes(), " on Meta");
          copy(result, output);
        }
        return result;
      });
    }
  }

  static void copy(const Tensor& from, const Tensor& to) {
    if (from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() &&
        !from.is_conj() && !from.is_neg()) {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    } else {
      to.copy_(from);
    }
  }

  // The host waits, for the result's shape or value depends on the numbers.
  void run_now(const char* kind) {
    wait_for_queue(current_queue(device_), kind, name_);
    Stack results = on_host();
    std::vector<size_t> outs;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (argument(i).is_out()) {
        outs.push_back(i);
        results[i] = Tensor(at::detail::empty_cpu({0}, results[i].toTensor().scalar_type()));
      }
    }
    const Stack given = results;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.callBoxed(results);
    }
    for (size_t i : outs) {
      const Tensor& made = given[i].toTensor();
      resize(arguments_[i].toTensor(), made.sizes(), made.strides());
      upload(made, arguments_[i].toTensor());
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const int same = returned_argument(i);
      stack_->push_back(same >= 0 ? arguments_[same] : map_tensors(results[i], [&](auto& t) {
        return uploaded(t);
      }));
    }
  }

  Tensor uploaded(const Tensor& result) const {
    if (!result.defined()) {
      return result;
    }
    Tensor made = empty_like_this(result, device_);
    upload(result.numel() > 0 && in_host_arena(result.const_data_ptr()) ? result.clone() : result,
           made);
    return made;
  }

  const std::string name_;
  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* const stack_;
  Stack arguments_;
  DeviceIndex device_ = -1;
  int generator_at_ = -1;
  at::Generator generator_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  launch(op, op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

void launch(const c10::OperatorHandle& named, const c10::OperatorHandle& run, Stack* stack) {
  Call(named, run, stack).execute();
}

std::vector<std::string> synchronous_operators() {
  std::lock_guard<std::mutex> lock(synchronous_mutex);
  return {synchronous.begin(), synchronous.end()};
}

}  // namespace sim
