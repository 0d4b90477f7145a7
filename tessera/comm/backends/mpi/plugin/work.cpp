#include "tessera/comm/backends/mpi/plugin/work.h"

#include <ATen/core/grad_mode.h>
#include <sched.h>

#include "tessera/core/error.h"

// MPI moves data only while somebody is inside one of its functions. Who waits asks again and again: at first without a pause, for small messages are there
// soon, then giving the core away, for large ones need the asking, and at last with naps. A look at the store, where failures are told, costs a round trip and
// is taken rarely.

namespace tessera::comm::mpi {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

namespace {

const std::string kBroken = "broken";

// What a rank may spin before it lets others run: longer than a small message takes, shorter than a time slice.
// While it yields it still moves data: large messages advance by nothing else.
constexpr std::chrono::microseconds kSpin = 20us, kYield = 100ms;
constexpr std::chrono::microseconds kNap = 50us, kLongestNap = 1000us;  ///< between looks of one who waits for long
constexpr auto kGlance = 100ms;                                         ///< between looks at the store
constexpr auto kBackground = 100us;                                     ///< between looks of the background thread

}  // namespace

void Soundness::break_up() noexcept {
  broken_ = true;
  runtime_.give_up();
  try {
    store_->set(kBroken, std::to_string(rank_));
  } catch (...) {  // without the store nobody can be told
  }
}

std::string Soundness::broken_elsewhere() const noexcept {
  try {
    if (store_->check({kBroken})) return detail::concat("rank ", store_->get_to_str(kBroken), " of the group ended its connections");
  } catch (const std::exception& error) {
    return detail::concat("the store of the group is gone: ", error.what());
  }
  return {};
}

// One thread at a time: MPI must not be asked about a request by two.
bool MpiWork::advance() {
  const std::lock_guard one(advancing_);
  if (c10d::Work::isCompleted()) return true;
  std::exception_ptr error;
  int done = 0;
  try {
    {
      const auto lock = soundness_->runtime().lock();
      check(MPI_Testall(static_cast<int>(order_.requests.size()), order_.requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
    }
    if (!done) return false;
    if (order_.unpack) {
      const at::NoGradGuard no_grad;
      order_.unpack();
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (!done) {  // one request failed, and MPI may still own the tensors of the others
    soundness_->runtime().give_up();
    Progress::shared().keep(std::move(order_));
  }
  order_ = {};
  finish(error);
  return true;
}

bool MpiWork::isCompleted() { return advance(); }

void MpiWork::give_up(const std::string& cause) {
  soundness_->runtime().give_up();
  Progress::shared().add(c10::intrusive_ptr<MpiWork>::reclaim_copy(this));
  throw std::runtime_error(cause);
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  const auto longest = timeout == kNoTimeout ? timeout_ : timeout;
  const auto start = Clock::now();
  auto glance = start + kGlance;
  // Who waits drives MPI on; the longer it takes, the more of the core it leaves to others.
  for (auto nap = kNap; !advance();) {
    const auto now = Clock::now();
    if (now - start < kSpin) continue;
    if (soundness_->broken_here()) give_up("aborted by this rank");
    if (now - start > longest) give_up(detail::concat("timed out after ", longest.count(), " ms"));
    if (now >= glance) {
      if (const auto cause = soundness_->broken_elsewhere(); !cause.empty()) give_up(cause);
      glance = now + kGlance;
    }
    if (now - start < kYield) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
  return c10d::Work::wait(kNoTimeout);
}

Progress& Progress::shared() {
  static Progress progress;
  return progress;
}

Progress::~Progress() { end(); }

void Progress::end() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Progress::add(c10::intrusive_ptr<MpiWork> work) {
  const std::lock_guard lock(mutex_);
  works_.push_back(std::move(work));
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  changed_.notify_one();
}

void Progress::keep(Order order) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(order));
}

void Progress::serve() {
  std::vector<c10::intrusive_ptr<MpiWork>> works;
  for (std::unique_lock lock(mutex_);;) {
    changed_.wait(lock, [&] { return ending_ || !works_.empty(); });
    if (ending_) return;
    works = works_;
    lock.unlock();
    for (const auto& work : works) work->advance();
    works.clear();
    std::this_thread::sleep_for(kBackground);
    lock.lock();
    std::erase_if(works_, [](const auto& work) { return work->c10d::Work::isCompleted(); });
  }
}

}  // namespace tessera::comm::mpi
