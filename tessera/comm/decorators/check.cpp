#include "tessera/comm/decorators/check.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/dtype_name.h"
#include "tessera/comm/failure.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"

// The comparison must not itself be able to disagree: whatever ranks are about to call, their notes have one size and travel by the same all_gather of the
// engine below. The hash decides, for texts are cut; the text is for people. What each rank gives and gets in an all_to_all may rightly differ, and only the
// whole matrix shows a contradiction: hence its second exchange. A message concerns two ranks alone, so its note goes ahead of it, under its own tag.

namespace tessera::comm {
namespace {

/// What a rank asks for, as it travels: of one size whatever the call, so that different calls meet in the same exchange.
struct Note {
  uint64_t hash = 0;             ///< of all that must agree
  std::array<char, 248> text{};  ///< for people; ends with a zero
};
static_assert(sizeof(Note) == 256);

std::string_view towards_root(Operation op) { return op == Operation::Reduce || op == Operation::Gather ? " to rank " : " from rank "; }

/// `agreed` is compared, and `told` by who differs.
Note make_note(const std::string& agreed, const std::string& told) {
  const auto site = CallSite::current();
  Note note{.hash = hash_bytes(agreed.data(), agreed.size())};
  const auto text = site.empty() ? told : fmt::format("{} ({})", told, site);
  std::copy_n(text.data(), std::min(text.size(), note.text.size() - 1), note.text.data());
  return note;
}
Note make_note(const std::string& agreed) { return make_note(agreed, agreed); }

std::string tensor_text(c10::IntArrayRef shape, c10::ScalarType dtype) { return fmt::format("[{}] {}", fmt::join(shape, ", "), dtype_name(dtype)); }

// What ranks ask for, in words: all_reduce of [32] float32, broadcast from rank 2 of [4, 8] bfloat16.
std::string asked_of(const Call& call, const GroupInfo& group) {
  std::string text(to_string(call.op));
  if (call.op == Operation::Barrier) return text;
  const auto reduction = call.named_reduction();
  if (reduction && reduction != Op::Sum) text += fmt::format(" by {}", to_string(*reduction));  // a sum is what one expects
  if (call.peer >= 0) text += fmt::format("{}{}", towards_root(call.op), group.world_rank(call.peer));
  const auto shape = call.whole(group.size);
  const c10::IntArrayRef whole(shape);
  if (call.op == Operation::AllToAll) return text + " of rows " + tensor_text(whole.empty() ? whole : whole.slice(1), call.dtype());
  return text + " of " + tensor_text(whole, call.named_dtype());
}

// It is the same on every rank, but for who gives whom how many rows: that is compared in elements, since one that gives none has rows of no shape.
Note note_of(const Call& call, const GroupInfo& group) {
  const std::string asked = asked_of(call, group);
  return call.op == Operation::AllToAll ? make_note(fmt::format("{} of {}", to_string(call.op), dtype_name(call.dtype())), asked) : make_note(asked);
}

/// Ranks that ask for the same.
struct Side {
  uint64_t hash = 0;
  std::string text;
  std::vector<int> ranks;
};

std::string disagreement(const std::vector<Side>& sides) {
  constexpr size_t kShown = 4;
  std::vector<std::string> texts;
  for (const auto& side : sides) {
    if (texts.size() == kShown) break;
    texts.push_back(fmt::format("{} {} for {}", name_ranks(side.ranks, 2), side.ranks.size() == 1 ? "asks" : "ask", side.text));
  }
  if (sides.size() > kShown) texts.push_back(fmt::format("and {} further ways", sides.size() - kShown));
  return fmt::format("{}", fmt::join(texts, "; "));
}

int64_t row_of(const at::Tensor& tensor) { return tensor.dim() == 0 ? 1 : c10::multiply_integers(tensor.sizes().slice(1)); }

/// Elements for, or from, each rank.
std::vector<int64_t> parts_of(const at::Tensor& tensor, std::vector<int64_t> splits, int ranks) {
  if (splits.empty()) return std::vector<int64_t>(static_cast<size_t>(ranks), tensor.numel() / ranks);
  for (int64_t& rows : splits) rows *= row_of(tensor);
  return splits;
}

/// A message's bytes as frames whose sizes depend on their place alone: 1 KiB, 4 KiB, ..., 4 MiB, 4 MiB, ... Both sides agree on each frame's size even
/// where they disagree on the message's, so that no engine gets a message that is longer than what its receiver waits for: Gloo ends the process then.
class Frames {
 public:
  /// Of a contiguous tensor, whose strides say nothing where it has one element.
  explicit Frames(const at::Tensor& tensor) : bytes_(tensor.as_strided({tensor.numel()}, {1}).view(at::kByte)) {
    int64_t size = 1024;
    for (int64_t begin = 0; begin < bytes_.numel(); begin += size, size = std::min(4 * size, kLargest)) {
      const auto part = bytes_.narrow(0, begin, std::min(size, bytes_.numel() - begin));
      if (part.numel() < size) tail_ = part;
      frames_.push_back(part.numel() == size ? part : at::zeros({size}, bytes_.options()));
    }
  }

