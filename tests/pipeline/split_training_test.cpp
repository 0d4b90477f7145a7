#include "tests/pipeline/split_training.h"

#include <gmock/gmock.h>
#include <torch/nn.h>

#include "tessera/optim/clip_grad_norm.h"
#include "tessera/pipeline/schedules/forwards.h"
#include "tests/test_device.h"

/// Programs whose gradients go where a recording has to look twice: writes through views, parts that are frozen and unfrozen, micro-batches that differ,
/// buffers that are read late, parameters that are shared and not trained.
namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

const pipeline::SplitSpec kAtB{{"b", Beginning}}, kAtBAndC{{"b", Beginning}, {"c", Beginning}};
const MakeSchedule kOneFOneB = &schedules::one_f_one_b, kGpipe = &schedules::gpipe, kZbH1 = &schedules::zb_h1,
                   kLoop = [](int ranks, int micro_batches) { return schedules::breadth_first(ranks, micro_batches, 2); };

/// Layers a, b and c, and what lies between them by the program at hand.
struct LayersImpl : torch::nn::Module {
  using Pass = std::function<at::Tensor(LayersImpl&, const std::vector<at::Tensor>&)>;
  explicit LayersImpl(Pass pass) : pass(std::move(pass)) {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
    register_module("drop", drop);
    count = register_buffer("count", torch::zeros({512, 4}));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return pass(*this, {x}); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask) { return pass(*this, {x, mask}); }
  Linear a{4, 4}, b{4, 4}, c{4, 4};
  torch::nn::Dropout drop{0.0};
  at::Tensor count, carried;
  double scale = 1;
  Pass pass;
};
TORCH_MODULE(Layers);

std::function<Layers()> layers(LayersImpl::Pass pass) {
  return [pass = std::move(pass)] { return Layers(pass); };
}

MicroBatches doubles(int count, std::vector<int64_t> sizes) {
  MicroBatches inputs;
  for (int i = 0; i < count; ++i) inputs.push_back({at::randn(sizes, at::detail::createCPUGenerator(30 + static_cast<uint64_t>(i)), at::kDouble)});
  return inputs;
}

template <class Build>
void expect_trains_alike(int ranks, Build build, const pipeline::SplitSpec& splits, const MicroBatches& inputs, const MakeSchedule& schedule = kOneFOneB,
                         const Training& training = {}) {
  expect_near(train_in_stages(ranks, build, splits, inputs, schedule, training), train_whole(build, inputs, training), training.bound);
}

TEST(SplitTraining, GradientsOfWhatALaterStageWritesThroughAView) {
  const auto inputs = doubles(4, {3, 4});
  const auto rows = [](auto write) {
    return layers([write](LayersImpl& m, const std::vector<at::Tensor>& in) {
      const at::Tensor h = torch::tanh(m.a(in[0])), g = torch::tanh(m.b(h.detach()));
      at::Tensor out = torch::zeros({2, in[0].size(0), 4}, at::kDouble);
      write(out, h, g);
      return m.c(out);
    });
  };
  for (const auto& splits : {kAtB, pipeline::SplitSpec{{"c", Beginning}}}) {
    expect_trains_alike(2, rows([](const at::Tensor& out, const at::Tensor& h, const at::Tensor& g) {
                          out[0].copy_(h);
                          out[1].copy_(g);
                        }),
                        splits, inputs);
    expect_trains_alike(2, rows([](at::Tensor& out, const at::Tensor& h, const at::Tensor& g) {
                          out.index_put_({0}, h);
                          out.narrow(0, 1, 1).copy_(g.unsqueeze(0));
                        }),
                        splits, inputs);
  }
  expect_trains_alike(2, layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
                        const at::Tensor z = torch::tanh(m.a(in[0])), y = m.b(in[0]);
                        y.select(1, 0).add_(z.select(1, 1));
                        return m.c(torch::tanh(y));
                      }),
                      kAtB, inputs);
}

