#pragma once

#include <cstddef>
#include <memory>

/// What scopes have said on a rank's thread, for whatever works on its behalf: whose samples these are, where a collective comes from, who looks at operators.
///
/// A thread-local would do where a rank is one thread. But autograd keeps a thread for each device, and runs nodes of a backward pass there while the rank
/// waits: recomputation, collectives and operators of a layer then happen where no scope was opened. libtorch carries some state of the caller along
/// (ThreadLocalState); an Ambient goes with it. It does not go to threads that work beside the rank instead of for it (Gloo's), which libtorch gives the same
/// state: what they would read changes under them.
namespace tessera {

namespace detail {

struct AmbientValue {
  virtual ~AmbientValue() = default;
  virtual std::unique_ptr<AmbientValue> copy() const = 0;
};

template <typename T>
struct AmbientOf final : AmbientValue {
  T value{};
  std::unique_ptr<AmbientValue> copy() const override { return std::make_unique<AmbientOf>(*this); }
};

size_t new_ambient_slot();
/// Of this thread, or of the copy that it works with.
std::unique_ptr<AmbientValue>& ambient_slot(size_t index);

}  // namespace detail

/// A variable that each thread has for itself; one that autograd keeps for a device works with a copy of the caller's, made when backward was called
/// (CarryAmbient). To be defined at namespace scope. T{} is what it begins with. Costs a few loads.
template <typename T>
class Ambient {
 public:
  Ambient() = default;
  Ambient(const Ambient&) = delete;
  Ambient& operator=(const Ambient&) = delete;

  T& operator*() const {
    auto& slot = detail::ambient_slot(index_);
    if (!slot) slot = std::make_unique<detail::AmbientOf<T>>();
    return static_cast<detail::AmbientOf<T>&>(*slot).value;
  }
  T* operator->() const { return &**this; }

 private:
  size_t index_ = detail::new_ambient_slot();
};

/// Whether this thread's variables are gone already: what is destroyed after them must not ask for one.
bool ambient_is_gone();

/// While it lives, a backward pass that this thread begins takes the thread's variables along, as they were when this was made. The engine opens one around
/// each pass (nn/saved_tensors.cpp). Costs a copy of each variable that was ever used on this thread.
class CarryAmbient {
 public:
  CarryAmbient();
  ~CarryAmbient();
  CarryAmbient(const CarryAmbient&) = delete;
  CarryAmbient& operator=(const CarryAmbient&) = delete;
};

}  // namespace tessera
