#include "tessera/train/batch_feed.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <ATen/ops/empty.h>

namespace tessera {

namespace {

/// Tensors of the micro-batches, each once: positions are shared by all of them.
std::map<const void*, at::Tensor> distinct_tensors(std::vector<data::MicroBatch>& micro_batches) {
  std::map<const void*, at::Tensor> found;
  for (auto& micro : micro_batches) {
    for (const at::Tensor* tensor : data::tensors_of(micro)) found.emplace(tensor->unsafeGetTensorImpl(), *tensor);
  }
  return found;
}

void replace_tensors(std::vector<data::MicroBatch>& micro_batches, const std::map<const void*, at::Tensor>& by) {
  for (auto& micro : micro_batches) {
    for (at::Tensor* tensor : data::tensors_of(micro)) *tensor = by.at(tensor->unsafeGetTensorImpl());
  }
}

}  // namespace

BatchFeed::BatchFeed(data::Loader loader, at::Device device) : loader_(std::move(loader)), link_(device) {}

data::StepBatch BatchFeed::next() {
  if (link_.device.is_cpu()) return loader_.next();
  prepare();
  Sent sent = std::move(*std::exchange(sent_, std::nullopt));
  before_.reset();
  sent.arrival.hold_device();
  keep_until_used(sent.memory);
  last_pinned_ = std::move(sent.pinned);
  return std::move(sent.batch);
}

void BatchFeed::prepare() {
  if (link_.device.is_cpu() || sent_) return;
  before_ = loader_.cursor();
  sent_ = send(loader_.next());
}

data::Cursor BatchFeed::cursor() const { return before_ ? *before_ : loader_.cursor(); }

void BatchFeed::seek(const data::Cursor& cursor) {
  sent_.reset();
  before_.reset();
  loader_.seek(cursor);
}

BatchFeed::Sent BatchFeed::send(data::StepBatch batch) const {
  auto tensors = distinct_tensors(batch.micro_batches);
  // Words hold whatever a tensor has: numbers of eight bytes, and masks.
  const auto words_of = [](const at::Tensor& tensor) { return static_cast<int64_t>((tensor.nbytes() + sizeof(int64_t) - 1) / sizeof(int64_t)); };
  int64_t elements = 0;
  for (const auto& [key, tensor] : tensors) elements += words_of(tensor);
  Sent sent{.batch = std::move(batch), .pinned = link_.empty(elements, at::kLong), .memory = {}, .arrival = {}};
  {
    // Behind nothing: the memory comes from the copies' own stream, and the step that computes now has no part in what is copied.
    const CopyStream::Scope copying(link_.in, CopyStream::Behind::Nothing);
    sent.memory = at::empty({elements}, at::TensorOptions(link_.device).dtype(at::kLong));
    auto* staged = sent.pinned.mutable_data_ptr<int64_t>();
    int64_t at = 0;
    for (auto& [key, tensor] : tensors) {
      const int64_t words = words_of(tensor);
      std::memcpy(staged + at, tensor.const_data_ptr(), tensor.nbytes());
      tensor = sent.memory.narrow(0, at, words).view(tensor.scalar_type()).narrow(0, 0, tensor.numel()).view(tensor.sizes());
      at += words;
    }
    sent.memory.copy_(sent.pinned, /*non_blocking=*/true);
    sent.arrival = link_.in.point();
  }
  replace_tensors(sent.batch.micro_batches, tensors);
  return sent;
}

void move_to(std::vector<data::MicroBatch>& micro_batches, at::Device device) {
  if (lie_on(micro_batches, device)) return;
  auto tensors = distinct_tensors(micro_batches);
  for (auto& [key, tensor] : tensors) tensor = tensor.to(device);
  replace_tensors(micro_batches, tensors);
}

bool lie_on(const std::vector<data::MicroBatch>& micro_batches, at::Device device) {
  return std::ranges::all_of(micro_batches, [&](const data::MicroBatch& micro) {
    const auto tensors = data::tensors_of(micro);
    return std::ranges::all_of(tensors, [&](const at::Tensor* tensor) { return tensor->device() == device; });
  });
}

}  // namespace tessera
