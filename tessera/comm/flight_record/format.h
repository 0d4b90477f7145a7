#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

/// Bytes of a flight record (docs/formats.md), little endian: header, table of groups, ring of entries. Written through a shared mapping, so
/// that what a process wrote survives its end, `kill -9` included; what a machine's crash loses is what its kernel had not written back.
namespace tessera::comm::flight {

inline constexpr std::array<char, 8> kMagic{'T', 'S', 'R', 'F', 'L', 'G', 'H', 'T'};
inline constexpr uint32_t kVersion = 2;  ///< 1 had no on_device and no state Begun; it is read as well
inline constexpr size_t kMostDims = 8;

/// Where a call stands. Entered, InFlight, Waiting and Begun become Completed or Failed; anything else is damage.
enum class State : uint32_t {
  Entered = 1,    ///< the engine is being called
  InFlight = 2,   ///< that returned; nobody waits. On a device: it is enqueued, and the device has not come to it
  Waiting = 3,    ///< the caller waits for it
  Completed = 4,  ///< done, as seen by the caller
  Failed = 5,     ///< an error, a timeout or an abort
  Begun = 6,      ///< on a device, which has come to it
};

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t entry_bytes;     ///< sizeof(Entry)
  uint64_t capacity;        ///< entries of the ring
  uint64_t groups_offset;   ///< of the table of groups
  uint64_t groups_bytes;    ///< that are reserved for it
  uint64_t entries_offset;  ///< of the ring
  int32_t rank;             ///< in the world
  int32_t world_size;
  int32_t pid;
  int32_t restart_count;
  std::array<char, 64> host;                ///< ends with a zero
  int64_t started_wall_ns;                  ///< since 1970, at the instant of started_ns
  int64_t started_ns;                       ///< of the monotonic clock, as all times below and in entries
  alignas(64) uint64_t next;                ///< calls so far: call i lies in slot i % capacity
  alignas(64) int64_t seen_ns;              ///< the process was alive; renewed several times a second
  int64_t closed_ns;                        ///< the record was closed in order; 0 before
  uint64_t groups_used;                     ///< bytes of the table of groups in use
  alignas(64) std::array<char, 128> place;  ///< what it is at between its calls (Group::set_place); empty: nothing in particular
};
static_assert(sizeof(Header) == 448 && offsetof(Header, next) == 192 && offsetof(Header, seen_ns) == 256 && offsetof(Header, place) == 320);

/// One group, followed by `members` ranks of the world (int32), `name_bytes` of name, and zeros up to a multiple of 8.
struct GroupHeader {
  uint32_t bytes;  ///< of all this
  int32_t rank;    ///< of this process in the group
  int32_t size;
  uint32_t members;  ///< size, or 0 for the ranks 0 .. size - 1
  uint32_t name_bytes;
  uint32_t reserved;
  uint64_t collectives;  ///< that this rank has entered so far; messages do not count
};
static_assert(sizeof(GroupHeader) == 32);

/// One call. Texts end with a zero.
struct Entry {
  uint64_t published;  ///< 1 + number of the call over all groups of the rank; 0 while the slot is being written
  uint64_t sequence;   ///< from 1: among the group's collectives, or among the messages of one direction to one peer under one tag
  int64_t entered_ns;
  int64_t left_ns;  ///< 0 unless completed or failed
  int64_t bytes;    ///< of the whole, as shape
  std::array<int64_t, kMostDims> shape;
  State state;
  uint32_t group;  ///< number of the group in the table, from 0
  int32_t peer;    ///< root, destination or source, in the group; -1 where there is none
  int32_t tag;
  uint32_t dims;       ///< may be more than shape has room for
  uint32_t on_device;  ///< 1: its tensors lie on an accelerator, and the host goes on behind it
  std::array<char, 16> op;
  std::array<char, 16> dtype;
  std::array<char, 8> reduction;  ///< sum, product, min, max; empty where nothing is reduced
  std::array<char, 88> site;      ///< comm::CallSite; of one that is too long, the end
};
static_assert(sizeof(Entry) == 256);

}  // namespace tessera::comm::flight
