# The loops of tessera/kernels/cpu are compiled once per instruction set and chosen at run time. Their flags differ from everyone's, so they cannot share the
# precompiled header. Contraction is asked for by name: g++ turns it off in standard mode.
set(loops ${CMAKE_SOURCE_DIR}/tessera/kernels/cpu/loops)
set(loop_options -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-psabi)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2_options -march=x86-64-v3)
  set(avx512_options -march=x86-64-v4 -mprefer-vector-width=512)
  set(avx512_bf16_options ${avx512_options} -mavx512bf16)
endif()
set_source_files_properties(${loops}_baseline.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options}")
set_source_files_properties(${loops}_avx2.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx2_options}")
set_source_files_properties(${loops}_avx512.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx512_options}")
set_source_files_properties(${loops}_avx512_bf16.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx512_bf16_options}")

# The same kernels for CUDA. A library of their own, since nvcc does not take our compilers' flags; C10_USING_CUSTOM_GENERATED_MACROS lets them compile against a wheel
# that was built without CUDA, whose headers lack one generated file.
if(TESSERA_CUDA)
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tessera/kernels/cuda/*.cu)
  add_library(tessera_kernels_cuda OBJECT ${cuda_sources})
  set_target_properties(tessera_kernels_cuda PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_ARCHITECTURES OFF)
  target_include_directories(tessera_kernels_cuda PRIVATE ${CMAKE_SOURCE_DIR})
  target_include_directories(tessera_kernels_cuda SYSTEM PRIVATE ${TORCH_INCLUDE_DIRS})
  target_compile_definitions(tessera_kernels_cuda PRIVATE C10_USING_CUSTOM_GENERATED_MACROS)
  target_compile_options(tessera_kernels_cuda PRIVATE --expt-relaxed-constexpr)
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBS_kernels tessera_kernels_cuda)

  # What tells the memory tracker of CUDA's allocator: the one file of that room that sees CUDA's headers.
  add_library(tessera_memory_cuda OBJECT ${CMAKE_SOURCE_DIR}/tessera/memory/cuda/memory.cpp)
  target_link_libraries(tessera_memory_cuda PRIVATE tessera_base)
  target_include_directories(tessera_memory_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_definitions(tessera_memory_cuda PRIVATE C10_USING_CUSTOM_GENERATED_MACROS)
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBS_memory tessera_memory_cuda)
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBS_kernels tessera_memory_cuda)  # a room above that was there before
endif()