TEST(SplitTraining, GradientsOfWhatAStageChangesThroughAViewAndHandsOn) {
  const auto build = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    const at::Tensor z = torch::tanh(m.a(in[0]) * 1.0) * 1.0, t = m.b(in[0]);
    z.view({-1}).mul_(2);
    return m.c(z) + t.tanh();
  });
  expect_trains_alike(2, build, kAtB, doubles(4, {3, 4}));
  expect_trains_alike(3, build, kAtBAndC, doubles(4, {3, 4}), kZbH1);
  // Changed where no gradient is recorded: it comes back through the stage all the same.
  expect_trains_alike(3, layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
                        const at::Tensor z = torch::tanh(m.a(in[0])) * 1.0, t = m.b(in[0]);
                        {
                          const at::NoGradGuard no_grad;
                          z.mul_(2);
                        }
                        return m.c(z) + t.tanh();
                      }),
                      kAtBAndC, doubles(4, {3, 4}));
}

const auto chain_of_three = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) { return m.c(torch::tanh(m.b(torch::tanh(m.a(in[0]))))); });

void set_trained(torch::nn::Module& module, const std::string& prefix, bool trained) {
  for (const auto& item : module.named_parameters()) {
    if (item.key().starts_with(prefix)) item.value().set_requires_grad(trained);
  }
}

TEST(SplitTraining, FrozenWhenItWasSplitAndUnfrozenLater) {
  for (const bool one_executor : {false, true}) {
    Training training{.steps = 3, .one_executor = one_executor, .example = {}, .before = {}};
    training.before = [](torch::nn::Module& module, int step) { set_trained(module, "a", step >= 1); };
    expect_trains_alike(2, chain_of_three, kAtB, doubles(4, {3, 4}), kOneFOneB, training);
    training.before = [](torch::nn::Module& module, int step) {
      set_trained(module, "a", step != 1);
      set_trained(module, "b", step == 2);
    };
    expect_trains_alike(3, chain_of_three, kAtBAndC, doubles(4, {3, 4}), kZbH1, training);
  }
}

TEST(SplitTraining, CrossingsTakenWithoutGradientsAreThoseOfTraining) {
  const auto inputs = doubles(1, {3, 4});
  const Layers model = chain_of_three();
  const auto split = pipeline::split(model, inputs[0], kAtB);
  const auto expected = split.crossings();
  ASSERT_TRUE(expected.at(0).takes_gradient);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(pipeline::split(model, inputs[0], kAtB).crossings(), expected);
  EXPECT_EQ(split.crossings(), expected);
}

const auto detaches_long_ones = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
  const at::Tensor h = torch::tanh(m.a(in[0]));
  return m.b(in[0].size(0) > 2 ? h.detach() : h);
});

TEST(SplitTraining, AGradientComesBackWhereOneMicroBatchNeedsIt) {
  auto inputs = doubles(4, {3, 4});
  inputs[1][0] = inputs[1][0].narrow(0, 0, 2).clone();
  expect_trains_alike(2, detaches_long_ones, kAtB, inputs);
  std::swap(inputs[0], inputs[1]);
  expect_trains_alike(2, detaches_long_ones, kAtB, inputs, kGpipe);
}

TEST(SplitTraining, AnExecutorThatWasToldLessIsRefused) {
  const auto model = detaches_long_ones();
  const auto inputs = doubles(1, {3, 4})[0];
  const auto split = pipeline::split(model, inputs, kAtB);
  EXPECT_FALSE(split.crossings().at(0).takes_gradient);
  const std::vector<at::Tensor> shorter{inputs[0].narrow(0, 0, 2).clone()};
  split.expect(shorter, 0);
  pipeline::TracedStage stage(split, 0, [&](int) { return shorter; });
  EXPECT_THAT(refusal([&] { stage.forward(0, {}); }), AllOf(HasSubstr("micro-batch 0"), HasSubstr("take SplitModel::crossings() behind expect()")));
  split.crossings();
  stage.forward(0, {});
}

/// An input that requires a gradient in the pass alone: what crosses would bring none back.
TEST(SplitTraining, AnInputThatRequiresAGradientIsSaidBefore) {
  const auto model = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) { return m.b(torch::tanh(m.a(in[0]))) + in[0] * 2; })();
  const auto inputs = doubles(1, {3, 4})[0];
  const auto split = pipeline::split(model, inputs, kAtB);
  const at::Tensor wants = inputs[0].detach().clone().requires_grad_();
  pipeline::TracedStage stage(split, 0, [&](int) { return std::vector<at::Tensor>{wants}; });
  EXPECT_THAT(refusal([&] { stage.forward(0, {}); }), AllOf(HasSubstr("an input 0 that requires a gradient"), HasSubstr("call expect()")));
  {
    const at::NoGradGuard no_grad;
    stage.forward(0, {});
  }
  split.expect({wants});
  bool comes_back = true;
  for (const auto& crossing : split.crossings()) comes_back &= crossing.takes_gradient;
  EXPECT_TRUE(comes_back);
  stage.forward(0, {});
}

