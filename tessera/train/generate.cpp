#include "tessera/train/generate.h"

#include <algorithm>
#include <list>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/connect.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/models/kv_cache.h"

// A round takes every text in flight through the stages once: its prompt, or its newest token. Rounds overlap: a rank begins the next one as soon as it is done
// with its own part of the last, and waits for a text's token only where it comes to that text. Whether a text has ended by what was drawn is therefore not
// known when a round begins; how many tokens it reads is, for that follows from counts. So a text that has ended goes through one more round, in which nothing
// is computed for it, and is gone from the round after, on every rank the same.
//
// A context that is full does not move on by one token: each move would mean to read all of it again, since what is kept of every token was computed with those
// before it. The newer half is read again instead, once in capacity / 2 tokens: one more token read for each that is made. Where fewer than that are still to
// be made, more of the text fits beside them, and is read.

namespace tessera {
namespace {

/// A text on its way.
struct Text {
  const TextRequest* request = nullptr;
  std::vector<int64_t> seen;  ///< prompt and what was made of it, as far as this rank knows
  size_t prompt = 0;          ///< tokens of it
  int64_t rounds = 0;         ///< it has been in, so many tokens have been or are being made
  int64_t cached = 0;         ///< its newest tokens that lie in the cache
  bool stopped = false;       ///< by what was drawn
};

/// Room for a text in flight: one place of the cache, one micro-batch of each round.
struct Place {
  std::optional<size_t> text;    ///< that is read in this round; none: it goes through the round for `asked` alone
  int64_t begin = 0, reads = 1;  ///< tokens of it in the cache, and that are read now
  bool settled = false;          ///< this rank has come to it in this round
  std::optional<size_t> asked;   ///< whose newest token is not yet among those seen
  at::Tensor token{};            ///< that one, int64 [1], once `coming` is here
  comm::Pending coming{};
};

class Generation final : public Pass {
 public:
  Generation(ForwardEngine& engine, const std::vector<TextRequest>& requests, const GenerateOptions& options)
      : engine_(engine),
        options_(options),
        ranks_(engine.beside()),
        places_(places_for(engine, requests, options)),
        cache_(engine.model(), static_cast<int>(places_.size()), capacity_for(engine, requests, options), engine.columns().group) {
    check_generates(engine.model().config());
    for (const TextRequest& request : requests) {
      require(!request.prompt.empty(), "the prompt is empty: a continuation needs at least one token to begin with");
      texts_.push_back({.request = &request, .seen = request.prompt, .prompt = request.prompt.size()});
    }
    if (options.max_new_tokens <= 0) next_ = texts_.size();
    connect();
    first_tag_ = pipeline::end_of_tags(static_cast<int>(places_.size()), pipeline::chain(static_cast<int>(engine.rank_of_stage().size())));
  }

  std::vector<std::vector<int64_t>> make() {
    while (begin_round()) {
      engine_.run(*this, static_cast<int>(round_.size()));
      while (!sending_.empty() && sending_.front().done()) {
        sending_.front().wait();
        sending_.pop_front();
      }
    }
    for (Place& place : places_) hear(place);
    for (auto& pending : sending_) pending.wait();
    std::vector<std::vector<int64_t>> made;
    for (const Text& text : texts_) made.emplace_back(text.seen.begin() + static_cast<int64_t>(text.prompt), text.seen.end());
    return made;
  }

  Size size(int micro_batch) const override {
    const Place& place = place_of(micro_batch);
    const ColumnRanks& columns = engine_.columns();
    if (!is_cut(place)) return {.rows = 1, .seq_len = place.reads, .columns = place.reads};
    const auto cut = std::make_shared<const SequenceCut>(columns.of(place.reads));
    return {.rows = 1, .seq_len = place.reads, .columns = cut->columns(columns.group.rank()), .cut = cut};
  }

