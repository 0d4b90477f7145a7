#include "tessera/comm/differentiable.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collective_node.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/core/function_node.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/layout/slice.h"

// One node of autograd serves all collectives: it is given what to do forward and backward. Backward is made of these same functions, so that derivatives of
// derivatives need no code; only a message to one rank has none, for the receiver's loss does not know of it. It runs on autograd's thread, which knows no
// module: the node carries the call site of forward, so that records and errors name the layer.

namespace tessera::comm::differentiable {
namespace {

constexpr const char* kMessages = "let values cross by broadcast, gather or scatter, whose derivatives have derivatives, or take the second within a rank";

using Map = std::function<at::Tensor(const at::Tensor&)>;

constexpr const char* kBackward = "backward";

// What every rank of the group gives, or each its own.
enum class Gives { Same, Own };

// What a node remembers: how gradients flow, and which module asked, for the records of backward.
struct Backward : torch::CustomClassHolder {
  Backward(Map map, std::string_view site, Group group, Gives gives) : map(std::move(map)), site(site), group(std::move(group)), gives(gives) {}
  Map map;
  std::string site;
  Group group;
  Gives gives;
};

class Collective : public AutogradFunction<Collective> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Map& forward, const Map& backward, const Group& group,
                            Gives gives) {
    context->saved_data[kBackward] = c10::IValue::make_capsule(c10::make_intrusive<Backward>(backward, CallSite::current(), group, gives));
    return forward(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    const auto saved = context->saved_data[kBackward].toCapsule();
    const auto& remembered = static_cast<const Backward&>(*saved);
    const CallSite site(remembered.site);
    return {remembered.map(gradients[0]), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor apply(const Group& group, const at::Tensor& x, const Map& forward, const Map& backward, Gives gives = Gives::Own) {
  if (x.requires_grad() && at::GradMode::is_enabled()) group.in_backward().by_graphs = true;
  return Collective::apply(x, forward, backward, group, gives);
}

at::Tensor packed_copy(const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); }

int64_t wrap_dim(const at::Tensor& x, int64_t dim) {
  invariant(x.dim() > 0 && dim >= -x.dim() && dim < x.dim(), "collective along dimension ", dim, " of a tensor of shape ", x.sizes());
  return dim < 0 ? dim + x.dim() : dim;
}

std::vector<int64_t> resized(const at::Tensor& x, int64_t dim, int64_t size) {
  auto shape = x.sizes().vec();
  shape[dim] = size;
  return shape;
}

// Views of all ranks' parts along `dim`.
std::vector<at::Tensor> dealt(const Group& group, const at::Tensor& whole, int64_t dim) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto [begin, size] = chunk(whole.size(dim), group.size(), rank);
    parts.push_back(whole.narrow(dim, begin, size));
  }
  return parts;
}

at::Tensor own_part(const Group& group, const at::Tensor& whole, int64_t dim) {
  const auto [begin, size] = chunk(whole.size(dim), group.size(), group.rank());
  return packed_copy(whole.narrow(dim, begin, size));
}

at::Tensor gathered(const Group& group, const at::Tensor& x, int64_t dim, int64_t total) {
  auto y = at::empty(resized(x, dim, total), x.options());
  if (total % group.size() != 0) {
    comm::all_gather_uneven(group, dealt(group, y, dim), x);
  } else if (dim == 0) {
    comm::all_gather(group, y, x);
  } else {
    auto stacked_shape = x.sizes().vec();
    stacked_shape.insert(stacked_shape.begin(), group.size());
    const auto stacked = at::empty(stacked_shape, x.options());
    comm::all_gather(group, stacked, x);
    y.unflatten(dim, {group.size(), x.size(dim)}).copy_(stacked.movedim(0, dim));
  }
  return y;
}

at::Tensor reduced_part(const Group& group, const at::Tensor& x, int64_t dim) {
  const auto [begin, size] = chunk(x.size(dim), group.size(), group.rank());
  auto y = at::empty(resized(x, dim, size), x.options());
  if (x.size(dim) % group.size() != 0) {
    comm::reduce_scatter_uneven(group, y, dealt(group, x, dim));
  } else {
    comm::reduce_scatter(group, y, x.unflatten(dim, {group.size(), size}).movedim(dim, 0));
  }
  return y;
}

// Backward of gather: this rank's rows of root's x, whose size the others cannot tell; they pass the x of no rows that gather gave them.
at::Tensor deal_from_root(const Group& group, const at::Tensor& x, int root, const std::vector<int64_t>& shape) {
  const auto forward = [group, root, shape](const at::Tensor& x) {
    auto y = at::empty(shape, x.options());
    comm::scatter(group, y, x, root);
    return y;
  };
  return apply(group, x, forward, [group, root](const at::Tensor& dy) { return differentiable::gather(group, dy, root); });
}

// Backward of scatter: root's y is the ranks' x one after the other, and the others' zeros of that size.
at::Tensor gather_to_root(const Group& group, const at::Tensor& x, int root) {
  const auto forward = [group, root](const at::Tensor& x) {
    auto y = at::zeros(resized(x, 0, x.size(0) * group.size()), x.options());
    comm::gather(group, y, x, root);
    return y;
  };
  return apply(group, x, forward, [group, root](const at::Tensor& dy) { return differentiable::scatter(group, dy, root); });
}

// Root's y is the sum of the ranks' x, the others' zeros. Backward: broadcast of root's dL/dy.
at::Tensor reduce_to_root(const Group& group, const at::Tensor& x, int root) {
  const auto forward = [group, root](const at::Tensor& x) {
    auto y = packed_copy(x);
    comm::reduce(group, y, root);
    return group.rank() == root ? y : y.zero_();
  };
  return apply(group, x, forward, [group, root](const at::Tensor& dy) { return differentiable::broadcast(group, dy, root); });
}

// A message of numbers comes back as a gradient, whoever wants it: neither side knows the other's mind, and what one sends and the other does not take would be
// taken for the gradient of the next.
bool comes_back(const at::Tensor& x) { return at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type()); }

