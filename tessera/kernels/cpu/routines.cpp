#include "tessera/kernels/routines.h"

#include <algorithm>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cross_entropy.h"

// Threads are dealt rows, and a row's result depends on nothing but the row: results have the same bits for any number of threads. Sums over rows, where there
// are some, go by blocks of a fixed number of rows into scratch, and these in order, for the same reason.

namespace tessera::kernels {

namespace {

// Elements below which one more thread costs more than it brings.
constexpr int64_t kGrainElements = 16 * 1024;

/// Rows per part, so that a part is worth a thread.
int64_t grain(int64_t elements_per_row) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_per_row)); }

cpu::Type type_of(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat ? cpu::Type::Float : cpu::Type::BFloat16; }
cpu::Input input(const at::Tensor& tensor) { return {tensor.const_data_ptr(), type_of(tensor)}; }
cpu::Output output(const at::Tensor& tensor) { return {tensor.data_ptr(), type_of(tensor)}; }
float* floats(const at::Tensor& tensor) { return tensor.data_ptr<float>(); }

/// Blocks of rows by `backward`, then the sums of their partial rows, [blocks, sums, dim], into `sums`.
template <class Backward>
void by_blocks(const at::Tensor& partial, int64_t dim, std::initializer_list<at::Tensor> sums, const Backward& backward) {
  const int64_t blocks = partial.size(0), width = dim * static_cast<int64_t>(sums.size());
  parallel_for(0, blocks, grain(dim * kRmsNormBlock), backward);
  const float* first = floats(partial);
  for (const at::Tensor& sum : sums) {
    parallel_for(0, dim, grain(blocks), [&](int64_t begin, int64_t end) { cpu::loops().sum_rows(first, blocks, width, output(sum), begin, end); });
    first += dim;
  }
}

/// Rows by `norm`, each of them first added to, so that it is read from the first cache.
template <class Norm>
void added_and_normed(const at::Tensor& sum, const at::Tensor& x, const at::Tensor& added, int64_t rows, int64_t dim, const Norm& norm) {
  parallel_for(0, rows, grain(dim), [&](int64_t begin, int64_t end) {
    if (!added.defined()) return norm(begin, end);
    const cpu::AddRows adds{input(x), input(added), output(sum), dim};
    for (int64_t row = begin; row < end; ++row) {
      cpu::loops().add_rows(adds, row, row + 1);
      norm(row, row + 1);
    }
  });
}

/// Blocks of rows by `backward`, and what came to the stream by other ways added to each while it is in the second cache.
template <class Backward>
void backward_and_added(const at::Tensor& dx, const at::Tensor& grad_sum, int64_t rows, int64_t dim, int64_t begin, int64_t end, const Backward& backward) {
  if (!grad_sum.defined()) return backward(begin, end);
  const cpu::AddRows adds{input(dx), input(grad_sum), output(dx), dim};
  for (int64_t block = begin; block < end; ++block) {
    backward(block, block + 1);
    cpu::loops().add_rows(adds, block * kRmsNormBlock, std::min(rows, (block + 1) * kRmsNormBlock));
  }
}

void rms_norm(const at::Tensor& out, const at::Tensor& rstd, const at::Tensor& sum, const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight,
              double eps) {
  const int64_t dim = weight.size(0);
  const cpu::RmsNorm args{input(added.defined() ? sum : x), input(weight), output(out), floats(rstd), dim, eps};
  added_and_normed(sum, x, added, rstd.numel(), dim, [&](int64_t begin, int64_t end) { cpu::loops().rms_norm(args, begin, end); });
}

