// A caching allocator: blocks belong to the stream that was current when they were first cut, and are given out again at once.
//
// The next allocation on a stream poisons all that was freed there before it (every byte 0xff, which is NaN in all floating-point
// types), in the order of that stream: any of it could have been what the allocation was given, to be written at once. When a block
// is given out, its stream checks that the poison is untouched: whoever wrote after the free was not ordered before it.

#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <set>
#include <utility>

#include <sys/mman.h>

namespace pretend {
namespace {

constexpr size_t kAlign = 512;
constexpr size_t kSegment = size_t{2} << 20;
constexpr unsigned char kPoison = 0xff;

struct Block {
  char* data = nullptr;
  size_t nbytes = 0;     // of memory
  size_t requested = 0;  // by whoever has it
  c10::StreamId stream = 0;
  int64_t pool = 0;
  bool is_free = true;
  int64_t limits = 0;       // that had been set when its segment was reserved
  Block* before = nullptr;  // in the same segment
  Block* behind = nullptr;
  std::set<c10::StreamId> used_on;  // record_stream
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->data < b->data;
  }
};

struct Waiting {
  Block* block;
  std::vector<TicketPtr> tickets;
};

// Streams have pools of their own, and those of captured graphs others.
struct Memory {
  std::map<int64_t, std::set<Block*, BySize>> free;
  std::map<int64_t, std::vector<std::pair<char*, size_t>>> freed;  // and not poisoned yet
  std::list<Waiting> waiting;
  std::map<const char*, size_t> segments, pinned;
  int64_t allocated = 0, peak = 0, requested = 0, peak_requested = 0, reserved = 0, peak_reserved = 0, active_blocks = 0, given_out = 0;
  int64_t limit = 0, limits = 0, retries = 0;  // the limit now, and how many have been set
  bool poisoning = true;
};

Memory& memory() {
  static Memory* it = new Memory;
  return *it;
}

size_t rounded(size_t nbytes, size_t to) {
  return (nbytes + to - 1) / to * to;
}

void poison(c10::StreamId stream, char* data, size_t nbytes) {
  if (!memory().poisoning) return;
  enqueue(stream, {"poison", "", [data, nbytes] {
                     std::memset(data, kPoison, nbytes);
                     return true;
                   }, nullptr, nullptr});
}

void check_poison(c10::StreamId stream, char* data, size_t nbytes) {
  if (!memory().poisoning) return;
  enqueue(stream, {"poison", "check", [data, nbytes] {
                     const bool intact = data[0] == char(kPoison) && std::memcmp(data, data + 1, nbytes - 1) == 0;
                     if (!intact) report("memory was written after it had been freed, by work that was not ordered before the free");
                     return true;
                   }, nullptr, nullptr});
}

Block* merged(Block* left, Block* right) {
  left->nbytes += right->nbytes;
  left->behind = right->behind;
  if (left->behind != nullptr) left->behind->before = left;
  delete right;
  return left;
}

void give_back(Block* block) {
  auto& pool = memory().free[block->pool];
  memory().freed[block->pool].emplace_back(block->data, block->nbytes);
  block->is_free = true;
  if (block->before != nullptr && block->before->is_free) {
    pool.erase(block->before);
    block = merged(block->before, block);
  }
  if (block->behind != nullptr && block->behind->is_free) {
    pool.erase(block->behind);
    block = merged(block, block->behind);
  }
  pool.insert(block);
}

void look_at_waiting() {
  auto& m = memory();
  for (auto it = m.waiting.begin(); it != m.waiting.end();) {
    if (std::all_of(it->tickets.begin(), it->tickets.end(), [](auto& ticket) { return ticket->done; })) {
      auto* block = it->block;
      give_back(block);
      it = m.waiting.erase(it);
    } else {
      ++it;
    }
  }
}

// None: it would reserve more than it may.
Block* take(size_t requested, c10::StreamId stream) {
  auto& m = memory();
  look_at_waiting();
  const int64_t its_pool = is_recorded(stream) ? -1 - stream : stream;
  for (auto& [data, size] : m.freed[its_pool]) poison(stream, data, size);
  m.freed[its_pool].clear();
  const size_t nbytes = rounded(requested, kAlign);
  auto& pool = m.free[its_pool];
  Block wanted;
  wanted.nbytes = nbytes;
  auto found = pool.lower_bound(&wanted);
  // Under a limit, gaps in segments from before it would be room that the limit does not count.
  while (m.limit > 0 && found != pool.end() && (*found)->limits < m.limits) ++found;
  Block* block = nullptr;
  if (found != pool.end()) {
    block = *found;
    pool.erase(found);
  } else {
    const size_t size = m.limit > 0 ? nbytes : rounded(nbytes, kSegment);  // limits are for small models
    if (m.limit > 0 && m.reserved + int64_t(size) > m.limit) return nullptr;
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "pretend device: out of memory");
    if (m.poisoning) std::memset(data, kPoison, size);
    block = new Block;
    block->data = static_cast<char*>(data);
    block->nbytes = size;
    block->stream = stream;
    block->pool = its_pool;
    block->limits = m.limits;
    m.segments[block->data] = size;
    m.reserved += int64_t(size);
    m.peak_reserved = std::max(m.peak_reserved, m.reserved);
  }
  if (block->nbytes - nbytes >= kAlign) {
    auto* rest = new Block;
    rest->data = block->data + nbytes;
    rest->nbytes = block->nbytes - nbytes;
    rest->stream = stream;
    rest->pool = its_pool;
    rest->limits = block->limits;
    rest->before = block;
    rest->behind = block->behind;
    if (rest->behind != nullptr) rest->behind->before = rest;
    block->behind = rest;
    block->nbytes = nbytes;
    pool.insert(rest);
  }
  block->is_free = false;
  block->requested = requested;
  m.allocated += int64_t(nbytes);
  m.peak = std::max(m.peak, m.allocated);
  m.requested += int64_t(requested);
  m.peak_requested = std::max(m.peak_requested, m.requested);
  ++m.active_blocks;
  ++m.given_out;
  return block;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& m = memory();
  std::set<c10::StreamId> used_on;
  {
    auto guard = lock();
    m.allocated -= int64_t(block->nbytes);
    m.requested -= int64_t(block->requested);
    --m.active_blocks;
    used_on = std::exchange(block->used_on, {});
    used_on.erase(block->stream);
    if (used_on.empty()) {
      give_back(block);
      return;
    }
  }
  refuse_in_capture("record_stream's deferred free");
  Waiting waiting{block, {}};
  for (auto stream : used_on) waiting.tickets.push_back(record(stream));  // without the lock: the host may wait here
  auto guard = lock();
  m.waiting.push_back(std::move(waiting));
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &nothing, the_device()};
    auto guard = lock();
    auto* block = take(nbytes, current_stream());
    if (block == nullptr) {
      guard.unlock();
      release_cached_memory();
      guard.lock();
      ++memory().retries;
      block = take(nbytes, current_stream());
      TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "pretend device: out of memory: tried to allocate ", nbytes, " bytes; ",
                       memory().reserved, " of ", memory().limit, " are reserved");
    }
    check_poison(block->stream, block->data, block->nbytes);
    return {block->data, block, &free_block, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    enqueue(current_stream(), {"copy", "bytes", [to, from, nbytes] {
                                 std::memcpy(to, from, nbytes);
                                 return true;
                               }, nullptr, nullptr});
  }
  static void nothing(void*) {}
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &forget, c10::Device(c10::DeviceType::CPU)};
    auto* data = static_cast<char*>(std::aligned_alloc(kAlign, rounded(nbytes, kAlign)));
    TORCH_CHECK(data != nullptr, "pretend device: out of host memory");
    std::memset(data, kPoison, nbytes);
    auto guard = lock();
    memory().pinned[data] = nbytes;
    return {data, data, &forget, c10::Device(c10::DeviceType::CPU)};
  }
  static void forget(void* data) {
    if (data == nullptr) return;
    auto guard = lock();
    memory().pinned.erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &forget;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

}  // namespace

