// What process groups for streams have in common: how torch's calls become launches, coalescing, and what there is to wait for.

#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <string>
#include <utility>
#include <vector>

namespace pretend {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// One collective as it was asked for, on device tensors. kind: a gather into a list has an output for each rank and input.
// root: the rank from which data come, or of "send" and "recv" the other one.
// sends, receives: bytes to and from each rank, of an all-to-all of unequal parts.
struct Call {
  std::string kind;
  Tensors outputs, inputs;
  ReduceOp op = ReduceOp::SUM;
  int64_t root = -1;
  std::vector<int64_t> sends, receives;
};

// Its buffers live until somebody has waited; its wait orders the current stream.
struct StreamWork final : c10d::Work {
  StreamWork(TicketPtr ticket, Tensors buffers) : ticket(std::move(ticket)), buffers(std::move(buffers)) {}
  bool isCompleted() override {
    return !ticket || ticket->done;
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

struct StreamGroup : c10d::Backend {
  StreamGroup(int rank, int size) : c10d::Backend(rank, size), internal_stream(new_stream(0)) {}

  // Gives one collective, or several that were coalesced, to `stream`. Returns: what is done behind it.
  virtual TicketPtr launch(std::vector<Call> calls, c10::StreamId stream) = 0;

  bool supportsCoalescing() const override {
    return true;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return uint64_t(issued);
  }
  void startCoalescing() override {
    TORCH_CHECK(!coalescing, getBackendName(), " process group: coalescing inside coalescing");
    coalescing = true;
    batch.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing = false;
    if (batch.empty()) return nullptr;
    return issue(std::exchange(batch, {}), batch_is_async);
  }

  WorkPtr start(const char* kind, const Tensors& outputs, const Tensors& inputs, bool async_op, ReduceOp op = ReduceOp::SUM,
                int64_t root = -1) {
    return start(Call{kind, outputs, inputs, op, root, {}, {}}, async_op);
  }
  WorkPtr start(Call call, bool async_op) {
    if (!coalescing) return issue({std::move(call)}, async_op);
    batch_is_async = async_op;
    batch.push_back(std::move(call));
    return c10::make_intrusive<StreamWork>(nullptr, Tensors{});  // as with NCCL, only the end of coalescing gives something to wait for
  }
  WorkPtr issue(std::vector<Call> calls, bool async_op) {
    Tensors buffers;
    auto stream = current_stream();
    if (async_op) {
      for (auto& call : calls) {
        buffers.insert(buffers.end(), call.outputs.begin(), call.outputs.end());
        buffers.insert(buffers.end(), call.inputs.begin(), call.inputs.end());
      }
      pretend::wait(internal_stream, record(stream));
      stream = internal_stream;
    }
    ++issued;
    return c10::make_intrusive<StreamWork>(launch(std::move(calls), stream), std::move(buffers));
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
    return start("reduce_scatter", {output}, {input}, o.asyncOp, o.reduceOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& o) override {
    return start("reduce_scatter", outputs, inputs, o.asyncOp, o.reduceOp);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return start("all_reduce", tensors, tensors, o.asyncOp, o.reduceOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return start("all_reduce", tensors, tensors, o.asyncOp, o.reduceOp);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return start("broadcast", tensors, tensors, o.asyncOp, ReduceOp::SUM, o.rootRank);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& o) override {
    Call call{"all_to_all", {output}, {input}, ReduceOp::SUM, -1, {}, {}};
    if (!output_splits.empty() || !input_splits.empty()) {
      call.sends = nbytes_of_parts(input, input_splits);
      call.receives = nbytes_of_parts(output, output_splits);
    }
    return start(std::move(call), o.asyncOp);
  }

  WorkPtr send(Tensors& tensors, int peer, int /*tag*/) override {
    return start("send", {}, tensors, true, ReduceOp::SUM, peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int /*tag*/) override {
    return start("recv", tensors, {}, true, ReduceOp::SUM, peer);
  }

  // splits: rows of each part; none if parts are equal.
  std::vector<int64_t> nbytes_of_parts(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
    if (splits.empty()) return std::vector<int64_t>(getSize(), int64_t(tensor.nbytes()) / getSize());
    const int64_t row = tensor.size(0) == 0 ? 0 : int64_t(tensor.nbytes()) / tensor.size(0);
    std::vector<int64_t> result;
    for (auto rows : splits) result.push_back(rows * row);
    return result;
  }

  c10::StreamId internal_stream;
  int64_t issued = 0;
  bool coalescing = false, batch_is_async = true;
  std::vector<Call> batch;
};

}  // namespace pretend
