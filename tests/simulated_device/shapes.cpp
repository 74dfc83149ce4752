// Shapes of an operator's results, from its kernel for Meta; kept, for many of those are Python.
#include "tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr size_t kMost = 20000;  // calls that are remembered

// All of a call that its result's shape can depend on, as bytes.
class Key {
 public:
  Key(const c10::OperatorHandle& op, const Stack& arguments) {
    text(c10::toString(op.operator_name()));
    number(static_cast<int64_t>(c10::get_default_dtype_as_scalartype()));
    for (const IValue& value : arguments) {
      add(value);
    }
  }
  bool known() const {
    return known_;
  }
  const std::string& bytes() const {
    return bytes_;
  }

 private:
  void number(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    bytes_ += value;
  }

  template <class List>
  void numbers(const List& values) {
    number(static_cast<int64_t>(values.size()));
    for (int64_t value : values) {
      number(value);
    }
  }

  void real(double value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void tensor(const Tensor& tensor) {
    number(tensor.defined());
    if (!tensor.defined()) {
      return;
    }
    const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    known_ &= tensor.is_privateuseone() || wrapped;
    number(wrapped);
    number(static_cast<int64_t>(tensor.scalar_type()));
    number(tensor.is_conj() + 2 * tensor.is_neg());
    numbers(tensor.sizes());
    numbers(tensor.strides());
    number(tensor.storage_offset());
    const auto storage = storages_.emplace(
        tensor.storage().unsafeGetStorageImpl(), static_cast<int64_t>(storages_.size()));
    number(storage.first->second);
    number(static_cast<int64_t>(tensor.storage().nbytes()));
  }

  void add(const IValue& value) {
    text(value.tagKind());
    if (value.isTensor()) {
      tensor(value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorVector();
      number(static_cast<int64_t>(list.size()));
      for (const Tensor& element : list) {
        tensor(element);
      }
    } else if (value.isOptionalTensorList()) {
      const auto list = value.toOptionalTensorVector();
      number(static_cast<int64_t>(list.size()));
      for (const auto& element : list) {
        tensor(element.value_or(Tensor()));
      }
    } else if (value.isInt()) {
      number(value.toInt());
    } else if (value.isBool()) {
      number(value.toBool());
    } else if (value.isDouble()) {
      real(value.toDouble());
    } else if (value.isIntList()) {
      numbers(value.toIntVector());
    } else if (value.isBoolList()) {
      numbers(value.toBoolList());
    } else if (value.isDoubleList()) {
      const auto list = value.toDoubleVector();
      number(static_cast<int64_t>(list.size()));
      for (double element : list) {
        real(element);
      }
    } else if (value.isString()) {
      text(value.toStringRef());
    } else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) {
      known_ = false;
    }
  }

  std::string bytes_;
  bool known_ = true;
  std::unordered_map<const void*, int64_t> storages_;
};

std::shared_ptr<const Shapes> on_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& wanted = op.schema().arguments();
  Twins twins(c10::DeviceType::Meta);
  auto shapes = std::make_shared<Shapes>();
  Stack& stack = shapes->results;
  stack = map_tensors(arguments, [&](const Tensor& tensor) { return twins.of(tensor); });
  for (size_t i = 0; i < stack.size(); ++i) {
    if (stack[i].isDevice()) {
      stack[i] = c10::Device(c10::DeviceType::Meta);
    } else if (stack[i].isGenerator() || wanted[i].name() == "pin_memory") {
      stack[i] = IValue();
    }
    if (wanted[i].is_out()) {
      shapes->outs.push_back(stack[i]);
    }
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Silence silence;
  op.callBoxed(stack);
  return shapes;
}

std::mutex mutex;
std::unordered_map<std::string, std::shared_ptr<const Shapes>>& kept() {
  static auto* all = new std::unordered_map<std::string, std::shared_ptr<const Shapes>>;
  return *all;
}

}  // namespace

std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const Stack& arguments) {
  const Key key(op, arguments);
  if (key.known()) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = kept().find(key.bytes());
    if (found != kept().end()) {
      return found->second;
    }
  }
  std::shared_ptr<const Shapes> shapes;
  try {
    shapes = on_meta(op, arguments);
  } catch (const std::exception&) {
    return nullptr;
  }
  if (key.known()) {
    std::lock_guard<std::mutex> lock(mutex);
    if (kept().size() >= kMost) {
      kept().clear();
    }
    kept().emplace(key.bytes(), shapes);
  }
  return shapes;
}

}  // namespace sim
