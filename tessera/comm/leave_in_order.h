#pragma once

namespace tessera::comm {

/// While alive on a thread: collectives that it destroys without waiting, as after a pass that failed, are left in order. Where the engine works on a stream of
/// a device, what the current stream is asked for afterwards comes behind them, so that their memory can be used for something else. The host does not wait.
class LeaveInOrder {
 public:
  LeaveInOrder();
  ~LeaveInOrder();
  LeaveInOrder(const LeaveInOrder&) = delete;
  LeaveInOrder& operator=(const LeaveInOrder&) = delete;
  static bool now();
};

}  // namespace tessera::comm
