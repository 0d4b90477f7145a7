#include "tessera/plan/read_events.h"

#include <map>
#include <sstream>
#include <tuple>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/dtype_name.h"
#include "tessera/memory/history.h"

namespace tessera::plan {

bool is_message(const CollectiveEvent& call) { return call.op == "send" || call.op == "recv"; }

std::vector<std::string> axes_in(const std::string& group) {
  std::vector<std::string> axes;
  std::istringstream names(group.substr(0, group.find('.')));
  for (std::string name; std::getline(names, name, '+');) axes.push_back(name);
  return axes;
}

std::vector<CollectiveSum> collectives_of(const Events& events) {
  std::vector<CollectiveSum> sums;
  std::map<std::tuple<std::string, std::string, std::string>, size_t> index;
  for (const Event& event : events) {
    const auto* call = std::get_if<CollectiveEvent>(&event.what);
    if (call == nullptr) continue;
    const std::string dtype = c10::toString(call->dtype);
    const auto [at, fresh] = index.try_emplace({call->op, call->group, dtype}, sums.size());
    if (fresh) sums.push_back({.op = call->op, .axis = call->group, .dtype = dtype});
    auto& sum = sums[at->second];
    ++sum.count;
    sum.bytes += call->bytes;
    sum.sent_bytes += call->sent_bytes;
  }
  return sums;
}

EventReader::EventReader(const Alive& before)
    : peak_(before), now_(before), device_(total_of(before.device)), host_(total_of(before.host)), device_peak_(device_), host_peak_(host_) {}

void EventReader::read(const Events& events) {
  for (const Event& event : events) read(event);
}

void EventReader::read(const Event& event) {
  if (const auto* ran = std::get_if<OperatorEvent>(&event.what)) {
    (ran->beside ? flops_beside_ : flops_) += ran->flops;
    if (ran->again) recomputed_flops_ += ran->flops;
  }
  const auto* change = std::get_if<MemoryChange>(&event.what);
  if (change == nullptr) return;
  MemoryByCategory& place = change->on_host ? now_.host : now_.device;
  int64_t& total = change->on_host ? host_ : device_;
  int64_t& peak = change->on_host ? host_peak_ : device_peak_;
  place[static_cast<size_t>(change->category)] += change->bytes;
  total += change->bytes;
  if (total <= peak) return;
  peak = total;
  (change->on_host ? peak_.host : peak_.device) = place;
}

namespace {

nlohmann::json to_json(const OperatorEvent& ran) {
  return {{"kind", "operator"},
          {"name", ran.name},
          {"shape", ran.shape},
          {"dtype", comm::dtype_name(ran.dtype)},
          {"flops", ran.flops},
          {"read_bytes", ran.read_bytes},
          {"written_bytes", ran.written_bytes},
          {"again", ran.again},
          {"beside", ran.beside},
          {"crosses", ran.crosses},
          {"on_host", ran.on_host},
          {"causal", ran.causal}};
}

nlohmann::json to_json(const CollectiveEvent& call) {
  nlohmann::json json = call;
  json.erase("sequence");
  json["kind"] = "collective";
  return json;
}

nlohmann::json to_json(const WaitEvent&) { return {{"kind", "wait"}}; }
nlohmann::json to_json(const HostReadEvent& read) { return {{"kind", "host_read"}, {"bytes", read.bytes}}; }

nlohmann::json to_json(const MemoryChange& change) {
  return {{"kind", "memory"}, {"category", to_string(change.category)}, {"bytes", change.bytes}, {"on_host", change.on_host}};
}

nlohmann::json to_json(const ActionEvent& action) { return {{"kind", action.begins ? "action" : "end"}, {"action", action.action}}; }

}  // namespace

nlohmann::json to_json(const Events& events) {
  nlohmann::json list = nlohmann::json::array();
  const auto after = dependencies(events);
  for (size_t i = 0; i < events.size(); ++i) {
    nlohmann::json json = std::visit([](const auto& what) { return to_json(what); }, events[i].what);
    json["index"] = i;
    json["reads"] = events[i].reads;
    json["writes"] = events[i].writes;
    json["after"] = after[i];
    list.push_back(std::move(json));
  }
  return list;
}

}  // namespace tessera::plan
