# Libraries we stand on. Torch comes from what tools/setup found; the rest are Debian packages.
if(NOT TORCH_DIR AND DEFINED ENV{TORCH_DIR})
  set(TORCH_DIR $ENV{TORCH_DIR})
endif()
if(NOT TORCH_DIR AND EXISTS ${CMAKE_SOURCE_DIR}/build/torch_dir)
  file(STRINGS ${CMAKE_SOURCE_DIR}/build/torch_dir TORCH_DIR LIMIT_COUNT 1)
endif()
if(NOT TORCH_DIR)
  message(FATAL_ERROR "TORCH_DIR is not set: run tools/setup, or pass -DTORCH_DIR=/path/to/torch (the folder that holds lib/ and share/cmake)")
endif()
find_package(Torch REQUIRED PATHS ${TORCH_DIR}/share/cmake/Torch NO_DEFAULT_PATH)
set(TESSERA_TORCH_DIR ${TORCH_DIR})
set(CMAKE_BUILD_RPATH ${TORCH_DIR}/lib)
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../lib;${TORCH_DIR}/lib")

# The OpenMP runtime that torch itself runs on: a second one would mean a second thread pool on the same cores.
find_library(TESSERA_GOMP NAMES libgomp.so.1 gomp PATHS ${TORCH_DIR}/lib NO_DEFAULT_PATH)
if(NOT TESSERA_GOMP)
  file(GLOB TESSERA_GOMP ${TORCH_DIR}/lib/libgomp*.so* ${TORCH_DIR}/../torch.libs/libgomp*.so*)
  list(GET TESSERA_GOMP 0 TESSERA_GOMP)
endif()

find_package(fmt REQUIRED)
# Torch's include folder carries headers of another fmt than the one that spdlog and we link: ours has to be found first.
get_target_property(TESSERA_FMT_INCLUDE fmt::fmt INTERFACE_INCLUDE_DIRECTORIES)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/generated/libraries)
file(CREATE_LINK ${TESSERA_FMT_INCLUDE}/fmt ${CMAKE_BINARY_DIR}/generated/libraries/fmt SYMBOLIC)
find_package(spdlog REQUIRED)
find_package(tomlplusplus REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(ZLIB REQUIRED)
find_package(Threads REQUIRED)
find_library(TESSERA_XXHASH xxhash REQUIRED)
find_package(benchmark QUIET)
find_package(GTest QUIET)

# Optional, so that machines without these packages still build the rest.
find_library(TESSERA_SENTENCEPIECE_LIBRARY sentencepiece)
find_library(TESSERA_SENTENCEPIECE_TRAIN_LIBRARY sentencepiece_train)
add_library(tessera_sentencepiece INTERFACE)
if(TESSERA_SENTENCEPIECE_LIBRARY AND TESSERA_SENTENCEPIECE_TRAIN_LIBRARY)
  target_link_libraries(tessera_sentencepiece INTERFACE ${TESSERA_SENTENCEPIECE_LIBRARY} ${TESSERA_SENTENCEPIECE_TRAIN_LIBRARY})
  target_compile_definitions(tessera_sentencepiece INTERFACE TESSERA_WITH_SENTENCEPIECE)
endif()
set(TESSERA_SENTENCEPIECE tessera_sentencepiece)
# Never link libprotobuf beside it: Debian's libsentencepiece exports the symbols of another protobuf (3.14 against 3.21), and a process that holds both aborts.
# That is why TensorBoard's five fields are encoded in tessera/train/observers/event_record.cpp.
