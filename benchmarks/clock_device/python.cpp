// What Python may ask of the device that runs nothing.

#include "log.h"
#include "../../fsdp2/testing/pretend/csrc/generator.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace pretend {
void bind(py::module& m);  // group.cpp
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", &pretend::register_hooks);
  m.def("synchronize", [] { pretend::synchronize_device("device.synchronize"); });
  m.def("is_capturing", &pretend::is_capturing);
  m.def("memory_stats", &pretend::memory_stats);
  m.def("reset_peak_memory", &pretend::reset_peak_memory);
  m.def("default_generator", [] { return pretend::default_generator(); });
  m.def("set_logging", &pretend::set_logging);
  m.def("mark", [](const std::string& name) {
    pretend::InDevice in;
    pretend::append({"mark", name, pretend::current_stream()});
  });
  m.def("take_log", [] {
    py::list all;
    for (auto& each : pretend::take_log()) {
      py::list tensors;
      for (auto& seen : each.tensors) tensors.append(py::make_tuple(seen.roles, seen.dtype, seen.nbytes, seen.sizes));
      all.append(py::make_tuple(each.kind, each.name, each.stream, each.id, each.other, each.nbytes, tensors, each.host_ns));
    }
    return all;
  });
  pretend::bind(m);
}
