#include "tessera/checkpoint/dump.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/collectives.h"
#include "tessera/nn/adapter_names.h"

namespace tessera::checkpoint {
namespace {

/// All slices of one logical tensor, and the ranks that hold them; rank 0's own first, so that it is asked for nothing that it has.
struct Sources {
  at::ScalarType dtype = at::kFloat;
  std::vector<Slice> slices;
  std::vector<int> ranks;
};

std::map<std::string, Sources> gather_sources(const std::vector<SlicedTensor>& tensors, const comm::Group& group) {
  nlohmann::json mine = nlohmann::json::array();
  for (const auto& [tensor, slice] : tensors) {
    nlohmann::json boxes = nlohmann::json::array();
    for (const auto& box : slice.boxes) boxes.push_back({box.offset, box.size});
    mine.push_back({slice.name, slice.shape, std::move(boxes), tensor.defined() ? dtype_name(tensor.scalar_type()) : ""});
  }
  std::map<std::string, Sources> all;
  const auto answers = gather_json(group, mine);
  for (int rank = 0; rank < group.size(); ++rank) {
    for (const auto& json : answers[rank]) {
      Slice slice{json.at(0), json.at(1), {}};
      for (const auto& box : json.at(2)) slice.boxes.push_back({box.at(0), box.at(1)});
      Sources& sources = all[slice.name];
      if (const auto dtype = json.at(3).get<std::string>(); !dtype.empty()) sources.dtype = dtype_from_name(dtype);
      sources.slices.push_back(std::move(slice));
      sources.ranks.push_back(rank);
    }
  }
  return all;
}

/// Their names where the family has them, else our own: adapters have none there. Beside adapters, weights may be kept in fewer bits, and are no parameters:
/// a tensor of theirs that lacks a part cannot be written, and what is left of it has our names.
std::vector<FileTensor> plan_file(const ModelConfig& model, const std::map<std::string, Sources>& sources) {
  auto table = hugging_face_table(model);
  if (!table) {
    table.emplace();
    for (const auto& [name, held] : sources) table->push_back({name, name, held.slices.front().shape});
  } else if (std::ranges::any_of(sources, [](const auto& source) { return nn::is_adapter(source.first); })) {
    std::set<std::string> incomplete, left;
    for (const auto& row : *table) {
      if (!sources.contains(row.ours)) incomplete.insert(row.theirs);
    }
    for (const auto& row : *table) {
      if (incomplete.contains(row.theirs)) left.insert(row.ours);
    }
    std::erase_if(*table, [&](const HuggingFaceTensor& row) { return incomplete.contains(row.theirs); });
    for (const auto& [name, held] : sources) {
      if (nn::is_adapter(name) || left.contains(name)) table->push_back({name, name, held.slices.front().shape});
    }
  }
  std::set<std::string> named;
  for (const auto& row : *table) {
    const auto held = sources.find(row.ours);
    invariant(held != sources.end() && held->second.slices.front().shape == row.whole_shape(), "dump: no rank holds '", row.ours,
              "' with the shape of the table");
    named.insert(row.ours);
  }
  for (const auto& [name, held] : sources) invariant(named.contains(name), "dump: '", name, "' is not in the table of family ", model.family);
  return file_tensors(*table);
}

/// This rank's tensor on the host, packed; zeros where there is none.
at::Tensor local_tensor(const std::vector<SlicedTensor>& tensors, const std::string& name, at::ScalarType dtype) {
  const auto held = std::find_if(tensors.begin(), tensors.end(), [&](const auto& each) { return each.slice.name == name; });
  if (!held->tensor.defined()) return at::zeros(held->slice.local_shape(), at::device(at::kCPU).dtype(dtype));
  return held->tensor.detach().to(at::kCPU).contiguous();
}

/// Moves the slices that make up `wanted` of one logical tensor to rank 0, and there into `whole`, a view of its place in the file's tensor.
void collect(const Slice& wanted, const Sources& sources, const std::vector<SlicedTensor>& tensors, at::Tensor whole, const comm::Group& group) {
  const std::string& name = wanted.name;
  std::map<int, at::Tensor> received;
  for (const auto& piece : reshard(sources.slices, wanted)) {
    const int owner = sources.ranks[piece.source];
    if (!received.contains(piece.source)) {
      if (owner == group.rank()) {
        received[piece.source] = local_tensor(tensors, name, sources.dtype);
        if (owner != 0) comm::send(group, received[piece.source], 0);
      } else if (group.rank() == 0) {
        received[piece.source] = at::empty(sources.slices[piece.source].local_shape(), at::device(at::kCPU).dtype(sources.dtype));
        comm::recv(group, received[piece.source], owner);
      }
    }
    if (group.rank() == 0) copy_piece(piece, received[piece.source], whole);
  }
}

}  // namespace

void dump(const std::filesystem::path& file, const ModelConfig& model, const std::vector<SlicedTensor>& tensors, const comm::Group& group) {
  const c10::NoGradGuard no_grad;
  const auto sources = gather_sources(tensors, group);
  const auto plan = plan_file(model, sources);
  std::vector<TensorSpec> specs;
  for (const auto& tensor : plan) specs.push_back({tensor.name, sources.at(tensor.parts.front().ours).dtype, tensor.shape});

  // Where rank 0 cannot write, it still takes what the others send: they learn of it at the end, and nobody hangs.
  std::exception_ptr failure;
  const auto attempt = [&](const auto& action) {
    if (failure || group.rank() != 0) return;
    try {
      action();
    } catch (...) {
      failure = std::current_exception();
    }
  };
  std::optional<SafetensorsWriter> writer;
  attempt([&] { writer.emplace(file, specs, std::map<std::string, std::string>{{"format", "pt"}}); });
  for (size_t i = 0; i < plan.size(); ++i) {
    at::Tensor theirs = group.rank() == 0 ? at::empty(plan[i].shape, at::device(at::kCPU).dtype(specs[i].dtype)) : at::Tensor();
    for (const auto& row : plan[i].parts)
      collect(row.slice_of(row.ours), sources.at(row.ours), tensors, theirs.defined() ? view_of(row, theirs) : theirs, group);
    attempt([&] { writer->write(theirs); });
  }
  attempt([&] { writer->finish(); });
  together(group, [&] {
    if (failure) std::rethrow_exception(failure);
    return nlohmann::json();
  });
}

}  // namespace tessera::checkpoint
