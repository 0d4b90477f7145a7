# What makers say of devices (tessera/plan/hardware/*.toml), and how other frameworks do our step (tessera/plan/frameworks/*.toml), is part of the library, so
# that the command finds it wherever it was copied to.
function(tessera_entries folder out)
  file(GLOB paths CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tessera/plan/${folder}/*.toml)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${paths})
  list(LENGTH paths count)
  set(entries "")
  foreach(path ${paths})
    get_filename_component(name ${path} NAME_WE)
    file(READ ${path} text)
    string(APPEND entries "    {\"${name}\", R\"toml(${text})toml\"},\n")
  endforeach()
  set(${out} "${entries}" PARENT_SCOPE)
  set(${out}_count ${count} PARENT_SCOPE)
endfunction()
tessera_entries(hardware hardware)
tessera_entries(frameworks frameworks)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/tessera/plan/hardware_files.h @ONLY CONTENT
"// Made by cmake/TesseraHardware.cmake.
#pragma once

#include <array>
#include <string_view>
#include <utility>

namespace tessera::plan {

inline constexpr std::array<std::pair<std::string_view, std::string_view>, @hardware_count@> kHardwareFiles{{
@hardware@}};

inline constexpr std::array<std::pair<std::string_view, std::string_view>, @frameworks_count@> kFrameworkFiles{{
@frameworks@}};

}  // namespace tessera::plan
")
