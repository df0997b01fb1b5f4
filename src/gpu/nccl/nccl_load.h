// gpu/nccl/nccl_load.h: NCCL's functions, found at run time
#pragma once

#include "os/process.h"
#include "launch/python.h"

typedef struct idist__nccl_id { // ncclUniqueId
    char bytes[128];
} idist__nccl_id;

// NCCL's enums are ints and ncclComm_t is a pointer, so nccl.h is not needed. tests/gpu/nccl_abi.c
// compares these numbers with those in an nccl.h.
enum {
    IDIST__NCCL_OK = 0,
    IDIST__NCCL_CUDA_ERROR = 1,
    IDIST__NCCL_INTERNAL_ERROR = 3,
    IDIST__NCCL_IN_PROGRESS = 7
};
enum { IDIST__NCCL_REMOTE_ERROR = 6, IDIST__NCCL_TIMEOUT = 8 }; // another rank is the cause
enum {                                                          // ncclDataType_t
    IDIST__NCCL_I8 = 0,
    IDIST__NCCL_U8 = 1,
    IDIST__NCCL_I32 = 2,
    IDIST__NCCL_U32 = 3,
    IDIST__NCCL_I64 = 4,
    IDIST__NCCL_U64 = 5,
    IDIST__NCCL_F16 = 6,
    IDIST__NCCL_F32 = 7,
    IDIST__NCCL_F64 = 8,
    IDIST__NCCL_BF16 = 9,
    IDIST__NCCL_F8E4M3 = 10,
    IDIST__NCCL_F8E5M2 = 11
};
enum { // ncclRedOp_t
    IDIST__NCCL_SUM = 0,
    IDIST__NCCL_PROD = 1,
    IDIST__NCCL_MAX = 2,
    IDIST__NCCL_MIN = 3,
    IDIST__NCCL_AVG = 4
};

// clang-format off
#define IDIST__NCCL_FUNCTIONS(X)                                                                  \
    X(int, GetVersion, (int *version))                                                            \
    X(int, GetUniqueId, (idist__nccl_id *id))                                                     \
    X(const char *, GetErrorString, (int result))                                                 \
    X(const char *, GetLastError, (void *comm))                                                   \
    X(int, CommInitRankConfig, (void **comm, int size, idist__nccl_id id, int rank,               \
                                void *config))                                                    \
    X(int, CommFinalize, (void *comm))                                                            \
    X(int, CommDestroy, (void *comm))                                                             \
    X(int, CommAbort, (void *comm))                                                               \
    X(int, CommGetAsyncError, (void *comm, int *result))                                          \
    X(int, CommCount, (void *comm, int *size))                                                    \
    X(int, CommUserRank, (void *comm, int *rank))                                                 \
    X(int, CommCuDevice, (void *comm, int *device))                                               \
    X(int, RedOpCreatePreMulSum, (int *op, void *factor, int type, int on_host, void *comm))      \
    X(int, RedOpDestroy, (int op, void *comm))                                                    \
    X(int, GroupStart, (void))                                                                    \
    X(int, GroupEnd, (void))                                                                      \
    X(int, AllReduce, (const void *send, void *recv, size_t count, int type, int op,              \
                       void *comm, cudaStream_t))                                                 \
    X(int, Reduce, (const void *send, void *recv, size_t count, int type, int op,                 \
                    int root, void *comm, cudaStream_t))                                          \
    X(int, Broadcast, (const void *send, void *recv, size_t count, int type, int root,            \
                       void *comm, cudaStream_t))                                                 \
    X(int, AllGather, (const void *send, void *recv, size_t count, int type,                      \
                       void *comm, cudaStream_t))                                                 \
    X(int, ReduceScatter, (const void *send, void *recv, size_t count, int type,                  \
                           int op, void *comm, cudaStream_t))                                     \
    X(int, Send, (const void *send, size_t count, int type, int to, void *comm, cudaStream_t))    \
    X(int, Recv, (void *recv, size_t count, int type, int from, void *comm, cudaStream_t))
// clang-format on

typedef struct idist__nccl {
    int version;                              // 22809 is 2.28.9; 0 if there is no NCCL
    int (*CommRevoke)(void *comm, int flags); // NULL if this version has none
#define IDIST__X(result, name, args) result(*name) args;
    IDIST__NCCL_FUNCTIONS(IDIST__X)
#undef IDIST__X
} idist__nccl;

#ifndef IDIST__NCCL_FILE
#define IDIST__NCCL_FILE "libnccl.so.2"
#endif

// Opens NCCL's library where the loader finds it, or otherwise in Python's environments.
static void *idist__nccl_load_library(void) {
    void *library = idist__os_library_open(IDIST__NCCL_FILE);

    if (!library) library = idist__python_library("nvidia/nccl/lib/" IDIST__NCCL_FILE);
    return library ? library : idist__os_library_open(IDIST__NCCL_FILE); // for the error text
}

// Fills the table of functions, or stores in `reason` why NCCL cannot be used. IDIST_NCCL_LIB names
// the library to load. If it is not set, a library that is linked with the program takes
// precedence. The library is never unloaded, because its threads may still run.
static void idist__nccl_load_once(idist__nccl *nccl, char *reason, size_t capacity) {
    const char *file = idist__os_env("IDIST_NCCL_LIB"), *missing = NULL;
    void *library = file ? NULL : idist__os_library_open(NULL); // the program and its libraries
    void *at;

    if (library && !idist__os_library_find(library, "ncclGetVersion")) library = NULL;
    if (!library) library = file ? idist__os_library_open(file) : idist__nccl_load_library();

    if (!library) {
        snprintf(reason, capacity, "NCCL could not be loaded: %s", idist__os_library_error());
        return;
    }
#define IDIST__X(result, name, args)                                                   \
    if ((at = idist__os_library_find(library, "nccl" #name)) == NULL) missing = #name; \
    memcpy(&nccl->name, &at, sizeof at); // C does not convert object pointers to function pointers
    IDIST__NCCL_FUNCTIONS(IDIST__X)
#undef IDIST__X
    if (missing)
        snprintf(reason, capacity,
                 "the NCCL library that was loaded has no nccl%s; use NCCL 2.14 or later", missing);
    else if (nccl->GetVersion(&nccl->version) != IDIST__NCCL_OK)
        snprintf(reason, capacity, "ncclGetVersion failed");

    at = nccl->version >= 22807 ? idist__os_library_find(library, "ncclCommRevoke") : NULL;
    memcpy(&nccl->CommRevoke, &at, sizeof at);
}
