#pragma once

#include <string>
#include <string_view>
#include <system_error>

namespace tessera {

/// Where a limit on threads and processes is reached, and the way out.
inline constexpr std::string_view kNoMoreThreads =
    "no more threads or processes can be started, for a limit on them is reached; raise it (ulimit -u, or the pids limit of the container), or start fewer "
    "ranks and threads";

/// What a system_error says, in one sentence. Where no thread or process could be started, that one: whoever starts one, in our
/// code or in a library's, throws no more than "Resource temporarily unavailable".
std::string reason_of(const std::system_error& error);

/// Why a file could not be written, by its errno: "No space left on device". Of a limit of this process, which looks like a full disk, with its name. 0: none
/// was said.
std::string reason_of_writing(int code);

/// Whether an errno says that there is no room: on the disk, in a quota, or by the limit of this process (ulimit -f).
bool is_full(int code);

/// The one rule for files that cannot be written: "`problem`: the reason; `way_out`". Where there is no room that is nothing that was asked for wrongly, for
/// the same may be written once there is some: throws Error, with making room as the first way out (the command ends with 1, and a launcher starts a rank
/// again). Anything else throws ConfigError (2).
[[noreturn]] void fail_to_write(const std::string& problem, int code, const std::string& way_out);

}  // namespace tessera
