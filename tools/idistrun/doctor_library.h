// doctor_library.h: the optional parts that idist can use: MPI, NCCL, GPUs
#pragma once

#include "../../idist.h"
#include "doctor_line.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DOCTOR_LIBRARY_MOST_GPUS = 64, DOCTOR_LIBRARY_OLDEST_NCCL = 21400 };

// Writes the path of the program that a shell would run, or "".
static void doctor_library_find_program(const char *name, char *path, size_t capacity) {
    const char *at = getenv("PATH");

    path[0] = 0;

    while (at && *at) {
        int nbytes = (int)strcspn(at, ":");

        snprintf(path, capacity, "%.*s/%s", nbytes, at, name);
        if (access(path, X_OK) == 0) return;
        path[0] = 0;
        at += nbytes;
        if (*at) at++;
    }
}

// Prints the first MPI in PATH.
static void doctor_library_print_mpi(void) {
    char path[PATH_MAX], real[PATH_MAX];

    doctor_library_find_program("mpirun", path, sizeof path);
    if (!path[0]) doctor_library_find_program("mpiexec", path, sizeof path);
    if (!path[0]) {
        doctor_line_print("MPI", DOCTOR_FINE, NULL,
                          "no mpirun or mpiexec in PATH (needed for mpi only)");
        return;
    }

    if (!realpath(path, real)) real[0] = 0;
    doctor_line_print("MPI", DOCTOR_FINE, NULL, "%s, which is %s", path, real);
}

// Returns the version of NCCL (21400 for 2.14.0), or 0 if there is none.
static int doctor_library_nccl_version(void) {
    void *library = idist__os_library_open("libnccl.so.2"), *address = NULL;
    int (*get_version)(int *) = NULL;
    int version = 0;

    if (library) address = idist__os_library_find(library, "ncclGetVersion");
    memcpy(&get_version, &address, sizeof address); // C cannot cast an object pointer to a function

    return get_version && get_version(&version) == 0 ? version : 0;
}

// Prints the version of NCCL.
static void doctor_library_print_nccl(void) {
    int version = doctor_library_nccl_version();

    if (!version) {
        doctor_line_print("NCCL", DOCTOR_FINE, NULL, "no libnccl.so.2 (needed for nccl only)");
        return;
    }

    doctor_line_print("NCCL", version < DOCTOR_LIBRARY_OLDEST_NCCL ? DOCTOR_NOTE : DOCTOR_FINE,
                      "use 2.14 or later", "%d.%d.%d in libnccl.so.2", version / 10000,
                      version / 100 % 100, version % 100);
}

// Returns the number of NVIDIA GPUs that this process may use.
static int doctor_library_count_gpus(void) {
    char device[64];
    int count = 0;

    for (int i = 0; i < DOCTOR_LIBRARY_MOST_GPUS; i++) {
        snprintf(device, sizeof device, "/dev/nvidia%d", i);
        count += access(device, R_OK | W_OK) == 0;
    }

    return count;
}

// Prints the number of GPUs, and whether the driver is installed.
static void doctor_library_print_gpus(void) {
    bool has_driver = idist__os_library_open("libcuda.so.1") != NULL;
    int count = doctor_library_count_gpus();

    if (!count && !has_driver) {
        doctor_line_print("GPU", DOCTOR_FINE, NULL, "none: no /dev/nvidia0, no libcuda.so.1");
        return;
    }

    doctor_line_print("GPU", count && has_driver ? DOCTOR_FINE : DOCTOR_NOTE,
                      has_driver ? "no device may be used" : "install the CUDA driver",
                      "%d devices /dev/nvidia*, libcuda.so.1 %s", count,
                      has_driver ? "found" : "not found");
}
