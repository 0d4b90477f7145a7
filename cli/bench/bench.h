#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// `tessera bench`: what its commands share. Flags are values, so that the files that measure need not see the parser of the command line.
namespace tessera::cli {

/// What every one of them takes.
struct BenchFlags {
  std::string interface{};
  std::string device = "auto";  ///< as run.device
  std::optional<int> nproc{};
  double seconds = 0.5;
  int64_t iterations = 0;
  std::string svg{};
  std::string rows{};  ///< a file that takes the rows instead of standard output: how copies answer
  bool json = false;
};

struct BenchCommFlags : BenchFlags {
  std::vector<std::string> ops{"all_reduce"};
  std::vector<std::string> backends{"auto"};
  std::vector<std::string> algorithms{"engine"};
  std::vector<std::string> bytes{"1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M"};
  std::string dtype = "fp32";
  std::string buffers = "plain";
  std::string table{};
};

struct BenchTpFlags : BenchFlags {
  std::vector<int64_t> hidden{256, 512, 1024, 2048};
  int64_t tokens = 256;
  int64_t head_dim = 64;
  bool sequence_parallel = false;
  bool overlap = false;
  std::string dtype = "fp32";
  std::string backend = "auto";
};

struct BenchPpFlags : BenchFlags {
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t tokens = 128;
  int64_t global_size = 32;
  std::vector<std::string> schedules{"naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"};
  std::vector<int64_t> micro_batches{1, 2, 4, 8, 16, 32};
  std::vector<int64_t> hidden{128, 256, 512, 1024};
  std::string backend = "auto";
};

struct BenchCpFlags : BenchFlags {
  std::vector<int64_t> lengths{2048, 8192};
  int64_t heads = 8;
  int64_t kv_heads = 8;
  int64_t head_dim = 64;
  std::vector<std::string> methods{"ring", "ring_no_overlap", "all_gather", "ulysses"};
  std::string dtype = "fp32";
  std::string backend = "auto";
};

struct BenchDeviceFlags : BenchFlags {
  int threads = 0;
  std::string output{}, from{}, svg{};
};

/// Each checks its flags (ConfigError), measures, shows, and returns the exit code.
int bench_comm(const BenchCommFlags& flags);
int bench_tp(const BenchTpFlags& flags);
int bench_pp(const BenchPpFlags& flags);
int bench_cp(const BenchCpFlags& flags);
int bench_device(const BenchDeviceFlags& flags);

/// Refuses limits that measure nothing.
void check_limits(double seconds, int64_t iterations);
/// Ranks to measure with: --nproc, or those of the launcher, or 2. Throws ConfigError for fewer, and where flag and launcher contradict each other.
int bench_ranks(const std::optional<int>& nproc);
/// Refuses a name that is none of `known`, with the nearest one.
void require_known(const char* knob, const std::string& name, const std::vector<std::string>& known);
[[noreturn]] void refuse_unknown(const char* knob, const std::string& name, const std::vector<std::string>& known);

/// Refuses what starting copies over one of `backends` would need and this host lacks (mpirun).
void check_launchers(const std::vector<std::string>& backends);

/// Runs `arguments` of this command in `nproc` copies on this host, under mpirun for the backend mpi, else started by us. The first rank writes its rows into
/// the file that the flag --rows, which is added, names; `rows` are the lines of that file. Returns the exit code: where it is not 0, the copies failed or
/// refused and their reason is on standard error already. Under mpirun, what a copy says is thrown as ConfigError or CommError.
int rows_of_copies(int nproc, const std::string& backend, std::vector<std::string> arguments, std::vector<std::string>& rows);

/// Writes `text` into a file that a flag names, or refuses.
void write_file(const char* knob, const std::string& name, const std::string& text);

}  // namespace tessera::cli
