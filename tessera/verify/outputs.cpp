#include "tessera/verify/outputs.h"

#include <algorithm>
#include <limits>

#include <torch/csrc/autograd/function.h>

#include "tessera/core/error.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/layout/sequence_cut.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/positions.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/router.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/verify/difference.h"

// A gradient that differs says that something is wrong; outputs say where. Ranks take down what their modules gave out, the device compares each as it comes to
// it and drops the record. Its order of execution is the measure of early: of all that part, the first in it is nearest to the cause. Terms of a sum are
// nothing to compare by themselves, and are added first. Beyond the budget a hash still tells whether bits are equal.

namespace tessera {

namespace {

/// Columns of a sequence as the runs that they make up.
std::vector<ColumnRun> runs_of(const at::Tensor& positions) {
  std::vector<ColumnRun> runs;
  const at::Tensor host = positions.to(at::kCPU);
  for (int64_t i = 0; i < host.numel(); ++i) {
    const int64_t place = host.const_data_ptr<int64_t>()[i];
    if (!runs.empty() && runs.back().begin + runs.back().size == place) {
      ++runs.back().size;
    } else {
      runs.push_back({place, 1});
    }
  }
  return runs;
}

/// Boxes of a tensor of these columns as boxes of the whole sequence's.
std::vector<Box> in_sequence(const std::vector<Box>& boxes, const std::vector<ColumnRun>& runs, size_t dim) {
  std::vector<Box> whole;
  for (const Box& box : boxes) {
    int64_t here = 0;
    for (const auto& [begin, size] : runs) {
      const int64_t low = std::max(box.offset[dim], here), high = std::min(box.offset[dim] + box.size[dim], here + size);
      if (low < high) {
        Box& part = whole.emplace_back(box);
        part.offset[dim] = begin + low - here;
        part.size[dim] = high - low;
      }
      here += size;
    }
  }
  return whole;
}

class Tap : public nn::Interceptor, public std::enable_shared_from_this<Tap> {
 public:
  Tap(SampleRange samples, OutputSink& sink, std::string column_axis, bool routes_parts)
      : samples_(samples), sink_(sink), column_axis_(std::move(column_axis)), routes_parts_(routes_parts) {}

  nn::Values call(nn::Module& module, nn::Values inputs, const nn::Next& next) override {
    nn::Values outputs = next(std::move(inputs));
    const int64_t sample = nn::SampleScope::current().first_sample;
    // A call inside a backward pass computes again what was heard before.
    const bool heard = sample >= samples_.begin && sample < samples_.end && torch::autograd::get_current_node() == nullptr;
    // Rows in the order of experts: which of the whole's these are only the choices of all ranks tell. What is made of them for each token is heard.
    const bool placed =
        !routes_parts_ || (dynamic_cast<const nn::GroupedExpertsImpl*>(&module) == nullptr && dynamic_cast<const nn::RouterChoiceImpl*>(&module) == nullptr);
    if (heard && placed && !outputs.empty() && outputs[0].isTensor() && outputs[0].toTensor().defined()) hear(module, sample, outputs[0].toTensor());
    return outputs;
  }

 private:
  void hear(const nn::Module& module, int64_t sample, const at::Tensor& output) {
    OutputKey key{.backward = false, .module = module.path(), .first_sample = sample, .call = calls_[{module.path(), sample}]++};
    if (output.numel() == 0) return;  // a rank that has no column of it
    const auto layout = layout_of(module, output);
    sink_.output(key, output.detach(), layout);
    if (!output.requires_grad() || !output.grad_fn()) return;
    key.backward = true;
    // The graph may outlive the tap (a recorded loss that somebody keeps), so the hook must not keep the tap's sink alive by itself.
    output.register_hook([tap = weak_from_this(), key, layout](const at::Tensor& gradient) {
      if (const auto alive = tap.lock(); alive && gradient.defined()) alive->sink_.output(key, gradient.detach(), layout);
    });
  }