void rms_norm_backward(const at::Tensor& dx, const at::Tensor& d_weight, const at::Tensor& partial, const at::Tensor& grad, const at::Tensor& grad_sum,
                       const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd) {
  const int64_t dim = weight.size(0), rows = rstd.numel();
  const cpu::RmsNormBackward args{input(grad), input(x), input(weight), rstd.const_data_ptr<float>(), output(dx), floats(partial), rows, dim, kRmsNormBlock};
  by_blocks(partial, dim, {d_weight}, [&](int64_t begin, int64_t end) {
    backward_and_added(dx, grad_sum, rows, dim, begin, end, [&](int64_t first, int64_t last) { cpu::loops().rms_norm_backward(args, first, last); });
  });
}

void layer_norm(const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& sum, const at::Tensor& x, const at::Tensor& added,
                const at::Tensor& weight, const at::Tensor& bias, double eps) {
  const int64_t dim = weight.size(0);
  const cpu::LayerNorm args{input(added.defined() ? sum : x), input(weight), input(bias), output(out), floats(mean), floats(rstd), dim, eps};
  added_and_normed(sum, x, added, rstd.numel(), dim, [&](int64_t begin, int64_t end) { cpu::loops().layer_norm(args, begin, end); });
}

void layer_norm_backward(const at::Tensor& dx, const at::Tensor& d_weight, const at::Tensor& d_bias, const at::Tensor& partial, const at::Tensor& grad,
                         const at::Tensor& grad_sum, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd) {
  const int64_t dim = weight.size(0), rows = rstd.numel();
  const cpu::LayerNormBackward args{.grad = input(grad),
                                    .x = input(x),
                                    .weight = input(weight),
                                    .mean = mean.const_data_ptr<float>(),
                                    .rstd = rstd.const_data_ptr<float>(),
                                    .dx = output(dx),
                                    .partial = floats(partial),
                                    .rows = rows,
                                    .dim = dim,
                                    .block = kRmsNormBlock};
  by_blocks(partial, dim, {d_weight, d_bias}, [&](int64_t begin, int64_t end) {
    backward_and_added(dx, grad_sum, rows, dim, begin, end, [&](int64_t first, int64_t last) { cpu::loops().layer_norm_backward(args, first, last); });
  });
}

void bias_activation(const at::Tensor& out, const at::Tensor& x, const at::Tensor& bias, Activation activation) {
  const cpu::BiasActivation args{input(x), bias.defined() ? input(bias) : cpu::Input{}, output(out), x.size(1), activation};
  parallel_for(0, x.size(0), grain(args.dim), [&](int64_t begin, int64_t end) { cpu::loops().bias_activation(args, begin, end); });
}

void bias_activation_backward(const at::Tensor& dx, const at::Tensor& d_bias, const at::Tensor& partial, const at::Tensor& grad, const at::Tensor& x,
                              const at::Tensor& bias, Activation activation) {
  const int64_t rows = x.size(0), dim = x.size(1);
  if (!bias.defined()) {
    const cpu::BiasActivationBackward args{input(grad), input(x), {}, output(dx), nullptr, rows, dim, kRmsNormBlock, activation};
    const int64_t blocks = (rows + kRmsNormBlock - 1) / kRmsNormBlock;
    return parallel_for(0, blocks, grain(kRmsNormBlock * dim), [&](int64_t begin, int64_t end) { cpu::loops().bias_activation_backward(args, begin, end); });
  }
  const cpu::BiasActivationBackward args{input(grad), input(x), input(bias), output(dx), floats(partial), rows, dim, kRmsNormBlock, activation};
  by_blocks(partial, args.dim, {d_bias}, [&](int64_t begin, int64_t end) { cpu::loops().bias_activation_backward(args, begin, end); });
}

/// Threads have columns, so that a row that several tokens look up is added up by one thread, in their order.
void embedding_gradient(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row) {
  const int64_t* const id = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> order;
  for (int64_t i = 0; i < ids.numel(); ++i) {
    require(id[i] >= 0 && id[i] < sum.size(0), "embedding: id ", id[i], " of token ", i, " is no row of ", sum.size(0));
    if (id[i] != padding_row) order.push_back(i);
  }
  std::ranges::stable_sort(order, {}, [&](int64_t i) { return id[i]; });
  const cpu::EmbeddingGradient args{input(rows), id, order.data(), static_cast<int64_t>(order.size()), sum.size(1), output(sum)};
  parallel_for(0, args.dim, std::max<int64_t>(64, grain(args.count)), [&](int64_t begin, int64_t end) { cpu::loops().embedding_gradient(args, begin, end); });
}

