#include <map>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/comm/backends/by_device.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/backends/host_identity.h"
#include "tessera/comm/backends/staged.h"
#include "tessera/comm/backends/two_level/two_level.h"
#include "tessera/core/devices.h"

// Which engine a group gets follows from who is on which host. All members read the same from the store and so decide alike; the groups inside are formed in
// the same order on all of them, for forming one waits for its members.

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
  static std::map<c10::DeviceType, MakeFactory> engines;
  return engines;
}

class AutoFactory : public EngineFactory {
 public:
  explicit AutoFactory(const EngineOptions& options) : options_(options), host_(options.host.empty() ? host_identity() : options.host), shm_(make("shm")) {
    // NCCL refuses ranks that share a device, as those of a machine with one have to. (Where each process is shown one of its own, comm.backend = nccl says
    // so.)
    if (has_engine("nccl") && num_devices(at::kCUDA) > 1) by_device_[at::kCUDA] = make("nccl");
    for (const auto& [type, make_engines] : device_engines()) by_device_[type] = make_engines(options);
  }

  std::shared_ptr<Engine> connect(const GroupInfo& group, const Store& store) override {
    auto engine = connect_cpu(group, store);
    for (const auto& [type, factory] : by_device_) {
      engine = make_by_device_engine(std::move(engine), type, factory->connect(group, under(c10::DeviceTypeName(type, /*lower_case=*/true), store)));
    }
    return engine;
  }

 private:
  std::shared_ptr<Engine> connect_cpu(const GroupInfo& group, const Store& store) {
    const Hosts hosts(hosts_of(group, *store));
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
  std::vector<std::string> hosts_of(const GroupInfo& group, c10d::Store& store) {
    const auto key = [](int member) { return "host/" + std::to_string(member); };
    store.set(key(group.rank), host_);
    std::vector<std::string> hosts;
    for (int member = 0; member < group.size; ++member) {
      auto& known = host_of_[group.world_rank(member)];
      if (known.empty()) known = store.get_to_str(key(member));
      hosts.push_back(known);
    }
    return hosts;
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
  std::string host_;
  std::unique_ptr<EngineFactory> shm_;
  std::unique_ptr<EngineFactory> gloo_;  // a device and its thread: made where there is a second host
  std::map<c10::DeviceType, std::unique_ptr<EngineFactory>> by_device_;
  std::map<int, std::string> host_of_;
};

}  // namespace

void register_device_engine(c10::DeviceType type, MakeFactory make) { device_engines()[type] = make; }

std::unique_ptr<EngineFactory> make_auto_factory(const EngineOptions& options) { return std::make_unique<AutoFactory>(options); }

}  // namespace tessera::comm
