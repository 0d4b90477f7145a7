#pragma once

#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/simulate.h"

namespace tessera::schedules {

struct Lowering {
  /// Computations of the receiver by which a receive is begun ahead of where its sender is done: the message then travels behind them. Each costs room for one
  /// more message. 0: for engines that wait in their receives; see below.
  int ahead = 1;
  /// ReduceGrad behind the last backward of each stage, or before each of its updates where there are such.
  bool reduce_gradients = false;
  /// Unshard and Reshard, so that at most this many stages of a rank are gathered, those that it needs next; 0: none are added.
  int unsharded_stages = 0;
  /// Decides in which order messages of different ranks come: that of the simulated step.
  Costs costs{};
};

/// The schedule with the messages that it needs, one for each output and gradient that another rank uses, and whatever else `lowering` asks for. Computations
/// keep their order. A send stands behind the computation whose result it carries, and before every later one of its rank.
///
/// All messages of all ranks are put into one order, in which each rank meets its own. With `ahead` = 0 the lists are safe on engines where a send waits for
/// its receive and a receive for its send: the one order is a way for all ranks to the end. Receives begun ahead keep the order of the messages between two
/// ranks, which is all that engines need whose messages run beside computation (NCCL on a stream of each pair, Gloo, MPI with requests). Throws InternalError
/// for a schedule that has messages already, or cannot run to its end.
Schedule lower(const Schedule& schedule, const Lowering& lowering = {});

}  // namespace tessera::schedules
