#include "tests/train/wrapped.h"