  nn::OutputLayout layout_of(const nn::Module& module, const at::Tensor& output) const {
    auto layout = nn::output_layout(module, output).value_or(nn::OutputLayout{});
    const at::Tensor& positions = nn::SampleScope::current().positions;
    if (!positions.defined()) return layout;
    if (output.dim() == 0) {
      layout.partial_over.push_back(column_axis_);
      return layout;
    }
    if (layout.boxes.empty()) layout.boxes = {Box::whole(output.sizes().vec())};
    std::vector<ColumnRun> runs = runs_of(positions);
    if (output.dim() > 2) {
      layout.boxes = in_sequence(layout.boxes, runs, 1);
      return layout;
    }
    int64_t end = 0;
    for (const Box& box : layout.boxes) end = std::max(end, box.offset[0] + box.size[0]);
    const int64_t rows = positions.numel() > 0 ? (end + positions.numel() - 1) / positions.numel() : 1;  // one after the other, where each token is a row
    const size_t of_one = runs.size();
    for (int64_t row = 1; row < rows; ++row) {
      for (size_t i = 0; i < of_one; ++i) runs.push_back({row * nn::SampleScope::current().seq_len + runs[i].begin, runs[i].size});
    }
    layout.boxes = in_sequence(layout.boxes, runs, 0);
    return layout;
  }

