#include <gmock/gmock.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/nn/meta.h"
#include "tests/pipeline/split_models.h"
#include "tests/pipeline/split_support.h"

namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct HalfGradient : torch::autograd::Function<HalfGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list gradients) { return {gradients[0]}; }
};

enum class Fault {
  None,
  ItemBranch,
  Function,
  HookOnResult,
  ByHand,
  Table,
  TrainedTable,
  WrittenTable,
  Momentum,
  Masked,
  BoolIndex,
  WritesOther,
  TwoParts,
  Sparse,
  Generator,
  Unused
};

struct FaultyImpl : torch::nn::Module {
  explicit FaultyImpl(Fault fault) : a(4, 4), b(4, 4), unused(4, 4), n(torch::nn::BatchNorm1dOptions(4).momentum(std::nullopt)), fault(fault) {
    register_module("a", a);
    register_module("act", act);
    register_module("n", n);
    register_module("b", b);
    register_module("unused", unused);
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = a(input);
    switch (fault) {
      case Fault::ItemBranch:
        if (x.sum().item<float>() > 0) x = x * 2;
        break;
      case Fault::Function:
        x = HalfGradient::apply(x);
        break;
      case Fault::HookOnResult:
        x.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
        break;
      case Fault::ByHand:
        x = x * 2;
        x = x.detach();
        x.set_requires_grad(true);
        break;
      case Fault::Table:
      case Fault::TrainedTable:
        x = x + table;
        break;
      case Fault::WrittenTable:
        table.add_(1);
        x = x + table;
        break;
      case Fault::Momentum:
        x = n(x);
        break;
      case Fault::Masked:
        x = x.masked_select(x > 0).sum() * x;
        break;
      case Fault::BoolIndex:
        x = x.index({x > 0}).sum() * x;
        break;
      case Fault::WritesOther: {
        const at::Tensor view = x.view({-1});
        const at::Tensor y = unused(b(torch::ones_like(x)));
        view.mul_(2);
        return y + x;
      }
      case Fault::TwoParts: {
        const at::Tensor left = x.narrow(1, 0, 2), right = x.narrow(1, 2, 2);
        const at::Tensor y = b(torch::ones({3, 4}));
        left.mul_(2);
        return y + torch::cat({left, right}, 1);
      }
      case Fault::Generator:
        x = x + at::randn({4}, at::detail::createCPUGenerator(7));
        break;
      case Fault::Sparse:
        x = x.to_sparse().to_dense();
        break;
      default:
        x = act(x);
    }
    return b(x);
  }
  torch::nn::Linear a, b, unused;
  torch::nn::ReLU act;
  torch::nn::BatchNorm1d n;
  Fault fault;
  at::Tensor table = torch::ones({4});
};
TORCH_MODULE(Faulty);

std::string refused(Fault fault, const pipeline::SplitSpec& splits = {{"b", Beginning}}) {
  Faulty model(fault);
  if (fault == Fault::TrainedTable) model->table.set_requires_grad(true);
  return refusal([&] { pipeline::split(model, {torch::randn({3, 4})}, splits); });
}

TEST(SplitRefusals, HostReads) {
  EXPECT_THAT(refused(Fault::ItemBranch),
              AllOf(HasSubstr("pipeline: aten::item (after 'a.bias' was used): the host reads a tensor's value"), HasSubstr("torch::where")));
  EXPECT_THAT(refused(Fault::Momentum), AllOf(HasSubstr("aten::item (after 'n.num_batches_tracked' was used)"), HasSubstr("give BatchNorm a momentum")));
}

TEST(SplitRefusals, ShapesThatDependOnValues) {
  EXPECT_THAT(refused(Fault::Masked), AllOf(HasSubstr("aten::masked_select"), HasSubstr("depends on values"), HasSubstr("masked_fill")));
  EXPECT_THAT(refused(Fault::BoolIndex), HasSubstr("aten::index (after 'a.bias' was used): the shape of its result depends on values"));
}

TEST(SplitRefusals, LayoutsThatCannotBeSent) { EXPECT_THAT(refused(Fault::Sparse), HasSubstr("aten::to_sparse (after 'a.bias' was used): ")); }

