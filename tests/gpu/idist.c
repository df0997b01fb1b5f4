// The implementation for test_gpu.c and bench_gpu.c, which both are linked with it.
#define IDIST_IMPLEMENTATION
#include "idist_nccl.h"
#include "idist_train.h"
