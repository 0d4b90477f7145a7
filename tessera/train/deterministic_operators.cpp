#include "tessera/train/deterministic_operators.h"

#include <mutex>

#include <ATen/Context.h>

namespace tessera {

namespace {

struct OperatorSettings {
  bool deterministic, only_warns, fills;

  static OperatorSettings now() {
    const at::Context& context = at::globalContext();
    return {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(), context.deterministicFillUninitializedMemory()};
  }
  void set() const {
    at::globalContext().setDeterministicAlgorithms(deterministic, only_warns);
    at::globalContext().setDeterministicFillUninitializedMemory(fills);
  }
};

/// Ranks may be threads of one process.
struct SettingUsers {
  std::mutex mutex;
  int count = 0;
  OperatorSettings before{};
};

SettingUsers& setting_users() {
  static SettingUsers all;
  return all;
}

}  // namespace

DeterministicOperators::DeterministicOperators() {
  const std::lock_guard lock(setting_users().mutex);
  if (setting_users().count++ > 0) return;
  setting_users().before = OperatorSettings::now();
  // No result reads memory that nobody has written: to fill it would be traffic for nothing.
  OperatorSettings{.deterministic = true, .only_warns = false, .fills = false}.set();
}

DeterministicOperators::~DeterministicOperators() {
  const std::lock_guard lock(setting_users().mutex);
  if (--setting_users().count == 0) setting_users().before.set();
}

}  // namespace tessera