TEST(SplitRefusals, WhatIsDoneBehindTheOperatorsBack) {
  EXPECT_THAT(refused(Fault::Function), AllOf(HasSubstr("HalfGradient"), HasSubstr("TESSERA_MODULE")));
  EXPECT_THAT(refused(Fault::HookOnResult), AllOf(HasSubstr("is given a tensor with a hook (register_hook)"), HasSubstr("TESSERA_MODULE")));
  EXPECT_THAT(refused(Fault::ByHand), AllOf(HasSubstr("requires_grad was changed by hand"), HasSubstr("detach()")));
}

TEST(SplitRefusals, GeneratorsOfForwardsOwn) {
  struct DrawsFrom : torch::nn::Module {
    DrawsFrom() { register_module("a", a); }
    at::Tensor forward(const at::Tensor& x) { return a(x) + at::randn({4}, at::detail::getDefaultCPUGenerator()); }
    torch::nn::Linear a{4, 4};
  };
  expect_split_equals_whole(std::make_shared<DrawsFrom>(), {torch::ones({3, 4})}, {});
  EXPECT_THAT(refused(Fault::Generator), AllOf(HasSubstr("aten::randn (after 'a.bias' was used) is given a generator"), HasSubstr("TESSERA_MODULE")));
}

TEST(SplitRefusals, TensorsThatNobodyOwns) {
  pipeline::split(Faulty(Fault::Table), {torch::randn({3, 4})}, {{"b", Beginning}});  // a constant
  EXPECT_THAT(refused(Fault::TrainedTable), AllOf(HasSubstr("requires gradients, and is no parameter"), HasSubstr("register it as a parameter")));
  EXPECT_THAT(refused(Fault::WrittenTable), AllOf(HasSubstr("aten::add_"), HasSubstr("register it as a buffer")));
  EXPECT_THAT(refusal([] { pipeline::split(on_meta([] { return Faulty(Fault::Table); }), {torch::randn({3, 4})}, {{"b", Beginning}}); }),
              HasSubstr("on meta that is no parameter, no buffer and no input"));
}

TEST(SplitRefusals, MemoryThatALaterStageChanges) {
  pipeline::split(Faulty(Fault::WritesOther), {torch::randn({3, 4})}, {{"b", Beginning}});  // cut before the view
  expect_split_equals_whole(Faulty(Fault::TwoParts), {torch::randn({3, 4})}, {{"b", Beginning}});
  EXPECT_THAT(refused(Fault::WritesOther, {{"unused", Beginning}}),
              AllOf(HasSubstr("stage 1 writes in place into memory that came before it"), HasSubstr("view after 'a'"), HasSubstr("split elsewhere")));
}

TEST(SplitRefusals, PathsThatNameNothing) {
  EXPECT_EQ(refused(Fault::None, {{"c", Beginning}}), "pipeline: split point beginning of 'c': Faulty has no such module; the nearest path is 'a'");
  EXPECT_THAT(refusal([] { pipeline::split(Classic(), {torch::zeros({4}, at::kLong)}, {{"layer.1", Beginning}}); }),
              HasSubstr("the nearest path is 'layers.1'"));
}

TEST(SplitRefusals, PathsWithoutAPlace) {
  EXPECT_THAT(refused(Fault::None, {{"act", Beginning}}),
              AllOf(HasSubstr("beginning of 'act': it holds no parameter and no buffer"), HasSubstr("such as 'a'")));
  EXPECT_THAT(refused(Fault::None, {{"unused", End}}), HasSubstr("end of 'unused': the pass uses none of its parameters"));
}

TEST(SplitRefusals, EmptyStages) {
  EXPECT_THAT(refused(Fault::None, {{"a", Beginning}}), HasSubstr("beginning of 'a': nothing comes before it, so that stage 0 would be empty; leave it out"));
  EXPECT_THAT(refused(Fault::None, {{"b", End}}), HasSubstr("end of 'b': nothing comes behind it, so that the last stage would be empty"));
  EXPECT_THAT(refused(Fault::None, {{"a", End}, {"b", Beginning}}), HasSubstr("are the same place, so that stage 1 would be empty; leave one out"));
  EXPECT_THAT(refused(Fault::None, {{"b", Beginning}, {"b", Beginning}}), HasSubstr("beginning of 'b' is given twice"));
}

TEST(SplitRefusals, MoreStagesThanModules) {
  EXPECT_THAT(refusal([] {
                pipeline::split(Classic(), {torch::zeros({4}, at::kLong)}, {{"emb", End}, {"layers.0", Beginning}, {"layers.0", End}, {"layers.1", End}});
              }),
              HasSubstr("4 split points make 5 stages, and Classic has 4 modules with parameters; give at most 3 split points"));
}

