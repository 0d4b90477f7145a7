// Torch's wheel exports Gloo's symbols and leaves out its headers. The files of this folder declare, in our words, just what c10d/ProcessGroupGloo.hpp names
// and what gloo.cpp calls; every object is made and destroyed inside torch's own library.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>

#include <gloo/transport/device.h>

namespace gloo {
namespace transport {
class Pair;

namespace tcp {

/// A connection to one peer over TCP, with the base transport::Pair at its start. Signalling fails every operation that waits on it here, and closes it, which
/// fails those of the peer.
class Pair {
 public:
  std::exception_ptr signalExceptionExternal(const std::string& message);
};

}  // namespace tcp
}  // namespace transport

/// The connections of one group. Only ever handled through the pointers that ProcessGroupGloo holds: its layout is not declared.
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  std::unique_ptr<transport::Pair>& getPair(int rank);  ///< null for this rank
};

namespace transport {

/// A registered buffer in flight; destroyed through its virtual destructor.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace transport
}  // namespace gloo
