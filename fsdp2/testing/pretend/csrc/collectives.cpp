// A process group for the device: ordered by streams, as NCCL's.
//
// Every collective is one exchange of bytes among all ranks, through gloo (or, modelled, with itself: the others then gather the same
// data, and reduce multiples of it), followed by a local part that adds in ascending order of ranks. Ranks compare first what each of them issues.

#include "collectives.h"
#include "device.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstring>

namespace pretend {
namespace {

using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

constexpr auto kPatience = std::chrono::milliseconds(200);

at::Tensor host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device() == the_device(), "pretend process group: a tensor on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "pretend process group: tensors must be contiguous");
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), options);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.reshape({-1}).view(at::kByte);
}

struct Call {
  std::string kind;
  Tensors inputs, outputs;  // on the host, over device memory
  ReduceOp op = ReduceOp::SUM;
  int root = -1;

  int64_t nbytes() const {
    int64_t total = 0;
    for (auto& input : inputs) total += int64_t(input.nbytes());
    return total;
  }
  std::string said() const {
    std::string text = kind + " of " + std::to_string(nbytes()) + " bytes";
    if (!inputs.empty()) text += std::string(" of ") + c10::toString(inputs[0].scalar_type());
    if (root >= 0) text += " from rank " + std::to_string(root);
    return text + ", reduction " + std::to_string(int(op.op_));
  }
};

void reduce_into(const at::Tensor& output, const Tensors& rows, const ReduceOp& op) {
  at::Tensor total;
  const double premultiply =
      op.op_ == ReduceOp::PREMUL_SUM ? static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get())->double_factor : 1.0;
  for (auto& each : rows) {
    auto row = op.op_ == ReduceOp::PREMUL_SUM ? each.mul(premultiply) : each;
    if (!total.defined()) {
      total = row.clone();
      continue;
    }
    switch (op.op_) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
      case ReduceOp::PREMUL_SUM:
        total.add_(row);
        break;
      case ReduceOp::PRODUCT:
        total.mul_(row);
        break;
      case ReduceOp::MIN:
        total = at::minimum(total, row);
        break;
      case ReduceOp::MAX:
        total = at::maximum(total, row);
        break;
      case ReduceOp::BAND:
        total.bitwise_and_(row);
        break;
      case ReduceOp::BOR:
        total.bitwise_or_(row);
        break;
      default:
        TORCH_CHECK(false, "pretend process group: no such reduction");
    }
  }
  if (op.op_ == ReduceOp::AVG) total.div_(int64_t(rows.size()));
  output.view({-1}).copy_(total.view({-1}));
}

// One launch: one collective, or several that were coalesced.
struct Launch {
  c10::intrusive_ptr<c10d::Backend> wire;  // none: modelled
  int rank = 0, size = 1;
  std::vector<Call> calls;
  int64_t number = 0;  // in the order of its group
  // on its way
  WorkPtr pending;
  bool compared = false, sent = false;
  at::Tensor payload, arrived, said, all_said;

  static constexpr int64_t kSaid = 512;

  std::string description() const {
    std::string text = "collective " + std::to_string(number) + ": ";
    for (auto& call : calls) text += call.said() + "; ";
    return text.substr(0, kSaid - 1);
  }

  bool exchange(at::Tensor& to, at::Tensor& from) {
    if (!pending) pending = wire->_allgather_base(to, from);
    // Other ranks may be busy with another group's collective: what else there is to do is done meanwhile.
    for (auto until = std::chrono::steady_clock::now() + kPatience; !pending->isCompleted();) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    pending->wait();
    pending.reset();
    return true;
  }

