// Operators: the CPU's own, queued on tensors over the same memory.
//
// What an operator returns is worked out ahead, on meta tensors, or on zeros where there is no meta kernel. Operators whose result's
// size or value the host needs make it wait, as on any device.

#include "device.h"
#include "generator.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace pretend {
namespace {

using c10::IValue;
using Stack = std::vector<IValue>;
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The CPU's view of a device tensor, without a reference to its memory.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_of(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

// One tensor is mapped to one tensor, however often it occurs.
struct Mapped {
  TensorMap map;
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

IValue replaced(const IValue& value, Mapped& map, c10::Device device) {
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

Stack replaced(const Stack& values, Mapped& map, c10::Device device) {
  Stack result;
  for (auto& value : values) result.push_back(replaced(value, map, device));
  return result;
}

void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) visit(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector())
      if (each) visit(*each);
  }
}

// The generator an operator draws from: as the argument says, or the device's.
at::Generator& generator_of(const Stack& arguments) {
  for (auto& value : arguments)
    if (value.isGenerator()) return at::check_generator<Generator>(value.toGenerator())->host;
  return at::check_generator<Generator>(default_generator())->host;
}

// Lets the CPU's default generator be `generator` in a scope, for operators that take none.
struct AsDefault {
  explicit AsDefault(at::Generator& generator) : used(generator), host(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> guard(host.mutex());
    before = host.get_state();
    host.set_state(used.get_state());
  }
  ~AsDefault() {
    std::lock_guard<std::mutex> guard(host.mutex());
    used.set_state(host.get_state());
    host.set_state(before);
  }
  at::Generator& used;
  at::Generator host;
  at::Tensor before;
};

void without_generators(Stack& arguments) {
  for (auto& value : arguments)
    if (value.isGenerator()) value = IValue();
}

at::Tensor device_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(the_device()));
}

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
};

Stack call(const c10::OperatorHandle& handle, Stack stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  handle.callBoxed(&stack);
  return stack;
}

void check_arguments(const c10::OperatorHandle& handle, const Stack& arguments) {
  const bool indexes = handle.schema().name().find("index") != std::string::npos;
  for (auto& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || is_ours(tensor) || tensor.dim() == 0) return;
      TORCH_CHECK(indexes && tensor.device().is_cpu(), "Expected all tensors to be on the same device, but ", handle.schema().name(),
                  " was given one on ", tensor.device(), " beside others on ", the_device());
      count_host_wait("copy from pageable memory");  // indices on the host
    });
  }
}

// The results' sizes, strides and dtypes, on meta or on the CPU.
Stack metadata(const Operator& op, bool on_zeros, bool& is_dynamic) {
  const bool may_be_dynamic = op.handle.hasTag(at::Tag::dynamic_output_shape) || op.handle.hasTag(at::Tag::data_dependent_output);
  is_dynamic = false;
  if (op.returns_values()) {
    is_dynamic = true;
    return {};
  }
  if (!on_zeros) {
    Mapped to_meta{[](const at::Tensor& tensor) {
      if (!is_ours(tensor)) return tensor;
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    }, {}};
    auto stack = replaced(op.arguments, to_meta, c10::Device(at::kMeta));
    without_generators(stack);
    try {
      return call(op.handle, std::move(stack));
    } catch (...) {
      if (may_be_dynamic) {
        is_dynamic = true;
        return {};
      }
    }
  }
  Mapped to_zeros{[](const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    auto zeros = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    if (zeros.storage().nbytes() > 0) std::memset(zeros.storage().mutable_data(), 0, zeros.storage().nbytes());
    return zeros;
  }, {}};
  auto stack = replaced(op.arguments, to_zeros, c10::Device(at::kCPU));
  without_generators(stack);
  return call(op.handle, std::move(stack));
}

