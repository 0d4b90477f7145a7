#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/memory/memory.h"
#include "tessera/plan/dry_run.h"

namespace tessera::plan {

/// Settings changed, and what a dry run says of a step with them.
struct Setting {
  std::vector<std::string> sets;  ///< as `--set` takes them; none: nothing changed
  MemoryByCategory peak{};        ///< of the ranks that need most
  int64_t needed = 0;             ///< of their device, in bytes (needed_bytes)
  int64_t parameters = 0;         ///< elements that they hold
  double flops = 0;               ///< of matrix products, all ranks, with what is computed again
  double sent_bytes = 0;          ///< all ranks
};

/// What find_fit tried.
struct FitSearch {
  Setting now;
  std::vector<Setting> tried{};  ///< in this order
  bool fits = false;             ///< the last one tried does
  bool complete = true;          ///< false: patience ended first
  int64_t limit = 0;             ///< that a setting's dry run had to keep to
  int64_t beyond = 0;            ///< bytes that a run took beyond its plan, which would fit: `limit` leaves as many free
  /// Settings with which a smaller batch.micro_size would be another training run, so that none was tried; empty where there are none.
  std::string bound_to_micro_size{};

  /// The one that fits; else the one of those tried with the smallest peak; null where nothing could be tried.
  const Setting* best() const;
};

/// Changes of settings that need less memory and give the same training run, the cheapest first, without a dry run: zero.stage where there are several data
/// ranks, smaller micro-batches (the batch stays; not where they are part of the objective, or of an update), recompute.mode, a pipeline's schedule, or mesh.pp
/// over the data ranks where each has at least four micro-batches a stage, and all combinations of them. The order is that of a fixed table of prices in
/// fit.cpp: stage 1 sends what plain data parallelism sends, stage 3 half as much again, full recompute adds up to a third of the FLOPs.
std::vector<std::vector<std::string>> cheaper_settings(const Config& config, int world);

/// Of who waits for settings that would fit.
constexpr std::chrono::seconds kFitPatience{20};

/// Tries them by dry run, up to the first that needs `limit` bytes at most, of `allocator` where there is one. Settings that the configuration's rules refuse
/// are passed over. Cost: a dry run each; after `patience` no further one is begun.
/// `seen`: what a run of `config` needed, at the least, and did not get. Where its dry run fits, others count as if they needed as much more than theirs, so
/// that one that frees nothing is none that fits.
FitSearch find_fit(const Config& config, int world, int64_t limit, std::chrono::seconds patience = kFitPatience,
                   const std::optional<DeviceAllocator>& allocator = std::nullopt, int64_t seen = 0);

}  // namespace tessera::plan
