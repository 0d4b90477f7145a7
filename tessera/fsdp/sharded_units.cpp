#include "tessera/fsdp/sharded_units.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/sharing.h"

// Two rules bound memory and keep ranks together. One reduction is under way at a time: the next waits for it, so that no more than two units' gradients are
// whole. And a unit's slices are not shown, so not written, while a gather that reads them is on its way. What is gathered ahead is what came next in the pass
// before: a guess that costs, where it is wrong, a gather at the wrong time and nothing else.

namespace tessera {
namespace {

at::ScalarType gathered_dtype(const nn::NamedParameter& parameter, const FullyShardOptions& options) {
  const at::ScalarType own = parameter.tensor.scalar_type();
  if (!options.param_dtype || !at::isFloatingType(own) || (options.cast && !options.cast(parameter))) return own;
  return *options.param_dtype;
}

/// A collective moves elements of one dtype, frozen parameters have no gradients to reduce, and what other ranks hold alike lies by itself (nn::flat_key): so a
/// unit is as many flats as it has kinds of parameters.
std::vector<FlatParameters> flats_of(const UnitPlan::Unit& unit, const comm::Group& group, const FullyShardOptions& options,
                                     const FlatParameters::Beside& beside) {
  using Kind = std::tuple<bool, at::ScalarType, at::ScalarType, std::string>;
  std::map<Kind, std::vector<nn::NamedParameter>> kinds;
  for (const auto& parameter : unit.parameters) {
    kinds[{parameter.tensor.requires_grad(), parameter.tensor.scalar_type(), gathered_dtype(parameter, options), nn::flat_key(parameter.tensor)}].push_back(
        parameter);
  }
  std::vector<FlatParameters> flats;
  for (auto& [kind, parameters] : kinds) {
    const auto& [trained, own, gathered, key] = kind;
    const bool real = at::isFloatingType(own);  // dtypes of options are those of real numbers
    const at::ScalarType reduced = real ? options.reduce_dtype.value_or(own) : own;
    const at::ScalarType kept = real ? options.gradient_dtype.value_or(at::promote_types(own, reduced)) : own;
    const bool alone = group.size() * options.replicate.size() == 1;  // nothing crosses a network
    // Micro-batches are added up in no narrower a type than that in which their sum is kept.
    const at::ScalarType summed = options.reduce_each_micro_batch ? reduced : at::promote_types(kept, reduced);
    const FlatParameters::Dtypes dtypes{.gathered = gathered, .summed = alone ? kept : summed, .reduced = alone ? kept : reduced, .kept = kept};
    flats.emplace_back(std::move(parameters), group, dtypes, options.device, beside);
  }
  return flats;
}

/// Of all parameters of the unit.
Offload place_of(const UnitPlan::Unit& unit, const FullyShardOptions& options) {
  const nn::NamedParameter& first = unit.parameters.front();
  const Offload place = options.place_of(first);
  for (const auto& parameter : unit.parameters) {
    require(options.place_of(parameter) == place, "fully_shard: '", first.name, "' and '", parameter.name, "' are of one unit, '", unit.name,
            "', which is fetched as a whole, and would wait at two places; name all of it in `place` (offload.params), or wrap them apart (wrap, policy; ",
            "zero.wrap)");
  }
  require(place != Offload::Disk || options.file, "fully_shard: '", first.name, "' is to wait on disk, and there is no file; set options.file ",
          "(make_mapped_file)");
  return place;
}

/// What a rank has told (ShardedUnits::told_by_all).
std::string in_words(const char* what, const std::string& name) { return name.empty() ? "another collective" : detail::concat(what, "'", name, "'"); }

/// Only memory says whether it is used in time, where neither a call nor an operator was seen.
std::string complaint_of(const UnitPlan::Unit& unit) {
  return detail::concat("fully_shard: parameters of unit '", unit.name, "' (such as '", unit.parameters.front().name,
                        "') were read while the unit is not gathered: nothing saw that it is needed. Call the module that owns them through its holder, as "
                        "model(x), not by ->forward(x), or let operators trigger the gathers (ShardTrigger::Operators); run the model in the thread that "
                        "called fully_shard, whose operators alone are seen; and keep what fully_shard returned until backward() has returned");
}

}  // namespace

int64_t gathered_bytes(const UnitPlan::Unit& unit, const FullyShardOptions& options) {
  int64_t bytes = 0;
  for (const auto& parameter : unit.parameters) bytes += parameter.tensor.numel() * static_cast<int64_t>(c10::elementSize(gathered_dtype(parameter, options)));
  return bytes;
}

ShardedUnits::ShardedUnits(const UnitPlan& plan, const comm::Group& group, const FullyShardOptions& options, int ranks_of_mean)
    : group_(group),
      replicas_(options.replicate),
      limits_(options.prefetch),
      scale_(1.0 / ranks_of_mean),
      turn_(plan.units.front().parameters.front().name),
      together_(options.find_unused_parameters) {
  require(limits_.units >= 0 && limits_.bytes >= 0, "fully_shard: prefetch of ", limits_.units, " units and ", limits_.bytes, " bytes must not be negative");
  std::shared_ptr<const HostLink> host;
  if (options.offloads()) {
    const at::Tensor& first = plan.units.front().parameters.front().tensor;
    host = std::make_shared<const HostLink>(first.is_meta() ? options.device : first.device());
  }
  for (const auto& unit : plan.units) {
    const Offload place = place_of(unit, options);
    const FlatParameters::Beside beside{.host = place == Offload::None ? nullptr : host, .file = place == Offload::Disk ? options.file : nullptr};
    units_.push_back({.name = unit.name, .flats = flats_of(unit, group, options, beside), .place = place});
    reads_ |= place == Offload::Disk;
    for (auto& flat : units_.back().flats) flat.set_complaint(complaint_of(unit));
  }
}

int64_t ShardedUnits::gathered_bytes(size_t unit) const {
  int64_t bytes = 0;
  for (const auto& flat : units_[unit].flats) bytes += flat.gathered_bytes();
  return bytes;
}

bool ShardedUnits::trained(size_t unit) const {
  return std::ranges::any_of(units_[unit].flats, [](const FlatParameters& flat) { return flat.trained(); });
}

void ShardedUnits::follow_requires_grad(bool too) {
  for (auto& unit : units_) {
    for (auto& flat : unit.flats) flat.follow_requires_grad(too);
  }
}

void ShardedUnits::unshard() {
  const nn::Unwatched quietly;
  release_all();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    show_slices(unit);
    take_in(unit);
    const comm::CallSite site(units_[unit].name);
    for (auto& flat : units_[unit].flats) flat.unshard();
  }
}

