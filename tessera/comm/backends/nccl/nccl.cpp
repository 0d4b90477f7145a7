#include <mutex>

#include <ATen/Context.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/comm/backends/c10d_engine.h"
#include "tessera/comm/backends/environment_defaults.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Left to itself ProcessGroupNCCL's watchdog ends the process by std::terminate where a call fails or times out, after it has waited a minute for dumps. The
// world's watch asks for failures, says them in one sentence and breaks the group off, so the watchdog only has to keep what it finds. Once, and for good:
// ranks may be threads, of which one forms a group while another does.
void calm_watchdogs() {
  static std::once_flag once;
  std::call_once(once, [] {
    set_environment_defaults({{{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, "0"},
                              {{"TORCH_NCCL_RETHROW_CUDA_ERRORS"}, "0"},
                              {{"TORCH_NCCL_DUMP_ON_TIMEOUT"}, "0"},
                              {{"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}, "0"}});
  });
}

// ProcessGroupNCCL runs each collective on a stream of the group, behind an event of the caller's stream, and its Work::wait puts an event in the caller's
// stream: the host goes on. Which is what is wanted here, so that there is nothing to add but the options.
class NcclFactory : public EngineFactory {
 public:
  explicit NcclFactory(const EngineOptions& options) {
    // Memory and kernels of this rank are on its own device; a communicator is made for the device that is current when the first collective runs.
    c10::cuda::set_device(options.device.value().index());
    calm_watchdogs();
  }

  std::shared_ptr<Engine> connect(const GroupInfo& group, const c10::intrusive_ptr<c10d::Store>& store) override {
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = group.timeout;
    options->group_name = group.name;
    return std::make_shared<C10dEngine>(c10::make_intrusive<c10d::ProcessGroupNCCL>(store, group.rank, group.size, std::move(options)));
  }
};

}  // namespace

std::string nccl_missing(const Environment&) {
  const char* way_out = "; use a torch built with CUDA on a machine with a GPU, or set comm.backend = auto";
  if (!at::hasCUDA()) return detail::concat("this torch has no CUDA", way_out);
  if (c10::cuda::device_count() == 0) return detail::concat("this machine has no CUDA device", way_out);
  return {};
}

std::unique_ptr<EngineFactory> make_nccl_factory(const EngineOptions& options) { return std::make_unique<NcclFactory>(options); }

}  // namespace tessera::comm
