# The loops of tessera/kernels/cpu are compiled once per instruction set and chosen at run time. Their flags differ from everyone's, so they cannot share the
# precompiled header. Contraction is asked for by name: g++ turns it off in standard mode.
set(loops ${CMAKE_SOURCE_DIR}/tessera/kernels/cpu/loops)
set(loop_options -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-psabi)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2_options -march=x86-64-v3)
  set(avx512_options -march=x86-64-v4 -mprefer-vector-width=512)
endif()
set_source_files_properties(${loops}_baseline.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options}")
set_source_files_properties(${loops}_avx2.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx2_options}")
set_source_files_properties(${loops}_avx512.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON COMPILE_OPTIONS "${loop_options};${avx512_options}")
