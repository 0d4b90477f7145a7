#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

/// TensorBoard's event files, as bytes: the few protobuf fields that scalars need, and the records they are framed in.
///
/// Encoded here because libprotobuf and libsentencepiece cannot share a process (cmake/TesseraDependencies.cmake). Field numbers are those of TensorFlow's
/// event.proto and summary.proto.
namespace tessera {

/// CRC-32C (Castagnoli), as in iSCSI (RFC 3720).
uint32_t crc32c(std::string_view bytes);

/// TFRecord framing: length uint64 | masked checksum of the length | data | masked checksum of the data, little-endian.
std::string event_record(std::string_view data);

/// What a file begins with: Event{wall_time, file_version = "brain.Event:2"}.
std::string file_version_event(double wall_time);

/// Event{wall_time, step, session_log{status = START}}: readers drop what older files say of `step` and later.
std::string restart_event(double wall_time, int64_t step);

/// Event{wall_time, step, summary{value{tag, simple_value}...}}.
std::string scalars_event(double wall_time, int64_t step, std::span<const std::pair<std::string, double>> scalars);

}  // namespace tessera
