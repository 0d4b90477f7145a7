#include "cli/bench/workload.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <ATen/ATen.h>

#include "cli/bench/measure.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/exchange.h"
#include "tessera/core/error.h"

namespace tessera::bench {
namespace {

/// Element i of rank r's data is (3 r + i) mod 5: it tells ranks and places apart, and sums of up to 31 ranks fit into a byte.
constexpr int64_t period = 5;

at::Tensor pattern(int rank, int64_t begin, int64_t count, at::ScalarType dtype) {
  const auto cycle = (at::arange(period, at::kLong) + 3 * rank + begin).remainder(period).to(dtype);
  return cycle.repeat({count / period + 1}).narrow(0, 0, count).contiguous();
}

at::Tensor sum_of_patterns(int ranks, int64_t begin, int64_t count, at::ScalarType dtype) {
  auto cycle = at::zeros({period}, at::kLong);
  for (int rank = 0; rank < ranks; ++rank) cycle += pattern(rank, begin, period, at::kLong);
  return cycle.to(dtype).repeat({count / period + 1}).narrow(0, 0, count).contiguous();
}

/// What an operation's result is made of, seen from one rank.
struct View {
  int rank, ranks;
  int64_t part, whole;
  at::ScalarType dtype;

  /// A part from each rank, where it begins at `begin` there.
  at::Tensor from_every_rank(int64_t begin) const {
    std::vector<at::Tensor> rows;
    for (int source = 0; source < ranks; ++source) rows.push_back(pattern(source, begin, part, dtype));
    return at::cat(rows);
  }
};

enum class Extent { Whole, Part };
enum class Who { All, Root, RankOne };  // the root is rank 0

bool takes_part(Who who, int rank) { return who == Who::All || rank == (who == Who::Root ? 0 : 1); }

constexpr double all_of_it(int) { return 1; }
constexpr double others_parts(int n) { return static_cast<double>(n - 1) / n; }
constexpr double others_parts_twice(int n) { return 2 * others_parts(n); }

void send_to_the_next(const comm::Group& group, const at::Tensor& out, const at::Tensor& in) {
  const int next = (group.rank() + 1) % group.size(), before = (group.rank() + group.size() - 1) % group.size();
  exchange_async(group, in, next, out, before, /*tag=*/0, comm::receives_first(group.rank())).wait();
}

void send_from_0_to_1(const comm::Group& group, const at::Tensor& out, const at::Tensor& in) {
  if (group.rank() == 0) send(group, in, 1);
  if (group.rank() == 1) recv(group, out, 0);
}

}  // namespace

/// How an operation is called, and what it must give.
struct Measured {
  std::string_view name;
  double (*bus_factor)(int ranks);
  bool in_place, has_parts;
  Extent in_extent, out_extent;
  Who givers, takers;
  void (*call)(const comm::Group& group, const at::Tensor& out, const at::Tensor& in);
  at::Tensor (*expected)(const View& view);
};

namespace {

const auto& operations() {
  using enum Extent;
  using Out = const at::Tensor&;
  using In = const at::Tensor&;
  static constexpr std::array table{
      Measured{"all_reduce", others_parts_twice, true, false, Whole, Whole, Who::All, Who::All,  //
               [](const comm::Group& group, Out out, In) { all_reduce(group, out); },            //
               [](const View& v) { return sum_of_patterns(v.ranks, 0, v.whole, v.dtype); }},
      Measured{"reduce", all_of_it, true, false, Whole, Whole, Who::All, Who::Root,  //
               [](const comm::Group& group, Out, In in) { reduce(group, in, 0); },   //
               [](const View& v) { return sum_of_patterns(v.ranks, 0, v.whole, v.dtype); }},
      Measured{"all_gather", others_parts, false, true, Part, Whole, Who::All, Who::All,      //
               [](const comm::Group& group, Out out, In in) { all_gather(group, out, in); },  //
               [](const View& v) { return v.from_every_rank(0); }},
      Measured{"reduce_scatter", others_parts, false, true, Whole, Part, Who::All, Who::All,      //
               [](const comm::Group& group, Out out, In in) { reduce_scatter(group, out, in); },  //
               [](const View& v) { return sum_of_patterns(v.ranks, v.rank * v.part, v.part, v.dtype); }},
      Measured{"all_to_all", others_parts, false, true, Whole, Whole, Who::All, Who::All,     //
               [](const comm::Group& group, Out out, In in) { all_to_all(group, out, in); },  //
               [](const View& v) { return v.from_every_rank(v.rank * v.part); }},
      Measured{"broadcast", all_of_it, true, false, Whole, Whole, Who::All, Who::All,    //
               [](const comm::Group& group, Out out, In) { broadcast(group, out, 0); },  //
               [](const View& v) { return pattern(0, 0, v.whole, v.dtype); }},
      Measured{"gather", others_parts, false, true, Part, Whole, Who::All, Who::Root,        //
               [](const comm::Group& group, Out out, In in) { gather(group, out, in, 0); },  //
               [](const View& v) { return v.from_every_rank(0); }},
      Measured{"scatter", others_parts, false, true, Whole, Part, Who::Root, Who::All,        //
               [](const comm::Group& group, Out out, In in) { scatter(group, out, in, 0); },  //
               [](const View& v) { return pattern(0, v.rank * v.part, v.part, v.dtype); }},
      Measured{"send", all_of_it, false, false, Whole, Whole, Who::Root, Who::RankOne, send_from_0_to_1,  //
               [](const View& v) { return pattern(0, 0, v.whole, v.dtype); }},
      Measured{"send_recv", all_of_it, false, false, Whole, Whole, Who::All, Who::All, send_to_the_next,  //
               [](const View& v) { return pattern((v.rank + v.ranks - 1) % v.ranks, 0, v.whole, v.dtype); }},
  };
  return table;
}

const Measured& find(const std::string& op) {
  const auto found = std::ranges::find(operations(), op, &Measured::name);
  invariant(found != operations().end(), "no operation to measure is called ", op);
  return *found;
}

at::Tensor make_tensor(const comm::Group& group, int64_t elements, const Case& what) {
  const auto options = at::TensorOptions(what.dtype).device(what.device);
  return what.buffers == Buffers::Shared ? empty(group, {elements}, options) : at::empty({elements}, options);
}

/// Text of one element, whatever its type.
std::string element(const at::Tensor& tensor, int64_t index) { return detail::concat(tensor[index].to(at::kDouble).item<double>()); }

/// What is wrong with `actual`; empty if nothing.
std::string difference(const at::Tensor& actual, const at::Tensor& expected) {
  const auto wrong = actual.cpu().ne(expected);
  const auto count = wrong.sum().item<int64_t>();
  if (count == 0) return {};
  const auto first = wrong.to(at::kByte).argmax().item<int64_t>();
  return detail::concat("element ", first, " is ", element(actual, first), " instead of ", element(expected, first), " (", count, " of ", actual.numel(),
                        " are wrong)");
}

}  // namespace

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const auto& operation : operations()) names.emplace_back(operation.name);
  return names;
}