  const std::vector<at::Tensor>& all() const { return frames_; }
  /// The end of the message into the last frame, which is longer; and back.
  void pack() const {
    if (tail_.defined()) frames_.back().narrow(0, 0, tail_.numel()).copy_(tail_);
  }
  void unpack() const {
    if (tail_.defined()) tail_.copy_(frames_.back().narrow(0, 0, tail_.numel()));
  }

 private:
  static constexpr int64_t kLargest = int64_t{4} << 20;
  at::Tensor bytes_, tail_;
  std::vector<at::Tensor> frames_;
};

class CheckEngine : public DecoratedEngine {
 public:
  CheckEngine(const GroupInfo& group, std::shared_ptr<Engine> inner)
      : DecoratedEngine(group, std::move(inner)), device_(name() == "nccl" ? at::kCUDA : at::kCPU), dry_(!moves_data()) {}

  Work start(const Call& call) override {
    if (call.op == Operation::Send) return send_message(call);
    if (call.op == Operation::Recv) return receive_message(call);
    ++calls_;
    compare_notes(call);
    if (call.op == Operation::AllToAll) compare_splits(call);
    return inner()->start(call);
  }

 private:
  // What travels beside a call, where the engine takes its tensors. In a dry run, where nothing does, as much memory where the call's are.
  at::Tensor travelling(const void* data, size_t bytes, const Call& call) const {
    const auto size = static_cast<int64_t>(bytes);
    if (dry_) return at::empty({size}, at::device(call.tensor().defined() ? call.tensor().device() : at::Device(at::kMeta)).dtype(at::kByte));
    const auto tensor = at::empty({size}, at::device(at::kCPU).dtype(at::kByte));
    std::memcpy(tensor.mutable_data_ptr(), data, bytes);
    return tensor.to(device_);
  }

  // `ours`, and everybody's. Of a dry run nothing, where there is nobody else.
  template <class T>
  std::vector<T> exchange(const std::vector<T>& ours, const Call& call) {
    const auto in = travelling(ours.data(), ours.size() * sizeof(T), call);
    auto out = at::empty({in.numel() * group().size}, in.options());
    const bool done = inner()->start({.op = Operation::AllGather, .inputs = {in}, .outputs = {out}, .async = false})->wait();
    if (!done) throw std::runtime_error("aborted while comparing what the ranks ask for");
    if (dry_) return {};
    out = out.cpu();
    std::vector<T> all(ours.size() * group().size);
    std::memcpy(all.data(), out.const_data_ptr(), out.nbytes());
    return all;
  }

