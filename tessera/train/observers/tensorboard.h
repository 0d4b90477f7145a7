#pragma once

#include <filesystem>
#include <string_view>

#include "tessera/train/observer.h"
#include "tessera/train/observers/record_file.h"

namespace tessera {

/// Scalars for TensorBoard: `log_dir/tensorboard/events.out.tfevents.<time>.<host>.<pid>` with train/loss, train/grad_norm, train/lr, train/tokens_per_s,
/// train/step_s, train/peak_bytes, memory/peak_<category>, memory/current_<category>, train/<extra>, validation/loss and validation/bits_per_byte. A run from
/// step 1 removes older event files; a resumed one adds a file whose restart mark makes TensorBoard drop what the older ones say of its first step and later.
/// Those of another run (RunRecord) are set aside with their folder, tensorboard.another-run-1, aloud; of another line of this one, the mark is where they
/// part. Throws ConfigError where log_dir cannot be written. An event that is lost later is said aloud (RecordFile), and ends a run whose log is strict.
class TensorBoard : public Observer {
 public:
  explicit TensorBoard(bool strict = false) : out_(strict) {}
  void on_start(const RunInfo& run) override;
  void after_step(const StepResult& result) override;
  void after_validation(const ValidationResult& result) override;
  void on_end(const RunEnd& end) override;

 private:
  void write(std::string_view event);
  RecordFile out_;
};

}  // namespace tessera
