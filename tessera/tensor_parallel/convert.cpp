#include "tessera/tensor_parallel/convert.h"

#include "tessera/comm/differentiable.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// Forward a whole tensor is a whole tensor; backward it matters whether each rank then computes the same from it (its gradient is whole everywhere) or
// something of its own (each rank has a term). Mixing the two up is wrong by a factor of n or lacks a sum, and no shape shows it: that is why Replicated and
// Copied are two layouts, and each collective is told which gradient will come.

namespace tessera::tensor_parallel {

namespace {

namespace collective = comm::differentiable;
using collective::Gradient;
using enum TensorLayout;

at::Tensor gather_sequence(const Context& context, const std::string& path, const at::Tensor& x, Gradient gradient) {
  require_part_of_sequence(context, path, x);
  return collective::all_gather(context.group, x, sequence_dim(x), context.sequence, gradient);
}

constexpr int pair(TensorLayout from, TensorLayout to) { return static_cast<int>(from) * 8 + static_cast<int>(to); }

}  // namespace

int64_t sequence_dim(const at::Tensor& x) { return x.dim() > (x.is_floating_point() ? 2 : 1) ? 1 : 0; }

void require_part_of_sequence(const Context& context, const std::string& path, const at::Tensor& x) {
  const int64_t own = chunk(context.sequence, context.group.size(), context.group.rank()).second, size = x.size(sequence_dim(x));
  require(size == own, "'", path, "' takes a part of ", size, " positions of a sequence, and of the one that was cut last, of ", context.sequence, ", rank ",
          context.group.rank(), " has ", own,
          ": one length of sequence is followed at a time. Pad the two to one length, or leave one of them uncut (output = "
          "Replicated)");
}

bool convertible(TensorLayout from, TensorLayout to) {
  switch (pair(from, to)) {
    case pair(Replicated, Copied):
    case pair(Replicated, Sequence):
    case pair(Replicated, Features):
    case pair(Sequence, Copied):
    case pair(Sequence, Replicated):
    case pair(Features, Replicated):
    case pair(Partial, Replicated):
    case pair(Partial, Sequence):
      return true;
    default:
      return from == to;
  }
}

namespace {

/// Of a part of the sequence in dimension `dim`. Rows of tokens are those of several samples one after the other, each of which has such a part.
std::vector<Box> sequence_boxes(const Context& context, const Box& local, size_t dim) {
  const auto [begin, own] = chunk(context.sequence, context.group.size(), context.group.rank());
  const int64_t samples = own > 0 && dim == 0 ? local.size[0] / own : 1;
  std::vector<Box> boxes;
  for (int64_t sample = 0; sample < samples; ++sample) {
    Box& part = boxes.emplace_back(local);
    part.offset[dim] = sample * context.sequence + begin;
    if (samples > 1) part.size[dim] = own;
  }
  return boxes;
}

}  // namespace

nn::OutputLayout output_layout(const Context& context, const at::Tensor& output, TensorLayout layout, const FeatureShare& share, int64_t dim) {
  const std::vector<std::string> group{context.group.name()};
  Box box = Box::whole(output.sizes().vec());
  switch (layout) {
    case Replicated:
      return {};
    case Copied:
      return {.boxes = {}, .partial_over = {}, .gradient_partial_over = group};
    case Partial:
      return {.boxes = {}, .partial_over = group};
    case Features:
      box.offset[static_cast<size_t>(dim < 0 ? dim + output.dim() : dim)] = share.begin;
      if (share.holders > 1) return {.boxes = {box}, .partial_over = {}, .gradient_partial_over = group};
      break;
    case Sequence:
      return {.boxes = sequence_boxes(context, box, static_cast<size_t>(sequence_dim(output))), .partial_over = {}};
  }
  return {.boxes = {box}, .partial_over = {}};
}

namespace {

at::Tensor moved(Context& context, const std::string& path, const at::Tensor& x, TensorLayout from, TensorLayout to, int64_t features) {
  const comm::Group& group = context.group;
  if (to == Sequence && from != Sequence) context.sequence = x.size(sequence_dim(x));
  switch (pair(from, to)) {
    case pair(Replicated, Copied):
      return collective::copy_to_group(group, x);
    case pair(Replicated, Sequence):
      return collective::split(group, x, sequence_dim(x));
    case pair(Replicated, Features):
      return collective::split(group, x, -1);
    case pair(Sequence, Copied):
      return gather_sequence(context, path, x, Gradient::Partial);
    case pair(Sequence, Replicated):
      return gather_sequence(context, path, x, Gradient::Replicated);
    case pair(Features, Replicated):
      return collective::all_gather(group, x, -1, features, Gradient::Replicated);
    case pair(Partial, Replicated):
      return collective::all_reduce(group, x);
    case pair(Partial, Sequence):
      return collective::reduce_scatter(group, x, sequence_dim(x));
    default:
      invariant(from == to, "no way from ", to_string(from), " to ", to_string(to));
      return x;
  }
}

}  // namespace

Cut cut_of(const Context& context, const at::Tensor& tensor, TensorLayout layout, const std::vector<FeatureShare>& shares, const FeatureCut& by) {
  if (layout == Sequence) return {.dim = sequence_dim(tensor), .shares = even_shares(context.sequence, context.group.size())};
  if (layout != Features) return {};
  Cut cut{.dim = tensor.dim() - 1, .shares = shares};
  if (by.by == FeatureCut::By::QueryHead) cut.units = {cut.whole() / by.heads, by.heads / by.kv_heads};
  if (by.by == FeatureCut::By::KeyValueHead) cut.units = {cut.whole() / by.kv_heads};
  return cut;
}

at::Tensor convert(Context& context, const std::string& path, const at::Tensor& x, TensorLayout from, TensorLayout to, int64_t features) {
  if (!context.trace) return moved(context, path, x, from, to, features);
  context.trace->takes(path, x, from, from == Sequence ? cut_of(context, x, Sequence) : Cut());
  if (from == to) return x;
  const LayoutTrace::Trusted own(context.trace);
  const at::Tensor y = moved(context, path, x, from, to, features).alias();
  context.trace->gives(path, y, to, cut_of(context, y, to, to == Features ? even_shares(x.size(-1), context.group.size()) : std::vector<FeatureShare>()));
  return y;
}

}  // namespace tessera::tensor_parallel
