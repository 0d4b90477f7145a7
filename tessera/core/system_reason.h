#pragma once

#include <string>
#include <system_error>

namespace tessera {

/// What a system_error says, in one sentence. Where no thread or process could be started, with what limits them and the way out: whoever starts one, in our
/// code or in a library's, throws no more than "Resource temporarily unavailable".
std::string reason_of(const std::system_error& error);

/// Why a file could not be written, by its errno: "No space left on device". Of a limit of this process, which looks like a full disk, with its name. 0: none
/// was said.
std::string reason_of_writing(int code);

}  // namespace tessera
