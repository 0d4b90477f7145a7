// Reading, tokenizing, packing and dealing of text, in bytes of text per second. The text is the demo's dictionary where it is installed.
#include <filesystem>
#include <fstream>

#include <benchmark/benchmark.h>
#include <unistd.h>

#include "tessera/data/loader.h"
#include "tessera/data/text.h"
#include "tessera/data/tokenizer.h"

#ifdef TESSERA_WITH_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

namespace {

using namespace tessera::data;

struct Fixture {
  std::filesystem::path folder = std::filesystem::temp_directory_path() / ("tessera_data_bench_" + std::to_string(getpid()));
  std::filesystem::path source = "/usr/share/dictd/gcide.dict.dz";
  std::string text, model = "byte";

  Fixture() {
    std::filesystem::create_directories(folder);
    if (!std::filesystem::exists(source)) {
      source = folder / "text.txt";
      std::ofstream out(source);
      for (unsigned i = 0; i < 4000000; ++i) out << "word" << i * 2654435761u % 5000 << (i % 12 ? ' ' : '\n');
    }
    text = read_text(source);
#ifdef TESSERA_WITH_SENTENCEPIECE
    model = train_tokenizer({source}, 4096, folder / "bench").string();
#endif
  }
  ~Fixture() { std::filesystem::remove_all(folder); }
};

Fixture& fixture() {
  static Fixture instance;
  return instance;
}

void count(benchmark::State& state, int64_t bytes) { state.SetBytesProcessed(state.iterations() * bytes); }

void read_compressed_text(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(read_text(fixture().source));
  count(state, static_cast<int64_t>(fixture().text.size()));
}
BENCHMARK(read_compressed_text)->Unit(benchmark::kMillisecond);

void train_on_a_sample(benchmark::State& state) {
#ifdef TESSERA_WITH_SENTENCEPIECE
  for (auto _ : state) train_tokenizer({fixture().source}, 4096, fixture().folder / "again");
#endif
  count(state, 4 << 20);
}
BENCHMARK(train_on_a_sample)->Unit(benchmark::kMillisecond);

void encode(benchmark::State& state) {
  const auto tokenizer = Tokenizer::load(fixture().model);
  for (auto _ : state) {
    std::vector<int32_t> ids;
    ParallelEncoder(*tokenizer, static_cast<int>(state.range(0))).append(fixture().text, true, ids);
    benchmark::DoNotOptimize(ids.data());
  }
  count(state, static_cast<int64_t>(fixture().text.size()));
}
BENCHMARK(encode)->ArgName("threads")->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

#ifdef TESSERA_WITH_SENTENCEPIECE
/// The peer: the library itself, line by line.
void encode_by_sentencepiece(benchmark::State& state) {
  sentencepiece::SentencePieceProcessor processor;
  if (!processor.Load(fixture().model).ok()) return state.SkipWithError("no model");
  const std::string_view text = std::string_view(fixture().text).substr(0, 4 << 20);
  for (auto _ : state) {
    std::vector<int> ids;
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
      end = std::min(text.find('\n', begin), text.size());
      processor.Encode(text.substr(begin, end - begin), &ids).IgnoreError();
      benchmark::DoNotOptimize(ids.data());
    }
  }
  count(state, static_cast<int64_t>(text.size()));
}
BENCHMARK(encode_by_sentencepiece)->Unit(benchmark::kMillisecond);
#endif

void build_corpus(benchmark::State& state) {
  const auto tokenizer = Tokenizer::load(fixture().model);
  for (auto _ : state) Corpus::build({fixture().source}, *tokenizer, fixture().folder / "built.bin");
  count(state, static_cast<int64_t>(fixture().text.size()));
}
BENCHMARK(build_corpus)->Unit(benchmark::kMillisecond)->UseRealTime();

/// With every hash checked: what each rank does at its start.
void open_corpus(benchmark::State& state) {
  const auto tokenizer = Tokenizer::load(fixture().model);
  Corpus::open_or_build({fixture().source}, *tokenizer, fixture().folder);
  for (auto _ : state) benchmark::DoNotOptimize(Corpus::open_or_build({fixture().source}, *tokenizer, fixture().folder));
  count(state, static_cast<int64_t>(fixture().text.size()));
}
BENCHMARK(open_corpus)->Unit(benchmark::kMillisecond);

void next_step(benchmark::State& state) {
  const auto tokenizer = Tokenizer::load(fixture().model);
  Loader loader(Corpus::open_or_build({fixture().source}, *tokenizer, fixture().folder), {.seq_len = 256, .global_size = 64, .micro_size = 8});
  for (auto _ : state) benchmark::DoNotOptimize(loader.next());
  state.SetItemsProcessed(state.iterations() * 64 * 256);
}
BENCHMARK(next_step)->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  fixture();  // outside the first measurement
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
