#pragma once

#include <string>
#include <vector>

#include "tessera/comm/flight_record/reader.h"

/// How verdicts and tables call things.
namespace tessera::comm::flight {

/// "rank 4", "ranks 4, 6-9": sorted, three or more in a row as a range.
std::string rank_list(std::vector<int> ranks);

/// "61 s"; "250 ms" below one second.
std::string seconds_text(double seconds);

/// "[32, 768] float32"; empty where the call carries no data.
std::string data_text(const RecordedCall& call);

/// "all_gather #1234 of tp", "send #7 to rank 3 of pp (tag 2)". Ranks are those of the world.
std::string call_text(const RecordedCall& call, const RecordedGroup& group);

/// The call that meets a message at its other end, which `rank` sent or waits for: of "send #7 to rank 3" by rank 2, "recv #7 from rank 2".
std::string counterpart_text(const RecordedCall& message, const RecordedGroup& group, int rank);

/// " (layers.17.mlp)"; empty where the site is not known.
std::string site_text(const std::string& site);

}  // namespace tessera::comm::flight
