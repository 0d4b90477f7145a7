#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/backends/by_device.h"
#include "tessera/comm/backends/device_places.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/backends/host_identity.h"
#include "tessera/comm/backends/staged.h"
#include "tessera/comm/backends/two_level/two_level.h"
#include "tessera/comm/failure.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

// Which engine a group gets follows from who is on which host, and on which device. All members read the same from the store and so decide alike; the groups
// inside are formed in the same order on all of them, for forming one waits for its members.

namespace tessera::comm {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

Store under(const std::string& prefix, const Store& store) { return c10::make_intrusive<c10d::PrefixStore>(prefix, store); }

// Some members of a group as a group; `members` are group ranks, `self` among them.
GroupInfo part_of(const GroupInfo& group, const std::string& where, const std::vector<int>& members) {
  GroupInfo part{.name = group.name + " " + where, .size = static_cast<int>(members.size()), .timeout = group.timeout};
  for (const int member : members) {
    if (member == group.rank) part.rank = static_cast<int>(part.ranks.size());
    part.ranks.push_back(group.world_rank(member));
  }
  return part;
}

using MakeFactory = std::unique_ptr<EngineFactory> (*)(const EngineOptions& options);

std::map<c10::DeviceType, MakeFactory>& device_engines() {
  static std::map<c10::DeviceType, MakeFactory> engines{
#ifdef TESSERA_CUDA
      {at::kCUDA, make_nccl_factory},
#endif
  };
  return engines;
}

/// The device of a type that this rank computes on: what it says, or else the one of its number among those of its host.
std::optional<at::Device> device_of(const EngineOptions& options, c10::DeviceType type) {
  const int devices = num_devices(type);
  if (devices == 0 || (options.device && options.device->type() != type)) return std::nullopt;
  if (options.device && options.device->has_index()) return options.device;
  return at::Device(type, static_cast<c10::DeviceIndex>(options.environment.local_rank % devices));
}

std::string name_of(c10::DeviceType type) { return c10::DeviceTypeName(type, /*lower_case=*/true); }

// In the world's numbers.
std::string name_members(const GroupInfo& group, std::vector<int> members) {
  for (int& member : members) member = group.world_rank(member);
  std::ranges::sort(members);
  return name_ranks(members);
}

class AutoFactory : public EngineFactory {
 public:
  AutoFactory(const EngineOptions& options, std::optional<c10::DeviceType> required)
      : options_(options), required_(required), self_{.host = options.host.empty() ? host_identity() : options.host}, shm_(make("shm")) {
    const std::string machine = options.host.empty() ? machine_identity() : options.host;
    for (const auto& [type, make_engines] : device_engines()) {
      const auto device = device_of(options, type);
      if (!device) continue;
      self_.devices[name_of(type)] = device_place(machine, *device, device_bus_id(*device));
      devices_.emplace(type, *device);
    }
  }

  std::shared_ptr<Engine> connect(const GroupInfo& group, const Store& store) override {
    const std::vector<Whereabouts> members = members_of(group, *store);
    std::vector<c10::DeviceType> types;  // all of a refusal before anything is formed
    for (const auto& [type, make_engines] : device_engines()) {
      if (meets_on(type, group, members)) types.push_back(type);
    }
    auto engine = connect_cpu(group, members, store);
    for (const c10::DeviceType type : types)
      engine = make_by_device_engine(std::move(engine), type, factory_of(type).connect(group, under(name_of(type), store)));
    return engine;
  }

 private:
  /// Whether the group's tensors on devices of `type` go from device to device: as all its members decide.
  bool meets_on(c10::DeviceType type, const GroupInfo& group, const std::vector<Whereabouts>& members) {
    std::vector<std::string> places;
    for (const auto& member : members) {
      const auto place = member.devices.find(name_of(type));
      places.push_back(place == member.devices.end() ? std::string() : place->second);
    }
    const DeviceMeeting meeting = meet_on_devices(places);
    if (meeting.possible()) return true;
    if (required_ == type) refuse(type, group, meeting);
    if (!meeting.members.empty() && group.world_rank(group.rank) == 0 && said_.insert(type).second) {
      log().info("group {}: {}, so tensors on {} devices go by way of the host", group.name,
                 meeting.without.empty() ? name_members(group, meeting.sharing) + " share a device" : name_members(group, meeting.without) + " have none",
                 name_of(type));
    }
    return false;
  }

