#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::pipeline {

/// The cut of a chain into `stages` runs, {begin, end} of each, whose most expensive run costs least; of equal cuts that with the shortest first runs. Every
/// run has a link. `costs`: of the links.
std::vector<std::pair<int64_t, int64_t>> split_by_cost(const std::vector<double>& costs, int stages);

/// Where a chain of links is cut into `stages` runs, {begin, end} of each. `names`: of the links, the first to the last. `split` is one of
///   {"auto"}                    as even as it gets, every link counting the same: of 128 links 16 stages have 8 each; the first ones have one more
///   {"3", "5", ...}             how many links each stage has, in order
///   {"layers.4", "layers.8"}    the links that begin the stages after the first
/// Every stage has a link. Throws ConfigError, naming pipeline.split, for more stages than links, counts that do not add up, names that are none (with the
/// nearest), come out of order or make another number of stages.
std::vector<std::pair<int64_t, int64_t>> split_chain(const std::vector<std::string>& names, int stages, const std::vector<std::string>& split);

}  // namespace tessera::pipeline
