// Streams, events, and the executor that picks, by the seed, which stream goes on.

#include <Python.h>

#include "device.h"

#include <c10/core/GradMode.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>


#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <utility>
#include <thread>

namespace pretend {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSilence = std::chrono::seconds(2);

// The host may hold Python's lock where it waits; what the executor runs may need it.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state != nullptr) PyEval_RestoreThread(state);
  }
};

struct Random {
  uint64_t state = 0;
  uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
};

struct StreamQueue {
  std::deque<Entry> entries;
  uint64_t priority = 0;
  bool has_priority = false;
  bool stalled = false;  // its collective waits for other ranks
};

// Its streams are its own: a replay is ordered by the stream that is current then, and by nothing else.
struct Graph {
  c10::StreamId first = 0;
  std::map<c10::StreamId, c10::StreamId> streams;
  std::vector<std::pair<c10::StreamId, Entry>> entries;
};

struct State {
  std::recursive_mutex mutex;
  std::condition_variable_any wanted, progressed;
  std::map<c10::StreamId, StreamQueue> streams;
  std::vector<TicketPtr> targets;  // what the host waits for
  c10::StreamId last_stream = 0;
  bool started = false;
  bool immediately = false;
  bool keep_alive = false;
  bool running = false;
  bool capturing = false;
  bool recording = false;
  bool watching = false;  // work that nobody captures, for what a capture would refuse
  std::map<c10::StreamId, std::string> would_refuse;
  int64_t captures = 0;
  c10::StreamId captured_first = 0;
  std::map<c10::StreamId, std::map<c10::StreamId, int64_t>> captured;  // the streams of a capture, and what each is behind
  std::map<int64_t, std::shared_ptr<Graph>> graphs;
  bool tracing = false;
  Clock::time_point heard = Clock::now();
  Random random;
  uint64_t changes_in_64 = 8;  // how often a stream's priority changes, of 64 steps
  int64_t queries = 0;
  std::string violation;
  std::exception_ptr error;
  std::map<std::string, int64_t> waits, launches;
  std::set<std::string> refused;
  bool all_refused = false;
  std::vector<std::string> trace;
};

State& state() {
  static State* it = new State;  // the executor outlives everything
  return *it;
}

thread_local c10::StreamId current = 0;

using Lock = std::unique_lock<std::recursive_mutex>;

bool idle(State& s) {
  for (auto& [id, queue] : s.streams)
    if (!queue.entries.empty()) return false;
  return true;
}

// The stream that goes on; -1 if none can.
c10::StreamId pick(State& s, bool stalled_too) {
  c10::StreamId best = -1;
  uint64_t most = 0;
  for (auto& [id, queue] : s.streams) {
    if (queue.entries.empty() || (queue.stalled && !stalled_too)) continue;
    auto& head = queue.entries.front();
    if (head.waits && !head.waits->done) continue;
    if (!queue.has_priority) {
      queue.priority = s.random.next();
      queue.has_priority = true;
    }
    if (best < 0 || queue.priority > most) {
      best = id;
      most = queue.priority;
    }
  }
  return best;
}

// Runs one entry; false if none can run.
bool step(State& s, Lock& lock) {
  auto id = pick(s, false);
  if (id < 0) {  // only collectives that wait for other ranks are left
    for (auto& [other, queue] : s.streams) queue.stalled = false;
    id = pick(s, true);
  }
  if (id < 0) return false;
  auto& queue = s.streams[id];
  auto& head = queue.entries.front();
  bool finished = true;
  if (head.run) {
    auto run = std::move(head.run);
    const auto name = head.name;
    lock.unlock();
    try {
      finished = run();
    } catch (const std::exception& error) {
      lock.lock();
      if (!s.error) s.error = std::make_exception_ptr(std::runtime_error("pretend device: " + name + ": " + error.what()));
      lock.unlock();
    }
    // What it held may be a tensor's last reference, whose end needs Python's lock. Whoever has that may be waiting for ours.
    if (finished) run = nullptr;
    lock.lock();
    if (!finished) head.run = std::move(run);
  }
  if (!finished) {
    queue.stalled = true;
    return true;
  }
  for (auto& [other, each] : s.streams) each.stalled = false;
  Entry done = std::move(queue.entries.front());
  queue.entries.pop_front();
  if (done.marks) done.marks->done = true;
  if (s.tracing) s.trace.push_back(std::to_string(id) + " " + done.kind + " " + done.name);
  if (s.random.next() % 64 < s.changes_in_64) queue.priority = s.random.next();
  return true;
}

