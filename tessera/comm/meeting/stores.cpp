#include "tessera/comm/meeting/stores.h"

#include <future>
#include <memory>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/core/error.h"

namespace tessera::comm {

c10::intrusive_ptr<c10d::TCPStore> serve_store(const Endpoint& endpoint) {
  std::optional<Listener> listener = try_listen(endpoint);
  if (!listener) return {};
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(listener->port());
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener->release();
  return c10::make_intrusive<c10d::TCPStore>(listener->address(), options);
}

c10::intrusive_ptr<c10d::Store> join_store(const Endpoint& endpoint, std::chrono::milliseconds patience) {
  const Probe found = probe(endpoint, patience);
  if (!found.problem.empty()) throw CommError(found.problem);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(endpoint.port);
  options.waitWorkers = false;
  options.timeout = patience;
  // The constructor waits without limit for an answer: a thread of its own does, and is left behind where none comes.
  auto store = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto answer = store->get_future();
  std::thread([store, endpoint, options] {
    try {
      store->set_value(c10::make_intrusive<c10d::TCPStore>(endpoint.host, options));
    } catch (...) {
      store->set_exception(std::current_exception());
    }
  }).detach();
  if (answer.wait_for(patience) != std::future_status::ready) throw CommError("what listens there does not answer as a store does");
  return answer.get();
}

}  // namespace tessera::comm
