#include "tessera/comm/backends/c10d_engine.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

/// A backend as somebody writes one for libtorch: it notes what it is asked for.
class Notes : public c10d::Backend {
 public:
  Notes() : Backend(/*rank=*/0, /*size=*/2) {}

  using Pointer = c10::intrusive_ptr<c10d::Work>;
  const std::string getBackendName() const override { return "notes"; }
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (options.reduceOp == c10d::ReduceOp::PRODUCT) throw std::runtime_error("the link is cut");
    tensors[0].mul_(2);  // as if the other rank had the same
    return note("allreduce", options, fmt::format("op {}", static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp))));
  }
  Pointer reduce(Tensors&, const c10d::ReduceOptions& options) override { return note("reduce", options, fmt::format("root {}", options.rootRank)); }
  Pointer broadcast(Tensors&, const c10d::BroadcastOptions& options) override { return note("broadcast", options, fmt::format("root {}", options.rootRank)); }
  Pointer _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return note("allgather", options, fmt::format("{} from {}", out.numel(), in.numel()));
  }
  Pointer _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return note("reduce_scatter", options, fmt::format("{} from {}", out.numel(), in.numel()));
  }
  Pointer alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& options) override {
    return note("alltoall", options, fmt::format("{} in, {} out", in_splits.at(1), out_splits.at(1)));
  }
  Pointer gather(std::vector<Tensors>& outs, Tensors&, const c10d::GatherOptions& options) override {
    return note("gather", options, fmt::format("{} lists to {}", outs.size(), options.rootRank));
  }
  Pointer scatter(Tensors&, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    return note("scatter", options, fmt::format("{} lists of {} from {}", ins.size(), ins.at(0).size(), options.rootRank));
  }
  Pointer send(Tensors&, int destination, int tag) override { return note("send", c10d::BarrierOptions(), fmt::format("{} to {}", tag, destination)); }
  Pointer recv(Tensors&, int source, int tag) override { return note("recv", c10d::BarrierOptions(), fmt::format("{} from {}", tag, source)); }
  Pointer barrier(const c10d::BarrierOptions& options) override { return note("barrier", options, ""); }

  std::vector<std::string> all;

 private:
  template <class Options>
  Pointer note(const char* name, const Options& options, const std::string& text) {
    all.push_back(fmt::format("{} {}{}{}", name, text, options.asyncOp ? "" : ", waits",
                              options.timeout == c10d::kUnsetTimeout ? "" : fmt::format(", {} ms", options.timeout.count())));
    return completed_work();
  }
};

TEST(C10dEngine, HandsEachCallToItsMethod) {
  const auto notes = c10::make_intrusive<Notes>();
  const Group group({.name = "theirs", .rank = 0, .size = 2}, notes);
  auto two = at::ones({2});
  const auto four = at::ones({4}), none = at::Tensor();
  const auto whole = at::ones({2}, at::kInt);
  all_reduce(group, whole, Op::Max);
  EXPECT_EQ(whole[0].item<int>(), 2);
  reduce_async(group, two, 1).wait();
  broadcast(group, two, 1);
  all_gather(group, four, two);
  reduce_scatter(group, two, four);
  all_to_all(group, four, two, {1, 3}, {1, 1});
  gather(group, four, two, 0);
  gather(group, none, two, 1);
  scatter(group, two, four, 0);
  send(group, two, 1, 7);
  recv(group, two, 1, 8);
  barrier(group);
  group.engine()->start({.op = Operation::Broadcast, .outputs = {two}, .peer = 0, .timeout = 300ms})->wait();
  EXPECT_THAT(notes->all, ElementsAre(fmt::format("allreduce op {}, waits", static_cast<int>(c10d::ReduceOp::MAX)), "reduce root 1", "broadcast root 1, waits",
                                      "allgather 4 from 2, waits", "reduce_scatter 2 from 4, waits", "alltoall 1 in, 3 out, waits",
                                      "gather 1 lists to 0, waits", "gather 0 lists to 1, waits", "scatter 1 lists of 2 from 0, waits", "send 7 to 1",
                                      "recv 8 from 1", "barrier , waits", "broadcast root 0, 300 ms"));
  EXPECT_EQ(group.engine()->name(), "notes");
  EXPECT_EQ(empty(group, {3}).numel(), 3);  // plain memory, as it offers none
}

/// They may lose a NaN, where integers of the same order have none.
TEST(C10dEngine, AsksForMinimaAndMaximaOfIntegers) {
  class Dtypes final : public Notes {
   public:
    Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override { return see(tensors[0], options.asyncOp); }
    Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override { return see(tensors[0], options.asyncOp); }
    Pointer _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
      out.copy_(in.narrow(0, 0, out.numel()));
      return see(in, options.asyncOp);
    }
    std::vector<at::ScalarType> seen;

   private:
    Pointer see(const at::Tensor& tensor, bool gives_work) {
      seen.push_back(tensor.scalar_type());
      return gives_work ? completed_work() : Pointer();
    }
  };
  const auto dtypes = c10::make_intrusive<Dtypes>();
  const Group group({.name = "theirs", .rank = 0, .size = 2}, dtypes);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt}) {
    const auto given = at::tensor({-2.0f, -0.5f, 0.0f, 3.0f}).to(dtype), before = given.clone(), part = at::empty({2}, at::TensorOptions(dtype));
    all_reduce(group, given, Op::Max);
    all_reduce_async(group, given, Op::Max).wait();
    reduce(group, given, 0, Op::Min);
    reduce_scatter(group, part, given, Op::Min);
    EXPECT_TRUE(at::equal(given, before) && at::equal(part, before.narrow(0, 0, 2))) << dtype;
  }
  std::vector<at::ScalarType> expected(4 * 5, at::kInt);
  std::fill_n(expected.begin() + 4, 4, at::kLong);
  EXPECT_EQ(dtypes->seen, expected);
}

