#pragma once

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/testing.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/pipeline/split/clip_grad_norm.h"
#include "tessera/pipeline/split/shared_gradients.h"
#include "tests/pipeline/split_support.h"
#include "tests/test_device.h"

/// Steps of training a model in stages, by ranks and a schedule, against one process: with momentum and weight decay, which move a parameter that has a
/// gradient of zeros, and leave one alone that has none.
namespace tessera::testing_support {

using MicroBatches = std::vector<std::vector<at::Tensor>>;
using MakeSchedule = std::function<schedules::Schedule(int ranks, int micro_batches)>;

struct Training {
  int steps = 3;
  double rate = 0.1, decay = 0.1, max_norm = 0;              ///< max_norm 0: without clipping
  bool one_executor = false;                                 ///< for all steps; otherwise one for each
  std::vector<at::Tensor> example{};                         ///< what the model is split with; empty: the first micro-batch, and every one is announced
  std::function<void(torch::nn::Module&, int step)> before;  ///< what a program does with the model before a step; before it is split, with step -1
  double bound = 1e-9;                                       ///< of the largest entry, or of 1
};

struct TrainingResult {
  Named weights, buffers, gradients;
  std::vector<std::vector<at::Tensor>> outputs;  ///< of the last step, by micro-batch
  std::vector<double> norms;
};

inline at::Tensor floating_loss(const std::vector<at::Tensor>& outputs, int micro_batch) {
  std::vector<at::Tensor> floating;
  for (const at::Tensor& output : outputs) {
    if (output.is_floating_point()) floating.push_back(output);
  }
  return loss_of(floating, micro_batch);
}

inline std::vector<at::Tensor> unique_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> unique;
  for (const auto& parameter : nn::unique_parameters(module)) unique.push_back(parameter.tensor);
  return unique;
}

inline std::unique_ptr<torch::optim::SGD> momentum_sgd(const std::vector<at::Tensor>& parameters, const Training& training) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(training.rate).momentum(0.9).weight_decay(training.decay));
}

inline void keep_state(TrainingResult& result, const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    result.weights[item.key()] = item.value().detach().clone();
    if (item.value().grad().defined()) result.gradients[item.key()] = item.value().grad().clone();
  }
  for (const auto& item : module.named_buffers()) result.buffers[item.key()] = item.value().detach().clone();
}

template <class Build>
TrainingResult train_whole(Build build, const MicroBatches& inputs, const Training& training) {
  auto model = on_meta(build);
  materialize(*model, 5, testing_support::test_device());
  const auto optimizer = momentum_sgd(unique_of(*model), training);
  TrainingResult result;
  for (int step = 0; step < training.steps; ++step) {
    if (training.before) training.before(*model, step);
    optimizer->zero_grad();
    result.outputs.clear();
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
      const auto outputs = forward_of(model)(inputs[i]);
      if (const at::Tensor loss = floating_loss(outputs, i); loss.requires_grad()) loss.backward();
      result.outputs.emplace_back();
      for (const at::Tensor& output : outputs) result.outputs.back().push_back(output.detach().clone());
    }
    if (training.max_norm > 0) {
      const auto parameters = unique_of(*model);
      const bool any = std::ranges::any_of(parameters, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
      result.norms.push_back(any ? torch::nn::utils::clip_grad_norm_(parameters, training.max_norm) : 0);
    }
    optimizer->step();
  }
  keep_state(result, *model);
  return result;
}

