#include "tessera/checkpoint/saver.h"

#include <utility>

#include "tessera/checkpoint/save_steps.h"
#include "tessera/checkpoint/staging.h"
#include "tessera/core/error.h"

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
}

void Saver::save(const CheckpointState& state) {
  wait();
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
  writer_ = std::thread(
      [this, plan, staging] { attempt(plan->step, [&] { finish_save(*plan, group_, [&] { return write_staged(*plan, group_.rank(), *staging); }); }); });
  try {
    for (const size_t i : plan->dealt[group_.rank()]) {
      if (!staging->put(state.tensors[i].tensor)) break;
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
  outcomes_.push_back(std::move(outcome));
}

void Saver::prune_after(SaveOutcome& outcome) const {
  if (group_.rank() != 0 || options_.keep == 0) return;
  try {
    prune(options_.dir, options_.keep);
  } catch (const std::exception& error) {
    outcome.remark = error.what();
  }
}

void Saver::wait() {
  if (writer_.joinable()) writer_.join();
  if (broken_) std::rethrow_exception(std::exchange(broken_, nullptr));
}

std::vector<SaveOutcome> Saver::outcomes() {
  const std::lock_guard lock(mutex_);
  return std::exchange(outcomes_, {});
}

}  // namespace tessera::checkpoint
