#include "tessera/train/step_graph.h"

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#if __has_include(<ATen/accelerator/Graph.h>)
#include <ATen/accelerator/Graph.h>
#define TESSERA_HAS_GRAPHS
#endif

#include "tessera/comm/unmeasured.h"
#include "tessera/core/error.h"
#include "tessera/memory/history.h"

// A graph knows addresses and numbers, not what they stand for. So whatever differs between steps has to lie in memory that stays: the batch, copied here
// before each replay. Numbers of the host that are part of the passes (the loss's scale, how many tokens count) are those of the capture for ever, which is why
// a batch of another form runs apart, and why config/graph.cpp refuses what draws random numbers or decides anything from data. Gradients are what the passes
// leave to the update: the graph writes them where they were made in the capture, and they are put back into their parameters, which may have lost them since.

namespace tessera {
namespace {

#ifdef TESSERA_HAS_GRAPHS
using Graph = at::accelerator::Graph;
bool has_graphs(at::Device device) { return at::has_graph_impl(device.type()); }
#else
struct Graph {  // a torch before 2.12 or so has none that are the same on every device
  void capture_begin() {}
  void capture_end() {}
  void replay() {}
};
bool has_graphs(at::Device) { return false; }
#endif

void begin_capture(Graph& graph) {
#ifdef TESSERA_HAS_GRAPHS
  graph.capture_begin({0, 0}, at::GraphCaptureMode::ThreadLocal);  // other threads look at their collectives meanwhile
#else
  graph.capture_begin();
#endif
}

bool of_one_form(const data::MicroBatch& one, const data::MicroBatch& other) {
  const auto tensors = data::tensors_of(one), others = data::tensors_of(other);
  return one.rows == other.rows && one.seq_len == other.seq_len && one.row_samples == other.row_samples && one.weight == other.weight &&
         one.index == other.index && one.valid_tokens == other.valid_tokens && one.global_valid_tokens == other.global_valid_tokens &&
         std::ranges::equal(tensors, others, [](const at::Tensor* a, const at::Tensor* b) { return a->sizes() == b->sizes(); });
}

bool of_one_form(const data::StepBatch& one, const data::StepBatch& other) {
  return one.global_valid_tokens == other.global_valid_tokens &&
         std::ranges::equal(one.micro_batches, other.micro_batches, [](const auto& a, const auto& b) { return of_one_form(a, b); });
}

/// What has ended a capture. A peer that is lost and memory that is used up are no refusal of graphs, and whoever hears of them has to know what they are. A
/// collective that cannot be captured fails by the words of one that is lost.
[[noreturn]] void rethrow_of_capture() {
  try {
    throw;
  } catch (const CommError& error) {
    throw CommError(detail::concat(error.what(), "; in the step that run.graph captures: if no rank has failed, set run.graph = false"));
  } catch (const InternalError&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    throw ConfigError(detail::concat("run.graph = true: the step cannot be captured: ", error.what(), "; set run.graph = false"));
  }
}

/// Has the tracker see so much alive at once: the memory of a graph, which a replay uses though nobody allocates it.
void reach(const MemoryTracker& memory, const MemoryByCategory& peak, at::Device device) {
  const auto now = memory.current_by_category();
  int64_t missing = total_of(peak) - total_of(now);
  std::array<char, num_memory_categories> places{};
  size_t counted = 0;
  for (; counted < places.size() && missing > 0; ++counted) {
    const bool last = counted + 1 == places.size();  // what has been given back since takes the place of what is alive now
    const int64_t bytes = last ? missing : std::clamp<int64_t>(peak[counted] - now[counted], 0, missing);
    const MemoryScope category(static_cast<MemoryCategory>(counted));
    count_memory(&places[counted], bytes, device);
    missing -= bytes;
  }
  for (size_t c = 0; c < counted; ++c) uncount_memory(&places[c]);
}

}  // namespace

struct StepGraph::Captured {
  Graph graph;
  Result result;
  std::vector<at::Tensor> gradients;  ///< of each parameter that is updated
  MemoryByCategory peak{};
};

void require_graphs(at::Device device) {
  require(!device.is_cpu(), "run.graph = true: the run computes on a CPU, which has no graphs; set run.graph = false, or run.device = cuda where there is one");
  require(has_graphs(device), "run.graph = true: this torch has no graphs of ", device.str(), "; set run.graph = false");
}

StepGraph::StepGraph(at::Device device, MemoryTracker memory) : device_(device), memory_(std::move(memory)) {
  if (!device.is_meta()) require_graphs(device);
}

StepGraph::~StepGraph() = default;

/// Its tensors are brought where those of the first batch were.
void StepGraph::keep(const data::StepBatch& batch) {
  data::StepBatch kept = batch;
  const bool first = batch_.micro_batches.empty();
  std::map<const void*, at::Tensor> own;  // positions are shared by all
  for (size_t i = 0; i < kept.micro_batches.size(); ++i) {
    const auto tensors = data::tensors_of(kept.micro_batches[i]);
    const auto places = first ? std::vector<at::Tensor*>() : data::tensors_of(batch_.micro_batches[i]);
    for (size_t t = 0; t < tensors.size(); ++t) {
      at::Tensor& place = own[tensors[t]->unsafeGetTensorImpl()];
      if (!place.defined()) {
        place = first ? at::empty_like(*tensors[t]) : *places[t];
        place.copy_(*tensors[t]);
      }
      *tensors[t] = place;
    }
  }
  batch_ = std::move(kept);
}

StepGraph::Result StepGraph::run(const data::StepBatch& batch, const std::vector<nn::NamedParameter>& updated, const Passes& passes) {
  if (!batch_.micro_batches.empty() && !of_one_form(batch, batch_)) return passes(batch);
  keep(batch);
  if (device_.is_meta() || steps_++ < kWarmUp) return passes(batch_);
  if (!captured_) capture(updated, passes);
  captured_->graph.replay();
  ++replays_;
  for (size_t i = 0; i < updated.size(); ++i) updated[i].tensor.mutable_grad() = captured_->gradients[i];
  reach(memory_, captured_->peak, device_);
  return captured_->result;
}

void StepGraph::capture(const std::vector<nn::NamedParameter>& updated, const Passes& passes) {
  auto captured = std::make_unique<Captured>();
  c10::getDeviceAllocator(device_.type())->emptyCache();  // what the steps before have left is not the graph's to use; waits for the device
  const auto before = memory_.peak_by_category();
  memory_.reset_peak();
  begin_capture(captured->graph);
  try {
    const comm::Unmeasured events_have_no_times;
    captured->result = passes(batch_);
  } catch (...) {
    try {
      captured->graph.capture_end();
    } catch (const std::exception&) {  // it has failed for the same reason
    }
    rethrow_of_capture();
  }
  captured->graph.capture_end();
  captured->peak = memory_.peak_by_category();
  reach(memory_, before, device_);
  for (const auto& parameter : updated) captured->gradients.push_back(parameter.tensor.grad());
  captured_ = std::move(captured);
}

}  // namespace tessera
