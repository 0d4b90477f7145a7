# Writes a .cu for the host's compiler: each `kernel<<<grid, block, bytes, stream>>>(` becomes a Launch (launch.h). Lines stay where they are.
#   cmake -D FROM=kernel.cu -D TO=kernel.cpp -P to_host.cmake
cmake_minimum_required(VERSION 3.22)
file(READ ${FROM} source)
string(REGEX REPLACE "([A-Za-z_]+)<<<([^>]*)>>>[(]" "::tessera::cuda_on_host::Launch(\\2).of([=](auto... given) { \\1(given...); })(" source "${source}")
if(source MATCHES "<<<")
  message(FATAL_ERROR "${FROM}: a launch that to_host.cmake does not understand")
endif()
file(WRITE ${TO} "#include \"tests/support/cuda_on_host/launch.h\"\n#line 1 \"${FROM}\"\n${source}")
