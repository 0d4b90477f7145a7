# The hardware files of the planner, as texts of the library: `tessera plan --device h100` works wherever the command is installed.
file(GLOB hardware_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tessera/plan/hardware/*.toml)
set(entries "")
foreach(file ${hardware_files})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  string(APPEND entries "      {\"${name}\", R\"toml(${text})toml\"},\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/hardware_files.cpp CONTENT
"// Made by cmake/TesseraHardware.cmake from tessera/plan/hardware.
#include \"tessera/plan/hardware_files.h\"

namespace tessera::plan {

const std::map<std::string_view, std::string_view>& hardware_files() {
  static const std::map<std::string_view, std::string_view> files{
${entries}  };
  return files;
}

}  // namespace tessera::plan
" @ONLY)
target_sources(tessera_plan PRIVATE ${CMAKE_BINARY_DIR}/generated/hardware_files.cpp)
