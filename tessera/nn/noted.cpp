#include "tessera/nn/noted.h"

#include <type_traits>
#include <utility>

#include "tessera/core/ambient.h"
#include "tessera/nn/not_repeated.h"

namespace tessera::nn {

namespace {

/// What a thread is given again, and who takes down what it makes.
template <class T>
struct OfNoted {
  typename Noted<T>::Replay* replay = nullptr;
  std::vector<std::weak_ptr<typename Noted<T>::Values>> records{};
};

const Ambient<OfNoted<uint64_t>> noted_numbers;
const Ambient<OfNoted<at::Tensor>> noted_tensors;
const Ambient<OfNoted<NotedValue>> noted_values;

template <class T>
OfNoted<T>& noted_here() {
  if constexpr (std::is_same_v<T, uint64_t>) {
    return *noted_numbers;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return *noted_tensors;
  } else {
    return *noted_values;
  }
}

}  // namespace

template <class T>
T Noted<T>::next(const std::function<T()>& make) {
  Replay* const replay = noted_here<T>().replay;
  const bool again = replay != nullptr && replay->used_ < replay->values_->size();
  const NotRepeated noted;  // where it is given again, it is not made
  const T value = again ? (*replay->values_)[replay->used_++] : make();
  std::erase_if(noted_here<T>().records, [&](const auto& weak) {
    const auto record = weak.lock();
    if (record) record->push_back(value);
    return record == nullptr;
  });
  return value;
}

template <class T>
Noted<T>::Record::Record() : values_(std::make_shared<Values>()) {
  noted_here<T>().records.emplace_back(values_);
}

template <class T>
void Noted<T>::Record::end() {
  std::erase_if(noted_here<T>().records, [&](const auto& weak) { return weak.expired() || weak.lock() == values_; });
}

template <class T>
Noted<T>::Replay::Replay(const Record& record)
    : values_(record.values_), outer_(std::exchange(noted_here<T>().replay, this)), outer_records_(std::exchange(noted_here<T>().records, {})) {}

template <class T>
Noted<T>::Replay::~Replay() {
  noted_here<T>().replay = outer_;
  noted_here<T>().records = std::move(outer_records_);
}

template class Noted<uint64_t>;
template class Noted<at::Tensor>;
template class Noted<NotedValue>;

}  // namespace tessera::nn
