#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <sstream>

#include <unistd.h>

#include "tessera/comm/backends/shm/core/session.h"

// How a group's members come to share one segment. Rank 0 offers a file without a name through its folder in /proc, so that nothing is left however a rank
// ends. Whether peers may open that (another user, a hidden /proc) only trying tells: all answer before anybody relies on it, and one "no access" moves
// everyone to a file with a name, which lives until all have mapped it. That answer is the whole group's: a rank that went on alone would wait for ever.

namespace tessera::comm::shm {
namespace {

/// Segments that ranks of this process have made, so that others in it use the same mapping.
class Registry {
 public:
  uint64_t add(const std::shared_ptr<Segment>& segment) {
    const std::lock_guard lock(mutex_);
    std::erase_if(segments_, [](const auto& entry) { return entry.second.expired(); });
    segments_.emplace(++last_, segment);
    return last_;
  }
  std::shared_ptr<Segment> find(uint64_t token) {
    const std::lock_guard lock(mutex_);
    const auto found = segments_.find(token);
    return found == segments_.end() ? nullptr : found->second.lock();
  }
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::weak_ptr<Segment>> segments_;
};

// What rank 0 tells the others, and what each answers.
const std::string kOffer = "offer", kAnswer = "answer", kShared = "shared", kNoAccess = "no access", kElsewhere = "elsewhere";

std::string answer_key(int rank) { return "answer/" + std::to_string(rank); }

struct Offer {
  pid_t pid = 0;
  uint64_t token = 0;
  std::string host, path;

  std::string text() const {
    std::ostringstream out;
    out << pid << '\n' << token << '\n' << host << '\n' << path;
    return out.str();
  }
  static Offer parse(const std::string& text) {
    std::istringstream in(text);
    Offer offer;
    in >> offer.pid >> offer.token;
    in.ignore();
    std::getline(in, offer.host);
    std::getline(in, offer.path);
    return offer;
  }
};

void construct_controls(const Segment& segment, const SegmentMap& layout) {
  new (segment.data()) Soundness;
  for (size_t rank = 0; rank < layout.n; ++rank) new (segment.data() + layout.rank_controls + rank * sizeof(RankControl)) RankControl;
  for (size_t pair = 0; pair < layout.n * layout.n; ++pair) new (segment.data() + layout.ring_controls + pair * sizeof(RingControl)) RingControl;
}

}  // namespace

std::shared_ptr<Segment> Session::meet(Directory& directory) { return rank() == 0 ? found(directory) : follow(directory); }

// Rank 0: makes the segment, offers it, and says what comes of it. Whatever fails here, the others are told.
std::shared_ptr<Segment> Session::found(Directory& directory) {
  try {
    const auto make = [&](Segment made) {
      auto segment = std::make_shared<Segment>(std::move(made));
      segment->reserve(0, layout_.large_slots);
      construct_controls(*segment, layout_);
      return segment;
    };
    auto segment = make(Segment::create(layout_.total, membership_.folder));
    const auto token = Registry::instance().add(segment);
    directory.set(kOffer, Offer{::getpid(), token, membership_.host, segment->path()}.text());
    bool accessible = true;
    std::string elsewhere;
    for (int rank = 1; rank < size(); ++rank) {
      const auto answer = directory.get(answer_key(rank));
      accessible &= answer != kNoAccess;
      if (answer.starts_with(kElsewhere)) elsewhere += (elsewhere.empty() ? "rank " : ", rank ") + std::to_string(rank) + answer.substr(kElsewhere.size());
    }
    if (!elsewhere.empty()) {
      throw Failure("comm.backend = shm needs all ranks of a group on one host; rank 0 is on " + membership_.host_name + ", but " + elsewhere +
                    "; use backend gloo, or auto, which joins hosts");
    }
    if (accessible) {
      directory.set(kAnswer, kShared);
      return segment;
    }
    peers_read_files_ = false;
    segment = make(Segment::create_named(layout_.total, membership_.folder));
    directory.set(kAnswer, segment->path());
    return segment;
  } catch (const Failure& failure) {
    directory.set(kOffer, std::string("0\n0\n\n"));
    directory.set(kAnswer, std::string("failed: ") + failure.what());
    throw;
  }
}

std::shared_ptr<Segment> Session::follow(Directory& directory) {
  const auto offer = Offer::parse(directory.get(kOffer));
  std::shared_ptr<Segment> segment;
  if (offer.pid == 0) {  // rank 0 could not make it; its answer says why
  } else if (offer.host != membership_.host) {
    directory.set(answer_key(rank()), kElsewhere + " on " + membership_.host_name);
  } else {
    if (offer.pid == ::getpid()) segment = Registry::instance().find(offer.token);
    try {
      if (membership_.files_are_hidden) throw Failure("hidden");
      if (!segment) segment = std::make_shared<Segment>(Segment::open(offer.path, layout_.total, membership_.folder));
      directory.set(answer_key(rank()), kShared);
    } catch (const Failure&) {
      directory.set(answer_key(rank()), kNoAccess);
    }
  }
  const auto answer = directory.get(kAnswer);
  if (answer.starts_with("failed: ")) throw Failure(answer.substr(8));
  if (answer == kShared && !segment) {  // as this one never said that it could read it
    throw Failure("rank 0 takes its segment for one that all share, which rank " + std::to_string(rank()) +
                  " cannot read: its answer is not to this group; has another group met under the same keys of the store?");
  }
  if (answer == kShared) return segment;
  peers_read_files_ = false;
  return std::make_shared<Segment>(Segment::open(answer, layout_.total, membership_.folder));
}

// Signs in and waits for the others; then nothing of the group has a name any more.
void Session::enter(Directory& directory) {
  const auto self = ProcessId::self();
  auto& own = control(rank());
  own.pid = self.pid;
  own.start_time = self.start_time;
  own.presence.store(Presence::Joined, std::memory_order_release);
  directory.set("joined/" + std::to_string(rank()), "1");
  bool all_here = true;
  for (int peer = 0; peer < size(); ++peer) {
    try {
      if (peer != rank()) directory.get("joined/" + std::to_string(peer));
    } catch (...) {  // peers that have seen this rank join would wait for it
      abort();
      throw;
    }
    const bool here = control(peer).pid == self.pid;
    all_here &= here;
    if (!here) watches_.emplace_back(peer, ProcessId{control(peer).pid, control(peer).start_time});
  }
  one_process_ = all_here && !membership_.as_processes;
  if (rank() == 0) segment_->unlink();
}

}  // namespace tessera::comm::shm
