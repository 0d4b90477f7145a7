#include "tessera/comm/flight_record/reader.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <numeric>
#include <optional>
#include <span>

#include "tessera/core/error.h"

// The file may be cut, damaged, or still written to. Nothing in it is believed: each number is held against the file's size, the table or the world before it
// becomes an index, a length or an allocation, and is refused by its offset. Only an entry that is not published under its number is passed over without a
// word: its writer had not come that far.

namespace tessera::comm::flight {
namespace {

constexpr uint64_t kMostCalls = 2'000'000;
constexpr int32_t kMostRanks = 1 << 20;     // more is damage
constexpr uint64_t kMostMembers = 1 << 24;  // of all groups of a record together

/// The bytes of a file, which is refused by offset.
class Bytes {
 public:
  explicit Bytes(const std::filesystem::path& file) : name_(file.string()) {
    std::error_code ignored;  // a folder opens like a file, and has a length
    std::ifstream in(file, std::ios::binary);
    require(in.good() && std::filesystem::is_regular_file(file, ignored), name_, ": cannot be read; give a folder of flight records");
    in.seekg(0, std::ios::end);
    data_.resize(static_cast<size_t>(in.tellg()));
    in.seekg(0);
    in.read(data_.data(), static_cast<std::streamsize>(data_.size()));
    require(in.good(), name_, ": cannot be read to its end, offset ", in.gcount());
  }

  size_t size() const { return data_.size(); }

  template <class... Parts>
  void check(bool condition, uint64_t offset, const Parts&... parts) const {
    if (!condition) throw ConfigError(detail::concat(name_, ": not a flight record, or damaged: offset ", offset, ": ", parts...));
  }

  const char* range(uint64_t offset, uint64_t bytes, const char* what) const {
    check(offset <= size() && bytes <= size() - offset, size(), "the file ends inside ", what, " of ", bytes, " bytes at ", offset);
    return data_.data() + offset;
  }

  template <class T>
  T read(uint64_t offset, const char* what) const {
    T value;
    std::memcpy(&value, range(offset, sizeof value, what), sizeof value);
    return value;
  }

 private:
  std::string name_;
  std::vector<char> data_;
};

template <size_t N>
std::string text(const std::array<char, N>& from) {
  return {from.data(), strnlen(from.data(), N)};
}

Header read_header(const Bytes& bytes) {
  const auto header = bytes.read<Header>(0, "the header");
  bytes.check(header.magic == kMagic, 0, "does not begin with ", std::string_view(kMagic.data(), kMagic.size()));
  bytes.check(header.version == 1 || header.version == kVersion, offsetof(Header, version), "version ", header.version, "; this build reads 1 and ", kVersion);
  bytes.check(header.entry_bytes == sizeof(Entry), offsetof(Header, entry_bytes), "entries of ", header.entry_bytes, " bytes");
  bytes.check(header.world_size >= 1 && header.world_size <= kMostRanks && header.rank >= 0 && header.rank < header.world_size, offsetof(Header, rank), "rank ",
              header.rank, " of ", header.world_size);
  bytes.check(header.groups_used <= header.groups_bytes, offsetof(Header, groups_used), header.groups_used, " bytes used of ", header.groups_bytes);
  bytes.range(header.groups_offset, header.groups_bytes, "the table of groups");
  bytes.check(header.capacity >= 1 && header.capacity <= bytes.size() / sizeof(Entry), offsetof(Header, capacity), "a ring of ", header.capacity,
              " entries in ", bytes.size(), " bytes");
  bytes.range(header.entries_offset, header.capacity * sizeof(Entry), "the ring of entries");
  return header;
}

RecordedGroup read_group(const Bytes& bytes, uint64_t offset, const GroupHeader& header, int world_size) {
  const uint64_t members_bytes = uint64_t{header.members} * sizeof(int32_t);
  bytes.check(header.bytes % 8 == 0 && sizeof header + members_bytes + header.name_bytes <= header.bytes, offset, "a group of ", header.members,
              " members and a name of ", header.name_bytes, " bytes in ", header.bytes);
  bytes.check(header.size >= 1 && header.size <= world_size && (header.members == 0 || header.members == static_cast<uint32_t>(header.size)), offset,
              "a group of ", header.size, " in a world of ", world_size);
  RecordedGroup group{.name = {}, .members = std::vector<int>(header.size), .collectives = header.collectives};
  const char* at = bytes.range(offset + sizeof header, members_bytes + header.name_bytes, "a group");
  if (header.members == 0) {
    std::iota(group.members.begin(), group.members.end(), 0);
  } else {
    static_assert(sizeof(int) == sizeof(int32_t));
    std::memcpy(group.members.data(), at, members_bytes);
  }
  bytes.check(std::ranges::all_of(group.members, [&](int rank) { return rank >= 0 && rank < world_size; }), offset, "a member outside the world of ",
              world_size);
  group.name.assign(at + members_bytes, header.name_bytes);
  return group;
}

std::vector<RecordedGroup> read_groups(const Bytes& bytes, const Header& header) {
  std::vector<RecordedGroup> groups;
  uint64_t members = 0;
  const uint64_t end = header.groups_offset + header.groups_used;
  for (uint64_t offset = header.groups_offset; offset < end;) {
    const auto group = bytes.read<GroupHeader>(offset, "a group");
    bytes.check(group.bytes >= sizeof group && group.bytes <= end - offset, offset, "a group of ", group.bytes, " bytes");
    groups.push_back(read_group(bytes, offset, group, header.world_size));
    members += groups.back().members.size();  // a group that holds everyone is 32 bytes in the file
    bytes.check(members <= kMostMembers, offset, "more than ", kMostMembers, " members of groups");
    offset += group.bytes;
  }
  return groups;
}

RecordedCall to_call(const Entry& entry, uint64_t number, auto seconds) {
  RecordedCall call{.number = number, .sequence = entry.sequence, .group = entry.group, .state = entry.state};
  call.op = text(entry.op);
  call.shape.assign(entry.shape.begin(), entry.shape.begin() + std::min<size_t>(entry.dims, kMostDims));
  call.more_dims = entry.dims > kMostDims;
  call.dtype = text(entry.dtype);
  call.reduction = text(entry.reduction);
  call.bytes = entry.bytes;
  call.peer = entry.peer;
  call.tag = entry.tag;
  call.site = text(entry.site);
  call.entered_s = seconds(entry.entered_ns);
  call.left_s = entry.left_ns == 0 ? 0 : seconds(entry.left_ns);
  call.on_device = entry.on_device != 0;
  return call;
}

void check_entry(const Bytes& bytes, uint64_t offset, const Entry& entry, const std::vector<RecordedGroup>& groups) {
  bytes.check(entry.group < groups.size(), offset + offsetof(Entry, group), "group ", entry.group, " of ", groups.size());
  const int members = static_cast<int>(groups[entry.group].members.size());
  const auto op = text(entry.op);
  const int first_peer = op == "send" || op == "recv" ? 0 : -1;  // a message has one, a collective need not
  bytes.check(entry.peer >= first_peer && entry.peer < members, offset + offsetof(Entry, peer), op, " with peer ", entry.peer, " in a group of ", members);
  bytes.check(entry.state >= State::Entered && entry.state <= State::Begun, offset + offsetof(Entry, state), "state ", static_cast<uint32_t>(entry.state));
}

std::vector<std::filesystem::path> record_files(const std::filesystem::path& dir) {
  std::error_code error;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const auto name = entry.path().filename().string();
    constexpr std::string_view prefix = "rank_", suffix = ".bin";
    if (name.starts_with(prefix) && name.ends_with(suffix)) files.push_back(entry.path());
  }
  require(!error, dir.string(), ": ", error.message(), "; give the folder of a run's flight records, such as log.dir/record");
  require(!files.empty(), dir.string(), ": holds no flight record (rank_*.bin); give the folder of a run's flight records, such as log.dir/record");
  std::ranges::sort(files);
  return files;
}

void keep_newest_world(std::vector<RankRecord>& ranks) {
  const auto newest = std::ranges::max_element(ranks, {}, &RankRecord::started_s);
  if (newest == ranks.end()) return;
  std::erase_if(ranks, [size = newest->world_size](const RankRecord& record) { return record.world_size != size; });
}

}  // namespace

