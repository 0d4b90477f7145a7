#include "tessera/context_parallel/head_exchange.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/nn/tiled_attention.h"

// Both ways are made of one list of pieces: what is at one place of columns and at another of heads. One way a piece is cut from heads and put among columns;
// the other way, which is also the gradient, it is cut from columns and added to heads, since a key-value head may come back from several ranks.

namespace tessera::context {

HeadDeal::HeadDeal(const SequenceCut& cut, std::vector<int> members, int own_place, int64_t heads, int64_t key_value_heads)
    : ranks(std::move(members)), place(own_place) {
  const int n = static_cast<int>(ranks.size());
  require(heads >= n, "context.method = ulysses: ", heads, " query heads on each rank cannot be dealt over ", n, " ranks; at most ", heads,
          " ranks can exchange them: set mesh.cp so, method = ring, or method = ulysses_ring with context.ulysses up to ", heads);
  query_heads = FeatureCut::query_heads(heads, key_value_heads).shares(heads, n);
  kv_heads = FeatureCut::key_value_heads(heads, key_value_heads).shares(key_value_heads, n);
  for (const int rank : ranks) columns.push_back(cut.runs[static_cast<size_t>(rank)]);
  together = columns_together(cut, ranks);
}

std::vector<ColumnRun> columns_together(const SequenceCut& cut, const std::vector<int>& ranks) {
  std::vector<ColumnRun> all, together;
  for (const int rank : ranks) all.insert(all.end(), cut.runs[static_cast<size_t>(rank)].begin(), cut.runs[static_cast<size_t>(rank)].end());
  std::ranges::sort(all, {}, &ColumnRun::begin);
  for (const ColumnRun& run : all) {
    if (!together.empty() && together.back().begin + together.back().size == run.begin) {
      together.back().size += run.size;
    } else {
      together.push_back(run);
    }
  }
  return together;
}

namespace {

int64_t count(const std::vector<ColumnRun>& runs) {
  int64_t columns = 0;
  for (const ColumnRun& run : runs) columns += run.size;
  return columns;
}

/// Where `run` begins among the columns together.
int64_t place_of(const std::vector<ColumnRun>& together, const ColumnRun& run) {
  int64_t before = 0;
  for (const ColumnRun& piece : together) {
    if (run.begin < piece.begin + piece.size) return before + run.begin - piece.begin;
    before += piece.size;
  }
  invariant(false, "a run of columns that are not among those together");
  return 0;
}

struct Exchanger {
  comm::Group group;
  HeadDeal deal;

  size_t ranks() const { return deal.ranks.size(); }
  const FeatureShare& heads(size_t tensor, size_t rank) const { return (tensor == 0 ? deal.query_heads : deal.kv_heads)[rank]; }
  int64_t all_heads(size_t tensor) const {
    const auto& last = heads(tensor, ranks() - 1);
    return last.begin + last.size;
  }
  /// Whether some of its heads are with several ranks, whose gradients are added up.
  bool has_copies(size_t tensor) const {
    return tensor > 0 && std::ranges::any_of(deal.kv_heads, [](const FeatureShare& share) { return share.holders > 1; });
  }
  size_t own() const { return static_cast<size_t>(deal.place); }

  /// The parts, flat and one after the other, to their ranks; sizes of what comes back, per rank.
  std::vector<at::Tensor> exchange(const std::vector<std::vector<at::Tensor>>& parts, const std::vector<int64_t>& sizes) const {
    std::vector<int64_t> in_splits(static_cast<size_t>(group.size()), 0), out_splits = in_splits;
    std::vector<at::Tensor> flat;
    for (size_t i = 0; i < ranks(); ++i) {
      for (const at::Tensor& part : parts[i]) {
        flat.push_back(part.reshape({-1}));
        in_splits[static_cast<size_t>(deal.ranks[i])] += part.numel();
      }
      out_splits[static_cast<size_t>(deal.ranks[i])] = sizes[i];
    }
    const at::Tensor out = at::cat(flat);
    int64_t total = 0;
    for (const int64_t size : sizes) total += size;
    const at::Tensor in = at::empty({total}, out.options());
    comm::all_to_all(group, in, out, out_splits, in_splits);
    return in.split_with_sizes(sizes);
  }

  HeadTensors to_heads(const HeadTensors& given) const {
    std::vector<std::vector<at::Tensor>> parts(ranks());
    std::vector<int64_t> sizes(ranks(), 0);
    HeadTensors made;
    for (size_t tensor = 0; tensor < given.size(); ++tensor) {
      const at::Tensor& x = given[tensor];
      if (!x.defined()) continue;
      const int64_t own_heads = heads(tensor, own()).size;
      for (size_t rank = 0; rank < ranks(); ++rank) {
        parts[rank].push_back(x.narrow(2, heads(tensor, rank).begin, heads(tensor, rank).size));
        sizes[rank] += x.size(0) * count(deal.columns[rank]) * own_heads * x.size(3);
      }
      made[tensor] = at::empty({x.size(0), count(deal.together), own_heads, x.size(3)}, x.options());
    }
    const std::vector<at::Tensor> received = exchange(parts, sizes);
    for (size_t rank = 0; rank < ranks(); ++rank) {
      int64_t begin = 0;
      for (const at::Tensor& x : made) {
        if (x.defined()) begin = put_columns(x, received[rank], begin, deal.columns[rank]);
      }
    }
    return made;
  }

