#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/verify/difference.h"
#include "tessera/verify/verify.h"

// The conclusion names where to look first, so it asks in the order in which a step computes: an output that parts makes all that follows part. Only what is
// not explained by something before it is named.

namespace tessera {

namespace {

constexpr size_t kMostListed = 10;

nlohmann::json number(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(); }

nlohmann::json summary(const DifferenceList& list) {
  const auto& worst = list.worst();
  nlohmann::json json{{"difference", number(worst.value)}, {"bound", list.bound}, {"within", list.within()}, {"step", worst.step}, {"rank", worst.rank}};
  if (!worst.name.empty()) json["tensor"] = worst.name;
  if (!worst.note.empty()) json["note"] = worst.note;
  return json;
}

nlohmann::json routing_json(const RoutingComparison& routing) {
  const auto [router, share] = routing.worst();
  nlohmann::json json{{"tokens", routing.tokens},
                      {"flipped", routing.flipped},
                      {"unseen", routing.unseen},
                      {"margin", number(routing.margin)},
                      {"bound", routing.bound},
                      {"given_up", number(share)},
                      {"given_up_bound", routing.share_bound}};
  if (!router.empty()) json["router"] = router;
  return json;
}

nlohmann::json outputs_json(const OutputComparison& outputs) {
  nlohmann::json first;
  if (outputs.first) {
    const auto& at = *outputs.first;
    first = {{"module", at.module},  {"step", at.step}, {"micro_batch", at.micro_batch}, {"rank", at.rank}, {"difference", number(at.value)},
             {"allowed", at.allowed}};
    if (!at.note.empty()) first["note"] = at.note;
  }
  return {{"compared", outputs.compared}, {"bit_equal", outputs.bit_equal},      {"beyond_budget", outputs.beyond_budget},
          {"unseen", outputs.unseen},     {"difference", number(outputs.worst)}, {"first_parting", first}};
}

// Gradients and weights of one parameter in one row.
nlohmann::json tensors_json(const VerifyReport& report) {
  nlohmann::json rows = nlohmann::json::array();
  const auto of = [](const DifferenceList& list, const std::string& name) {
    const auto found = std::find_if(list.each.begin(), list.each.end(), [&](const Difference& each) { return each.name == name; });
    return found == list.each.end() ? nlohmann::json() : number(found->value);
  };
  for (const auto& gradient : report.gradients.each) {
    rows.push_back({{"name", gradient.name}, {"gradient", number(gradient.value)}, {"weight", of(report.weights, gradient.name)}});
  }
  return rows;
}

std::string mesh_text(const VerifyReport& report) {
  std::string text;
  for (const auto& [axis, size] : report.mesh) {
    if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", axis, size);
  }
  return text.empty() ? "one rank" : text;
}

std::string digits(double value) { return value == 0 ? "0" : fmt::format("{:.2e}", value); }

std::string place(const Difference& worst) {
  if (worst.value == 0) return "bit for bit";
  return fmt::format("{}{}step {}, rank {}{}{}", worst.name, worst.name.empty() ? "" : ", ", worst.step, worst.rank, worst.note.empty() ? "" : ": ",
                     worst.note);
}

std::string row(const char* what, const DifferenceList& list) {
  return fmt::format("  {:<16}{:>12}{:>12}  {:<5}{}\n", what, digits(list.worst().value), digits(list.bound), list.within() ? "ok" : "FAR",
                     place(list.worst()));
}

std::string others(const char* what, const DifferenceList& list) {
  std::vector<Difference> beyond;
  std::copy_if(list.each.begin(), list.each.end(), std::back_inserter(beyond), [&](const Difference& each) { return each.value > list.bound; });
  if (beyond.size() < 2) return {};
  std::string out = fmt::format("\n{} of {} tensors beyond the bound, in the order of the model:\n", beyond.size(), list.each.size());
  for (size_t i = 0; i < std::min(beyond.size(), kMostListed); ++i) out += fmt::format("  {:<10}{:>10}  {}\n", what, digits(beyond[i].value), place(beyond[i]));
  if (beyond.size() > kMostListed) out += "  ...\n";
  return out;
}

std::string module_name(const Parting& at) { return at.module.empty() ? "the model itself" : at.module; }

std::string outputs_row(const char* what, const OutputComparison& outputs) {
  std::string out = fmt::format("  {:<16}{:>12}{:>12}  ", what, digits(outputs.worst), outputs.first ? digits(outputs.first->allowed) : "");
  if (outputs.first) {
    const auto& at = *outputs.first;
    out += fmt::format("FAR  first at {}, step {}, micro-batch {}, rank {}{}\n", module_name(at), at.step, at.micro_batch, at.rank,
                       at.note.empty() ? ": " + digits(at.value) : ": " + at.note);
  } else {
    out += fmt::format("ok   {} compared, {} bit for bit\n", outputs.compared, outputs.bit_equal);
  }
  if (outputs.beyond_budget > 0) out += fmt::format("{:<46}{} more differ in bits, and were too many to keep\n", "", outputs.beyond_budget);
  if (outputs.unseen > 0) out += fmt::format("{:<46}{} were given out by no rank, or not as a whole\n", "", outputs.unseen);
  return out;
}

std::string routing_rows(const RoutingComparison& routing) {
  std::string out;
  if (routing.tokens > 0) {
    const auto [router, share] = routing.worst();
    out += fmt::format("  {:<16}{:>12}{:>12}  {:<5}{} of {} tokens routed otherwise\n", "routing", digits(routing.margin), digits(routing.bound),
                       routing.margin <= routing.bound ? "ok" : "FAR", routing.flipped, routing.tokens);
    out += fmt::format("  {:<16}{:>12}{:>12}  {:<5}{}\n", "scores given up", digits(share), digits(routing.share_bound),
                       share <= routing.share_bound ? "ok" : "FAR", share > 0 ? router : "none");
  }
  if (routing.unseen > 0) {
    out += fmt::format("  {:<16}{:>24}  {} tokens not compared: no rank shows their choices, or not a whole micro-batch's\n",
                       routing.tokens > 0 ? "" : "routing", "", routing.unseen);
  }
  return out;
}

/// The tensor beyond the bound whose largest difference is in the earliest step; of several, the first of the model.
std::string first_beyond(const DifferenceList& list) {
  const Difference* first = nullptr;
  for (const auto& each : list.each) {
    if (each.value > list.bound && (first == nullptr || each.step < first->step)) first = &each;
  }
  return first->name;
}

std::string conclusion(const VerifyReport& report) {
  if (report.passed()) {
    if (report.forward.first || report.backward.first) return "verified: within the bounds, although a module parts from one device by more than rounding\n";
    return report.bit_for_bit ? "verified: bit for bit\n" : "verified: within the bounds\n";
  }
  if (!report.routing.within()) return "NOT the same run: routers choose other experts by more than rounding; look at their scores first\n";
  if (report.skipped == report.steps) return "NOT compared: every step was skipped, as its gradients overflowed; lower precision.loss_scale\n";
  if (report.forward.first) return fmt::format("NOT the same run: look at {} first\n", module_name(*report.forward.first));
  if (report.backward.first) {
    return fmt::format("NOT the same run: forward agrees; look at what turns the output of {} into the loss\n", module_name(*report.backward.first));
  }
  if (!report.initial_weights.within())
    return fmt::format("NOT the same run: it begins with other weights, first in {}\n", first_beyond(report.initial_weights));
  if (!report.gradients.within() && report.scaled && std::isinf(report.gradients.worst().value) && report.gradients.worst().note.empty()) {
    return fmt::format(
        "NOT compared: the gradient of {} overflowed in fp16 on one side alone, as it may where ranks hold parts of one sum; lower precision.loss_scale, and "
        "look "
        "again\n",
        first_beyond(report.gradients));
  }
  if (!report.gradients.within() && report.unscaled) {
    return fmt::format(
        "NOT the same run: all modules agree, and the gradient of {} does not; in fp16 small gradients underflow: set precision.loss_scale, such as 4096, and "
        "look again\n",
        first_beyond(report.gradients));
  }
  if (!report.gradients.within()) {
    constexpr double fp32_bound = 1e-5, doubtful = 4;
    const bool narrow = report.gradients.bound > fp32_bound && report.gradients.worst().value < doubtful * report.gradients.bound;
    return fmt::format(
        "NOT the same run: all modules agree; look at how gradients are added up over micro-batches and ranks, first that of {}{}\n",
        first_beyond(report.gradients),
        narrow ? "; what cancels may be off by so much in a narrow format: a fault is there with precision.compute = fp32 and reduce = fp32, too" : "");
  }
  if (report.weights.within()) return "NOT the same run: all modules, gradients and weights agree; look at the sums of losses and of the norm\n";
  return fmt::format("NOT the same run: all modules and gradients agree; look at the update, first that of {}\n", first_beyond(report.weights));
}

}  // namespace

const Difference& DifferenceList::worst() const {
  static const Difference none;
  const auto found = std::max_element(each.begin(), each.end(), [](const Difference& a, const Difference& b) { return a.value < b.value; });
  return found == each.end() ? none : *found;
}

double GivenUp::share() const { return relative(scores, spread); }

std::pair<std::string, double> RoutingComparison::worst() const {
  std::pair<std::string, double> worst;
  for (const auto& [router, gave] : given_up) {
    if (worst.first.empty() || gave.share() > worst.second) worst = {router, gave.share()};
  }
  return worst;
}

bool VerifyReport::passed() const {
  return skipped < steps && initial_weights.within() && losses.within() && gradient_norms.within() && gradients.within() && weights.within() &&
         routing.within();
}

nlohmann::json to_json(const VerifyReport& report) {
  nlohmann::json mesh;
  for (const auto& [axis, size] : report.mesh) mesh[axis] = size;
  return {{"passed", report.passed()},
          {"mesh", mesh},
          {"ranks", report.ranks},
          {"first_step", report.first_step},
          {"steps", report.steps},
          {"skipped", report.skipped},
          {"bit_for_bit", report.bit_for_bit},
          {"initial_weights", summary(report.initial_weights)},
          {"loss", summary(report.losses)},
          {"grad_norm", summary(report.gradient_norms)},
          {"gradients", summary(report.gradients)},
          {"weights", summary(report.weights)},
          {"routing", routing_json(report.routing)},
          {"forward", outputs_json(report.forward)},
          {"backward", outputs_json(report.backward)},
          {"tensors", tensors_json(report)}};
}

std::string to_string(const VerifyReport& report) {
  std::string out = fmt::format("{} against one device: {} step{} from step {}, {} micro-batches each\n\n", mesh_text(report), report.steps,
                                report.steps == 1 ? "" : "s", report.first_step, report.micro_batches);
  out += fmt::format("  {:<16}{:>12}{:>12}\n", "", "largest", "bound");
  out += row("initial weights", report.initial_weights);
  out += outputs_row("outputs", report.forward);
  out += outputs_row("their gradients", report.backward);
  out += routing_rows(report.routing);
  out += row("loss", report.losses);
  out += row("gradients", report.gradients);
  out += row("gradient norm", report.gradient_norms);
  out += row("updated weights", report.weights);
  if (report.skipped > 0) out += fmt::format("  {} of {} steps skipped by both: their gradients overflowed at the loss scale\n", report.skipped, report.steps);
  out += others("gradient", report.gradients);
  out += others("weight", report.weights);
  return out + "\n" + conclusion(report);
}

}  // namespace tessera