RankRecord read_record(const std::filesystem::path& file, uint64_t most_calls) {
  const Bytes bytes(file);
  const auto header = read_header(bytes);
  // Subtracted as doubles, since damaged times may be further apart than 64 bits tell; right ones stay exact to some ns.
  const auto seconds = [&](int64_t ns) {
    return 1e-9 * (static_cast<double>(ns) - static_cast<double>(header.started_ns)) + 1e-9 * static_cast<double>(header.started_wall_ns);
  };
  RankRecord record{.rank = header.rank, .world_size = header.world_size, .pid = header.pid, .restart_count = header.restart_count};
  record.host = text(header.host);
  record.started_s = seconds(header.started_ns);
  record.seen_s = seconds(header.seen_ns);
  record.closed = header.closed_ns != 0;
  record.place = text(header.place);
  record.groups = read_groups(bytes, header);
  record.total_calls = header.next;
  const uint64_t kept = std::min({header.next, header.capacity, most_calls});
  for (uint64_t number = header.next - kept; number < header.next; ++number) {
    const uint64_t offset = header.entries_offset + number % header.capacity * sizeof(Entry);
    const auto entry = bytes.read<Entry>(offset, "an entry");
    if (entry.published != number + 1) continue;  // its writer was ended, or had not come that far
    check_entry(bytes, offset, entry, record.groups);
    record.calls.push_back(to_call(entry, number, seconds));
    record.seen_s = std::max({record.seen_s, record.calls.back().entered_s, record.calls.back().left_s});
  }
  return record;
}

Records read_records(const std::filesystem::path& dir, Damage damage) {
  const auto files = record_files(dir);
  Records records;
  for (const auto& file : files) {
    try {
      records.ranks.push_back(read_record(file, std::max<uint64_t>(1, kMostCalls / files.size())));
    } catch (const ConfigError&) {
      if (damage == Damage::Refuse) throw;
    }
  }
  keep_newest_world(records.ranks);
  std::ranges::sort(records.ranks, {}, &RankRecord::rank);
  if (records.ranks.empty()) return records;
  records.world_size = records.ranks.front().world_size;
  std::vector<bool> present(records.world_size);
  for (const auto& record : records.ranks) present[record.rank] = true;
  for (int rank = 0; rank < records.world_size; ++rank) {
    if (!present[rank]) records.missing.push_back(rank);
  }
  return records;
}

}  // namespace tessera::comm::flight
