#include "tessera/train/hook_state.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hook_prefix.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/sharing.h"

// Of what a hook carries, the compression errors are terms of a sum over the ranks: nobody minds which rank adds which term, so on another number of ranks rows
// are dealt anew and added up, and nothing of the gradient is lost. On the same number each row goes back where it was, since dealing n rows to n ranks is the
// identity. The two copies of a tied embedding are two terms of its gradient: each rank of either has a row.

namespace tessera {

namespace {

/// The same part of rows `begin` .. `begin + size` of `rows` such tensors, one below the other.
Slice stacked(Slice slice, int64_t rows, int64_t begin, int64_t size) {
  slice.name.insert(0, checkpoint::kHookPrefix);
  slice.shape.insert(slice.shape.begin(), rows);
  for (Box& box : slice.boxes) {
    box.offset.insert(box.offset.begin(), begin);
    box.size.insert(box.size.begin(), size);
  }
  return slice;
}

Slice prefixed(Slice slice) {
  slice.name.insert(0, checkpoint::kHookPrefix);
  return slice;
}

constexpr const char* kLastCopy = "@last";

/// What a hook carries, as a checkpoint has it.
struct Carried {
  HookTensor held;
  int row = 0, rows = 1;  ///< of a Sum or Mean: this rank's place among those that hold terms
  std::string stand_in;   ///< where the checkpoint does not have it: what is as good; may be empty
};

/// What the hooks carry. Where layers are cut, each rank approximates its own gradients: of its part of a matrix, or, of what several ranks hold, of its term
/// of the sum. So there they carry the rank's place in their names, and are whole under them: another cut has others. Which experts a rank has its place
/// does not say (mesh.ep and expert_tp do), so what tells them from others is in the names of theirs.
std::vector<Carried> state_of(const HookShares& hooks, const comm::Group& data) {
  std::vector<Carried> state;
  const std::string tied = detail::concat(".", kTiedWeight);
  for (const auto& [hook, stage] : hooks.parts) {
    for (HookTensor& held : hook->state()) {
      const bool copied = hooks.tied_copies && held.name.ends_with(tied), last = copied && stage > 0;
      Carried carried{.held = std::move(held), .row = data.rank() + (last ? data.size() : 0), .rows = data.size() * (copied ? 2 : 1), .stand_in = {}};
      HookTensor& own = carried.held;
      std::string cut = hooks.layers.size() > 1 ? detail::concat("@tp", hooks.layers.rank(), "of", hooks.layers.size()) : std::string();
      for (const auto& [parameter, part] : hooks.experts) {
        if (!cut.empty() && own.name.ends_with("." + parameter)) cut += "." + part;
      }
      if (last && own.across == HookTensor::Across::Equal) {
        carried.stand_in = own.name + cut;
        own.name += kLastCopy;
      }
      own.name += cut;
      if (cut.empty()) {
        own.slice.name = own.name;
      } else {
        own.slice = Slice::whole(own.name, own.tensor.sizes().vec());
      }
      state.push_back(std::move(carried));
    }
  }
  return state;
}

bool fits(const checkpoint::StoredTensor& stored, const HookTensor& held) {
  std::vector<int64_t> shape = stored.shape;
  if (held.across != HookTensor::Across::Equal) {
    if (shape.empty()) return false;
    shape.erase(shape.begin());
  }
  return shape == held.slice.shape && stored.dtype == checkpoint::dtype_name(held.tensor.scalar_type());
}

/// Rows of a saved sum that this rank takes over.
struct Share {
  at::Tensor total;  ///< the hook's
  at::Tensor rows;   ///< [saved ranks that fall to this one, ...]; may be none
  double factor;     ///< of a mean: ranks over saved ranks; where gradients have another scale now, times the quotient
};

/// What gradients were multiplied by in the run that saved.
double scale_saved_with(const checkpoint::Manifest& manifest) {
  const auto scale = manifest.progress.find("loss_scale");
  if (scale == manifest.progress.end() || !scale->is_object()) return 1;
  const auto value = scale->find("value");
  const double number = value != scale->end() && value->is_number() ? value->get<double>() : 0;
  return number > 0 ? number : 1;  // of a damaged one LossScale::restore has more to say
}

/// Row by row, so that a single one arrives to the bit.
void add_up(const Share& share) {
  at::Tensor total = share.total;
  if (share.rows.size(0) == 0) total.zero_();
  for (int64_t row = 0; row < share.rows.size(0); ++row) {
    if (row == 0) {
      total.copy_(share.rows[0]);
    } else {
      total.add_(share.rows[row]);
    }
  }
  if (share.factor != 1) total.mul_(share.factor);
}

}  // namespace

HookShares hook_shares(const Composition& run) {
  HookShares hooks{.parts = {}, .layers = run.layers, .pipeline = run.pipeline, .tied_copies = run.has_tied_copies(), .gradient_scale = run.loss_scale.value()};
  for (const nn::NamedParameter& parameter : run.parameters) {
    if (std::ranges::none_of(nn::dealt_of(parameter.tensor), [](const nn::Dealt& dealt) { return dealt.by == kExpertParallel; })) continue;
    std::string boxes;
    for (const Box& box : nn::slice_of(parameter.tensor).boxes) boxes += detail::concat(at::IntArrayRef(box.offset), at::IntArrayRef(box.size));
    hooks.experts[parameter.name] = hash_hex(boxes.data(), boxes.size());
  }
  for (size_t part = 0; part < run.hooks.size(); ++part) hooks.parts.push_back({run.hooks[part].get(), run.stage_of(part)});
  return hooks;
}

std::vector<checkpoint::SlicedTensor> hook_tensors(const HookShares& hooks, const comm::Group& data) {
  std::vector<checkpoint::SlicedTensor> tensors;
  std::map<std::string, size_t> sums;  // a rank that has both ends of a tied weight has two rows of its sum
  for (const auto& [held, row, rows, stand_in] : state_of(hooks, data)) {
    if (held.across == HookTensor::Across::Equal) {
      tensors.push_back({held.tensor, prefixed(held.slice)});
      continue;
    }
    checkpoint::SlicedTensor mine{held.tensor.unsqueeze(0), stacked(held.slice, rows, row, 1)};
    const auto [other, is_first] = sums.emplace(mine.slice.name, tensors.size());
    if (is_first) {
      tensors.push_back(std::move(mine));
      continue;
    }
    auto& [tensor, slice] = tensors[other->second];
    tensor = at::cat({tensor, mine.tensor});
    slice.boxes.insert(slice.boxes.end(), mine.slice.boxes.begin(), mine.slice.boxes.end());
  }
  return tensors;
}

std::vector<std::string> load_hook_state(const HookShares& hooks, const ResumePoint& resume, const comm::Group& data, bool verify) {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Comm);
  const auto& stored_tensors = resume.manifest.tensors;
  std::vector<checkpoint::SlicedTensor> targets;
  std::vector<Share> shares;
  std::set<std::string> known;
  const double unit = hooks.gradient_scale ? *hooks.gradient_scale / scale_saved_with(resume.manifest) : 1;
  int64_t fresh = 0, carried = 0;
  const std::vector<Carried> state = state_of(hooks, data);
  for (auto [held, row, rows, stand_in] : state) {
    auto stored = stored_tensors.find(checkpoint::kHookPrefix + held.name);
    if (stored == stored_tensors.end() && !stand_in.empty()) {
      stored = stored_tensors.find(checkpoint::kHookPrefix + stand_in);
      held.slice.name = stand_in;
    }
    if (stored == stored_tensors.end() || !fits(stored->second, held)) {
      ++fresh;
      continue;
    }
    known.insert(stored->first);
    if (held.across == HookTensor::Across::Equal) {
      targets.push_back({held.tensor, prefixed(held.slice)});
      continue;
    }
    const int64_t saved_ranks = stored->second.shape.front();
    const auto [begin, size] = chunk(saved_ranks, rows, row);
    std::vector<int64_t> shape = held.tensor.sizes().vec();
    shape.insert(shape.begin(), size);
    const double of_mean = held.across == HookTensor::Across::Mean ? static_cast<double>(rows) / static_cast<double>(saved_ranks) : 1;
    shares.push_back({held.tensor, at::empty(shape, held.tensor.options()), of_mean * unit});
    if (size > 0) targets.push_back({shares.back().rows, stacked(held.slice, saved_ranks, begin, size)});
  }
  checkpoint::load(resume.folder, resume.manifest, targets, {.verify = verify, .ignore_prefixes = {""}});
  for (const Share& share : shares) add_up(share);

