// fake.h - what the stand-ins for libcudart (cuda.c) and libnccl (nccl.c) share, and what tests may
// ask of them
//
// Both are compiled against the real headers and linked instead of the real libraries:
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

// Where a test reads and writes device memory on purpose: the second mapping. NULL when this is no
// device pointer. It waits for nothing, so what it shows is what the operations have done until
// now.
void *fake_host_view(const void *device_pointer);

// Bytes of device memory that the copies, memsets and reductions of this process have read and
// written so far.
typedef struct fake_traffic {
    uint64_t read, written;
} fake_traffic;
fake_traffic fake_traffic_now(void);

// How many streams of this process have that priority.
int fake_count_streams(int priority);

// How many operations a stream has yet to end.
int fake_count_queued(cudaStream_t stream);

// How often ncclCommGetAsyncError was called in this process.
unsigned fake_count_asked(void);

// Threads of this process that are inside a call of NCCL that enqueues.
int fake_count_inside(void);

// Communicators of this process that are not freed yet.
int fake_count_comms(void);

// Sets a variable that nccl.c reads, or removes it where value is NULL: the only safe way once
// there is a world, whose threads call NCCL.
void fake_set_env(const char *name, const char *value);

// For nccl.c: cudaSuccess, or why no call can work (35, 100, 3, or what FAKE_CUDA_FAIL has for this
// function).
cudaError_t fake_enter(const char *function);

// For nccl.c: the address by which a stream's thread reaches nbytes at this device or pinned host
// pointer; else NULL.
void *fake_reach(const void *pointer, size_t nbytes);

// For nccl.c: whether a kernel on another device of this process may read and write there; and what
// happens if one does that may not.
bool fake_is_reached(const void *pointer, int device);
void fake_break(cudaError_t error);

// An operation of a stream. It runs in the stream's thread, once for each time it is launched: when
// a graph was captured, more than once or never.
typedef struct fake_work {
    void (*run)(void *arg, uint64_t ticket);
    uint64_t (*ticket)(void *arg); // may be NULL; called when the operation is queued for one run
    void (*drop)(void *arg);       // when nobody will run it again; must call nothing of CUDA
    void *arg;
    bool instant; // FAKE_CUDA_DELAY_US does not apply
} fake_work;

// Queues, or captures. Takes arg over, also when it fails.
cudaError_t fake_enqueue(cudaStream_t stream, fake_work work);

#ifdef __cplusplus
}
#endif
#endif // FAKE_H