/// reshape takes a copy of what has gaps, which is written: behind a cut, too, and of what lies so in a copy of the input.
TEST(SplitTraining, WhatHasGapsInMemoryArrivesWithThem) {
  const auto build = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    const auto parts = m.a(in[0]).chunk(2, -1);
    const at::Tensor q = parts[0], k = torch::tanh(m.b(torch::cat({parts[1], parts[1]}, -1)));
    const at::Tensor y = q.reshape({-1}).mul_(0.5).view({-1, 2});
    return m.c(torch::cat({y, q}, -1) * k);
  });
  const auto inputs = doubles(2, {3, 4});
  std::vector<at::Tensor> whole, in_stages;
  {
    const at::NoGradGuard no_grad;
    const std::vector<Layers> models{build(), build()};
    for (const auto& item : models[1]->named_parameters()) item.value().copy_(models[0]->named_parameters()[item.key()]);
    whole = forward_of(models[0])(inputs[0]);
    comm::run_ranks(2, [&](comm::World& world) {
      const auto split = pipeline::split(models[static_cast<size_t>(world.rank())], inputs[0], kAtB);
      const at::NoGradGuard no_grad;
      pipeline::TracedStage stage(
          split, world.rank(), [&](int) { return inputs[0]; },
          [&](int, const std::vector<at::Tensor>& made) {
            in_stages = made;
            return at::Tensor();
          });
      pipeline::Executor(schedules::forwards({0, 1}, 2, 1), split.crossings(), {{world.rank(), &stage}}, {.ranks = world.group()}).run();
    });
  }
  ASSERT_TRUE(at::equal(in_stages.at(0), whole.at(0)));
  expect_trains_alike(2, build, kAtB, inputs);
}

TEST(SplitTraining, AnInputIsTakenAsItLiesInMemoryWhereThatMatters) {
  const std::vector<at::Tensor> dense{doubles(1, {3, 4})[0]}, gaps{at::cat({dense[0], dense[0]}, 1).narrow(1, 0, 4)};
  const auto writes = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    const at::Tensor y = in[0].reshape({-1});
    y.mul_(0.5);
    return m.b(torch::tanh(m.a(y.view({-1, 4})))) + in[0];
  });
  const auto given = [](const pipeline::SplitModel& split, const std::vector<at::Tensor>& inputs) {
    pipeline::TracedStage(split, 0, [&](int) { return inputs; }).forward(0, {});
  };
  const auto split = expect_split_equals_whole(writes(), gaps, kAtB);
  EXPECT_THAT(refusal([&] { given(split, dense); }),
              AllOf(HasSubstr("is given input 0 with strides [4, 1], where the example has [8, 1]"), HasSubstr("expect()")));
  auto model = writes();
  const auto example = pipeline::split(model, {dense[0].clone()}, kAtB);
  EXPECT_THAT(refusal([&] { given(example, gaps); }), HasSubstr("is given input 0 with strides [8, 1], where the example has [4, 1]"));
  for (int pass = 0; pass < 3; ++pass) {
    expect_same(run_pass(*model, [&] { return staged(example, gaps); }), run_pass(*model, [&] { return eager(forward_of(model), gaps); }));
    expect_same(run_pass(*model, [&] { return staged(example, {dense[0].clone()}); }),
                run_pass(*model, [&] { return eager(forward_of(model), {dense[0].clone()}); }));
  }
  // What crosses lies as the input does.
  const auto writes_later = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    const at::Tensor h = torch::tanh(in[0]), u = m.b(m.a(h)), y = h.reshape({-1});
    y.mul_(0.5);
    return m.c(u * y.view({-1, 4})) + h;
  });
  EXPECT_THAT(refusal([&] { given(pipeline::split(writes_later(), dense, kAtBAndC), {dense[0].t().contiguous().t()}); }),
              HasSubstr("stage 0 sends what tanh gives, with strides [1, 3], where it was recorded with [4, 1]"));
  // Where forward writes into nothing that may be the input, it may lie as it likes: tokens are often all columns but the last.
  const auto reads = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) { return m.b(m.a(in[0].reshape({-1, 2, 2}).flatten(1)).relu_()).relu_(); });
  given(pipeline::split(reads(), dense, kAtB), gaps);
}

