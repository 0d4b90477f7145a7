#include "tessera/pipeline/tied.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/connect.h"
#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/late_updates.h"
#include "tessera/nn/parameter.h"

// What ranks tell each other of their slices is strided: so many runs of so many elements, each so far behind the one before. A part that sharding cuts is at
// most three rectangles of a matrix, and a rectangle is one such pattern, columns too. Patterns become runs of elements where two slices differ; where they are
// alike, as all whole ones are, the tensor travels as it lies.

namespace tessera::pipeline {
namespace {

constexpr const char* kTiedSite = "pipeline.tied";
constexpr int64_t kMostPatterns = 8;               // of one slice
constexpr int64_t kEntry = 1 + 4 * kMostPatterns;  // of a copy: how many patterns, and each

/// What to write where elements of a copy are on too many ranks, or on none.
constexpr const char* kReplicas =
    "they are there several times, and each would be added: where every rank has whole gradients (DistributedDataParallel, or no wrapper), give the ranks of "
    "the "
    "pipeline alone, sum_shared_gradients(split, schedule, mesh[\"pp\"]), and where a wrapper keeps parts, those over which they are cut besides, and no "
    "replicas";
constexpr const char* kParts =
    "where a wrapper keeps gradients in parts, give the ranks of the pipeline together with those over which they are cut, and no replicas: "
    "sum_shared_gradients(split, schedule, mesh[\"pp\"], mesh[{\"dp\", \"pp\"}])";

using Runs = std::vector<std::pair<int64_t, int64_t>>;
struct Pattern {
  int64_t first, count, stride, times;
  bool operator==(const Pattern&) const = default;
};
using Patterns = std::vector<Pattern>;

/// Of a slice, in the order in which they lie in the local tensor.
Patterns patterns_of(const Slice& slice) {
  invariant(slice.concat_dim() <= 0, "the parts of '", slice.name, "' lie side by side");
  Patterns patterns;
  for (const Box& box : slice.boxes) {
    for_each_run(slice.shape, box, [&](int64_t first, int64_t count) {
      if (count == 0) return;
      Pattern* const last = patterns.empty() ? nullptr : &patterns.back();
      if (last != nullptr && last->times == 1 && last->first + last->count == first) {
        last->count += count;
      } else if (last != nullptr && last->count == count && (last->times == 1 || first - last->first == last->times * last->stride) && first > last->first) {
        if (last->times == 1) last->stride = first - last->first;
        ++last->times;
      } else {
        patterns.push_back({first, count, 0, 1});
      }
    });
  }
  return patterns;
}

/// Each rank has an entry for each holder.
const int64_t* entry_of(const at::Tensor& table, int64_t number) { return table.const_data_ptr<int64_t>() + number * kEntry; }

void write(const Slice& slice, const at::Tensor& table, int64_t number) {
  const Patterns patterns = patterns_of(slice);
  invariant(std::ssize(patterns) <= kMostPatterns, "a slice of '", slice.name, "' has ", patterns.size(), " patterns");
  int64_t* entry = table.mutable_data_ptr<int64_t>() + number * kEntry;
  *entry++ = std::ssize(patterns);
  for (const auto& [first, count, stride, times] : patterns) {
    for (const int64_t value : {first, count, stride, times}) *entry++ = value;
  }
}

Patterns patterns_in(const int64_t* entry) {
  Patterns patterns;
  for (int64_t i = 0; i < entry[0]; ++i) patterns.push_back({entry[1 + 4 * i], entry[2 + 4 * i], entry[3 + 4 * i], entry[4 + 4 * i]});
  return patterns;
}

int64_t numel_of(const Patterns& patterns) {
  int64_t numel = 0;
  for (const Pattern& pattern : patterns) numel += pattern.count * pattern.times;
  return numel;
}

/// A run of the logical tensor, and where it lies in the local one.
struct Place {
  int64_t first, count, local;
};

/// By their place in the logical tensor.
std::vector<Place> places_of(const Patterns& patterns) {
  std::vector<Place> places;
  int64_t local = 0;
  for (const Pattern& pattern : patterns) {
    for (int64_t i = 0; i < pattern.times; ++i, local += pattern.count) places.push_back({pattern.first + i * pattern.stride, pattern.count, local});
  }
  std::ranges::sort(places, {}, &Place::first);
  return places;
}

/// The elements of `mine` that are in `theirs`, in the order of the logical tensor, as runs of my local one.
Runs shared(const Patterns& mine, const Patterns& theirs) {
  if (mine == theirs) return mine.empty() ? Runs() : Runs{{0, numel_of(mine)}};
  const auto own = places_of(mine), other = places_of(theirs);
  Runs runs;
  for (size_t i = 0, k = 0; i < own.size() && k < other.size();) {
    const int64_t own_end = own[i].first + own[i].count, other_end = other[k].first + other[k].count;
    const int64_t begin = std::max(own[i].first, other[k].first), end = std::min(own_end, other_end);
    if (begin < end) runs.emplace_back(own[i].local + begin - own[i].first, end - begin);
    own_end < other_end ? ++i : ++k;
  }
  return runs;
}

int64_t numel_of(const Runs& runs) {
  int64_t numel = 0;
  for (const auto& [first, count] : runs) numel += count;
  return numel;
}

/// Piece by piece: to lay gradients end to end in one operator is what wrappers refuse an optimizer that would take products of them.
at::Tensor packed(const at::Tensor& tensor, const Runs& runs) {
  const at::Tensor flat = tensor.reshape({-1}), elements = at::empty({numel_of(runs)}, tensor.options());
  int64_t at = 0;
  for (const auto& [first, count] : runs) {
    elements.narrow(0, at, count).copy_(flat.narrow(0, first, count));
    at += count;
  }
  return elements;
}

void unpack(const at::Tensor& flat, const Runs& runs, const at::Tensor& elements) {
  int64_t at = 0;
  for (const auto& [first, count] : runs) {
    flat.narrow(0, first, count).copy_(elements.narrow(0, at, count));
    at += count;
  }
}

at::Tensor gradient_of(const at::Tensor& tensor) { return tensor.grad(); }

}  // namespace

TiedCopies::TiedCopies(Channels ranks, int holders, std::vector<Copy> copies, bool last_follows, const Answer& answer)
    : ranks_(std::move(ranks)), holders_(holders), copies_(std::move(copies)), last_follows_(last_follows) {
  invariant(!last_follows || holders == 2, "of ", holders, " copies the last follows");
  const comm::CallSite site(kTiedSite);
  const at::Tensor mine = at::zeros({holders, kEntry}, at::device(at::kCPU).dtype(at::kLong));
  for (const Copy& copy : copies_) write(nn::slice_of(copy.tensor), mine, copy.holder);
  table_ = at::zeros({ranks_.size() * holders, kEntry}, mine.options());
  comm::all_gather(ranks_.ahead, table_, mine);
  for (int rank = 0; answer && rank < ranks_.size(); ++rank) {
    for (int holder = 0; holder < holders; ++holder) {
      if (const auto slice = answer(rank, holder)) write(*slice, table_, rank * holders + holder);
    }
  }
  for (size_t c = 0; c < copies_.size(); ++c) {
    for (int peer = 0; peer < ranks_.size(); ++peer) {
      for (int holder = 0; holder < holders; ++holder) {
        if (holder == copies_[c].holder) continue;
        Runs runs = shared_runs(ranks_.rank(), copies_[c].holder, peer, holder);
        const int64_t numel = numel_of(runs);
        if (numel > 0) exchanges_.push_back({.copy = c, .peer = peer, .holder = holder, .runs = std::move(runs), .numel = numel});
      }
    }
  }
  // start_sum() sends to peers that may first come to a send of their own, in the other group.
  std::set<int> peers;
  for (const Exchange& exchange : exchanges_) {
    if (exchange.peer != ranks_.rank()) peers.insert(exchange.peer);
  }
  for (const comm::Group* const group : {&ranks_.ahead, &ranks_.back}) {
    if (!peers.empty()) comm::connect(*group, peers, copies_.front().tensor.device());
  }
}

/// Of what `rank` has of the copy of `own`, what `peer` has of the copy of `other`.
Runs TiedCopies::shared_runs(int rank, int own, int peer, int other) const {
  return shared(patterns_in(entry_of(table_, rank * holders_ + own)), patterns_in(entry_of(table_, peer * holders_ + other)));
}

std::vector<int64_t> TiedCopies::exchanged_by(int rank) const {
  std::vector<int64_t> exchanged;
  for (int own = 0; own < holders_; ++own) {
    for (int peer = 0; peer < ranks_.size(); ++peer) {
      for (int other = 0; other < holders_; ++other) {
        if (other == own) continue;
        const Runs runs = shared_runs(rank, own, peer, other);
        if (!runs.empty()) exchanged.insert(exchanged.end(), {peer == rank ? -numel_of(runs) : numel_of(runs), std::ssize(runs)});
      }
    }
  }
  return exchanged;
}

void TiedCopies::check_complete(const std::string& name) const {
  const auto entry = [&](int rank, int holder) { return patterns_in(entry_of(table_, rank * holders_ + holder)); };
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    for (int own = 0; own < holders_; ++own) {
      const Patterns patterns = entry(rank, own);
      for (int other = 0; other < holders_; ++other) {
        if (other == own) continue;
        int64_t found = 0;
        for (int peer = 0; peer < ranks_.size(); ++peer) found += numel_of(shared(patterns, entry(peer, other)));
        require(found == numel_of(patterns), "pipeline: '", name, "' is shared by stages on several ranks, and of the ", numel_of(patterns),
                " elements that rank ", rank, " of group '", ranks_.ahead.name(), "' has of it, the others have ", found, " of the copy of another stage; ",
                found > numel_of(patterns) ? kReplicas : kParts);
      }
    }
  }
}

