#include "tessera/comm/algorithms/program.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "tessera/comm/call.h"
#include "tessera/core/error.h"

// A plan names chunks; here they become memory. One walk through a rank's rows follows each chunk: where its contents lie (`now`) and where what is received
// for it is kept (`home`). A chunk moves home with the first receive, and the addition that does it reads the one place and writes the other: inputs are never
// copied beforehand and never written.
// What makes it safe that a step posts everything at once: nothing that the step sends is written before the step is over. A receive goes straight home only
// where the step does not send that chunk and nothing is added; everything else lands in scratch and is put in place when all of the step's messages are done.
// Messages of several pieces are packed, since engines carry one.

namespace tessera::comm {
namespace {

using Place = Region::Place;

int64_t total(const std::vector<Region>& regions) {
  return std::accumulate(regions.begin(), regions.end(), int64_t{0}, [](int64_t sum, const Region& region) { return sum + region.size; });
}

bool follows(const Region& first, const Region& second) {
  return first.place == second.place && first.index == second.index && first.begin + first.size == second.begin;
}

// The one region that these make together, if they do.
std::optional<Region> joined(const std::vector<Region>& regions) {
  std::optional<Region> all;
  for (const auto& region : regions) {
    if (region.size == 0) continue;
    if (all && !follows(*all, region)) return std::nullopt;
    if (all) {
      all->size += region.size;
    } else {
      all = region;
    }
  }
  return all;
}

// Moves that continue one another become one.
void append(std::vector<Move>& moves, const Move& move) {
  if (move.to.size == 0) return;
  if (!moves.empty()) {
    auto& last = moves.back();
    if (last.reduce == move.reduce && last.from_first == move.from_first && follows(last.from, move.from) && follows(last.to, move.to) &&
        (!move.reduce || follows(last.with, move.with))) {
      for (auto* region : {&last.from, &last.to, &last.with}) region->size += move.to.size;
      return;
    }
  }
  moves.push_back(move);
}

// Where the parts of a call lie in its tensors: one tensor that is cut, or a list of them (gather, scatter).
class Parts {
 public:
  Parts(Place place, const std::vector<at::Tensor>& tensors, int parts, const std::vector<int64_t>& splits) : place_(place), list_(tensors.size() > 1) {
    if (tensors.empty()) return;
    const auto& tensor = tensors[0];
    if (list_ || splits.empty()) {
      for (int part = 0; part < parts; ++part) regions_.push_back(list_ ? whole(tensors, part) : equal(tensor, parts, part));
      return;
    }
    const int64_t row = tensor.dim() == 0 || tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
    int64_t begin = 0;
    for (const int64_t rows : splits) {
      regions_.push_back({place_, 0, begin * row, rows * row});
      begin += rows;
    }
  }

  const Region& operator[](int part) const { return regions_.at(part); }

 private:
  Region whole(const std::vector<at::Tensor>& tensors, int part) const { return {place_, part, 0, tensors.at(part).numel()}; }
  Region equal(const at::Tensor& tensor, int parts, int part) const {
    const int64_t size = tensor.numel() / parts;
    return {place_, 0, part * size, size};
  }

  Place place_;
  bool list_;
  std::vector<Region> regions_;
};

// Each chunk's way through this rank's memory: where it is at first, where what comes for it is kept, where the caller wants it.
struct Chunk {
  Region now;   // none until it has come
  Region home;  // of what is received; none where nothing is
  bool wanted = false;
};

class Compiler {
 public:
  Compiler(const MessagePlanRequest& request, int rank, const Call& call) : rank_(rank), rows_(make_rows(request, rank)), chunks_(num_chunks(request)) {
    invariant(to_string(call.op) == request.op, "a plan of ", request.op, " for ", to_string(call.op));
    const int n = request.ranks;
    const bool is_root = rank == request.root;
    const auto& op = request.op;
    if (op == "all_reduce" || op == "reduce" || op == "broadcast") {
      for (int chunk = 0; chunk < size(); ++chunk) {
        const auto [begin, length] = chunk_extent(request, size(), call.outputs.at(0).numel(), chunk);
        const Region region{Place::Output, 0, begin, length};
        chunks_[chunk] = {region, region, true};
      }
    } else if (op == "all_gather" || op == "gather") {
      const bool gets = op == "all_gather" || is_root;
      const Parts out(Place::Output, gets ? call.outputs : std::vector<at::Tensor>(), n, {});
      for (int chunk = 0; chunk < n && gets; ++chunk) chunks_[chunk] = {{}, out[chunk], true};
      chunks_[rank].now = {Place::Input, 0, 0, call.inputs.at(0).numel()};
    } else if (op == "reduce_scatter" || op == "scatter") {
      const bool gives = op == "reduce_scatter" || is_root;
      const Parts in(Place::Input, gives ? call.inputs : std::vector<at::Tensor>(), n, {});
      for (int chunk = 0; chunk < n && gives; ++chunk) chunks_[chunk].now = in[chunk];
      chunks_[rank].home = {Place::Output, 0, 0, call.outputs.at(0).numel()};
      chunks_[rank].wanted = true;
    } else if (op == "all_to_all") {
      const Parts in(Place::Input, call.inputs, n, call.in_splits), out(Place::Output, call.outputs, n, call.out_splits);
      for (int chunk = 0; chunk < n; ++chunk) chunks_[chunk] = {in[(rank + chunk) % n], out[(rank - chunk + n) % n], true};
    }
    part_ = op == "all_gather" || op == "gather" ? call.inputs.at(0).numel() : call.outputs.empty() ? 0 : call.outputs[0].numel();
    program_.tokens = op == "barrier";
    give_homes();
  }