  void compare_notes(const Call& call) {
    const auto notes = exchange<Note>({note_of(call, group())}, call);
    if (notes.empty()) return;
    std::vector<Side> sides;
    for (int member = 0; member < group().size; ++member) {
      auto side = std::find_if(sides.begin(), sides.end(), [&](const Side& s) { return s.hash == notes[member].hash; });
      if (side == sides.end()) side = sides.insert(side, {notes[member].hash, notes[member].text.data(), {}});
      side->ranks.push_back(group().world_rank(member));
    }
    if (sides.size() > 1) throw CommError(fmt::format("collective #{} of {}: {}", calls_, group().name, disagreement(sides)));
  }

  void compare_splits(const Call& call) {
    const int n = group().size;
    auto ours = parts_of(call.inputs[0], call.in_splits, n);
    const auto from = parts_of(call.outputs[0], call.out_splits, n);
    ours.insert(ours.end(), from.begin(), from.end());
    const auto all = exchange(ours, call);
    if (all.empty()) return;
    for (int source = 0; source < n; ++source) {
      for (int target = 0; target < n; ++target) {
        const auto sent = all[source * 2 * n + target], expected = all[target * 2 * n + n + source];
        if (sent == expected) continue;
        const auto note = note_of(call, group());
        const int64_t row = std::max<int64_t>(1, row_of(call.inputs[0].numel() > 0 ? call.inputs[0] : call.outputs[0]));
        const bool in_rows = sent % row == 0 && expected % row == 0;
        throw CommError(fmt::format("collective #{} of {}: {}: rank {} gives rank {} {} {}, which expects {}", calls_, group().name, note.text.data(),
                                    group().world_rank(source), group().world_rank(target), in_rows ? sent / row : sent, in_rows ? "rows" : "elements",
                                    in_rows ? expected / row : expected));
      }
    }
  }

  Work send_message(const Call& call) {
    const Frames frames(call.inputs[0]);
    frames.pack();
    const auto note = make_note(tensor_text(call.tensor().sizes(), call.dtype()));
    std::vector<at::Tensor> parts{travelling(&note, sizeof(Note), call)};
    parts.insert(parts.end(), frames.all().begin(), frames.all().end());
    std::vector<WorkStage> stages;
    for (const auto& part : parts) {
      auto message = call;
      message.inputs = {part};
      stages.push_back({.work = inner()->start(message), .after = [part] {}});  // alive until sent
    }
    return staged_work(std::move(stages));
  }

  Work receive_message(const Call& call) {
    const Frames frames(call.outputs[0]);
    const auto mine = make_note(tensor_text(call.tensor().sizes(), call.dtype()));
    const Note unknown;
    const auto theirs = travelling(&unknown, sizeof(Note), call);
    const auto receive = [&](const at::Tensor& into) {
      auto message = call;
      message.outputs = {into};
      return inner()->start(message);
    };
    const auto compare = [theirs, mine, source = group().world_rank(call.peer), target = group().world_rank(group().rank), name = group().name,
                          tag = call.tag] {
      Note note;
      std::memcpy(&note, theirs.cpu().const_data_ptr(), sizeof(Note));
      if (note.hash == mine.hash) return;
      throw CommError(
          fmt::format("message of {} with tag {}: rank {} sends {}; rank {} expects {}", name, tag, source, note.text.data(), target, mine.text.data()));
    };
    const auto unpack = [frames] { frames.unpack(); };
    std::vector<WorkStage> stages{{.work = receive(theirs), .after = dry_ ? std::function<void()>([theirs] {}) : compare}};
    for (const auto& frame : frames.all()) stages.push_back({.work = receive(frame)});
    stages.push_back({.work = completed_work(), .after = dry_ ? std::function<void()>([frames] {}) : unpack});
    return staged_work(std::move(stages));
  }

  at::Device device_;  ///< where the engine takes its tensors
  bool dry_;           ///< nothing travels
  int64_t calls_ = 0;  ///< collectives so far
};

}  // namespace

Decorator checking() {
  return [](std::shared_ptr<Engine> inner, const GroupInfo& group) { return std::make_shared<CheckEngine>(group, std::move(inner)); };
}

}  // namespace tessera::comm