void ShardedUnits::take_in(size_t index) {
  Unit& unit = units_[index];
  if (std::ranges::none_of(unit.flats, [](const FlatParameters& flat) { return flat.is_replaced(); })) return;
  const nn::Unwatched quietly;
  release(index);  // slices on their way must not be written
  ++times_taken_in_;
  size_t bytes = 0;
  for (const Unit& any : units_) {
    for (const FlatParameters& flat : any.flats) bytes += static_cast<size_t>(flat.local_bytes() + flat.tied_bytes());
  }
  for (auto& flat : unit.flats) {
    flat.take_in(bytes);
    unit.whole ? flat.show_whole() : flat.show_slices();
  }
}

void ShardedUnits::show_whole(size_t unit) {
  if (units_[unit].whole) return;
  const nn::Unwatched quietly;
  take_in(unit);
  units_[unit].whole = true;
  for (auto& flat : units_[unit].flats) flat.show_whole();
}

void ShardedUnits::show_slices(size_t unit) {
  if (!units_[unit].whole) return;
  const nn::Unwatched quietly;
  take_in(unit);
  units_[unit].whole = false;
  for (auto& flat : units_[unit].flats) flat.show_slices();
}

void ShardedUnits::count(int64_t bytes) {
  statistics_.bytes += bytes;
  ++statistics_.num_collectives;
}

uint64_t ShardedUnits::take_made() { return std::exchange(made_, Hasher()).value(); }

void ShardedUnits::note(size_t unit, bool reduces) {
  if (!reduces && group_.size() == 1) return;  // a gather of one shard meets nobody, and one replica may make more of them, for lines of a log
  const std::array<int64_t, 4> made{group_.in_backward().made++, turn_.number, static_cast<int64_t>(unit), reduces ? 1 : 0};
  made_.update(made.data(), sizeof made);
}

void ShardedUnits::start_gather(size_t index) {
  const nn::Unwatched quietly;
  note(index, /*reduces=*/false);
  Unit& unit = units_[index];
  show_whole(index);  // slices on their way must not be written
  const comm::CallSite site(unit.name);
  unit.memory = Memory::Arriving;
  try {
    for (auto& flat : unit.flats) {
      flat.start_gather();
      count(flat.gathered_bytes());
    }
  } catch (...) {  // no memory for it: what has begun is waited for, and given up
    release(index);
    throw;
  }
}

void ShardedUnits::finish_gather(Unit& unit) {
  const nn::Unwatched quietly;
  const comm::CallSite site(unit.name);
  const comm::ExposedTime::Scope exposed(statistics_.exposed, units_.front().flats.front().device());
  for (auto& flat : unit.flats) flat.finish_gather();
  unit.memory = Memory::Ready;
}

