#include "tessera/comm/backends/factory.h"

#include <cstdlib>
#include <thread>

#include <ATen/Parallel.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include "tessera/comm/backends/host_identity.h"
#include "tessera/comm/backends/shm/engine.h"
#include "tessera/core/host_name.h"

namespace tessera::comm {
namespace {

class StoreDirectory : public shm::Directory {
 public:
  explicit StoreDirectory(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::string get(const std::string& key) override { return store_->get_to_str(key); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

int cores() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  return static_cast<int>(std::thread::hardware_concurrency());
}

class ShmFactory : public EngineFactory {
 public:
  explicit ShmFactory(const EngineOptions& options)
      : host_(options.host.empty() ? host_identity() : options.host), local_ranks_(options.environment.local_size) {
    if (const char* folder = std::getenv("TESSERA_SHM_DIR")) folder_ = folder;
  }

  std::shared_ptr<Engine> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    StoreDirectory directory(store);
    const shm::Membership member{.group = group.name,
                                 .rank = group.rank,
                                 .size = group.size,
                                 .timeout = group.timeout,
                                 .host = host_,
                                 .host_name = host_name("a host without a name"),
                                 .folder = folder_,
                                 .alone_on_core = local_ranks_ * at::get_num_threads() <= cores()};
    return std::make_shared<ShmEngine>(std::make_shared<shm::Session>(member, directory));
  }

 private:
  std::string host_, folder_;
  int local_ranks_;
};

}  // namespace

std::unique_ptr<EngineFactory> make_shm_factory(const EngineOptions& options) { return std::make_unique<ShmFactory>(options); }

}  // namespace tessera::comm