  [[noreturn]] void refuse(c10::DeviceType type, const GroupInfo& group, const DeviceMeeting& meeting) const {
    const std::string knob = detail::concat("comm.backend = ", options_.backend), device = name_of(type);
    require(meeting.without.empty(), knob, ": ", name_members(group, meeting.without), meeting.without.size() == 1 ? " computes" : " compute", " on no ",
            device, " device, and it moves tensors from device to device; set run.device = ", device, " on every rank, or comm.backend = auto");
    throw ConfigError(detail::concat(knob, ": ", name_members(group, meeting.sharing),
                                     " share a device, and each rank of a group has to have one of its own; start ",
                                     "as many ranks on a host as it has devices, give each its own (run.device = ", device,
                                     "), or set comm.backend = auto, which moves tensors of ranks that share one by way of the host"));
  }

  EngineFactory& factory_of(c10::DeviceType type) {
    auto& factory = by_device_[type];
    if (!factory) {
      auto options = options_;
      options.device = devices_.at(type);
      factory = device_engines().at(type)(options);
    }
    return *factory;
  }

  std::shared_ptr<Engine> connect_cpu(const GroupInfo& group, const std::vector<Whereabouts>& members, const Store& store) {
    std::vector<std::string> names;
    for (const auto& member : members) names.push_back(member.host);
    const Hosts hosts(names);
    if (hosts.count() == 1) return shm_->connect(group, under("shm", store));
    if (hosts.count() == hosts.size()) return gloo().connect(group, under("gloo", store));

    const int host = hosts.host(group.rank), place = hosts.local_rank(group.rank);
    const auto local = part_of(group, "on one host", hosts.members(host));
    const auto column = hosts.even() ? place : 0;
    const bool crosses = hosts.even() || place == 0;
    const auto across = part_of(group, "between hosts", crosses ? hosts.across(column) : std::vector{group.rank});
    auto all = group;
    all.name += " over the network";
    return stage_on_host(group, make_two_level_engine(group, {.hosts = hosts,
                                                              .local = form(*shm_, local, under("local/" + std::to_string(host), store)),
                                                              .across = form(gloo(), across, under("across/" + std::to_string(column), store)),
                                                              .flat = form(gloo(), all, under("flat", store))}));
  }

  static Group form(EngineFactory& factory, const GroupInfo& info, const Store& store) {
    return Group(info, info.size == 1 ? nullptr : factory.connect(info, store));
  }

  // Every member says where it is in every group, for it cannot know who has not heard it yet.
  std::vector<Whereabouts> members_of(const GroupInfo& group, c10d::Store& store) {
    const auto key = [](int member) { return "whereabouts/" + std::to_string(member); };
    store.set(key(group.rank), self_.text());
    std::vector<Whereabouts> members;
    for (int member = 0; member < group.size; ++member) {
      auto known = known_.find(group.world_rank(member));
      if (known == known_.end()) known = known_.emplace(group.world_rank(member), Whereabouts::read(store.get_to_str(key(member)))).first;
      members.push_back(known->second);
    }
    return members;
  }

  std::unique_ptr<EngineFactory> make(const std::string& backend) const {
    auto options = options_;
    options.backend = backend;
    return make_factory(options);
  }

  EngineFactory& gloo() {
    if (!gloo_) gloo_ = make("gloo");
    return *gloo_;
  }

  EngineOptions options_;
  std::optional<c10::DeviceType> required_;
  Whereabouts self_;
  std::map<c10::DeviceType, at::Device> devices_;  // of this rank
  std::unique_ptr<EngineFactory> shm_;
  std::unique_ptr<EngineFactory> gloo_;  // a device and its thread: made where there is a second host
  std::map<c10::DeviceType, std::unique_ptr<EngineFactory>> by_device_;
  std::map<int, Whereabouts> known_;  // by rank of the world
  std::set<c10::DeviceType> said_;
};

}  // namespace

void register_device_engine(c10::DeviceType type, MakeFactory make) { device_engines()[type] = make; }

std::unique_ptr<EngineFactory> make_auto_factory(const EngineOptions& options, std::optional<c10::DeviceType> required) {
  return std::make_unique<AutoFactory>(options, required);
}

}  // namespace tessera::comm