/// What each rank of the group is about to do, by a number and a name. One that makes another collective of as many bytes meanwhile is known by their
/// beginning, and has no name.
std::vector<std::pair<int64_t, std::string>> ShardedUnits::told_by_all(int64_t number, std::string_view name) const {
  constexpr std::string_view kAsked = "fsdp ask";
  constexpr size_t kShown = 112;  // bytes of a name
  constexpr size_t kName = kAsked.size() + sizeof(int64_t);
  std::array<char, kName + kShown> mine{};
  kAsked.copy(mine.data(), kAsked.size());
  std::memcpy(mine.data() + kAsked.size(), &number, sizeof(int64_t));
  name.copy(mine.data() + kName, kShown - 1);
  const comm::CallSite site("fsdp.order");
  const at::Device device = message_device(units_.front().flats.front().parameters().front().tensor, group_);
  const at::Tensor own = at::from_blob(mine.data(), {std::ssize(mine)}, at::kByte).clone().to(device);
  at::Tensor all = at::empty({group_.size() * own.numel()}, own.options());
  comm::all_gather(group_, all, own);
  all = all.cpu();
  std::vector<std::pair<int64_t, std::string>> told(static_cast<size_t>(group_.size()));
  for (size_t rank = 0; rank < told.size(); ++rank) {
    const auto* const bytes = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>()) + rank * mine.size();
    if (std::string_view(bytes, kAsked.size()) != kAsked) continue;
    std::memcpy(&told[rank].first, bytes + kAsked.size(), sizeof(int64_t));
    told[rank].second = bytes + kName;
  }
  return told;
}

bool ShardedUnits::moves_nothing() const { return group_.size() == 1 || units_.front().flats.front().parameters().front().tensor.is_meta(); }

/// Of several wrappers over the same ranks each gathers where a pass first needs it, which may be another one on another rank: their gathers would meet.
void ShardedUnits::refuse_another_order() const {
  if (moves_nothing() || group_.in_backward().synchronizers <= 1) return;
  const auto told = told_by_all(turn_.number, turn_.first_parameter);
  for (int rank = 1; rank < group_.size(); ++rank) {
    const auto& other = told[static_cast<size_t>(rank)];
    require(
        other == told.front(), "fully_shard: rank ", group_.world_rank(rank), " comes first to ", in_words("the wrapper of ", other.second), ", and rank ",
        group_.world_rank(0), " to ", in_words("that of ", told.front().second),
        "; with find_unused_parameters each of two wrappers over the same ranks is gathered where a pass first needs it, so every rank has to come to them in "
        "one order: call them in one order on all ranks, or make one wrapper of both modules");
  }
}

void ShardedUnits::agree_on(size_t unit) const {
  if (moves_nothing() || together_ || units_.size() * static_cast<size_t>(group_.in_backward().synchronizers) <= 1) return;
  const auto told = told_by_all((turn_.number << 32) + static_cast<int64_t>(unit), units_[unit].name);
  for (int rank = 1; rank < group_.size(); ++rank) {
    const auto& other = told[static_cast<size_t>(rank)];
    require(other == told.front(), "fully_shard: rank ", group_.world_rank(rank), " comes to ", in_words("unit ", other.second), " where rank ",
            group_.world_rank(0), " comes to ", in_words("", told.front().second),
            ": a unit is gathered where a pass needs it, and reduced where backward leaves it, so every rank has to come to the same ones in one order; "
            "call layers in one order on all ranks, or set find_unused_parameters, with which ranks may take different paths");
  }
}

void ShardedUnits::acquire(size_t index) {
  Unit& unit = units_[index];
  const bool shown = unit.whole;
  try {
    show_whole(index);
    if (unit.memory == Memory::None && together_) {
      refuse_another_order();
      for (size_t other = 0; other < units_.size(); ++other) {
        if (units_[other].memory == Memory::None) start_gather(other);
      }
    }
    if (unit.memory == Memory::None) start_gather(index);
    if (unit.memory == Memory::Arriving) finish_gather(unit);
    unit.memory = Memory::Ready;
    const nn::Unwatched quietly;
    for (auto& flat : unit.flats) flat.check_given();  // here, and not where a gather ends: what gives a unit up must not be refused
  } catch (...) {
    release(index);  // or the next use would take it for gathered and checked
    if (!shown) show_slices(index);
    throw;
  }
}

/// What comes next within the limits, each once, however often it comes; not what is in use, but for a unit that is about to be no more. A unit that was kept
/// for the very next use counts as in use.
std::vector<size_t> ShardedUnits::ahead(const UseOrder& order, std::optional<size_t> leaving, int64_t units) const {
  std::vector<size_t> ahead;
  if (together_) return ahead;
  int64_t bytes = 0;
  for (size_t i = 0; const size_t* next = order.next(i); ++i) {
    const Memory memory = units_[*next].memory;
    const bool in_use = *next != leaving && (memory == Memory::Ready || (memory == Memory::Kept && i == 0));
    if (in_use || std::ranges::find(ahead, *next) != ahead.end()) continue;
    bytes += gathered_bytes(*next);
    if (static_cast<int64_t>(ahead.size()) == units || bytes > limits_.bytes) break;
    ahead.push_back(*next);
  }
  return ahead;
}

