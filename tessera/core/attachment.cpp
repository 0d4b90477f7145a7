#include "tessera/core/attachment.h"

#include <iterator>
#include <utility>

namespace tessera {

Attachment::Attachment(std::function<void()> undo) {
  if (undo) undo_.push_back(std::move(undo));
}

Attachment::~Attachment() { detach(); }

Attachment::Attachment(Attachment&& other) noexcept : undo_(std::exchange(other.undo_, {})) {}

Attachment& Attachment::operator=(Attachment&& other) noexcept {
  if (this != &other) {
    detach();
    undo_ = std::exchange(other.undo_, {});
  }
  return *this;
}

void Attachment::add(Attachment other) {
  undo_.insert(undo_.end(), std::make_move_iterator(other.undo_.begin()), std::make_move_iterator(other.undo_.end()));
  other.undo_.clear();
}

void Attachment::detach() {
  auto undo = std::exchange(undo_, {});
  for (auto entry = undo.rbegin(); entry != undo.rend(); ++entry) (*entry)();
}

void Attachment::release() { undo_.clear(); }

}  // namespace tessera