  Program operator()() {
    for (size_t row = 0; row < rows_.size();) {
      const int step = rows_[row].step;
      const size_t first = row;
      while (row < rows_.size() && rows_[row].step == step) ++row;
      compile_step(first, row);
    }
    for (const auto& chunk : chunks_) {
      if (chunk.wanted && chunk.now != chunk.home) append(program_.finish, {.from = chunk.now, .to = chunk.home});
    }
    program_.scratch_elements = held_ + staging_;
    return std::move(program_);
  }

 private:
  int size() const { return static_cast<int>(chunks_.size()); }

  // Scratch for what comes for others.
  void give_homes() {
    for (const auto& row : rows_) {
      for (const int index : row.receive) {
        auto& chunk = chunks_.at(index);
        if (chunk.home.place == Place::None) chunk.home.place = Place::Scratch;
      }
    }
    for (auto& chunk : chunks_) {
      if (chunk.home.place != Place::Scratch) continue;
      chunk.home = {Place::Scratch, 0, held_, part_};
      held_ += part_;
    }
  }

  void compile_step(size_t first, size_t last) {
    ProgramStep step;
    int64_t staged = held_;
    const auto stage = [&](int64_t elements) {
      const Region region{Place::Scratch, 0, staged, elements};
      staged += elements;
      return region;
    };
    std::vector<Region> sent;  // may not be written to before the step is over
    for (size_t row = first; row < last; ++row) {
      if (rows_[row].send_to >= 0) post_send(rows_[row], stage, step, sent);
    }
    for (size_t row = first; row < last; ++row) {
      if (rows_[row].receive_from >= 0) post_receive(rows_[row], stage, step, sent);
    }
    staging_ = std::max(staging_, staged - held_);
    program_.steps.push_back(std::move(step));
  }

  template <class Stage>
  void post_send(const Transfer& row, Stage& stage, ProgramStep& step, std::vector<Region>& sent) {
    std::vector<Region> regions;
    for (const int chunk : row.send) {
      regions.push_back(chunks_.at(chunk).now);
      sent.push_back(regions.back());
    }
    const int64_t elements = total(regions);
    if (elements == 0 && !program_.tokens) return;
    auto message = program_.tokens ? Region{} : joined(regions);
    if (!message) {
      message = stage(elements);
      int64_t at = message->begin;
      for (const auto& region : regions) {
        append(step.pack, {.from = region, .to = {Place::Scratch, 0, at, region.size}});
        at += region.size;
      }
    }
    step.sends.push_back({row.send_to, *message});
  }

  template <class Stage>
  void post_receive(const Transfer& row, Stage& stage, ProgramStep& step, const std::vector<Region>& sent) {
    std::vector<Region> homes;
    bool direct = !row.reduce;
    for (const int chunk : row.receive) {
      homes.push_back(chunks_.at(chunk).home);
      direct = direct && std::find(sent.begin(), sent.end(), homes.back()) == sent.end();
    }
    const int64_t elements = total(homes);
    if (elements > 0 || program_.tokens) {
      auto message = program_.tokens ? Region{} : direct ? joined(homes) : std::nullopt;
      if (!message) {
        message = stage(elements);
        int64_t at = message->begin;
        for (size_t i = 0; i < homes.size(); ++i) {
          const Region from{Place::Scratch, 0, at, homes[i].size};
          append(step.unpack, {.from = from,
                               .to = homes[i],
                               .with = row.reduce ? chunks_[row.receive[i]].now : homes[i],
                               .reduce = row.reduce,
                               .from_first = row.receive_from < rank_});
          at += homes[i].size;
        }
      }
      step.receives.push_back({row.receive_from, *message});
    }
    for (const int chunk : row.receive) chunks_[chunk].now = chunks_[chunk].home;
  }

  int rank_;
  Rows rows_;
  std::vector<Chunk> chunks_;
  Program program_;
  int64_t part_ = 0;     // elements of a chunk that is another rank's
  int64_t held_ = 0;     // scratch that lasts, before the staging of each step
  int64_t staging_ = 0;  // of the step that needs most
};

}  // namespace

Program make_program(const MessagePlanRequest& request, int rank, const Call& call) { return Compiler(request, rank, call)(); }

}  // namespace tessera::comm
