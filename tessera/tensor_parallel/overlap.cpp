#include "tessera/tensor_parallel/overlap.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/kernels/products.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/nn/shared_casts.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/tensor_parallel/overlap_ring.h"
#include "tessera/tensor_parallel/overlap_weights.h"

// Two nodes of autograd of their own, in place of converts around libtorch's products: what has to interleave are pieces of one product with steps of one
// collective, in backward as well, and autograd would run whole operators one after the other. The price is that what libtorch does for a product is written
// out here: which gradients are wanted, what is saved, sums of narrow types in fp32 (a weight's gradient comes in n terms; rounded to bf16 after each, small
// ones would vanish).

namespace tessera::tensor_parallel {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// Below this many positions of a sample, samples are multiplied together, at the price of a copy; above it each by itself, straight from and to its place.
constexpr int64_t kPositionsOfOwnProduct = 64;

/// Pieces of an all-reduce: few, for each costs a latency, and enough that the last, which nothing hides, is small.
constexpr int kPieces = 4;

/// out [B, R, N] <- a [B, R, K] weight^T + bias, or += without a bias.
void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& weight, const at::Tensor& bias = {}, bool add = false) {
  if (out.numel() == 0) return;
  const bool in_place = !kernels::is_widened(a) && (a.size(0) == 1 || a.size(1) >= kPositionsOfOwnProduct);
  if (!in_place) {
    const at::Tensor product = nn::project(a, weight, bias);
    add ? out.add_(product) : out.copy_(product);
    return;
  }
  for (int64_t sample = 0; sample < a.size(0); ++sample) {
    at::Tensor to = out.select(0, sample);
    const at::Tensor rows = a.select(0, sample);
    if (add || bias.defined()) {
      at::addmm_out(to, add ? to : bias, rows, weight.t());
    } else {
      at::mm_out(to, rows, weight.t());
    }
  }
}

at::Tensor in_one_batch(const at::Tensor& x) { return rows_of(x).unsqueeze(0); }

/// Calls compute(first, count) on pieces of `rows` [1, N, F], and reduces each while the next is computed. `pieces` are still under way afterwards.
template <class Compute>
std::vector<comm::Pending> reduce_pieces(const comm::Group& group, const at::Tensor& rows, const Compute& compute) {
  std::vector<comm::Pending> pieces;
  const int64_t total = rows.size(1);
  const int count = static_cast<int>(std::min<int64_t>(kPieces, total));
  for (int piece = 0; piece < count; ++piece) {
    const auto [first, size] = chunk(total, count, piece);
    compute(first, size);
    pieces.push_back(comm::all_reduce_async(group, rows.narrow(1, first, size)));
  }
  return pieces;
}

void wait(std::vector<comm::Pending>& pieces) {
  for (auto& piece : pieces) piece.wait();
}

std::vector<int64_t> resized(const at::Tensor& x, int64_t positions, int64_t features) {
  auto sizes = x.sizes().vec();
  sizes[1] = positions;
  sizes.back() = features;
  return sizes;
}

/// Common to both kinds: what backward needs to know, and the saved tensors' life.
struct Node : torch::autograd::Node {
  Node(const Context& context, bool sequence) : group(context.group), sequence(sequence), positions(context.sequence), site(comm::CallSite::current()) {}

  void save(const at::Tensor& tensor) { saved.emplace_back(tensor, /*is_output=*/false); }
  at::Tensor unpack(size_t i) const { return saved[i].unpack(); }
  void release_variables() override {
    for (auto& tensor : saved) tensor.reset_data();
  }

  variable_list apply(variable_list&& gradients) final {
    variable_list results;
    {
      const at::NoGradGuard no_grad;
      const comm::CallSite here(site);
      results = backward(gradients);
    }
    return once_differentiable("tensor.overlap", "set tensor.overlap = false (in C++ TensorParallelOptions::overlap)", gradients, std::move(results));
  }
  virtual variable_list backward(const variable_list& gradients) = 0;

  /// Whose gradients backward leaves for later, in place of edges to them: weights, then biases, which may be undefined.
  void leave(variable_list of_weights, variable_list of_biases) {
    later = nn::LeaveWeightGradients::current();
    left_weights = std::move(of_weights);
    left_biases = std::move(of_biases);
  }

