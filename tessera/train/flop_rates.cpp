#include "tessera/train/flop_rates.h"

#include "tessera/models/flops.h"

namespace tessera {

std::map<std::string, double> flop_rates(const Config& config, const StepFlops& flops, int64_t tokens, double step_s, int ranks) {
  constexpr double kTera = 1e12;
  const double device_seconds = step_s * ranks;
  const double model = model_flops_per_token(config.model, config.data.seq_len) * static_cast<double>(tokens) / device_seconds / kTera;
  const double hardware = flops.run / device_seconds / kTera;
  std::map<std::string, double> rates = {{"tflops_per_device", model}, {"hardware_tflops_per_device", hardware}, {"recomputed_flops", flops.recomputed}};
  if (const double peak = config.log.peak_tflops; peak > 0) {
    rates["mfu"] = model / peak;
    rates["hfu"] = hardware / peak;
  }
  return rates;
}

}  // namespace tessera
