#include "tessera/pipeline/stage.h"

#include <map>

#include "tessera/core/error.h"

namespace tessera::pipeline {

Crossings chain(int stages) {
  Crossings crossings;
  for (int stage = 0; stage + 1 < stages; ++stage) crossings.push_back({.from = stage, .to = stage + 1});
  return crossings;
}

void check_crossings(const Crossings& crossings, int stages) {
  std::map<int, std::map<int, int>> inputs;  // of each stage: how often each is named
  for (const auto& crossing : crossings) {
    invariant(0 <= crossing.from && crossing.from < crossing.to && crossing.to < stages, "a value crosses from stage ", crossing.from, " to stage ",
              crossing.to, " of ", stages);
    ++inputs[crossing.to][crossing.input];
  }
  for (const auto& [stage, numbers] : inputs) {
    int next = 0;
    for (const auto& [input, times] : numbers) {
      invariant(input == next++ && times == 1, "stage ", stage, " has input ", input, times == 1 ? " and none before it" : " twice");
    }
  }
}

}  // namespace tessera::pipeline
