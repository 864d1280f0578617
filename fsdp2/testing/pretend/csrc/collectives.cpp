// A process group for the device: ordered by streams, as NCCL's.
//
// Every collective is one exchange of bytes among all ranks, through gloo (or, modeled, with itself: the others then gather the same
// data, and reduce multiples of it), followed by a local part that adds in ascending order of ranks. Ranks compare first what each of them issues.
// What two ranks send to each other is not compared: the others know nothing of it.

#include "collectives.h"
#include "stream_group.h"

#include <cstring>
#include <future>

namespace pretend {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(200);

// The collectives of all groups run one at a time, in the order of issue, for at most so long each; 0: only those of one group.
std::chrono::milliseconds at_most{0};
TicketPtr last_of_all;

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

int64_t nbytes_of(const Call& call) {
  int64_t total = 0;
  for (auto& input : call.inputs) total += int64_t(input.nbytes());
  return total;
}

// Its ranks may send different numbers of bytes.
bool has_unequal_parts(const Call& call) {
  return !call.sends.empty();
}

bool is_between_two(const Call& call) {
  return call.kind == "send" || call.kind == "recv";
}

std::string said_of(const Call& call) {
  std::string text = call.kind + (has_unequal_parts(call) ? " of unequal parts" : " of " + std::to_string(nbytes_of(call)) + " bytes");
  if (!call.inputs.empty()) text += std::string(" of ") + c10::toString(call.inputs[0].scalar_type());
  if (call.root >= 0) text += " from rank " + std::to_string(call.root);
  return text + ", reduction " + std::to_string(int(call.op.op_));
}

// What NCCL multiplies each input by before it adds, rounded to the dtype of the inputs.
double factor_of(const ReduceOp& op, size_t num_ranks, at::ScalarType dtype) {
  if (op.op_ == ReduceOp::AVG && at::isFloatingType(dtype))
    return at::scalar_tensor(dtype == at::kDouble ? 1.0 / double(num_ranks) : double(float(1.0 / double(num_ranks))), dtype).item<double>();
  if (op.op_ != ReduceOp::PREMUL_SUM) return 1.0;
  const double factor = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get())->double_factor;
  if (dtype != at::kBFloat16) return at::scalar_tensor(factor, dtype).item<double>();
  // torch hands NCCL a float, of which NCCL reads the first two bytes: https://github.com/pytorch/pytorch/issues/190745
  const float wide = float(factor);
  at::BFloat16 read;
  std::memcpy(&read, &wide, sizeof(read));
  return double(read);
}

