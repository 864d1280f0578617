// Operators: what they would return is worked out on meta tensors, what they touch is written down, nothing is computed.

#include "log.h"
#include "../../fsdp2/testing/pretend/csrc/operators.h"

#include <torch/library.h>

#include <cstring>
#include <set>

namespace pretend {
namespace {

Seen seen(const at::Tensor& tensor, int roles) {
  int64_t numel = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) != 0 || tensor.size(dim) == 0) numel *= tensor.size(dim);
  return {roles, c10::toString(tensor.scalar_type()), numel * int64_t(tensor.element_size()), tensor.sizes().vec()};
}

// The host needs the result: it waits, and is told of zeros.
void wait_and_answer(const Operator& op, torch::jit::Stack* stack) {
  synchronize_stream(current_stream(), op.schema.name().c_str());
  Mapped to_zeros{[](const at::Tensor& tensor) { return is_ours(tensor) ? on_host(tensor) : tensor; }, {}};
  auto arguments = replaced(op.arguments, to_zeros, c10::Device(at::kCPU));
  without_generators(arguments);
  const auto results = call(op.handle, std::move(arguments));
  torch::jit::drop(*stack, op.arguments.size());
  for (auto& each : results) {
    TORCH_CHECK(!each.isTensor() && !each.isTensorList(), "clock device: ", op.schema.name(), " returns as much as its values say");
    stack->push_back(each);
  }
}

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  InDevice in;
  const auto& schema = handle.schema();
  const auto num_arguments = schema.arguments().size();
  const Stack arguments(stack->end() - num_arguments, stack->end());
  const Operator op{handle, schema, arguments};
  if (op.returns_values()) return wait_and_answer(op, stack);

  Mapped to_meta{[](const at::Tensor& tensor) { return is_ours(tensor) ? on_meta(tensor) : tensor; }, {}};
  auto asked = replaced(arguments, to_meta, c10::Device(at::kMeta));
  without_generators(asked);
  const auto meta = call(handle, std::move(asked));
  Record record;
  record.kind = "op";
  record.name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  bool only_views = !meta.empty();
  Stack outputs;
  for (size_t index = 0; index < meta.size(); ++index) {
    outputs.push_back(op.returned(index, meta[index]));
    const int source = op.source(index);
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

}  // namespace

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

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
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

}  // namespace pretend
