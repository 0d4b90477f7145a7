#include "tests/pipeline/split_models.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

#include "tessera/nn/meta.h"
#include "tessera/pipeline/split/wire.h"
#include "tests/pipeline/split_support.h"

namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;
using ::testing::HasSubstr;
using ::testing::SizeIs;

at::Tensor causal_mask(int64_t length) { return torch::full({length, length}, -INFINITY).triu(1); }

/// What each stage holds, by name.
std::vector<std::vector<std::string>> names_of(const pipeline::SplitModel& split) {
  std::vector<std::vector<std::string>> names;
  for (int s = 0; s < split.stages(); ++s) {
    names.emplace_back();
    for (const auto& item : split.module(s)->named_parameters()) names.back().push_back(item.key());
  }
  return names;
}

TEST(Split, ClassicExample) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(Classic(), {torch::tensor({1, 2, 4, 5})}, {{"layers.1", Beginning}});
  EXPECT_EQ(names_of(split), (std::vector<std::vector<std::string>>{{"emb.weight", "layers.0.fc.weight", "layers.0.fc.bias"},
                                                                    {"layers.1.fc.weight", "layers.1.fc.bias", "lm.weight", "lm.bias"}}));
  EXPECT_EQ(split.to_string(),
            "Classic in 2 stages\n"
            "stage 0: 3 parameters (42 elements), 168 B, 4 operators\n"
            "  takes input 0: int64 [4]\n"
            "  emb: embedding\n"
            "  layers.0.fc: t addmm relu\n"
            "  sends relu after 'layers.0.fc' to stage 1: float32 [4, 3], 48 B, and gets its gradient\n"
            "stage 1: 4 parameters (52 elements), 208 B, 5 operators\n"
            "  receives relu after 'layers.0.fc' from stage 0: float32 [4, 3]\n"
            "  layers.1.fc: t addmm relu\n"
            "  lm: t addmm\n"
            "  gives float32 [4, 10]\n");
}

TEST(Split, EncoderInTrainingDrawsTheSameMasks) {
  torch::manual_seed(1);
  const auto split =
      expect_split_equals_whole(Encoder(16, 4, 0.1), {torch::randint(50, {6, 3}), causal_mask(6)}, {{"enc.layers.1", Beginning}, {"enc.layers.2", End}});
  EXPECT_EQ(split.stages(), 3);
  const auto& plan = split.recording()->stages;
  // The mask is an input that every stage takes from its own loader; one tensor crosses each boundary.
  for (const auto& stage : plan.stages) EXPECT_EQ(std::ranges::count(stage.fed, 1), 1);
  EXPECT_THAT(plan.crossings, SizeIs(2));
}

TEST(Split, EncoderInEvaluation) {
  torch::manual_seed(1);
  Encoder model(16, 4, 0.1);
  model->eval();
  expect_split_equals_whole(model, {torch::randint(50, {6, 3}), causal_mask(6)}, {{"enc.layers.1", Beginning}});
}

TEST(Split, LongSkipGoesStraightToWhereItIsUsed) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(LongSkip(), {torch::randn({2, 3, 8, 8})}, {{"blocks.1", Beginning}, {"blocks.3", Beginning}});
  const auto recording = split.recording();
  std::vector<std::pair<int, int>> ways;
  for (const auto& crossing : recording->stages.crossings) ways.emplace_back(crossing.from, crossing.to);
  EXPECT_EQ(ways, (std::vector<std::pair<int, int>>{{0, 2}, {0, 1}, {1, 2}}));
}

TEST(Split, TiedEmbeddingIsHeldByBothEnds) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(Tied(), {torch::randint(20, {2, 5})}, {{"layers.1", Beginning}, {"layers.2", End}});
  const auto& shared = split.recording()->stages.shared;
  ASSERT_THAT(shared, SizeIs(1));
  EXPECT_EQ(shared[0].name, "emb.weight");
  EXPECT_EQ(shared[0].stages, (std::vector<int>{0, 2}));
  EXPECT_EQ(names_of(split)[2], (std::vector<std::string>{"emb.weight", "norm.weight", "norm.bias"}));
}