c10::Allocator* device_allocator() {
  return &device_memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

bool is_pinned(const void* data) {
  auto guard = lock();
  return lies_in(memory().pinned, data);
}

bool is_device(const void* data) {
  auto guard = lock();
  return lies_in(memory().segments, data);
}

void use_on_stream(const c10::DataPtr& data, c10::StreamId stream) {
  if (data.get_deleter() != &free_block || data.get_context() == nullptr) return;
  auto guard = lock();
  static_cast<Block*>(data.get_context())->used_on.insert(stream);
}

std::map<std::string, int64_t> memory_stats() {
  auto guard = lock();
  auto& m = memory();
  return {{"allocated", m.allocated}, {"peak", m.peak}, {"reserved", m.reserved}, {"blocks", m.active_blocks},
          {"allocations", m.given_out}, {"segments", int64_t(m.segments.size())}, {"waiting", int64_t(m.waiting.size())}, {"retries", m.retries}, {"peak_reserved", m.peak_reserved},
          {"requested", m.requested}, {"peak_requested", m.peak_requested}};
}

void reset_peak_memory() {
  auto guard = lock();
  memory().peak = memory().allocated;
  memory().peak_requested = memory().requested;
  memory().peak_reserved = memory().reserved;
}

void set_memory_limit(int64_t nbytes) {
  auto guard = lock();
  memory().limit = nbytes;
  memory().limits += nbytes > 0;
}

// Segments that are free as a whole go back to the system, which waits until nothing uses them any more.
void release_cached_memory() {
  synchronize_device("release of cached memory");
  auto guard = lock();
  auto& m = memory();
  look_at_waiting();
  for (auto& [key, pool] : m.free) {
    if (key < 0) continue;  // replays use it
    auto& freed = m.freed[key];
    for (auto it = pool.begin(); it != pool.end();) {
      auto* block = *it;
      if (block->before != nullptr || block->behind != nullptr) {
        ++it;
        continue;
      }
      auto lies_inside = [&](auto& range) { return range.first >= block->data && range.first < block->data + block->nbytes; };
      freed.erase(std::remove_if(freed.begin(), freed.end(), lies_inside), freed.end());
      m.segments.erase(block->data);
      m.reserved -= int64_t(block->nbytes);
      munmap(block->data, block->nbytes);
      it = pool.erase(it);
      delete block;
    }
  }
}

void set_poisoning(bool yes) {
  auto guard = lock();
  memory().poisoning = yes;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory)

}  // namespace pretend
