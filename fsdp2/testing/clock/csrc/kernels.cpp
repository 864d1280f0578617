// Operators: what they would return is worked out on meta tensors, what they touch is written down, nothing is computed.

#include "log.h"
#include "../../pretend/csrc/generator.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <unordered_map>

namespace pretend {
namespace {

using c10::IValue;
using Stack = std::vector<IValue>;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
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

// Arguments with each device tensor replaced, the same one always by the same.
struct Replacer {
  std::function<at::Tensor(const at::Tensor&)> map;
  c10::Device device;
  std::unordered_map<c10::TensorImpl*, at::Tensor> known;

  at::Tensor one(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    auto& found = known[tensor.unsafeGetTensorImpl()];
    if (!found.defined()) found = map(tensor);
    return found;
  }
  IValue value(const IValue& value) {
    if (value.isTensor()) return one(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(one(each));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector()) list.push_back(each ? std::optional(one(*each)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) return device;
    if (value.isGenerator()) return IValue();
    return value;
  }
  Stack all(const Stack& values) {
    Stack result;
    for (auto& each : values) result.push_back(value(each));
    return result;
  }
};

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// Zeros, without a reference to anything.
at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor device_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(the_device()));
}

// For each result, the argument that it is (in-place and out), or of which it is a view; -1 if it is new.
int source_of(const c10::FunctionSchema& schema, size_t result) {
  auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return -1;
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    auto* other = schema.arguments()[index].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return int(index);
  }
  return -1;
}

bool returns_values(const c10::FunctionSchema& schema) {
  for (auto& each : schema.returns()) {
    auto kind = each.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType && kind != c10::TypeKind::OptionalType) return true;
  }
  return false;
}

Seen seen(const at::Tensor& tensor, int roles) {
  int64_t numel = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) != 0 || tensor.size(dim) == 0) numel *= tensor.size(dim);
  return {roles, c10::toString(tensor.scalar_type()), numel * int64_t(tensor.element_size()), tensor.sizes().vec()};
}

IValue returned(const c10::FunctionSchema& schema, const Stack& arguments, size_t index, const IValue& meta) {
  const int source = source_of(schema, index);
  if (source >= 0) {
    auto& argument = arguments[source];
    const bool writes = schema.returns()[index].alias_info()->isWrite();
    if (writes || !argument.isTensor()) {
      if (argument.isTensor() && meta.toTensor().sizes() != argument.toTensor().sizes())
        argument.toTensor().resize_(meta.toTensor().sizes());
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

// The host needs the result: it waits, and is told of zeros.
void wait_and_answer(const c10::OperatorHandle& handle, const Stack& arguments, torch::jit::Stack* stack) {
  synchronize_stream(current_stream(), handle.schema().name().c_str());
  Stack results = Replacer{on_host, c10::Device(at::kCPU), {}}.all(arguments);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    handle.callBoxed(&results);
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& each : results) {
    TORCH_CHECK(!each.isTensor() && !each.isTensorList(), "clock device: ", handle.schema().name(), " returns as much as its values say");
    stack->push_back(each);
  }
}

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  InDevice in;
  const auto& schema = handle.schema();
  const auto num_arguments = schema.arguments().size();
  const Stack arguments(stack->end() - num_arguments, stack->end());
  if (returns_values(schema)) return wait_and_answer(handle, arguments, stack);

  Stack meta = Replacer{on_meta, c10::Device(at::kMeta), {}}.all(arguments);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    handle.callBoxed(&meta);
  }
  Record record;
  record.kind = "op";
  record.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  bool only_views = !meta.empty();
  Stack outputs;
  for (size_t index = 0; index < meta.size(); ++index) {
    outputs.push_back(returned(schema, arguments, index, meta[index]));
    const int source = source_of(schema, index);
    only_views = only_views && source >= 0 && !schema.returns()[index].alias_info()->isWrite();
    if (source < 0) for_each_tensor(outputs[index], [&](auto& each) {
      if (is_ours(each)) record.tensors.push_back(seen(each, 2));
    });
  }
  for (size_t index = 0; index < num_arguments; ++index) {
    auto& argument = schema.arguments()[index];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const int roles = written ? (argument.is_out() ? 2 : 3) : 1;
    for_each_tensor(arguments[index], [&](auto& each) {
      if (is_ours(each)) record.tensors.push_back(seen(each, roles));
      else if (each.defined() && each.dim() > 0) append({"host waits for stream", "copy of " + record.name + "'s argument", current_stream()});
    });
  }
  torch::jit::drop(*stack, num_arguments);
  for (auto& output : outputs) stack->push_back(output);
  if (only_views) return;
  record.stream = current_stream();
  append(std::move(record));
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

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  InDevice in;
  const auto stream = current_stream();
  auto reads = seen(source, 1), writes = seen(target, 2);
  if (is_ours(source) && is_ours(target)) {
    append({"copy", "on the device", stream, 0, 0, reads.nbytes + writes.nbytes, {reads, writes}});
    return target;
  }
  const bool to_device = is_ours(target);
  auto& on_cpu = to_device ? source : target;
  const bool pinned = is_pinned(on_cpu.storage().data());
  append({"copy", to_device ? "from the host" : "to the host", stream, 0, pinned ? 1 : 0, writes.nbytes, {reads, writes}});
  if (!to_device && !pinned && on_cpu.is_contiguous()) std::memset(on_cpu.data_ptr(), 0, on_cpu.nbytes());
  if (!(pinned && non_blocking)) synchronize_stream(stream, to_device ? "copy to the device" : "copy to the host");
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
  // One kernel on a GPU, several where a device has none of its own.
  std::set<std::string> fused{"native_layer_norm", "native_layer_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax",
                              "_softmax_backward_data", "embedding_dense_backward", "linalg_vector_norm", "_chunk_cat", "_chunk_cat.out",
                              "split_with_sizes_copy.out", "_fused_rms_norm", "_fused_rms_norm_backward",
                              "silu_backward", "silu_backward.grad_input", "native_dropout", "native_dropout_backward"};
  for (auto& each : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_foreach = each.name.rfind("aten::_foreach_", 0) == 0;
    const auto name = each.name.substr(6) + (each.overload_name.empty() ? "" : "." + each.overload_name);
    if (each.name.rfind("aten::", 0) == 0 && (is_foreach || fused.count(name)))
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// A copy resolves these bits, as on a GPU; torch's own way would be a copy again, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace pretend
