#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tessera/core/hash.h"
#include "tests/fuzz/mutator.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

const std::filesystem::path kCorpora = TESSERA_FUZZ_CORPORA;

struct NamedInput {
  std::string name, bytes;
};

std::vector<NamedInput> corpus_of(const std::string& target) {
  std::vector<NamedInput> inputs;
  for (const auto& entry : std::filesystem::directory_iterator(kCorpora / target)) {
    std::ifstream in(entry.path(), std::ios::binary);
    inputs.push_back({entry.path().filename().string(), {std::istreambuf_iterator<char>(in), {}}});
  }
  std::ranges::sort(inputs, {}, &NamedInput::name);  // a folder has no order of its own
  return inputs;
}

/// What runs now, so that an input that ends the process can be looked at.
std::string_view running;
std::string running_file;

void save_running() {
  const int file = ::open(running_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  for (std::string_view rest = running; file >= 0 && !rest.empty();) {
    const ssize_t written = ::write(file, rest.data(), rest.size());
    if (written <= 0) break;
    rest.remove_prefix(static_cast<size_t>(written));
  }
  ::close(file);
}

extern "C" void on_crash(int signal) {
  save_running();
  for (const std::string_view part : {std::string_view("the input that ended this process is in "), std::string_view(running_file), std::string_view("\n")}) {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, part.data(), part.size());
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// Feeds inputs to one target; a finding is a failed expectation with the saved input's name, or the end of the process.
class Fuzz : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    running_file = (std::filesystem::path(testing::TempDir()) / (GetParam() + ".finding")).string();
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(signal, on_crash);
    limit_memory();
  }
  void TearDown() override {
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(signal, SIG_DFL);
  }

  /// False after a finding.
  bool feed(const std::string& what, std::string_view input) {
    running = input;
    try {
      targets().at(GetParam())(input);
      return true;
    } catch (const std::exception& error) {
      save_running();
      ADD_FAILURE() << GetParam() << ", " << what << ": " << error.what() << "\nthe input is in " << running_file;
      return false;
    }
  }

 private:
  /// No parser needs 512 MB for a file of some KB: one that asks for more gets std::bad_alloc. The sanitizers have limits of their own, and reserve terabytes.
  static void limit_memory() {
#ifndef TESSERA_SANITIZED
    std::ifstream pages("/proc/self/statm");
    rlim_t used = 0;
    ASSERT_TRUE(pages >> used);
    const rlimit limit{used * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t{512} << 20), RLIM_INFINITY};
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
#endif
  }
};

TEST_P(Fuzz, TakesTheCorpus) {
  const auto inputs = corpus_of(GetParam());
  EXPECT_FALSE(inputs.empty());
  for (const auto& [name, bytes] : inputs) feed(name, bytes);
  feed("the empty input", "");
}

/// Some mutations, always the same ones, for less than half a second or as long as the environment says. `make fuzz` goes on from there.
TEST_P(Fuzz, TakesMutations) {
  const char* given = std::getenv("TESSERA_FUZZ_SECONDS");
  const std::chrono::duration<double> budget(given ? std::atof(given) : 0.4);
  std::vector<std::string> inputs;
  for (auto& input : corpus_of(GetParam())) inputs.push_back(std::move(input.bytes));
  Mutator mutator(std::move(inputs), hash_bytes(GetParam().data(), GetParam().size()));
  int64_t count = 0;
  for (const auto begin = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - begin < budget; ++count) {
    const std::string input = mutator.next();
    if (!feed(detail::concat("mutation ", count), input)) break;
  }
  std::cout << GetParam() << ": " << count << " inputs in " << budget.count() << " s\n";
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, target] : targets()) all.push_back(name);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Fuzz, Fuzz, testing::ValuesIn(names()), [](const auto& name) { return name.param; });

TEST(Corpora, EveryOneHasATarget) {
  for (const auto& entry : std::filesystem::directory_iterator(kCorpora)) EXPECT_TRUE(targets().contains(entry.path().filename().string())) << entry.path();
}

TEST(Mutator, GivesTheSameInputsForTheSameSeed) {
  Mutator one({"abc", "{\"n\": 12}"}, 7), same({"abc", "{\"n\": 12}"}, 7), other({"abc", "{\"n\": 12}"}, 8);
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    const std::string input = one.next();
    EXPECT_EQ(input, same.next());
    differs |= input != other.next();
  }
  EXPECT_TRUE(differs);
}

TEST(Mutator, KeepsToItsLimitAndTakesNothing) {
  Mutator mutator({}, 1, 10);
  for (int i = 0; i < 1000; ++i) EXPECT_LE(mutator.next().size(), 10u);
}

/// A length that is believed: the kind of bug that all this is for.
TEST(Mutator, FindsAPlantedBug) {
  const auto planted = [](const std::string& input) { return input.size() > 4 && input[0] == 'T' && static_cast<unsigned char>(input[1]) > input.size(); };
  Mutator mutator({std::string("T\x04good", 6)}, 1);
  int tries = 1;
  while (!planted(mutator.next()) && tries < 10'000) ++tries;
  EXPECT_LT(tries, 10'000);
}

/// A target is judged by what it throws.
TEST(Accepts, OnlyRefusalsThatNameThePlace) {
  EXPECT_TRUE(accepts("file", [] {}));
  EXPECT_FALSE(accepts("file", [] { throw ConfigError("file: offset 3"); }));
  EXPECT_THROW(accepts("file", [] { throw ConfigError("offset 3"); }), Violation);
  EXPECT_THROW(accepts("file", [] { throw Error("file: offset 3"); }), Error);
  EXPECT_THROW(accepts("file", [] { throw std::bad_alloc(); }), std::bad_alloc);
}

}  // namespace
}  // namespace tessera::fuzz
