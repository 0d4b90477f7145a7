#include "tessera/comm/backends/by_device.h"

#include "tessera/comm/engine.h"

namespace tessera::comm {
namespace {

class ByDeviceEngine : public Engine {
 public:
  ByDeviceEngine(std::shared_ptr<Engine> general, c10::DeviceType device, std::shared_ptr<Engine> special)
      : general_(std::move(general)), special_(std::move(special)), device_(device) {}

  std::string name() const override { return general_->name() + "+" + special_->name(); }
  Work start(const Call& call) override {
    const auto& tensor = call.tensor();
    return (tensor.defined() && tensor.device().type() == device_ ? special_ : general_)->start(call);
  }
  bool moves_data() const override { return general_->moves_data() || special_->moves_data(); }
  bool matches_tags() const override { return general_->matches_tags() && special_->matches_tags(); }
  void set_timeout(std::chrono::milliseconds timeout) override {
    for (const auto& engine : {general_, special_}) engine->set_timeout(timeout);
  }
  void abort() override {
    for (const auto& engine : {general_, special_}) engine->abort();
  }
  void shutdown() override {
    for (const auto& engine : {general_, special_}) engine->shutdown();
  }
  bool fails_unseen() const override { return general_->fails_unseen() || special_->fails_unseen(); }
  std::string failure() override {
    const std::string found = special_->failure();
    return found.empty() ? general_->failure() : found;
  }
  at::Tensor empty(int64_t elements, const at::TensorOptions& options) override { return general_->empty(elements, options); }

 private:
  std::shared_ptr<Engine> general_, special_;
  c10::DeviceType device_;
};

}  // namespace

std::shared_ptr<Engine> make_by_device_engine(std::shared_ptr<Engine> general, c10::DeviceType device, std::shared_ptr<Engine> special) {
  return std::make_shared<ByDeviceEngine>(std::move(general), device, std::move(special));
}

}  // namespace tessera::comm
