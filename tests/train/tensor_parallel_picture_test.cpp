// The pictures of docs/tensor-parallel.md: who holds what of weights and activations, and what crosses the network, as probes on every module and a recorder on
// each rank see one forward and backward pass.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tessera/core/svg.h"
#include "tests/made_docs.h"
#include "tests/train/tensor_parallel_observer.h"

namespace tessera {
namespace {

using namespace testing_support;
using Records = std::vector<CollectiveEvent>;

constexpr int kDrawnRanks = 2;

/// A matrix, and which part of it a rank has: activations as positions x features, weights as x w^T uses them, inputs down and outputs across.
struct Holding {
  enum class Kind { Activation, Term, Weight } kind = Kind::Activation;
  std::string name;
  std::array<int64_t, 2> whole{}, first{}, size{};
  bool operator==(const Holding&) const = default;
};

/// What crosses the network at one place: lines of text, the same on all ranks.
struct Crossing {
  std::vector<std::string> forward, backward;
  bool empty() const { return forward.empty() && backward.empty(); }
};

/// A place in the picture, left to right: what a rank holds there, or what crosses.
struct Column {
  std::vector<Holding> held{};
  Crossing crossing{};
  const void* source = nullptr;  ///< of weights and their products: the tensor that goes in
};

std::vector<std::string> texts(const Records& records) {
  std::vector<std::string> lines;
  for (size_t i = 0, alike = 1; i < records.size(); ++i, ++alike) {
    const bool more = i + 1 < records.size() && records[i + 1].op == records[i].op && records[i + 1].elements == records[i].elements;
    if (more) continue;
    lines.push_back(fmt::format("{}{}, {}", alike > 1 ? fmt::format("{} x ", alike) : "", records[i].op, records[i].elements));
    alike = 0;
  }
  return lines;
}

/// Reads a rank's log beside that of one device, which knows whole sizes.
class Reader {
 public:
  Reader(const Log& log, const Log& whole, int rank) : log_(log), whole_(whole), rank_(rank) {}

  /// The calls `begin` .. `end` - 1 as a line of the picture.
  std::vector<Column> line(size_t begin, size_t end) {
    columns_.clear();
    hold(begin, "x", log_.calls[begin].input, whole_.calls[begin].input);
    for (size_t i = begin; i < end; ++i) add(i);
    return columns_;
  }

 private:
  void add(size_t i) {
    const Call& call = log_.calls[i];
    const Call& whole = whole_.calls[i];
    const bool has_weight = !call.weight.shape.empty(), is_term = has_weight && gives_terms(call);
    const std::string taken = columns_.back().held.empty() ? "x" : columns_.back().held[0].name;
    if (cross(between(call.entered, call.began), is_term ? Records{} : backward_at(call.path))) hold(i, taken, call.taken, whole.taken);
    const bool is_container = i + 1 < log_.calls.size() && log_.calls[i + 1].entered <= call.ended && log_.calls[i + 1].path.starts_with(call.path + ".");
    if (is_container) return;
    const std::string name = call.path.substr(call.path.rfind('.') + 1);
    if (has_weight) weight(call, name);
    const Records inside = between(call.began, call.ended);
    if (!inside.empty()) {  // the head: its logits stay inside
      hold(i, "logits", {call.taken[0], held_outputs(call)}, {whole.taken[0], call.weight.shape[0]});
      cross(inside, {});
      hold(i, "loss", call.made, whole.made);
      return;
    }
    product(i, "after " + name, call, whole, is_term);
    if (cross(between(call.ended, call.left), is_term ? backward_at(call.path) : Records{})) hold(i, name + ", added up", call.output, whole.output);
  }

 public:
  /// Elements that the rank sends for these calls, forward and backward.
  std::pair<int64_t, int64_t> sent(size_t begin, size_t end) const {
    const auto elements = [](const Records& records) {
      int64_t bytes = 0;
      for (const auto& record : records) bytes += record.sent_bytes;
      return bytes / 4;
    };
    int64_t backward = 0;
    for (size_t i = begin; i < end; ++i) backward += elements(backward_at(log_.calls[i].path));
    return {elements(between(log_.calls[begin].entered, log_.calls[end - 1].left)), backward};
  }