void swiglu(const at::Tensor& out, const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  const cpu::SwiGlu args{input(gate), input(up), gate.stride(0), up.stride(0), output(out), gate.size(1), activation};
  parallel_for(0, gate.size(0), grain(args.dim), [&](int64_t begin, int64_t end) { cpu::loops().swiglu(args, begin, end); });
}

void swiglu_backward(const at::Tensor& d_gate, const at::Tensor& d_up, const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up,
                     Activation activation) {
  const cpu::SwiGluBackward args{input(grad), input(gate), input(up), gate.stride(0), up.stride(0), output(d_gate), output(d_up), gate.size(1), activation};
  parallel_for(0, gate.size(0), grain(args.dim), [&](int64_t begin, int64_t end) { cpu::loops().swiglu_backward(args, begin, end); });
}

void rope(const at::Tensor& out, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const cpu::Rope args{.x = input(x),
                       .batch_stride = x.stride(0),
                       .token_stride = x.stride(1),
                       .head_stride = x.stride(2),
                       .out = output(out),
                       .cos = cos.const_data_ptr<float>(),
                       .sin = sin.const_data_ptr<float>(),
                       .table_batch_stride = cos.dim() == 3 ? cos.stride(0) : 0,
                       .tokens = x.size(1),
                       .heads = x.size(2),
                       .half = x.size(3) / 2,
                       .sign = static_cast<float>(sign)};
  parallel_for(0, x.size(0) * x.size(1), grain(x.size(2) * x.size(3)), [&](int64_t begin, int64_t end) { cpu::loops().rope(args, begin, end); });
}

void dropout(const at::Tensor& out, const at::Tensor& x, double p, int64_t key, const at::Tensor& rows, int64_t feature_offset, int64_t feature_total) {
  const cpu::Dropout args{.x = input(x),
                          .out = output(out),
                          .rows = rows.const_data_ptr<int64_t>(),
                          .dim = rows.numel() == 0 ? 0 : x.numel() / rows.numel(),
                          .feature_offset = feature_offset,
                          .feature_total = feature_total,
                          .key = static_cast<uint64_t>(key),
                          .p = static_cast<float>(p)};
  parallel_for(0, rows.numel(), grain(args.dim), [&](int64_t begin, int64_t end) { cpu::loops().dropout(args, begin, end); });
}

void accumulate(const at::Tensor& sum, const at::Tensor& term, bool first) {
  float* to = floats(sum);
  const auto from = input(term);
  parallel_for(0, sum.numel(), kGrainElements, [&](int64_t begin, int64_t end) { cpu::loops().accumulate(to, from, first, begin, end); });
}

void cross_entropy(const at::Tensor& loss, const at::Tensor& lse, const at::Tensor& logits, const at::Tensor& labels, const LossTerms& terms) {
  const cpu::CrossEntropy args{input(logits), labels.const_data_ptr<int64_t>(), logits.size(1), floats(loss), floats(lse), terms};
  parallel_for(0, logits.size(0), grain(logits.size(1)), [&](int64_t begin, int64_t end) { cpu::loops().cross_entropy(args, begin, end); });
}

void cross_entropy_backward(const at::Tensor& d_logits, const at::Tensor& grad_loss, const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& lse,
                            const LossTerms& terms) {
  const cpu::CrossEntropyGradient args{.logits = input(logits),
                                       .labels = labels.const_data_ptr<int64_t>(),
                                       .vocabulary = logits.size(1),
                                       .lse = lse.const_data_ptr<float>(),
                                       .scale = *grad_loss.const_data_ptr<float>(),
                                       .d_logits = output(d_logits),
                                       .terms = terms};
  parallel_for(0, logits.size(0), grain(logits.size(1)), [&](int64_t begin, int64_t end) { cpu::loops().cross_entropy_gradient(args, begin, end); });
}

