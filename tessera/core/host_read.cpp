#include "tessera/core/host_read.h"

#include <utility>

#include <ATen/ops/item.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/core/read_check.h"

namespace tessera {
namespace {

Ambient<const ReadCheck*> read_check;
const Ambient<bool> reading;

/// Marks the operators of a read.
class Reading {
 public:
  Reading() : before_(std::exchange(*reading, true)) {}
  ~Reading() { *reading = before_; }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  bool before_;
};

void say_that_it_is_read(const at::Tensor& tensor) {
  if (EventStream* const listener = EventStream::current()) listener->add({.what = HostReadEvent{.bytes = static_cast<int64_t>(tensor.nbytes())}});
}

}  // namespace

ReadCheck::ReadCheck(std::function<void()> check) : check_(std::move(check)), before_(std::exchange(*read_check, this)) {}
ReadCheck::~ReadCheck() { *read_check = before_; }
void ReadCheck::ask() {
  if (const ReadCheck* const innermost = *read_check) innermost->check_();
}

double host_read(const at::Tensor& scalar, double dry_answer) {
  invariant(scalar.defined() && scalar.numel() == 1, "host_read expects a tensor of one element");
  say_that_it_is_read(scalar);
  if (scalar.is_meta()) return dry_answer;
  const double value = [&] {
    const Reading reading_now;
    return scalar.item().toDouble();
  }();
  ReadCheck::ask();
  return value;
}

namespace {

template <class T>
std::vector<T> read_all(const at::Tensor& tensor, T dry_answer) {
  invariant(tensor.defined(), "host_read_all expects a tensor");
  say_that_it_is_read(tensor);
  if (tensor.is_meta()) return std::vector<T>(static_cast<size_t>(tensor.numel()), dry_answer);
  const at::Tensor host = [&] {
    const Reading reading_now;
    return tensor.to(at::kCPU, c10::CppTypeToScalarType<T>::value).contiguous();
  }();
  ReadCheck::ask();
  const T* data = host.const_data_ptr<T>();
  return {data, data + host.numel()};
}

}  // namespace

std::vector<double> host_read_all(const at::Tensor& tensor, double dry_answer) { return read_all(tensor, dry_answer); }

std::vector<int64_t> host_read_integers(const at::Tensor& tensor, int64_t dry_answer) { return read_all(tensor, dry_answer); }

bool reading_on_host() { return *reading; }

}  // namespace tessera