  at::Tensor run(int micro_batch, const Compute& compute) override {
    Place& place = place_of(micro_batch);
    if (!std::exchange(place.settled, true)) come_to(place);
    if (!place.text || texts_[*place.text].stopped) return {};
    const Text& text = texts_[*place.text];
    const bool cut = is_cut(place);
    const KvCache::Reading reading(cache_, static_cast<int>(&place - places_.data()), place.begin, size(micro_batch).columns,
                                   cut ? KvCache::Read::Part : KvCache::Read::Whole);
    const ColumnRanks& ranks = engine_.columns();
    const at::Tensor positions = cut ? ranks.of(place.reads).positions(ranks.group.rank(), engine_.device()) : reading.positions(engine_.device());
    at::Tensor tokens;
    if (engine_.reads().tokens) {
      const std::vector<int64_t> newest(text.seen.end() - place.reads, text.seen.end());
      tokens = at::tensor(newest, at::kLong).unsqueeze(0).to(engine_.device());
      if (cut) tokens = tokens.index_select(1, positions);
    }
    return compute({.tokens = tokens, .positions = positions, .last_alone = true});
  }

  at::Tensor finish(int micro_batch, const at::Tensor& given) override {
    Place& place = place_of(micro_batch);
    const Text& text = texts_[*place.text];
    const comm::Group& columns = engine_.columns().group;
    const int owner = owner_of_last(place);
    const int64_t token = columns.rank() == owner ? sample_token(given[0][0], text.request->sample, static_cast<uint64_t>(text.rounds - 1)) : 0;
    place.token = at::full({1}, token, at::TensorOptions(at::kLong).device(engine_.device()));
    const comm::CallSite site("pipeline.token");
    comm::broadcast(columns, place.token, owner);
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      if (rank != ranks_.rank()) sending_.push_back(comm::send_async(ranks_, place.token, rank, tag_of(place)));
    }
    if (ranks_.size() == 1) hear(place);  // nobody is a round behind
    return {};
  }

 private:
  static std::vector<Place> places_for(const ForwardEngine& engine, const std::vector<TextRequest>& requests, const GenerateOptions& options) {
    const int most = options.in_flight > 0 ? options.in_flight : engine.ranks().size();
    return std::vector<Place>(std::min(requests.size(), static_cast<size_t>(most)));
  }

  /// Room for the longest text, as far as the model can see.
  static int64_t capacity_for(const ForwardEngine& engine, const std::vector<TextRequest>& requests, const GenerateOptions& options) {
    size_t longest = 0;
    for (const TextRequest& request : requests) longest = std::max(longest, request.prompt.size());
    const int64_t most = engine.model().max_seq_len();
    return std::min(most, static_cast<int64_t>(longest) + std::min(std::max<int64_t>(options.max_new_tokens, 0), most));
  }

  Place& place_of(int micro_batch) { return places_[round_[static_cast<size_t>(micro_batch)]]; }
  const Place& place_of(int micro_batch) const { return places_[round_[static_cast<size_t>(micro_batch)]]; }
  int tag_of(const Place& place) const { return first_tag_ + static_cast<int>(&place - places_.data()); }

  /// A rank receives a token before it has sent what the token is made of.
  void connect() const {
    const comm::CallSite site("pipeline.token");
    std::set<int> peers{engine_.end_rank()};
    for (int rank = 0; engine_.holds_end() && rank < ranks_.size(); ++rank) peers.insert(rank);
    peers.erase(ranks_.rank());
    comm::connect(ranks_, peers, engine_.device());
  }

  /// Puts texts at places that are free, and says what each reads. False: there is nothing left to read.
  bool begin_round() {
    round_.clear();
    bool reads = false;
    for (size_t i = 0; i < places_.size(); ++i) {
      Place& place = places_[i];
      place.settled = false;
      place.reads = 1;
      if (place.text && ended(texts_[*place.text])) place.text.reset();
      if (!place.text && next_ < texts_.size()) place.text = next_++;
      if (place.text) plan(place);
      if (place.text || place.asked) round_.push_back(i);
      reads |= place.text.has_value();
    }
    return reads;
  }