bool TiedCopies::has_terms() const {
  for (const Copy& copy : copies_) {
    if (!copy.tensor.requires_grad()) return false;  // frozen, all of them
    invariant(copy.tensor.numel() == 0 || copy.tensor.grad().defined(), "'", nn::slice_of(copy.tensor).name, "' has no gradient");
  }
  return !copies_.empty();
}

void TiedCopies::pack(Messages& messages, const std::function<bool(int)>& giving, const Which& which) const {
  messages.leaving.resize(exchanges_.size());
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const Copy& copy = copies_[exchanges_[i].copy];
    if (giving(copy.holder)) messages.leaving[i] = packed(which(copy.tensor), exchanges_[i].runs);
  }
}

void TiedCopies::make_room(Messages& messages, const std::function<bool(int)>& giving, const Which& which) const {
  messages.coming.resize(exchanges_.size());
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const Exchange& exchange = exchanges_[i];
    if (giving(exchange.holder)) messages.coming[i] = at::empty({exchange.numel}, which(copies_[exchange.copy].tensor).options());
  }
}

void TiedCopies::post(Messages& messages, bool sends, bool receives) const {
  // Two ranks post the messages between them in one order, the lower rank's first, for engines that match by order alone.
  std::vector<std::tuple<int, int, int, size_t>> order;  // peer, sender, tag, exchange
  const auto tag = [&](int from, int to) { return from * holders_ + to; };
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const Exchange& exchange = exchanges_[i];
    if (exchange.peer == ranks_.rank()) continue;
    const int own = copies_[exchange.copy].holder;
    if (receives && messages.coming[i].defined()) order.emplace_back(exchange.peer, exchange.peer, tag(exchange.holder, own), i);
    if (sends && messages.leaving[i].defined()) order.emplace_back(exchange.peer, ranks_.rank(), tag(own, exchange.holder), i);
  }
  std::ranges::sort(order);
  for (const auto& [peer, sender, tag, i] : order) {
    const comm::Group& group = ranks_.between(sender, sender == peer ? ranks_.rank() : peer);
    messages.pending.push_back(sender == peer ? comm::recv_async(group, messages.coming[i], peer, tag)
                                              : comm::send_async(group, messages.leaving[i], peer, tag));
  }
}