/// With gradients a term more is made and sent.
TEST(SplitTraining, AModelWhoseWaysWithoutGradientsAreOthersIsEvaluated) {
  const auto model = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    const at::Tensor h = torch::tanh(m.a(in[0])), y = m.c(torch::tanh(m.b(h)));
    return at::GradMode::is_enabled() ? y + h.square().mean() : y;
  })();
  const auto inputs = doubles(1, {3, 4})[0];
  const auto split = expect_split_equals_whole(model, inputs, kAtBAndC);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> outputs;
  run_stages(split, schedules::forwards({0, 0, 0}, 1, 1), inputs, [&](int, const std::vector<at::Tensor>& made) {
    outputs = made;
    return at::Tensor();
  });
  EXPECT_TRUE(at::equal(outputs.at(0), forward_of(model)(inputs).at(0)));
}

TEST(SplitTraining, MicroBatchesThatSendOtherTensorsAreRefused) {
  const auto model = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    const at::Tensor h = torch::tanh(m.a(in[0])), y = m.b(h);
    return in[0].size(0) > 2 ? m.c(y) + h : m.c(y);
  })();
  const auto inputs = doubles(2, {3, 4});
  const auto split = pipeline::split(model, inputs[0], kAtBAndC);
  split.expect({inputs[1][0].narrow(0, 0, 2)}, 1);
  EXPECT_THAT(refusal([&] { split.crossings(); }), AllOf(HasSubstr("send other tensors between stages"), HasSubstr("split elsewhere")));
}

TEST(SplitTraining, ATiedWeightWithoutAGradientStaysWhereItIs) {
  MicroBatches inputs;
  for (uint64_t i = 0; i < 4; ++i) inputs.push_back({at::randint(20, {2, 5}, at::detail::createCPUGenerator(30 + i), at::kLong)});
  Training training{.example = {}, .before = {}, .bound = 1e-5};
  training.before = [](torch::nn::Module& module, int step) { set_trained(module, "emb", step == 1); };
  expect_trains_alike(2, [] { return Tied(); }, {{"layers.1", Beginning}}, inputs, kOneFOneB, training);
}

/// Which is called with each stage's part.
TEST(SplitTraining, ALinearHookOnATiedWeightIsRight) {
  MicroBatches inputs;
  for (uint64_t i = 0; i < 4; ++i) inputs.push_back({at::randint(20, {2, 5}, at::detail::createCPUGenerator(30 + i), at::kLong)});
  Training training{.decay = 0, .example = {}, .before = {}, .bound = 1e-5};
  training.before = [](torch::nn::Module& module, int step) {
    const auto first_rows_alone = [](const at::Tensor& gradient) { return gradient * at::arange(gradient.size(0), gradient.options()).lt(9).unsqueeze(-1); };
    if (step == 0) module.named_parameters()["emb.weight"].register_hook(first_rows_alone);
  };
  expect_trains_alike(2, [] { return Tied(); }, {{"layers.1", Beginning}}, inputs, kOneFOneB, training);
}

