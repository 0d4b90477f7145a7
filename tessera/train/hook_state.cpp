#include "tessera/train/hook_state.h"

#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

// Of what a hook carries, the compression errors are terms of a sum over the ranks: nobody minds which rank adds which term, so on another number of ranks rows
// are dealt anew and added up, and nothing of the gradient is lost. On the same number each row goes back where it was, since dealing n rows to n ranks is the
// identity.

namespace tessera {

namespace {

/// The same part of rows `begin` .. `begin + size` of `rows` such tensors, one below the other.
Slice stacked(Slice slice, int64_t rows, int64_t begin, int64_t size) {
  slice.name.insert(0, hook_prefix);
  slice.shape.insert(slice.shape.begin(), rows);
  for (Box& box : slice.boxes) {
    box.offset.insert(box.offset.begin(), begin);
    box.size.insert(box.size.begin(), size);
  }
  return slice;
}

Slice prefixed(Slice slice) {
  slice.name.insert(0, hook_prefix);
  return slice;
}

/// What the hook carries. Where layers are cut, each rank approximates its own gradients: of its part of a matrix, or, of what several ranks hold, of its term
/// of the sum. So there they carry the rank's place in their names, and are whole under them: another cut has others.
std::vector<HookTensor> state_of(const CommunicationHook* hook, const comm::Group& tensor) {
  std::vector<HookTensor> state = hook == nullptr ? std::vector<HookTensor>{} : hook->state();
  if (tensor.size() == 1) return state;
  for (HookTensor& held : state) {
    held.name += detail::concat("@tp", tensor.rank(), "of", tensor.size());
    held.slice = Slice::whole(held.name, held.tensor.sizes().vec());
  }
  return state;
}

bool fits(const checkpoint::StoredTensor& stored, const HookTensor& held) {
  std::vector<int64_t> shape = stored.shape;
  if (held.across == HookTensor::Across::Sum) {
    if (shape.empty()) return false;
    shape.erase(shape.begin());
  }
  return shape == held.slice.shape && stored.dtype == checkpoint::dtype_name(held.tensor.scalar_type());
}

/// Rows of a saved sum that this rank takes over.
struct Share {
  at::Tensor total;  ///< the hook's
  at::Tensor rows;   ///< [saved ranks that fall to this one, ...]; may be none
};

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
}

}  // namespace

std::vector<checkpoint::SlicedTensor> hook_tensors(const CommunicationHook* hook, const comm::Group& data, const comm::Group& tensor) {
  std::vector<checkpoint::SlicedTensor> tensors;
  for (const HookTensor& held : state_of(hook, tensor)) {
    if (held.across == HookTensor::Across::Sum) {
      tensors.push_back({held.tensor.unsqueeze(0), stacked(held.slice, data.size(), data.rank(), 1)});
    } else {
      tensors.push_back({held.tensor, prefixed(held.slice)});
    }
  }
  return tensors;
}

std::vector<std::string> load_hook_state(const CommunicationHook* hook, const ResumePoint& resume, const comm::Group& data, const comm::Group& tensor,
                                         bool verify) {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Comm);
  const auto& stored_tensors = resume.manifest.tensors;
  std::vector<checkpoint::SlicedTensor> targets;
  std::vector<Share> shares;
  std::set<std::string> known;
  int64_t fresh = 0, carried = 0;
  const std::vector<HookTensor> state = state_of(hook, tensor);
  for (const HookTensor& held : state) {
    const auto stored = stored_tensors.find(hook_prefix + held.name);
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
    const auto [begin, size] = chunk(saved_ranks, data.size(), data.rank());
    std::vector<int64_t> shape = held.tensor.sizes().vec();
    shape.insert(shape.begin(), size);
    shares.push_back({held.tensor, at::empty(shape, held.tensor.options())});
    if (size > 0) targets.push_back({shares.back().rows, stacked(held.slice, saved_ranks, begin, size)});
  }
  checkpoint::load(resume.folder, resume.manifest, targets, {.verify = verify, .ignore_prefixes = {""}});
  for (const Share& share : shares) add_up(share);

  carried = static_cast<int64_t>(state.size());
  if (tensor.size() > 1) {
    const auto all = checkpoint::gather_json(tensor, {{"known", known}, {"fresh", fresh}, {"carried", carried}});
    fresh = carried = 0;
    for (const auto& each : all) {
      for (const auto& name : each.at("known")) known.insert(name.get<std::string>());
      fresh += each.at("fresh").get<int64_t>();
      carried += each.at("carried").get<int64_t>();
    }
  }
  int64_t unread = 0;
  for (const auto& [name, stored] : stored_tensors) unread += name.starts_with(hook_prefix) && !known.contains(name) ? 1 : 0;
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
