#include <array>
#include <charconv>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules {
namespace {

constexpr int kLargestNumber = 1 << 20;

struct Named {
  std::string_view name;
  Kind kind;
};

/// Longer names first where one begins with another.
constexpr std::array<Named, 12> kNamed{{{"SEND_F", Kind::SendForward},
                                        {"RECV_F", Kind::ReceiveForward},
                                        {"SEND_B", Kind::SendBackward},
                                        {"RECV_B", Kind::ReceiveBackward},
                                        {"UNSHARD", Kind::Unshard},
                                        {"RESHARD", Kind::Reshard},
                                        {"REDUCE_GRAD", Kind::ReduceGrad},
                                        {"UPDATE", Kind::Update},
                                        {"F", Kind::Forward},
                                        {"B", Kind::Backward},
                                        {"I", Kind::BackwardInput},
                                        {"W", Kind::BackwardWeight}}};

/// Takes a number from the front of `text`; false where there is none, or one that is too large.
bool take_number(std::string_view& text, int& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > kLargestNumber) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool take_kind(std::string_view& text, Kind& kind) {
  for (const auto& named : kNamed) {
    if (take(text, named.name)) {
      kind = named.kind;
      return true;
    }
  }
  return false;
}

/// "2F0", "1UNSHARD", "0B3@2".
bool read_plain(std::string_view text, Action& action) {
  if (!take_number(text, action.stage) || !take_kind(text, action.kind)) return false;
  if (action.has_micro_batch() && !take_number(text, action.micro_batch)) return false;
  if (action.occupies() && take(text, "@") && !take_number(text, action.version)) return false;
  return text.empty();
}

/// "(0F7;7B3)OVERLAP_F_B".
bool read_overlap(std::string_view text, Action& action) {
  const auto middle = text.find(';'), end = text.find(')');
  if (!take(text, "(") || middle == std::string_view::npos || end == std::string_view::npos || end < middle) return false;
  Action forward, backward;
  const auto first = text.substr(0, middle - 1), second = text.substr(middle, end - middle - 1);
  if (!read_plain(first, forward) || !read_plain(second, backward) || text.substr(end) != "OVERLAP_F_B") return false;
  if (forward.kind != Kind::Forward || backward.kind != Kind::Backward) return false;
  action = {.kind = Kind::Overlap,
            .stage = forward.stage,
            .micro_batch = forward.micro_batch,
            .backward_stage = backward.stage,
            .backward_micro_batch = backward.micro_batch};
  return true;
}

}  // namespace

Action parse_action(std::string_view text) {
  Action action;
  const bool read = text.starts_with('(') ? read_overlap(text, action) : read_plain(text, action);
  require(read, "'", text.substr(0, 60), "' is no action: expected a stage, a kind and a micro-batch, such as 2F0, 3I1, 3W1, 1B0, 2SEND_F0, 1RECV_B3, or ",
          "1UNSHARD, 1RESHARD, 1REDUCE_GRAD, (0F7;7B3)OVERLAP_F_B");
  return action;
}

}  // namespace tessera::schedules
