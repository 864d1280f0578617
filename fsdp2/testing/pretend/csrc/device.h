// The pretend accelerator: streams whose work runs late, in an order that a seed chooses, and memory that belongs to streams.
//
// Everything that a device would do is an Entry in the queue of a stream. Entries hold addresses and never references to device
// memory: as on a real device, memory that the host lets go of too early is gone. One thread, the executor, runs entries when the
// host waits for something, and only until that is done.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {

// One recording of one event, or the end of one collective.
struct Ticket {
  bool done = false;
  int64_t capture = 0;                         // the number of the graph capture that it is a part of; 0: of none; < 0: of a watch
  std::map<c10::StreamId, int64_t> is_behind;  // in a capture: how many entries of each stream
};
using TicketPtr = std::shared_ptr<Ticket>;

struct Entry {
  const char* kind = "";            // "op", "copy", "poison", "record", "wait", "collective"
  std::string name;
  std::function<bool()> run;        // returns false if it has to be asked again; empty for records and waits
  TicketPtr waits;                  // not before this one is done
  TicketPtr marks;                  // done behind this entry
  std::function<Entry()> again = {};  // what a replay of a captured graph queues in its place; none: a copy of it
};

inline c10::Device the_device() {
  return {c10::DeviceType::PrivateUse1, 0};
}

// ---- streams (schedule.cpp) ----

c10::StreamId current_stream();
c10::StreamId exchange_stream(c10::StreamId stream);
c10::StreamId new_stream(int priority);

void enqueue(c10::StreamId stream, Entry entry);
TicketPtr record(c10::StreamId stream);
void wait(c10::StreamId stream, const TicketPtr& ticket);
bool query(const TicketPtr& ticket);  // asked often enough, it lets the device go on

// The host waits. `why` is counted, and refused where the mode says so.
void synchronize(const TicketPtr& ticket, const char* why);
void synchronize_stream(c10::StreamId stream, const char* why);
void synchronize_device(const char* why);
void count_host_wait(const std::string& why);  // without waiting
void refuse_in_capture(const std::string& what);
void report(const std::string& violation);     // raised where the host waits next

// Runs what is queued if the host has been silent for long, so that other ranks are not kept waiting.
void keep_alive(bool yes);

// immediately: each entry runs when it is queued, which is what every legal order must be equal to.
void configure(uint64_t seed, bool immediately);
void set_refused_waits(std::vector<std::string> kinds, bool all);
std::map<std::string, int64_t> host_waits();
std::map<std::string, int64_t> launches();
void reset_counts();
void count_launch(const std::string& kind);
// A capture begins with the current stream. Another stream joins it by waiting for an event of it, and the first one must be behind all
// of them at the end. records: as on CUDA, its work does not run, but in each replay of what end_capture returns (0: nothing); then it
// has memory of its own, which nobody else is ever given. Else it runs, and only the rules hold.
void begin_capture(bool records);
int64_t end_capture(bool check);
bool is_capturing();
// Work that nobody captures is held to the same rules of streams, and goes on as ever. At the end: what a capture would have refused,
// by stream.
void begin_watch();
std::map<c10::StreamId, std::string> end_watch();
bool is_recorded(c10::StreamId stream);  // work that it is given now is recorded for replays
void replay(int64_t graph);
void set_tracing(bool yes);
std::vector<std::string> take_trace();

std::unique_lock<std::recursive_mutex> lock();

// ---- memory (memory.cpp) ----

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
// ranges: their sizes, by where they begin
inline bool lies_in(const std::map<const char*, size_t>& ranges, const void* data) {
  auto* address = static_cast<const char*>(data);
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return false;
  --it;
  return address < it->first + it->second;
}

bool is_pinned(const void* data);
bool is_device(const void* data);
void use_on_stream(const c10::DataPtr& data, c10::StreamId stream);
std::map<std::string, int64_t> memory_stats();
void reset_peak_memory();
void set_poisoning(bool yes);
void set_memory_limit(int64_t nbytes);  // of what may be reserved; 0: none
void release_cached_memory();           // waits for the device

}  // namespace pretend
