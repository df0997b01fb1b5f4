// xla/xla_model.h: device memory of XLA as data
//
//     home                       one per process: the plug-in, its client, programs, buffers
//       ^        ^
//       |        +-- buffer -> value -> PJRT_Buffer      what a program holds: idist_xla_buffer
//       |
//     world -- group -- call -- job                      one per rank
//
// A world has one worker thread. In a call, the worker does everything that blocks inside the
// plug-in: compiling, copying, running programs. The other threads only hand jobs to the worker, so
// no thread holds the world's lock while it waits for a device.
//
// A call on device memory passes through these states:
//
//     QUEUED     earlier calls of the group have not reached the host's backend yet
//     COMPILING  the worker compiles the program of the call
//     COMPILED   ready for the first meeting
//     MEETING    the members meet, and compare their programs
//     MET        all members make the call
//     ORDERING   the members agree on the place of the call among all calls
//     LAUNCHING  the worker runs the program when its turn comes
//
// A call is staged if it has no program, or if the programs of the members differ:
//
//     FETCHING   the worker copies the buffers to host memory
//     FETCHED    ready for the host's backend
//     ON_HOST    the host's backend performs the call
//     STORING    the worker copies the result to the device
//
// Every call ends in ENDED.
#pragma once

#include "os/thread.h"
#include "core/model.h"
#include "xla/pjrt.h"

enum {
    IDIST__XLA_ARENA_BITS = 40, // addresses for buffers: 1 TiB, less where a limit forbids that
    IDIST__XLA_PROGRAMS = 256,  // programs that a process keeps
    IDIST__XLA_LEAVE_MS = 2000, // how long closing a world waits for the worker
    IDIST__XLA_REASON = 300     // bytes for an error text of the plug-in
};

// The source of a program.
typedef struct idist__xla_source {
    char *text;    // StableHLO
    char *options; // a CompileOptionsProto, which names the devices
    size_t options_nbytes;
} idist__xla_source;

typedef struct idist__xla_program {
    struct idist__xla_program *next; // used less recently
    idist__xla_source source;
    uint64_t hash; // of the text, which all members of a call compare
    void *loaded;  // PJRT_LoadedExecutable, or NULL if the plug-in refused the program
    int users;     // jobs
} idist__xla_program;

// A PJRT_Buffer. The last user destroys it.
typedef struct idist__xla_value {
    void *pjrt;
    int users;
} idist__xla_value;

// The state behind an idist_xla_buffer. The buffer has an address for each of its bytes, in a range
// that nobody can access. The core compares addresses to find buffers that overlap. A program that
// reads a buffer as host memory gets a fault at once.
typedef struct idist__xla_buffer {
    char *at;
    size_t nbytes;
    idist__xla_value *value; // replaced by each call that writes to the buffer
    void *device;            // PJRT_Device
    int64_t dims[IDIST__PJRT_DIMS];
    int dim_count;
    size_t count;
    int type;          // PJRT_Buffer_Type
    idist_dtype dtype; // U8 for a bool
    int users;         // 1 for the program, until the buffer is freed, and 1 for each job
    bool freed;        // by the program; jobs may still use the buffer
} idist__xla_buffer;

// The state that the worlds of a process share.
typedef struct idist__xla_home {
    idist__os_mutex lock;          // protects all members; not held in calls of the plug-in
    idist__os_mutex slow;          // held while a client is opened or closed, or a program compiled
    const idist__pjrt_api *api;    // of the client
    const idist__pjrt_api *loaded; // the plug-in that idist has loaded, or NULL
    void *client;
    bool adopted;         // the client is the program's
    uint32_t process;     // the number of the process that opened the client
    int users;            // worlds and buffers; the last one destroys the client
    void *const *devices; // PJRT_Device, owned by the client
    int ndevices;
    int process_index;
    char platform[32], version[160];
    idist__xla_program *programs; // most recently used first
    char *arena;
    size_t arena_nbytes;
    idist__xla_buffer **buffers; // by address
    size_t buffer_count, buffer_capacity;
} idist__xla_home;

static idist__xla_home idist__xla_home_one = {IDIST__OS_MUTEX_INIT,
                                              IDIST__OS_MUTEX_INIT,
                                              NULL,
                                              NULL,
                                              NULL,
                                              false,
                                              0,
                                              0,
                                              NULL,
                                              0,
                                              0,
                                              "",
                                              "",
                                              NULL,
                                              NULL,
                                              0,
                                              NULL,
                                              0,
                                              0};

// A part of a buffer, in bytes.
typedef struct idist__xla_range {
    size_t at, nbytes;
} idist__xla_range;

typedef enum idist__xla_work {
    IDIST__XLA_COMPILE,
    IDIST__XLA_FETCH,
    IDIST__XLA_STORE,
    IDIST__XLA_EXECUTE
} idist__xla_work;

