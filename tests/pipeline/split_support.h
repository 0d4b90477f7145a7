#pragma once

#include <list>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/split/traced_stage.h"
#include "tests/refusal.h"

/// A split model against the whole one.
namespace tessera::testing_support {

using Named = std::map<std::string, at::Tensor>;

struct PassResult {
  std::vector<at::Tensor> outputs;
  Named gradients, buffers;
};

/// With some gradient for every element of every output.
inline at::Tensor loss_of(const std::vector<at::Tensor>& outputs, int micro_batch = 0) {
  at::Tensor loss;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto generator = at::detail::createCPUGenerator(11 + i + 100 * static_cast<uint64_t>(micro_batch));
    const at::Tensor term = (outputs[i] * at::randn(outputs[i].sizes(), generator)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

inline Named copies(const torch::OrderedDict<std::string, at::Tensor>& items, bool of_gradients) {
  Named copies;
  for (const auto& item : items) {
    const at::Tensor& tensor = of_gradients ? item.value().grad() : item.value();
    copies[item.key()] = tensor.defined() ? tensor.detach().clone() : at::Tensor();
  }
  return copies;
}

/// Runs `pass`, which returns outputs after their backward, from the same state as any other call does, and leaves that state behind.
template <class Pass>
PassResult run_pass(torch::nn::Module& root, Pass&& pass) {
  const Named before = copies(root.named_buffers(), false);
  for (const at::Tensor& parameter : root.parameters()) parameter.mutable_grad().reset();
  torch::manual_seed(7);
  PassResult result{.outputs = pass(), .gradients = {}, .buffers = {}};
  result.gradients = copies(root.named_parameters(), true);
  result.buffers = copies(root.named_buffers(), false);
  const at::NoGradGuard no_grad;
  for (const auto& item : root.named_buffers()) item.value().copy_(before.at(item.key()));
  return result;
}

inline std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> detached;
  for (const at::Tensor& tensor : tensors) detached.push_back(tensor.detach());
  return detached;
}

/// All stages on one rank, one after the other.
inline void run_stages(const pipeline::SplitModel& model, const schedules::Schedule& schedule, const std::vector<at::Tensor>& inputs,
                       const pipeline::TracedStage::Loss& loss) {
  std::list<pipeline::TracedStage> stages;
  std::map<int, pipeline::Stage*> by_number;
  for (int s = 0; s < model.stages(); ++s) {
    stages.emplace_back(model, s, [&](int) { return inputs; }, loss);
    by_number[s] = &stages.back();
  }
  pipeline::Executor(schedule, model.crossings(), by_number, {}).run();
}

inline std::vector<at::Tensor> staged(const pipeline::SplitModel& model, const std::vector<at::Tensor>& inputs) {
  model.expect(inputs);
  std::vector<at::Tensor> outputs;
  run_stages(model, schedules::naive(1, 1, model.stages()), inputs, [&](int, const std::vector<at::Tensor>& made) {
    outputs = detached(made);
    return loss_of(made);
  });
  return outputs;
}

inline std::vector<at::Tensor> eager(const tape::Forward& forward, const std::vector<at::Tensor>& inputs) {
  const auto outputs = forward(inputs);
  loss_of(outputs).backward();
  return detached(outputs);
}

inline void expect_same(const Named& actual, const Named& expected, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    ASSERT_EQ(actual.at(name).defined(), tensor.defined()) << what << " " << name;
    if (tensor.defined())
      EXPECT_TRUE(at::equal(actual.at(name), tensor)) << what << " " << name << " differs by "
                                                      << (actual.at(name) - tensor).abs().max().template item<double>();
  }
}

/// Outputs, gradients and buffers, bit for bit.
inline void expect_same(const PassResult& actual, const PassResult& expected) {
  ASSERT_EQ(actual.outputs.size(), expected.outputs.size());
  for (size_t i = 0; i < expected.outputs.size(); ++i) EXPECT_TRUE(at::equal(actual.outputs[i], expected.outputs[i])) << "output " << i;
  expect_same(actual.gradients, expected.gradients, "gradient");
  expect_same(actual.buffers, expected.buffers, "buffer");
}

template <class Model>
tape::Forward forward_of(Model model) {
  using Impl = std::remove_cvref_t<decltype(*model)>;
  return [model](const std::vector<at::Tensor>& inputs) mutable { return pipeline::split_detail::call_with<Impl>(model, inputs); };
}

/// The model in stages gives what it gives whole; returns the split model.
template <class Model>
pipeline::SplitModel expect_split_equals_whole(Model model, const std::vector<at::Tensor>& inputs, const pipeline::SplitSpec& splits) {
  const auto split = pipeline::split(model, inputs, splits);
  const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
  const auto actual = run_pass(*model, [&] { return staged(split, inputs); });
  expect_same(actual, expected);
  return split;
}

}  // namespace tessera::testing_support
