#include <cstdlib>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/backends/mpi/library.h"
#include "tessera/comm/backends/mpi/plugin/engine.h"
#include "tessera/core/error.h"

namespace tessera::comm::mpi {
namespace {

class MpiFactory : public EngineFactory {
 public:
  explicit MpiFactory(Runtime& runtime) : runtime_(runtime) {}

  std::shared_ptr<Engine> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    gather_members(group, *store);
    return std::make_shared<MpiEngine>(runtime_, group, store);
  }

 private:
  // MPI itself would wait for a missing member for ever.
  static void gather_members(const GroupInfo& group, c10d::Store& store) {
    store.set("here/" + std::to_string(group.rank), "yes");
    for (int member = 0; member < group.size; ++member) store.wait({"here/" + std::to_string(member)}, group.timeout);
  }

  Runtime& runtime_;
};

class Library : public MpiLibrary {
 public:
  std::string share(const Environment& environment, const std::string& text, bool stay) override {
    runtime_.start(environment);
    auto shared = runtime_.broadcast(text);
    if (!stay) runtime_.finish();
    return shared;
  }

  std::unique_ptr<EngineFactory> make_factory(const EngineOptions& options) override {
    runtime_.start(options.environment);
    return std::make_unique<MpiFactory>(runtime_);
  }

  void end() { runtime_.end(); }

 private:
  Runtime runtime_;
};

}  // namespace
}  // namespace tessera::comm::mpi

extern "C" tessera::comm::MpiLibrary* tessera_mpi_library() {
  static tessera::comm::mpi::Library library;
  tessera::comm::mpi::Progress::shared();  // made later, ended earlier
  [[maybe_unused]] static const int asked = std::at_quick_exit([] {
    tessera::comm::mpi::Progress::shared().end();
    library.end();
  });
  return &library;
}