 private:
  Records between(size_t begin, size_t end) const {
    return {log_.records.begin() + static_cast<int64_t>(begin), log_.records.begin() + static_cast<int64_t>(end)};
  }
  Records backward_at(const std::string& path) const {
    Records found;
    for (size_t i = log_.forward; i < log_.records.size(); ++i) {
      if (log_.records[i].site == path) found.push_back(log_.records[i]);
    }
    return found;
  }

  bool is_look_up(const Call& call) const { return call.input[1] == 1; }
  int64_t held_outputs(const Call& call) const { return call.weight.boxes.at(0).size[0]; }
  /// What a weight that is cut along what is summed over gives: a look-up adds up entries, a product input features.
  bool gives_terms(const Call& call) const {
    const size_t summed = is_look_up(call) ? 0 : 1;
    return call.weight.boxes.at(0).size[summed] < call.weight.shape[summed];
  }

  bool cross(const Records& forward, const Records& backward) {
    Column column{.crossing = {texts(forward), texts(backward)}};
    if (column.crossing.empty()) return false;
    columns_.push_back(column);
    return true;
  }

  /// Even parts, so that a rank's begins after those of the ranks before it.
  Holding part(const std::string& name, const std::array<int64_t, 2>& size, const std::array<int64_t, 2>& whole) const {
    Holding held{.name = name, .whole = whole, .size = size};
    for (size_t d = 0; d < 2; ++d) held.first[d] = size[d] == whole[d] ? 0 : chunk(whole[d], kDrawnRanks, rank_).first;
    return held;
  }

  void hold(size_t i, const std::string& name, const std::array<int64_t, 2>& size, const std::array<int64_t, 2>& whole) {
    const Holding held = part(i == 0 && is_look_up(log_.calls[i]) && name == "x" ? "ids" : name, size, whole);
    if (columns_.size() >= 2 && columns_.back().held.empty() && columns_[columns_.size() - 2].held.back() == held) return;  // what crosses changes nothing
    columns_.push_back({.held = {held}, .crossing = {}, .source = nullptr});
  }

  void weight(const Call& call, const std::string& name) {
    const Box& box = call.weight.boxes.at(0);
    Holding held{.kind = Holding::Kind::Weight,
                 .name = name,
                 .whole = {call.weight.shape[1], call.weight.shape[0]},
                 .first = {box.offset[1], box.offset[0]},
                 .size = {box.size[1], box.size[0]}};
    if (is_look_up(call)) {  // drawn as it is read: an entry a row
      for (auto* sizes : {&held.whole, &held.first, &held.size}) std::swap((*sizes)[0], (*sizes)[1]);
    }
    // Layers that take the same tensor stand one above the other, and so do their products.
    Column* before = columns_.size() >= 2 ? &columns_[columns_.size() - 2] : nullptr;
    if (before != nullptr && before->source == call.identity() && before->held[0].kind == Holding::Kind::Weight) {
      before->held.push_back(held);
    } else {
      columns_.push_back({.held = {held}, .crossing = {}, .source = call.identity()});
    }
  }

  void product(size_t i, const std::string& name, const Call& call, const Call& whole, bool is_term) {
    Holding held = part(name, call.made, whole.made);
    if (is_term) held.kind = Holding::Kind::Term;
    const void* source = call.weight.shape.empty() ? nullptr : call.identity();
    if (source != nullptr && columns_.back().source == source && columns_.back().held[0].kind != Holding::Kind::Weight) {
      columns_.back().held.push_back(held);
    } else {
      columns_.push_back({.held = {held}, .crossing = {}, .source = source});
    }
  }

