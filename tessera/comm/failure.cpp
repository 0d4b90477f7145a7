#include "tessera/comm/failure.h"

#include <algorithm>
#include <system_error>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "tessera/core/system_reason.h"

namespace tessera::comm {
namespace {

// What Gloo and torch put around the cause: where in their sources, and advice.
std::string plain(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (const auto end = text.find("] "); text.starts_with("[") && end != std::string::npos) {
    const auto location = text.substr(0, end);
    if (location.find(".cc:") != std::string::npos || location.find(".cpp:") != std::string::npos) text.erase(0, end + 2);
  }
  if (const auto advice = text.find(". This is typically caused by"); advice != std::string::npos) text.resize(advice);
  while (text.ends_with(' ') || text.ends_with('.')) text.pop_back();
  return text;
}

}  // namespace

std::string message_of(const std::exception_ptr& error) {
  std::string text;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& torch_error) {
    text = torch_error.what_without_backtrace();
  } catch (const std::system_error& refused) {
    text = reason_of(refused);
  } catch (const std::exception& other) {
    text = other.what();
  } catch (...) {
    text = "an exception of unknown type";
  }
  return plain(std::move(text));
}

std::string seconds_since(std::chrono::steady_clock::time_point start) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

std::string format_ranks(const std::vector<int>& ranks, size_t shortest_run) {
  std::string text;
  for (size_t begin = 0, end; begin < ranks.size(); begin = end) {
    for (end = begin + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    if (end - begin < shortest_run) end = begin + 1;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[begin]);
    if (end - begin > 1) text += "-" + std::to_string(ranks[end - 1]);
  }
  return text;
}

std::string name_ranks(const std::vector<int>& ranks, size_t shortest_run) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + format_ranks(ranks, shortest_run);
}

}  // namespace tessera::comm
