// The picture of docs/moe.md: where the rows of a forward pass go, as the experts' calls and a recorder on each rank see it.

#include <mutex>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/core/svg.h"
#include "tessera/expert_parallel/exchange.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/models/mixture.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tests/made_docs.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

constexpr int kDrawn = 3;
constexpr int64_t kWidth = 8, kDrawnExperts = 6;
constexpr double kSquare = 11, kLine = 86, kTop = 58, kLeft = 64, kStrip = 250;

struct Counted : nn::Interceptor {
  explicit Counted(std::vector<int64_t>& counts) : counts(counts) {}
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    const at::Tensor& seen = inputs[1].toTensor();
    counts.assign(seen.const_data_ptr<int64_t>(), seen.const_data_ptr<int64_t>() + seen.numel());
    return next(std::move(inputs));
  }
  std::vector<int64_t>& counts;
};

/// Counts of each rank's rows by expert in a pass of a mixture, and how many bytes of rows the recorder saw each rank send.
struct Routed {
  std::vector<std::vector<int64_t>> counts{kDrawn};
  std::vector<int64_t> sent = std::vector<int64_t>(kDrawn);
};

Routed route() {
  Routed routed;
  const ModelConfig config{.family = "mixtral", .dim = kWidth, .layers = 1, .heads = 2, .ffn_dim = 5, .experts = kDrawnExperts, .experts_per_token = 2};
  comm::run_ranks(kDrawn, [&](comm::World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::Group group({.name = "ep", .rank = world.rank(), .size = kDrawn, .timeout = std::chrono::seconds(60)},
                            comm::make_record_engine(records, {.name = "ep", .rank = world.rank(), .size = kDrawn}, world.group().engine()));
    auto mixture = on_meta([&] { return MixtureFeedForward(config); });
    nn::assign_paths(*mixture);
    const auto parallel = expert_parallel(*mixture, group);
    const auto own = static_cast<size_t>(world.rank());
    const Attachment counted = nn::attach(*mixture, "experts", std::make_shared<Counted>(routed.counts[own]));
    materialize(*mixture, 5, testing_support::test_device());
    const at::NoGradGuard no_grad;
    mixture((at::arange(7 * kWidth, at::kFloat) * (0.37 + 0.1 * world.rank())).sin().view({1, 7, kWidth}));
    routed.sent[own] = records->records().at(1).sent_bytes;  // behind the counts
  });
  return routed;
}

class ExchangePicture {
 public:
  explicit ExchangePicture(const std::vector<std::vector<int64_t>>& counts) : counts_(counts), svg_(kLeft + 3 * kStrip + 20, kTop + (kDrawn - 1) * kLine + 32) {
    const size_t here = counts[0].size() / counts.size();
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      std::vector<int64_t> arriving;
      for (const auto& from : counts) {
        const auto first = from.begin() + static_cast<int64_t>(rank * here);
        arriving.insert(arriving.end(), first, first + static_cast<int64_t>(here));
      }
      exchanges_.push_back(experts::make_exchange(counts[rank], arriving, kDrawn));
    }
  }

  const std::vector<experts::Exchange>& exchanges() const { return exchanges_; }

  std::string draw() {
    for (const auto& [strip, title] :
         {std::pair{0, "rows that were chosen, by expert"}, {1, "what comes, by the rank that sent"}, {2, "what the experts multiply"}}) {
      svg_.text(kLeft + strip * kStrip, 20, title, {.bold = true});
    }
    svg_.text(kLeft, 38, fmt::format("a color for each of {} experts, two on each rank; results go back the same way", kDrawnExperts), {.color = "#666666"});
    for (size_t rank = 0; rank < exchanges_.size(); ++rank) lines(rank);
    for (size_t rank = 0; rank < exchanges_.size(); ++rank) {
      svg_.text(8, y(rank) + kSquare, fmt::format("rank {}", rank), {.bold = true});
      std::vector<size_t> came;
      for (size_t from = 0; from < counts_.size(); ++from) {
        for (const size_t expert : experts_of_rows(from)) {
          if (holder(expert) == rank) came.push_back(expert);
        }
      }
      std::vector<size_t> sorted;
      for (const int64_t row : exchanges_[rank].order) sorted.push_back(came[static_cast<size_t>(row)]);
      squares(0, rank, experts_of_rows(rank));
      squares(1, rank, came);
      squares(2, rank, sorted);
    }
    return svg_.str();
  }

 private:
  static double y(size_t rank) { return kTop + static_cast<double>(rank) * kLine; }
  static double x(int strip, int64_t row) { return kLeft + strip * kStrip + static_cast<double>(row) * (kSquare + 2); }
  size_t holder(size_t expert) const { return expert / (counts_[0].size() / counts_.size()); }

  std::vector<size_t> experts_of_rows(size_t rank) const {
    std::vector<size_t> rows;
    for (size_t expert = 0; expert < counts_[rank].size(); ++expert) rows.insert(rows.end(), static_cast<size_t>(counts_[rank][expert]), expert);
    return rows;
  }

  void squares(int strip, size_t rank, const std::vector<size_t>& experts) {
    for (size_t row = 0; row < experts.size(); ++row) {
      svg_.rect(x(strip, static_cast<int64_t>(row)), y(rank), kSquare, kSquare, Svg::color(experts[row]), fmt::format("expert {}", experts[row]));
    }
  }

  /// From the middle of what goes to a rank to the middle of what comes from this one.
  void lines(size_t from) {
    int64_t left = 0;
    for (size_t to = 0; to < exchanges_.size(); ++to) {
      const int64_t rows = exchanges_[from].to[to];
      const auto& comes = exchanges_[to].from;
      const int64_t right = std::accumulate(comes.begin(), comes.begin() + static_cast<int64_t>(from), int64_t{0});
      if (rows > 0) {
        const auto middle = [&](int strip, int64_t first) { return (x(strip, first) + x(strip, first + rows)) / 2 - 1; };
        const double begin = y(from) + (to < from ? -3 : kSquare + 3), end = y(to) + (to <= from ? kSquare + 3 : -3);
        svg_.line(middle(0, left), begin, middle(1, right), end, to == from ? "#bbbbbb" : "#555555", 0.6 + 0.35 * static_cast<double>(rows));
      }
      left += rows;
    }
  }

  std::vector<std::vector<int64_t>> counts_;
  std::vector<experts::Exchange> exchanges_;
  Svg svg_;
};

TEST(ExchangePicture, ThePageShowsTheRowsThatTheRecorderSaw) {
  const Routed routed = route();
  ExchangePicture picture(routed.counts);
  for (size_t rank = 0; rank < kDrawn; ++rank) {
    const experts::Exchange& exchange = picture.exchanges()[rank];
    EXPECT_EQ(routed.sent[rank], (exchange.sent() - exchange.to[rank]) * kWidth * 4) << "rank " << rank;
  }
  testing_support::expect_picture_in_docs("expert-exchange.svg", picture.draw(), "moe.md");
}

}  // namespace
}  // namespace tessera
