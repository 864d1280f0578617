// What Python may ask of the device.

#include "collectives.h"
#include "device.h"
#include "generator.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", &pretend::register_hooks);
  m.def("configure", &pretend::configure);
  m.def("synchronize", [] { pretend::synchronize_device("device.synchronize"); });
  m.def("set_refused_waits", &pretend::set_refused_waits);
  m.def("host_waits", &pretend::host_waits);
  m.def("launches", &pretend::launches);
  m.def("reset_counts", &pretend::reset_counts);
  m.def("begin_capture", &pretend::begin_capture);
  m.def("end_capture", &pretend::end_capture);
  m.def("begin_watch", &pretend::begin_watch);
  m.def("end_watch", &pretend::end_watch);
  m.def("is_capturing", &pretend::is_capturing);
  m.def("replay", &pretend::replay);
  m.def("set_tracing", &pretend::set_tracing);
  m.def("take_trace", &pretend::take_trace);
  m.def("memory_stats", &pretend::memory_stats);
  m.def("reset_peak_memory", &pretend::reset_peak_memory);
  m.def("set_poisoning", &pretend::set_poisoning);
  m.def("set_memory_limit", &pretend::set_memory_limit);
  m.def("release_cached_memory", &pretend::release_cached_memory);
  m.def("set_one_at_a_time", &pretend::set_one_at_a_time);
  m.def("default_generator", [] { return pretend::default_generator(); });
  m.def("make_group", [](py::object wire, int rank, int size) {
    c10::intrusive_ptr<c10d::Backend> backend;
    if (!wire.is_none()) backend = wire.cast<c10::intrusive_ptr<c10d::Backend>>();
    return pretend::make_group(backend, rank, size);
  });
}
