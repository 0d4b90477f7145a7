#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/recompute/recompute.h"

namespace tessera {
namespace {

using namespace testing_support;

/// Two layers of a model.
struct TwoCoresImpl : nn::Module {
  TwoCoresImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) {
    const at::Tensor h = first(x, x, x, std::nullopt, ids);
    return second(h, h, h, std::nullopt, ids);
  }
  nn::AttentionCore first, second;
};
TESSERA_MODULE(TwoCores);

/// Counts what goes over `world`'s group, ids by their type.
struct Counted {
  explicit Counted(comm::World& world) {
    const comm::GroupInfo info{.name = "cp", .rank = world.rank(), .size = world.size(), .ranks = {}, .timeout = std::chrono::seconds(60)};
    group = comm::Group(info, comm::make_record_engine(records, info, world.group().engine()));
  }
  int64_t gathers() const {
    const auto seen = records->records();
    const auto ids = std::ranges::count_if(seen, [](const auto& record) { return record.dtype == at::kLong; });
    records->clear();
    return ids;
  }
  std::shared_ptr<comm::Recorder> records = std::make_shared<comm::Recorder>();
  comm::Group group;
};

TEST(PackedDocumentIds, AreGatheredOnceForAllCoresOfAPass) {
  comm::run_ranks(2, [](comm::World& world) {
    const Counted counted(world);
    TwoCores model;
    const auto context = context_parallel(model, counted.group, {.method = ContextMethod::AllGather}, "*");
    const at::Tensor x = at::ones({1, 6, 2, 4});
    context->set_cut(SequenceCut::head_tail(12, 2));
    const at::Tensor ids = at::zeros({1, 6}, at::kLong);
    model(x, ids);
    EXPECT_EQ(counted.gathers(), 1);
    model(x, ids);
    EXPECT_EQ(counted.gathers(), 2) << "of another pass, whatever the tensor holds by now, and nobody says where it ends";
    context->set_cut(SequenceCut::head_tail(12, 2));
    model->first(x, x, x, std::nullopt, ids);
    EXPECT_EQ(counted.gathers(), 1);
    model->second(x, x, x, std::nullopt, ids.detach());
    EXPECT_EQ(counted.gathers(), 0);
    context->set_cut(SequenceCut::head_tail(12, 2));
    model->first(x, x, x, std::nullopt, ids);
    ids.select(1, 5).fill_(1);
    model->second(x, x, x, std::nullopt, ids);
    EXPECT_EQ(counted.gathers(), 2) << "written since";
    context->set_cut(SequenceCut::head_tail(12, 2));
    model->first(x, x, x, std::nullopt, ids);
    context->set_cut(SequenceCut::contiguous(12, 2));
    model->second(x, x, x, std::nullopt, ids);
    EXPECT_EQ(counted.gathers(), 2) << "other columns";
    model->first(x, x, x, std::nullopt, ids.clone());
    EXPECT_EQ(counted.gathers(), 1) << "of another micro-batch";
  });
}

/// A step after the other: this rank's ids, their attention's output and its gradient; `ids` gives the tensor that holds `values`.
std::vector<at::Tensor> steps_over(const comm::Group& group, const std::vector<at::Tensor>& documents, bool again, bool in_flight,
                                   const std::function<at::Tensor(const at::Tensor& values)>& ids) {
  const SequenceCut cut = SequenceCut::head_tail(13, group.size());
  const at::Tensor columns = cut.positions(group.rank(), test_device());
  TwoCores model;
  const auto context = context_parallel(model, group, {}, "*");
  const Attachment recomputed = again ? recompute(model, {.modules = "*"}) : Attachment();
  context->set_cut(cut);
  std::vector<at::Tensor> inputs, outputs;
  const auto backward = [&] {
    for (; !outputs.empty(); outputs.pop_back()) outputs.back().sum().backward();
  };
  std::vector<at::Tensor> results;
  for (const at::Tensor& whole : documents) {
    inputs.push_back(normal({1, 13, 2, 4}, 1).to(test_device()).index_select(1, columns).requires_grad_());
    outputs.push_back(model(inputs.back(), ids(whole.index_select(1, columns))));
    results.push_back(outputs.back().detach());
    if (!in_flight) backward();
  }
  backward();
  for (const at::Tensor& input : inputs) results.push_back(input.grad());
  return results;
}

/// As a loader does that writes memory: no counter of libtorch's tells of it, and only some ranks may do so.
TEST(PackedDocumentIds, AreThoseThatATensorHoldsInEachStep) {
  std::vector<at::Tensor> documents;
  for (const int64_t end : {4, 9, 11}) documents.push_back(at::arange(13).ge(end).to(at::kLong).unsqueeze(0));
  for (const int ranks : {2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      for (const bool again : {false, true}) {
        for (const bool in_flight : {false, true}) {
          const auto wanted = steps_over(world.group(), documents, /*again=*/false, /*in_flight=*/false, [](const at::Tensor& values) { return values; });
          at::Tensor one;
          const auto got = steps_over(world.group(), documents, again, in_flight, [&](const at::Tensor& values) {
            if (!one.defined() || world.rank() == 1) return one = values;
            one.data().copy_(values);
            return one;
          });
          for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i << ' ' << again << in_flight;
        }
      }
    });
  }
}