template <class Build>
TrainingResult train_in_stages(int ranks, Build build, const pipeline::SplitSpec& splits, const MicroBatches& inputs, const MakeSchedule& schedule,
                               const Training& training) {
  TrainingResult result;
  std::mutex mutex;
  comm::run_ranks(ranks,
                  [&](comm::World& world) {
                    auto model = on_meta(build);
                    if (training.before) training.before(*model, -1);
                    const auto split = pipeline::split(model, training.example.empty() ? inputs[0] : training.example, splits);
                    const schedules::Schedule plan = schedule(ranks, static_cast<int>(inputs.size()));
                    for (int i = 0; training.example.empty() && i < static_cast<int>(inputs.size()); ++i) split.expect(inputs[i], i);
                    split.check_agreement(world.group());
                    std::vector<std::vector<at::Tensor>> outputs(inputs.size());
                    std::list<pipeline::TracedStage> stages;
                    std::map<int, pipeline::Stage*> by_number;
                    const auto own = split.module(plan.stages_of(world.rank()));
                    materialize(*own, 5, testing_support::test_device());
                    for (const int number : plan.stages_of(world.rank())) {
                      stages.emplace_back(
                          split, number, [&](int micro_batch) { return inputs[micro_batch]; },
                          [&](int micro_batch, const std::vector<at::Tensor>& made) {
                            outputs[micro_batch].clear();
                            for (const at::Tensor& output : made) outputs[micro_batch].push_back(output.detach().clone());
                            return floating_loss(made, micro_batch);
                          });
                      by_number[number] = &stages.back();
                    }
                    const auto parameters = unique_of(*own);
                    const auto optimizer = parameters.empty() ? nullptr : momentum_sgd(parameters, training);
                    std::unique_ptr<pipeline::Executor> executor;
                    std::vector<double> norms;
                    for (int step = 0; step < training.steps; ++step) {
                      if (training.before) training.before(*model, step);
                      if (optimizer) optimizer->zero_grad();
                      if (!executor || !training.one_executor)
                        executor = std::make_unique<pipeline::Executor>(plan, split.crossings(), by_number,
                                                                        pipeline::ExecutorOptions{.ranks = world.group(), .device = test_device()});
                      executor->run();
                      pipeline::sum_shared_gradients(split, plan, world.group());
                      if (training.max_norm > 0)
                        norms.push_back(pipeline::clip_grad_norm(split, plan, world.group(), training.max_norm).template item<double>());
                      if (optimizer) optimizer->step();
                    }
                    const std::lock_guard lock(mutex);
                    keep_state(result, *own);
                    if (by_number.contains(plan.stages() - 1)) {
                      result.outputs = outputs;
                      result.norms = norms;
                    } else {
                      EXPECT_TRUE(result.norms.empty() || result.norms == norms);
                    }
                  },
                  {.timeout = std::chrono::seconds(60)});
  return result;
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, double bound, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  const double largest = std::max(1.0, expected.to(at::kDouble).abs().max().item<double>());
  EXPECT_LE((actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>(), bound * largest) << what;
}

inline void expect_near(const Named& actual, const Named& expected, double bound, const std::string& what) {
  for (const auto& [name, tensor] : actual) EXPECT_TRUE(expected.contains(name)) << what << " of " << name << ", which one process has not";
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(actual.contains(name)) << what << " of " << name << ", which one process has";
    expect_near(actual.at(name), tensor, bound, what + " of " + name);
  }
}

/// Outputs, weights, buffers, gradients (also whether there is one) and norms.
inline void expect_near(const TrainingResult& actual, const TrainingResult& expected, double bound) {
  expect_near(actual.gradients, expected.gradients, bound, "gradient");
  expect_near(actual.weights, expected.weights, bound, "weight");
  expect_near(actual.buffers, expected.buffers, bound, "buffer");
  ASSERT_EQ(actual.outputs.size(), expected.outputs.size());
  for (size_t i = 0; i < expected.outputs.size(); ++i) {
    ASSERT_EQ(actual.outputs[i].size(), expected.outputs[i].size());
    for (size_t k = 0; k < expected.outputs[i].size(); ++k)
      expect_near(actual.outputs[i][k], expected.outputs[i][k], bound, detail::concat("output ", k, " of micro-batch ", i));
  }
  ASSERT_EQ(actual.norms.size(), expected.norms.size());
  for (size_t i = 0; i < expected.norms.size(); ++i) EXPECT_NEAR(actual.norms[i], expected.norms[i], bound * std::max(1.0, expected.norms[i]));
}

}  // namespace tessera::testing_support