double bus_factor(const std::string& op, int ranks) { return find(op).bus_factor(ranks); }

Workload::Workload(const comm::Group& group, const Case& what)
    : group_(group), operation_(find(what.op)), device_(what.device), element_bytes_(static_cast<int64_t>(c10::elementSize(what.dtype))) {
  const int64_t elements = std::max<int64_t>(1, what.bytes / element_bytes_);
  part_ = std::max<int64_t>(1, elements / group.size());
  whole_ = operation_.has_parts ? part_ * group.size() : elements;
  const auto make = [&](Who who, Extent extent) {
    return takes_part(who, group.rank()) ? make_tensor(group, extent == Extent::Whole ? whole_ : part_, what) : at::Tensor();
  };
  in_ = make(operation_.givers, operation_.in_extent);
  out_ = operation_.in_place ? in_ : make(operation_.takers, operation_.out_extent);
}

void Workload::run() {
  operation_.call(group_, out_, in_);
  wait_for(device_);
}

void Workload::check() {
  if (in_.defined()) in_.copy_(pattern(group_.rank(), 0, in_.numel(), in_.scalar_type()));
  run();
  std::string wrong;
  if (takes_part(operation_.takers, group_.rank())) {
    wrong = difference(out_, operation_.expected({group_.rank(), group_.size(), part_, whole_, out_.scalar_type()}));
  }
  auto any_wrong = at::full({1}, wrong.empty() ? 0.0 : 1.0, at::kDouble);
  all_reduce(group_, any_wrong, comm::Op::Max);
  const auto whose = wrong.empty() ? std::string("another rank's result is wrong") : detail::concat("its result is wrong: ", wrong);
  if (any_wrong.item<double>() != 0) {
    throw CommError(detail::concat(operation_.name, " of group ", group_.name(), ", rank ", group_.rank(), " of ", group_.size(), ": ", whose));
  }
  if (in_.defined()) in_.zero_();
  if (out_.defined()) out_.zero_();
}

}  // namespace tessera::bench