// The worker's side of a call. If the call is cancelled while the worker has the job, the worker
// frees the job.
typedef struct idist__xla_job {
    struct idist__xla_job *next;
    idist__task *task; // NULL if the call was cancelled
    idist__xla_work work;
    bool running; // the worker uses the job, without the world's lock
    bool ok;
    bool lacks_memory; // the job failed because host memory could not be allocated
    char why[IDIST__XLA_REASON];
    idist__xla_buffer *send, *recv; // NULL if this rank has none
    idist__xla_source source;       // of the program
    idist__xla_program *program;
    bool in_place;               // the result may take the memory of the input
    uint64_t ticket;             // this rank's proposal, then the place that the members agreed on
    bool placed;                 // the members have agreed
    char *send_copy, *recv_copy; // host memory; may be one block if send is recv
    bool fetches_recv;           // the root of a broadcast sends what the receive buffer holds
    idist__xla_range *ranges;    // STORE: the parts of the receive buffer that the call has written
    int range_count;
    bool donated; // EXECUTE: the program may reuse the memory of the input
    void *output; // PJRT_Buffer
} idist__xla_job;

typedef enum idist__xla_state {
    IDIST__XLA_QUEUED,
    IDIST__XLA_COMPILING,
    IDIST__XLA_COMPILED,
    IDIST__XLA_MEETING,
    IDIST__XLA_MET,
    IDIST__XLA_ORDERING,
    IDIST__XLA_LAUNCHING,
    IDIST__XLA_FETCHING,
    IDIST__XLA_FETCHED,
    IDIST__XLA_ON_HOST,
    IDIST__XLA_STORING,
    IDIST__XLA_ENDED
} idist__xla_state;

// Calls of a group that go to the host's backend in the program's order. A receive has no lane,
// because a receive waits for no other call.
typedef enum idist__xla_lane {
    IDIST__XLA_COLLECTIVES,
    IDIST__XLA_SENDS,
    IDIST__XLA_LANES,
    IDIST__XLA_NO_LANE = IDIST__XLA_LANES
} idist__xla_lane;

// The device backend's part of a task, kept when the task is used again.
typedef struct idist__xla_op {
    idist__xla_state state;
    idist__xla_lane lane;
    idist__task *next_queued;
    idist__call call;               // as the program made it; the host's backend gets parts of it
    idist__fingerprint fingerprint; // what the ranks compare
    idist__user_op user;            // a copy, because the program may free the op during the call
    idist_recv_info info;           // used by a receive if the program passes no info
    idist__xla_job *job;            // NULL for a call on host memory
    bool worked;                    // the worker has finished the job of the call
    bool may_have_program;          // all members may have a program for the call
    uint64_t votes[2];              // the hash of this rank's program, and its complement
    uint64_t ticket;                // what the members agree on in ORDERING
} idist__xla_op;

// The device backend's part of a group.
typedef struct idist__xla_group {
    idist__task *queue[IDIST__XLA_LANES], **queue_end[IDIST__XLA_LANES];
    char *options; // a CompileOptionsProto
    size_t options_nbytes;
} idist__xla_group;

// Facts that each rank tells the other ranks when the world begins.
typedef struct idist__xla_rank_info {
    int32_t found;
    int32_t named;  // the device was asked for by name
    int32_t wanted; // the path that desc.device_backend names
    int32_t device_id;
    int32_t process_index;
    uint64_t process;     // equal for ranks of one process
    uint64_t version;     // hash of the plug-in's platform and version
    uint64_t launch_base; // a random number; all ranks use rank 0's
    char reason[200];
} idist__xla_rank_info;

typedef enum idist__xla_path {
    IDIST__XLA_ANY_PATH,
    IDIST__XLA_BY_PROGRAM,
    IDIST__XLA_BY_STAGING
} idist__xla_path;

// The device of a world.
typedef struct idist__xla {
    idist_backend_api api;                 // the world's backend
    const idist_backend_api *host_backend; // the backend that moves host memory
    idist__world *w;
    idist__xla_home *home;
    void *device; // PJRT_Device
    idist__xla_rank_info *infos;
    idist__xla_path path;
    uint64_t launch_base;
    uint64_t clock;                   // at least ticket / world_size for every ticket seen so far
    idist__xla_job *jobs, **jobs_end; // compiling and copying, oldest first
    idist__xla_job *ordered;          // programs to run, by ticket
    idist__os_cond work;              // for the worker: a job has come, or the world ends
    idist__os_cond left;              // the worker has ended
    idist__os_thread worker;
    bool has_worker, stops, has_left;
    bool queue_changed; // a call has left its lane or changed its state: calls may go on
} idist__xla;

static idist__xla *idist__xla_of(const idist__world *w) { return (idist__xla *)w->device; }

static idist__xla_group *idist__xla_group_of(const idist_group *g) {
    return (idist__xla_group *)g->device;
}

static idist__xla_op *idist__xla_op_of(const idist__task *t) { return (idist__xla_op *)t->device; }
