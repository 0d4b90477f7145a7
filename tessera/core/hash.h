#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera {

/// 64-bit hash for finding damaged files and changed inputs (XXH3; not cryptographic), about memory speed. Stable across machines.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;

  Hasher& update(const void* data, size_t bytes);  ///< the split into calls does not change the result
  uint64_t value() const;                          ///< of all bytes so far
  std::string hex() const;                         ///< value() as 16 lower-case hexadecimal digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t hash_bytes(const void* data, size_t bytes);
std::string hash_hex(const void* data, size_t bytes);  ///< 16 lower-case hexadecimal digits
std::string to_hex(uint64_t value);                    ///< the same form

}  // namespace tessera