TEST(Split, LstmSendsItsStates) {
  torch::manual_seed(1);
  expect_split_equals_whole(Recurrent(), {torch::randint(20, {5, 2})}, {{"lstm", Beginning}, {"head", Beginning}});
}

TEST(Split, IntegersMasksAndViewsCross) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(Odd(), {torch::randint(20, {3, 5})}, {{"b", Beginning}, {"c", Beginning}});
  const auto recording = split.recording();
  std::set<at::ScalarType> types;
  for (const auto& crossing : recording->stages.crossings) {
    types.insert(crossing.form.dtype);
    EXPECT_TRUE(!crossing.gradient || crossing.form.dtype == at::kFloat);
  }
  EXPECT_EQ(types, (std::set<at::ScalarType>{at::kLong, at::kBool, at::kFloat}));
  // Positions are made again where they are used, of nothing but their number.
  const auto& again = recording->stages.stages[2].again;
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_EQ(recording->graph->nodes[again[0]].name, "arange");
  EXPECT_THAT(recording->stages.stages[1].again, SizeIs(0));
}

TEST(Split, StageWritesIntoACopyOfWhatItReceives) {
  torch::manual_seed(1);
  expect_split_equals_whole(WritesReceived(), {torch::randn({2, 4})}, {{"n", Beginning, 0}});
}

TEST(Split, InPlaceActivationsInASequential) {
  torch::manual_seed(1);
  using torch::nn::Linear, torch::nn::ReLU, torch::nn::ReLUOptions, torch::nn::Sequential;
  const Sequential model(Linear(4, 4), ReLU(ReLUOptions(true)), Linear(4, 4), ReLU(ReLUOptions(true)), Linear(4, 2));
  expect_split_equals_whole(model, {torch::randn({2, 4})}, {{"0", End}, {"2", End}});
}

TEST(Split, SeveralResultsAndALabel) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(TwoResults(), {torch::randn({2, 4}), torch::randn({2, 4})}, {{"b", Beginning}});
  const auto& stages = split.recording()->stages.stages;
  EXPECT_EQ(stages[0].fed, (std::vector<int>{0}));
  EXPECT_EQ(stages[1].fed, (std::vector<int>{1}));
}

TEST(Split, WithoutSplitPointsItIsOneStage) {
  torch::manual_seed(1);
  EXPECT_EQ(expect_split_equals_whole(LongSkip(), {torch::randn({2, 3, 8, 8})}, {}).stages(), 1);
}

TEST(Split, RecordingLeavesTheModelAndTheGeneratorAlone) {
  torch::manual_seed(1);
  LongSkip model;
  const auto before = copies(model->named_buffers(), false);
  torch::manual_seed(3);
  const at::Tensor expected = torch::rand({2});
  torch::manual_seed(3);
  pipeline::split(model, {torch::empty({2, 3, 8, 8}, at::kMeta)}, {{"blocks.1", Beginning}});
  pipeline::split(on_meta([] { return Draws(); }), {torch::empty({2, 4}, at::kMeta)}, {{"b", Beginning}});
  pipeline::split(on_meta([] { return Recurrent(); }), {torch::empty({5, 2}, at::dtype(at::kLong).device(at::kMeta))}, {{"head", Beginning}});
  EXPECT_TRUE(at::equal(torch::rand({2}), expected));
  expect_same(copies(model->named_buffers(), false), before, "buffer");
}

TEST(Split, NoiseIsDrawnAnewByEachPass) {
  torch::manual_seed(1);
  expect_split_equals_whole(Draws(), {torch::randn({2, 4})}, {{"b", Beginning}});
}

