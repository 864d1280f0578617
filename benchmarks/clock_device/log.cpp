// The log, the host's clock, streams and events, memory that is addresses only.

#include "log.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <time.h>

#include <sys/mman.h>

namespace pretend {
namespace {

using Lock = std::unique_lock<std::recursive_mutex>;

struct State {
  std::recursive_mutex mutex;
  std::vector<Record> log;
  bool logging = false;
  int64_t host_ns = 0;  // since the last record
  int64_t numbers = 0;
  c10::StreamId streams = 0;
  char *device = nullptr, *next = nullptr;
  std::map<const char*, size_t> pinned;
  int64_t allocated = 0, peak = 0, given_out = 0;
};

State& state() {
  static State* it = new State;  // outlives everything
  return *it;
}

thread_local c10::StreamId current = 0;
thread_local int depth = 0;
thread_local int64_t resumed = -1;

// The thread's own time, not the wall's: others compute on this machine as well.
int64_t now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

constexpr size_t kSpace = size_t{1} << 45;
constexpr size_t kAlign = 512;

size_t rounded(size_t nbytes) {
  return (nbytes + kAlign - 1) / kAlign * kAlign;
}

struct Block {
  int64_t number;
  c10::StreamId stream;
  size_t nbytes;
};

void free_block(void* context) {
  InDevice in;
  auto* block = static_cast<Block*>(context);
  {
    auto guard = lock();
    state().allocated -= int64_t(rounded(block->nbytes));
  }
  append({"free", "", block->stream, block->number, 0, int64_t(block->nbytes)});
  delete block;
}

struct Addresses final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &nothing, the_device()};
    InDevice in;
    auto guard = lock();
    auto& s = state();
    if (s.device == nullptr) {  // whoever writes there crashes, which is right; what is read there is zero
      void* space = mmap(nullptr, kSpace, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(space != MAP_FAILED, "clock device: the process may not have ", kSpace, " bytes of addresses");
      s.device = s.next = static_cast<char*>(space);
    }
    TORCH_CHECK(s.next + rounded(nbytes) <= s.device + kSpace, "clock device: out of addresses");
    auto* data = s.next;
    s.next += rounded(nbytes);
    s.allocated += int64_t(rounded(nbytes));
    s.peak = std::max(s.peak, s.allocated);
    ++s.given_out;
    auto* block = new Block{new_number(), current, nbytes};
    append({"alloc", "", current, block->number, 0, int64_t(nbytes)});
    return {data, block, &free_block, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, std::size_t nbytes) const override {
    InDevice in;
    append({"copy", "on the device", current, 0, 0, int64_t(nbytes)});
  }
  static void nothing(void*) {}
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &forget, c10::Device(c10::DeviceType::CPU)};
    InDevice in;
    void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "clock device: out of host memory");
    append({"pin", "", current, 0, 0, int64_t(nbytes)});
    auto guard = lock();
    state().pinned[static_cast<char*>(data)] = nbytes;
    return {data, data, &forget, c10::Device(c10::DeviceType::CPU)};
  }
  static void forget(void* data) {
    if (data == nullptr) return;
    auto guard = lock();
    auto found = state().pinned.find(static_cast<char*>(data));
    munmap(data, found->second);
    state().pinned.erase(found);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &forget;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

Addresses device_memory;
PinnedMemory pinned_memory;

}  // namespace

InDevice::InDevice() {
  if (depth++ > 0) return;
  const auto time = now();
  auto guard = lock();
  if (resumed >= 0) state().host_ns += time - resumed;
}

InDevice::~InDevice() {
  if (--depth == 0) resumed = now();
}

void append(Record record) {
  auto guard = lock();
  auto& s = state();
  if (!s.logging) {
    s.host_ns = 0;
    return;
  }
  record.host_ns = s.host_ns;
  s.host_ns = 0;
  s.log.push_back(std::move(record));
}

void set_logging(bool yes) {
  InDevice in;
  auto guard = lock();
  state().logging = yes;
  state().host_ns = 0;
}

std::vector<Record> take_log() {
  auto guard = lock();
  return std::move(state().log);
}

int64_t new_number() {
  auto guard = lock();
  return ++state().numbers;
}

int64_t number_of(const TicketPtr& ticket) {
  return ticket ? static_cast<Numbered&>(*ticket).number : 0;
}

// ---- the interface of device.h ----

std::unique_lock<std::recursive_mutex> lock() {
  return Lock(state().mutex);
}

c10::StreamId current_stream() {
  return current;
}

c10::StreamId exchange_stream(c10::StreamId stream) {
  std::swap(current, stream);
  return stream;
}

c10::StreamId new_stream(int /*priority*/) {
  auto guard = lock();
  return ++state().streams;
}

TicketPtr record(c10::StreamId stream) {
  InDevice in;
  auto ticket = std::make_shared<Numbered>(new_number());
  append({"record", "", stream, ticket->number});
  return ticket;
}

void wait(c10::StreamId stream, const TicketPtr& ticket) {
  if (!ticket) return;
  InDevice in;
  append({"wait", "", stream, number_of(ticket)});
}

bool query(const TicketPtr& ticket) {
  InDevice in;
  append({"query", "", current, number_of(ticket)});
  return true;
}

void synchronize(const TicketPtr& ticket, const char* why) {
  InDevice in;
  append({"host waits for event", why, current, number_of(ticket)});
}

void synchronize_stream(c10::StreamId stream, const char* why) {
  InDevice in;
  append({"host waits for stream", why, stream});
}

void synchronize_device(const char* why) {
  InDevice in;
  append({"host waits for device", why, current});
}

bool is_capturing() {
  return false;
}

c10::Allocator* device_allocator() {
  return &device_memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

bool is_pinned(const void* data) {
  auto guard = lock();
  return lies_in(state().pinned, data);
}

void use_on_stream(const c10::DataPtr& data, c10::StreamId stream) {
  if (data.get_deleter() != &free_block || data.get_context() == nullptr) return;
  InDevice in;
  append({"use", "", stream, static_cast<Block*>(data.get_context())->number});
}

std::map<std::string, int64_t> memory_stats() {
  auto guard = lock();
  auto& s = state();
  return {{"allocated", s.allocated}, {"peak", s.peak}, {"reserved", s.allocated}, {"allocations", s.given_out}};
}

void reset_peak_memory() {
  auto guard = lock();
  state().peak = state().allocated;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)

}  // namespace pretend