  comm::Group group;
  bool sequence;
  int64_t positions;
  std::string site;
  std::vector<SavedVariable> saved;
  std::shared_ptr<nn::WeightGradients> later;  ///< null: weights and biases are inputs of the node
  variable_list left_weights, left_biases;
};

/// Inputs: x, the weights, the biases. Outputs: the products, the whole x.
struct ColumnNode final : Node {
  using Node::Node;

  variable_list backward(const variable_list& gradients) override {
    dys.assign(gradients.begin(), gradients.begin() + static_cast<int64_t>(layers));
    d_whole = gradients[layers];
    x = unpack(0);
    for (size_t i = 0; i < layers; ++i) weights.push_back(unpack(1 + i));
    sums = std::vector<WeightGradient>(layers);
    variable_list result(later ? 1 : 1 + 2 * layers);
    result[0] = sequence ? on_rings() : in_pieces();
    for (size_t i = 0; !later && i < layers; ++i) {
      if (wants_weight(i)) result[1 + i] = sums[i].take(weights[i].scalar_type());
      if (dys[i].defined() && task_should_compute_output(1 + layers + i)) result[1 + layers + i] = rows_of(dys[i]).sum(0);
    }
    if (later) leave_gradients();
    dys.clear();
    weights.clear();
    sums.clear();
    d_whole = x = at::Tensor();
    return result;
  }

  bool wants_weight(size_t i) const { return !later && dys[i].defined() && task_should_compute_output(1 + i); }
  bool wants_any_weight() const {
    for (size_t i = 0; i < layers; ++i) {
      if (wants_weight(i)) return true;
    }
    return false;
  }

  /// The parts of x travel again, or for the first time, when the weights' turn has come.
  void leave_gradients() {
    std::vector<nn::WeightGradients::Kept> kept;  // null where there is none
    for (const at::Tensor& dy : dys) kept.push_back(dy.defined() ? later->keep(dy) : nullptr);
    const auto left = std::make_shared<LeftWeights>(
        layers, [parts = GatheredParts{group, sequence, whole_kept, positions, site}, x = x.detach(), kept](std::vector<WeightGradient>& sums) {
          parts.visit(x, [&](int64_t first, const at::Tensor& part) {
            for (size_t i = 0; i < kept.size(); ++i) {
              if (kept[i]) sums[i].add(kept[i]->narrow(1, first, part.size(1)), part);
            }
          });
        });
    for (size_t i = 0; i < layers; ++i) {
      if (!dys[i].defined()) continue;
      if (nn::accumulates_into(left_weights[i])) later->leave(left_weights[i], [left, i, dtype = weights[i].scalar_type()] { return left->take(i, dtype); });
      if (!left_biases[i].defined() || !nn::accumulates_into(left_biases[i])) continue;
      later->leave(left_biases[i], [dy = kept[i]] { return rows_of(*dy).sum(0); });
    }
  }

  /// This rank's term of the input gradient at `count` positions from `first` on.
  void write_term(const at::Tensor& out, int64_t first, const variable_list& parts, const at::Tensor& besides) const {
    bool add = false;
    for (size_t i = 0; i < layers; ++i) {
      if (!parts[i].defined()) continue;
      multiply(out, parts[i].narrow(1, first, out.size(1)), weights[i].t(), {}, add);
      add = true;
    }
    if (besides.defined()) {
      const at::Tensor part = besides.narrow(1, first, out.size(1));
      add ? out.add_(part) : out.copy_(part);
    } else if (!add) {
      out.zero_();
    }
  }

  void add_weights(int64_t first, const at::Tensor& part) {
    for (size_t i = 0; i < layers; ++i) {
      if (wants_weight(i)) sums[i].add(dys[i].narrow(1, first, part.size(1)), part);
    }
  }

  at::Tensor on_rings() {
    std::optional<GatherRing> inputs;
    std::optional<SumRing> outputs;
    if (wants_any_weight() && !whole_kept) inputs.emplace(group, x.contiguous(), positions);
    if (task_should_compute_output(0)) outputs.emplace(group, resized(x, positions, x.size(-1)), x.options());
    for (int step = 0; step < group.size(); ++step) {
      if (outputs) {
        write_term(outputs->term(), outputs->begin(), dys, d_whole);
        outputs->pass_on();
      }
      if (inputs) {
        add_weights(inputs->begin(), inputs->part());
        inputs->advance();
      } else if (wants_any_weight()) {
        const auto [first, size] = chunk(positions, group.size(), step);
        add_weights(first, x.narrow(1, first, size));
      }
    }
    return outputs ? outputs->take() : at::Tensor();
  }

