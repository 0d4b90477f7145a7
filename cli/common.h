#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/comm/world.h"
#include "tessera/config/config.h"

namespace tessera::cli {

/// Ranks of this command: those of the launcher that started this process, or else `nproc`. Throws ConfigError where the two contradict each other.
int world_size(int nproc);

/// What `wanted`, a value of run.device, means to this process, or, where it is about to start copies of itself, to the first of them. Throws ConfigError where
/// it, or one of them, would not find its device; it names `key`. Throws it as well where TESSERA_CPU_PRODUCTS asks for what this machine has not.
at::Device device_for(const std::string& wanted, int nproc, const std::string& key = "run.device");

/// Starts `nproc` copies of this very command on this machine, with `more` arguments at the end and `variables` set, and returns the exit code of the whole.
int run_copies(int nproc, const std::vector<std::string>& more = {}, const std::vector<std::pair<std::string, std::string>>& variables = {});

/// To be called before this process launches ranks: from then on what a signal does is the launcher's to say, and how the ranks ended is this command's exit
/// code, however often somebody asks for the end while the launcher is already done.
void leave_signals_to_the_launcher();

/// Refuses a file to write, where one is asked for, in a folder that does not exist or in which nothing can be made, or that is a folder or a device itself, or
/// one of the `inputs` (files, or folders of them) that the command reads: before anything is computed for it. Returns where to write (output_place).
std::string check_output_file(const char* knob, const std::string& file, const std::vector<std::string>& inputs = {});

/// So each of the files that flags ask for, and that none takes another's place.
void check_output_files(const std::vector<std::pair<const char*, std::string>>& outputs, const std::vector<std::string>& inputs = {});

/// What a run keeps in its log.dir, besides the records and checkpoints that are folders.
std::vector<std::filesystem::path> run_files(const std::filesystem::path& log_dir);

/// Adds the timeline of a run, named by its file or the run's folder, and what that run keeps beside it, to what check_output_file protects.
void add_timeline(std::vector<std::string>& inputs, const std::string& from);

/// What a run of that configuration reads by name.
std::vector<std::string> inputs_of(const Config& config);

/// Calls `read`. Throws Error where it runs out of memory: the limit of run.memory_limit_bytes, where there is one, what was in the way, and `smaller`, which
/// would need less, beside what any command can do.
void within_memory(const Config& config, const std::string& smaller, const std::function<void()>& read);

/// Says remarks aloud, on the first rank alone.
void say_once(const std::vector<std::string>& remarks);

/// Why nothing can be written in a folder, an errno; 0: it can. Makes a file in it to see, and removes that.
int problem_of_writing_in(const std::filesystem::path& folder);

/// Brings out what was printed on `out`. Returns how the sentence about it ends where not all of it got there, from "cannot be written" to the way out; empty
/// where it did. To see why, may print one more line end. `done`: what the command has done besides, of which it would refuse a second run; then that is said
/// in place of the way out.
std::string problem_of_output(std::FILE* out, const std::string& done = "");

/// Whether this process is to start copies of itself: several ranks are asked for, and no launcher started it.
bool starts_copies(int nproc);

}  // namespace tessera::cli
