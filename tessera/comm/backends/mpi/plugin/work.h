#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/backends/mpi/plugin/runtime.h"

namespace tessera::comm::mpi {

/// Whether a group still works. MPI cannot break a connection, so members tell each other through the store, at which those who wait long look.
class Soundness {
 public:
  Soundness(Runtime& runtime, c10::intrusive_ptr<c10d::Store> store, int rank) : runtime_(runtime), store_(std::move(store)), rank_(rank) {}

  /// Ends the waits of all members.
  void break_up() noexcept;
  bool broken_here() const { return broken_; }
  /// Who broke it, as the store says; empty where nobody did. Costs a round trip.
  std::string broken_elsewhere() const noexcept;
  Runtime& runtime() const { return runtime_; }

 private:
  Runtime& runtime_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::atomic<bool> broken_ = false;
};

/// What MPI is asked for, and what has to live until it is done.
struct Order {
  std::vector<MPI_Request> requests;
  std::vector<at::Tensor> tensors;    ///< read or written by MPI
  std::shared_ptr<void> arguments{};  ///< counts and displacements
  std::function<void()> unpack{};     ///< once it is done
};

class Progress;

/// Requests of MPI in flight. MPI moves them on only inside its own functions: whoever waits calls them, and in between the thread of Progress.
class MpiWork : public c10d::Work {
 public:
  MpiWork(std::shared_ptr<Soundness> soundness, Order order, std::chrono::milliseconds timeout)
      : soundness_(std::move(soundness)), timeout_(timeout), order_(std::move(order)) {}

  bool isCompleted() override;
  /// Polls: spins, yields, then sleeps between looks. Throws after the group's timeout, or where the group is broken; MPI still owns the tensors then, so they
  /// are handed to `Progress` for good.
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  bool advance();
  [[noreturn]] void give_up(const std::string& cause);
  friend class Progress;

  const std::shared_ptr<Soundness> soundness_;
  const std::chrono::milliseconds timeout_;
  std::mutex advancing_;
  Order order_;
};

/// Moves on what nobody waits for right now. The thread starts with the first work and sleeps while there is none.
class Progress {
 public:
  ~Progress();
  /// Ends its thread; nothing is moved on any more.
  void end();
  void add(c10::intrusive_ptr<MpiWork> work);
  /// For good: what MPI still owns, though its call has failed.
  void keep(Order order);
  /// Of the process.
  static Progress& shared();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<c10::intrusive_ptr<MpiWork>> works_;
  std::vector<Order> kept_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm::mpi
