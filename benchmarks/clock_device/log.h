// The device that runs nothing: what a program gives to it is written down, with the host's time between.
//
// It is the pretend accelerator's interface (device.h: streams, events, memory) with another inside. Tensors have addresses and no
// memory behind them, so a model may be as large as it likes.

#pragma once

#include <ATen/core/Tensor.h>

#include "../../fsdp2/testing/pretend/csrc/device.h"

namespace pretend {

struct Seen {  // one tensor of an operator
  int roles = 0;  // 1: read, 2: written
  std::string dtype;
  int64_t nbytes = 0;  // an expanded dimension counts once
  std::vector<int64_t> sizes;
};

struct Record {
  std::string kind;  // as clock/trace.py lists them
  std::string name;
  int64_t stream = 0;
  int64_t id = 0;     // of an event, block or group
  int64_t other = 0;  // what `kind` needs besides
  int64_t nbytes = 0;
  std::vector<Seen> tensors;
  int64_t host_ns = 0;  // the host's time since the record before
};

// While one of these lives, the host's time stands still: what the device's own bookkeeping takes is none of the program's.
struct InDevice {
  InDevice();
  ~InDevice();
  InDevice(const InDevice&) = delete;
};

void append(Record record);
void set_logging(bool yes);
std::vector<Record> take_log();

struct Numbered final : Ticket {
  explicit Numbered(int64_t number) : number(number) {
    done = true;  // as soon as the host asks
  }
  int64_t number;
};
int64_t new_number();
int64_t number_of(const TicketPtr& ticket);

}  // namespace pretend
