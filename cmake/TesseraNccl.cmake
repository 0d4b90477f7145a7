# comm.backend = nccl: one file on torch's own ProcessGroupNCCL. A library of its own, for only it sees the headers of CUDA's libraries: nccl.h and those
# that ATen's CUDA headers name. A torch with CUDA brings them beside itself (nvidia-* wheels); against a torch without, which compiles but does not link, get them with
#   pip install --no-deps nvidia-nccl-cu13 nvidia-cusparse nvidia-cublas nvidia-cusolver
# and set TESSERA_NCCL_INCLUDE and TESSERA_CUDA_LIBRARIES_INCLUDE where they lie elsewhere.
if(TESSERA_CUDA)
  target_compile_definitions(tessera_base INTERFACE TESSERA_CUDA)
  get_filename_component(wheels ${TORCH_DIR}/../nvidia ABSOLUTE)
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${wheels}/nccl/include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  find_path(TESSERA_CUDA_LIBRARIES_INCLUDE cusparse.h HINTS ${wheels}/cu13/include ${wheels}/cusparse/include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  if(NOT TESSERA_NCCL_INCLUDE OR NOT TESSERA_CUDA_LIBRARIES_INCLUDE)
    message(FATAL_ERROR "TESSERA_CUDA = ON: nccl.h or cusparse.h was not found; set TESSERA_NCCL_INCLUDE and TESSERA_CUDA_LIBRARIES_INCLUDE to their folders "
                        "(pip install --no-deps nvidia-nccl-cu13 nvidia-cusparse nvidia-cublas nvidia-cusolver brings them)")
  endif()
  add_library(tessera_comm_nccl OBJECT ${CMAKE_SOURCE_DIR}/tessera/comm/backends/nccl/nccl.cpp)
  target_link_libraries(tessera_comm_nccl PRIVATE tessera_base)
  target_include_directories(tessera_comm_nccl SYSTEM PRIVATE
    ${TESSERA_NCCL_INCLUDE} ${TESSERA_CUDA_LIBRARIES_INCLUDE} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_definitions(tessera_comm_nccl PRIVATE USE_C10D_NCCL C10_USING_CUSTOM_GENERATED_MACROS)
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBS_comm tessera_comm_nccl)
endif()
