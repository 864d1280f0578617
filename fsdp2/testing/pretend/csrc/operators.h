// What operators take and return, for whoever stands in for them: which tensors are the device's, and what a result is made of.

#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>

#include <functional>
#include <unordered_map>
#include <vector>

namespace pretend {

using c10::IValue;
using Stack = std::vector<IValue>;

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The CPU's view of a device tensor, without a reference to its memory.
inline at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

inline at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

inline at::Tensor device_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(the_device()));
}

template <typename Visit>
void for_each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) visit(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector())
      if (each) visit(*each);
  }
}

// One tensor is mapped to one tensor, however often it occurs.
struct Mapped {
  std::function<at::Tensor(const at::Tensor&)> map;
  std::unordered_map<c10::TensorImpl*, at::Tensor> known;

  at::Tensor operator()(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto found = known.find(tensor.unsafeGetTensorImpl());
    if (found != known.end()) return found->second;
    auto made = map(tensor);
    known.emplace(tensor.unsafeGetTensorImpl(), made);
    return made;
  }
};

inline IValue replaced(const IValue& value, Mapped& map, c10::Device device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(map(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector()) list.push_back(each ? std::optional(map(*each)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) return device;
  return value;
}

inline Stack replaced(const Stack& values, Mapped& map, c10::Device device) {
  Stack result;
  for (auto& value : values) result.push_back(replaced(value, map, device));
  return result;
}

inline void without_generators(Stack& arguments) {
  for (auto& value : arguments)
    if (value.isGenerator()) value = IValue();
}

inline Stack call(const c10::OperatorHandle& handle, Stack stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  handle.callBoxed(&stack);
  return stack;
}

// A call of an operator.
struct Operator {
  const c10::OperatorHandle& handle;
  const c10::FunctionSchema& schema;
  const Stack& arguments;

  // For each result, the argument that it is (in-place and out), or of which it is a view; -1 if it is new.
  int source(size_t result) const {
    auto* alias = schema.returns()[result].alias_info();
    if (alias == nullptr) return -1;
    for (size_t index = 0; index < arguments.size(); ++index) {
      auto* other = schema.arguments()[index].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return int(index);
    }
    return -1;
  }
  bool returns_values() const {
    for (auto& each : schema.returns()) {
      auto kind = each.type()->kind();
      const bool tensors = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType || kind == c10::TypeKind::OptionalType;
      if (!tensors) return true;
    }
    return false;
  }
  // What is returned: arguments written in place, views of arguments, or new device tensors.
  IValue returned(size_t index, const IValue& meta) const {
    const int argument_index = source(index);
    if (argument_index >= 0) {
      auto& argument = arguments[argument_index];
      const bool writes = schema.returns()[index].alias_info()->isWrite();
      if (writes || !argument.isTensor()) {
        if (argument.isTensor() && meta.toTensor().sizes() != argument.toTensor().sizes())
          argument.toTensor().resize_(meta.toTensor().sizes());  // an output of the wrong size
        return argument;
      }
      const auto base = argument.toTensor();
      const auto view = meta.toTensor();
      return at::native::as_strided_tensorimpl(base, view.sizes(), view.strides(), base.storage_offset() + view.storage_offset());
    }
    if (meta.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : meta.toTensorVector()) list.push_back(each.defined() ? device_like(each) : each);
      return list;
    }
    if (!meta.isTensor() || !meta.toTensor().defined()) return meta;
    return device_like(meta.toTensor());
  }
};

// ---- of each device (kernels.cpp) ----

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

}  // namespace pretend
