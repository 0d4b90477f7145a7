#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <nlohmann/json_fwd.hpp>

#include "tessera/comm/world.h"

namespace tessera::comm {

struct Call;

/// One collective of one rank. Shape, elements and bytes are of the whole: the reduced tensor, the gathered result, what is scattered or dealt.
struct Record {
  int64_t sequence = 0;  ///< of this rank, over all groups, from 0
  std::string op;        ///< an Operation's name
  std::string group;     ///< the group's name
  int group_size = 1;
  int group_rank = 0;
  int peer = -1;  ///< root, destination or source, in the group
  int tag = 0;
  std::vector<int64_t> shape;
  int64_t elements = 0;
  int64_t bytes = 0;
  int64_t sent_bytes = 0;  ///< what this rank sends at least (traffic.h; for uneven all_to_all its own rows)
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::string site;  ///< innermost CallSite
  bool operator==(const Record&) const = default;
};

/// All fields by name; dtype as float32, bfloat16, ...
void to_json(nlohmann::json& json, const Record& record);

/// What a rank's recording groups write into. Thread-safe.
class Recorder {
 public:
  void add(Record record);  ///< gives it the next sequence number
  std::vector<Record> records() const;
  /// Forgets all records, and starts counting anew.
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<Record> records_;
};

/// Logs each call and hands it on to `inner`.
std::shared_ptr<Engine> make_record_engine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, std::shared_ptr<Engine> inner);

/// Logs each call and computes nothing: outputs keep their bits, and all is done at once, on meta and CPU tensors alike. While a call lasts it holds as
/// much memory as `scratch_bytes` says that a real world would; without it, none.
using ScratchBytes = std::function<int64_t(const Call& call, const GroupInfo& group)>;
std::shared_ptr<Engine> make_dry_engine(std::shared_ptr<Recorder> recorder, const GroupInfo& group, ScratchBytes scratch_bytes = {});

/// A decorator that records every group of a world.
Decorator recording(std::shared_ptr<Recorder> recorder);

}  // namespace tessera::comm