  at::Tensor in_pieces() {
    std::vector<comm::Pending> pieces;
    at::Tensor dx;
    if (task_should_compute_output(0)) {
      dx = at::empty(x.sizes(), x.options());
      const at::Tensor rows = in_one_batch(dx);
      variable_list parts;
      for (const at::Tensor& dy : dys) parts.push_back(dy.defined() ? in_one_batch(dy) : dy);
      const at::Tensor besides = d_whole.defined() ? in_one_batch(d_whole) : d_whole;
      pieces = reduce_pieces(group, rows, [&](int64_t first, int64_t size) { write_term(rows.narrow(1, first, size), first, parts, besides); });
    }
    for (size_t i = 0; i < layers; ++i) {
      if (wants_weight(i)) sums[i].add(dys[i], x);
    }
    wait(pieces);
    return dx;
  }

  size_t layers = 0;
  bool whole_kept = false;

  // During one backward.
  at::Tensor x, d_whole;
  variable_list dys, weights;
  std::vector<WeightGradient> sums;
};

/// Inputs: x, the weight. Output: the sum.
struct RowNode final : Node {
  using Node::Node;

  variable_list backward(const variable_list& gradients) override {
    const at::Tensor dy = gradients[0];
    if (!dy.defined()) return variable_list(later ? 1 : 2);
    const at::Tensor x = unpack(0), weight = unpack(1);
    const bool leaves = later && nn::accumulates_into(left_weights[0]);
    const bool wants_x = task_should_compute_output(0), wants_weight = !later && task_should_compute_output(1);
    at::Tensor dx = wants_x ? at::empty(x.sizes(), x.options()) : at::Tensor();
    WeightGradient sum;
    // What has come is kept, as a layer keeps its output's gradient, and does not travel twice.
    std::vector<std::pair<int64_t, nn::WeightGradients::Kept>> parts;
    if (sequence) {
      for (GatherRing ring(group, dy.contiguous(), positions); !ring.done(); ring.advance()) {
        const int64_t first = ring.begin(), size = ring.part().size(1);
        if (wants_x) multiply(dx.narrow(1, first, size), ring.part(), weight.t());
        if (wants_weight) sum.add(ring.part(), x.narrow(1, first, size));
        if (leaves) parts.emplace_back(first, later->keep(ring.part().clone()));
      }
    } else {
      if (wants_x) multiply(in_one_batch(dx), in_one_batch(dy), weight.t());
      if (wants_weight) sum.add(dy, x);
      if (leaves) parts.emplace_back(0, later->keep(dy));
    }
    if (leaves) {
      later->leave(left_weights[0], [parts = std::move(parts), x = x.detach(), whole = !sequence, dtype = weight.scalar_type()] {
        WeightGradient gradient;
        for (const auto& [first, part] : parts) gradient.add(*part, whole ? x : x.narrow(1, first, part->size(1)));
        return gradient.take(dtype);
      });
    }
    if (later) return {dx};
    return {dx, wants_weight ? sum.take(weight.scalar_type()) : at::Tensor()};
  }
};

}  // namespace