  bool run() {
    if (wire && !compared) {
      if (!said.defined()) {
        said = at::zeros({kSaid}, at::kByte);
        all_said = at::zeros({kSaid * size}, at::kByte);
        auto text = description();
        std::memcpy(said.data_ptr(), text.data(), text.size());
      }
      if (!exchange(all_said, said)) return false;
      compared = true;
      for (int other = 0; other < size; ++other) {
        std::string theirs(static_cast<const char*>(all_said.data_ptr()) + other * kSaid);
        TORCH_CHECK(theirs == description(), "pretend process group: rank ", rank, " issues ", description(), " where rank ", other,
                    " issues ", theirs);
      }
    }
    if (!sent) {
      Tensors parts;
      for (auto& call : calls)
        for (auto& input : call.inputs) parts.push_back(bytes_of(input));
      payload = parts.empty() ? at::empty({0}, at::kByte) : at::cat(parts);
      arrived = at::empty({payload.numel() * size}, at::kByte);
      sent = true;
      if (!wire || payload.numel() == 0) arrived.view({size, -1}).copy_(payload.expand({size, payload.numel()}));
    }
    if (wire && payload.numel() > 0 && !exchange(arrived, payload)) return false;
    finish();
    return true;
  }

  void finish() {
    const auto total = payload.numel();
    int64_t start = 0;
    for (auto& call : calls) {
      for (size_t index = 0; index < call.inputs.size(); ++index) {
        auto& input = call.inputs[index];
        const auto nbytes = int64_t(input.nbytes());
        Tensors rows;  // this input, of each rank
        for (int other = 0; other < size; ++other) {
          auto piece = arrived.narrow(0, other * total + start, nbytes).clone();
          rows.push_back(nbytes == 0 ? input.view({-1}) : piece.view(input.scalar_type()));
        }
        start += nbytes;
        if (input.numel() > 0) deliver(call, index, rows);
      }
    }
  }

  // Modelled ranks reduce other numbers than this one's, or an average would change nothing, whenever it ran.
  Tensors reduced_rows(const Tensors& rows) const {
    Tensors result = rows;
    if (!wire && at::isFloatingType(rows[0].scalar_type()))
      for (int other = 0; other < size; ++other) result[other] = rows[other] * (1.0 + other / 8.0);
    return result;
  }

  void deliver(Call& call, size_t index, const Tensors& rows) const {
    if (call.kind == "all_gather") {
      call.outputs[index].view({-1}).copy_(at::cat(rows));
    } else if (call.kind == "all_gather of a list") {
      for (int other = 0; other < size; ++other) call.outputs[index * size + other].view({-1}).copy_(rows[other]);
    } else if (call.kind == "reduce_scatter") {
      Tensors mine;
      for (auto& row : rows) mine.push_back(row.view({size, -1})[rank]);
      reduce_into(call.outputs[index], reduced_rows(mine), call.op);
    } else if (call.kind == "all_reduce" || (call.kind == "reduce" && rank == call.root)) {
      reduce_into(call.outputs[index], reduced_rows(rows), call.op);
    } else if (call.kind == "broadcast") {
      call.outputs[index].view({-1}).copy_(rows[call.root]);
    } else if (call.kind == "scatter" && int(index) == rank) {
      call.outputs[0].view({-1}).copy_(rows[call.root]);
    } else if (call.kind == "gather" && rank == call.root) {
      for (int other = 0; other < size; ++other) call.outputs[other].view({-1}).copy_(rows[other]);
    } else if (call.kind == "all_to_all") {
      Tensors mine;
      for (auto& row : rows) mine.push_back(row.view({size, -1})[rank]);
      call.outputs[index].view({-1}).copy_(at::cat(mine));
    }
  }
};

