# What has to be settled before Torch's own package is looked for, where it brings CUDA: it looks for the toolkit in the old way, by a folder that it is not
# told; it compiles for every architecture it was ever built for, of which newer compilers have dropped some; and it asks for C++20, which the CUDA of CMake
# before 3.26 knows nothing of though nvcc 12 has it. Anything of this that is set already stays.
find_program(TESSERA_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT TESSERA_NVCC)
  message(FATAL_ERROR "nvcc was not found, and ${TORCH_DIR} is a torch with CUDA, or TESSERA_CUDA = ON: install a CUDA toolkit (12.x or 13.x) and put its "
                      "bin into PATH or its folder into CUDA_HOME, or build without CUDA against a torch without it")
endif()

# nvcc itself says where its toolkit lies, however it is wrapped or linked to.
file(WRITE ${CMAKE_BINARY_DIR}/generated/empty.cu "")
execute_process(COMMAND ${TESSERA_NVCC} --dryrun --compile ${CMAKE_BINARY_DIR}/generated/empty.cu OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(NOT said MATCHES "#\\$ TOP=([^\n]*)")
  message(FATAL_ERROR "${TESSERA_NVCC} --dryrun does not say where its toolkit lies: ${said}")
endif()
get_filename_component(toolkit "${CMAKE_MATCH_1}" ABSOLUTE)
get_filename_component(toolkit ${toolkit} REALPATH)
set(CUDA_TOOLKIT_ROOT_DIR ${toolkit} CACHE PATH "The CUDA toolkit (of nvcc)")
set(CMAKE_CUDA_COMPILER ${toolkit}/bin/nvcc CACHE FILEPATH "nvcc")
# What compiles for the host: nvcc takes no compiler that is newer than itself, and clang-19 is for some.
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  find_program(TESSERA_CUDA_HOST g++)
  if(TESSERA_CUDA_HOST)
    set(CMAKE_CUDA_HOST_COMPILER ${TESSERA_CUDA_HOST} CACHE FILEPATH "The compiler behind nvcc")
  endif()
endif()

# One list of architectures: CMake's for our kernels, torch's for what its package adds to every CUDA target.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)
endif()
if(NOT DEFINED TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
  set(TORCH_CUDA_ARCH_LIST "")
  foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})
    string(REGEX REPLACE "^([0-9]+)([0-9])([a-z]?)(-real|-virtual)?$" "\\1.\\2\\3" dotted ${architecture})
    list(APPEND TORCH_CUDA_ARCH_LIST ${dotted})
  endforeach()
endif()

enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
unset(CMAKE_CUDA_ARCHITECTURES)  # torch's package warns of it, and adds its own list to every target