bool reached(State& s) {
  for (auto& ticket : s.targets)
    if (!ticket->done) return false;
  return true;
}

[[noreturn]] void execute() {
  auto& s = state();
  at::set_num_threads(1);  // the same order of additions each time
  at::AutoDispatchBelowADInplaceOrView below;
  c10::NoGradGuard no_grad;
  Lock lock(s.mutex);
  for (;;) {
    if (reached(s)) {
      s.targets.clear();
      s.progressed.notify_all();
      if (s.immediately && step(s, lock)) continue;  // poison that was queued behind what ran, and for which nobody waits
      if (s.wanted.wait_for(lock, std::chrono::milliseconds(200)) == std::cv_status::timeout) {
        const bool silent = s.keep_alive && s.targets.empty() && Clock::now() - s.heard > kSilence;
        if (silent) step(s, lock);
        while (silent && s.targets.empty() && Clock::now() - s.heard > kSilence && step(s, lock)) {
        }
      }
      continue;
    }
    if (!step(s, lock)) {
      s.error = std::make_exception_ptr(std::runtime_error("pretend device: the host waits for something that nothing will do"));
      for (auto& ticket : s.targets) ticket->done = true;
    }
  }
}

void start(State& s) {
  if (s.started) return;
  s.started = true;
  std::thread(execute).detach();
}

// Of the capture or watch that is under way, as tickets have it.
int64_t number_of(const State& s) {
  return s.watching ? -s.captures : s.captures;
}

// A capture refuses what `stream` does; a watch notes the first such thing of each stream.
void refuse(State& s, c10::StreamId stream, const std::string& what) {
  TORCH_CHECK(s.watching, "pretend device: ", what);
  s.would_refuse.emplace(stream, what);
}

// An entry is about to be queued while a graph is captured, or the work watched.
void note_captured(State& s, c10::StreamId stream, const Entry& entry) {
  const std::string kind = entry.kind;
  if (kind == "poison" || kind == "wait") return;
  auto found = s.captured.find(stream);
  if (found == s.captured.end()) {
    if (kind != "record") refuse(s, stream, entry.name + " on a stream that takes no part in the capture: a replay would not run it");
    return;
  }
  if (kind != "record") ++found->second[stream];
  if (entry.marks) {
    entry.marks->capture = number_of(s);
    entry.marks->is_behind = found->second;
  }
}

// `stream` is about to wait for `ticket`.
void note_wait(State& s, c10::StreamId stream, const Ticket& ticket) {
  if (!s.capturing && !s.watching) {
    TORCH_CHECK(ticket.capture <= 0, "pretend device: a stream waits for an event of a captured graph, outside of that graph");
    return;
  }
  const bool is_of_this = ticket.capture == number_of(s);
  auto found = s.captured.find(stream);
  if (found == s.captured.end()) {
    if (is_of_this) s.captured[stream] = ticket.is_behind;
    return;
  }
  if (!is_of_this) refuse(s, stream, "a stream of a capture waits for an event from outside of it");
  if (!is_of_this) return;
  for (auto& [other, count] : ticket.is_behind) found->second[other] = std::max(found->second[other], count);
}

void raise_what_happened(State& s) {
  if (s.error) {
    auto error = s.error;
    s.error = nullptr;
    std::rethrow_exception(error);
  }
  if (!s.violation.empty()) {
    auto text = s.violation;
    s.violation.clear();
    TORCH_CHECK(false, "pretend device: ", text);
  }
}

