#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/context_parallel/context_parallel.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/attention.h"
#include "tests/test_device.h"

/// One attention core, what it is given, and how its parts on ranks compare to the whole.
namespace tessera::testing_support {

struct AttendingImpl : nn::Module {
  explicit AttendingImpl(const nn::AttentionReach& reach = {}) : core(reach) { register_module("core", core); }
  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& documents) {
    return core(q, k, v, std::nullopt, documents);
  }
  nn::AttentionCore core;
};
TESSERA_MODULE(Attending);

struct AttentionCase {
  int64_t batch = 2, length = 13, heads = 6, kv_heads = 2, features = 8;
  bool causal = true;
  int64_t window = 0;
  double offset = 0;          ///< the first feature of queries and keys, where not 0: adds offset^2 / sqrt(features) to all scores
  at::Tensor documents = {};  ///< [batch, length]; undefined: one
};

inline at::Tensor normal(at::IntArrayRef sizes, int64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed)));
}

/// Inputs and results: q, k, v, the output's gradient; output, dq, dk, dv.
struct Passes {
  std::vector<at::Tensor> in, out;
};

inline std::vector<at::Tensor> inputs_of(const AttentionCase& c) {
  std::vector<at::Tensor> in;
  for (const int64_t heads : {c.heads, c.kv_heads, c.kv_heads, c.heads})
    in.push_back(normal({c.batch, c.length, heads, c.features}, static_cast<int64_t>(in.size()) + 1));
  for (size_t i : {0, 1}) {
    if (c.offset != 0) in[i].select(-1, 0).fill_(c.offset);
  }
  return in;
}

/// A forward and a backward pass of `core` for `in`.
inline std::vector<at::Tensor> pass(Attending& model, const std::vector<at::Tensor>& in, const at::Tensor& documents = {}) {
  std::vector<at::Tensor> leaves;
  for (int i = 0; i < 3; ++i) leaves.push_back(in[static_cast<size_t>(i)].detach().requires_grad_());
  const at::Tensor out = model(leaves[0], leaves[1], leaves[2], documents.defined() ? std::optional(documents) : std::nullopt);
  out.backward(in[3]);
  return {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

/// What one device computes in fp32, scores and all, of inputs that were rounded to `dtype`.
inline Passes on_one_device(const AttentionCase& c, at::ScalarType dtype = at::kFloat) {
  Passes passes{.in = inputs_of(c), .out = {}};
  std::vector<at::Tensor> leaves;
  for (at::Tensor& tensor : passes.in) tensor = tensor.to(dtype);
  for (int i = 0; i < 3; ++i) leaves.push_back(passes.in[static_cast<size_t>(i)].to(at::kFloat).requires_grad_());
  at::Tensor visible = at::ones({1, 1, c.length, c.length}, at::kBool);
  if (c.causal) visible = visible.tril();
  if (c.window > 0) visible = visible.triu(1 - c.window);
  if (c.documents.defined()) visible = visible.bitwise_and(c.documents.unsqueeze(2).eq(c.documents.unsqueeze(1)).unsqueeze(1));
  const at::Tensor out = nn::masked_attention(leaves[0], leaves[1], leaves[2], visible);
  out.backward(passes.in[3].to(at::kFloat));
  passes.out = {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
  return passes;
}

/// Largest difference of output and gradients between a rank's part and the same columns of the whole, relative to the whole's largest entry. Tensors in
/// `noisy` only have to be finite.
inline double difference(const std::vector<at::Tensor>& part, const std::vector<at::Tensor>& whole, const at::Tensor& columns,
                         const std::set<size_t>& noisy = {}) {
  double worst = 0;
  for (size_t i = 0; i < part.size(); ++i) {
    const at::Tensor expected = whole[i].index_select(1, columns), got = part[i].to(at::kFloat);
    if (got.sizes() != expected.sizes() || !at::isfinite(got).all().item<bool>()) return 1e30;
    if (noisy.contains(i)) continue;
    worst = std::max(worst, (got - expected).abs().max().item<double>() / whole[i].abs().max().item<double>());
  }
  return worst;
}

/// One comparison with one device: what is attended to, who holds which columns, and in which type.
struct Job {
  AttentionCase c;
  SequenceCut cut;
  at::ScalarType dtype = at::kFloat;
};

/// Runs `jobs`, all over as many ranks, one after the other, and returns the largest difference of each from one device.
inline std::vector<double> parities(const std::vector<Job>& jobs, const ContextParallelOptions& options, const comm::RunOptions& run = {}) {
  std::vector<Passes> wholes;
  for (const Job& job : jobs) wholes.push_back(on_one_device(job.c, job.dtype));
  const int ranks = jobs.front().cut.ranks();
  std::vector<std::vector<double>> differences(jobs.size(), std::vector<double>(static_cast<size_t>(ranks)));
  comm::run_ranks(
      ranks,
      [&](comm::World& world) {
        for (size_t i = 0; i < jobs.size(); ++i) {
          const auto& [c, cut, dtype] = jobs[i];
          const at::Tensor columns = cut.positions(world.rank(), testing_support::test_device());
          std::vector<at::Tensor> own;
          for (const at::Tensor& tensor : wholes[i].in) own.push_back(tensor.index_select(1, columns));
          Attending model(nn::AttentionReach{.causal = c.causal, .window = c.window});
          const auto context = context_parallel(model, world.group(), options, "core");
          context->set_cut(cut);
          const auto parts = pass(model, own, c.documents.defined() ? c.documents.index_select(1, columns) : at::Tensor());
          // A large feature meets terms of dq and dk that cancel, and of a query that sees itself alone all do.
          differences[i][static_cast<size_t>(world.rank())] =
              difference(parts, wholes[i].out, columns, c.offset != 0 || c.window == 1 ? std::set<size_t>{1, 2} : std::set<size_t>{});
        }
      },
      run);
  std::vector<double> worst;
  for (const auto& of_ranks : differences) worst.push_back(*std::ranges::max_element(of_ranks));
  return worst;
}

inline double parity(const AttentionCase& c, const SequenceCut& cut, const ContextParallelOptions& options, at::ScalarType dtype = at::kFloat,
                     const comm::RunOptions& run = {}) {
  return parities({{c, cut, dtype}}, options, run).front();
}

}  // namespace tessera::testing_support