TEST(Split, AutocastIsRecordedWithItsTypes) {
  torch::manual_seed(1);
  Encoder model(16, 2, 0.1);
  const std::vector<at::Tensor> inputs{torch::randint(50, {6, 3}), causal_mask(6)};
  const auto split = expect_split_equals_whole(model, inputs, {{"enc.layers.1", Beginning}});
  EXPECT_EQ(split.recording()->stages.crossings[0].form.dtype, at::kFloat);
  struct Autocast {
    Autocast() {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    }
    ~Autocast() {
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
  } autocast;
  torch::manual_seed(3);
  const at::Tensor drawn = torch::rand({2});
  torch::manual_seed(3);
  split.recording();
  EXPECT_TRUE(at::equal(torch::rand({2}), drawn));
  EXPECT_EQ(split.recording()->graph->values[split.recording()->graph->outputs[0]].last_form().dtype, at::kBFloat16);
  const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
  at::autocast::clear_cache();
  expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
}

TEST(Split, OtherShapesAndModesAreRecordedAnew) {
  torch::manual_seed(1);
  Recurrent model;
  const auto split = expect_split_equals_whole(model, {torch::randint(20, {5, 2})}, {{"head", Beginning}});
  const auto first = split.recording();
  EXPECT_EQ(split.recording(), first);
  for (const int64_t batch : {1, 4}) {
    const std::vector<at::Tensor> inputs{torch::randint(20, {3, batch})};
    const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
    expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
    EXPECT_NE(split.recording()->fingerprint, first->fingerprint);
  }
  model->eval();
  EXPECT_NE(split.recording()->fingerprint, first->fingerprint);
  const auto cut_elsewhere = pipeline::split(model, {torch::zeros({3, 4}, at::kLong)}, {{"lstm", Beginning}});
  EXPECT_NE(split.recording()->fingerprint, cut_elsewhere.recording()->fingerprint);
}

/// In evaluation one layer more runs, which stage 1 does not hold.
TEST(Split, AModeThatNeedsAnotherStagesParametersIsRefused) {
  SometimesUsed model;
  const auto split = pipeline::split(model, {torch::randn({2, 4})}, {{"b", Beginning}});
  model->eval();
  EXPECT_THAT(refusal([&] { split.recording(); }), HasSubstr("stage 1 uses 'a.weight', which it did not when the model was split"));
}

TEST(Split, StridesArriveAsTheyWere) {
  const at::Tensor base = at::arange(24, at::kFloat).view({2, 3, 4});
  for (const at::Tensor& tensor : {base, base.transpose(0, 2), base.permute({1, 2, 0}), base.select(0, 1).unsqueeze(1).expand({3, 5, 4}),
                                   base.transpose(1, 2).unsqueeze(0).expand({2, 2, 4, 3}), at::zeros({}), at::zeros({0, 3}), base.view({24, 1}).t()}) {
    const tape::Form form = tape::form_of(tensor);
    const at::Tensor wire = tape::to_wire(tensor, form);
    EXPECT_EQ(wire.sizes(), at::IntArrayRef(tape::wire_spec(form).sizes));
    EXPECT_EQ(static_cast<int64_t>(wire.nbytes()), form.bytes());
    const at::Tensor arrived = tape::from_wire(wire.contiguous(), form);
    EXPECT_TRUE(at::equal(arrived, tensor));
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      EXPECT_TRUE(tensor.size(dim) < 2 || tensor.numel() == 0 || arrived.stride(dim) == tensor.stride(dim)) << tensor.sizes() << dim;
  }
  // Gaps travel without, and arrive.
  const at::Tensor columns = base.view({6, 4}).narrow(1, 1, 2);
  for (const at::Tensor& tensor : {columns, columns.t(), columns.unsqueeze(1).expand({6, 3, 2}), base.view({24}).unfold(0, 4, 2)}) {
    const tape::Form form = tape::form_of(tensor);
    for (const at::Tensor& arrived : {tape::from_wire(tape::to_wire(tensor, form).contiguous(), form), tape::copy_of(tensor)}) {
      EXPECT_TRUE(at::equal(arrived, tensor));
      EXPECT_EQ(arrived.strides(), tensor.strides());
      EXPECT_FALSE(arrived.is_alias_of(tensor));
    }
  }
}

struct AutocastScope {
  AutocastScope(bool on, at::ScalarType dtype) : before(at::autocast::is_autocast_enabled(at::kCPU)), dtype_before(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, on);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before);
    at::autocast::set_autocast_dtype(at::kCPU, dtype_before);
  }
  bool before;
  at::ScalarType dtype_before;
};

