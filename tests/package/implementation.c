// implementation.c - the one file that defines IDIST_IMPLEMENTATION.
#define IDIST_IMPLEMENTATION
#if defined(WITH_MPI)
#include <idist_mpi.h>
#elif defined(WITH_NCCL)
#include <idist_nccl.h>
#else
#include <idist.h>
#endif