  /// Whether ranks read other columns of what is read at a place: of what begins there, where there is one for each; what follows asks all of them.
  bool is_cut(const Place& place) const { return engine_.columns().cut() && place.begin == 0 && place.reads >= engine_.columns().group.size(); }

  /// Which of the ranks that columns are dealt over has the last one, whose logits count.
  int owner_of_last(const Place& place) const {
    if (!is_cut(place)) return 0;
    const SequenceCut cut = engine_.columns().of(place.reads);
    const auto has_last = [&](const auto& runs) { return runs.back().begin + runs.back().size == place.reads; };
    return static_cast<int>(std::ranges::find_if(cut.runs, has_last) - cut.runs.begin());
  }

  bool ended(const Text& text) const { return text.stopped || text.rounds == options_.max_new_tokens; }

  /// By counts alone, which are the same on all ranks.
  void plan(Place& place) {
    Text& text = texts_[*place.text];
    const int64_t capacity = cache_.capacity();
    const int64_t length = static_cast<int64_t>(text.prompt) + text.rounds;
    const bool begins = text.rounds == 0;
    place.begin = text.cached;
    place.reads = begins ? length : 1;
    if (begins ? length >= capacity : place.begin + place.reads > capacity) {
      place.begin = 0;
      place.reads = newest_tokens(length, capacity, options_.max_new_tokens - text.rounds);
    }
    text.cached = place.begin + place.reads;
    ++text.rounds;
  }

  /// In each round, before anything else at a place: what the round before has made there. Tokens travel beside the stream, under tags of their own, and in a
  /// group of their own where the engine matches messages by their order alone.
  void come_to(Place& place) {
    hear(place);
    if (!place.text || texts_[*place.text].stopped) return;
    place.asked = place.text;
    if (engine_.holds_end()) return;  // finish() has it
    place.token = at::empty({1}, at::TensorOptions(at::kLong).device(engine_.device()));
    const comm::CallSite site("pipeline.token");
    place.coming = comm::recv_async(ranks_, place.token, engine_.end_rank(), tag_of(place));
  }

  void hear(Place& place) {
    if (!place.asked) return;
    place.coming.wait();
    place.coming = {};
    const size_t number = *std::exchange(place.asked, std::nullopt);
    Text& text = texts_[number];
    const auto token = static_cast<int64_t>(host_read(place.token, 0));
    text.seen.push_back(token);
    text.stopped = token == options_.end_of_text;
    if (options_.on_token && !options_.on_token(number, token)) text.stopped = true;
  }

  ForwardEngine& engine_;
  const GenerateOptions& options_;
  comm::Group ranks_;
  std::vector<Place> places_;
  KvCache cache_;
  std::vector<Text> texts_;
  size_t next_ = 0;            ///< text that has no place yet
  std::vector<size_t> round_;  ///< the places that are in it
  int first_tag_ = 0;
  std::list<comm::Pending> sending_;
};

}  // namespace

int64_t newest_tokens(int64_t length, int64_t capacity, int64_t wanted) {
  return std::min(length, std::max({int64_t{1}, capacity / 2, capacity - (wanted - 1)}));
}

void check_generates(const ModelConfig& model) {
  require(
      model.router != "expert_choice",
      "model.router = expert_choice: experts choose among all tokens of a pass, so that what a token becomes depends on those behind it, which are yet to be "
      "drawn; such a model is trained and evaluated, and a softmax or sigmoid router generates");
}

std::vector<std::vector<int64_t>> generate(ForwardEngine& engine, const std::vector<TextRequest>& texts, const GenerateOptions& options) {
  if (texts.empty()) return {};
  return Generation(engine, texts, options).make();
}

std::vector<int64_t> generate(ForwardEngine& engine, const std::vector<int64_t>& prompt, int64_t max_new_tokens, const SampleOptions& sample) {
  return generate(engine, {{.prompt = prompt, .sample = sample}}, {.max_new_tokens = max_new_tokens}).front();
}

}  // namespace tessera
