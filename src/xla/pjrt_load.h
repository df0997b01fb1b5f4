// xla/pjrt_load.h: finds and loads a PJRT plug-in
//
// The first of these that exists is used:
//
//     IDIST_XLA_LIB       any plug-in: a TPU's, a CPU's, a GPU's
//     TPU_LIBRARY_PATH    libtpu.so, as for JAX
//     libtpu              in a Python environment, then where the loader looks
//
// libtpu is loaded only on a machine with a TPU chip: see xla/tpu.h.
#pragma once

#include "os/process.h"
#include "launch/python.h"
#include "xla/pjrt.h"
#include "xla/tpu.h"

// Loads the library that the user names, or libtpu. Returns the library's handle, or NULL with the
// reason in `why`.
static void *idist__pjrt_load_library(char *why, size_t capacity) {
    const char *file = idist__os_env("IDIST_XLA_LIB");
    void *library = NULL;

    if (!file && !idist__tpu_has_chip()) {
        snprintf(why, capacity,
                 "this machine has no TPU; IDIST_XLA_LIB may name another PJRT plug-in");
        return NULL;
    }

    if (!file) file = idist__os_env("TPU_LIBRARY_PATH");
    if (!file) library = idist__python_library("libtpu/libtpu.so");
    if (!library) library = idist__os_library_open(file ? file : "libtpu.so");
    if (!library) snprintf(why, capacity, "%s", idist__os_library_error());

    return library;
}

// Loads a plug-in and initializes it. Returns its table, or NULL with the reason in `why`. The
// library is never unloaded, because it has threads.
static const idist__pjrt_api *idist__pjrt_load(char *why, size_t capacity) {
    void *library = idist__pjrt_load_library(why, capacity), *at;
    const idist__pjrt_api *(*get)(void);
    const idist__pjrt_api *api;
    idist__pjrt_none args;

    if (!library) return NULL;
    at = idist__os_library_find(library, "GetPjrtApi");
    snprintf(why, capacity, "the library has no GetPjrtApi: it is no PJRT plug-in");
    if (!at) return NULL;
    memcpy(&get, &at, sizeof get); // C does not convert object pointers to function pointers
    api = get();

    idist__pjrt_init(&args, sizeof args);
    if (!api || api->nbytes < sizeof *api || api->version.major != IDIST__PJRT_MAJOR ||
        api->version.minor < IDIST__PJRT_MINOR) {
        snprintf(why, capacity, "the plug-in has PJRT %d.%d; idist needs %d.%d or later",
                 api ? api->version.major : 0, api ? api->version.minor : 0, IDIST__PJRT_MAJOR,
                 IDIST__PJRT_MINOR);
        return NULL;
    }

    return idist__pjrt_call(api, IDIST__PJRT_INITIALIZE, &args, why, capacity) ? api : NULL;
}
