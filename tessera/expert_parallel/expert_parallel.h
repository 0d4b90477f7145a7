#pragma once

#include <memory>
#include <string>
#include <utility>

#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// Who has dealt experts, as nn::Dealt::by and messages name it.
inline constexpr const char* kExpertParallel = "expert_parallel";

struct ExpertParallelOptions {
  std::string experts = "**.experts";  ///< paths of the nn::GroupedExperts that are dealt
  /// So many neighbours of the group hold the same experts, and of each other rows of its width F: w1, w3 [E * F, D] by rows of each expert, w2 [E * D, F] by
  /// columns. Each is sent every row of these experts, and their results are terms of a sum, which the rank adds up that asked, in fp32 and in their order.
  int sharers = 1;
  /// Ranks, of `group` or not, that route the same tokens, as those of tensor parallelism do: each takes its part of the rows to the experts, and all have all
  /// results. A row is then computed once.
  comm::Group same_tokens = comm::Group::self();
  /// Computes each rank's rows by themselves, as that rank would if it had these experts: products have the rows of one micro-batch, and gradients of weights
  /// are delivered apart, each said to be of the rank that sent (nn::GradientSource). For whoever sums micro-batches in an order that knows no ranks
  /// (run.deterministic). Costs ranks times as many products, each so many times smaller.
  bool apart = false;
  /// Whether draws into the experts that were dealt, norms of their gradients (nn::watch_parts), and one rank's experts that were written on all ranks before
  /// the first call are refused. An engine that does none of these needs no watch.
  bool watch = true;
};

/// Experts dealt over the ranks of a group (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961), each rank with tokens of its own; made by expert_parallel.
///
/// Rank r of n holds experts r E/n .. (r + 1) E/n, or with s sharers the part r mod s of those of block r / s: rows of the stacked weights, as their slices
/// say. A call of the experts takes this rank's sorted rows to the ranks that hold their experts, computes there, and brings results back. Any number of rows
/// may go anywhere: none, or all to one rank. What a module can compute meanwhile (nn/meanwhile.h: shared experts) runs while the rows are on their way there,
/// and in backward while their gradients are on their way back.
///
///   traffic per call   forward an all-to-all of s E words, and one to each rank; the rows that are chosen, s times (n-1)/n of them on average, to the experts
///                      and back, in the type of the products; backward the same of their gradients. The number of rows is read on the host once a call
///   memory             beside the rows that are here, those that came: s k T D on average, n times that at the most, while forward and backward run
///   gradients          of an expert's weights: of all tokens that came, from every rank of the group. Sum them over ranks that hold the same experts alone
///                      (experts_of is for the `only` of whoever synchronizes them)
///
/// Refused are experts that a program has given all ranks alike since they were dealt (torch::load of one rank's file; before the first call in place, too, as
/// a broadcast does), unless a rank's are copies of one another; draws into them; one expert a rank, of which nothing tells whether it is meant so, is written
/// by copy_ or checkpoint::load. Every rank calls as often as the others, with or without tokens. Results do not depend on the number of ranks but for the
/// order in which an expert's gradient is summed over its rows, which are in the order of ranks, and so of samples. The experts stay cut when it is destroyed,
/// and their calls are refused from then on. What the ranks hold of them is said beside their slices, and clip_grad_norm goes by it.
class ExpertParallel {
 public:
  ExpertParallel(comm::Group group, std::shared_ptr<const void> alive, Attachment attached)
      : group_(std::move(group)), alive_(std::move(alive)), attached_(std::move(attached)) {}
  const comm::Group& group() const { return group_; }

 private:
  comm::Group group_;
  std::shared_ptr<const void> alive_;
  Attachment attached_;
};

/// Cuts in place: on meta nothing has memory yet, and materialize draws this rank's experts; experts with values keep its part of them. Throws ConfigError
/// where the ranks do not divide the experts, the sharers not the ranks or the experts' width, where nothing matches, behind a parallelize_module that has
/// taken the experts for what all its ranks hold, and for `same_tokens` of which the group has some, unless it is said what those hold (nn::add_sharing).
[[nodiscard]] std::unique_ptr<ExpertParallel> expert_parallel(torch::nn::Module& module, comm::Group group, const ExpertParallelOptions& options = {});

/// Whether a parameter of `module` is a weight of grouped experts (`experts` true), or none of them: the two sets that are synchronized over different ranks.
nn::ParameterFilter experts_of(torch::nn::Module& module, bool experts);

}  // namespace tessera