bool gives(Gives what, const Group& group, const torch::autograd::Node& node) {
  const c10::IValue* const saved = saved_by(node, kBackward);
  if (saved == nullptr || !saved->isCapsule()) return false;
  const auto capsule = saved->toCapsule();
  const auto* const remembered = dynamic_cast<const Backward*>(capsule.get());
  if (remembered == nullptr || remembered->gives != what) return false;
  std::vector<int> members;
  for (int member = 0; member < remembered->group.size(); ++member) members.push_back(remembered->group.world_rank(member));
  for (int member = 0; member < group.size(); ++member) {
    if (std::ranges::find(members, group.world_rank(member)) == members.end()) return false;
  }
  return true;
}

}  // namespace

bool gives_the_same_on(const Group& group, const torch::autograd::Node& node) { return gives(Gives::Same, group, node); }

bool gives_its_own_on(const Group& group, const torch::autograd::Node& node) { return gives(Gives::Own, group, node); }

at::Tensor copy_to_group(const Group& group, const at::Tensor& x) {
  if (group.size() == 1) return x;
  return apply(group, x, [](const at::Tensor& x) { return x; }, [group](const at::Tensor& dy) { return differentiable::all_reduce(group, dy); });
}

at::Tensor all_reduce(const Group& group, const at::Tensor& x, Gradient gradient) {
  if (group.size() == 1) return x;
  const auto forward = [group](const at::Tensor& x) {
    auto y = packed_copy(x);
    comm::all_reduce(group, y);
    return y;
  };
  const auto backward = [group, gradient](const at::Tensor& dy) {
    return gradient == Gradient::Replicated ? differentiable::copy_to_group(group, dy) : differentiable::all_reduce(group, dy, gradient);
  };
  return apply(group, x, forward, backward, Gives::Same);
}

at::Tensor all_gather(const Group& group, const at::Tensor& x, int64_t dim, int64_t total, Gradient gradient) {
  if (group.size() == 1) return x;
  dim = wrap_dim(x, dim);
  if (total < 0) total = x.size(dim) * group.size();
  invariant(chunk(total, group.size(), group.rank()).second == x.size(dim), "all_gather of group ", group.name(), ", rank ", group.rank(), ": a part of ",
            x.size(dim), " is not this rank's of ", total, " along dimension ", dim);
  const auto forward = [group, dim, total](const at::Tensor& x) { return gathered(group, x, dim, total); };
  const auto backward = [group, dim, gradient](const at::Tensor& dy) {
    return gradient == Gradient::Partial ? differentiable::reduce_scatter(group, dy, dim) : differentiable::split(group, dy, dim);
  };
  return apply(group, x, forward, backward, Gives::Same);
}

at::Tensor reduce_scatter(const Group& group, const at::Tensor& x, int64_t dim) {
  if (group.size() == 1) return x;
  dim = wrap_dim(x, dim);
  return apply(
      group, x, [group, dim](const at::Tensor& x) { return reduced_part(group, x, dim); },
      [group, dim, total = x.size(dim)](const at::Tensor& dy) { return differentiable::all_gather(group, dy, dim, total); });
}

at::Tensor split(const Group& group, const at::Tensor& x, int64_t dim) {
  if (group.size() == 1) return x;
  dim = wrap_dim(x, dim);
  return apply(
      group, x, [group, dim](const at::Tensor& x) { return own_part(group, x, dim); },
      [group, dim, total = x.size(dim)](const at::Tensor& dy) { return differentiable::all_gather(group, dy, dim, total, Gradient::Replicated); });
}

