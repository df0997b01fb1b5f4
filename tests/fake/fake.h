// fake.h - shared parts of the stand-ins for libcudart (cuda.c) and libnccl (nccl.c), and functions
// for tests.
//
// The stand-ins are compiled against the real headers and linked instead of the real libraries:
//
//     cc -std=gnu11 -isystem $CUDA_HOME/include program.c tests/fake/cuda.c tests/fake/nccl.c
//     -pthread
#ifndef FAKE_H
#define FAKE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns the address in the second mapping, through which a test deliberately reads and writes
// device memory. Returns NULL if this is not a device pointer. Does not wait, so the memory shows
// what the operations have done so far.
void *fake_host_view(const void *device_pointer);

// Bytes of device memory that the copies, memsets and reductions of this process have read and
// written so far.
typedef struct fake_traffic {
    uint64_t read, written;
} fake_traffic;
fake_traffic fake_traffic_now(void);

// Returns the number of streams of this process with this priority.
int fake_count_streams(int priority);

// Returns the number of operations that a stream has not yet completed.
int fake_count_queued(cudaStream_t stream);

// Returns the number of calls of ncclCommGetAsyncError in this process.
unsigned fake_count_asked(void);

// Returns the number of threads of this process that are inside an NCCL call that enqueues.
int fake_count_inside(void);

// Returns the number of communicators of this process that are not yet freed.
int fake_count_comms(void);

// Sets a variable that nccl.c reads, or removes it if value is NULL. While a world exists, only
// this function is safe, because the world's threads call NCCL.
void fake_set_env(const char *name, const char *value);

// For nccl.c: returns cudaSuccess, or the reason why the call cannot work: 35, 100, 3, the error of
// a kernel, or the code that FAKE_CUDA_FAIL gives for this function.
cudaError_t fake_enter(const char *function);

// For nccl.c: returns the address by which a stream's thread accesses nbytes at this device or
// pinned host pointer. Returns NULL if the pointer is invalid.
void *fake_reach(const void *pointer, size_t nbytes);

// For nccl.c: fake_is_reached returns true if a kernel on another device of this process may access
// the memory.
//
// fake_break sets the error that all later calls return, as after a kernel's illegal access.
bool fake_is_reached(const void *pointer, int device);
void fake_break(cudaError_t error);

// An operation of a stream. The stream's thread runs it once for each launch. If a graph captured
// the operation, it may run several times or never.
typedef struct fake_work {
    void (*run)(void *arg, uint64_t ticket);
    uint64_t (*ticket)(void *arg); // may be NULL; called when the operation is queued for one run
    // Called when the operation will not run again. Must not call CUDA.
    void (*drop)(void *arg);
    void *arg;
    bool instant; // FAKE_CUDA_DELAY_US does not apply
} fake_work;

// Queues or captures an operation. Takes ownership of arg, even on failure.
cudaError_t fake_enqueue(cudaStream_t stream, fake_work work);

#ifdef __cplusplus
}
#endif
#endif // FAKE_H
