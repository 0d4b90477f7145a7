# Language, warnings, sanitizers, linker and cache: what every target of ours shares.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_COMPILE_OPTIONS_PIE -fPIC)  # one precompiled header serves libraries and executables, so both are compiled alike
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  # Precompiled headers need these two before ccache will store what includes them.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} ${TESSERA_CCACHE})
endif()

add_library(tessera_flags INTERFACE)
target_compile_options(tessera_flags INTERFACE -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(tessera_flags INTERFACE "SHELL:-Xclang -fno-pch-timestamp" -fpch-instantiate-templates -Wno-deprecated-declarations
                         -Wno-missing-designated-field-initializers)
  find_program(TESSERA_LLD ld.lld-19)
  if(TESSERA_LLD)
    target_link_options(tessera_flags INTERFACE -fuse-ld=lld-19)
  endif()
endif()
if(TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=undefined -fno-sanitize=vptr,function)
  target_link_options(tessera_flags INTERFACE -fsanitize=${TESSERA_SANITIZE})
endif()
