#pragma once

#include <stdexcept>

namespace tessera::comm::shm {

/// What went wrong among ranks that share memory, in a user's words: who died, who is late, what is full. The collective's name and group are put in front by
/// whoever called it.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tessera::comm::shm