// What is returned: arguments written in place, views of arguments, or new device tensors.
IValue returned(const Operator& op, size_t index, const IValue& meta) {
  const int source = op.source(index);
  if (source >= 0) {
    auto& argument = op.arguments[source];
    const bool writes = op.schema.returns()[index].alias_info()->isWrite();
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

void copy_results(const Stack& results, const std::vector<Stack>& targets) {
  for (size_t index = 0; index < targets.size(); ++index) {
    if (targets[index].empty()) continue;  // written in place
    size_t number = 0;
    for_each_tensor(results[index], [&](const at::Tensor& result) {
      auto target = targets[index][number++].toTensor();
      if (result.defined() && target.defined() && target.numel() > 0) target.copy_(result);
    });
  }
}

void wait_and_run(const Operator& op, torch::jit::Stack* stack) {
  synchronize_stream(current_stream(), op.schema.name().c_str());
  Mapped to_host{[](const at::Tensor& tensor) { return is_ours(tensor) ? on_host(tensor) : tensor; }, {}};
  auto results = call(op.handle, replaced(op.arguments, to_host, c10::Device(at::kCPU)));
  Mapped to_device{[](const at::Tensor& tensor) {
    auto target = device_like(tensor);
    auto alias = on_host(target);
    auto source = tensor.clone();
    enqueue(current_stream(), {"copy", "result", [alias, source] {
                                 alias.copy_(source);
                                 return true;
                               }, nullptr, nullptr});
    return target;
  }, {}};
  const auto num_arguments = op.arguments.size();
  Stack outputs;
  for (size_t index = 0; index < results.size(); ++index) {
    const int source = op.source(index);
    outputs.push_back(source >= 0 ? op.arguments[source] : replaced(results[index], to_device, the_device()));
  }
  torch::jit::drop(*stack, num_arguments);
  for (auto& output : outputs) stack->push_back(output);
}

// on_zeros: the meta kernel says what another device returns
void run_late(const c10::OperatorHandle& handle, torch::jit::Stack* stack, bool on_zeros) {
  const auto& schema = handle.schema();
  const auto num_arguments = schema.arguments().size();
  const Stack arguments(stack->end() - num_arguments, stack->end());
  const Operator op{handle, schema, arguments};
  check_arguments(handle, arguments);

  const bool random = handle.hasTag(at::Tag::nondeterministic_seeded);
  at::Generator drawn;  // as it is before the operator draws from it
  Stack meta;
  bool is_dynamic = false;
  if (random) {
    auto& generator = generator_of(arguments);
    drawn = generator.clone();
    AsDefault scope(generator);
    meta = metadata(op, true, is_dynamic);
  } else {
    meta = metadata(op, on_zeros, is_dynamic);
  }
  if (is_dynamic) {
    wait_and_run(op, stack);
    return;
  }

  Stack outputs;
  for (size_t index = 0; index < meta.size(); ++index) outputs.push_back(returned(op, index, meta[index]));

  Mapped to_host{[](const at::Tensor& tensor) { return is_ours(tensor) ? on_host(tensor) : copy_of(tensor); }, {}};
  auto queued = replaced(arguments, to_host, c10::Device(at::kCPU));
  without_generators(queued);
  bool only_views = !outputs.empty();
  std::vector<Stack> targets(outputs.size());  // of results that the CPU's operator makes anew
  for (size_t index = 0; index < outputs.size(); ++index) {
    const int source = op.source(index);
    if (source < 0) for_each_tensor(outputs[index], [&](const at::Tensor& each) { targets[index].push_back(to_host(each)); });
    only_views = only_views && source >= 0 && !schema.returns()[index].alias_info()->isWrite();
  }
  torch::jit::drop(*stack, num_arguments);
  for (auto& output : outputs) stack->push_back(output);
  if (only_views) return;

  auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  enqueue(current_stream(), {"op", name, [handle, queued, targets, drawn] {
                               Stack results;
                               if (drawn.defined()) {
                                 auto generator = drawn.clone();
                                 AsDefault scope(generator);
                                 results = call(handle, queued);
                               } else {
                                 results = call(handle, queued);
                               }
                               copy_results(results, targets);
                               return true;
                             }, nullptr, nullptr});
}

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  run_late(handle, stack, false);
}

void fallback_on_zeros(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  run_late(handle, stack, true);
}

// ---- memory and views ----

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void make_room(const at::Tensor& self) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  const auto needed =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.dtype().itemsize(), self.storage_offset());
  if (needed > storage->nbytes()) resize_storage(storage, needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  make_room(self);
  return self;
}

at::Tensor& set_view(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  make_room(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto numel = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_view(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_view(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  use_on_stream(self.storage().data_ptr(), stream.id());
}

// ---- copies ----

void queue_copy(const at::Tensor& target, const at::Tensor& source, const char* name) {
  enqueue(current_stream(), {"copy", name, [target, source] {
                               const_cast<at::Tensor&>(target).copy_(source);
                               return true;
                             }, nullptr, nullptr});
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (is_ours(source) && is_ours(target)) {
    queue_copy(on_host(target), on_host(source), "on the device");
  } else if (is_ours(target)) {
    TORCH_CHECK(source.device().is_cpu(), "pretend device: copy from ", source.device());
    const bool pinned = is_pinned(source.storage().data());
    if (pinned && non_blocking) {
      queue_copy(on_host(target), source, "from pinned memory");  // reads it when it runs
      return target;
    }
    queue_copy(on_host(target), source.clone(), "from the host");
    if (!non_blocking) {
      synchronize_stream(current_stream(), "copy to the device");
    } else {
      count_host_wait("copy from pageable memory");
    }
  } else {
    const bool pinned = is_pinned(target.storage().data());
    queue_copy(target, on_host(source), "to the host");
    if (!(pinned && non_blocking)) synchronize_stream(current_stream(), non_blocking ? "copy to pageable memory" : "copy to the host");
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, std::optional<int64_t>)>(
                           &at::native::as_strided_tensorimpl));
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef, at::IntArrayRef)>(&at::native::_reshape_alias));
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_view);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  // These have a composite kernel, which would compute in another order than the CPU's own, and meta kernels after other devices.
  for (auto* name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
                     "native_batch_norm", "native_batch_norm_backward", "_log_softmax", "_softmax", "native_dropout",
                     "native_dropout_backward", "embedding_dense_backward", "linalg_vector_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback_on_zeros>());
}

}  // namespace pretend
