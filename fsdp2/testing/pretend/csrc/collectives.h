#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace pretend {

// wire: carries bytes between the ranks; none: modeled, all ranks have the same data
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> wire, int rank, int size);

// Collectives between processes run one at a time, in the order of issue, whichever their communicator; one that waits longer for the
// other ranks is an error. 0: communicators do not wait for each other.
void set_one_at_a_time(double seconds);

}  // namespace pretend