/// Of two towers that run in turns nothing tells that a pass has ended.
TEST(PackedDocumentIds, ThatAreFilledAnewWithinAPassAreRefused) {
  if (!test_device().is_cpu()) GTEST_SKIP() << "values on a device are not looked at: the host would wait for them";
  comm::run_ranks(2, [](comm::World& world) {
    TwoCores model;
    const auto context = context_parallel(model, world.group(), {}, "*");
    const at::Tensor x = at::ones({1, 6, 2, 4}).to(test_device()), ids = at::zeros({1, 6}, at::kLong);
    context->set_cut(SequenceCut::head_tail(12, 2));
    model->first(x, x, x, std::nullopt, ids);
    ids.data().fill_(1);
    EXPECT_THAT([&] { model->second(x, x, x, std::nullopt, ids); },
                ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("call set_cut before each pass")));
    context->set_cut(SequenceCut::head_tail(12, 2));
    EXPECT_NO_THROW(model->second(x, x, x, std::nullopt, ids));
  });
}

TEST(PackedDocumentIds, AreWholeNumbersWhereADoubleWouldRoundThem) {
  comm::run_ranks(2, [](comm::World& world) {
    TwoCores model;
    const auto context = context_parallel(model, world.group(), {.method = ContextMethod::AllGather}, "*");
    const at::Tensor x = at::arange(96, at::kFloat).view({1, 6, 2, 8}).sin(), ids = at::arange(6).ge(2).to(at::kLong).unsqueeze(0);
    const auto attended = [&](const at::Tensor& documents) {
      context->set_cut(SequenceCut::head_tail(12, 2));
      return model(x, documents);
    };
    EXPECT_TRUE(at::equal(attended(ids), attended(ids + (int64_t{1} << 60))));
  });
}

TEST(PackedDocumentIds, AreNotGatheredAgainByARecomputation) {
  comm::run_ranks(2, [](comm::World& world) {
    const Counted counted(world);
    TwoCores model;
    const auto context = context_parallel(model, counted.group, {}, "*");
    const auto again = recompute(model, {.modules = "*"});
    context->set_cut(SequenceCut::head_tail(12, 2));
    const at::Tensor x = normal({1, 6, 2, 4}, 1).to(test_device()).requires_grad_();
    const at::Tensor out = model(x, at::zeros({1, 6}, at::kLong));
    EXPECT_EQ(counted.gathers(), 1);
    out.sum().backward();
    EXPECT_EQ(counted.gathers(), 0);
  });
}

}  // namespace
}  // namespace tessera