void cross_entropy_in_place(const at::Tensor& logits, const at::Tensor& loss, const at::Tensor& labels, double scale, const LossTerms& terms) {
  const cpu::CrossEntropyInPlace args{output(logits), labels.const_data_ptr<int64_t>(), logits.size(1), floats(loss), static_cast<float>(scale), terms};
  parallel_for(0, logits.size(0), grain(logits.size(1)), [&](int64_t begin, int64_t end) { cpu::loops().cross_entropy_in_place(args, begin, end); });
}

void cross_entropy_part(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target, const at::Tensor& logits, const at::Tensor& labels,
                        int64_t first, const LossTerms& terms) {
  const cpu::CrossEntropyPart args{input(logits), labels.const_data_ptr<int64_t>(), logits.size(1), first, floats(most), floats(sum), floats(target), terms};
  parallel_for(0, logits.size(0), grain(logits.size(1)), [&](int64_t begin, int64_t end) { cpu::loops().cross_entropy_part(args, begin, end); });
}

void cross_entropy_part_gradient(const at::Tensor& logits, const at::Tensor& labels, int64_t first, const at::Tensor& lse, double scale,
                                 const LossTerms& terms) {
  const cpu::CrossEntropyPartGradient args{.logits = output(logits),
                                           .labels = labels.const_data_ptr<int64_t>(),
                                           .vocabulary = logits.size(1),
                                           .first = first,
                                           .lse = lse.const_data_ptr<float>(),
                                           .scale = static_cast<float>(scale),
                                           .terms = terms};
  parallel_for(0, logits.size(0), grain(logits.size(1)), [&](int64_t begin, int64_t end) { cpu::loops().cross_entropy_part_gradient(args, begin, end); });
}

void sum_losses(const at::Tensor& total, const at::Tensor& rows) {
  const float* losses = rows.const_data_ptr<float>();
  double sum = 0;
  for (int64_t row = 0; row < rows.numel(); ++row) sum += losses[row];
  *floats(total) = static_cast<float>(sum);
}

void check_labels(const at::Tensor& labels, int64_t vocabulary) {
  const int64_t* label = labels.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < labels.numel(); ++row) {
    require(label[row] == kIgnoredLabel || (label[row] >= 0 && label[row] < vocabulary), "labels: entry ", row, " is ", label[row], "; it must be in [0, ",
            vocabulary, ") or ", kIgnoredLabel, " (ignored)");
  }
}

const int64_t* integers(const at::Tensor& tensor) { return tensor.const_data_ptr<int64_t>(); }
const float* weights_of(const at::Tensor& weights) { return weights.defined() ? weights.const_data_ptr<float>() : nullptr; }

void choose(const at::Tensor& chosen, const at::Tensor& scores) {
  const int64_t experts = scores.size(1), k = chosen.size(1);
  const float* from = scores.const_data_ptr<float>();
  int64_t* const to = chosen.data_ptr<int64_t>();
  parallel_for(0, chosen.size(0), grain(experts * k), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float* score = from + token * experts;
      int64_t* const taken = to + token * k;
      for (int64_t i = 0; i < k; ++i) {
        int64_t best = -1;
        for (int64_t expert = 0; expert < experts; ++expert) {
          const bool better = best < 0 || score[expert] > score[best];  // not for an equal one, so the lower index stays
          if (better && std::find(taken, taken + i, expert) == taken + i) best = expert;
        }
        taken[i] = best;
      }
    }
  });
}

