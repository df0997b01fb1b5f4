// lightgbm_api.h - the functions of LightGBM's C API that this program calls, from lib_lightgbm.so
#ifndef LIGHTGBM_API_H
#define LIGHTGBM_API_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// Adds the elements of `in` to those of `inout`, or combines them in another way.
typedef void (*lightgbm_reducer)(const char *in, char *inout, int element_nbytes, int32_t nbytes);

// The functions that LightGBM calls instead of its own network. The block of rank k begins at byte
// starts[k] of the larger buffer and has nbytes[k] bytes. In LightGBM, `reducer` is a reference.
typedef void (*lightgbm_reduce_scatter)(char *send, int32_t send_nbytes, int element_nbytes,
                                        const int32_t *starts, const int32_t *nbytes, int ranks,
                                        char *recv, int32_t recv_nbytes,
                                        const lightgbm_reducer *reducer);
typedef void (*lightgbm_all_gather)(char *send, int32_t send_nbytes, const int32_t *starts,
                                    const int32_t *nbytes, int ranks, char *recv,
                                    int32_t recv_nbytes);

enum { LIGHTGBM_F32 = 0, LIGHTGBM_F64 = 1 }; // LightGBM's C_API_DTYPE_FLOAT32 and 64

// X(result, name without LGBM_, parameters)
#define LIGHTGBM_FUNCTIONS(X)                                                             \
    X(const char *, GetLastError, (void))                                                 \
    X(int, RegisterLogCallback, (void (*write)(const char *text)))                        \
    X(int, NetworkInit, (const char *machines, int port, int timeout_minutes, int ranks)) \
    X(int, NetworkInitWithFunctions,                                                      \
      (int ranks, int rank, lightgbm_reduce_scatter reduce_scatter,                       \
       lightgbm_all_gather all_gather))                                                   \
    X(int, NetworkFree, (void))                                                           \
    X(int, DatasetCreateFromMat,                                                          \
      (const void *values, int type, int32_t rows, int32_t columns, int by_rows,          \
       const char *parameters, void *reference, void **dataset))                          \
    X(int, DatasetSetField,                                                               \
      (void *dataset, const char *name, const void *values, int count, int type))         \
    X(int, DatasetFree, (void *dataset))                                                  \
    X(int, BoosterCreate, (void *dataset, const char *parameters, void **booster))        \
    X(int, BoosterUpdateOneIter, (void *booster, int *finished))                          \
    X(int, BoosterGetEval, (void *booster, int data, int *count, double *results))        \
    X(int, BoosterSaveModelToString,                                                      \
      (void *booster, int first_round, int rounds, int importance, int64_t capacity,      \
       int64_t *nbytes, char *text))                                                      \
    X(int, BoosterFree, (void *booster))

typedef struct lightgbm_api {
#define LIGHTGBM_MEMBER(result, name, parameters) result(*name) parameters;
    LIGHTGBM_FUNCTIONS(LIGHTGBM_MEMBER)
#undef LIGHTGBM_MEMBER
} lightgbm_api;

// Checks a call of LightGBM in a function that returns an exit code.
#define LGBM_CHECK(api, call)                                                      \
    do {                                                                           \
        if ((api)->call != 0) {                                                    \
            fprintf(stderr, "LGBM_%s failed: %s\n", #call, (api)->GetLastError()); \
            return 1;                                                              \
        }                                                                          \
    } while (0)

// Loads the library. Returns false and writes the reason if there is no such library, or if the
// library lacks a function.
static inline bool lightgbm_load(lightgbm_api *api, const char *path, char *reason, size_t size) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL), *symbol;

    if (!library) {
        snprintf(reason, size, "%s", dlerror());
        return false;
    }
#define LIGHTGBM_LOAD(result, name, parameters)                         \
    symbol = dlsym(library, "LGBM_" #name);                             \
    if (!symbol) {                                                      \
        snprintf(reason, size, "%s has no function LGBM_" #name, path); \
        return false;                                                   \
    }                                                                   \
    memcpy(&api->name, &symbol, sizeof symbol);
    LIGHTGBM_FUNCTIONS(LIGHTGBM_LOAD)
#undef LIGHTGBM_LOAD
    return true;
}

#endif // LIGHTGBM_API_H
