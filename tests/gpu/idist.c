// The idist implementation that test_gpu.c and bench_gpu.c are linked with.
#define IDIST_IMPLEMENTATION
#include "idist_nccl.h"
#include "idist_train.h"