/// Its second layer is in another precision than what is around.
struct CastsLocally : torch::nn::Module {
  explicit CastsLocally(bool on) : on(on) {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::tanh(a(x)).to(at::kFloat);
    {
      const AutocastScope local(on, at::kBFloat16);
      y = torch::tanh(b(y)).to(at::kFloat);
    }
    return c(y).to(at::kFloat);
  }
  bool on;
  torch::nn::Linear a{8, 8}, b{8, 8}, c{8, 4};
};

TEST(Split, AutocastThatForwardSetsAroundAPartIsSetAgain) {
  const std::vector<at::Tensor> inputs{at::randn({3, 8}, at::detail::createCPUGenerator(1))};
  for (const bool on : {false, true}) {
    for (const char* at : {"b", "c"}) {
      torch::manual_seed(1);
      const auto model = std::make_shared<CastsLocally>(on);
      std::optional<pipeline::SplitModel> split;
      for (int step = 0; step < 2; ++step) {
        {
          std::optional<AutocastScope> around;
          if (!on) around.emplace(true, at::kBFloat16);
          if (!split) split = pipeline::split(model, inputs, {{at, Beginning}});
          const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
          expect_same(run_pass(*model, [&] { return staged(*split, inputs); }), expected);
          EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), !on);
        }
        const at::NoGradGuard no_grad;
        for (const at::Tensor& parameter : model->parameters()) parameter.mul_(2);  // no cast of the last step is left
      }
    }
  }
}

/// The 65th kind of pass costs one that has run, the first; those that were asked for ahead stay.
TEST(Split, KindsOfPassesThatWereRecordedAheadStay) {
  struct Net : torch::nn::Module {
    Net() { register_module("a", a); }
    at::Tensor forward(const at::Tensor& x) {
      ++calls;
      return a(x);
    }
    torch::nn::Linear a{2, 2};
    int calls = 0;
  };
  constexpr int64_t kinds = 70;
  const auto model = std::make_shared<Net>();
  const auto split = pipeline::split(model, {torch::ones({1, 2})}, {});
  const auto is_there = [&](int64_t rows) {
    split.expect({torch::ones({rows, 2})});
    const int before = model->calls;
    split.recording();
    return model->calls == before;
  };
  for (int64_t rows = 2; rows <= kinds; ++rows) EXPECT_FALSE(is_there(rows));
  for (int64_t rows = 1; rows <= kinds; ++rows) EXPECT_TRUE(is_there(rows)) << rows;
  for (int64_t rows = 1; rows <= kinds; ++rows) {
    const std::vector<at::Tensor> inputs{torch::ones({rows, 2})};
    split.expect(inputs);
    pipeline::TracedStage(split, 0, [&](int) { return inputs; }).forward(0, {});
  }
  EXPECT_FALSE(is_there(kinds + 1));
  for (int64_t rows = 2; rows <= kinds; ++rows) EXPECT_TRUE(is_there(rows)) << rows;
  EXPECT_FALSE(is_there(1));
}

TEST(Split, UndefinedOutputsAreLeftOut) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("a", a);
      register_module("b", b);
    }
    std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
      const at::Tensor y = torch::tanh(a(x));
      return {b(y), at::Tensor(), {at::Tensor(), y}};
    }
    torch::nn::Linear a{4, 4}, b{4, 4};
  };
  expect_split_equals_whole(std::make_shared<Net>(), {torch::ones({3, 4})}, {{"b", Beginning}});
}

}  // namespace
}  // namespace tessera
