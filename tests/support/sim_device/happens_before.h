#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

// What is ordered after what on the simulated device, by vector clocks (Mattern 1988; as a race detector, FastTrack, Flanagan and Freund 2009). Each stream
// counts its pieces of work. A stream's clock says how much of every stream is certain to be done when its next piece begins; events carry clocks from one
// stream to another, and the host has a clock of its own, which every new piece of work inherits. Two accesses to the same bytes of which one writes, and
// neither of which knows of the other, are a race, whichever of them happened to run first. Knows nothing of libtorch.
//
// All threads of the process share one host clock: what one thread waits for counts for the others, for they may have told each other.

namespace tessera::sim {

/// For each stream, how many of its pieces of work are known to be done, and when the last of them is, in a time that only the devices have: a piece of work
/// begins when its stream knows all that it waits for to be done, and takes what Takes says. Hosts take none.
class Clock {
 public:
  uint64_t operator[](size_t stream) const { return stream < at_.size() ? at_[stream] : 0; }
  double seconds() const { return seconds_; }
  void raise(size_t stream, uint64_t to);
  void take(double seconds) { seconds_ += seconds; }
  void join(const Clock& other);
  void join_order(const Clock& other);  ///< but not its time
  bool knows(const Clock& other) const;

 private:
  std::vector<uint64_t> at_;
  double seconds_ = 0;
};

/// While it lives, each piece of work that this thread asks for takes so long; otherwise a microsecond.
class Takes {
 public:
  explicit Takes(double seconds);
  ~Takes();
  Takes(const Takes&) = delete;
  Takes& operator=(const Takes&) = delete;

 private:
  double before_;
};

/// One use of bytes [begin, end) by the `sequence`th piece of work of a stream.
struct Access {
  uintptr_t begin = 0, end = 0;
  int stream = 0;
  uint64_t sequence = 0;
  bool writes = false;
  const char* by = "";  ///< the operator; lives for ever
};

/// The uses of a piece of memory that later ones have to be held against. Its allocator keeps it.
struct History {
  std::vector<Access> accesses;
};

struct Report {
  enum class Kind : uint8_t {
    Race,        ///< two streams, nothing between them
    FreedInUse,  ///< memory goes back to its stream while another one still uses it
    HostRace,    ///< the host uses pinned memory that a copy still uses
    HostAccess,  ///< the host uses device memory
    Overrun,     ///< somebody wrote behind the end of device memory
  };
  Kind kind = Kind::Race;
  std::string text{};
  std::string first{}, second{};  ///< the operators
};

/// The streams of the process and what is known of their order. Thread-safe.
class HappensBefore {
 public:
  static HappensBefore& get();

  /// The number of a stream, given when it is first asked for.
  int stream(int device, int64_t id);
  std::string name(int stream);

  /// A new piece of work on the stream, after all that its stream and the host know of. Returns its sequence number.
  uint64_t launch(int stream);
  void access(History& history, const Access& now, const char* memory);
  void allocated(History& history, uintptr_t begin, uintptr_t end, int stream, const char* by);
  /// `recorded`: streams that the memory was said to be used on, behind which it is given out again.
  void freed(History& history, int stream, const std::vector<int>& recorded);

  Clock record(int stream);                     ///< an event
  void block(int stream, const Clock& event);   ///< the stream's next work waits for it
  void host_waits(const Clock& clock);          ///< counts as a synchronisation, unless the host knows all of it
  void host_waits_device(int device);           ///< so does this
  void host_waits_everything();                 ///< and this: for the end of a test
  bool is_known_to_host(const Access& access);  ///< to be done
  bool is_known_to_host(const Clock& event);    ///< to have happened
  /// Of the accesses that the host does not know to be done, a write if there is one; null: none.
  const Access* pending(const History& history);

  void report(Report report);
  std::vector<Report> take_reports();
  /// How often the host waited, by operator ("aten::_local_scalar_dense", "synchronize").
  std::map<std::string, int64_t> take_host_syncs();

  /// What this thread's synchronisations are counted as.
  class SyncReason {
   public:
    explicit SyncReason(const char* reason);
    ~SyncReason();
    SyncReason(const SyncReason&) = delete;
    SyncReason& operator=(const SyncReason&) = delete;

   private:
    const char* before_;
  };

 private:
  struct Stream {
    int device;
    int64_t id;
    Clock clock{};
    uint64_t host_waits = 0;            ///< of which the clock knows
    std::vector<Access> left_in_use{};  ///< accesses to memory that was freed to this stream, not ordered before it then
  };
  bool is_ordered(const Access& before, int stream) const;
  std::recursive_mutex mutex_;
  std::vector<Stream> streams_;
  std::map<std::pair<int, int64_t>, int> numbers_;  ///< by device and id
  Clock host_;
  uint64_t host_waits_ = 0;
  std::vector<Report> reports_;
  std::map<std::string, int64_t> host_syncs_;
};

/// The same text, for ever, once a text.
const char* intern(const std::string& text);

}  // namespace tessera::sim