TEST(SplitTraining, ATiedWeightsGradientCountsOnceHoweverOftenItIsSummed) {
  const std::vector<at::Tensor> inputs{at::randint(20, {2, 5}, at::detail::createCPUGenerator(3), at::kLong)};
  comm::run_ranks(2, [&](comm::World& world) {
    auto model = on_meta([] { return Tied(); });
    const auto split = pipeline::split(model, inputs, {{"layers.1", Beginning}});
    const auto own = split.module(world.rank());
    materialize(*own, 5);
    pipeline::TracedStage stage(
        split, world.rank(), [&](int) { return inputs; },
        [](int micro_batch, const std::vector<at::Tensor>& made) { return floating_loss(made, micro_batch); });
    const schedules::Schedule plan = schedules::one_f_one_b(2, 1);
    pipeline::Executor executor(plan, split.crossings(), {{world.rank(), &stage}}, {.ranks = world.group(), .device = testing_support::test_device()});
    const at::Tensor weight = own->named_parameters()["emb.weight"];
    const auto sum = [&] {
      pipeline::sum_shared_gradients(split, plan, world.group());
      return weight.grad().clone();
    };
    executor.run();
    EXPECT_THAT(refusal([&] { pipeline::clip_grad_norm(split, plan, world.group(), 1.0); }),
                AllOf(HasSubstr("'emb.weight'"), HasSubstr("sum_shared_gradients")));
    const at::Tensor once = sum();
    EXPECT_NO_THROW(pipeline::clip_grad_norm(split, plan, world.group(), 1e9));
    EXPECT_TRUE(at::equal(sum(), once)) << "a second call";
    {
      const at::NoGradGuard no_grad;
      weight.grad().mul_(0.5);  // as clipping does
    }
    EXPECT_TRUE(at::equal(sum(), once * 0.5));
    own->zero_grad(/*set_to_none=*/false);
    executor.run();
    EXPECT_TRUE(at::equal(sum(), once)) << "a step behind zeros";
    own->zero_grad();
    executor.run();
    EXPECT_TRUE(at::equal(sum(), once)) << "a step behind none";
    executor.run();
    EXPECT_THAT(refusal([&] { sum(); }), HasSubstr("'emb.weight', which stages on several ranks hold, was summed by sum_shared_gradients, and has had more"));
  });
}

TEST(SplitTraining, CopiesOfATiedWeightAreFrozenTogether) {
  const auto run = [] {
    comm::run_ranks(3, [](comm::World& world) {
      auto model = on_meta([] { return Tied(); });
      const auto split = pipeline::split(model, {torch::zeros({2, 5}, at::kLong)}, {{"layers.1", Beginning}, {"layers.2", End}});
      materialize(*split.module(world.rank()), 5, testing_support::test_device());
      if (world.rank() == 2) set_trained(*model, "emb", false);
      EXPECT_THAT(refusal([&] { pipeline::sum_shared_gradients(split, schedules::one_f_one_b(3, 3), world.group()); }),
                  HasSubstr("'emb.weight' is one parameter that stages on several ranks hold, and is trained on rank 0 and not on rank 2"));
    });
  };
  run();
}

/// A later micro-batch writes the buffer before the view of it has been read.
TEST(SplitTraining, ViewsOfABufferArriveAsTheyWereSent) {
  for (const bool detaches : {false, true}) {
    const auto build = layers([detaches](LayersImpl& m, const std::vector<at::Tensor>& in) {
      const at::Tensor h = m.a(in[0]);
      {
        const at::NoGradGuard no_grad;
        m.count.add_(1);
      }
      const at::Tensor seen = detaches ? m.count.detach() : m.count.view({-1, 4});
      return m.b(h) * seen.narrow(0, 0, in[0].size(0));
    });
    const Training training{.steps = 1, .rate = 1e-3, .example = {}, .before = {}};
    expect_trains_alike(2, build, kAtB, doubles(6, {512, 4}), kGpipe, training);
    expect_trains_alike(1, build, kAtB, doubles(3, {512, 4}), kLoop, training);
  }
}

TEST(SplitTraining, AnExampleThatRepeatsARowIsTakenAsDenseData) {
  MicroBatches inputs = doubles(4, {3, 4});
  for (size_t i = 0; i < inputs.size(); ++i) inputs[i].push_back(at::randn({3}, at::detail::createCPUGenerator(9 + i), at::kDouble));
  const Training training{.example = {at::zeros({3, 4}, at::kDouble), at::zeros({1}, at::kDouble).expand({3})}, .before = {}};
  expect_trains_alike(2, layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
                        const at::Tensor weight = in[1].unsqueeze(-1);
                        return m.b(torch::tanh(m.a(in[0])) * weight) * weight;
                      }),
                      kAtB, inputs, kOneFOneB, training);
}

