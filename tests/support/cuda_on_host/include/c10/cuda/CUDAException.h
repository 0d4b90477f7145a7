#pragma once

#include "tests/support/cuda_on_host/launch.h"

#define C10_CUDA_KERNEL_LAUNCH_CHECK() ::tessera::cuda_on_host::throw_error()
