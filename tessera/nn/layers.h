#pragma once

/// Every layer; each lives in a header of its own.
#include "tessera/nn/attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/nn/rotary.h"
#include "tessera/nn/router.h"
#include "tessera/nn/sequential.h"
