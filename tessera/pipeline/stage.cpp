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
    require(crossing.to < stages, "pipeline: a value crosses from stage ", crossing.from, " to stage ", crossing.to, ", and the schedule has ", stages,
            "; make one of as many stages as the model has");
    invariant(0 <= crossing.from && crossing.from < crossing.to, "a value crosses from stage ", crossing.from, " to stage ", crossing.to);
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
