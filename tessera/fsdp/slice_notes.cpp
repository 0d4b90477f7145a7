#include "tessera/fsdp/slice_notes.h"

#include <algorithm>
#include <utility>

#include "tessera/core/ambient.h"

namespace tessera {
namespace {

const Ambient<std::shared_ptr<SliceNotes>> notes_here;

}  // namespace

std::shared_ptr<SliceNotes> SliceNotes::of_thread() {
  if (!*notes_here) *notes_here = std::make_shared<SliceNotes>();
  return *notes_here;
}

bool SliceNotes::Note::is_of(Wrapper wrapper) const { return std::ranges::find(wrappers, wrapper) != wrappers.end(); }

void SliceNotes::Note::add(const Note& other) {
  for (const Wrapper wrapper : other.wrappers) {
    if (!is_of(wrapper)) wrappers.push_back(wrapper);
  }
  has_values = has_values || other.has_values;
}

const SliceNotes::Note* SliceNotes::find(const at::Tensor& tensor) const {
  if (noted_.empty() || !tensor.has_storage()) return nullptr;
  const auto found = noted_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == noted_.end() || !found->second.is_current() || parameters_.contains(tensor.unsafeGetTensorImpl())) return nullptr;
  return &found->second.note;
}

void SliceNotes::add(const at::Storage& memory, Noted noted) {
  if (noted_.size() >= many_) {
    std::erase_if(noted_, [](const auto& item) { return item.second.memory.expired(); });
    many_ = std::max<size_t>(64, 2 * noted_.size());
  }
  noted.memory = memory.getWeakStorageImpl();
  noted_.insert_or_assign(memory.unsafeGetStorageImpl(), std::move(noted));
}

void SliceNotes::drop_parameter(const c10::TensorImpl* parameter) {
  const auto found = parameters_.find(parameter);
  if (found != parameters_.end() && --found->second == 0) parameters_.erase(found);
}

void SliceNotes::add_slice(const at::Storage& memory, Wrapper wrapper) { add(memory, {.note = {.wrappers = {wrapper}}, .lasts = true}); }

void SliceNotes::add_made(const at::Tensor& made, Note note) {
  if (!made.defined() || !made.has_storage()) return;
  const auto found = noted_.find(made.storage().unsafeGetStorageImpl());
  if (found != noted_.end() && found->second.is_current()) return found->second.note.add(note);  // a view, or another wrapper was told before
  const c10::VariableVersion& writes = made.unsafeGetTensorImpl()->version_counter();            // tensors of an inference mode have none
  add(made.storage(), {.note = std::move(note), .writes = writes, .version = writes.enabled() ? writes.current_version() : 0});
}

void SliceNotes::add_gradient(const at::Tensor& gradient, Wrapper wrapper) {
  if (gradient.defined() && gradient.has_storage()) add(gradient.storage(), {.note = {.wrappers = {wrapper}}, .lasts = true});
}

void SliceNotes::add_written(const at::Tensor& written, const Note& note) {
  const auto found = noted_.find(written.storage().unsafeGetStorageImpl());
  if (found == noted_.end()) return;
  Noted& noted = found->second;
  if (noted.writes.enabled()) noted.version = noted.writes.current_version();
  noted.note.add(note);
}

void SliceNotes::forget(const at::Tensor& made) {
  if (!made.defined() || !made.has_storage()) return;
  const auto found = noted_.find(made.storage().unsafeGetStorageImpl());
  if (found != noted_.end() && !found->second.lasts) noted_.erase(found);
}

}  // namespace tessera
