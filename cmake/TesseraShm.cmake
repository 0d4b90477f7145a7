# The shared-memory engine's reductions are compiled once per instruction set and chosen at run time, like the loops of the kernels (TesseraKernels.cmake). Bits
# must not depend on the choice: no contraction.
set(TESSERA_SHM_CORE ${CMAKE_SOURCE_DIR}/tessera/comm/backends/shm/core)
set(loop_options -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2_options -march=x86-64-v3)
  set(avx512_options -march=x86-64-v4 -mprefer-vector-width=512)
endif()
set_source_files_properties(${TESSERA_SHM_CORE}/reduce_baseline.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options}")
set_source_files_properties(${TESSERA_SHM_CORE}/reduce_avx2.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx2_options}")
set_source_files_properties(${TESSERA_SHM_CORE}/reduce_avx512.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx512_options}")
