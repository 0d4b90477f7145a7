#pragma once

#include <string>

#include "tessera/comm/algorithms/message_plan.h"

namespace tessera::comm {

/// The plan as a picture (SVG): a column per rank, time downwards, an arrow per message with the chunks it carries. Thick arrows are added to what the receiver
/// holds, thin ones take its place; colors are those of the first chunk. Clear for up to about ten ranks and a dozen steps.
std::string svg_of(const MessagePlan& plan);

/// The steps below one another, a column per rank: ">1 [0]" sends chunk 0 to rank 1, "<2 [3]" receives chunk 3 from rank 2, "<2 +[3]" receives it and adds.
std::string table_of(const MessagePlan& plan);

}  // namespace tessera::comm