TEST(SplitRefusals, AModuleThatIsUsedTwice) {
  const std::vector<at::Tensor> inputs{torch::zeros({2, 5}, at::kLong)};
  EXPECT_THAT(refusal([&] { pipeline::split(Tied(), inputs, {{"emb", End}}); }),
              AllOf(HasSubstr("end of 'emb': the pass uses it 2 times: 0 (operator 0, embedding), 1 (operator "),
                    HasSubstr("say which, as {\"emb\", SplitPoint::End, 0}")));
  EXPECT_EQ(pipeline::split(Tied(), inputs, {{"emb", End, 0}}).stages(), 2);
  EXPECT_THAT(refusal([&] { pipeline::split(Tied(), inputs, {{"emb", Beginning, 2}}); }), HasSubstr("calls are counted from 0"));
}

/// Layers that add one table, as T5's do: each is called once.
struct LayerWithTableImpl : torch::nn::Module {
  explicit LayerWithTableImpl(const at::Tensor& shared) : fc(4, 4) {
    register_module("fc", fc);
    table = register_parameter("table", shared);
  }
  at::Tensor forward(const at::Tensor& x) { return fc(x) + table; }
  torch::nn::Linear fc;
  at::Tensor table;
};
TORCH_MODULE(LayerWithTable);

struct OneTableImpl : torch::nn::Module {
  OneTableImpl() {
    register_module("first", first);
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return b(a(first(x))); }
  torch::nn::Linear first{4, 4};
  LayerWithTable a{torch::ones({4})}, b{a->table};
};
TORCH_MODULE(OneTable);

struct SharedNormImpl : torch::nn::Module {
  SharedNormImpl() : a(4, 4), b(4, 4), n(4) {
    register_module("a", a);
    register_module("n", n);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return n(b(n(a(x)))); }
  torch::nn::Linear a, b;
  torch::nn::BatchNorm1d n;
};
TORCH_MODULE(SharedNorm);

TEST(SplitRefusals, UsesOfAParameterThatOtherModulesShareAreSaidToBe) {
  const std::vector<at::Tensor> inputs{torch::ones({3, 4})};
  EXPECT_THAT(
      refusal([&] { pipeline::split(OneTable(), inputs, {{"a", Beginning}}); }),
      AllOf(HasSubstr("the pass uses it 2 times"), HasSubstr("it shares parameters with other modules ('b.table'), whose uses of them count here, too: 0 is"),
            HasSubstr("say which, as {\"a\", SplitPoint::Beginning, 0}")));
  EXPECT_EQ(pipeline::split(OneTable(), inputs, {{"a", Beginning, 0}}).stages(), 2);
  SharedNorm called_twice;
  EXPECT_THAT(refusal([&] { pipeline::split(called_twice, inputs, {{"n", Beginning}}); }),
              AllOf(HasSubstr("the pass uses it 2 times"), Not(HasSubstr("shares parameters"))));
}

TEST(SplitRefusals, ABufferThatSeveralStagesUse) {
  SharedNorm model;
  EXPECT_THAT(refusal([&] { pipeline::split(model, {torch::randn({3, 4})}, {{"b", Beginning}}); }),
              HasSubstr("stages 0 and 1 use the buffer 'n.running_mean', and stage 0 writes into it"));
  model->eval();
  pipeline::split(model, {torch::randn({3, 4})}, {{"b", Beginning}});  // it is only read
}

TEST(SplitRefusals, InputsOfAnotherNumberOrShape) {
  EXPECT_THAT(refusal([] { pipeline::split(Classic(), {}, {{"layers.1", Beginning}}); }), HasSubstr("cannot be called with 0 tensors"));
  Classic model;
  const auto split = pipeline::split(model, {torch::zeros({4}, at::kLong)}, {{"layers.1", Beginning}});
  pipeline::TracedStage stage(split, 0, [](int) { return std::vector<at::Tensor>{torch::zeros({5}, at::kLong)}; });
  EXPECT_EQ(refusal([&] { stage.forward(0, {}); }),
            "pipeline: stage 0 is given int64 [5] for input 0, where int64 [4] is expected; sizes are part of a recording: call expect() with inputs of these "
            "shapes, on every rank");
}

}  // namespace
}  // namespace tessera