void ShardedUnits::prefetch(const UseOrder& order) {
  const std::vector<size_t> due = ahead(order, std::nullopt, limits_.units);
  for (const size_t unit : due) {
    if (units_[unit].memory == Memory::None) start_gather(unit);
  }
  if (!reads_) return;
  // A rank reads by itself, so a guess that is wrong costs no other anything. What is read, and then is not what comes, waits until it is, or the step ends.
  for (const size_t unit : ahead(order, std::nullopt, 2 * limits_.units)) {
    if (units_[unit].memory != Memory::None) continue;
    for (auto& flat : units_[unit].flats) flat.begin_read();
  }
}

void ShardedUnits::let_go() {
  for (auto& unit : units_) {
    for (auto& flat : unit.flats) flat.let_go();
  }
}

bool ShardedUnits::is_due(const UseOrder& order, size_t unit) const {
  const std::vector<size_t> due = ahead(order, unit, limits_.units);
  return std::ranges::find(due, unit) != due.end();
}

void ShardedUnits::keep(size_t unit) {
  if (units_[unit].memory == Memory::Ready) units_[unit].memory = Memory::Kept;
}

void ShardedUnits::release(size_t index) {
  Unit& unit = units_[index];
  if (unit.memory == Memory::Arriving) finish_gather(unit);
  if (unit.memory == Memory::None) return;
  for (auto& flat : unit.flats) flat.release();
  unit.memory = Memory::None;
}

void ShardedUnits::release_for_now(size_t unit) {
  if (!together_) release(unit);
}

void ShardedUnits::settle() {
  for (auto& unit : units_) {
    if (unit.memory == Memory::Arriving) finish_gather(unit);
  }
}

bool ShardedUnits::any_held() const {
  return std::ranges::any_of(units_, [](const Unit& unit) { return unit.memory != Memory::None; });
}

void ShardedUnits::release_all(bool but_kept) {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!but_kept || units_[unit].memory != Memory::Kept) release(unit);
  }
}

void ShardedUnits::reduce(size_t index, bool last) {
  const nn::Unwatched quietly;
  finish_reduction();
  note(index, /*reduces=*/true);
  const comm::CallSite site(units_[index].name);
  for (auto& flat : units_[index].flats) {
    if (!flat.trained()) continue;
    flat.start_reduction(scale_);
    count(flat.reduced_bytes());
  }
  reducing_ = index;
  reducing_last_ = last;
}

void ShardedUnits::finish_reduction() {
  if (!reducing_) return;
  const size_t index = *std::exchange(reducing_, std::nullopt);
  Unit& unit = units_[index];
  const comm::CallSite site(unit.name);
  const comm::ExposedTime::Scope exposed(statistics_.exposed, units_.front().flats.front().device());
  for (auto& flat : unit.flats) {
    if (!flat.trained()) continue;
    flat.finish_reduction();
    if (!reducing_last_ || replicas_.size() == 1) {
      flat.start_return();
      continue;
    }
    flat.start_replica_sum(replicas_);
    count(flat.reduced_bytes() / group_.size());
  }
  finish_return();
  returning_ = index;
  if (std::ranges::all_of(unit.flats, [](const FlatParameters& flat) { return !flat.trained() || flat.returned(); })) finish_return();
}

/// One unit's reduced slices are on their way to the host while the next is reduced, not more.
void ShardedUnits::finish_return() {
  if (!returning_) return;
  for (auto& flat : units_[*std::exchange(returning_, std::nullopt)].flats) flat.finish_return();
}

void ShardedUnits::clear_sums() {
  const nn::Unwatched quietly;
  finish_reduction();  // of a step that did not end
  finish_return();
  for (auto& unit : units_) {
    for (auto& flat : unit.flats) flat.clear_sums();
  }
}

void ShardedUnits::drain() {
  const nn::Unwatched quietly;
  finish_reduction();
  finish_return();
}

void ShardedUnits::finish_reductions() {
  const nn::Unwatched quietly;
  finish_reduction();
  finish_return();
  const comm::ExposedTime::Scope exposed(statistics_.exposed, units_.front().flats.front().device());
  for (auto& unit : units_) {
    for (auto& flat : unit.flats) {
      if (flat.trained()) flat.finish_step(scale_);
    }
  }
}

}  // namespace tessera