TEST(SplitTraining, ClipsByTheNormOverAllStages) {
  const Training training{.max_norm = 0.5, .example = {}, .before = {}};
  expect_trains_alike(3, chain_of_three, kAtBAndC, doubles(4, {3, 4}), kOneFOneB, training);
  MicroBatches tokens;
  for (uint64_t i = 0; i < 4; ++i) tokens.push_back({at::randint(20, {2, 5}, at::detail::createCPUGenerator(30 + i), at::kLong)});
  const auto tied = [] {
    Tied model;
    model->to(at::kDouble);
    return model;
  };
  for (const int ranks : {1, 3}) {
    const auto schedule = ranks == 1 ? MakeSchedule([](int, int count) { return schedules::breadth_first(1, count, 3); }) : kOneFOneB;
    expect_trains_alike(ranks, tied, {{"layers.1", Beginning}, {"layers.2", End}}, tokens, schedule, training);
  }
}

TEST(SplitTraining, TheNormOfOneStageIsRefused) {
  const Layers model = chain_of_three();
  const auto split = pipeline::split(model, doubles(1, {3, 4})[0], kAtB);
  for (const at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  EXPECT_THAT(refusal([&] { clip_grad_norm(*split.module(0), 1.0); }),
              AllOf(HasSubstr("2 of the 6 parameters of a model in stages"), HasSubstr("pipeline::clip_grad_norm(split, schedule, ranks, max_norm)")));
  EXPECT_NEAR(clip_grad_norm(*model, 100.0).item<double>(), std::sqrt(60.0), 1e-12);  // all stages are here
  const auto other = on_meta(chain_of_three);
  const auto parts = pipeline::split(other, doubles(1, {3, 4})[0], kAtB);
  materialize(*parts.module(1), 5, testing_support::test_device());
  EXPECT_THAT(refusal([&] { clip_grad_norm(*other, 1.0); }), HasSubstr("4 of the 6 parameters"));
}

const auto scaled = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) { return m.b(m.drop(torch::tanh(m.a(in[0]))) * m.scale); });

TEST(SplitTraining, NumbersThatAProgramChangesAreSeenAndNamed) {
  const auto inputs = doubles(2, {3, 4});
  Training training{.steps = 4, .example = {}, .before = {}};
  training.before = [](torch::nn::Module& module, int step) {
    if (step >= 0) module.as<LayersImpl>()->scale = 1 + step;
  };
  EXPECT_THAT(refusal([&] { train_in_stages(2, scaled, kAtB, inputs, kOneFOneB, training); }),
              AllOf(HasSubstr("is not the one that was recorded: after 'a': aten::mul.Scalar("), HasSubstr(" in place of aten::mul.Scalar("),
                    HasSubstr("SplitModel::record_anew()")));
  training.before = [](torch::nn::Module& module, int step) {
    if (step >= 1) module.as<LayersImpl>()->drop->options.p(0.5);
  };
  EXPECT_THAT(refusal([&] { train_in_stages(2, scaled, kAtB, inputs, kOneFOneB, training); }), HasSubstr("aten::dropout("));
}

TEST(SplitTraining, ARecordingThatIsMadeAnewHasTheNumbersOfNow) {
  const auto inputs = doubles(1, {3, 4})[0];
  Layers model = scaled();
  const auto split = pipeline::split(model, inputs, kAtB);
  for (const double scale : {1.0, 2.0, 3.0}) {
    model->scale = scale;
    split.record_anew();
    expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
  }
}

TEST(SplitTraining, AForwardThatChangesItselfIsRefused) {
  const auto inputs = doubles(1, {3, 4})[0];
  const auto counts = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) { return m.b(m.a(in[0]) * (m.scale += 1)); })();
  EXPECT_THAT(refusal([&] { pipeline::split(counts, inputs, kAtB); }),
              AllOf(HasSubstr("is another one each time: after 'a': aten::mul"), HasSubstr("a buffer")));
  const auto carries = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    at::Tensor y = torch::tanh(m.a(in[0]));
    if (m.carried.defined()) y = y + m.carried;
    m.carried = y.detach();
    return m.b(y);
  })();
  EXPECT_THAT(refusal([&] { pipeline::split(carries, inputs, kAtB); }), HasSubstr("is given a tensor on meta that is no parameter"));
  // A table that the first pass makes is the same from then on.
  const auto keeps = layers([](LayersImpl& m, const std::vector<at::Tensor>& in) {
    if (!m.carried.defined()) m.carried = torch::full({4}, 2, at::kDouble);
    return m.b(torch::tanh(m.a(in[0])) * m.carried);
  })();
  expect_split_equals_whole(keeps, inputs, kAtB);
}

}  // namespace
}  // namespace tessera
