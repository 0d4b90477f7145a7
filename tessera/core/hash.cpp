#include "tessera/core/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "tessera/core/rng.h"

namespace tessera {

struct Hasher::State {
  State() : xxh(XXH3_createState()) { XXH3_64bits_reset(xxh); }
  ~State() { XXH3_freeState(xxh); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {}
Hasher::~Hasher() = default;
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;

Hasher& Hasher::update(const void* data, size_t bytes) {
  XXH3_64bits_update(state_->xxh, data, bytes);
  return *this;
}

uint64_t Hasher::value() const { return XXH3_64bits_digest(state_->xxh); }
std::string Hasher::hex() const { return to_hex(value()); }

uint64_t hash_bytes(const void* data, size_t bytes) { return XXH3_64bits(data, bytes); }
std::string hash_hex(const void* data, size_t bytes) { return to_hex(hash_bytes(data, bytes)); }
std::string to_hex(uint64_t value) { return fmt::format("{:016x}", value); }

uint64_t hash_string(std::string_view text) { return XXH64(text.data(), text.size(), 0); }

}  // namespace tessera
