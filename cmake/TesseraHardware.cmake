# What makers say of devices (tessera/plan/hardware/*.toml) is part of the library, so that the command finds it wherever it was copied to.
file(GLOB hardware CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tessera/plan/hardware/*.toml)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${hardware})
list(LENGTH hardware hardware_count)
set(hardware_entries "")
foreach(path ${hardware})
  get_filename_component(name ${path} NAME_WE)
  file(READ ${path} text)
  string(APPEND hardware_entries "    {\"${name}\", R\"toml(${text})toml\"},\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/tessera/plan/hardware_files.h @ONLY CONTENT
"// Made by cmake/TesseraHardware.cmake.
#pragma once

#include <array>
#include <string_view>
#include <utility>

namespace tessera::plan {

inline constexpr std::array<std::pair<std::string_view, std::string_view>, @hardware_count@> kHardwareFiles{{
@hardware_entries@}};

}  // namespace tessera::plan
")
