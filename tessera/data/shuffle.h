#pragma once

#include <cstdint>

namespace tessera::data {

/// A pseudo-random permutation of 0 .. size-1 that needs no memory: each image in O(1), so a run can be entered anywhere.
///
/// A Feistel network of 6 rounds (Luby and Rackoff, SIAM J. Comput. 17, 1988) on the smallest even number of bits that holds size, walked along its cycle
/// until the image lies below size (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): fewer than 4 walks on average.
class Permutation {
 public:
  /// `size` >= 1. Different (seed, epoch) give unrelated permutations.
  Permutation(int64_t size, uint64_t seed, uint64_t epoch);

  /// The image of `index`, 0 <= index < size.
  int64_t operator()(int64_t index) const;

 private:
  int64_t size_;
  int half_bits_;
  uint64_t mask_;
  uint64_t keys_[6];
};

}  // namespace tessera::data
