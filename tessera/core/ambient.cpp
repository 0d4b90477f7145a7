#include "tessera/core/ambient.h"

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/graph_task.h>

// A pass carries a copy that nobody changes. A thread of the engine, which may work for several ranks in turn, makes its own variables equal to it when it
// meets another copy than the last time; from then on it changes its own, so that neither waits for the other. Whether a thread works for a pass, or merely
// was given the caller's state, the engine tells: only there is a graph task under way.

namespace tessera {
namespace {

using Slots = std::vector<std::unique_ptr<detail::AmbientValue>>;

constinit thread_local bool is_gone = false;  // outlives what follows

struct OfThread {
  Slots slots;
  uint64_t taken_from = 0;  ///< the copy that they were made equal to; 0: none
  ~OfThread() { is_gone = true; }
};
thread_local OfThread of_thread;

constexpr std::string_view kCarriedName = "scopes of the thread that called backward";
constexpr c10::DebugInfoKind kCarried(&kCarriedName);

void copy_into(Slots& to, const Slots& from) {
  to.clear();
  for (const auto& value : from) to.push_back(value ? value->copy() : nullptr);
}

struct Carried final : c10::DebugInfoBase {
  explicit Carried(const OfThread& caller) : owner(&caller) {
    static std::atomic<uint64_t> made = 0;
    number = ++made;
    copy_into(slots, caller.slots);
  }
  const OfThread* owner;
  uint64_t number;
  Slots slots;
};

OfThread& here() {
  OfThread& mine = of_thread;
  if (torch::autograd::get_current_graph_task_id() == -1) return mine;
  const auto* const carried = static_cast<const Carried*>(c10::ThreadLocalDebugInfo::get(kCarried));
  if (carried == nullptr || carried->owner == &mine || carried->number == mine.taken_from) return mine;
  copy_into(mine.slots, carried->slots);
  mine.taken_from = carried->number;
  return mine;
}

}  // namespace

namespace detail {

size_t new_ambient_slot() {
  static std::atomic<size_t> slots = 0;
  return slots++;
}

std::unique_ptr<AmbientValue>& ambient_slot(size_t index) {
  Slots& slots = here().slots;
  if (index >= slots.size()) slots.resize(index + 1);
  return slots[index];
}

}  // namespace detail

bool ambient_is_gone() { return is_gone; }

CarryAmbient::CarryAmbient() { c10::ThreadLocalDebugInfo::_push(kCarried, std::make_shared<Carried>(here())); }
CarryAmbient::~CarryAmbient() { c10::ThreadLocalDebugInfo::_pop(kCarried); }

}  // namespace tessera