void run_until(std::vector<TicketPtr> tickets) {
  auto& s = state();
  WithoutGil without;
  Lock lock(s.mutex);
  start(s);
  s.heard = Clock::now();
  for (auto& ticket : tickets) s.targets.push_back(ticket);
  s.wanted.notify_all();
  s.progressed.wait(lock, [&] {
    for (auto& ticket : tickets)
      if (!ticket->done) return false;
    return true;
  });
  s.heard = Clock::now();
  raise_what_happened(s);
}

}  // namespace

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
  return ++state().last_stream;
}

void enqueue(c10::StreamId stream, Entry entry) {
  auto& s = state();
  Lock lock(s.mutex);
  s.heard = Clock::now();
  if (s.capturing || s.watching) note_captured(s, stream, entry);
  const bool is_poison = std::string(entry.kind) == "poison";
  if (is_recorded(stream)) {
    // A block holds what the last replay left in it: nobody can say whether that was written after its free.
    if (!is_poison || entry.name != "check") s.graphs[s.captures]->entries.emplace_back(stream, std::move(entry));
    return;
  }
  if (s.immediately && is_poison && idle(s)) {
    entry.run();
    return;
  }
  TicketPtr last;
  // The allocator, which poisons, has the lock: it would wait for ever. The executor, at work for another thread, comes to the poison too.
  if (s.immediately && !is_poison) {
    if (!entry.marks) entry.marks = std::make_shared<Ticket>();
    last = entry.marks;
  }
  s.streams[stream].entries.push_back(std::move(entry));
  if (last) {
    lock.unlock();
    run_until({last});
  }
}

TicketPtr record(c10::StreamId stream) {
  auto ticket = std::make_shared<Ticket>();
  enqueue(stream, {"record", "", nullptr, nullptr, ticket});
  return ticket;
}

void wait(c10::StreamId stream, const TicketPtr& ticket) {
  if (!ticket) return;
  {
    auto guard = lock();
    note_wait(state(), stream, *ticket);
  }
  enqueue(stream, {"wait", "", nullptr, ticket, nullptr});
}

bool query(const TicketPtr& ticket) {
  refuse_in_capture("asking whether an event has passed");
  TORCH_CHECK(!ticket || ticket->capture <= 0, "pretend device: the host asks for an event of a captured graph");
  auto& s = state();
  Lock lock(s.mutex);
  s.heard = Clock::now();
  if (!ticket || ticket->done) return true;
  if (++s.queries % 64 != 0) return false;
  lock.unlock();
  run_until({ticket});
  return true;
}

void count_host_wait(const std::string& why) {
  refuse_in_capture("a host synchronisation (" + why + ")");
  auto& s = state();
  Lock lock(s.mutex);
  ++s.waits[why];
  TORCH_CHECK(!s.all_refused && !s.refused.count(why), "pretend device: a host synchronisation (", why, ") where none may be");
}

void synchronize(const TicketPtr& ticket, const char* why) {
  count_host_wait(why);
  TORCH_CHECK(!ticket || ticket->capture <= 0, "pretend device: the host waits for an event of a captured graph");
  if (ticket) run_until({ticket});
}

void synchronize_stream(c10::StreamId stream, const char* why) {
  count_host_wait(why);
  run_until({record(stream)});
}

void synchronize_device(const char* why) {
  count_host_wait(why);
  auto& s = state();
  std::vector<TicketPtr> tickets;
  {
    Lock lock(s.mutex);
    std::vector<c10::StreamId> ids;
    for (auto& [id, queue] : s.streams)
      if (!queue.entries.empty()) ids.push_back(id);
    for (auto id : ids) tickets.push_back(record(id));
  }
  run_until(tickets);
}

void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(!state().capturing, "pretend device: ", what, " while a graph is captured");
}

void report(const std::string& violation) {
  auto guard = lock();
  if (state().violation.empty()) state().violation = violation;
}

void keep_alive(bool yes) {
  auto guard = lock();
  state().keep_alive = yes;
}

