// A process group of which this process plays one rank, and of which nothing is sent.

#include "log.h"
#include "../../fsdp2/testing/pretend/csrc/stream_group.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>

namespace pretend {
namespace {

int64_t nbytes_of(const Tensors& tensors) {
  int64_t total = 0;
  for (auto& each : tensors) total += int64_t(each.nbytes());
  return total;
}

struct Group final : StreamGroup {
  Group(int rank, int size, int64_t number) : StreamGroup(rank, size), number(number) {}

  const std::string getBackendName() const override {
    return "clock";
  }
  TicketPtr launch(std::vector<Call> calls, c10::StreamId stream) override {
    InDevice in;
    int64_t count = 0, nbytes = 0;
    for (auto& call : calls) {
      count += int64_t(call.inputs.size());
      nbytes += std::max(nbytes_of(call.inputs), nbytes_of(call.outputs));
    }
    append({"collective", calls.back().kind, stream, number, count, nbytes});
    return record(stream);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    InDevice in;
    append({"collective", "all_reduce", current_stream(), number, 1, 4});
    auto work = c10::make_intrusive<StreamWork>(record(current_stream()), Tensors{});
    synchronize_device("barrier");
    return work;
  }

  int64_t number;
};

}  // namespace

void bind(pybind11::module& m) {
  m.def("make_group", [](int rank, int size, int64_t number) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Group>(rank, size, number));
  });
}

}  // namespace pretend
