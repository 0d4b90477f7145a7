#include "tessera/checkpoint/saver.h"

#include <system_error>
#include <utility>

#include "tessera/checkpoint/fault_point.h"
#include "tessera/checkpoint/save_steps.h"
#include "tessera/checkpoint/staging.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/system_reason.h"

// A save has two halves: who writes what is agreed with the caller waiting, what takes long goes to a thread. Between them stands a queue of bounded size;
// whichever side fails stops it, or the other would wait for ever. Two kinds of failure are kept apart: a full disk is news, which the caller may live with,
// while a lost peer or a bug of ours must end the run.

namespace tessera::checkpoint {
namespace {

/// The second half of an asynchronous save, on the writer's thread. Where the file cannot be written, the thread that copies need not wait for it.
WrittenFile write_staged(const SavePlan& plan, int rank, Staging& staging) {
  try {
    RankFile file(plan, rank);
    while (auto chunk = staging.take()) file.write(chunk->bytes());
    return file.finish();
  } catch (...) {
    staging.stop();
    throw;
  }
}

}  // namespace

Saver::Saver(SaverOptions options, comm::Group group) : options_(std::move(options)), group_(std::move(group)) {}

Saver::~Saver() {
  if (writer_.joinable()) writer_.join();
  if (remover_.joinable()) remover_.join();
}

void Saver::save(const CheckpointState& state) {
  finish_writing();
  if (options_.async) {
    start(state);
  } else {
    attempt(state.step, [&] { checkpoint::save(options_.dir, state, group_); });
  }
  if (broken_) std::rethrow_exception(std::exchange(broken_, nullptr));
}

void Saver::start(const CheckpointState& state) {
  std::shared_ptr<const SavePlan> plan;
  try {
    plan = std::make_shared<const SavePlan>(begin_save(options_.dir, state, group_));
  } catch (...) {
    attempt(state.step, [&] { std::rethrow_exception(std::current_exception()); });
    return;
  }
  const auto staging = std::make_shared<Staging>(options_.staging_bytes);
  try {
    fault_point("start thread", plan->temporary);
    writer_ = std::thread(
        [this, plan, staging] { attempt(plan->step, [&] { finish_save(*plan, group_, [&] { return write_staged(*plan, group_.rank(), *staging); }); }); });
  } catch (const std::system_error& error) {  // the other ranks' threads write, and wait for what this one has
    if (!std::exchange(alone_, true)) log().warn("checkpoint.async: training waits for the disk on rank {}: {}", group_.rank(), reason_of(error));
    return attempt(plan->step, [&] { finish_save(*plan, group_, [&] { return write_values(*plan, group_.rank(), state); }); });
  }
  try {
    for (const size_t i : plan->dealt[group_.rank()]) {
      if (!staging->put(state.values_of(state.tensors[i]))) break;
    }
    staging->finish();
  } catch (...) {
    staging->stop();  // or the writer would wait for the rest for ever
    throw;
  }
}

void Saver::attempt(int64_t step, const std::function<void()>& work) {
  SaveOutcome outcome{.step = step};
  try {
    work();
    options_.known.insert(step);
    prune_after(outcome);
  } catch (const CommError&) {
    broken_ = std::current_exception();
    return;
  } catch (const InternalError&) {
    broken_ = std::current_exception();
    return;
  } catch (const Error& error) {
    outcome.error = error.what();
  } catch (...) {
    broken_ = std::current_exception();
    return;
  }
  const std::lock_guard lock(mutex_);
  last_ = outcome;
  outcomes_.push_back(std::move(outcome));
}

void Saver::prune_after(SaveOutcome& outcome) {
  if (group_.rank() != 0 || options_.keep == 0) return;
  outcome.remark = finish_removing();
  try {
    auto pruned = prune(options_.dir, options_.keep, {.run = options_.run, .known = options_.known, .newest = outcome.step});
    for (const auto& kept : pruned.kept) {
      if (told_.insert(kept).second) outcome.remark += (outcome.remark.empty() ? "" : "; ") + kept + ", and stays as it is";
    }
    if (pruned.gone.empty()) return;
    const auto remove = [this, gone = std::move(pruned.gone)] {
      try {
        remove_pruned(gone);
      } catch (const std::exception& error) {
        not_removed_ = error.what();
      }
    };
    try {
      fault_point("start thread", options_.dir);
      remover_ = std::thread(remove);
    } catch (const std::system_error&) {
      remove();
    }
  } catch (const std::exception& error) {
    outcome.remark = error.what();
  }
}

std::string Saver::finish_removing() {
  if (remover_.joinable()) remover_.join();
  return std::exchange(not_removed_, {});
}

void Saver::finish_writing() {
  if (writer_.joinable()) writer_.join();
  if (broken_) std::rethrow_exception(std::exchange(broken_, nullptr));
}

void Saver::wait() {
  finish_writing();
  const std::string remark = finish_removing();
  const std::lock_guard lock(mutex_);
  if (remark.empty()) return;
  if (outcomes_.empty()) outcomes_.push_back(last_);  // it has been told of already, without what came later
  outcomes_.back().remark = remark;
}

std::vector<SaveOutcome> Saver::outcomes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(outcomes_, {});
}

}  // namespace tessera::checkpoint