void configure(uint64_t seed, bool immediately) {
  auto& s = state();
  Lock guard(s.mutex);
  TORCH_CHECK(idle(s), "pretend device: synchronize before the order changes");
  s.immediately = immediately;
  s.random.state = seed;
  constexpr uint64_t kinds[] = {0, 1, 8, 32};
  s.changes_in_64 = kinds[s.random.next() % 4];
  for (auto& [id, queue] : s.streams) queue.has_priority = false;
}

void set_refused_waits(std::vector<std::string> kinds, bool all) {
  auto guard = lock();
  state().refused = {kinds.begin(), kinds.end()};
  state().all_refused = all;
}

std::map<std::string, int64_t> host_waits() {
  auto guard = lock();
  return state().waits;
}

std::map<std::string, int64_t> launches() {
  auto guard = lock();
  return state().launches;
}

void count_launch(const std::string& kind) {
  auto guard = lock();
  ++state().launches[kind];
}

void reset_counts() {
  auto guard = lock();
  state().waits.clear();
  state().launches.clear();
}

void begin_capture(bool records) {
  auto& s = state();
  auto guard = lock();
  TORCH_CHECK(!s.capturing && !s.watching, "pretend device: a capture in a capture");
  s.capturing = true;
  s.recording = records;
  ++s.captures;
  s.captured_first = current;
  s.captured = {{current, {}}};
  if (!records) return;
  s.graphs[s.captures] = std::make_shared<Graph>();
  s.graphs[s.captures]->first = current;
}

int64_t end_capture(bool check) {
  auto& s = state();
  auto guard = lock();
  s.capturing = false;
  auto captured = std::exchange(s.captured, {});
  auto graph = s.recording ? s.graphs[s.captures] : nullptr;
  s.graphs.erase(s.captures);
  if (!check) return 0;
  auto& behind = captured[s.captured_first];
  for (auto& [stream, own] : captured)
    TORCH_CHECK(behind[stream] >= own[stream], "pretend device: the capture ends while stream ", stream, " has not been joined");
  if (!graph) return 0;
  for (auto& [stream, own] : captured) graph->streams[stream] = ++s.last_stream;
  s.graphs[s.captures] = graph;
  return s.captures;
}

void begin_watch() {
  auto& s = state();
  auto guard = lock();
  TORCH_CHECK(!s.capturing && !s.watching, "pretend device: a watch in a capture");
  s.watching = true;
  ++s.captures;
  s.captured_first = current;
  s.captured = {{current, {}}};
  s.would_refuse.clear();
}

std::map<c10::StreamId, std::string> end_watch() {
  auto& s = state();
  auto guard = lock();
  s.watching = false;
  auto watched = std::exchange(s.captured, {});
  auto& behind = watched[s.captured_first];
  for (auto& [stream, own] : watched)
    if (behind[stream] < own[stream]) s.would_refuse.emplace(stream, "its work has not been joined");
  return std::move(s.would_refuse);
}

bool is_recorded(c10::StreamId stream) {
  auto& s = state();
  auto guard = lock();
  return s.capturing && s.recording && s.captured.count(stream) > 0;
}

void replay(int64_t number) {
  refuse_in_capture("a replay");
  auto graph = [&] {
    auto guard = lock();
    return state().graphs.at(number);
  }();
  std::map<const Ticket*, TicketPtr> tickets;
  for (auto& [stream, entry] : graph->entries) {
    auto again = entry.again ? entry.again() : entry;
    if (entry.waits) again.waits = tickets.at(entry.waits.get());
    if (entry.marks) {
      if (!entry.again) again.marks = std::make_shared<Ticket>();
      tickets[entry.marks.get()] = again.marks;
    }
    enqueue(stream == graph->first ? current : graph->streams.at(stream), std::move(again));
  }
}

bool is_capturing() {
  return state().capturing;
}

void set_tracing(bool yes) {
  auto guard = lock();
  state().tracing = yes;
  state().trace.clear();
}

std::vector<std::string> take_trace() {
  auto guard = lock();
  return std::move(state().trace);
}

}  // namespace pretend