  carried = static_cast<int64_t>(state.size());
  for (const comm::Group* others : {&hooks.layers, &hooks.pipeline}) {
    if (others->size() == 1) continue;
    const auto all = checkpoint::gather_json(*others, {{"known", known}, {"fresh", fresh}, {"carried", carried}});
    fresh = carried = 0;
    for (const auto& each : all) {
      for (const auto& name : each.at("known")) known.insert(name.get<std::string>());
      fresh += each.at("fresh").get<int64_t>();
      carried += each.at("carried").get<int64_t>();
    }
  }
  int64_t unread = 0;
  for (const auto& [name, stored] : stored_tensors) {
    const size_t copy = name.find(kLastCopy);  // one copy has no use for what another began from
    const std::string of_first = copy == std::string::npos ? name : std::string(name).erase(copy, std::string_view(kLastCopy).size());
    unread += name.starts_with(checkpoint::kHookPrefix) && !known.contains(of_first) ? 1 : 0;
  }
  std::vector<std::string> remarks;
  if (fresh > 0) {
    remarks.push_back(detail::concat(
        resume.folder.string(), " does not hold ", fresh, " of the ", carried,
        " tensors that gradient compression carries (errors, and Q of PowerSGD, which another mesh.tp or rank has in other shapes): they start afresh"));
  }
  if (unread > 0) {
    remarks.push_back(
        detail::concat(resume.folder.string(), " holds ", unread, " tensors of gradient compression that this run does not use: they are left unread"));
  }
  return remarks;
}

}  // namespace tessera