void TiedCopies::wait(Messages& messages) const {
  for (auto& one : messages.pending) one.wait();
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (exchanges_[i].peer != ranks_.rank() || !messages.coming[i].defined()) continue;
    const auto other = std::ranges::find_if(exchanges_, [&](const Exchange& exchange) {
      return exchange.peer == ranks_.rank() && copies_[exchange.copy].holder == exchanges_[i].holder && exchange.holder == copies_[exchanges_[i].copy].holder;
    });
    messages.coming[i] = messages.leaving[static_cast<size_t>(other - exchanges_.begin())];
  }
}

/// What `holder` has sent of this copy, in the copy's shape.
at::Tensor TiedCopies::from(const Messages& messages, size_t copy, int holder) const {
  const at::Tensor& tensor = copies_[copy].tensor;
  at::Tensor whole;
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const Exchange& exchange = exchanges_[i];
    if (exchange.copy != copy || exchange.holder != holder) continue;
    const bool all = exchange.numel == tensor.numel() && exchange.runs.size() == 1;
    if (all) return messages.coming[i].view(tensor.sizes());
    if (!whole.defined()) whole = at::empty({tensor.numel()}, messages.coming[i].options());
    unpack(whole, exchange.runs, messages.coming[i]);
  }
  return whole.defined() ? whole.view(tensor.sizes()) : whole;
}

