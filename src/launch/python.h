// launch/python.h: libraries that Python packages bring along
#pragma once

#include "os/process.h"

// Loads the first match of `file` in the packages of a Python environment below a folder.
IDIST__UNUSED static inline void *idist__python_library_below(const char *folder, const char *below,
                                                              const char *file) {
    char pattern[512];

    if (!folder) return NULL;
    snprintf(pattern, sizeof pattern, "%s%s/lib*/python3*/*-packages/%s", folder, below, file);

    return idist__os_library_match(pattern);
}

// Loads a library of a Python package, such as "nvidia/nccl/lib/libnccl.so.2". Looks in the active
// environment (VIRTUAL_ENV, CONDA_PREFIX), in ~/.local and in the system's folders. Returns NULL if
// there is none.
IDIST__UNUSED static inline void *idist__python_library(const char *file) {
    void *library = idist__python_library_below(idist__os_env("VIRTUAL_ENV"), "", file);

    if (!library) library = idist__python_library_below(idist__os_env("CONDA_PREFIX"), "", file);
    if (!library) library = idist__python_library_below(idist__os_env("HOME"), "/.local", file);
    if (!library) library = idist__python_library_below("/usr/local", "", file);
    if (!library) library = idist__python_library_below("/usr", "", file);

    return library;
}