  SampleRange samples_;
  OutputSink& sink_;
  std::string column_axis_;
  bool routes_parts_;
  std::map<std::pair<std::string, int64_t>, int64_t> calls_;
};

std::vector<int64_t> sizes_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }

/// Which part of a module's logical output a rank gave out. Throws InternalError where an interceptor states one that cannot be.
Slice part_of(const OutputKey& key, const RecordedOutputs::Output& output, const std::vector<int64_t>& shape) {
  Slice part = output.boxes.empty() ? Slice::whole(key.module, shape) : Slice{key.module, shape, output.boxes};
  part.check();
  return part;
}

bool make_up(const std::vector<Slice>& parts, const Slice& whole) {
  if (std::any_of(parts.begin(), parts.end(), [](const Slice& part) { return part.is_whole(); })) return true;
  try {
    reshard(parts, whole);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

/// Of a term that was too much to keep, the sum is unknown.
void add_term(RecordedOutputs::Output& sum, const RecordedOutputs::Output& term) {
  const bool known = sum.values.defined() && term.values.defined();
  sum.values = known ? sum.values.to(at::kDouble).add_(term.values.to(sum.values.device())) : at::Tensor();
  sum.hash = 0;
}

}  // namespace

Attachment tap_outputs(torch::nn::Module& root, SampleRange samples, OutputSink& sink, const TapOptions& options) {
  const auto tap = std::make_shared<Tap>(samples, sink, options.column_axis, options.routes_parts);
  Attachment attached;
  root.apply([&](torch::nn::Module& module) {
    auto* ours = dynamic_cast<nn::Module*>(&module);
    if (ours != nullptr && (options.unheard.empty() || !nn::matches(options.unheard, ours->path()))) attached.add(nn::attach(*ours, tap));
  });
  if (options.instead != nullptr) attached.add(nn::attach(*options.instead, tap));
  return attached;
}

void RecordedOutputs::begin_step() {
  outputs_.clear();
  bytes_left_ = budget_bytes_;
}

void RecordedOutputs::output(const OutputKey& key, const at::Tensor& values, const nn::OutputLayout& layout) {
  const auto& summed = key.backward ? layout.gradient_partial_over : layout.partial_over;
  Output record{.boxes = layout.boxes, .partial_over = summed, .sizes = sizes_of(values), .dtype = values.scalar_type(), .values = {}, .hash = 0};
  const auto bytes = static_cast<int64_t>(values.nbytes());
  if (bytes <= bytes_left_) {
    bytes_left_ -= bytes;
    record.values = values.clone();
  } else {
    record.hash = hash_of_values(values);
  }
  outputs_.emplace(key, std::move(record));
}

/// Whether two ranks' outputs are terms of one sum: they differ in their places on its axes alone.
bool OutputComparer::same_sum(const Given& one, const Given& other) {
  const auto& a = one.output;
  const auto& b = other.output;
  if (a.partial_over.empty() || a.partial_over != b.partial_over || a.boxes != b.boxes || a.sizes != b.sizes) return false;
  if (axes_.empty()) return true;
  auto& sums = sums_[a.partial_over];
  if (sums.empty()) {
    std::vector<std::string> others;
    for (const auto& [axis, size] : axes_) {
      if (std::ranges::find(a.partial_over, axis) == a.partial_over.end()) others.push_back(axis);
    }
    sums = ranks_along(axes_, others);
  }
  return sums[static_cast<size_t>(one.rank)] == sums[static_cast<size_t>(other.rank)];
}

/// What the ranks gave out, a sum in place of its terms.
std::vector<OutputComparer::Given> OutputComparer::take_given(const OutputKey& key) {
  std::vector<Given> all;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    auto taken = ranks_[rank]->outputs().extract(key);
    if (taken.empty()) continue;
    Given given{.rank = static_cast<int>(rank), .output = std::move(taken.mapped())};
    const auto sum = std::ranges::find_if(all, [&](const Given& before) { return same_sum(before, given); });
    if (sum == all.end()) {
      all.push_back(std::move(given));
    } else {
      add_term(sum->output, given.output);
    }
  }
  return all;
}

void OutputComparer::output(const OutputKey& key, const at::Tensor& values, const nn::OutputLayout&) {
  const int64_t depth = depth_[key.first_sample]++;
  if (key.backward && batch_.keys == 1) largest_[key.module] = std::max(largest_[key.module], largest_entry(values));
  std::vector<Slice> parts;
  for (const Given& given : take_given(key)) {
    parts.push_back(part_of(key, given.output, sizes_of(values)));
    compare(key, given.rank, given.output, values, depth);
  }
  if (!make_up(parts, Slice::whole(key.module, sizes_of(values)))) ++(key.backward ? backward_ : forward_).unseen;
}

/// What is small for a module's output: its largest entry. A gradient that is rounding alone is measured by those that it is the rounding of, which backward
/// has come to before.
double OutputComparer::scale_of(const OutputKey& key, const at::Tensor& want) const {
  double scale = largest_entry(want);
  const std::string measure = key.backward ? measure_of_zeros(key.module + ".weight", batch_.keys) : "";
  if (measure.empty()) return scale;
  for (const auto& [module, largest] : largest_) {
    if (module.starts_with(measure)) scale = std::max(scale, largest);
  }
  return scale;
}

void OutputComparer::compare(const OutputKey& key, int rank, const RecordedOutputs::Output& got, const at::Tensor& want, int64_t depth) {
  OutputComparison& result = key.backward ? backward_ : forward_;
  const Place place{.step = batch_.step_of(key.first_sample), .depth = depth, .micro_batch = batch_.micro_batch_of(key.first_sample)};
  Parting parting{.module = key.module, .step = place.step, .micro_batch = place.micro_batch, .rank = rank};
  ++result.compared;
  parting.allowed = bounds_.output(want.scalar_type(), depth);
  const at::Tensor expected = take(want, part_of(key, got, sizes_of(want)));
  if (got.sizes != sizes_of(expected)) {
    result.worst = parting.value = std::numeric_limits<double>::infinity();
    parting.note = detail::concat("has the shape ", at::IntArrayRef(got.sizes), " in place of ", expected.sizes());
    return note_parting(key, place, std::move(parting));
  }
  if (!got.values.defined()) {
    const bool equal = got.dtype == expected.scalar_type() && got.hash == hash_of_values(expected);
    ++(equal ? result.bit_equal : result.beyond_budget);
    return;
  }
  parting.value = relative(largest_difference(got.values, expected), scale_of(key, want));
  if (parting.value == 0) ++result.bit_equal;
  result.worst = std::max(result.worst, parting.value);
  if (parting.value > parting.allowed) note_parting(key, place, std::move(parting));
}

void OutputComparer::forget_gradients() {
  backward_ = before_.first;
  const auto earlier = before_.second.find(true);
  earlier == before_.second.end() ? (void)first_.erase(true) : (void)first_.insert_or_assign(true, earlier->second);
}

void OutputComparer::note_parting(const OutputKey& key, const Place& place, Parting parting) {
  const auto [first, fresh] = first_.try_emplace(key.backward, place);
  if (!fresh && first->second <= place) return;
  first->second = place;
  (key.backward ? backward_ : forward_).first = std::move(parting);
}

}  // namespace tessera
