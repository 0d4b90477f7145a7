#pragma once

#include <map>
#include <string_view>

namespace tessera::plan {

/// The files of tessera/plan/hardware, by name without ".toml", as they were when the library was built (cmake/TesseraHardware.cmake).
const std::map<std::string_view, std::string_view>& hardware_files();

}  // namespace tessera::plan
