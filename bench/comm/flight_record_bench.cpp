// What the flight record adds to a collective: writing the entry and its end, and the decorator around an engine that does nothing.
#include <cstdlib>
#include <filesystem>
#include <string>

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/decorators/flight_record.h"
#include "tessera/comm/flight_record/flight_record.h"

namespace tessera::comm {
namespace {

const GroupInfo kWorld{.name = "world", .rank = 0, .size = 2};
const Environment kRank{.rank = 0, .size = 2};

struct Folder {
  Folder() : path((std::filesystem::temp_directory_path() / "tessera_flight_XXXXXX").string()) { path = mkdtemp(path.data()); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

class Idle : public DecoratedEngine {
 public:
  Idle() : DecoratedEngine(kWorld, {}) {}
  Work start(const Call&) override { return done_; }

 private:
  Work done_ = completed_work();
};

void enter_and_complete(benchmark::State& state) {
  const Folder folder;
  FlightRecord record(folder.path, kRank);
  const auto group = record.add_group(kWorld).value();
  const auto tensor = at::zeros({32, 768});
  const Call call{.op = Operation::AllReduce, .inputs = {tensor}, .outputs = {tensor}, .reduction = Op::Sum};
  const CallSite site("layers.17.mlp");
  for (auto _ : state) record.mark(record.enter(group, call), flight::State::Completed);
}
BENCHMARK(enter_and_complete)->Name("flight_record/enter_and_complete");

void call_engine(benchmark::State& state, bool recorded) {
  const Folder folder;
  std::shared_ptr<Engine> engine = std::make_shared<Idle>();
  if (recorded) engine = flight_recording(folder.path, kRank)(engine, kWorld);
  const auto tensor = at::zeros({32, 768});
  const Call call{.op = Operation::AllReduce, .inputs = {tensor}, .outputs = {tensor}, .reduction = Op::Sum};
  const CallSite site("layers.17.mlp");
  for (auto _ : state) benchmark::DoNotOptimize(engine->start(call));
}
BENCHMARK_CAPTURE(call_engine, without, false)->Name("flight_record/all_reduce/without");
BENCHMARK_CAPTURE(call_engine, with, true)->Name("flight_record/all_reduce/with");

}  // namespace
}  // namespace tessera::comm