void TiedCopies::add(const Messages& messages) const {
  for (size_t c = 0; c < copies_.size(); ++c) {
    const auto& [own, tensor] = copies_[c];
    if (tensor.numel() == 0 || (last_follows_ && own == 1)) continue;
    const at::Tensor gradient = tensor.grad();
    at::Tensor sum;
    for (int holder = holders_ - 1; holder >= 0; --holder) {
      const at::Tensor term = holder == own ? gradient : from(messages, c, holder);
      invariant(term.defined(), "no rank has sent holder ", holder, "'s term of '", nn::slice_of(tensor).name, "'");
      if (!sum.defined()) {
        sum = term;
      } else if (holder == own) {
        sum = gradient.add_(sum);
      } else {
        sum.add_(term);
      }
    }
  }
}

void TiedCopies::sum() {
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kTiedSite);
  if (!has_terms()) return;
  Messages messages;
  const auto giving = [this](int holder) { return gives(holder); };
  pack(messages, giving, gradient_of);
  make_room(messages, giving, gradient_of);
  post(messages, /*sends=*/true, /*receives=*/true);
  wait(messages);
  add(messages);
}

// A send may last until its receiver asks for it, which at an end that updates late is long after: so what has left is kept until it is done, and nobody waits
// for it. When a step is over everybody has what was sent in it.
void TiedCopies::start_sum() {
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kTiedSite);
  invariant(!last_follows_, "copies of one rank are summed at once");
  if (!has_terms() || exchanges_.empty()) return;
  const auto is_done = [](const Messages& messages) { return !messages.coming.empty() && std::ranges::all_of(messages.pending, &comm::Pending::done); };
  for (; !under_way_.empty() && is_done(under_way_.front()); under_way_.pop_front()) {
    for (auto& one : under_way_.front().pending) one.wait();
  }
  Messages& messages = under_way_.emplace_back();
  pack(messages, [](int) { return true; }, gradient_of);
  post(messages, /*sends=*/true, /*receives=*/false);
}

void TiedCopies::finish_sum() {
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kTiedSite);
  if (!has_terms() || exchanges_.empty()) return;
  const auto first = std::ranges::find_if(under_way_, [](const Messages& messages) { return messages.coming.empty(); });
  invariant(first != under_way_.end(), "a sum of tied gradients is finished that was not started");
  Messages arriving;
  make_room(arriving, [](int) { return true; }, gradient_of);
  post(arriving, /*sends=*/false, /*receives=*/true);
  wait(arriving);
  add(arriving);
  first->coming.resize(exchanges_.size());  // it is finished, and its sends may go on
}

void TiedCopies::follow() {
  if (!last_follows_) return;
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kTiedSite);
  const auto first = [](int holder) { return holder == 0; };
  const Which values = [](const at::Tensor& tensor) { return tensor.detach(); };
  Messages messages;
  pack(messages, first, values);
  make_room(messages, first, values);
  post(messages, /*sends=*/true, /*receives=*/true);
  wait(messages);
  int64_t late = 0;
  for (const Copy& copy : copies_) {
    if (copy.holder == 0) late += nn::late_updates(copy.tensor);
  }
  const bool updated_late = std::exchange(late_updates_, late) != late;
  for (size_t c = 0; c < copies_.size(); ++c) {
    if (copies_[c].holder == 0) continue;
    if (updated_late) nn::note_late_update(copies_[c].tensor);
    if (const at::Tensor made = from(messages, c, 0); made.defined()) copies_[c].tensor.detach().copy_(made);
  }
}

}  // namespace tessera::pipeline