// Its buffers live until somebody has waited; its wait orders the current stream.
struct StreamWork final : Work {
  StreamWork(TicketPtr ticket, Tensors buffers) : ticket(std::move(ticket)), buffers(std::move(buffers)) {}
  bool isCompleted() override {
    return ticket->done;
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
  Group(c10::intrusive_ptr<c10d::Backend> wire, int rank, int size)
      : c10d::Backend(rank, size), wire(std::move(wire)), internal_stream(new_stream(0)) {
    if (this->wire && size > 1) keep_alive(true);
  }

  const std::string getBackendName() const override {
    return "pretend";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return uint64_t(issued);
  }
  void startCoalescing() override {
    TORCH_CHECK(!coalescing, "pretend process group: coalescing inside coalescing");
    coalescing = true;
    batch.clear();
    batch_buffers.clear();
  }
  WorkPtr endCoalescing() override {
    coalescing = false;
    if (batch.empty()) return nullptr;
    return launch(std::move(batch), std::move(batch_buffers), batch_is_async);
  }

  // All collectives of a group run in the order in which they are issued, on whichever streams.
  WorkPtr launch(std::vector<Call> calls, Tensors buffers, bool async_op) {
    if (coalescing) {
      batch_is_async = async_op;
      for (auto& call : calls) batch.push_back(std::move(call));
      for (auto& buffer : buffers) batch_buffers.push_back(std::move(buffer));
      auto ticket = std::make_shared<Ticket>();
      ticket->done = true;  // as with NCCL, only the end of coalescing gives something to wait for
      return c10::make_intrusive<StreamWork>(ticket, Tensors{});
    }
    auto it = std::make_shared<Launch>();
    it->wire = getSize() > 1 ? wire : nullptr;
    it->rank = getRank();
    it->size = getSize();
    it->number = issued++;
    count_launch(calls[0].kind);
    it->calls = std::move(calls);
    auto stream = current_stream();
    if (async_op) {
      pretend::wait(internal_stream, record(stream));
      stream = internal_stream;
    }
    auto ticket = std::make_shared<Ticket>();
    enqueue(stream, {"collective", it->description(), [it] { return it->run(); }, last, ticket});
    last = ticket;
    return c10::make_intrusive<StreamWork>(ticket, async_op ? std::move(buffers) : Tensors{});
  }

  static Tensors hosts(const Tensors& tensors) {
    Tensors result;
    for (auto& each : tensors) result.push_back(host(each));
    return result;
  }
  static Tensors both(const Tensors& left, const Tensors& right) {
    Tensors result = left;
    result.insert(result.end(), right.begin(), right.end());
    return result;
  }
  WorkPtr start(const char* kind, const Tensors& outputs, const Tensors& inputs, bool async_op, ReduceOp op = ReduceOp::SUM,
                int64_t root = -1) {
    Call call{kind, hosts(inputs), hosts(outputs), op, int(root)};
    return launch({call}, both(outputs, inputs), async_op);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& o) override {
    return start("all_gather", {output}, {input}, o.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return start("all_gather", outputs, inputs, o.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    Tensors all;
    for (auto& list : outputs) all = both(all, list);
    return start("all_gather of a list", all, inputs, o.asyncOp);
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
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return start("reduce", tensors, tensors, o.asyncOp, o.reduceOp, o.rootRank);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    Tensors sent = inputs.empty() ? Tensors(getSize(), outputs[0]) : inputs[0];
    return start("scatter", outputs, sent, o.asyncOp, ReduceOp::SUM, o.rootRank);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    return start("gather", outputs.empty() ? Tensors{} : outputs[0], inputs, o.asyncOp, ReduceOp::SUM, o.rootRank);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(output_splits.empty() && input_splits.empty(), "pretend process group: all-to-all of equal parts only");
    return start("all_to_all", {output}, {input}, o.asyncOp);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto token = at::zeros({1}, at::TensorOptions().device(the_device()));
    auto work = start("all_reduce", {token}, {token}, false);
    pretend::synchronize_device("barrier");
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> wire;
  c10::StreamId internal_stream;
  TicketPtr last;
  int64_t issued = 0;
  bool coalescing = false, batch_is_async = true;
  std::vector<Call> batch;
  Tensors batch_buffers;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> wire, int rank, int size) {
  return c10::make_intrusive<Group>(std::move(wire), rank, size);
}

}  // namespace pretend