at::Tensor all_to_all(const Group& group, const at::Tensor& x, const std::vector<int64_t>& out_splits, const std::vector<int64_t>& in_splits) {
  if (group.size() == 1) return x;
  const auto forward = [group, out_splits, in_splits](const at::Tensor& x) {
    const auto rows = out_splits.empty() ? x.size(0) : std::accumulate(out_splits.begin(), out_splits.end(), int64_t{0});
    auto y = at::empty(resized(x, 0, rows), x.options());
    comm::all_to_all(group, y, x, out_splits, in_splits);
    return y;
  };
  // Where only one side is uneven by name, the other is equal parts of its own rows: the reverse call sees them the same way.
  const auto backward = [group, out_splits, in_splits, rows = x.size(0)](const at::Tensor& dy) {
    auto back = in_splits;
    if (back.empty() && !out_splits.empty()) back.assign(group.size(), rows / group.size());
    return differentiable::all_to_all(group, dy, back, out_splits);
  };
  return apply(group, x, forward, backward);
}

at::Tensor broadcast(const Group& group, const at::Tensor& x, int root, Gradient gradient) {
  if (group.size() == 1) return x;
  const bool is_root = group.rank() == root;
  const auto forward = [group, root, is_root](const at::Tensor& x) {
    auto y = is_root ? packed_copy(x) : at::empty(x.sizes(), x.options());
    comm::broadcast(group, y, root);
    return y;
  };
  const auto backward = [group, root, is_root, gradient](const at::Tensor& dy) {
    if (gradient == Gradient::Partial) return reduce_to_root(group, dy, root);
    return is_root ? dy : at::zeros_like(dy);
  };
  return apply(group, x, forward, backward, Gives::Same);
}

at::Tensor gather(const Group& group, const at::Tensor& x, int root) {
  if (group.size() == 1) return x;
  wrap_dim(x, 0);
  const bool is_root = group.rank() == root;
  const auto forward = [group, root, is_root](const at::Tensor& x) {
    auto y = at::empty(resized(x, 0, is_root ? x.size(0) * group.size() : 0), x.options());
    comm::gather(group, y, x, root);
    return y;
  };
  return apply(group, x, forward, [group, root, shape = x.sizes().vec()](const at::Tensor& dy) { return deal_from_root(group, dy, root, shape); });
}

at::Tensor scatter(const Group& group, const at::Tensor& x, int root) {
  if (group.size() == 1) return x;
  wrap_dim(x, 0);
  invariant(x.size(0) % group.size() == 0, "scatter of group ", group.name(), ": ", x.size(0), " rows cannot be dealt equally over ", group.size(), " ranks");
  const auto forward = [group, root](const at::Tensor& x) {
    auto y = at::empty(resized(x, 0, x.size(0) / group.size()), x.options());
    comm::scatter(group, y, x, root);
    return y;
  };
  return apply(group, x, forward, [group, root](const at::Tensor& dy) { return gather_to_root(group, dy, root); });
}

at::Tensor send(const Group& group, const at::Tensor& x, int dst, int tag) {
  const auto forward = [group, dst, tag](const at::Tensor& x) {
    comm::send(group, x, dst, tag);
    return at::zeros({}, x.options());
  };
  const bool wanted = x.requires_grad();
  const auto backward = [group, dst, tag, wanted, shape = x.sizes().vec()](const at::Tensor& token) {
    auto dx = at::empty(shape, token.options());
    comm::recv(group, dx, dst, tag);
    return wanted ? once_differentiable("send", kMessages, {token}, {dx})[0] : at::Tensor();
  };
  if (wanted || !comes_back(x) || !at::GradMode::is_enabled()) return apply(group, x, forward, backward);
  return apply(group, (x.is_inference() ? x.clone() : x.detach()).requires_grad_(), forward, backward);
}

at::Tensor recv(const Group& group, const at::Tensor& like, int src, int tag) {
  const auto forward = [group, src, tag, shape = like.sizes().vec()](const at::Tensor& token) {
    auto y = at::empty(shape, token.options());
    comm::recv(group, y, src, tag);
    return y;
  };
  const auto backward = [group, src, tag](const at::Tensor& dy) {
    comm::send(group, dy, src, tag);
    return once_differentiable("recv", kMessages, {dy}, {at::zeros({}, dy.options())})[0];
  };
  // Autograd comes back to a node only through an input that wants a gradient.
  return apply(group, at::zeros({}, like.options()).requires_grad_(comes_back(like)), forward, backward);
}

at::Tensor barrier(const Group& group, const at::Tensor& x) {
  if (group.size() == 1) return x;
  return apply(
      group, x,
      [group](const at::Tensor& x) {
        comm::barrier(group);
        return x;
      },
      [group](const at::Tensor& dy) { return differentiable::barrier(group, dy); });
}

}  // namespace tessera::comm::differentiable
