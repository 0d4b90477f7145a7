#include "tessera/comm/testing.h"

#include <mutex>
#include <thread>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/comm/failure.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// A store in memory whose waiting callers can be turned away.
class RevocableStore : public c10d::HashStore {
 public:
  using HashStore::wait;

  void revoke() {
    const std::lock_guard lock(m_);
    revoked_ = true;
    cv_.notify_all();
  }

  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    std::unique_lock lock(m_);
    cv_.wait_for(lock, timeout, [&] { return revoked_ || checkLocked(lock, keys); });
    if (checkLocked(lock, keys)) return;
    if (revoked_) throw CommError("another rank has failed");
    throw CommError("no rank has set " + keys.front());
  }

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, timeout_);
    return HashStore::get(key);
  }

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this); }

 private:
  bool revoked_ = false;
};

[[noreturn]] void rethrow_naming(int rank, const std::exception_ptr& error) {
  const auto prefix = detail::concat("rank ", rank, ": ");
  try {
    std::rethrow_exception(error);
  } catch (const ConfigError& config) {
    throw ConfigError(prefix + config.what());
  } catch (const CommError& comm) {
    throw CommError(prefix + comm.what());
  } catch (const InternalError& internal) {
    throw InternalError(prefix + internal.what());
  } catch (...) {
    throw std::runtime_error(prefix + message_of(std::current_exception()));
  }
}

// Of several devices each rank has its own: the current one of its thread. (Ranks that share one would share the thread that autograd keeps for it, and one
// that waits there for another would wait for ever.)
void use_device_of(int rank) {
  const auto accelerator = at::getAccelerator();
  if (!accelerator) return;
  const c10::impl::VirtualGuardImpl guard(*accelerator);
  if (const int devices = guard.deviceCount(); devices > 0) guard.setDevice({*accelerator, static_cast<c10::DeviceIndex>(rank % devices)});
}

}  // namespace

void run_ranks(int n, const std::function<void(World&)>& body, const RunOptions& options) {
  // MKL chooses its vector functions at the first call, and not safely: of threads that make it at once, now and then one computes with the low-accuracy
  // version (seen: tanh wrong by 4e-5 on one rank of five, in 1 of 200 processes). So the first call is made alone.
  at::tanh(at::ones({64}));
  const auto store = c10::make_intrusive<RevocableStore>();
  store->setTimeout(options.timeout);
  std::mutex mutex;
  std::exception_ptr first;
  int first_rank = -1;
  const auto note = [&](int rank) {
    const std::lock_guard lock(mutex);
    if (first) return;
    first = std::current_exception();
    first_rank = rank;
  };
  const auto run = [&](int rank) {
    at::set_num_threads(1);
    use_device_of(rank);
    std::optional<World> world;  // outlives the exception: its connections must not close before the cause is known
    try {
      const Environment environment{.rank = rank, .size = n, .local_rank = rank, .local_size = n, .launched = true};
      const auto host = options.hosts.empty() ? std::string() : "host " + std::to_string(options.hosts[rank]);
      world.emplace(World::join(environment, store,
                                {.backend = options.backend,
                                 .interface = options.interface,
                                 .timeout = options.timeout,
                                 .algorithm = options.algorithm,
                                 .table = options.table,
                                 .check = options.check,
                                 .host = host,
                                 .decorators = options.decorators}));
      world->guard([&] {
        try {
          body(*world);
        } catch (...) {
          note(rank);
          throw;
        }
      });
    } catch (...) {
      note(rank);
      store->revoke();
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < n; ++rank) threads.emplace_back(run, rank);
  } catch (...) {  // no thread for the next rank: the others wait for it, and have to end before this does
    note(static_cast<int>(threads.size()));
    store->revoke();
  }
  for (auto& thread : threads) thread.join();
  if (first) rethrow_naming(first_rank, first);
}

}  // namespace tessera::comm