/// A counting sort. Whom a capacity drops is settled first, choice by choice; then places are given in the order of tokens.
void plan(const at::Tensor& slots, const at::Tensor& order, const at::Tensor& counts, const at::Tensor& chosen, int64_t capacity) {
  const int64_t tokens = chosen.size(0), choices = chosen.size(1), experts = counts.size(0), places = order.size(0);
  const int64_t* const expert = integers(chosen);
  int64_t *const slot = slots.data_ptr<int64_t>(), *const choice_at = order.data_ptr<int64_t>(), *const count = counts.data_ptr<int64_t>();
  std::fill_n(count, experts, 0);
  for (int64_t k = 0; k < choices; ++k) {
    for (int64_t c = k; c < tokens * choices; c += choices) {
      require(expert[c] >= -1 && expert[c] < experts, "dispatch: token ", c / choices, " chose expert ", expert[c], " of ", experts);
      const bool kept = expert[c] >= 0 && count[expert[c]] < capacity;
      slot[c] = kept ? 0 : -1;
      if (kept) ++count[expert[c]];
    }
  }
  std::vector<int64_t> next(static_cast<size_t>(experts));
  int64_t used = 0;
  for (int64_t e = 0; e < experts; used += count[e++]) next[static_cast<size_t>(e)] = used;
  require(used <= places, "dispatch: ", used, " choices for ", places, " places");
  for (int64_t c = 0; c < tokens * choices; ++c) {
    if (slot[c] < 0) continue;
    slot[c] = next[static_cast<size_t>(expert[c])]++;
    choice_at[slot[c]] = c;
  }
  std::fill(choice_at + used, choice_at + places, -1);
}

void gather(const at::Tensor& out, const at::Tensor& x, const at::Tensor& order, int64_t k, const at::Tensor& weights) {
  const cpu::GatherRows args{input(x), integers(order), weights_of(weights), k, x.stride(0), output(out), x.size(1)};
  parallel_for(0, order.numel(), grain(args.dim), [&](int64_t begin, int64_t end) { cpu::loops().gather_rows(args, begin, end); });
}

void combine(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& slots, const at::Tensor& weights) {
  const cpu::CombineRows args{input(rows), integers(slots), weights_of(weights), slots.size(1), rows.stride(0), output(out), rows.size(1)};
  parallel_for(0, slots.size(0), grain(args.dim * args.choices), [&](int64_t begin, int64_t end) { cpu::loops().combine_rows(args, begin, end); });
}

void weigh(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& grad, const at::Tensor& slots) {
  const cpu::WeighRows args{input(rows), input(grad), integers(slots), slots.size(1), rows.stride(0), grad.stride(0), floats(out), rows.size(1)};
  parallel_for(0, slots.size(0), grain(args.dim * args.choices), [&](int64_t begin, int64_t end) { cpu::loops().weigh_rows(args, begin, end); });
}

const Routines cpu_routines{
    .rms_norm = {.forward = rms_norm, .backward = rms_norm_backward},
    .layer_norm = {.forward = layer_norm, .backward = layer_norm_backward},
    .pointwise = {.swiglu = swiglu,
                  .swiglu_backward = swiglu_backward,
                  .bias_activation = bias_activation,
                  .bias_activation_backward = bias_activation_backward,
                  .embedding_gradient = embedding_gradient,
                  .rope = rope,
                  .dropout = dropout,
                  .accumulate = accumulate},
    .cross_entropy = {.forward = cross_entropy,
                      .backward = cross_entropy_backward,
                      .in_place = cross_entropy_in_place,
                      .part = cross_entropy_part,
                      .part_gradient = cross_entropy_part_gradient,
                      .sum = sum_losses,
                      .check_labels = check_labels},
    .dispatch = {.choose = choose, .plan = plan, .gather = gather, .combine = combine, .weigh = weigh},
};

[[maybe_unused]] const bool registered = (register_routines(c10::kCPU, cpu_routines), true);

}  // namespace
}  // namespace tessera::kernels