  const Log& log_;
  const Log& whole_;
  int rank_;
  std::vector<Column> columns_;
};

constexpr double kMargin = 12, kScale = 5, kPictureLeft = 64, kCell = 92, kCrossing = 118, kHeading = 62, kLabel = 27, kGap = 10, kLetter = 6.2;
constexpr std::string_view kFaint = "#666666", kOutline = "#bbbbbb", kBackward = "#222222";

double width_of(const Column& column) {
  if (column.held.empty()) return kCrossing;
  double width = kCell;
  for (const Holding& held : column.held) {
    width = std::max({width, kScale * static_cast<double>(held.whole[1]) + kGap, kLetter * static_cast<double>(held.name.size()) + kGap});
  }
  return width;
}

double height_of(const Column& column) {
  double height = 0;
  for (const Holding& held : column.held) height += kScale * static_cast<double>(held.whole[0]) + kLabel + kGap;
  return height;
}

std::string_view color_of(Holding::Kind kind) { return Svg::color(kind == Holding::Kind::Weight ? 2 : kind == Holding::Kind::Term ? 1 : 4); }

void draw(Svg& svg, double center, double top, const Holding& held) {
  const auto pixels = [](int64_t elements) { return kScale * static_cast<double>(elements); };
  const double x = center - pixels(held.whole[1]) / 2, width = pixels(held.whole[1]), height = pixels(held.whole[0]);
  svg.text(center, top + 10, held.name, {.size = 10, .anchor = "middle", .bold = true});
  const double y = top + 14;
  svg.rect(x, y, width, height, "#f5f5f5");
  svg.rect(x + pixels(held.first[1]), y + pixels(held.first[0]), pixels(held.size[1]), pixels(held.size[0]), color_of(held.kind));
  svg.polyline({{x, y}, {x + width, y}, {x + width, y + height}, {x, y + height}, {x, y}}, kOutline, 1);
  const bool all = held.size == held.whole;
  svg.text(center, y + height + 11,
           fmt::format("{} x {}{}", held.size[0], held.size[1],
                       held.kind == Holding::Kind::Term ? ", a term"
                       : all                            ? ""
                                                        : fmt::format(" of {} x {}", held.whole[0], held.whole[1])),
           {.size = 9, .color = kFaint, .anchor = "middle"});
}

using Line = std::vector<std::vector<Column>>;  ///< by rank

double rank_height(const Line& line) {
  double height = 0;
  for (const auto& column : line[0]) height = std::max(height, height_of(column));
  return height + kGap;
}

void draw_crossing(Svg& svg, double left, double top, double bottom, const Crossing& crossing) {
  const auto color = Svg::color(0);
  double y = top + 10;
  const auto say = [&](const char* way, const std::vector<std::string>& texts, std::string_view ink) {
    svg.text(left + 4, y, texts.empty() ? fmt::format("{}: nothing", way) : fmt::format("{}:", way), {.size = 10, .color = texts.empty() ? kFaint : ink});
    for (const auto& text : texts) svg.text(left + 10, y += 12, text, {.size = 10, .color = ink, .bold = true});
    y += 13;
  };
  say("forward", crossing.forward, color);
  say("backward", crossing.backward, kBackward);
  const double x = left + kCrossing / 2;
  svg.line(x, top + kHeading + 8, x, bottom, crossing.forward.empty() ? kBackward : color, 2);
}

void draw_line(Svg& svg, double top, const Line& line) {
  const double each = rank_height(line), first = top + kHeading + 12;
  for (int rank = 0; rank < kDrawnRanks; ++rank) {
    const double y = first + each * rank;
    svg.text(kMargin, y + each / 2, fmt::format("rank {}", rank), {.bold = true});
    double x = kPictureLeft;
    for (const Column& column : line[rank]) {
      const double width = width_of(column);
      double from = y + (each - kGap - height_of(column)) / 2;
      for (const Holding& held : column.held) {
        draw(svg, x + width / 2, from, held);
        from += kScale * static_cast<double>(held.whole[0]) + kLabel + kGap;
      }
      if (column.held.empty() && rank == 0) draw_crossing(svg, x, top, first + each * kDrawnRanks - kGap, column.crossing);
      x += width;
    }
  }
}

struct Part {
  std::string title;
  std::string first, last;  ///< paths of its first and last call
};

size_t index_of(const Log& log, const std::string& path) {
  const auto found = std::ranges::find(log.calls, path, &Call::path);
  EXPECT_NE(found, log.calls.end()) << path;
  return static_cast<size_t>(found - log.calls.begin());
}

std::string picture(const std::vector<Log>& logs, const Log& whole, const std::vector<Part>& parts) {
  std::vector<Line> lines;
  double width = 700, height = 8;
  for (const Part& part : parts) {
    Line line;
    for (int rank = 0; rank < kDrawnRanks; ++rank)
      line.push_back(Reader(logs[rank], whole, rank).line(index_of(whole, part.first), index_of(whole, part.last) + 1));
    double across = kPictureLeft + kMargin;
    for (const Column& column : line[0]) across += width_of(column);
    width = std::max(width, across);
    height += 30 + kHeading + 12 + kDrawnRanks * rank_height(line);
    lines.push_back(line);
  }
  Svg svg(width, height + 42);
  double top = 8;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [forward, backward] = Reader(logs[0], whole, 0).sent(index_of(whole, parts[i].first), index_of(whole, parts[i].last) + 1);
    svg.text(kMargin, top + 14, fmt::format("{}; a rank sends {} elements forward, {} backward", parts[i].title, forward, backward),
             {.size = 14, .bold = true});
    draw_line(svg, top + 26, lines[i]);
    top += 30 + kHeading + 12 + kDrawnRanks * rank_height(lines[i]);
  }
  double x = kMargin;
  for (const auto& [kind, text, room] : {std::tuple(Holding::Kind::Activation, "values a rank holds", 140.),
                                         {Holding::Kind::Weight, "weights a rank holds", 145.},
                                         {Holding::Kind::Term, "a term of a sum over ranks", 170.}}) {
    svg.rect(x, top + 6, 10, 10, color_of(kind));
    svg.text(x + 14, top + 15, text, {.size = 11});
    x += room;
  }
  svg.text(kMargin, top + 33,
           "outline: the whole. Values: positions down, features across. Weights: inputs down, outputs across. Lines: collectives, elements.",
           {.size = 10, .color = kFaint});
  return svg.str();
}

/// Holds the file of that name against what was observed, and the page against naming it.
void expect_picture(const std::string& name, const Scene& scene, const std::vector<Part>& parts) {
  testing_support::expect_picture_in_docs(name + ".svg", picture(observe(scene, kDrawnRanks), observe(scene, 1).front(), parts), "tensor-parallel.md");
}

TEST(TensorParallelPicture, OfAColumnWiseLayer) {
  expect_picture("tensor-column", one_linear(ColumnParallel{}, false), {{"ColumnParallel: some columns of y", "w", "w"}});
}
TEST(TensorParallelPicture, OfARowWiseLayer) { expect_picture("tensor-row", one_linear(RowParallel{}, true), {{"RowParallel: a term of y", "w", "w"}}); }
TEST(TensorParallelPicture, OfTheEmbedding) {
  expect_picture("tensor-embedding", language_model(false), {{"VocabParallelEmbedding", "embed_tokens", "embed_tokens"}});
}
TEST(TensorParallelPicture, OfTheHead) { expect_picture("tensor-head", language_model(false), {{"VocabParallelHead", "head", "head"}}); }
TEST(TensorParallelPicture, OfABlock) {
  expect_picture("tensor-block", language_model(false),
                 {{"Attention", "layers.0.attention_norm", "layers.0.attention.wo"}, {"Feed-forward", "layers.0.ffn_norm", "layers.0.feed_forward.w2"}});
}
TEST(TensorParallelPicture, OfABlockWithSequenceParallelism) {
  expect_picture("tensor-block-sequence", language_model(true),
                 {{"Attention, sequence parallel", "layers.0.attention_norm", "layers.0.attention.wo"},
                  {"Feed-forward", "layers.0.ffn_norm", "layers.0.feed_forward.w2"}});
}

}  // namespace
}  // namespace tessera
