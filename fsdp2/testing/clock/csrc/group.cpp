// A process group of which this process plays one rank, and of which nothing is sent.

#include "log.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

namespace pretend {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

int64_t nbytes_of(const Tensors& tensors) {
  int64_t total = 0;
  for (auto& each : tensors) total += int64_t(each.nbytes());
  return total;
}

// Its buffers live until somebody has waited; its wait orders the current stream.
struct StreamWork final : Work {
  StreamWork(TicketPtr ticket, Tensors buffers) : ticket(std::move(ticket)), buffers(std::move(buffers)) {}
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    pretend::wait(current_stream(), ticket);
    buffers.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override {
    synchronize();
  }
  TicketPtr ticket;
  Tensors buffers;
};

struct Group final : c10d::Backend {
  Group(int rank, int size, int64_t number) : c10d::Backend(rank, size), number(number), internal_stream(new_stream(0)) {}

  const std::string getBackendName() const override {
    return "clock";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return 0;
  }
  void startCoalescing() override {
    TORCH_CHECK(!coalescing, "clock process group: coalescing inside coalescing");
    coalescing = true;
    batch_size = batch_nbytes = 0;
  }
  WorkPtr endCoalescing() override {
    coalescing = false;
    if (batch_size == 0) return nullptr;
    return launch(batch_kind, batch_size, batch_nbytes, std::move(batch_buffers), batch_is_async);
  }

  WorkPtr launch(const std::string& kind, int64_t count, int64_t nbytes, Tensors buffers, bool async_op) {
    InDevice in;
    if (coalescing) {
      batch_kind = kind;
      batch_size += count;
      batch_nbytes += nbytes;
      batch_is_async = async_op;
      for (auto& each : buffers) batch_buffers.push_back(std::move(each));
      return c10::make_intrusive<StreamWork>(nullptr, Tensors{});
    }
    auto stream = current_stream();
    if (async_op) {
      pretend::wait(internal_stream, pretend::record(stream));
      stream = internal_stream;
    }
    append({"collective", kind, stream, number, count, nbytes});
    auto ticket = pretend::record(stream);
    return c10::make_intrusive<StreamWork>(ticket, async_op ? std::move(buffers) : Tensors{});
  }
  WorkPtr start(const char* kind, const Tensors& outputs, const Tensors& inputs, bool async_op) {
    Tensors buffers = outputs;
    buffers.insert(buffers.end(), inputs.begin(), inputs.end());
    return launch(kind, int64_t(inputs.size()), std::max(nbytes_of(inputs), nbytes_of(outputs)), std::move(buffers), async_op);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    return start("all_gather", {output}, {input}, o.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return start("all_gather", outputs, inputs, o.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    Tensors all;
    for (auto& list : outputs) all.insert(all.end(), list.begin(), list.end());
    return start("all_gather", all, inputs, o.asyncOp);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& o) override {
    return start("reduce_scatter", {output}, {input}, o.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& o) override {
    return start("reduce_scatter", outputs, inputs, o.asyncOp);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return start("all_reduce", tensors, tensors, o.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return start("all_reduce", tensors, tensors, o.asyncOp);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return start("broadcast", tensors, tensors, o.asyncOp);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions& o) override {
    return start("all_to_all", {output}, {input}, o.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto work = launch("all_reduce", 1, 4, {}, false);
    synchronize_device("barrier");
    return work;
  }

  int64_t number;
  c10::StreamId internal_stream;
  bool coalescing = false, batch_is_async = true;
  std::string batch_kind;
  int64_t batch_size = 0, batch_nbytes = 0;
  Tensors batch_buffers;
};

}  // namespace

void bind(pybind11::module& m) {
  m.def("make_group", [](int rank, int size, int64_t number) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(rank, size, number));
  });
}

}  // namespace pretend