ColumnProducts multiply_columns(const Context& context, const at::Tensor& x, TensorLayout from, const std::vector<nn::LinearImpl*>& linears,
                                bool keep_gathered) {
  const bool sequence = from == TensorLayout::Sequence;
  variable_list of_weights, of_biases;
  for (const auto* linear : linears) {
    of_weights.push_back(linear->weight);
    of_biases.push_back(linear->bias);
  }
  const bool leaves = nn::leaves_weight_gradients(x, of_weights) && nn::leaves_weight_gradients(x, of_biases);
  variable_list weights, biases;
  for (const auto* linear : linears) {
    const at::AutoGradMode recording(at::GradMode::is_enabled() && !leaves);
    weights.push_back(nn::cast_weight(linear->weight, x.scalar_type()));
    biases.push_back(linear->bias.defined() ? nn::cast(linear->bias, x.scalar_type()) : linear->bias);
  }
  c10::intrusive_ptr<ColumnNode> node;
  if (torch::autograd::compute_requires_grad(x, weights, biases)) {
    node = c10::make_intrusive<ColumnNode>(context, sequence);
    if (leaves) {
      node->set_next_edges(torch::autograd::collect_next_edges(x));
      node->leave(std::move(of_weights), std::move(of_biases));
    } else {
      node->set_next_edges(torch::autograd::collect_next_edges(x, weights, biases));
    }
    node->layers = linears.size();
    node->whole_kept = !sequence || keep_gathered || nn::saved_tensors_are_computed_again();
  }

  ColumnProducts result;
  {
    const at::NoGradGuard no_grad;
    if (sequence) {
      result.whole = at::empty(resized(x, context.sequence, x.size(-1)), x.options());
      for (const at::Tensor& weight : weights) result.products.push_back(at::empty(resized(x, context.sequence, weight.size(0)), x.options()));
      for (GatherRing ring(context.group, x.detach().contiguous(), context.sequence); !ring.done(); ring.advance()) {
        const int64_t first = ring.begin(), size = ring.part().size(1);
        result.whole.narrow(1, first, size).copy_(ring.part());
        for (size_t i = 0; i < weights.size(); ++i) multiply(result.products[i].narrow(1, first, size), ring.part(), weights[i], biases[i]);
      }
    } else {
      result.whole = nn::alias_of(x);
      const at::AutoDispatchBelowADInplaceOrView below;  // a product that is a view could not be written in place
      for (size_t i = 0; i < weights.size(); ++i) result.products.push_back(nn::project(x, weights[i], biases[i]));
    }
  }
  if (!node) return result;
  node->save(sequence && node->whole_kept ? nn::alias_of(result.whole) : x);
  for (const at::Tensor& weight : weights) node->save(weight);
  torch::autograd::set_history(result.products, node);
  torch::autograd::set_history(result.whole, node);
  return result;
}

at::Tensor multiply_rows(Context& context, const at::Tensor& x, nn::LinearImpl& linear, TensorLayout to) {
  const bool leaves = nn::leaves_weight_gradients(x, {linear.weight});
  const at::Tensor weight = [&] {
    const at::AutoGradMode recording(at::GradMode::is_enabled() && !leaves);
    return nn::cast_weight(linear.weight, x.scalar_type());
  }();
  const bool sequence = to == TensorLayout::Sequence;
  if (sequence) context.sequence = x.size(1);
  c10::intrusive_ptr<RowNode> node;
  if (torch::autograd::compute_requires_grad(x, weight)) {
    node = c10::make_intrusive<RowNode>(context, sequence);
    if (leaves) {
      node->set_next_edges(torch::autograd::collect_next_edges(x));
      node->leave({linear.weight}, {});
    } else {
      node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
    }
    // Before anything is sent: where recompute wants no more than this, the sum is not made again.
    node->save(x);
    node->save(weight);
  }
  at::Tensor sum;
  {
    const at::NoGradGuard no_grad;
    if (sequence) {
      SumRing ring(context.group, resized(x, x.size(1), weight.size(0)), x.options());
      while (!ring.done()) {
        multiply(ring.term(), x.narrow(1, ring.begin(), ring.term().size(1)), weight);
        ring.pass_on();
      }
      sum = ring.take();
    } else {
      auto sizes = x.sizes().vec();
      sizes.back() = weight.size(0);
      sum = at::empty(sizes, x.options());
      const at::Tensor rows = in_one_batch(sum), from = in_one_batch(x);
      auto pieces =
          reduce_pieces(context.group, rows, [&](int64_t first, int64_t size) { multiply(rows.narrow(1, first, size), from.narrow(1, first, size), weight); });
      wait(pieces);
    }
  }
  if (node) torch::autograd::set_history(sum, node);
  return sum;
}

bool can_overlap(const nn::LinearImpl& linear, const at::Tensor& x, TensorLayout sequence_side, int64_t features) {
  const at::Tensor& weight = linear.weight;
  const auto type = x.device().type();
  if (at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type)) return false;  // its casts belong to whole operators
  return !linear.computes_in_fp8() && !linear.has_to_be_called() && weight.dim() == 2 && weight.size(0) == features && weight.size(1) == x.size(-1) &&
         x.scalar_type() == linear.compute_dtype().value_or(weight.scalar_type()) && (sequence_side == TensorLayout::Sequence ? x.dim() == 3 : x.dim() > 1);
}

}  // namespace tessera::tensor_parallel
