// Operators: the CPU's own, queued on tensors over the same memory.
//
// What an operator returns is worked out ahead, on meta tensors, or on zeros where there is no meta kernel. Operators whose result's
// size or value the host needs make it wait, as on any device.

#include "generator.h"
#include "operators.h"

#include <torch/library.h>

#include <cstring>

namespace pretend {
namespace {

at::Tensor copy_of(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
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

// A copy from pageable memory is staged: a small one at once, of a larger one each part when the stream has come to the one before.
void wait_for_pageable(const at::Tensor& source) {
  constexpr size_t kStaged = size_t{64} << 10;
  if (source.nbytes() > kStaged)
    synchronize_stream(current_stream(), "copy from pageable memory");
  else
    count_host_wait("copy from pageable memory");
}

void check_arguments(const c10::OperatorHandle& handle, const Stack& arguments) {
  const bool indexes = handle.schema().name().find("index") != std::string::npos;
  for (auto& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || is_ours(tensor) || tensor.dim() == 0) return;
      TORCH_CHECK(indexes && tensor.device().is_cpu(), "Expected all tensors to be on the same device, but ", handle.schema().name(),
                  " was given one on ", tensor.device(), " beside others on ", the_device());
      wait_for_pageable(tensor);  // indices on the host
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
    Mapped to_meta{[](const at::Tensor& tensor) { return is_ours(tensor) ? on_meta(tensor) : tensor; }, {}};
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
  at::Generator drawn, from;  // as it is before the operator draws from it, and the generator itself
  Stack meta;
  bool is_dynamic = false;
  if (random) {
    from = generator_of(arguments);
    drawn = from.clone();
    auto other = drawn.clone();
    AsDefault scope(is_recorded(current_stream()) ? other : from);  // a capture draws nothing: each replay does
    meta = metadata(op, true, is_dynamic);
  } else {
    meta = metadata(op, on_zeros, is_dynamic);
  }
  if (is_dynamic) {
    wait_and_run(op, stack);
    return;
  }

  Stack outputs;
  for (size_t index = 0; index < meta.size(); ++index) outputs.push_back(op.returned(index, meta[index]));

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
  auto drawing = [handle, queued, targets, name](const at::Generator& drawn) {
    return Entry{"op", name, [handle, queued, targets, drawn] {
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
                 }, nullptr, nullptr};
  };
  auto entry = drawing(drawn);
  if (random && is_recorded(current_stream()))
    entry.again = [drawing, handle, queued, from]() mutable {
      auto now = from.clone();
      AsDefault scope(from);
      Mapped zeros{[](const at::Tensor& tensor) { return at::zeros_like(tensor); }, {}};
      call(handle, replaced(queued, zeros, c10::Device(at::kCPU)));
      return drawing(now);
    };
  enqueue(current_stream(), std::move(entry));
}

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  run_late(handle, stack, false);
}

void fallback_on_zeros(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  run_late(handle, stack, true);
}

// ---- copies ----

void queue_copy(const at::Tensor& target, const at::Tensor& source, const char* name) {
  enqueue(current_stream(), {"copy", name, [target, source] {
                               const_cast<at::Tensor&>(target).copy_(source);
                               return true;
                             }, nullptr, nullptr});
}

}  // namespace

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
    if (non_blocking) wait_for_pageable(source);
    queue_copy(on_host(target), source.clone(), "from the host");
    if (!non_blocking) synchronize_stream(current_stream(), "copy to the device");
  } else {
    const bool pinned = is_pinned(target.storage().data());
    queue_copy(target, on_host(source), "to the host");
    if (!(pinned && non_blocking)) synchronize_stream(current_stream(), non_blocking ? "copy to pageable memory" : "copy to the host");
  }
  return target;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // These have a composite kernel, which would compute in another order than the CPU's own, and meta kernels after other devices.
  for (auto* name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
                     "native_batch_norm", "native_batch_norm_backward", "_log_softmax", "_softmax", "native_dropout",
                     "native_dropout_backward", "embedding_dense_backward", "linalg_vector_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback_on_zeros>());
}

}  // namespace pretend
