#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "tessera/pipeline/split/pipeline.h"
#include "tests/refusal.h"

/// A split model against the whole one.
namespace tessera::testing_support {

using Named = std::map<std::string, at::Tensor>;

struct PassResult {
  std::vector<at::Tensor> outputs;
  Named gradients, buffers;
};

inline std::vector<at::Tensor> output_gradients(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    torch::manual_seed(11 + i);
    gradients.push_back(at::randn_like(outputs[i]));
  }
  return gradients;
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

/// All stages in this process, one after the other; every tensor that crosses is copied, as a message is.
inline std::vector<at::Tensor> staged(const SplitModel& split, const std::vector<at::Tensor>& inputs) {
  split.expect(inputs);
  const auto recording = split.recording();
  const auto& plan = recording->stages;
  std::map<int, at::Tensor> wire, back;
  std::vector<tape::StagePass> passes;
  for (int s = 0; s < plan.size(); ++s) {
    std::vector<at::Tensor> fed, received;
    for (const int input : plan.stages[s].fed) fed.push_back(inputs[input]);
    for (const int c : plan.stages[s].receives) received.push_back(wire.at(c));
    passes.emplace_back(recording, s, fed, received);
    const auto sent = passes.back().sends();
    for (size_t i = 0; i < sent.size(); ++i) wire[plan.stages[s].sends[i]] = sent[i].clone();
  }
  const auto outputs = passes.back().outputs();
  for (int s = plan.size(); s-- > 0;) {
    std::vector<at::Tensor> gradients;
    if (s + 1 == plan.size()) {
      gradients = output_gradients(outputs);
    } else {
      for (const int c : plan.stages[s].sends) gradients.push_back(back[c]);
    }
    const auto given = passes[s].backward(gradients);
    for (size_t i = 0; i < given.size(); ++i) back[plan.stages[s].receives[i]] = given[i].defined() ? given[i].clone() : at::Tensor();
  }
  std::vector<at::Tensor> results;
  for (const at::Tensor& output : outputs) results.push_back(output.detach());
  return results;
}

inline std::vector<at::Tensor> eager(const tape::Forward& forward, const std::vector<at::Tensor>& inputs) {
  const auto outputs = forward(inputs);
  torch::autograd::backward(outputs, output_gradients(outputs));
  std::vector<at::Tensor> results;
  for (const at::Tensor& output : outputs) results.push_back(output.detach());
  return results;
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
  return [model](const std::vector<at::Tensor>& inputs) mutable { return detail::call_with<Impl>(model, inputs); };
}

/// The model in stages gives what it gives whole; returns the split model.
template <class Model>
SplitModel expect_split_equals_whole(Model model, const std::vector<at::Tensor>& inputs, const SplitSpec& splits) {
  const auto split = pipeline(model, inputs, splits);
  const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
  const auto actual = run_pass(*model, [&] { return staged(split, inputs); });
  expect_same(actual, expected);
  return split;
}

}  // namespace tessera::testing_support
