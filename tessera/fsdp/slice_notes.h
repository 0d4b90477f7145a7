#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace tessera {

/// Which memory has this rank's rows: slices of parameters, and what was made of them (a copy, an update, an optimizer's state), which no shape tells. By its
/// storage, so that it is known in whatever shape it is seen; of all wrappers of a thread, for slices of one may meet wholes of another, and of those that are
/// gone, for what was made of their slices is rows still.
class SliceNotes {
 public:
  using Wrapper = int64_t;  ///< a number that no other of the thread has

  struct Note {
    c10::SmallVector<Wrapper, 2> wrappers;  ///< of whose slices it was made, as far as they know
    bool has_values = true;                 ///< of slices, and not their shape alone (zeros_like), which a collective may be about to fill
    bool is_of(Wrapper wrapper) const;
    void add(const Note& other);
  };

  /// Those of this thread.
  static std::shared_ptr<SliceNotes> of_thread();
  Wrapper new_wrapper() { return ++wrappers_; }

  /// A parameter of a wrapper that lives is meant as a whole, whatever memory the program has put in its place: nothing is known of it here, but of handles.
  void add_parameter(const c10::TensorImpl* parameter) { ++parameters_[parameter]; }
  void drop_parameter(const c10::TensorImpl* parameter);

  void add_slice(const at::Storage& memory, Wrapper wrapper);
  /// Of its own memory.
  void add_made(const at::Tensor& made, Note note);
  /// Clipping writes it past all operators, and leaves it what it is.
  void add_gradient(const at::Tensor& gradient, Wrapper wrapper);
  /// What is noted was written, from what has `note`, and is so still.
  void add_written(const at::Tensor& written, const Note& note);
  /// Who brings ranks' rows together writes it, and no version tells. A slice and a gradient stay what they are.
  void forget(const at::Tensor& made);

  /// Null where there is none, or somebody else than operators that were seen has written it since: a collective may have brought together what ranks had.
  const Note* find(const at::Tensor& tensor) const;

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Noted {
    Note note;
    bool lasts = false;  ///< of slices and gradients, whoever writes them
    Weak memory{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::VariableVersion writes;  ///< disabled where they do not count
    uint32_t version = 0;         ///< of them

    bool is_current() const { return !writes.enabled() || writes.current_version() == version; }
  };

  void add(const at::Storage& memory, Noted noted);

  /// While it is known no other storage has its address.
  std::unordered_map<const c10::StorageImpl*, Noted> noted_;
  size_t many_ = 64;                                            ///< of them: then those that are gone are forgotten
  std::unordered_map<const c10::TensorImpl*, int> parameters_;  ///< how many wrappers have each
  Wrapper wrappers_ = 0;
};

}  // namespace tessera
