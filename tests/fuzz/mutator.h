#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace tessera::fuzz {

/// Makes inputs out of others, without knowing their format: flips, overwrites, inserts, removes and repeats bytes, puts extreme numbers where there are
/// numbers (in digits or little-endian), and crosses two inputs. The same seed gives the same inputs everywhere.
class Mutator {
 public:
  /// `inputs` are what it starts from; none means the empty one. No result is longer than `most_bytes` or the longest of them.
  Mutator(std::vector<std::string> inputs, uint64_t seed, size_t most_bytes = 1 << 14);

  /// The next input: one of the given ones after 1 to 8 mutations.
  std::string next();

 private:
  size_t below(size_t limit);  // uniform; 0 where limit is
  void mutate(std::string& input);
  void replace_digits(std::string& input);
  void overwrite_integer(std::string& input);
  void insert_from(std::string& input, const std::string& other);

  std::vector<std::string> inputs_;
  std::mt19937_64 random_;
  size_t most_bytes_;
};

}  // namespace tessera::fuzz
