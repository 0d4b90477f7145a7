# The fuzzers (preset `fuzz`: clang with libFuzzer, address and undefined-behavior sanitizers): one program per file of tests/fuzz/targets. Only the folders that
# hold parsers are compiled, into an archive, of which each program links what its target calls. tests/fuzz/CMakeLists.txt builds the same targets into an ordinary test.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "TESSERA_FUZZ = ON: libFuzzer comes with clang, and the compiler is ${CMAKE_CXX_COMPILER_ID}; set CXX=clang++-19")
endif()
if(NOT TESSERA_SANITIZE MATCHES "fuzzer-no-link")
  message(FATAL_ERROR "TESSERA_FUZZ = ON: TESSERA_SANITIZE = '${TESSERA_SANITIZE}' must hold fuzzer-no-link; use cmake --preset fuzz")
endif()
set(room ${CMAKE_SOURCE_DIR}/tessera)
file(GLOB sources CONFIGURE_DEPENDS ${room}/core/*.cpp ${room}/config/*.cpp ${room}/memory/*.cpp ${room}/layout/*.cpp ${room}/data/*.cpp ${room}/checkpoint/*.cpp
  ${room}/comm/*.cpp ${room}/comm/meeting/*.cpp ${room}/comm/algorithms/*.cpp ${room}/comm/flight_record/*.cpp ${room}/comm/decorators/*.cpp ${room}/launch/round*.cpp ${room}/launch/job_end.cpp ${room}/pipeline/schedules/*.cpp)
add_library(tessera_fuzzed STATIC ${sources} ${CMAKE_SOURCE_DIR}/tests/fuzz/target.cpp ${CMAKE_SOURCE_DIR}/tests/fuzz/libfuzzer.cpp)
set_source_files_properties(${room}/core/rng.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-fno-math-errno" SKIP_PRECOMPILE_HEADERS ON)
target_link_libraries(tessera_fuzzed PUBLIC tessera_base fmt::fmt spdlog::spdlog tomlplusplus::tomlplusplus nlohmann_json::nlohmann_json
  ${TESSERA_XXHASH} ${TESSERA_SENTENCEPIECE} ZLIB::ZLIB)
tessera_use_pch(tessera_fuzzed)

file(GLOB targets CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/fuzz/targets/*.cpp)
foreach(source ${targets})
  get_filename_component(name ${source} NAME_WE)
  add_executable(fuzz_${name} ${source})
  target_link_libraries(fuzz_${name} PRIVATE tessera_fuzzed)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer -Wl,-u,LLVMFuzzerTestOneInput)
  target_compile_definitions(fuzz_${name} PRIVATE TESSERA_FUZZ_CORPORA="${CMAKE_SOURCE_DIR}/tests/fuzz/corpus")
  tessera_use_pch(fuzz_${name})
endforeach()