void reduce_into(const at::Tensor& output, const Tensors& rows, const ReduceOp& op) {
  at::Tensor total;
  const double factor = factor_of(op, rows.size(), output.scalar_type());
  for (auto& each : rows) {
    auto row = factor != 1.0 ? each.mul(factor) : each;
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
  if (op.op_ == ReduceOp::AVG && !at::isFloatingType(total.scalar_type())) total.div_(int64_t(rows.size()), "trunc");
  output.view({-1}).copy_(total.view({-1}));
}

// One launch: one collective, or several that were coalesced.
struct Launch {
  c10::intrusive_ptr<c10d::Backend> wire;  // none: modeled
  int rank = 0, size = 1;
  std::vector<Call> calls;  // on the host, over device memory
  int64_t number = 0;  // in the order of its group
  // on its way
  WorkPtr pending;
  bool compared = false, parts_are_compared = false, sent = false;
  at::Tensor payload, arrived, said, all_said;
  at::Tensor parts, all_parts;  // of an all-to-all of unequal parts: bytes that this rank sends, and all ranks send, to each

  Tensors parcels;  // of what two ranks send to each other, call by call
  std::future<void> delivery;
  std::chrono::steady_clock::time_point since{};  // its first try

  static constexpr int64_t kSaid = 512;

  std::string description() const {
    std::string text = "collective " + std::to_string(number) + ": ";
    for (auto& call : calls) text += said_of(call) + "; ";
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
    const auto now = std::chrono::steady_clock::now();
    if (since == std::chrono::steady_clock::time_point{}) since = now;
    TORCH_CHECK(at_most.count() == 0 || now - since < at_most, "pretend process group: rank ", rank, " waits for the other ranks in ",
                description(), " and gives no other communicator a turn; do the ranks issue the collectives of several in one order?");
    return try_to_run();
  }

  bool try_to_run() {
    if (is_between_two(calls[0])) return run_between_two();
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
    if (has_unequal_parts(calls[0]) && !compare_parts()) return false;
    if (!sent) {
      Tensors pieces;
      for (auto& call : calls)
        for (auto& input : call.inputs) pieces.push_back(bytes_of(input));
      payload = pieces.empty() ? at::empty({0}, at::kByte) : at::cat(pieces);
      if (has_unequal_parts(calls[0])) {
        const auto longest = all_parts.sum(1).max().item<int64_t>();
        payload = at::cat({payload, at::zeros({longest - payload.numel()}, at::kByte)});
      }
      arrived = at::empty({payload.numel() * size}, at::kByte);
      sent = true;
      if (!wire || payload.numel() == 0) arrived.view({size, -1}).copy_(payload.expand({size, payload.numel()}));
    }
    if (wire && payload.numel() > 0 && !exchange(arrived, payload)) return false;
    if (has_unequal_parts(calls[0]))
      deliver_parts(calls[0]);
    else
      finish();
    return true;
  }

  // A thread waits, because gloo does not say without waiting whether the other rank has come.
  bool run_between_two() {
    if (!delivery.valid()) {
      for (auto& call : calls)
        parcels.push_back(call.kind == "send" ? bytes_of(call.inputs[0]).clone()
                                              : at::empty({int64_t(call.outputs[0].nbytes())}, at::kByte));
      delivery = std::async(std::launch::async, [this] {
        std::vector<WorkPtr> works;
        for (size_t index = 0; index < calls.size(); ++index) {
          Tensors parcel{parcels[index]};
          if (parcel[0].numel() == 0) continue;
          const auto peer = int(calls[index].root);
          works.push_back(calls[index].kind == "send" ? wire->send(parcel, peer, 0) : wire->recv(parcel, peer, 0));
        }
        for (auto& work : works) work->wait();
      });
    }
    if (delivery.wait_for(kPatience) != std::future_status::ready) return false;
    delivery.get();
    for (size_t index = 0; index < calls.size(); ++index)
      if (calls[index].kind == "recv" && parcels[index].numel() > 0) bytes_of(calls[index].outputs[0]).copy_(parcels[index]);
    return true;
  }

  // Ranks tell each other what each of them sends to whom, so that all can send as many bytes as the one that sends most.
  bool compare_parts() {
    if (parts_are_compared) return true;
    auto& call = calls[0];
    if (!parts.defined()) {
      parts = at::tensor(call.sends, at::kLong);
      all_parts = parts.repeat({size});
    }
    if (wire && !exchange(all_parts, parts)) return false;
    parts_are_compared = true;
    all_parts = all_parts.view({size, size});
    auto mine = all_parts.select(1, rank);
    TORCH_CHECK(mine.equal(at::tensor(call.receives, at::kLong)), "pretend process group: rank ", rank, " expects parts of ",
                call.receives, " bytes, where ranks send ", mine);
    return true;
  }

  void deliver_parts(const Call& call) const {
    const auto longest = payload.numel();
    Tensors received;
    for (int other = 0; other < size; ++other) {
      auto sizes = all_parts[other];
      auto start = sizes.narrow(0, 0, rank).sum().item<int64_t>();
      received.push_back(arrived.narrow(0, other * longest + start, sizes[rank].item<int64_t>()));
    }
    bytes_of(call.outputs[0]).copy_(at::cat(received));
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

  // Modeled ranks reduce other numbers than this one's, or an average would change nothing, whenever it ran.
  Tensors reduced_rows(const Tensors& rows) const {
    Tensors result = rows;
    if (!wire && at::isFloatingType(rows[0].scalar_type()))
      for (int other = 0; other < size; ++other) result[other] = rows[other] * (1.0 + other / 8.0);
    return result;
  }

  void deliver(Call& call, size_t index, const Tensors& rows) const {
    if (call.kind == "all_gather" && call.outputs.size() == call.inputs.size()) {
      call.outputs[index].view({-1}).copy_(at::cat(rows));
    } else if (call.kind == "all_gather") {  // into a list
      for (int other = 0; other < size; ++other) call.outputs[index * size + other].view({-1}).copy_(rows[other]);
    } else if (call.kind == "reduce_scatter") {
      Tensors mine;
      for (auto& row : rows) mine.push_back(row.view({size, -1})[rank]);
      reduce_into(call.outputs[index], reduced_rows(mine), call.op);
    } else if (call.kind == "all_reduce" || (call.kind == "reduce" && rank == int(call.root))) {
      reduce_into(call.outputs[index], reduced_rows(rows), call.op);
    } else if (call.kind == "broadcast") {
      call.outputs[index].view({-1}).copy_(rows[size_t(call.root)]);
    } else if (call.kind == "scatter" && int(index) == rank) {
      call.outputs[0].view({-1}).copy_(rows[size_t(call.root)]);
    } else if (call.kind == "gather" && rank == int(call.root)) {
      for (int other = 0; other < size; ++other) call.outputs[other].view({-1}).copy_(rows[other]);
    } else if (call.kind == "all_to_all") {
      Tensors mine;
      for (auto& row : rows) mine.push_back(row.view({size, -1})[rank]);
      call.outputs[index].view({-1}).copy_(at::cat(mine));
    }
  }
};

struct Group final : StreamGroup {
  Group(c10::intrusive_ptr<c10d::Backend> wire, int rank, int size) : StreamGroup(rank, size), wire(std::move(wire)) {
    if (this->wire && size > 1) keep_alive(true);
  }

  const std::string getBackendName() const override {
    return "pretend";
  }

  // All collectives of a group run in the order in which they are issued, on whichever streams.
  TicketPtr launch(std::vector<Call> calls, c10::StreamId stream) override {
    auto it = std::make_shared<Launch>();
    it->wire = getSize() > 1 ? wire : nullptr;
    it->rank = getRank();
    it->size = getSize();
    count_launch(calls[0].kind);
    for (auto& call : calls) {
      TORCH_CHECK(is_between_two(call) == is_between_two(calls[0]), "pretend process group: a collective beside what two ranks send");
      TORCH_CHECK(wire || !is_between_two(call), "pretend process group: modeled ranks send nothing");
      TORCH_CHECK(!has_unequal_parts(call) || (calls.size() == 1 && (wire || getSize() == 1)),
                  "pretend process group: an all-to-all of unequal parts is not coalesced, and not modeled");
      it->calls.push_back({call.kind, hosts(call.outputs), hosts(call.inputs), call.op, call.root, call.sends, call.receives});
    }
    if (is_recorded(stream)) {
      auto ticket = std::make_shared<Ticket>();
      enqueue(stream, {"collective", it->description(), nullptr, nullptr, ticket, [this, it] { return next(std::make_shared<Launch>(copy_of(*it))); }});
      return ticket;
    }
    auto entry = next(it);
    auto ticket = entry.marks;
    enqueue(stream, std::move(entry));
    return ticket;
  }

  // `it` is the next collective of the group.
  Entry next(const std::shared_ptr<Launch>& it) {
    if (!is_between_two(it->calls[0])) it->number = collectives++;
    auto ticket = std::make_shared<Ticket>();
    const bool one_at_a_time = at_most.count() > 0 && wire;
    Entry entry{"collective", it->description(), [it] { return it->run(); }, one_at_a_time && last_of_all ? last_of_all : last, ticket};
    last = ticket;
    if (one_at_a_time) last_of_all = ticket;
    return entry;
  }

  static Launch copy_of(const Launch& launch) {
    Launch copy;
    copy.wire = launch.wire;
    copy.rank = launch.rank;
    copy.size = launch.size;
    copy.calls = launch.calls;
    return copy;
  }

  static Tensors hosts(const Tensors& tensors) {
    Tensors result;
    for (auto& each : tensors) result.push_back(host(each));
    return result;
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
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto token = at::zeros({1}, at::TensorOptions().device(the_device()));
    auto work = start("all_reduce", {token}, {token}, false);
    pretend::synchronize_device("barrier");
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> wire;
  TicketPtr last;
  int64_t collectives = 0;  // issued so far, of all ranks
};

}  // namespace

void set_one_at_a_time(double seconds) {
  at_most = std::chrono::milliseconds(int64_t(seconds * 1000));
  last_of_all = nullptr;
}

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> wire, int rank, int size) {
  return c10::make_intrusive<Group>(std::move(wire), rank, size);
}

}  // namespace pretend
