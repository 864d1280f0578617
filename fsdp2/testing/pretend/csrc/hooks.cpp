// What torch asks of a device: its guard (streams and events), its generator, its memory.

#include "device.h"
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace pretend {

Generator::Generator(uint64_t seed)
    : c10::GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

void Generator::set_current_seed(uint64_t seed) {
  host.set_current_seed(seed);
}
void Generator::set_offset(uint64_t) {
  TORCH_CHECK(false, "pretend device: its generator has no offset");
}
uint64_t Generator::get_offset() const {
  TORCH_CHECK(false, "pretend device: its generator has no offset");
}
uint64_t Generator::current_seed() const {
  return host.current_seed();
}
uint64_t Generator::seed() {
  return host.unsafeGetGeneratorImpl()->seed();
}
void Generator::set_state(const c10::TensorImpl& state) {
  host.unsafeGetGeneratorImpl()->set_state(state);
}
c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  return host.unsafeGetGeneratorImpl()->get_state();
}
Generator* Generator::clone_impl() const {
  auto* copy = new Generator(0);
  copy->host = host.clone();
  return copy;
}

const at::Generator& default_generator() {
  static auto* it = new at::Generator(at::make_generator<Generator>(c10::detail::getNonDeterministicRandom()));
  return *it;
}

namespace {

struct Event {
  TicketPtr ticket;
};

// One device, whose streams are numbers; 0 is the default one.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high_priority) const override {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), new_stream(high_priority ? -1 : 0));
  }
  c10::Stream getNewStream(c10::Device, int priority) const override {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), new_stream(priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), exchange_stream(stream.id()));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->ticket = pretend::record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream.id(), static_cast<Event*>(event)->ticket);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(static_cast<Event*>(event)->ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(static_cast<Event*>(event)->ticket, "event.synchronize");
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query(pretend::record(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.id(), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize_device("device.synchronize");
  }
  bool isStreamCapturing(const c10::Stream&) const override {
    return is_capturing();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on_stream(data, stream.id());
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 0.0;  // this device keeps no time
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(c10::default_rng_seed_val);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return the_device();
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

}  // namespace

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  const auto kept = std::min(storage->nbytes(), nbytes);
  auto data = device_allocator()->allocate(nbytes);
  if (kept > 0) device_allocator()->copy_data(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace pretend
