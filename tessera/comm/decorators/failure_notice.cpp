#include "tessera/comm/decorators/failure_notice.h"

#include <utility>

#include "tessera/comm/decorators/decorator.h"

namespace tessera::comm {
namespace {

using Notice = std::shared_ptr<const FailureNotice>;

auto unless_given(const FailureNotice& notice, auto call) {
  try {
    auto result = call();
    notice.require_none();
    return result;
  } catch (...) {
    notice.require_none();
    throw;
  }
}

class NoticedWork final : public c10d::Work {
 public:
  NoticedWork(comm::Work inner, Notice notice) : inner_(std::move(inner)), notice_(std::move(notice)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  void synchronize() override { inner_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    return unless_given(*notice_, [&] { return inner_->wait(timeout); });
  }

 private:
  comm::Work inner_;
  Notice notice_;
};

class NoticedEngine final : public DecoratedEngine {
 public:
  NoticedEngine(const GroupInfo& group, std::shared_ptr<Engine> inner, Notice notice) : DecoratedEngine(group, std::move(inner)), notice_(std::move(notice)) {}

  Work start(const Call& call) override {
    notice_->require_none();
    Work work = unless_given(*notice_, [&] { return inner()->start(call); });
    return c10::make_intrusive<NoticedWork>(std::move(work), notice_);
  }

  std::string failure() override {
    const std::string found = DecoratedEngine::failure();
    return found.empty() ? found : "group " + group().name + ": " + found;
  }

 private:
  Notice notice_;
};

}  // namespace

std::shared_ptr<Engine> end_by_notice(const GroupInfo& group, std::shared_ptr<Engine> inner, Notice notice) {
  return std::make_shared<NoticedEngine>(group, std::move(inner), std::move(notice));
}

}  // namespace tessera::comm