  HeadTensors to_columns(const HeadTensors& given) const {
    std::vector<std::vector<at::Tensor>> parts(ranks());
    std::vector<int64_t> sizes(ranks(), 0);
    HeadTensors sums;
    for (size_t tensor = 0; tensor < given.size(); ++tensor) {
      const at::Tensor& x = given[tensor];
      if (!x.defined()) continue;
      const int64_t own_columns = count(deal.columns[own()]);
      for (size_t rank = 0; rank < ranks(); ++rank) {
        parts[rank].push_back(columns_of(x, deal.columns[rank]));
        sizes[rank] += x.size(0) * own_columns * heads(tensor, rank).size * x.size(3);
      }
      const std::vector<int64_t> shape{x.size(0), own_columns, all_heads(tensor), x.size(3)};
      sums[tensor] = has_copies(tensor) ? at::zeros(shape, x.options().dtype(at::kFloat)) : at::empty(shape, x.options());
    }
    const std::vector<at::Tensor> received = exchange(parts, sizes);
    for (size_t rank = 0; rank < ranks(); ++rank) {
      int64_t begin = 0;
      for (size_t tensor = 0; tensor < sums.size(); ++tensor) {
        if (!sums[tensor].defined()) continue;
        const at::Tensor place = sums[tensor].narrow(2, heads(tensor, rank).begin, heads(tensor, rank).size);
        const at::Tensor came = received[rank].narrow(0, begin, place.numel()).view(place.sizes());
        has_copies(tensor) ? place.add_(came.to(at::kFloat)) : place.copy_(came);
        begin += place.numel();
      }
    }
    for (size_t tensor = 0; tensor < sums.size(); ++tensor) {
      if (sums[tensor].defined()) sums[tensor] = sums[tensor].to(given[tensor].scalar_type());
    }
    return sums;
  }

 private:
  at::Tensor columns_of(const at::Tensor& x, const std::vector<ColumnRun>& runs) const {
    std::vector<at::Tensor> parts;
    for (const ColumnRun& run : runs) parts.push_back(x.narrow(1, place_of(deal.together, run), run.size));
    return parts.size() == 1 ? parts.front() : at::cat(parts, 1);
  }

  /// Puts a rank's columns, which begin at `begin` of what it sent, where they belong; returns where they end.
  int64_t put_columns(const at::Tensor& to, const at::Tensor& flat, int64_t begin, const std::vector<ColumnRun>& runs) const {
    const int64_t columns = count(runs), size = to.size(0) * columns * to.size(2) * to.size(3);
    const at::Tensor from = flat.narrow(0, begin, size).view({to.size(0), columns, to.size(2), to.size(3)});
    int64_t column = 0;
    for (const ColumnRun& run : runs) {
      to.narrow(1, place_of(deal.together, run), run.size).copy_(from.narrow(1, column, run.size));
      column += run.size;
    }
    return begin + size;
  }
};

struct KeptExchange : torch::CustomClassHolder {
  KeptExchange(Exchanger exchanger, std::string_view site) : exchanger(std::move(exchanger)), site(site) {}
  Exchanger exchanger;
  std::string site;
};

constexpr const char* kWayOut = nn::kAttentionTwice;

struct ToHeads : AutogradFunction<ToHeads> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                const c10::intrusive_ptr<KeptExchange>& kept) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(kept);
    const HeadTensors made = kept->exchanger.to_heads({q, k, v});
    return {made.begin(), made.end()};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto kept = c10::static_intrusive_pointer_cast<KeptExchange>(context->saved_data["exchange"].toCapsule());
    const HeadTensors made = [&] {
      const comm::CallSite site(kept->site);
      const at::NoGradGuard no_grad;
      return kept->exchanger.to_columns({grads[0], grads[1], grads[2]});
    }();
    return once_differentiable("Ulysses' exchange", kWayOut, grads, {made[0], made[1], made[2], at::Tensor()});
  }
};

struct ToColumns : AutogradFunction<ToColumns> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& output, const c10::intrusive_ptr<KeptExchange>& kept) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(kept);
    return kept->exchanger.to_columns({output, {}, {}})[0];
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto kept = c10::static_intrusive_pointer_cast<KeptExchange>(context->saved_data["exchange"].toCapsule());
    const at::Tensor made = [&] {
      const comm::CallSite site(kept->site);
      const at::NoGradGuard no_grad;
      return kept->exchanger.to_heads({grads[0], {}, {}})[0];
    }();
    return once_differentiable("Ulysses' exchange", kWayOut, grads, {made, at::Tensor()});
  }
};

c10::intrusive_ptr<KeptExchange> keep(const comm::Group& group, const HeadDeal& deal) {
  return c10::make_intrusive<KeptExchange>(Exchanger{.group = group, .deal = deal}, comm::CallSite::current());
}

}  // namespace

HeadTensors to_heads(const comm::Group& group, const HeadDeal& deal, const HeadTensors& tensors) {
  const auto made = ToHeads::apply(tensors[0], tensors[1], tensors[2], keep(group, deal));
  return {made[0], made[1], made[2]};
}

at::Tensor to_columns(const comm::Group& group, const HeadDeal& deal, const at::Tensor& output) { return ToColumns::apply(output, keep(group, deal)); }

}  // namespace tessera::context
