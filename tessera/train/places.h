#pragma once

#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/parameter.h"
#include "tessera/offload/disk_bytes.h"

/// [offload] for parameters, what is added up for them and what updates them: which waits where.
namespace tessera {

enum class WaitingPlace { Device, Host, Disk };

/// Where what belongs to `parameter` waits, as `places`, of the key `key`, says. A pattern names a parameter by its path or that of a module that holds it; of
/// several the one that names the innermost module counts, and of those the one with fewer '*'. Throws ConfigError where two are equal and disagree.
WaitingPlace place_of(const char* key, const ByPattern& places, const nn::NamedParameter& parameter);

/// Refuses a pattern that names none of the model's parameters, naming the nearest path, two that disagree, and one that keeps on the device what no other
/// sends elsewhere. Throws ConfigError.
void check_places(const char* key, const ByPattern& places, const std::vector<nn::NamedParameter>& parameters);

/// The same of all of [offload] that a model is trained with; and slices whose state would wait on the device that they have left. Throws ConfigError.
void check_places(const Config& config, const std::vector<nn::NamedParameter>& parameters);

/// [offload] with patterns of parameters and of state settled on the whole model: each parameter stands in the table under its name, for a stage of a pipeline
/// knows a tied weight by one name alone. Of the modules that a pattern names, `fraction` takes the first. As it is where no pattern is; else builds the model
/// on meta.
OffloadConfig settled_places(const Config& config);

/// Says to stage 3, which computes on `device`, where slices wait; `disk` is told what its file takes.
void place_slices(const Config& config, at::Device device, const DiskBytes& disk, FullyShardOptions& options);

/// Elements of the model that wait alike, and of which training keeps the same.
struct PlacedElements {
  WaitingPlace params = WaitingPlace::Device, optimizer = WaitingPlace::Device;
  bool trained = true;  ///< else frozen beside what [lora] adds: a weight, without gradient or state
  bool expert = false;  ///< of an expert, which mesh.ep deals
  OptimConfig optim;    ///< what updates them: the section, or the group of optim.groups that they are of
  double count = 0;
};

/// A model by what training keeps of it: with what [lora] adds, and without the weights that [quantize] keeps in fewer bits, which are bytes.
struct CountedElements {
  std::vector<PlacedElements> elements;
  double quantized_bytes = 0;  ///< of the whole model
};

/// Lays the model out on meta, which takes milliseconds. Throws ConfigError where a pattern names nothing.
CountedElements count_elements(const Config& config);

}  // namespace tessera
