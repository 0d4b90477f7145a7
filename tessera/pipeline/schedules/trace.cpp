#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/json_text.h"
#include "tessera/pipeline/schedules/events.h"
#include "tessera/pipeline/schedules/picture.h"

namespace tessera::schedules {
namespace {

using Json = nlohmann::json;

/// Writes the events of one drawing, which is process `pid` of the trace.
class TraceWriter {
 public:
  TraceWriter(Json& events, const Drawing& drawing, int pid, double microseconds)
      : events_(events), drawing_(drawing), schedule_(drawing.schedule), timeline_(drawing.timeline), pid_(pid), microseconds_(microseconds) {}

  void write() {
    add({{"ph", "M"}, {"name", "process_name"}, {"args", {{"name", drawing_.title}}}});
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      add({{"ph", "M"}, {"name", "thread_name"}, {"tid", rank}, {"args", {{"name", fmt::format("rank {}", rank)}}}});
      write_rank(rank);
    }
    write_arrows();
  }

 private:
  void add(Json event) {
    event["pid"] = pid_;
    events_.push_back(std::move(event));
  }

  void write_rank(int rank) {
    int alive = 0;
    for (size_t i = 0; i < timeline_[rank].size(); ++i) {
      const Action& action = schedule_.actions[rank][i];
      const Span& span = timeline_[rank][i];
      if (!action.occupies()) continue;
      Json arguments{{"stage", action.stage}, {"micro_batch", action.micro_batch}};
      if (schedule_.is_asynchronous()) arguments["version"] = action.version;
      if (!drawing_.asked.empty() && drawing_.asked[rank][i] < span.start) {
        const double since = drawing_.asked[rank][i];
        add({{"ph", "X"},
             {"name", "waits for " + to_string(action)},
             {"cat", "wait"},
             {"tid", rank},
             {"ts", since * microseconds_},
             {"dur", (span.start - since) * microseconds_}});
      }
      add({{"ph", "X"},
           {"name", to_string(action)},
           {"cat", words_of(action.kind)},
           {"tid", rank},
           {"ts", span.start * microseconds_},
           {"dur", (span.end - span.start) * microseconds_},
           {"args", arguments}});
      for (const Action& part : parts(action)) {
        if (part.kind == Kind::Forward) count(rank, span.start, ++alive);
        if (part.kind == Kind::Backward || part.kind == Kind::BackwardWeight) count(rank, span.end, --alive);
      }
    }
  }

  void count(int rank, double time, int alive) {
    const double share = static_cast<double>(alive) / schedule_.chunks(rank);
    add({{"ph", "C"}, {"name", fmt::format("activations of rank {}", rank)}, {"ts", time * microseconds_}, {"args", {{"micro-batches", share}}}});
  }

  /// From the end of what makes a result to the start of what uses it on another rank.
  void write_arrows() {
    const detail::EventIndex index(schedule_);
    std::map<size_t, std::pair<int, Span>> made;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      for (size_t i = 0; i < timeline_[rank].size(); ++i) {
        for (const auto& event : detail::brings(schedule_.actions[rank][i])) made[index(event)] = {rank, timeline_[rank][i]};
      }
    }
    int id = 0;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      for (size_t i = 0; i < timeline_[rank].size(); ++i) {
        if (!schedule_.actions[rank][i].computes()) continue;
        for (const auto& event : detail::needs(schedule_, schedule_.actions[rank][i], /*through_messages=*/false)) {
          const auto& [from, span] = made.at(index(event));
          if (from == rank) continue;
          const double inside = span.start + 0.999 * (span.end - span.start);  // arrows begin inside of a box
          add({{"ph", "s"}, {"id", id}, {"name", "message"}, {"cat", "message"}, {"tid", from}, {"ts", inside * microseconds_}});
          add({{"ph", "f"},
               {"bp", "e"},
               {"id", id++},
               {"name", "message"},
               {"cat", "message"},
               {"tid", rank},
               {"ts", timeline_[rank][i].start * microseconds_}});
        }
      }
    }
  }

  Json& events_;
  const Drawing& drawing_;
  const Schedule& schedule_;
  const Timeline& timeline_;
  int pid_;
  double microseconds_;
};

}  // namespace

std::string trace_of(const std::vector<Drawing>& drawings, double microseconds) {
  Json events = Json::array();
  for (size_t i = 0; i < drawings.size(); ++i) TraceWriter(events, drawings[i], static_cast<int>(i), microseconds).write();
  return json_text(Json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}) + "\n";
}

}  // namespace tessera::schedules