/// As ProcessGroupNCCL: of a call that waits it gives no work.
class NotesOnStreams final : public Notes {
 public:
  explicit NotesOnStreams(std::string name) : name_(std::move(name)) {}
  const std::string getBackendName() const override { return name_; }
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override { return given(Notes::allreduce(tensors, options), options.asyncOp); }
  Pointer barrier(const c10d::BarrierOptions& options) override { return given(Notes::barrier(options), options.asyncOp); }

 private:
  static Pointer given(Pointer work, bool asynchronous) { return asynchronous ? work : Pointer(); }
  std::string name_;
};

TEST(C10dEngine, NcclIsNeverAskedToWait) {
  const auto notes = c10::make_intrusive<NotesOnStreams>("nccl");
  const Group group({.name = "streams", .rank = 0, .size = 2}, notes);
  const auto two = at::ones({2});
  all_reduce(group, two);
  barrier(group);
  all_reduce_async(group, two).wait();
  EXPECT_EQ(two[0].item<float>(), 4);
  EXPECT_THAT(notes->all, ElementsAre("allreduce op 0", "barrier ", "allreduce op 0"));
}

/// NCCL has no int16, no unsigned integers but bytes, and no complex numbers.
TEST(C10dEngine, NcclIsHandedTypesThatItHas) {
  class Dtypes final : public Notes {
   public:
    const std::string getBackendName() const override { return "nccl"; }
    Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override { return see(tensors[0]); }
    Pointer _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
      out.copy_(in.narrow(0, 0, out.size(0)));
      return see(in);
    }
    Pointer _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
      out.copy_(at::cat({in, in}));
      return see(in);
    }
    Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override { return see(tensors[0]); }
    Pointer gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions&) override {
      for (at::Tensor& out : outs[0]) out.copy_(ins[0]);
      return see(ins[0]);
    }
    Pointer send(Tensors& tensors, int, int) override { return see(tensors[0]); }
    std::vector<at::ScalarType> seen;

   private:
    Pointer see(const at::Tensor& tensor) {
      seen.push_back(tensor.scalar_type());
      return completed_work();
    }
  };
  const auto dtypes = c10::make_intrusive<Dtypes>();
  const Group group({.name = "theirs", .rank = 0, .size = 2}, dtypes);
  using enum at::ScalarType;
  for (const auto& [dtype, name] : std::vector<std::pair<at::ScalarType, at::ScalarType>>{{Float, Float},
                                                                                          {Bool, Bool},
                                                                                          {Short, Half},
                                                                                          {UInt16, Half},
                                                                                          {UInt32, Int},
                                                                                          {UInt64, Long},
                                                                                          {Float8_e4m3fn, Byte},
                                                                                          {ComplexHalf, Int},
                                                                                          {ComplexFloat, Long},
                                                                                          {ComplexDouble, Double}}) {
    dtypes->seen.clear();
    const auto part = at::arange(1, 7, at::kLong).view({3, 2}).to(at::kFloat).to(dtype), whole = at::zeros({6, 2}).to(dtype);
    const auto bytes = [](const at::Tensor& tensor) { return tensor.view(at::kByte); };
    const at::Tensor twice = at::cat({bytes(part), bytes(part)});
    all_gather(group, whole, part);
    EXPECT_TRUE(at::equal(bytes(whole), twice)) << dtype;
    whole.zero_();
    gather(group, whole, part, 0);
    EXPECT_TRUE(at::equal(bytes(whole), twice)) << dtype;
    broadcast(group, part, 0);
    send(group, part, 1, 7);
    EXPECT_EQ(dtypes->seen, std::vector<at::ScalarType>(4, name)) << dtype;
  }
  dtypes->seen.clear();
  const auto numbers = at::complex(at::arange(4).to(at::kFloat), at::ones({4})), half = at::empty({2}, at::kComplexFloat);
  all_reduce(group, numbers);
  reduce_scatter(group, half, numbers);
  EXPECT_TRUE(at::equal(half, numbers.narrow(0, 0, 2)));
  all_reduce(group, numbers, Op::Product);  // as the backend has it, which refuses that
  all_reduce(group, at::ones({4}, at::kShort));
  EXPECT_THAT(dtypes->seen, ElementsAre(Float, Float, ComplexFloat, Short));
}

TEST(C10dEngine, WhoGivesNoWorkIsDone) {
  const auto notes = c10::make_intrusive<NotesOnStreams>("theirs");
  const Group group({.name = "theirs", .rank = 0, .size = 2}, notes);
  const auto two = at::ones({2});
  all_reduce(group, two);
  barrier(group);
  EXPECT_EQ(two[0].item<float>(), 2);
  EXPECT_THAT(notes->all, ElementsAre("allreduce op 0, waits", "barrier , waits"));
}

TEST(C10dEngine, FailsInTheWordsOfTheGroup) {
  const Group group({.name = "theirs", .rank = 0, .size = 2}, c10::make_intrusive<Notes>());
  try {
    all_reduce(group, at::ones({2}), Op::Product);
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("all_reduce of group theirs, rank 0 of 2: the link is cut; waited"));
  }
}

}  // namespace
}  // namespace tessera::comm
