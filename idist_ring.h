/* idist_ring.h - v0.2.0 - the ring backend of idist: ranks on one host or many - MIT license

DO THIS

    Copy this file beside idist.h, which includes it where IDIST_IMPLEMENTATION is defined. To leave
    it out, define IDIST_NO_RING there. Include this file yourself only to call idist_ring_backend.

WHAT IT IS

    This backend needs only sockets and, inside a host, shared memory.

    Every rank has one stream to every other rank: a pipe in shared memory (or a local socket)
    inside a host, TCP between hosts. Messages up to 64 KiB are sent at once (eager), within a
    window of 2 MiB that the receiver keeps free. Where the receiver can read the sender's memory
    fast, only messages up to 8 KiB are eager. Larger messages are announced (rendezvous). They are
    sent when the receiver has provided a buffer for them, or the receiver reads them from the
    sender's memory. In a collective over sockets, the receiver provides the buffer without being
    asked. So nothing is ever buffered without bound. Every message carries the fingerprint of the
    call it belongs to.

    Ranks that share memory run a collective through memory that all of them can read (ring/share).
    Otherwise a collective is an algorithm over non-blocking sends and receives (ring/algo). Over
    several hosts the algorithm has two levels (ring/algo/host_plan.h).

CONTENTS

    [ring:api] has the declarations. The implementation follows. It consists of the files of
    src/ring/, in which each folder uses only the folders before it.

      ring/shm        memory that ranks of a host share, and pipes in it
      ring/msg        frames, links, and matching of sends and receives
      ring/share      collectives of ranks that share memory
      ring/algo       collectives made of messages; begin there to learn how collectives work
      ring/connect    connections between ranks
      ring/engine     progress: what arrives, who waits, what is cancelled
      ring/join       how ranks meet

LIMITS

    Ranks that share memory need no file descriptors for each other. In a world of up to 64 ranks, a
    rank needs one descriptor, or desc.sockets of them, per rank with which it shares no memory.

    In a larger world, a rank connects at first to the ranks at distances that are powers of two, 2
    log2(n) of them. It connects to any other rank when the two exchange their first message. Both
    must be inside a call to complete the connection. Either of two ranks may have to connect to the
    other, so ranks listen until the world is closed. While the ranks meet, rank 0 needs about n + 8
    more descriptors.

    A dead machine, unlike a dead process, is detected only by the time-out.

    Over several hosts, gather, scatter, all_to_all, scan and the v-forms are made of messages among
    all ranks. So are reductions of 16-bit and 8-bit floats, and reductions by an op that is not
    commutative. If the ranks of some host are not consecutive, all_gather and reduce_scatter also
    use such messages.

    License: MIT, as for idist.h.
    Generated from src/ by tools/drop_ins.py: change the files there.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_ring.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_RING_H
#define IDIST_RING_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [ring:api]  the backend's table
//------------------------------------------------------------------------------

// Returns the backend for any number of ranks, on one host or several, with buffers in CPU memory.
IDIST_API const idist_backend_api *idist_ring_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_RING_H

// Only here for the API? Stop reading.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_RING_IMPLEMENTATION_DONE)
#define IDIST_RING_IMPLEMENTATION_DONE

// ---- base/begin.h --------------------------------------------------------------------------------

// base/begin.h: macros and compiler settings for the implementation
//
// Included where the implementation of each src/idist*.h begins. base/end.h ends the implementation
// and restores the settings. Has no include guard, so that each drop-in gets a copy.

// System headers may define these words as macros, as windows.h does.
#pragma push_macro("small")
#undef small
#pragma push_macro("lock")
#undef lock
#pragma push_macro("min")
#undef min
#pragma push_macro("max")
#undef max

// C++ programs may enable these warnings, but code that must also compile as C needs the casts and
// the NULLs that they report.
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuseless-cast"
#endif
#endif

// gcc's thread sanitizer does not support fences, and warns about each fence for shared memory.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IDIST__VECTORIZE __attribute__((optimize("O3")))
#define IDIST__NO_ALIAS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define IDIST__VECTORIZE
#define IDIST__NO_ALIAS
#endif
#define IDIST__PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define IDIST__UNUSED __attribute__((unused))
#define IDIST__NOINLINE __attribute__((noinline))
#define IDIST__INLINE static inline __attribute__((always_inline))
#define IDIST__TLS static __thread

// IDIST__TRY(result = fn(arg)) calls a function of the program. In C++ with exceptions, the macro
// catches every exception and records in idist__me.thrown what was thrown. Otherwise an exception
// ends the process as if fn were noexcept: std::terminate prints the exception. A function that
// uses the macro must be IDIST__NOINLINE.
#if defined(__cplusplus) && defined(__EXCEPTIONS)
#include <exception>
#ifdef __GLIBCXX__
#include <cxxabi.h>
// clang-format off
#define IDIST__CATCH_EXIT catch (abi::__forced_unwind &) { throw; } // pthread_exit
// clang-format on
#else
#define IDIST__CATCH_EXIT
#endif
#define IDIST__TRY(statement)                                                     \
    do {                                                                          \
        try {                                                                     \
            statement;                                                            \
        }                                                                         \
        IDIST__CATCH_EXIT                                                         \
        catch (const std::exception &thrown_) {                                   \
            idist__callback_note(thrown_.what());                                 \
        }                                                                         \
        catch (...) {                                                             \
            idist__callback_note("an exception not derived from std::exception"); \
        }                                                                         \
    } while (0)
#else
// Marks the return address as undefined, which tells the unwinder that the stack ends in this
// function. Without unwind tables the stack ends here anyway.
#if defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__x86_64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 16" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__i386__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 8" ::: "memory")
#elif defined(__GCC_HAVE_DWARF2_CFI_ASM) && defined(__aarch64__)
#define IDIST__UNWIND_END __asm__ volatile(".cfi_undefined 30" ::: "memory")
#else
#define IDIST__UNWIND_END (void)0
#endif
#define IDIST__TRY(statement)                                 \
    do {                                                      \
        IDIST__UNWIND_END;                                    \
        statement;                                            \
        __asm__ volatile("" ::: "memory"); /* no tail call */ \
    } while (0)
#endif

// IDIST__CALLBACK(statement) is IDIST__TRY for a callback, which must not call idist and runs with
// cancellation disabled: see base/fail.h.
#define IDIST__CALLBACK(statement)                           \
    do {                                                     \
        int cancel_state_ = idist__os_unwind_block_cancel(); \
                                                             \
        idist__me.callbacks++;                               \
        IDIST__TRY(statement);                               \
        idist__me.callbacks--;                               \
        idist__os_unwind_allow_cancel(cancel_state_);        \
    } while (0)

// ---- os/mutex_init.h -----------------------------------------------------------------------------

// os/mutex_init.h: the initial value of a lock in static memory
//
// Included by base/begin.h. Neither file has an include guard, because every drop-in contains its
// own copy of both.

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER

#define IDIST__COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

// A program may be built with -ffast-math or -Ofast, but idist needs standard arithmetic. A NaN
// that one rank contributes must reach all ranks, the conversions in base/small_float.h rely on the
// order of their steps, and gradient norms check that numbers are finite.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#define IDIST__FAST_MATH 1
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
// In C, pop_options alone would leave these macros undefined.
#pragma push_macro("__FAST_MATH__")
#pragma push_macro("__FINITE_MATH_ONLY__")
#pragma push_macro("__ASSOCIATIVE_MATH__")
#pragma push_macro("__RECIPROCAL_MATH__")
#pragma push_macro("__NO_SIGNED_ZEROS__")
#pragma push_macro("__NO_TRAPPING_MATH__")
#pragma push_macro("__NO_MATH_ERRNO__")
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif
#endif

// ---- ring/shm/transport.h ------------------------------------------------------------------------

// ring/shm/transport.h: the functions that move the bytes of a link

enum { IDIST__HEADER_BYTES = 64 }; // size of a frame without its payload

// A transport moves the bytes of one link. No function blocks. `port` is this rank's end of the
// link. The code that opened the link owns the port. `close` closes the contents of the port, but
// does not free it.
//
// Every transport has `name`, `read`, `write`, `close` and `descriptor`. The other functions are
// optional. If no link of a transport can perform a function, the function is NULL, and the comment
// above the function says what happens instead. The code that fills in a transport sets the fields
// by name. Fields that it does not set stay NULL or false.
typedef struct idist__transport {
    const char *name;

    // `read` and `write` return the number of bytes moved, which may be fewer than requested, or 0
    // if nothing can move now. They return -1 if the stream has ended (errno is 0) or is broken
    // (errno is not 0).
    ptrdiff_t (*read)(void *port, void *buf, size_t nbytes);
    ptrdiff_t (*write)(void *port, const idist__os_part *parts, int nparts);

    void (*close)(void *port);

    // Returns the descriptor that becomes readable when the next `read` may return data. If
    // `output` is true, returns the descriptor that becomes writable when the next `write` may
    // accept data. Returns -1 if there is no such descriptor. The descriptor may change after each
    // read or write.
    int (*descriptor)(void *port, bool output);

    // True if a read costs a system call. If a rank has many such links, it reads only those that
    // ring->watch reports as readable.
    bool polled;
    // True if closing a link that holds unread input may destroy output that the peer has not read
    // yet.
    bool lossy_close;

    // Functions for whole messages: a header of IDIST__HEADER_BYTES, and nbytes of payload.
    // `peek_header` copies the next header and consumes nothing. It returns false if the header has
    // not arrived. `read_message` consumes that header and copies the payload that follows it. It
    // returns false, and consumes nothing, if the message has not arrived completely.
    // `write_message` returns false, and writes nothing, if there is no space for the whole
    // message. All three are NULL if messages always go through `read` and `write`.
    bool (*peek_header)(void *port, void *header);
    bool (*read_message)(void *port, void *payload, size_t nbytes);
    bool (*write_message)(void *port, const void *header, const void *payload, size_t nbytes);

    // Returns true if the peer may read messages directly from the memory of this process. The
    // result is the same at both ends of a link, and decides how large messages are sent. If the
    // result is true, and `withdrawn` is not NULL, sets *withdrawn to the number of sends that have
    // ended early so far, modulo 256. The peer passes that number to `pull`. The function is NULL
    // if the peer can never read such memory; large messages then go through the link.
    bool (*exposes_memory)(void *port, uint8_t *withdrawn);

    // Returns true if reading the memory of the peer is slower than a copy through this transport.
    // The result is the same at both ends of a link. The function is NULL if such reads are at
    // least as fast as a copy, or are not possible.
    bool (*reads_slowly)(void *port);

    // Returns true if the peer is waiting in a call, and so reads immediately what is written. The
    // function is NULL if the transport cannot tell; a large message is then pulled if possible.
    bool (*attends)(void *port);

    // Copies from an address in the peer's process. Returns false if that is not possible. Also
    // returns false if the peer has withdrawn sends since it sent `withdrawn`, because the peer may
    // have reused the memory. The function is NULL if pulling is never possible. The receiver then
    // answers with CTS, and the message arrives in DATA frames.
    bool (*pull)(void *port, uint64_t address, uint8_t withdrawn, void *buf, size_t nbytes);
} idist__transport;

// ---- ring/shm/pace.h -----------------------------------------------------------------------------

// ring/shm/pace.h: decides if writes bypass the caches
//
// Before a core writes to a cache line, all other cores must invalidate the line. Cores that share
// a cache do so quickly. Cores with different caches, on one processor or on two, take a long time.
// A store that bypasses the caches does not wait for those cores, and is then several times as
// fast. But the reader then has to fetch the line from memory.
//
// Which way is faster depends on where the two ranks run, and changes when the system moves one of
// them. So some writes are timed, and a few of the timed writes use the way that has been slower so
// far. Only the shortest of the latest times counts, because a rank may be interrupted. All
// functions are called with the world's lock held.

enum {
    IDIST__STREAM_BYTES = 4096, // smaller writes are not timed, and go through the caches
    IDIST__PACE_TIMES = 4,      // number of times kept for each way
    // One write in this many is timed. The number is odd, because calls often make groups of 16
    // writes.
    IDIST__PACE_TIMED = 17,
    // One write in this many uses the slower way. The number is a multiple of IDIST__PACE_TIMED, so
    // such a write is timed.
    IDIST__PACE_OTHER = 119
};

// The times of the two ways to write, and the way that is faster. A way is false if writes go
// through the caches, and true if they bypass the caches.
typedef struct idist__pace {
    bool streams;                         // the faster way
    bool way;                             // the way of the current write
    uint32_t count;                       // number of writes so far
    uint32_t turn[2];                     // number of times recorded so far, for each way
    uint32_t times[2][IDIST__PACE_TIMES]; // the latest times in ns per MiB, 0 if none yet
} idist__pace;

// Returns the shortest of the latest times, or 0 if there are fewer than IDIST__PACE_TIMES.
static uint32_t idist__pace_shortest(const idist__pace *p, bool way) {
    uint32_t shortest = p->times[way][0];
    int i;

    for (i = 1; i < IDIST__PACE_TIMES; i++)
        if (p->times[way][i] < shortest) shortest = p->times[way][i];
    return shortest;
}

// Records the time of a write. Chooses to bypass the caches if that takes less than half the time.
// The margin allows for the reader, which then has to fetch the lines from memory.
static void idist__pace_add(idist__pace *p, bool way, int64_t ns, size_t nbytes) {
    int64_t most = INT64_MAX >> 20;
    int64_t time = ((ns < most ? ns : most) << 20) / (int64_t)nbytes;

    time = time < 1 ? 1 : time > UINT32_MAX ? UINT32_MAX : time;
    p->times[way][p->turn[way]++ % IDIST__PACE_TIMES] = (uint32_t)time;
    p->streams = idist__pace_shortest(p, true) &&
                 idist__pace_shortest(p, false) / 2 > idist__pace_shortest(p, true);
}

// Returns true if the next write should bypass the caches. Sets *begin_ns to the current time,
// which the caller passes to idist__pace_end, or to 0 if the write is not timed.
static inline bool idist__pace_begin(idist__pace *p, size_t nbytes, int64_t *begin_ns) {
    uint32_t number;
    bool first;

    *begin_ns = 0;
    if (nbytes < IDIST__STREAM_BYTES) return false;

    number = p->count++;
    first = number < 2 * IDIST__PACE_TIMES;
    p->way = first ? number % 2 == 1 : p->streams != (number % IDIST__PACE_OTHER == 0);
    if (first || number % IDIST__PACE_TIMED == 0) *begin_ns = idist__os_clock_now_ns();

    return p->way;
}

static inline void idist__pace_end(idist__pace *p, int64_t begin_ns, size_t nbytes) {
    if (begin_ns) idist__pace_add(p, p->way, idist__os_clock_now_ns() - begin_ns, nbytes);
}

// Copies nbytes in the way that idist__pace_begin chooses, and times some of the copies.
static inline void idist__pace_copy(idist__pace *p, char *to, const char *from, size_t nbytes) {
    int64_t begin_ns;

    if (idist__pace_begin(p, nbytes, &begin_ns)) idist__os_cpu_stream(to, from, nbytes);
    else memcpy(to, from, nbytes);
    idist__pace_end(p, begin_ns, nbytes);
}

// ---- ring/shm/segment.h --------------------------------------------------------------------------

// ring/shm/segment.h: the layout of the shared file, and reads from the memory of other processes
//
// WHAT IT IS
//
// The segment is a file in memory that all ranks of a host have mapped. It contains a doorbell for
// each rank, on which the rank sleeps until another rank wakes it. It also contains a pipe from
// each rank to each other rank. The two pipes between two ranks carry their link. The rest of the
// file is for collectives (ring/share/) and for idist_alloc. The ranks need no connections to each
// other, so a rank uses as many descriptors on a host with 1,000 ranks as on a host with two.
//
// HOW IT FITS
//
// ring/join/segment_map.h creates and maps the file. ring/join/segment_layout.h determines the
// offsets in the file. When all ranks of the host agree (ring/join/segment_agree.h), the links
// inside the host use idist__pipe_transport. ring/engine/sleep.h sleeps on the doorbell.
//
// A MESSAGE THROUGH A PIPE
//
// idist__pipe_write            copies to the ring buffer, publishes the new tail
// idist__doorbell_any_asleep   takes one load in the common case, when no rank sleeps
// idist__doorbell_wake         wakes the rank through its futex or its beacon
// idist__pipe_read             loads the tail, copies the bytes out, publishes the new head
//
// LAYOUT
//
// The file has no name. Ranks are numbered from 0 in the order of their world ranks.
//
//   | header | front 0 | front 1 | ... | part 0 | part 1 | ... | window 0 | window 1 | ...
//
//   front    doorbell | head of region 0, for the collectives of the world (ring/share/region.h)
//   part     catalog | a pipe from each rank | buffers of region 0 | head, buffers of region 1 ...
//   window   a hole until idist_alloc allocates pages in it (base/window.h); mapped only then
//
// Each rank has one front, one part and one window. The fronts hold the data that all ranks of the
// host read often. Keeping that data together saves page tables, because each process has its own.
// If each of 512 processes read one word in each of 512 parts of 4 MiB, the tables would take
// 1 GiB.
//
// Memory is reserved before any rank uses it, so that no access to it can fail. The memory of
// doorbells, pipes and the world's region is reserved when the file is mapped. The memory of any
// other region is reserved when the region is first offered to a group (ring/share/pool.h).

#define IDIST__LINE ((size_t)64)   // size of a cache line
#define IDIST__PAGE ((size_t)4096) // unit of the layout
// Offset of our buffers from the start of a page. Programs often align their buffers to pages. If
// the low 12 bits of two addresses are equal, a copy between them takes several times as long. The
// processor then assumes that the loads depend on the stores.
#define IDIST__BUFFERS_SKEW ((size_t)1152)
#define IDIST__REMOTE_PIECE ((size_t)128 * 1024) // unit of cross-memory reads that feed a reduction
#define IDIST__SAMPLE_BYTES ((size_t)64 * 1024)  // size of the sample for timing such reads
#define IDIST__SAMPLE_PIECE ((size_t)16 * 1024)  // unit in which the sample is read
// Number of bytes after which a write to a pipe, or a read from it, lets the peer continue. So the
// reader copies out of the pipe while the writer still copies into it.
#define IDIST__SLICE_BYTES ((size_t)32 * 1024)
// Maximum size of a pipe. Two ranks that send to each other both write until the pipes are full,
// then both read. The larger the pipes, the less often the ranks wait for each other.
#define IDIST__PIPE_MAX ((size_t)512 * 1024)
#define IDIST__PREFETCH_BYTES ((size_t)1024) // maximum to prefetch for writing

typedef struct idist__doorbell {
    uint32_t asleep;  // an idist__sleep_place
    uint32_t awaited; // 1 + the rank of this host whose step the sleeper awaits; 0 for any rank
    uint32_t attends; // 1 while the rank is in a call that waits
    char pad[52];
    int64_t pid; // the process of this rank, whose memory other ranks read
    // A random number in that process, and its address. A rank that can read the number can read
    // all memory of the process.
    uint64_t proof, proof_address;
    idist__counter withdrawn; // number of sends that ended early; reads of their buffers are void
    uint64_t sample_address;  // address of a sample of memory; see ring/join/segment_probe.h
    uint32_t ended;           // an idist__ended_how
    char pad2[20];
} idist__doorbell;

typedef struct idist__segment_header {
    // Number of ranks that sleep or are about to sleep. If the number is 0, a writer need not check
    // any doorbell.
    uint32_t sleeper_count;
    char pad[60];
    uint32_t fenced; // set once by the lowest rank for all ranks; see idist__doorbell_any_asleep
    uint32_t ncores; // number of processors that all ranks together may use
    idist__os_cpu_set cpus; // the processors that all ranks together may use
    uint32_t ended_count;   // incremented whenever `ended` or `closed` is set
    uint32_t extent_count;  // number of extents in all windows
} idist__segment_header;

// Describes the window of a rank to the other ranks. Only the rank that owns the window writes to
// the catalog. An array follows the catalog of each rank. Entry k of the array is the number of
// extents of rank k that the owner of the array has mapped.
typedef struct idist__catalog {
    uint32_t extent_count; // stored after the extent that it counts
    uint32_t pad;
    struct {
        uint64_t at, nbytes; // offset in the window, and size
    } extents[IDIST__EXTENTS];
} idist__catalog;

// A ring buffer from one rank to another. The data follows this struct. The counters never
// decrease. Only the writer stores to `tail` and `closed`, and only the reader stores to `head`.
typedef struct idist__pipe {
    idist__counter tail; // number of bytes written so far
    uint32_t closed;     // 1 once nothing more will be written
    char pad[52];
    idist__counter head; // number of bytes read so far
    char pad2[56];
} idist__pipe;

typedef struct idist__pipe_port { // our end of a link through two pipes
    struct idist__segment *shm;
    idist__pipe *in, *out;
    uint64_t head, tail;      // our private counters, which the peer cannot change
    uint64_t out_head;        // out->head as of our last load
    idist__pace pace;         // times of our writes
    int peer;                 // rank of the peer on this host
    bool look;                // some process or pipe has ended; the next read checks this one
    idist__os_address beacon; // beacon of the peer
} idist__pipe_port;

typedef struct idist__view { // the extents of a rank's window that are mapped here
    uint32_t extent_count;
    struct {
        char *map;
        size_t at, nbytes; // offset in the window, and size
    } extents[IDIST__EXTENTS];
} idist__view;

typedef struct idist__segment {
    int fd;                       // descriptor of the file
    char *base;                   // mapping of everything except the windows
    idist__window *window;        // our window, or NULL if there are no windows
    idist__view *views;           // views of the windows, by rank on this host
    uint32_t extents_seen;        // header->extent_count when the views were last updated
    bool maps_no_more;            // true once mapping an extent of another rank has failed
    int n, me;                    // number of ranks on this host, and our rank among them
    bool oversubscribed;          // there are more ranks than cores
    bool fenced;                  // see idist__doorbell_any_asleep
    bool reads_remote;            // each rank can read the memory of all other ranks
    bool reads_fast;              // such a read takes at most as long as two copies
    idist__pace pace;             // times of our writes to the buffers of collectives
    idist__pace window_pace;      // times of our writes to the windows of other ranks
    uint64_t proof;               // random number that other ranks read as a test
    idist__os_process *processes; // processes by rank on this host
    // Scratch for cross-memory reads that feed a reduction: IDIST__REMOTE_PIECE for each rank.
    char *remote_pieces;
    int *local; // rank on this host by world rank, -1 if on another host

    size_t pipe_nbytes;              // capacity of a pipe
    size_t front_nbytes;             // size of a front; the fronts follow the first page
    size_t parts_at, part_nbytes;    // offset of the first part, size of each part
    size_t window_at, window_nbytes; // offset of the first window, size of each window
    size_t pipes_at;                 // offset of the pipes in a part
    size_t buffers_at;      // offset in a part of region 0's buffers; the other regions follow
    size_t chunk_nbytes[2]; // size of a buffer in region 0, and in other regions

    int region_count;            // number of regions of each rank
    int reserved_count;          // number of our regions that have memory; they come first
    bool taken[64];              // true if a group uses this region of ours
    uint32_t region_members[64]; // number of members of that group on this host
    uint64_t region_groups[64];  // ctx of that group

    idist__pipe_port *ports; // ports by rank on this host

    // Our beacon, and the descriptor with which we check the beacons of other ranks.
    int beacon, observer;
    int next_look;       // rank whose beacon we check next
    uint32_t ended_seen; // ended_count when `look` was last set in all ports
    int blind_error;     // errno of the last failed check of a beacon, or 0
} idist__segment;

static char *idist__segment_front(const idist__segment *seg, int rank) {
    return seg->base + IDIST__PAGE + (size_t)rank * seg->front_nbytes;
}

static char *idist__segment_part(const idist__segment *seg, int rank) {
    return seg->base + seg->parts_at + (size_t)rank * seg->part_nbytes;
}

static idist__segment_header *idist__segment_header_of(const idist__segment *seg) {
    return (idist__segment_header *)(void *)seg->base;
}

static idist__doorbell *idist__segment_doorbell(const idist__segment *seg, int rank) {
    return (idist__doorbell *)(void *)idist__segment_front(seg, rank);
}

static idist__pipe *idist__segment_pipe(const idist__segment *seg, int from, int to) {
    size_t pipe_nbytes = sizeof(idist__pipe) + seg->pipe_nbytes;
    char *part = idist__segment_part(seg, to);

    return (idist__pipe *)(void *)(part + seg->pipes_at + (size_t)from * pipe_nbytes);
}

static idist__catalog *idist__segment_catalog(const idist__segment *seg, int rank) {
    return (idist__catalog *)(void *)idist__segment_part(seg, rank);
}

// Returns the numbers of extents that a rank has mapped: one number for each rank of the host.
static uint32_t *idist__segment_mapped(const idist__segment *seg, int rank) {
    return (uint32_t *)(void *)(idist__segment_catalog(seg, rank) + 1);
}

// Copies from the memory of another rank's process. Returns 0 or an errno.
static int idist__segment_read_remote(const idist__segment *seg, int rank, uint64_t address,
                                      void *buf, size_t nbytes) {
    return idist__os_process_read_memory(seg->processes[rank], address, buf, nbytes);
}

// ---- ring/shm/view.h -----------------------------------------------------------------------------

// ring/shm/view.h: maps the memory that other ranks got from idist_alloc
//
// A window (base/window.h) is the memory of a rank for idist_alloc, and grows by extents. When
// idist_alloc adds an extent to a rank's window, the rank records the extent in its catalog. The
// other ranks map the extent when they next read the catalog, and then store how many extents they
// have mapped. The owner offers a buffer in the extent to a group only after all members of the
// group have mapped the extent:
//
//   owner     maps extent 3, catalog.extent_count = 4   ...   reads mapped[owner] == 4 everywhere
//   others    see header.extent_count, map extent 3, mapped[owner] = 4
//
// If a rank cannot map more extents because of a limit, calls make an additional copy and do not
// fail. Timing decides whether a buffer is offered, but does not change the result, because ranks
// reduce in the same order in both cases.

// Publishes the new extents of our window. Any thread may call this function.
static void idist__view_publish(idist__segment *seg) {
    idist__catalog *catalog = idist__segment_catalog(seg, seg->me);
    uint32_t i, count;

    idist__os_mutex_lock(&idist__windows_lock);
    count = seg->window->extent_count;

    for (i = catalog->extent_count; i < count; i++) {
        catalog->extents[i].at = seg->window->extents[i].at;
        catalog->extents[i].nbytes = seg->window->extents[i].nbytes;
        __atomic_store_n(&catalog->extent_count, i + 1, __ATOMIC_RELEASE);
        __atomic_fetch_add(&idist__segment_header_of(seg)->extent_count, 1, __ATOMIC_RELEASE);
    }

    idist__os_mutex_unlock(&idist__windows_lock);
}

// Maps one more extent of another rank. Returns false if the system cannot map the extent, or if
// the rank's catalog describes an impossible extent.
static bool idist__view_map_next(const idist__segment *seg, int rank, idist__view *view) {
    const idist__catalog *catalog = idist__segment_catalog(seg, rank);
    uint32_t i = view->extent_count;
    size_t at = (size_t)catalog->extents[i].at, nbytes = (size_t)catalog->extents[i].nbytes;
    size_t expected = i ? view->extents[i - 1].at + view->extents[i - 1].nbytes : 0;
    size_t begin = seg->window_at + (size_t)rank * seg->window_nbytes;
    char *map;

    if (at != expected || !nbytes || nbytes > seg->window_nbytes - at) return false;
    map = (char *)idist__os_memory_map(seg->fd, begin + at, nbytes);
    if (!map) return false;

    view->extents[i].map = map;
    view->extents[i].at = at;
    view->extents[i].nbytes = nbytes;
    view->extent_count++;

    return true;
}

// Returns true if any window has a new extent since the views were last updated.
static inline bool idist__view_is_news(const idist__segment *seg) {
    uint32_t *count = &idist__segment_header_of(seg)->extent_count;
    return __atomic_load_n(count, __ATOMIC_RELAXED) != seg->extents_seen;
}

// Adds the extents of our own window to its view.
static void idist__view_map_own(const idist__segment *seg) {
    uint32_t count = __atomic_load_n(&seg->window->extent_count, __ATOMIC_ACQUIRE);
    idist__view *view = &seg->views[seg->me];

    for (; view->extent_count < count; view->extent_count++) {
        const idist__window_extent *extent = &seg->window->extents[view->extent_count];

        view->extents[view->extent_count].map = extent->map;
        view->extents[view->extent_count].at = extent->at;
        view->extents[view->extent_count].nbytes = extent->nbytes;
    }
}

// Maps the extents that were added to the windows since the last call. Returns false if an extent
// could not be mapped. Later calls do not try again, and return true. Called with the world's lock
// held.
static bool idist__view_look(idist__segment *seg) {
    uint32_t seen = __atomic_load_n(&idist__segment_header_of(seg)->extent_count, __ATOMIC_ACQUIRE);
    uint32_t *mapped = idist__segment_mapped(seg, seg->me);
    int i;

    seg->extents_seen = seen;
    idist__view_map_own(seg);
    if (seg->maps_no_more) return true;

    for (i = 0; i < seg->n; i++) {
        const idist__catalog *catalog = idist__segment_catalog(seg, i);
        uint32_t count = __atomic_load_n(&catalog->extent_count, __ATOMIC_ACQUIRE);
        idist__view *view = &seg->views[i];

        if (i == seg->me) continue;
        while (view->extent_count < count && view->extent_count < IDIST__EXTENTS &&
               !seg->maps_no_more)
            seg->maps_no_more = !idist__view_map_next(seg, i, view);
        __atomic_store_n(&mapped[i], view->extent_count, __ATOMIC_RELEASE);
    }

    return !seg->maps_no_more;
}

// Returns the number of extents of our window that a rank of this host has mapped.
static uint32_t idist__view_mapped_by(const idist__segment *seg, int rank) {
    return __atomic_load_n(&idist__segment_mapped(seg, rank)[seg->me], __ATOMIC_ACQUIRE);
}

// Returns the file offset of a buffer in our window, and sets *extent to the index of its extent.
// Returns 0 if no extent contains the whole buffer. Called with the world's lock held.
static uint64_t idist__view_offset(const idist__segment *seg, const void *p, size_t nbytes,
                                   uint32_t *extent) {
    const idist__view *view = &seg->views[seg->me];
    uint32_t i;

    for (i = 0; i < view->extent_count; i++) {
        const char *map = view->extents[i].map;
        size_t at = (size_t)((const char *)p - map);

        if ((const char *)p < map || at >= view->extents[i].nbytes) continue;
        if (nbytes > view->extents[i].nbytes - at) return 0;
        *extent = i;
        return seg->window->at + view->extents[i].at + at;
    }

    return 0;
}

// Returns the local address of the file offset that another rank published. Returns NULL if no
// extent mapped here contains all nbytes at that offset.
static char *idist__view_pointer(const idist__segment *seg, uint64_t offset, size_t nbytes) {
    const idist__view *view;
    uint64_t rank, at;
    uint32_t i;

    if (offset < seg->window_at || !seg->window) return NULL;
    rank = (offset - seg->window_at) / seg->window_nbytes;
    at = (offset - seg->window_at) % seg->window_nbytes;
    if (rank >= (uint64_t)seg->n) return NULL;

    view = &seg->views[rank];
    for (i = 0; i < view->extent_count; i++) {
        uint64_t begin = view->extents[i].at, size = view->extents[i].nbytes;
        if (at >= begin && at - begin < size)
            return nbytes > size - (at - begin) ? NULL : view->extents[i].map + (at - begin);
    }

    return NULL;
}

// Unmaps the windows of the other ranks, and closes our window.
static void idist__view_unmap_all(idist__segment *seg) {
    uint32_t k;
    int i;

    for (i = 0; i < seg->n && seg->views; i++)
        for (k = 0; k < seg->views[i].extent_count && i != seg->me; k++)
            idist__os_memory_unmap(seg->views[i].extents[k].map, seg->views[i].extents[k].nbytes);
    if (seg->window) idist__window_close(seg->window);
}

// ---- ring/shm/doorbell.h -------------------------------------------------------------------------

// ring/shm/doorbell.h: lets a rank sleep until another rank writes something
//
// After a rank has written data, it wakes the ranks that may wait for the data and are asleep. A
// rank that is about to sleep marks its doorbell and then checks once more for new data. At least
// one of the two ranks sees what the other wrote, provided that no load overtakes the store of the
// same rank:
//
//   writer    write data     fence   load asleep: wake the sleeper
//   sleeper   store asleep   fence   load data: do not sleep
//
// A fence in the writer waits until the cache line of its store arrives from the other core, which
// takes as long as a small collective. So where the kernel can execute a fence in other processes
// (membarrier), the sleeper requests that fence, and the writers need none. If there are more ranks
// than cores, ranks sleep often, so each writer executes its own fence (`fenced`).
//
// In a collective, a rank usually waits for the next step of one particular member. The rank's
// doorbell names that member (`awaited`). If each of n members woke every rank that waits, a
// barrier would take n * n wake-ups.

typedef enum idist__sleep_place {
    IDIST__AWAKE = 0,
    IDIST__ASLEEP_ON_WORD = 1, // in a futex on the doorbell
    IDIST__ASLEEP_IN_POLL = 2  // in poll; the rank's beacon wakes it
} idist__sleep_place;

// Wakes a rank that sleeps or is about to sleep. The caller has called idist__doorbell_any_asleep
// since its write.
static void idist__doorbell_wake(const idist__segment *seg, int rank) {
    idist__doorbell *bell = idist__segment_doorbell(seg, rank);
    uint32_t place = __atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);

    if (place) place = __atomic_exchange_n(&bell->asleep, IDIST__AWAKE, __ATOMIC_ACQ_REL);
    if (place == IDIST__ASLEEP_ON_WORD) idist__os_wake_word(&bell->asleep);
    if (place == IDIST__ASLEEP_IN_POLL)
        idist__os_beacon_wake(seg->observer, &seg->ports[rank].beacon);
}

// Wakes a rank after we have made a step in a collective, unless the rank waits for a step of
// another member. The caller has called idist__doorbell_any_asleep since the step.
static void idist__doorbell_wake_for_step(const idist__segment *seg, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(seg, rank);
    uint32_t awaited = __atomic_load_n(&bell->awaited, __ATOMIC_RELAXED);

    if (!awaited || awaited == 1 + (uint32_t)seg->me) idist__doorbell_wake(seg, rank);
}

// Returns true if any rank sleeps. The caller has just written something. Executes the writer's
// fence if seg->fenced is set.
static bool idist__doorbell_any_asleep(const idist__segment *seg) {
    if (seg->fenced) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    else __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(&idist__segment_header_of(seg)->sleeper_count, __ATOMIC_RELAXED) != 0;
}

// Marks our doorbell before we sleep. `awaited` is the rank of this host whose step we wait for, or
// -1 for any rank. The caller then checks for new data, sleeps if there is none, and calls
// idist__doorbell_disarm.
static void idist__doorbell_arm(const idist__segment *seg, uint32_t place, int awaited) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    __atomic_fetch_add(&idist__segment_header_of(seg)->sleeper_count, 1u, __ATOMIC_RELAXED);
    __atomic_store_n(&bell->awaited, (uint32_t)(awaited + 1), __ATOMIC_RELAXED);
    __atomic_store_n(&bell->asleep, place, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!seg->fenced) idist__os_cpu_fence_others(false);
}

// Lets a step of any rank wake the sleeping thread of this process. Called when another thread of
// this process is about to begin a call.
static void idist__doorbell_widen(const idist__segment *seg) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    if (!__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED)) return;
    __atomic_store_n(&bell->awaited, 0u, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!seg->fenced) idist__os_cpu_fence_others(false);
}

// Returns true if another rank has woken us since idist__doorbell_arm.
static bool idist__doorbell_was_rung(const idist__segment *seg) {
    return __atomic_load_n(&idist__segment_doorbell(seg, seg->me)->asleep, __ATOMIC_RELAXED) ==
           IDIST__AWAKE;
}

static void idist__doorbell_disarm(const idist__segment *seg) {
    __atomic_store_n(&idist__segment_doorbell(seg, seg->me)->asleep, IDIST__AWAKE,
                     __ATOMIC_RELAXED);
    __atomic_fetch_sub(&idist__segment_header_of(seg)->sleeper_count, 1u, __ATOMIC_RELAXED);
}

// Records in our doorbell whether this rank waits in a call.
static void idist__doorbell_attend(const idist__segment *seg, bool waits) {
    __atomic_store_n(&idist__segment_doorbell(seg, seg->me)->attends, waits ? 1u : 0u,
                     __ATOMIC_RELAXED);
}

// Returns true if a rank waits in a call and does not sleep.
static bool idist__doorbell_attends(const idist__segment *seg, int rank) {
    const idist__doorbell *bell = idist__segment_doorbell(seg, rank);

    return __atomic_load_n(&bell->attends, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&bell->asleep, __ATOMIC_RELAXED);
}

// ---- ring/shm/liveness.h -------------------------------------------------------------------------

// ring/shm/liveness.h: notices that a process has ended
//
// Shared memory does not show that a process has ended, but the beacon of the process does
// (os/beacon.h). From time to time, mostly before it sleeps, a rank checks the beacons of a few
// other ranks. Over several such checks, it covers all beacons. A rank that finds a beacon gone
// records the end of the process in shared memory and wakes all ranks. Shared memory has these
// fields for the ends of processes and pipes:
//
//   doorbell.ended   the process of this rank has died, or has left the world
//   pipe.closed      the writer of this pipe writes nothing more to it
//   ended_count      incremented whenever `ended` or `closed` is set
//
// A rank that sees ended_count increase checks all of its pipes.

typedef enum idist__ended_how {
    IDIST__ENDED_NOT = 0,
    IDIST__ENDED_LEFT = 1, // the process itself reported that it left
    IDIST__ENDED_DIED = 2  // another rank found that its beacon is gone
} idist__ended_how;

// Maximum number of sleeping ranks that divide the beacons among themselves, and minimum number of
// beacons that a rank checks each time. If more ranks sleep, each of them sleeps longer between two
// checks.
enum { IDIST__ENDED_SHARERS = 32, IDIST__ENDED_LOOKS_LEAST = 8 };

// Makes all other ranks check their pipes.
static void idist__liveness_wake_all(const idist__segment *seg) {
    int i;

    __atomic_fetch_add(&idist__segment_header_of(seg)->ended_count, 1u, __ATOMIC_RELEASE);
    if (!idist__doorbell_any_asleep(seg)) return;
    for (i = 0; i < seg->n; i++)
        if (i != seg->me) idist__doorbell_wake(seg, i);
}

// Records how the process of a rank ended, and wakes all ranks. The first report wins.
static void idist__liveness_tell(const idist__segment *seg, int rank, idist__ended_how how) {
    uint32_t *ended = &idist__segment_doorbell(seg, rank)->ended, not_yet = IDIST__ENDED_NOT;

    if (__atomic_compare_exchange_n(ended, &not_yet, (uint32_t)how, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        idist__liveness_wake_all(seg);
}

static idist__ended_how idist__liveness_get(const idist__segment *seg, int rank) {
    return (idist__ended_how)__atomic_load_n(&idist__segment_doorbell(seg, rank)->ended,
                                             __ATOMIC_ACQUIRE);
}

// Checks the beacon of a rank. If the beacon is gone, reports to all ranks that the process died.
// Returns true if the process has ended.
static bool idist__liveness_look_at(idist__segment *seg, int rank) {
    int error;

    if (rank == seg->me) return false;
    if (idist__liveness_get(seg, rank) != IDIST__ENDED_NOT) return true;
    error = idist__os_beacon_look(seg->observer, &seg->ports[rank].beacon);
    if (error && error != ECONNREFUSED) seg->blind_error = error;
    if (error != ECONNREFUSED) return false;

    idist__liveness_tell(seg, rank, IDIST__ENDED_DIED);

    return true;
}

// Returns the number of ranks on this host that sleep, but at least 1.
static int idist__liveness_sleepers(const idist__segment *seg) {
    uint32_t count =
        __atomic_load_n(&idist__segment_header_of(seg)->sleeper_count, __ATOMIC_RELAXED);
    if (count > (uint32_t)seg->n) count = (uint32_t)seg->n;
    return count ? (int)count : 1;
}

// Returns the factor by which this rank sleeps longer between two checks than a rank that sleeps
// alone.
static int idist__liveness_patience(const idist__segment *seg) {
    int sleepers = idist__liveness_sleepers(seg);
    return sleepers > IDIST__ENDED_SHARERS ? sleepers / IDIST__ENDED_SHARERS : 1;
}

// Returns the number of beacons that a sleeping rank checks each time. A rank that sleeps alone
// checks all beacons. Several sleeping ranks divide the beacons, so that together they check all of
// them about as often.
static int idist__liveness_share(const idist__segment *seg) {
    int sleepers = idist__liveness_sleepers(seg), share;

    if (sleepers > IDIST__ENDED_SHARERS) sleepers = IDIST__ENDED_SHARERS;
    share = seg->n / sleepers;

    return share > IDIST__ENDED_LOOKS_LEAST ? share : IDIST__ENDED_LOOKS_LEAST;
}

// Checks the next `looks` beacons; each check takes about 1 us. Sets `look` in the port of each
// rank that has ended, so that the next read checks the pipe. This includes ends that another rank
// has recorded, because that rank may have been killed before it incremented ended_count.
static void idist__liveness_look(idist__segment *seg, int looks) {
    int i;

    for (i = 0; i < looks && i < seg->n; i++) {
        if (idist__liveness_look_at(seg, seg->next_look)) seg->ports[seg->next_look].look = true;
        seg->next_look = (seg->next_look + 1) % seg->n;
    }
}

// Returns true if any process or pipe has ended since the last call. In that case sets `look` in
// all ports, so that the next reads find out which one.
static bool idist__liveness_any(idist__segment *seg) {
    uint32_t count = __atomic_load_n(&idist__segment_header_of(seg)->ended_count, __ATOMIC_ACQUIRE);
    int i;

    if (count == seg->ended_seen) return false;
    seg->ended_seen = count;
    for (i = 0; i < seg->n; i++) seg->ports[i].look = true;

    return true;
}

// ---- ring/shm/pipe.h -----------------------------------------------------------------------------

// ring/shm/pipe.h: the transport through shared memory
//
// A link has two ring buffers, one for each direction.

// Copies bytes out of the pipe from our peer, starting at the position that belongs to the counter
// value `head`.
static inline void idist__pipe_copy_out(const idist__pipe_port *p, uint64_t head, void *buf,
                                        size_t nbytes) {
    const char *data = (const char *)(p->in + 1);
    size_t size = p->shm->pipe_nbytes, at = (size_t)head & (size - 1), first = size - at;

    if (nbytes <= first) {
        memcpy(buf, data + at, nbytes);
    } else {
        memcpy(buf, data + at, first);
        memcpy((char *)buf + first, data, nbytes - first);
    }
}

// Copies bytes into the pipe to our peer, starting at the position that belongs to the counter
// value `tail`.
static inline void idist__pipe_copy_in(idist__pipe_port *p, uint64_t tail, const void *buf,
                                       size_t nbytes) {
    char *data = (char *)(p->out + 1);
    const char *from = (const char *)buf;
    size_t size = p->shm->pipe_nbytes, at = (size_t)tail & (size - 1), first = size - at;
    int64_t begin_ns;

    if (nbytes < first) first = nbytes;

    if (idist__pace_begin(&p->pace, nbytes, &begin_ns)) {
        idist__os_cpu_stream(data + at, from, first);
        idist__os_cpu_stream(data, from + first, nbytes - first);
    } else {
        memcpy(data + at, from, first);
        if (nbytes > first) memcpy(data, from + first, nbytes - first);
    }

    idist__pace_end(&p->pace, begin_ns, nbytes);
}

// Lets the peer read the next nbytes, which have already been copied into the pipe. Wakes the peer
// if it sleeps.
static void idist__pipe_publish(idist__pipe_port *p, size_t nbytes) {
    p->tail += nbytes;
    idist__os_thread_handover();
    __atomic_store_n(&p->out->tail, p->tail, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);
}

// Lets the peer reuse the space of nbytes that we have read. `unread` is the number of unread bytes
// before the read. The peer waits for space only when the pipe is full, so we wake it only if more
// than half of the pipe was unread.
static void idist__pipe_consume(idist__pipe_port *p, size_t nbytes, uint64_t unread) {
    p->head += nbytes;
    __atomic_store_n(&p->in->head, p->head, __ATOMIC_RELEASE);
    if (unread > p->shm->pipe_nbytes / 2 && idist__doorbell_any_asleep(p->shm))
        idist__doorbell_wake(p->shm, p->peer);
}

static uint64_t idist__pipe_unread(const idist__pipe_port *p) {
    return __atomic_load_n(&p->in->tail, __ATOMIC_ACQUIRE) - p->head;
}

// Returns true if the peer will write nothing more, so that the pipe already holds the peer's last
// bytes.
static bool idist__pipe_has_ended(const idist__pipe_port *p) {
    return __atomic_load_n(&p->in->closed, __ATOMIC_ACQUIRE) ||
           idist__liveness_get(p->shm, p->peer) != IDIST__ENDED_NOT;
}

static ptrdiff_t idist__pipe_read(void *port, void *buf, size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    uint64_t unread = idist__pipe_unread(p);
    size_t at, slice;

    if (!unread && p->look) {
        bool ended = idist__pipe_has_ended(p);

        unread = idist__pipe_unread(p); // includes the last bytes that the peer wrote
        if (ended && !unread) {
            errno = 0;
            return -1;
        }

        p->look = ended;
    }

    if (!unread) return 0;

    if (unread > p->shm->pipe_nbytes) {
        errno = EPROTO;
        return -1;
    }

    idist__os_thread_handover();
    if (nbytes > unread) nbytes = (size_t)unread;

    for (at = 0; at < nbytes; at += slice) {
        slice = nbytes - at < IDIST__SLICE_BYTES ? nbytes - at : IDIST__SLICE_BYTES;
        idist__pipe_copy_out(p, p->head, (char *)buf + at, slice);
        idist__pipe_consume(p, slice, unread);
    }

    return (ptrdiff_t)nbytes;
}

static ptrdiff_t idist__pipe_write(void *port, const idist__os_part *parts, int nparts) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t space = p->shm->pipe_nbytes, moved = 0, unpublished = 0, wanted = 0;
    uint64_t unread;
    int i;

    for (i = 0; i < nparts; i++) wanted += parts[i].nbytes;
    if (wanted > space - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);

    unread = p->tail - p->out_head;
    if (unread > space) {
        errno = EPROTO;
        return -1;
    }

    space -= (size_t)unread;

    for (i = 0; i < nparts && space; i++) {
        const char *data = (const char *)parts[i].data;
        size_t k = parts[i].nbytes < space ? parts[i].nbytes : space, at, slice;

        for (at = 0; at < k; at += slice) {
            slice = k - at < IDIST__SLICE_BYTES ? k - at : IDIST__SLICE_BYTES;
            idist__pipe_copy_in(p, p->tail + unpublished, data + at, slice);
            unpublished += slice;
            if (unpublished < IDIST__SLICE_BYTES) continue;
            idist__pipe_publish(p, unpublished);
            unpublished = 0;
        }

        moved += k;
        space -= k;
    }

    if (unpublished) idist__pipe_publish(p, unpublished);

    return (ptrdiff_t)moved;
}

static bool idist__pipe_peek_header(void *port, void *header) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    size_t size = p->shm->pipe_nbytes;
    uint64_t unread = idist__pipe_unread(p), at;

    if (unread < IDIST__HEADER_BYTES || unread > size) return false;
    idist__os_thread_handover();

    // The reader next needs the cache lines that follow the header.
    for (at = IDIST__HEADER_BYTES; at < unread && at < 4 * IDIST__LINE; at += IDIST__LINE)
        __builtin_prefetch((const char *)(p->in + 1) + ((p->head + at) & (size - 1)));
    idist__pipe_copy_out(p, p->head, header, IDIST__HEADER_BYTES);

    return true;
}

static bool idist__pipe_read_message(void *port, void *payload, size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t message_nbytes = IDIST__HEADER_BYTES + nbytes;
    uint64_t unread = idist__pipe_unread(p);

    if (unread < message_nbytes || unread > p->shm->pipe_nbytes) return false;
    idist__os_thread_handover();
    if (nbytes) idist__pipe_copy_out(p, p->head + IDIST__HEADER_BYTES, payload, nbytes);
    idist__pipe_consume(p, message_nbytes, unread);

    return true;
}

// Returns true if the pipe has space for all of nbytes.
static bool idist__pipe_has_space(idist__pipe_port *p, size_t nbytes) {
    size_t size = p->shm->pipe_nbytes;

    if (nbytes > size - (size_t)(p->tail - p->out_head))
        p->out_head = __atomic_load_n(&p->out->head, __ATOMIC_ACQUIRE);
    return p->tail - p->out_head <= size && nbytes <= size - (size_t)(p->tail - p->out_head);
}

// Prefetches the cache lines that the next write is likely to fill. These lines are in the peer's
// cache, because the peer read them one lap ago.
static void idist__pipe_prefetch_space(const idist__pipe_port *p, size_t nbytes) {
    const char *data = (const char *)(p->out + 1);
    size_t at;

    for (at = 0; at < nbytes && at < IDIST__PREFETCH_BYTES; at += IDIST__LINE)
        idist__os_cpu_prefetch_for_write(data + ((p->tail + at) & (p->shm->pipe_nbytes - 1)));
}

static bool idist__pipe_write_message(void *port, const void *header, const void *payload,
                                      size_t nbytes) {
    idist__pipe_port *p = (idist__pipe_port *)port;
    size_t message_nbytes = IDIST__HEADER_BYTES + nbytes;
    size_t size = p->shm->pipe_nbytes, at = (size_t)p->tail & (size - 1);
    char *data = (char *)(p->out + 1);

    if (!idist__pipe_has_space(p, message_nbytes)) return false;

    if (nbytes < IDIST__STREAM_BYTES && message_nbytes <= size - at) { // not timed, not wrapped
        memcpy(data + at, header, IDIST__HEADER_BYTES);
        if (nbytes) memcpy(data + at + IDIST__HEADER_BYTES, payload, nbytes);
    } else {
        idist__pipe_copy_in(p, p->tail, header, IDIST__HEADER_BYTES);
        if (nbytes) idist__pipe_copy_in(p, p->tail + IDIST__HEADER_BYTES, payload, nbytes);
    }

    idist__pipe_publish(p, message_nbytes);
    if (!p->pace.streams || nbytes < IDIST__STREAM_BYTES) // if the next write uses the caches
        idist__pipe_prefetch_space(p, message_nbytes);

    return true;
}

static bool idist__pipe_exposes_memory(void *port, uint8_t *withdrawn) {
    const idist__segment *seg = ((const idist__pipe_port *)port)->shm;

    if (seg->reads_remote && withdrawn)
        *withdrawn = (uint8_t)idist__segment_doorbell(seg, seg->me)->withdrawn;
    return seg->reads_remote;
}

static bool idist__pipe_reads_slowly(void *port) {
    return !((const idist__pipe_port *)port)->shm->reads_fast;
}

static bool idist__pipe_attends(void *port) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    return !p->shm->oversubscribed && idist__doorbell_attends(p->shm, p->peer);
}

static bool idist__pipe_pull(void *port, uint64_t address, uint8_t withdrawn, void *buf,
                             size_t nbytes) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;
    const idist__counter *now = &idist__segment_doorbell(p->shm, p->peer)->withdrawn;

    if (!p->shm->reads_remote ||
        idist__segment_read_remote(p->shm, p->peer, address, buf, nbytes) != 0)
        return false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return (uint8_t)__atomic_load_n(now, __ATOMIC_ACQUIRE) == withdrawn;
}

// Returns true if the process of the peer has ended, even if the pipe still holds unread bytes from
// it. Reports the end to all ranks.
static bool idist__pipe_peer_gone(const idist__pipe_port *p) {
    return idist__liveness_look_at(p->shm, p->peer);
}

// Returns -1 because a pipe has no descriptor. A doorbell wakes a rank that waits for a pipe, and
// ring/shm/liveness.h notices if the peer has died.
static int idist__pipe_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void idist__pipe_close(void *port) {
    const idist__pipe_port *p = (const idist__pipe_port *)port;

    if (idist__liveness_get(p->shm, p->shm->me) != IDIST__ENDED_NOT) return; // all ranks know
    __atomic_store_n(&p->out->closed, 1u, __ATOMIC_RELEASE);
    __atomic_fetch_add(&idist__segment_header_of(p->shm)->ended_count, 1u, __ATOMIC_RELEASE);
    if (idist__doorbell_any_asleep(p->shm)) idist__doorbell_wake(p->shm, p->peer);
}

static idist__transport idist__pipe_transport;

// Fills in idist__pipe_transport. Called before the first world opens.
static void idist__pipe_fill_transport(void) {
    idist__transport *transport = &idist__pipe_transport;

    transport->name = "shm";
    transport->read = idist__pipe_read;
    transport->write = idist__pipe_write;
    transport->close = idist__pipe_close;
    transport->descriptor = idist__pipe_descriptor;

    transport->peek_header = idist__pipe_peek_header;
    transport->read_message = idist__pipe_read_message;
    transport->write_message = idist__pipe_write_message;

    transport->exposes_memory = idist__pipe_exposes_memory;
    transport->reads_slowly = idist__pipe_reads_slowly;
    transport->attends = idist__pipe_attends;
    transport->pull = idist__pipe_pull;
}

// ---- ring/msg/ring_model.h -----------------------------------------------------------------------

// ring/msg/ring_model.h: frames, links, messages and transfers as data; the failure of a group

//------------------------------------------------------------------------------
// frames, transfers, messages, links, the backend's part of world and group
//------------------------------------------------------------------------------

// A frame has 64 bytes. The handshake checks that both ends have the same byte order. `nbytes` of
// payload may follow.
//
//   type    meaning                       payload    fields besides ctx
//   EAGER   a whole message               message    fingerprint, tag, nbytes, past; id and aux:
//                                                    the previous call (idist__history_tell_past)
//   RTS     a message is ready            -          fingerprint, tag, past, id (the sender's
//                                                    number for the message), nbytes (its size),
//                                                    aux (its address), flags (low bits of the
//                                                    number of sends that the rank has withdrawn)
//   CTS     clear to send                 -          id (as in RTS), aux (the receiver's number);
//                                                    granted: id is 0; fingerprint, tag
//   DATA    a piece of the message        piece      id (the receiver's number), nbytes, aux (size
//                                                    of the message), fingerprint, tag, past
//   PULLED  I have read the message       -          id (as in RTS)
//   CREDIT  eager bytes were consumed     -          nbytes (how many)
//   WAITS   I am waiting in a call        -          fingerprint, flags, tag (the last collective
//                                                    of the group that I have entered), aux (number
//                                                    of your send / recv messages received so far),
//                                                    id (of the RTS, if I wait in a send)
//   HERE    I am here (to WAITS)          -          fingerprint: of the call in WAITS if I have
//                                                    entered it, or of my last call of the group
//   ABORT   the group has failed          text       aux (the status), nbytes
//   LEFT    I have freed the group        -          -
//   ASK     whom do you wait for?         -          flags (PASS_ON)
//   ANSWER  I wait for a rank             -          aux (1 + rank in the world; 0 for no rank),
//                                                    fingerprint (of the call), flags (UNANSWERED)
//   BYE     I leave the world             text       aux (0 after the last barrier, or the status
//                                                    with which the world failed), nbytes (of the
//                                                    text; 0 if there is none)
typedef struct idist__frame {
    uint8_t type, flags;
    uint16_t past; // in EAGER, RTS, DATA of a collective: digest of the earlier calls
    uint32_t tag;  // step of a collective, or the user's tag
    uint64_t ctx;  // group
    idist__fingerprint fingerprint;
    uint64_t nbytes;
    uint64_t id;
    uint64_t aux;
} idist__frame;

enum {
    IDIST__EAGER = 1,
    IDIST__RTS,
    IDIST__CTS,
    IDIST__DATA,
    IDIST__PULLED,
    IDIST__CREDIT,
    IDIST__WAITS,
    IDIST__HERE,
    IDIST__ABORT,
    IDIST__LEFT,
    IDIST__BYE,
    IDIST__ASK,
    IDIST__ANSWER
};

enum { IDIST__NEEDS_YOU = 1, IDIST__ONLY_CALL = 2 }; // flags of WAITS: see deadlock.h
enum { IDIST__PASS_ON = 1 };                         // flag of ASK: also ask the rank you wait for
enum { IDIST__UNANSWERED = 1 };                      // flag of ANSWER: that rank does not answer me

#define IDIST__FRAME_BYTES sizeof(idist__frame)
typedef char idist__frame_is_a_header[IDIST__FRAME_BYTES == IDIST__HEADER_BYTES ? 1 : -1];
// Largest payload of a DATA frame. A frame of another message may have to wait until one such frame
// is written.
#define IDIST__PIECE_BYTES ((size_t)1 << 20)
// Limit on the eager bytes, frames included, that are in transit to one rank or have not been
// consumed there. The receiver returns credit only when it has consumed half of the limit. So the
// limit is twice what MPI programs often have in flight, which is 64 messages of 16 KiB.
#define IDIST__WINDOW_BYTES ((size_t)2 << 20)
// Largest eager message if the receiver can read larger messages in our memory, and such reads are
// fast.
#define IDIST__EAGER_EXPOSED_BYTES ((size_t)8192)
// Largest message that is sent through a pipe in shared memory if the receiver could also read it
// quickly in our memory. Copying a larger message through the pipe would evict too much other data
// from the caches.
#define IDIST__COPIED_BYTES ((size_t)1 << 20)
#define IDIST__TEXT_BYTES ((size_t)400) // longest text of an ABORT or BYE
#define IDIST__STAGE_BYTES ((size_t)32 * 1024)
#define IDIST__QUICK_YIELDS 16 // maximum turns of idist__send_quick_wait if it yields
#define IDIST__TURN_NS 64      // approximate time of a turn of idist__send_quick_wait if it spins
#define IDIST__HISTORY 64
// Interval at which a sleeping rank checks whether processes of its host have ended. The interval
// may be longer: see ring/shm/liveness.h.
#ifndef IDIST__LOOK_NS // a test sets it so high that no rank ever checks
#define IDIST__LOOK_NS (10 * IDIST__MS)
#endif

enum { IDIST__CLOSED = 256 };       // closed groups that a ring remembers
enum { IDIST__UNKNOWN_MAX = 1024 }; // messages kept from a rank for groups that do not exist here
enum { IDIST__BUCKETS = 1024 };

// A node of a hash table, embedded in the struct that is looked up; see ring/msg/transfer.h.
typedef struct idist__index_node {
    struct idist__index_node *next, **at; // `at` is the pointer that points here
    struct idist__index_bucket *bucket;   // NULL if in no table
} idist__index_node;

typedef struct idist__index_bucket {
    idist__index_node *first, **end; // oldest first; `end` is valid unless the bucket is empty
} idist__index_bucket;

// A send or receive in progress. A transfer is in at most one list. The lists are `out`, `waiting`,
// `posted` and `receiving` of a link, `recvs` and `wild` of a group, and `idle` of the ring. A
// transfer is in no list while it is `in_transfer` of a link that reads an EAGER frame, or `claim`
// or `self_send` of a message.
typedef struct idist__transfer {
    struct idist__transfer *next;
    struct idist__transfer **at;       // the pointer that points here
    struct idist__transfer_list *list; // the list that holds it, if that is an idist__transfer_list
    idist__index_node hook;            // in ring->transfers, if frames look the transfer up
    idist__task *task;         // NULL for control frames and the rest of a cancelled message
    int slot;                  // slot of a receive in a collective; -1 if none
    bool send;                 // false for a receive
    bool started;              // the peer may have seen a frame of this transfer
    char *data;                // the user's buffer
    size_t nbytes, moved;      // size of the whole message, and bytes moved so far
    idist__frame frame;        // the frame to write, or what a receive expects
    size_t frame_moved;        // bytes of the frame that were written
    size_t piece, piece_moved; // payload that follows the frame: size, and bytes written
    uint64_t id;               // our number in RTS, CTS, DATA and PULLED; 0 if none
    bool granted;              // true if a receive has sent CTS before any RTS
    uint64_t stamp;            // order of posting
    char *owned;               // payload to free with the transfer, or NULL
} idist__transfer;

typedef struct idist__transfer_list {
    idist__transfer *first, **end; // oldest first; `end` is valid unless the list is empty
} idist__transfer_list;

// A frame that arrived too early. An EAGER or RTS waits for its receive, a CTS waits for its send,
// and an ABORT waits for its group.
typedef struct idist__message {
    struct idist__message *next, **at; // in its link's list; `at` is the pointer that points here
    idist__index_node hook;            // in ring->messages
    int peer;
    idist__frame frame;
    char *data;             // payload of an EAGER or text of an ABORT; follows this struct
    size_t moved;           // payload bytes that have arrived
    idist__transfer *claim; // the receive that gets the message once it is complete
    // For a large message to ourselves, the send whose buffer still holds the payload; otherwise
    // NULL.
    idist__transfer *self_send;
    bool unknown;   // the group did not exist here on arrival
    uint64_t stamp; // order of arrival
} idist__message;

enum { IDIST__SOCKETS_MAX = IDIST__CONFIG_SOCKETS_MAX }; // maximum per link

typedef struct idist__sockets {  // the sockets of a link; see ring/msg/sockets.h
    int fds[IDIST__SOCKETS_MAX]; // descriptors; -1 if not connected yet
    int count;
    int in, out;              // indexes of the sockets to read and to write next
    size_t in_left, out_left; // bytes until the link switches to the next socket
} idist__sockets;

// Limits for writing several small sends in one system call. Sends of up to IDIST__CORK_MESSAGE
// bytes that follow each other within IDIST__CORK_NS are held back, up to IDIST__CORK_BYTES in all.
#define IDIST__CORK_MESSAGE ((size_t)4096)
#define IDIST__CORK_BYTES ((size_t)32 * 1024)
#define IDIST__CORK_NS ((int64_t)20000)
enum { IDIST__PARTS = 64 }; // maximum frames and payloads in one write

typedef struct idist__link { // the connection to one rank
    const idist__transport *transport;
    idist__sockets sockets;
    void *port; // the transport's port: &sockets, or an idist__pipe_port for shared memory
    bool open;
    bool polled;                 // the transport's `polled`
    int watched_in, watched_out; // descriptors of this link that ring->watch watches, or -1
    bool bye;                    // the peer has left; the end of the stream is then no failure
    idist_status bye_status;     // IDIST_OK, or the status of the world's failure; see `text`
    bool ended; // the stream has ended; ring/engine/progress.h decides what that means
    int ended_errno;
    bool write_dead; // writing has failed; the read path finds out why
    bool corked;     // some output is held back until more follows, see idist__link_may_cork

    idist__transfer *out, **out_end; // the output queue, in order
    size_t corked_nbytes;            // bytes that are held back
    int64_t sent_ns;                 // when the last send of the program began
    idist__transfer_list waiting;    // sends that wait for CTS or PULLED
    idist__transfer_list posted;     // receives of collectives, not matched yet
    idist__transfer_list receiving;  // matched receives whose DATA is arriving

    idist__message *early, **early_end; // unexpected messages, in order of arrival
    int unknown_count;                  // unexpected messages for groups that do not exist here

    // Credits. IDIST__WINDOW_BYTES is always `window` plus the eager bytes that the peer has not
    // returned as credit. These bytes are in transit, unread at the peer, or still owed to us.
    size_t window;       // eager bytes that we may still send
    size_t owed;         // eager bytes that we have consumed but not yet returned as credit
    size_t their_window; // eager bytes that the peer may still send

    char *stage; // this link's part of ring->stages: bytes read ahead; [at .. end) are unread
    size_t at, end;
    idist__frame in;                  // the frame that is being read
    size_t in_moved;                  // bytes of `in` that have arrived
    size_t left;                      // payload bytes of `in` that have not arrived yet
    char *target;                     // destination of the payload; NULL to drop it
    idist__transfer *in_transfer;     // the transfer that the payload belongs to, or NULL
    idist__message *in_message;       // the message that the payload belongs to, or NULL
    char text[IDIST__TEXT_BYTES + 1]; // text of an ABORT or a BYE

    idist__frame peer_waits;         // the last WAITS; its type is 0 once a message has arrived
    uint64_t p2p_sent, p2p_received; // messages of send / recv so far
    int64_t here_ns;                 // when the last HERE arrived
    int64_t asked_ns;                // when the last ASK was sent
    int64_t answered_ns;             // when the last ANSWER arrived
    idist__frame answer;             // the last ANSWER

    struct idist__link *next_wanted; // see ring->wanted
    bool wanted;
    bool asks; // our last ASK has not been answered yet
} idist__link;

typedef struct idist__closed { // a group that has been closed
    uint64_t ctx;
    idist_status status;
} idist__closed;

typedef struct idist__ring { // the backend's part of a world
    idist__world *w;
    idist__link *links;          // by world rank; our own link holds messages to ourselves
    idist__os_poll_entry *polls; // scratch of ring/engine/progress.h: two poll sets
    size_t poll_capacity;        // number of entries in each poll set
    int watch;                   // the watch on the descriptors of links, tagged by rank; or -1
    char *stages;                // stages of all links, in one allocation; most are never touched
    int wake;                    // descriptor that wakes a thread from poll
    int corked_count;            // links that are corked
    struct idist__segment *shm;  // memory that the ranks of this host share, or NULL
    int polled_link_count;       // number of open links that are polled
    uint32_t polled_count;       // number of times that a caller has polled
    idist__link *wanted;         // links without a connection that must send or receive a message
    struct idist__connector *connector; // NULL if no link lacks a connection
    bool said_bye;                      // all connected peers were told that we leave
    idist_status bye_status;            // the status in our BYE; IDIST_OK if we leave cleanly
    int left_count;                     // number of ranks that have sent BYE
    int64_t asking_ns;     // when the last round of ASK frames began; see ring/engine/ask.h
    int64_t ask_again_ns;  // when the ranks of that round are asked again; 0 if never
    char unreachable[200]; // why the last needed connection could not be made
    int64_t no_fds_ns;     // when we last ran out of descriptors; 0 if never
    bool told_blind;       // we have logged that we cannot detect the end of processes
    int64_t looked_ns;     // when we last checked if processes of this host have ended
    // Time by which the next sleep exceeds the interval between two checks for ended processes.
    int64_t extra_sleep_ns;
    // Time when the last task started. After a pause of more than 1 ms, the next task first reads
    // the links.
    int64_t last_start_ns;
    idist__transfer *idle; // transfers for reuse
    uint64_t stamp, next_id;
    // The most recently closed groups, in a ring buffer. Frames that still arrive for these groups
    // are dropped.
    idist__closed closed[IDIST__CLOSED];
    uint32_t nclosed;

    // A failure that was recorded but not yet carried out; see the last section of this file.
    idist_group *failed;
    idist_status failed_status;
    char failed_cause[400];

    idist__index_bucket transfers[IDIST__BUCKETS], messages[IDIST__BUCKETS]; // see transfer.h
} idist__ring;

typedef struct idist__seen {        // a member's progress in a group, as known here
    uint32_t seq;                   // number of the last call that the member has entered
    idist__fingerprint fingerprint; // fingerprint of that call
} idist__seen;

typedef struct idist__ring_group { // the backend's part of a group
    int *rank_of;                  // rank in the group by world rank; -1 if not a member
    idist__seen *seen;             // by rank in the group
    idist__transfer_list recvs;    // receives of idist_recv with a source and a tag
    idist__transfer_list wild;     // receives of idist_recv from any source or with any tag

    idist__fingerprint history[IDIST__HISTORY]; // our own calls, by seq; see ring/msg/history.h
    uint16_t past[IDIST__HISTORY];              // digest of the calls before each call
    uint16_t digest;                            // digest of all calls so far

    struct idist__share *share; // shared memory of the members; NULL if collectives use messages
    bool met;                   // this rank knows the regions of all members

    // A group over several hosts; see ring/algo/host_plan.h.
    bool spans_hosts;
    int nhosts;                // number of hosts; 0 if calls cannot run BY_HOST
    bool in_order;             // the members on each host have consecutive ranks
    idist_group *local;        // the members on this host; NULL if there is only this rank
    idist_group *leaders;      // the first member of each host; NULL if we are not one
    idist_group *whole;        // the group for which this group is `local` or `leaders`
    idist__task *first, *last; // queue of BY_HOST calls; only the first one runs
} idist__ring_group;

static idist__ring *idist__ring_of(const idist__world *w) { return (idist__ring *)w->impl; }

static idist__ring_group *idist__ring_group_of(const idist_group *g) {
    return (idist__ring_group *)g->impl;
}

// Returns the host of a member.
static uint64_t idist__ring_group_host(const idist_group *g, int rank) {
    return g->w->nodes[g->ranks[rank]].host;
}

//------------------------------------------------------------------------------
// failures that are noticed while transfers are in use
//
// Failing a group cancels its tasks and frees their transfers. That must not happen while a
// transfer is in use further up the stack, so the code that notices a failure only records it. The
// engine carries out a recorded failure after each frame, and before most of its entry points
// return. The loops that run tasks stop at a recorded failure. So at most one failure is recorded
// at a time.
//------------------------------------------------------------------------------

// Records a failure of a group, unless a failure is already recorded or the group has already
// failed.
static void idist__ring_fail(idist__ring *ring, idist_group *g, idist_status status,
                             const char *cause) {
    if (ring->failed || g->status != IDIST_OK) return;
    ring->failed = g;
    ring->failed_status = status;
    idist__text_copy(ring->failed_cause, sizeof ring->failed_cause, cause);
}

// Records that a group has failed because this rank is out of memory.
static void idist__ring_fail_memory(idist__ring *ring, idist_group *g) {
    const idist__world *w = ring->w;
    char cause[400];

    snprintf(cause, sizeof cause, "rank %d on %s is out of memory", w->group.rank,
             w->about.hostname);
    idist__ring_fail(ring, g, IDIST_ERR_NO_MEMORY, cause);
}

// Carries out the recorded failure, and further failures that it causes.
static void idist__ring_settle(idist__ring *ring) {
    while (ring->failed) {
        idist_group *g = ring->failed;
        ring->failed = NULL;
        idist__group_fail(g, ring->failed_status, ring->failed_cause);
    }
}

// ---- ring/msg/sockets.h --------------------------------------------------------------------------

// ring/msg/sockets.h: the transports tcp, unix and none (a link without a connection)
//
// A link over TCP has one or several sockets, because one socket cannot always saturate a network.
// The socket buffers that the system allows limit the number of bytes in flight, and some clouds
// limit the bandwidth of each connection. In each direction, the bytes are striped across the
// sockets:
//
//   stripe   | 0 | 1 | 2 | 3 | 4 | ...     IDIST__STRIPE_BYTES each
//   socket     0   1   2   0   1
//
// Sender and receiver both count bytes, so no frame has to say where a stripe begins. A stripe is
// so large that its end rarely falls inside a small message, but small compared with the number of
// bytes in flight.

#ifndef IDIST__STRIPE_BYTES // a test makes stripes so small that they cut frames and payloads
#define IDIST__STRIPE_BYTES ((size_t)256 * 1024)
#endif

static size_t idist__sockets_stripe(const idist__sockets *s) {
    return s->count > 1 ? IDIST__STRIPE_BYTES : SIZE_MAX;
}

static void idist__sockets_init(idist__sockets *s) {
    int i;

    memset(s, 0, sizeof *s);
    for (i = 0; i < IDIST__SOCKETS_MAX; i++) s->fds[i] = -1;
}

// Sets the number of sockets of a link, before they are connected.
static void idist__sockets_set_count(idist__sockets *s, int count) {
    s->count = count;
    s->in_left = idist__sockets_stripe(s);
    s->out_left = idist__sockets_stripe(s);
}

static bool idist__sockets_is_complete(const idist__sockets *s) {
    int i;

    for (i = 0; i < s->count; i++)
        if (s->fds[i] < 0) return false;

    return true;
}

// Accounts for nbytes that were moved through socket number *turn. *left is the number of bytes
// that remain in the stripe of this socket. When it reaches 0, switches to the next socket.
static void idist__sockets_moved(const idist__sockets *s, int *turn, size_t *left, size_t nbytes) {
    *left -= nbytes;
    if (*left) return;
    *turn = (*turn + 1) % s->count;
    *left = idist__sockets_stripe(s);
}

static ptrdiff_t idist__sockets_read(void *port, void *buf, size_t nbytes) {
    idist__sockets *s = (idist__sockets *)port;
    size_t most = nbytes < s->in_left ? nbytes : s->in_left;
    ptrdiff_t n = idist__os_socket_read(s->fds[s->in], buf, most);

    if (n > 0) idist__sockets_moved(s, &s->in, &s->in_left, (size_t)n);

    return n;
}

static ptrdiff_t idist__sockets_write(void *port, const idist__os_part *parts, int nparts) {
    idist__sockets *s = (idist__sockets *)port;
    idist__os_part of_stripe[IDIST__PARTS];
    size_t left = s->out_left;
    ptrdiff_t n;
    int i;

    for (i = 0; i < nparts && i < IDIST__PARTS && left; i++) {
        of_stripe[i] = parts[i];
        if (of_stripe[i].nbytes > left) of_stripe[i].nbytes = left;
        left -= of_stripe[i].nbytes;
    }

    n = idist__os_socket_write(s->fds[s->out], of_stripe, i);

    // Only the read path reports why a link broke, and it may be reading another socket of the
    // link. So a failed write ends all sockets.
    for (i = 0; n < 0 && s->count > 1 && i < s->count; i++) idist__os_socket_end(s->fds[i]);

    if (n > 0) idist__sockets_moved(s, &s->out, &s->out_left, (size_t)n);

    return n;
}

static void idist__sockets_close(void *port) {
    idist__sockets *s = (idist__sockets *)port;
    int i;

    for (i = 0; i < IDIST__SOCKETS_MAX; i++) idist__os_descriptor_close(&s->fds[i]);
}

static int idist__sockets_descriptor(void *port, bool output) {
    const idist__sockets *s = (const idist__sockets *)port;
    return s->fds[output ? s->out : s->in];
}

// The functions below are the transport of a link without a connection. The output of such a link
// stays queued until there is a connection. Such a link counts as polled, so that the rank sleeps
// in poll, where the connector's sockets can wake it.

static ptrdiff_t idist__sockets_read_nothing(void *port, void *buf, size_t nbytes) {
    (void)port;
    (void)buf;
    (void)nbytes;
    return 0;
}

static ptrdiff_t idist__sockets_write_nothing(void *port, const idist__os_part *parts, int nparts) {
    (void)port;
    (void)parts;
    (void)nparts;
    return 0;
}

static void idist__sockets_close_nothing(void *port) { (void)port; }

static int idist__sockets_no_descriptor(void *port, bool output) {
    (void)port;
    (void)output;
    return -1;
}

static void idist__sockets_fill_stream(idist__transport *transport, const char *name) {
    transport->name = name;
    transport->read = idist__sockets_read;
    transport->write = idist__sockets_write;
    transport->close = idist__sockets_close;
    transport->descriptor = idist__sockets_descriptor;
    transport->polled = true;
}

static void idist__sockets_fill_none(idist__transport *transport) {
    transport->name = "none";
    transport->read = idist__sockets_read_nothing;
    transport->write = idist__sockets_write_nothing;
    transport->close = idist__sockets_close_nothing;
    transport->descriptor = idist__sockets_no_descriptor;
    transport->polled = true;
}

static idist__transport idist__transport_tcp, idist__transport_unix, idist__transport_none;

// Fills in the socket transports. Called before the first world opens.
static void idist__sockets_fill_transports(void) {
    idist__sockets_fill_stream(&idist__transport_tcp, "tcp");
    idist__transport_tcp.lossy_close = true;
    idist__sockets_fill_stream(&idist__transport_unix, "unix");
    idist__sockets_fill_none(&idist__transport_none);
}

// ---- ring/msg/op.h -------------------------------------------------------------------------------

// ring/msg/op.h: a running collective, and the macros that let an algorithm wait
//
// An algorithm is a function that is called again whenever one of its sends or receives completes.
// Some algorithms store their own position (ring/algo/stream.h, ring/algo/direct.h); the others are
// coroutines. A coroutine is straight-line code between CO_BEGIN and CO_END. CO_AWAIT leaves the
// function unless its condition holds. The next call resumes there and checks the condition again.
// Local variables do not keep their values across a CO_AWAIT, so all state is in idist__op.

// Minimum and maximum number of receives of a stream that are posted ahead. The peer may send the
// messages for all of them without waiting. Twice the minimum is slower on one host, because the
// caches cannot hold 2 MiB in flight.
#define IDIST__SLOTS 4
#define IDIST__SLOTS_MOST 32
#define IDIST__CHUNK_BYTES ((size_t)256 * 1024) // unit of a stream

typedef struct idist__op idist__op;

typedef struct idist__item { // a message of a stream
    int peer;                // rank in the group
    char *data;
    size_t nbytes;
} idist__item;

// ---- state of an algorithm, one struct per family ----

// State of ring/algo/stream.h, which ring_algo.h and chain.h use.
typedef struct idist__stream_op {
    size_t recv_total, send_total; // items
    size_t head;                   // items that can be sent before anything has been received
    size_t posted, taken, sent;    // items so far: receives posted, items taken, sends posted
    size_t chunk_count;            // elements in a chunk
    size_t block_chunks;           // chunks in a block
    char *slots;                   // scratch for receives that have no address
    idist__item (*recv_at)(idist__task *t, size_t index);
    idist__item (*send_at)(idist__task *t, size_t index);
    void (*take)(idist__task *t, size_t index);
} idist__stream_op;

typedef struct idist__direct_op {  // ring/algo/direct.h
    size_t recv_total, send_total; // messages
    size_t posted, sent;           // messages so far
} idist__direct_op;

typedef struct idist__dissemination_op { // ring/algo/tree.h
    int distance;                        // distance in the current round, a power of two
} idist__dissemination_op;

typedef struct idist__tree_op { // ring/algo/tree.h
    int distance;               // distance to the parent, or to the child of the current step
} idist__tree_op;

typedef struct idist__doubling_op { // ring/algo/doubling.h
    int distance;                   // distance to the partner of the current round, a power of two
    int active_ranks; // number of ranks that exchange: the largest power of two up to n
} idist__doubling_op;

typedef struct idist__bruck_op { // ring/algo/bruck.h
    int distance;                // distance in the current round, a power of two
    size_t packed_blocks;        // all_to_all: blocks sent in this round
} idist__bruck_op;

enum { IDIST__HOST_ROUND = 3 }; // maximum steps of a plan that run at the same time

typedef struct idist__host_op {     // ring/algo/host_run.h
    struct idist__host_step *steps; // the plan, or NULL if not made yet
    size_t step_count;
    size_t current;                          // the first step of the current round
    size_t running_count;                    // number of steps of the current round
    idist__task *running[IDIST__HOST_ROUND]; // tasks of these steps; freed after all have ended
    idist__task *next;                       // the next call in the queue of the group
} idist__host_op;

typedef struct idist__shared_op { // ring/share/
    uint32_t call_number;         // number among the shared calls of the group
    int next_rank;                // rank at which the check of the other members continues
    int awaited;                  // the member whose next step this rank waits for
    bool entered;                 // our slot announces the call
    bool remote;          // we may read contributions from other processes, through the kernel
    bool in_place;        // other ranks read our contribution directly from its buffer
    bool direct;          // other ranks write directly to our result
    uint64_t first_chunk; // number of the call's first chunk, counted over all calls of the group
    size_t nchunks;
    size_t chunk_count;   // elements of a block that each chunk holds
    size_t chunk;         // the current chunk
    size_t exposed;       // number of chunks that we have exposed
    size_t largest_count; // v-forms: elements of the largest part
    idist__task *next;    // the next call in the queue of the group
} idist__shared_op;

// The backend's part of a task. Sends and receives of the program use only `transfer`; the other
// fields are not cleared for them.
struct idist__op {
    idist__transfer *transfer; // of a send or receive of the program; NULL once it has ended

    // Fields of every collective.
    void (*run)(idist__task *t);
    void (*finish)(idist__task *t);   // called after the last step, e.g. to narrow the result
    idist__algorithm algorithm;       // part of the fingerprint
    int line;                         // line where the coroutine resumes
    bool running;                     // `run` is on the stack
    uint16_t past;                    // digest of the earlier calls
    uint32_t slots_pending;           // bit k is set while the receive in slot k is not complete
    size_t slot_count;                // number of receives of a stream that are posted ahead
    int sends_pending, recvs_pending; // transfers that are not complete

    // The operands of the collective.
    int n, rank, root; // size of the group, our rank, the root
    size_t size;       // size of an element as it is reduced; messages carry F16 as F32
    size_t count;
    size_t nbytes; // count * size
    idist__reduce_fn reduce;
    const idist__user_op *user; // &user_op, or NULL
    idist__user_op user_op;     // a copy, because the program may free the op during the call
    const char *in;             // our contribution
    char *out;                  // our result
    char *work;                 // scratch of the algorithm
    char *element;              // scratch for one element that is larger than IDIST__OP_PIECE
    char *memory;               // all scratch, in one allocation

    union { // which member is valid depends on `algorithm` and the kind of the call
        idist__stream_op stream;
        idist__direct_op direct;
        idist__dissemination_op dissemination;
        idist__tree_op tree;
        idist__doubling_op doubling;
        idist__bruck_op bruck;
        idist__host_op host;
        idist__shared_op shared;
    } u;
};

static idist__op *idist__op_of(const idist__task *t) { return (idist__op *)t->impl; }

#define IDIST__CO_BEGIN(o) \
    switch ((o)->line) {   \
    case 0:
#define IDIST__CO_AWAIT(o, condition) \
    do {                              \
        (o)->line = __LINE__;         \
        __attribute__((fallthrough)); \
    case __LINE__:                    \
        if (!(condition)) return;     \
    } while (0)
#define IDIST__CO_END(o) \
    default: break;      \
        }

// Returns `buffer`, or another valid address if it is NULL. A buffer that no rank reads or writes
// may be NULL. But algorithms add offsets to it, which C does not allow for null pointers.
static char *idist__op_buffer(const void *buffer) {
    static const char nothing[1] = {0};
    return (char *)(uintptr_t)(buffer ? buffer : nothing);
}

// Sets the operands of a collective from its call.
static void idist__op_prepare(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;

    op->n = t->group->size;
    op->rank = t->group->rank;
    op->root = call->root;
    op->user = NULL;

    if (idist__kind_reduces(call->kind) && idist__reduce_op_is_user(call->op)) {
        op->user_op = *idist__world_user_op(t->group, call);
        op->user = &op->user_op;
    }

    op->size = idist_dtype_size(call->dtype);
    op->count = call->count;
    op->nbytes = op->count * op->size;
    op->in = idist__op_buffer(call->send);
    op->out = idist__op_buffer(call->recv);
}

// Returns the fingerprint that the messages of a collective carry. In all_to_allv each pair of
// ranks compares its own dtype.
static idist__fingerprint idist__op_fingerprint(const idist__task *t) {
    idist__fingerprint print = idist__fingerprint_of_task(t, idist__op_of(t)->algorithm);

    if (t->call.kind == IDIST__ALL_TO_ALLV) {
        print.dtype = (uint8_t)t->call.dtype;
        print.check = idist__fingerprint_tagged(t->group->w, &t->call, 0);
    }

    return print;
}

static void idist__op_done(idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (t->state == IDIST__TASK_DONE || idist__ring_of(t->group->w)->failed == t->group) return;
    if (op->finish) op->finish(t);
    idist__mem_free(&t->group->w->cfg.mem, op->memory);
    op->memory = NULL;
    idist__task_complete(t, IDIST_OK, "");
}

static void idist__op_run(idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (op->running || t->state == IDIST__TASK_DONE) return;
    op->running = true; // a transfer that completes at once must not call the algorithm recursively
    op->run(t);
    op->running = false;
}

// ---- ring/msg/transfer.h -------------------------------------------------------------------------

// ring/msg/transfer.h: sends and receives in progress, and tables to find them by what frames say
//
// Functions: idist__transfer_*, idist__index_*.

//------------------------------------------------------------------------------
// finding transfers and messages by what frames say
//
// Thousands of sends and receives may be in progress at the same time. Every frame of a message
// belongs to one of them. So the ring has two hash tables: ring->transfers for the transfers, and
// ring->messages for the unexpected messages.
//
//     what a frame asks for                          its key
//     a posted receive                               group, peer, and tag or number of the call
//     an unexpected message                          group, peer, and tag or number of the call
//     a send that waits for a grant                  group, peer, and number of the call
//     a send that waits for the answer to its RTS    the id in the frame
//     a receive that waits for DATA                  the id in the frame
//
// The key contains the tag for send / recv, and the sequence number of the call for a collective.
// In a bucket, and so among equal keys, the oldest entry comes first.
//------------------------------------------------------------------------------

static void idist__index_insert(idist__index_node *hook, idist__index_bucket *table, uint64_t key) {
    idist__index_bucket *bucket = &table[key % IDIST__BUCKETS];

    hook->next = NULL;
    hook->at = bucket->first ? bucket->end : &bucket->first;
    hook->bucket = bucket;
    *hook->at = hook;
    bucket->end = &hook->next;
}

static void idist__index_remove(idist__index_node *hook) {
    *hook->at = hook->next;
    if (hook->next) hook->next->at = hook->at;
    else hook->bucket->end = hook->at;
    hook->bucket = NULL;
}

static idist__transfer *idist__index_transfer(idist__index_node *hook) {
    return (idist__transfer *)(void *)((char *)hook - offsetof(idist__transfer, hook));
}

static idist__message *idist__index_message(idist__index_node *hook) {
    return (idist__message *)(void *)((char *)hook - offsetof(idist__message, hook));
}

// Returns the key of a message that a rank sends in a group. If `p2p` is true, it is a message of
// send / recv with this tag. Otherwise it is a step of the collective with this sequence number.
static uint64_t idist__index_key(uint64_t ctx, int peer, bool p2p, uint32_t tag_or_seq) {
    return idist__hash_mix(ctx + ((uint64_t)(uint32_t)peer << 33),
                           ((uint64_t)p2p << 32) | tag_or_seq);
}

static uint64_t idist__index_frame_key(int peer, const idist__frame *frame) {
    bool p2p = frame->fingerprint.kind == IDIST__SEND;
    return idist__index_key(frame->ctx, peer, p2p, p2p ? frame->tag : frame->fingerprint.seq);
}

static uint64_t idist__index_id_key(uint64_t id) { return idist__hash_mix(id, 0); }

//------------------------------------------------------------------------------
// the life of a send or receive
//------------------------------------------------------------------------------

static idist__transfer *idist__transfer_new(idist__ring *ring) {
    idist__transfer *xfer = ring->idle;

    if (xfer) {
        ring->idle = xfer->next;
        idist__mem_clear(xfer, sizeof *xfer);
    } else {
        xfer = (idist__transfer *)idist__mem_alloc(&ring->w->cfg.mem, sizeof *xfer);
    }

    if (xfer) {
        xfer->slot = -1;
        xfer->stamp = ++ring->stamp;
    }

    return xfer;
}

static void idist__transfer_append(idist__transfer_list *list, idist__transfer *xfer) {
    xfer->next = NULL;
    xfer->at = list->first ? list->end : &list->first;
    xfer->list = list;
    *xfer->at = xfer;
    list->end = &xfer->next;
}

// Appends a transfer to a list, and adds it to the index under `key` so that frames find it.
static void idist__transfer_put(idist__ring *ring, idist__transfer_list *list,
                                idist__transfer *xfer, uint64_t key) {
    idist__transfer_append(list, xfer);
    idist__index_insert(&xfer->hook, ring->transfers, key);
}

// Removes a transfer from its list and from the index.
static void idist__transfer_take(idist__transfer *xfer) {
    *xfer->at = xfer->next;
    if (xfer->next) xfer->next->at = xfer->at;
    else xfer->list->end = xfer->at; // NOLINT(clang-analyzer-core.NullDereference): it is in one
    xfer->list = NULL;
    if (xfer->hook.bucket) idist__index_remove(&xfer->hook);
}

// Returns the transfer with this number in a list of transfers that wait for CTS, PULLED or DATA,
// or NULL.
static idist__transfer *idist__transfer_find(idist__ring *ring, const idist__transfer_list *list,
                                             uint64_t id) {
    idist__index_node *hook = ring->transfers[idist__index_id_key(id) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *xfer = idist__index_transfer(hook);
        if (xfer->list == list && xfer->id == id) return xfer;
    }

    return NULL;
}

static void idist__transfer_free(idist__ring *ring, idist__transfer *xfer) {
    idist__mem_free(&ring->w->cfg.mem, xfer->owned);
    if (xfer->task && idist__kind_is_p2p(xfer->task->call.kind))
        idist__op_of(xfer->task)->transfer = NULL;
    xfer->next = ring->idle;
    ring->idle = xfer;
}

// Frees a transfer that is complete, and completes its task or resumes the algorithm.
static void idist__transfer_done(idist__ring *ring, idist__transfer *xfer) {
    idist__task *t = xfer->task;
    bool send = xfer->send;
    int slot = xfer->slot;
    idist__op *op;

    idist__transfer_free(ring, xfer);
    if (!t || t->state == IDIST__TASK_DONE) return;
    ring->w->wait.moved_count++;

    if (t->call.kind == IDIST__SEND) {
        idist__task_complete(t, IDIST_OK, "");
        return;
    }

    op = idist__op_of(t);
    if (send) op->sends_pending--;
    else op->recvs_pending--;
    if (slot >= 0) op->slots_pending &= ~(1u << slot);
    idist__op_run(t);
}

// Completes a receive, of idist_recv or of a collective.
static void idist__transfer_received(idist__ring *ring, idist__transfer *xfer, int peer) {
    idist__task *t = xfer->task;
    int tag = (int)xfer->frame.tag;
    size_t count = (size_t)idist__fingerprint_count(&xfer->frame.fingerprint);

    if (!t || t->call.kind != IDIST__RECV) {
        idist__transfer_done(ring, xfer);
        return;
    }

    idist__transfer_free(ring, xfer);
    idist__matching_received(t, idist__ring_group_of(t->group)->rank_of[peer], tag, count);
}

// ---- ring/msg/combine.h --------------------------------------------------------------------------

// ring/msg/combine.h: reduces operands that have arrived

enum { IDIST__OP_PIECE = 4096 };

// Calls a user op. Returns false if the op has thrown an exception; the group has then failed.
IDIST__NOINLINE static bool idist__combine_by_user(const idist__task *t, const void *in,
                                                   void *inout, size_t count, idist_dtype dtype) {
    const idist__op *op = idist__op_of(t);
    const idist__world *w = t->group->w;
    uint32_t mode = idist__mode_enter();
    char cause[400];

    IDIST__CALLBACK(op->user->fn(in, inout, count, dtype, op->user->arg));
    idist__mode_leave(mode);
    if (!idist__me.thrown[0]) return true;

    snprintf(cause, sizeof cause, "the user op of rank %d on %s threw an exception: %s",
             w->group.rank, w->about.hostname, idist__me.thrown);
    idist__me.thrown[0] = 0;
    idist__ring_fail(idist__ring_of(w), t->group, IDIST_ERR_CALLBACK, cause);

    return false;
}

// Computes acc = lo (op) hi over count elements. acc may be equal to lo, to hi or to neither. A
// user op works in place on its second operand, so an operand that must survive is copied first, in
// pieces. If the op throws an exception, the group fails, and nothing more is sent for this group.
static void idist__combine(const idist__task *t, char *acc, const char *lo, const char *hi,
                           size_t count, idist_dtype dtype) {
    const idist__op *op = idist__op_of(t);
    uint64_t some[IDIST__OP_PIECE / sizeof(uint64_t)];
    char *piece = op->element ? op->element : (char *)some;
    size_t at, k, most = op->element ? 1 : sizeof some / op->size;

    if (!op->user || !op->user->fn) {
        idist__reduce_by(op->reduce, acc, lo, hi, count);
        return;
    }

    if (acc == hi) {
        (void)idist__combine_by_user(t, lo, acc, count, dtype);
        return;
    }

    for (at = 0; at < count; at += k) {
        k = count - at < most ? count - at : most;
        memcpy(piece, hi + at * op->size, k * op->size);
        if (!idist__combine_by_user(t, lo + at * op->size, piece, k, dtype)) return;
        memcpy(acc + at * op->size, piece, k * op->size);
    }
}

// ---- ring/msg/link.h -----------------------------------------------------------------------------

// ring/msg/link.h: writes frames to one link; credits, rendezvous
//
// WHAT IT IS
//
// Sends non-blocking messages to one rank, over any transport. The functions idist_send and
// idist_recv exchange such messages directly. Most collectives are algorithms made of such messages
// (ring/algo/).
//
//   transfer   one send or receive in progress, posted by this rank
//   message    a message that arrived before its receive was posted (unexpected)
//   frame      the 64-byte header of everything that goes through a link
//   link       the connection to one rank: its output, its input, and its credits
//
// HOW IT FITS
//
// Algorithms and calls post transfers. ring/engine/progress.h reads the links, and
// ring/engine/incoming.h handles the frames that arrive, with the functions of this file. This file
// does not depend on the transport of a link, except that a link may have no connection. Each
// transport states what it can do (idist__transport in ring/shm/).
//
// A SMALL MESSAGE (eager)
//
// sender     idist__send_post -> idist__link_push -> idist__link_flush -> transport->write
// receiver   idist__progress_read (engine) -> idist__match_frame -> payload is stored in the
//            receive's buffer, or in a message if no receive is posted -> idist__transfer_received
// sender     gets CREDIT back when the receiver has consumed half of the window
//
// A LARGE MESSAGE (rendezvous)
//
// sender     RTS                      a message is ready at this address
// receiver   PULLED                   has read the message in the sender's memory, or
//            CTS                      has a buffer for the message
// sender     DATA, DATA, ...          pieces of 1 MiB; other frames may be sent in between
//
// If the receiver can read the sender's memory, idist__link_wants_data chooses between PULLED and
// CTS.
//
// A LARGE MESSAGE OF A COLLECTIVE, WHERE THE RECEIVER CANNOT READ THE SENDER'S MEMORY (granted)
//
// Both ranks expect the message before it is sent, so the sender need not ask the receiver.
//
// receiver   CTS                      when the receive is posted
// sender     DATA, DATA, ...          when the send is posted and the CTS has arrived
//
// Each such message takes one CTS. A sender that has to wait for the CTS sends an RTS, unless an
// earlier message of the same call already waits. The fingerprint of the RTS tells the receiver
// which call the sender is in; the RTS needs no answer.

static int idist__link_rank(const idist__ring *ring, const idist__link *l) {
    return (int)(l - ring->links);
}

// Watches descriptor `in` for input and `out` for space, and stops watching the previous
// descriptors. -1 stands for no descriptor. Returns false with errno set if the system cannot watch
// a descriptor.
static bool idist__link_watch(const idist__ring *ring, idist__link *l, int in, int out) {
    int rank = idist__link_rank(ring, l), was[2], i;
    bool ok = true;

    if (l->watched_in == in && l->watched_out == out) return true;
    was[0] = l->watched_in;
    was[1] = l->watched_out != l->watched_in ? l->watched_out : -1;
    l->watched_in = in;
    l->watched_out = out;

    for (i = 0; i < 2; i++)
        if (was[i] >= 0 && was[i] != in && was[i] != out)
            idist__os_watch_set(ring->watch, was[i], rank, false, false);

    if (in >= 0) ok = idist__os_watch_set(ring->watch, in, rank, true, in == out);
    if (ok && out >= 0 && out != in) ok = idist__os_watch_set(ring->watch, out, rank, false, true);

    return ok;
}

// Watches the descriptor that is read next. While queued output waits for space, also watches the
// descriptor that is written next.
static void idist__link_watch_next(idist__ring *ring, idist__link *l, bool awaits_space) {
    int in = l->transport->descriptor(l->port, false);
    int out = awaits_space ? l->transport->descriptor(l->port, true) : -1;

    if (!idist__link_watch(ring, l, in, out))
        idist__ring_fail(ring, &ring->w->group, IDIST_ERR_NO_MEMORY,
                         "a rank cannot watch the descriptors of its connections");
}

static void idist__link_leave_transport(idist__ring *ring, idist__link *l) {
    l->transport->close(l->port);
    if (l->polled) ring->polled_link_count--;
}

static void idist__link_close(idist__ring *ring, idist__link *l) {
    if (!l->open) return;
    l->open = false;
    if (l->corked) ring->corked_count--;
    l->corked = false;
    idist__link_watch(ring, l, -1, -1);
    idist__link_leave_transport(ring, l);
}

// Sets the transport that moves the bytes of a link from now on. On failure, returns false with
// errno set, and leaves the link unchanged.
static bool idist__link_open(idist__ring *ring, idist__link *l, const idist__transport *transport,
                             void *port) {
    if (!idist__link_watch(ring, l, transport->descriptor(port, false), -1)) {
        l->watched_in = -1;
        return false;
    }

    if (l->open) idist__link_leave_transport(ring, l);
    l->transport = transport;
    l->port = port;
    l->open = true;
    l->polled = transport->polled;
    if (l->polled) ring->polled_link_count++;

    return true;
}

static bool idist__link_is_connected(const idist__link *l) {
    return l->open && l->transport != &idist__transport_none;
}

// Requests a connection for a link that has none, because this rank sends or receives a message
// over the link. A receiver also needs the connection, because otherwise it would not learn that
// its peer has died.
static void idist__link_want(idist__ring *ring, idist__link *l) {
    if (l->wanted || !l->open || l->transport != &idist__transport_none) return;
    l->wanted = true;
    l->next_wanted = ring->wanted;
    ring->wanted = l;
}

static void idist__link_push(idist__link *l, idist__transfer *xfer) {
    xfer->next = NULL;
    xfer->frame_moved = xfer->piece_moved = 0;
    *l->out_end = xfer;
    l->out_end = &xfer->next;
}

static void idist__link_pop(idist__link *l) {
    l->out = l->out->next;
    if (!l->out) l->out_end = &l->out;
}

// Handles a failed write. Drops the queued control frames, because the peer no longer reads. Keeps
// the transfers that tasks wait for. The read path finds out whether the peer was lost or has left,
// and the tasks then end with their group.
static void idist__link_write_failed(idist__ring *ring, idist__link *l) {
    idist__transfer **at = &l->out;

    l->write_dead = true;

    while (*at) {
        idist__transfer *xfer = *at;

        if (xfer->task) {
            at = &xfer->next;
            continue;
        }

        *at = xfer->next;
        idist__transfer_free(ring, xfer);
    }

    l->out_end = at;
}

// Handles a transfer whose frame and payload have been written. The transfer then waits for an
// answer, is complete, or queues its next piece.
static void idist__link_sent(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    size_t left;

    idist__link_pop(l);

    if (xfer->frame.type == IDIST__RTS && xfer->id) { // this RTS needs an answer
        idist__transfer_put(ring, &l->waiting, xfer, idist__index_id_key(xfer->id));
        return;
    }

    if (xfer->frame.type == IDIST__DATA) xfer->moved += xfer->piece;

    if (xfer->frame.type != IDIST__DATA || xfer->moved >= xfer->nbytes) {
        idist__transfer_done(ring, xfer);
        return;
    }

    left = xfer->nbytes - xfer->moved;
    xfer->piece = left < IDIST__PIECE_BYTES ? left : IDIST__PIECE_BYTES;
    xfer->frame.nbytes = xfer->piece;
    idist__link_push(l, xfer); // at the end: a large message must not hold up small ones
}

static bool idist__link_is_out(const idist__transfer *xfer) {
    return xfer->frame_moved == IDIST__FRAME_BYTES && xfer->piece_moved == xfer->piece;
}

// Collects the frames and payloads that are written next. Returns the number of parts.
static int idist__link_gather(const idist__link *l, idist__os_part *parts) {
    idist__transfer *xfer;
    int n = 0;

    for (xfer = l->out; xfer && n + 2 <= IDIST__PARTS; xfer = xfer->next) {
        size_t frame_left = IDIST__FRAME_BYTES - xfer->frame_moved;

        if (frame_left) {
            parts[n].data = (char *)&xfer->frame + xfer->frame_moved;
            parts[n++].nbytes = frame_left;
        }

        if (xfer->piece_moved < xfer->piece) {
            parts[n].data = xfer->data + xfer->moved + xfer->piece_moved;
            parts[n++].nbytes = xfer->piece - xfer->piece_moved;
        }
    }

    return n;
}

// Marks n bytes of the parts from idist__link_gather as written.
static void idist__link_account(const idist__link *l, size_t n) {
    idist__transfer *xfer;

    for (xfer = l->out; n; xfer = xfer->next) {
        size_t left = IDIST__FRAME_BYTES - xfer->frame_moved, k = n < left ? n : left;

        xfer->started = true;
        xfer->frame_moved += k;
        n -= k;
        left = xfer->piece - xfer->piece_moved;
        k = n < left ? n : left;
        xfer->piece_moved += k;
        n -= k;
    }
}

// Writes as much as the transport accepts. Completing a transfer may end its task, which may send
// more and call this function again. So all bytes of a write are accounted for before any transfer
// is completed.
static void idist__link_flush(idist__ring *ring, idist__link *l) {
    bool full = false;

    if (l->corked) ring->corked_count--;
    l->corked = false;
    l->corked_nbytes = 0;

    while (l->out && !l->write_dead && !full) {
        idist__os_part parts[IDIST__PARTS];
        ptrdiff_t n;

        if (idist__link_is_out(l->out)) {
            idist__link_sent(ring, l, l->out);
            continue;
        }

        n = l->transport->write(l->port, parts, idist__link_gather(l, parts));
        if (n < 0) idist__link_write_failed(ring, l);
        else idist__link_account(l, (size_t)n);
        full = n == 0;
    }

    if (l->polled) idist__link_watch_next(ring, l, full);
}

// Returns true if a small send may be held back until the next send, so that one system call writes
// both. The program must not be waiting for the send. Only later sends of a burst are held back;
// the first send is written immediately. Sends that are held back are written when the program next
// waits or the progress thread next polls.
static bool idist__link_may_cork(const idist__link *l, const idist__task *t, size_t nbytes) {
    bool in_burst = t->started_ns - l->sent_ns < IDIST__CORK_NS;
    bool waits = !idist__task_is_async(t) && !idist__together_now.depth;

    return l->polled && in_burst && !waits && nbytes <= IDIST__CORK_MESSAGE &&
           l->corked_nbytes + nbytes <= IDIST__CORK_BYTES && idist__link_is_connected(l);
}

static void idist__link_cork(idist__ring *ring, idist__link *l, size_t nbytes) {
    if (!l->corked) ring->corked_count++;
    l->corked = true;
    l->corked_nbytes += nbytes + IDIST__FRAME_BYTES;
}

// Appends a text to the frame of an ABORT or BYE. If memory for the text cannot be allocated, the
// frame is sent without the text.
static void idist__link_add_text(idist__ring *ring, idist__transfer *xfer, const char *text) {
    size_t nbytes = strlen(text);

    xfer->owned = (char *)idist__mem_alloc(&ring->w->cfg.mem, nbytes + 1);

    if (xfer->owned) {
        memcpy(xfer->owned, text, nbytes);
        xfer->data = xfer->owned;
        xfer->nbytes = xfer->piece = nbytes;
    }

    xfer->frame.nbytes = xfer->nbytes;
}

// Queues a control frame, for which no task waits. `text`, if not NULL, follows the frame. While
// the link has no connection, RTS and CTS stay queued, and all other frames are dropped. When the
// connection is made, idist__announce_late tells the peer what it has missed.
static void idist__link_control(idist__ring *ring, idist__link *l, const idist__frame *frame,
                                const char *text) {
    bool waits = frame->type == IDIST__RTS || frame->type == IDIST__CTS;
    idist__transfer *xfer;

    if (!l->open || l->write_dead || !(waits || idist__link_is_connected(l))) return;
    xfer = idist__transfer_new(ring);

    if (!xfer) { // the peer would wait for this frame
        idist_group *g = idist__world_find_group(ring->w, frame->ctx);
        idist__ring_fail_memory(ring, g ? g : &ring->w->group);
        return;
    }

    xfer->send = true;
    xfer->frame = *frame;
    if (text) idist__link_add_text(ring, xfer, text);

    idist__link_push(l, xfer);
    idist__link_flush(ring, l);
}

// Tells a peer that this rank leaves the world and, if the world has failed, with which status and
// text.
static void idist__link_bye(idist__ring *ring, idist__link *l) {
    bool failed = ring->bye_status != IDIST_OK;
    idist__frame frame;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__BYE;
    frame.aux = (uint64_t)(int64_t)ring->bye_status;
    idist__link_control(ring, l, &frame, failed ? ring->w->group.cause : NULL);
}

// Tells a peer that a group has failed.
static void idist__link_abort(idist__ring *ring, idist__link *l, uint64_t ctx, idist_status status,
                              const char *cause) {
    idist__frame frame;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__ABORT;
    frame.ctx = ctx;
    frame.aux = (uint64_t)(int64_t)status;
    idist__link_control(ring, l, &frame, cause);
}

// Counts eager bytes that were consumed. Returns these bytes to the sender as credit once they
// amount to half of the window.
static void idist__link_consumed(idist__ring *ring, idist__link *l, size_t nbytes) {
    idist__frame frame;

    l->owed += nbytes + IDIST__FRAME_BYTES;
    if (l->owed < IDIST__WINDOW_BYTES / 2) return;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__CREDIT;
    frame.nbytes = l->owed;
    l->their_window += l->owed;
    l->owed = 0;
    idist__link_control(ring, l, &frame, NULL);
}

// Returns true if the peer may read messages directly in our memory. If so, and if `withdrawn` is
// not NULL, sets *withdrawn to the number of our withdrawn sends, which our RTS must contain.
static bool idist__link_exposes_memory(const idist__link *l, uint8_t *withdrawn) {
    return l->transport->exposes_memory && l->transport->exposes_memory(l->port, withdrawn);
}

// Returns true if reading a message in the sender's memory is slower than a copy through the link.
static bool idist__link_reads_slowly(const idist__link *l) {
    return l->transport->reads_slowly && l->transport->reads_slowly(l->port);
}

// Returns true if a message of this size is sent without waiting for the receiver, provided that
// there is enough credit.
static bool idist__link_is_eager(const idist__link *l, size_t nbytes) {
    if (nbytes <= IDIST__EAGER_EXPOSED_BYTES) return true;
    if (nbytes > IDIST__EAGER_BYTES) return false;
    return !idist__link_exposes_memory(l, NULL) || idist__link_reads_slowly(l);
}

// Returns true if a message of a collective is sent by grant. The result is the same at both ends
// of the link.
static bool idist__link_grants(const idist__link *l, size_t nbytes) {
    return nbytes > IDIST__EAGER_BYTES && !idist__link_exposes_memory(l, NULL);
}

// Sends the CTS for a receive that was just posted, so that the peer need not send an RTS first.
static void idist__link_grant(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    idist__frame cts = xfer->frame;

    xfer->granted = true;
    xfer->id = ++ring->next_id;
    cts.type = IDIST__CTS;
    cts.aux = xfer->id;
    idist__link_control(ring, l, &cts, NULL);
}

// Queues the first DATA frame of a message. `id` is the peer's number for the receive.
static void idist__link_send_data(idist__ring *ring, idist__link *l, idist__transfer *xfer,
                                  uint64_t id) {
    xfer->frame.type = IDIST__DATA;
    xfer->frame.id = id;
    xfer->frame.aux = xfer->nbytes;
    xfer->piece = xfer->nbytes < IDIST__PIECE_BYTES ? xfer->nbytes : IDIST__PIECE_BYTES;
    xfer->frame.nbytes = xfer->piece;
    idist__link_push(l, xfer);
    idist__link_flush(ring, l);
}

// Returns true if this rank has announced a send that its peer has not answered yet.
static bool idist__link_any_waits(const idist__ring *ring) {
    int i;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].waiting.first) return true;
    return false;
}

// Returns true if an announced message should be sent as DATA instead of being read in the sender's
// memory. Two processors then copy at the same time, one into the pipe and one out of it, which
// takes as little as half the time. The sender must be waiting in a call. This rank need not be
// waiting, because its progress thread also reads the pipe. Where reads are fast, the message must
// be small enough for the caches, and this rank must not have an announced send itself. A receive
// with its own time-out is excluded, because DATA arrives only while the sender or its progress
// thread keeps running.
static bool idist__link_wants_data(const idist__ring *ring, const idist__link *l,
                                   const idist__transfer *receive, const idist__frame *frame) {
    if (frame->fingerprint.kind != IDIST__SEND || !receive->task->patient) return false;
    if (!l->transport->attends || !l->transport->attends(l->port)) return false;
    if (idist__link_reads_slowly(l)) return true;
    return frame->nbytes <= IDIST__COPIED_BYTES && !idist__link_any_waits(ring);
}

// Reads an announced message in the memory of its sender. Returns false if that is not possible, or
// if the sender may have cancelled the message in the meantime and reused the memory.
static bool idist__link_pull(idist__ring *ring, idist__link *l, int peer, idist__transfer *xfer,
                             const idist__frame *frame) {
    idist__frame pulled;

    if (!frame->aux || !l->transport->pull) return false;
    if (!l->transport->pull(l->port, frame->aux, frame->flags, xfer->data, (size_t)frame->nbytes))
        return false;

    memset(&pulled, 0, sizeof pulled);
    pulled.type = IDIST__PULLED;
    pulled.ctx = frame->ctx;
    pulled.id = frame->id;
    xfer->frame = *frame;
    idist__link_control(ring, l, &pulled, NULL);
    idist__transfer_received(ring, xfer, peer);

    return true;
}

// Answers an RTS that was matched to a receive. The receive is in no list. Reads the message from
// the sender's memory, or sends CTS. A granted receive has already sent its CTS, and is put back
// into `posted`.
static void idist__link_answer_rts(idist__ring *ring, idist__link *l, int peer,
                                   idist__transfer *xfer, const idist__frame *frame) {
    idist__frame cts;

    if (xfer->granted) {
        idist__transfer_put(ring, &l->posted, xfer, idist__index_frame_key(peer, frame));
        return;
    }

    if (!idist__link_wants_data(ring, l, xfer, frame) &&
        idist__link_pull(ring, l, peer, xfer, frame))
        return;

    xfer->id = ++ring->next_id;
    xfer->nbytes = (size_t)frame->nbytes;
    xfer->moved = 0;
    xfer->frame = *frame;
    xfer->started = true;
    idist__transfer_put(ring, &l->receiving, xfer, idist__index_id_key(xfer->id));

    memset(&cts, 0, sizeof cts);
    cts.type = IDIST__CTS;
    cts.ctx = frame->ctx;
    cts.id = frame->id;
    cts.aux = xfer->id;
    idist__link_control(ring, l, &cts, NULL);
}

// ---- ring/msg/message.h --------------------------------------------------------------------------

// ring/msg/message.h: unexpected messages, which arrived before their receives were posted

static void idist__message_free(idist__ring *ring, idist__link *l, idist__message *msg) {
    *msg->at = msg->next;
    if (msg->next) msg->next->at = msg->at;
    else l->early_end = msg->at;
    idist__index_remove(&msg->hook);

    if (l->in_message == msg) {
        l->in_message = NULL;
        l->target = NULL;
    }

    if (msg->unknown) l->unknown_count--;
    idist__mem_free(&ring->w->cfg.mem, msg);
}

// Drops the oldest message from a rank for a group that does not exist here. Correct programs leave
// such messages behind if they free a group before all of its messages have arrived. So exceeding
// IDIST__UNKNOWN_MAX is not an error.
static void idist__message_drop_unknown(idist__ring *ring, idist__link *l) {
    idist__message *msg = l->early;
    bool complete;
    size_t nbytes;

    while (msg && (!msg->unknown || msg == l->in_message)) msg = msg->next;
    if (!msg) return;

    complete = msg->frame.type == IDIST__EAGER && msg->moved == msg->frame.nbytes;
    nbytes = (size_t)msg->frame.nbytes;
    idist__message_free(ring, l, msg);
    if (complete) idist__link_consumed(ring, l, nbytes);
}

// Returns the entry of a group that is among the last IDIST__CLOSED groups to be closed. Returns
// NULL if the group is not among them.
static const idist__closed *idist__message_find_closed(const idist__ring *ring, uint64_t ctx) {
    uint32_t i;

    for (i = 0; i < IDIST__CLOSED && i < ring->nclosed; i++)
        if (ring->closed[i].ctx == ctx) return &ring->closed[i];

    return NULL;
}

// Allocates a message that begins with this frame and has a buffer of `payload` bytes, and adds the
// message to the list of its link. Returns NULL if memory is exhausted.
static idist__message *idist__message_new(idist__ring *ring, idist__link *l,
                                          const idist__frame *frame, size_t payload) {
    idist__message *msg =
        (idist__message *)idist__mem_raw(&ring->w->cfg.mem, sizeof *msg + payload);

    if (!msg) return NULL;
    idist__mem_clear(msg, sizeof *msg);
    msg->frame = *frame;
    msg->data = (char *)(msg + 1);
    msg->stamp = ++ring->stamp;
    msg->peer = idist__link_rank(ring, l);

    msg->unknown = !idist__world_find_group(ring->w, frame->ctx);
    if (msg->unknown && ++l->unknown_count > IDIST__UNKNOWN_MAX)
        idist__message_drop_unknown(ring, l);

    msg->at = l->early_end;
    *l->early_end = msg;
    l->early_end = &msg->next;
    idist__index_insert(&msg->hook, ring->messages, idist__index_frame_key(msg->peer, frame));

    return msg;
}

// Indexes a message under its new tag if a matched probe has changed the tag. Called when no
// receive has taken the message.
static void idist__message_rekey(idist__ring *ring, idist__message *msg, uint32_t old_tag) {
    if (msg->frame.tag == old_tag) return;
    idist__index_remove(&msg->hook);
    idist__index_insert(&msg->hook, ring->messages, idist__index_frame_key(msg->peer, &msg->frame));
}

// Gives a message to a receive. The payload of an eager message may still be arriving.
static void idist__message_give(idist__ring *ring, idist__link *l, int peer, idist__message *msg,
                                idist__transfer *xfer) {
    xfer->frame = msg->frame;

    if (msg->self_send) {
        idist__transfer *sender = msg->self_send;
        idist__block_copy(xfer->data, sender->data, sender->nbytes);
        idist__message_free(ring, l, msg);
        idist__transfer_done(ring, sender);
        idist__transfer_received(ring, xfer, peer);
    } else if (msg->frame.type == IDIST__RTS) {
        idist__frame frame = msg->frame;
        idist__message_free(ring, l, msg);
        idist__link_answer_rts(ring, l, peer, xfer, &frame);
    } else if (msg->moved < msg->frame.nbytes) {
        msg->claim = xfer;
    } else {
        size_t nbytes = (size_t)msg->frame.nbytes;
        idist__block_copy(xfer->data, msg->data, nbytes);
        idist__message_free(ring, l, msg);
        if (peer != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        idist__transfer_received(ring, xfer, peer);
    }
}

// ---- ring/msg/history.h --------------------------------------------------------------------------

// ring/msg/history.h: checks that two ranks make the same calls
//
// Every frame and slot of a collective carries the fingerprint of its call. The receiver compares
// it with the fingerprint of its own call. This check alone is not enough. A rank may complete a
// call in which it only sends, and the next call too, before it reads the frame that differs. So
// frames and slots also carry a digest of all earlier calls (`past`), and a rank that receives a
// later frame detects the difference.

// Fails a group on all of its members, because two ranks are in different calls.
static void idist__history_mismatch(idist__ring *ring, idist_group *g, int peer,
                                    const idist__fingerprint *theirs,
                                    const idist__fingerprint *ours, const char *field) {
    char cause[400];
    int me = ring->w->group.rank;

    if (me < peer)
        idist__explain_mismatch(ring->w, field, me, ours, peer, theirs, cause, sizeof cause);
    else idist__explain_mismatch(ring->w, field, peer, theirs, me, ours, cause, sizeof cause);
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);
}

// Returns the digest of the calls before a new call. If the call is a step of a larger call, the
// digest also covers the calls before the larger call.
static uint16_t idist__history_past(const idist__task *t) {
    return (uint16_t)(idist__ring_group_of(t->group)->digest ^ t->parent_past);
}

// Adds a call to the history. `past` is the digest of the calls before it.
static void idist__history_append(idist__ring_group *rg, const idist__fingerprint *fingerprint,
                                  uint16_t past) {
    uint32_t index = fingerprint->seq % IDIST__HISTORY;
    uint32_t words[2]; // the start of a fingerprint: kind, dtype, op and algorithm; root
    uint64_t what;

    memcpy(words, fingerprint, sizeof words);
    words[1] &= IDIST__ROOT_MASK; // ranks may differ in whether they use a plan
    memcpy(&what, words, sizeof what);
    what = (what ^ rg->digest) * 0x9e3779b97f4a7c15u;

    rg->past[index] = past;
    rg->history[index] = *fingerprint;
    rg->digest = (uint16_t)(((what ^ what >> 32) + fingerprint->check) * 0xd6e8feb86659fd93u >> 48);
}

// Adds a new call to the history.
static void idist__history_add(idist__task *t, idist__op *op, idist__algorithm algorithm) {
    idist__fingerprint fingerprint = idist__fingerprint_of_task(t, algorithm);

    op->past = idist__history_past(t);
    idist__history_append(idist__ring_group_of(t->group), &fingerprint, op->past);
}

// Returns the fingerprint of the call that this rank made before the call with this fingerprint.
// For a step of a larger call, this is the call before the larger call, on the user's group.
// Returns NULL if the earlier call is no longer in the history.
static const idist__fingerprint *idist__history_before(const idist_group *g,
                                                       const idist__fingerprint *fingerprint) {
    uint32_t seq = (fingerprint->whole ? fingerprint->whole : fingerprint->seq) - 1;
    const idist__fingerprint *before;

    if (fingerprint->whole) g = idist__ring_group_of(g)->whole;
    if (!g) return NULL;
    before = &idist__ring_group_of(g)->history[seq % IDIST__HISTORY];
    return before->seq == seq ? before : NULL;
}

// Writes the digest of the earlier calls to a frame. An EAGER frame does not otherwise use id and
// aux. So these fields carry the previous call, if it is known, for the receiver's error text.
static void idist__history_tell_past(const idist__task *t, idist__frame *frame) {
    const idist__fingerprint *before;

    frame->past = idist__op_of(t)->past;
    if (frame->type != IDIST__EAGER) return;
    before = idist__history_before(t->group, &frame->fingerprint);
    if (!before) return;

    memcpy(&frame->id, before, sizeof frame->id);
    frame->aux = before->check;
}

// Fails a group whose members are in the same call but made different calls before. If the peer's
// previous call is known, it is in `theirs`. Otherwise `theirs` has kind 0.
static void idist__history_differs_before(idist__ring *ring, idist_group *g, int peer,
                                          const idist__fingerprint *fingerprint,
                                          const idist__fingerprint *theirs) {
    const idist__fingerprint *before = idist__history_before(g, fingerprint);
    const char *field =
        before && theirs->kind ? idist__fingerprint_difference(theirs, before) : NULL;

    if (field) {
        idist__history_mismatch(ring, g, peer, theirs, before, field);
        return;
    }

    idist__history_mismatch(ring, g, peer, fingerprint, fingerprint, "sequence of calls before it");
}

// Fails a group because a frame shows that the peer made different calls before this one. See
// idist__history_tell_past.
static void idist__history_past_differs(idist__ring *ring, idist_group *g, int peer,
                                        const idist__frame *frame) {
    const idist__fingerprint *before = idist__history_before(g, &frame->fingerprint);
    idist__fingerprint theirs;

    memset(&theirs, 0, sizeof theirs);

    if (before && frame->type == IDIST__EAGER) {
        theirs = *before; // for the sequence number
        memcpy(&theirs, &frame->id, sizeof frame->id);
        theirs.check = frame->aux;
    }

    idist__history_differs_before(ring, g, peer, &frame->fingerprint, &theirs);
}

// Compares a frame of a collective with our call of the same number, running or finished. On a
// mismatch, fails the group and returns false. Returns true if we have not entered the call yet, or
// if it is no longer in the history.
static bool idist__history_agrees(idist__ring *ring, idist_group *g, int peer,
                                  const idist__frame *frame) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__seen *seen = &rg->seen[rg->rank_of[peer]];
    const idist__fingerprint *ours = &rg->history[frame->fingerprint.seq % IDIST__HISTORY];
    const idist__task *t = ring->w->tasks.running;
    bool is_message = frame->type <= IDIST__RTS || frame->type == IDIST__DATA;
    const char *field;

    if ((int32_t)(frame->fingerprint.seq - seen->seq) >= 0) {
        seen->seq = frame->fingerprint.seq;
        seen->fingerprint = frame->fingerprint;
    }

    if ((int32_t)(frame->fingerprint.seq - g->seq) > 0 || ours->seq != frame->fingerprint.seq)
        return true;

    // A message that is left over from a finished call shows that the calls differ, even if their
    // fingerprints are the same.
    field = idist__fingerprint_difference(&frame->fingerprint, ours);
    while (t && (t->group != g || t->seq != frame->fingerprint.seq)) t = t->next;
    if (!field && is_message && !t) field = "sequence";

    if (field) {
        idist__history_mismatch(ring, g, peer, &frame->fingerprint, ours, field);
        return false;
    }

    if (is_message && frame->past != rg->past[ours->seq % IDIST__HISTORY]) {
        idist__history_past_differs(ring, g, peer, frame);
        return false;
    }

    return true;
}

// ---- ring/msg/match.h ----------------------------------------------------------------------------

// ring/msg/match.h: matches messages with receives
//
// A message of idist_send matches the oldest receive of the group that accepts its source and tag.
// A step of a collective matches the receive of the same call and step.

// Returns the oldest receive of idist_recv that accepts this message, or NULL.
static idist__transfer *idist__match_oldest(idist__ring *ring, const idist_group *g, int peer,
                                            const idist__frame *frame) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__transfer *wild = rg->wild.first, *exact = NULL;
    idist__index_node *hook = NULL;

    if (rg->recvs.first)
        hook = ring->transfers[idist__index_frame_key(peer, frame) % IDIST__BUCKETS].first;

    for (; hook && !exact; hook = hook->next) {
        idist__transfer *xfer = idist__index_transfer(hook);
        if (xfer->list == &rg->recvs && idist__matching_matches(xfer->task, peer, (int)frame->tag))
            exact = xfer;
    }

    while (wild && !idist__matching_matches(wild->task, peer, (int)frame->tag)) wild = wild->next;

    return !exact || (wild && wild->stamp < exact->stamp) ? wild : exact;
}

// Finds the receive that gets this message, and removes the receive from its list. Returns NULL if
// there is none. A receive fails if the message is too large for it or has another dtype, and a
// probe ends without the message. The message then remains; a matched probe gives it a new tag.
static idist__transfer *idist__match_recv(idist__ring *ring, idist_group *g, int peer,
                                          idist__frame *frame) {
    idist__transfer *xfer;

    while ((xfer = idist__match_oldest(ring, g, peer, frame)) != NULL) {
        int from = idist__ring_group_of(g)->rank_of[peer], tag = (int)frame->tag;
        idist_status status;
        char text[256];

        idist__transfer_take(xfer);

        if (idist__matching_fits(xfer->task, &frame->fingerprint, from, &tag, &status, text,
                                 sizeof text)) {
            if (frame->nbytes <= xfer->nbytes) return xfer;
            status = IDIST_ERR_MISMATCH; // two user dtypes that have equal tags by chance
            if (xfer->task->call.u.message)
                xfer->task->call.u.message->group = g; // the group keeps the message
            snprintf(text, sizeof text, "rank %d defined this dtype differently", from);
        }

        frame->tag = (uint32_t)tag;
        idist__task_complete(xfer->task, status, text);
        idist__transfer_free(ring, xfer);
    }

    return NULL;
}

// Finds the send or receive of a collective to which this frame belongs, in a list of the link, and
// removes it from the list. Returns NULL if the list has none.
static idist__transfer *idist__match_step(idist__ring *ring, const idist__transfer_list *list,
                                          int peer, const idist__frame *frame) {
    idist__index_node *hook =
        ring->transfers[idist__index_frame_key(peer, frame) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__transfer *xfer = idist__index_transfer(hook);
        if (xfer->list != list || xfer->frame.ctx != frame->ctx) continue;
        if (xfer->frame.fingerprint.seq != frame->fingerprint.seq || xfer->frame.tag != frame->tag)
            continue;
        idist__transfer_take(xfer);
        return xfer;
    }

    return NULL;
}

// Returns true if a frame has the size and dtype that a receive of a collective expects. The dtype
// of an empty message does not matter, because in all_to_allv two ranks that exchange no data may
// use different dtypes.
static bool idist__match_agrees(const idist__transfer *xfer, const idist__frame *frame) {
    bool same_dtype = xfer->frame.fingerprint.dtype == frame->fingerprint.dtype &&
                      xfer->frame.fingerprint.check == frame->fingerprint.check;
    return xfer->nbytes == frame->nbytes && (same_dtype || !xfer->nbytes);
}

static void idist__match_explain(const idist__transfer *xfer, int peer, const idist__frame *frame,
                                 char *cause, size_t cap) {
    const idist__task *t = xfer->task;
    const idist__world *w = t->group->w;
    bool same_number = xfer->frame.fingerprint.dtype == frame->fingerprint.dtype;
    bool same_definition = xfer->frame.fingerprint.check == frame->fingerprint.check;
    idist__call theirs = t->call;
    int me = w->group.rank, from = idist__ring_group_of(t->group)->rank_of[peer];
    size_t size;

    theirs.dtype = idist__world_dtype(w, frame->fingerprint.dtype);
    size = idist_dtype_size(theirs.dtype);

    if (t->call.kind == IDIST__ALL_TO_ALLV && size && (same_definition || !same_number))
        idist__explain_pair(peer, idist__fingerprint_pair(w, &theirs, frame->nbytes / size), me,
                            idist__extent_pair(t->group, &t->call, from, false), t, cause, cap);
    else
        idist__explain_sizes(same_definition ? "count" : "definition of the dtype", peer,
                             frame->nbytes, me, xfer->nbytes, t, cause, cap);
}

// Returns the receive for a frame that begins a message, or NULL if no receive is posted yet or the
// group has failed.
static idist__transfer *idist__match_frame(idist__ring *ring, idist__link *l, int peer,
                                           idist__frame *frame) {
    idist_group *g = idist__world_find_group(ring->w, frame->ctx);
    idist__transfer *xfer;
    char cause[400];

    if (!g || g->status != IDIST_OK) return NULL;
    if (frame->fingerprint.kind == IDIST__SEND) return idist__match_recv(ring, g, peer, frame);
    if (!idist__history_agrees(ring, g, peer, frame)) return NULL;

    xfer = idist__match_step(ring, &l->posted, peer, frame);
    if (!xfer || idist__match_agrees(xfer, frame)) return xfer;

    idist__match_explain(xfer, peer, frame, cause, sizeof cause);
    idist__transfer_put(ring, &l->posted, xfer, idist__index_frame_key(peer, frame));
    idist__ring_fail(ring, g, IDIST_ERR_MISMATCH, cause);

    return NULL;
}

// Returns the receive for the first DATA of a message, or NULL if there is none or the group has
// failed. The caller checks that the receive was granted with the id in the frame.
static idist__transfer *idist__match_granted(idist__ring *ring, idist__link *l, int peer,
                                             const idist__frame *frame) {
    idist__frame whole = *frame;
    idist__transfer *xfer;

    if (frame->fingerprint.kind == IDIST__SEND) return NULL; // its receive was cancelled
    whole.nbytes = frame->aux;
    xfer = idist__match_frame(ring, l, peer, &whole);
    if (xfer) idist__transfer_put(ring, &l->receiving, xfer, idist__index_id_key(xfer->id));

    return xfer;
}

// ---- ring/msg/send.h -----------------------------------------------------------------------------

// ring/msg/send.h: posts sends

// Returns the CTS that arrived for a message of a collective before its send was posted, or NULL.
static idist__message *idist__send_find_grant(idist__ring *ring, int peer,
                                              const idist__frame *frame) {
    idist__index_node *hook =
        ring->messages[idist__index_frame_key(peer, frame) % IDIST__BUCKETS].first;

    for (; hook; hook = hook->next) {
        idist__message *msg = idist__index_message(hook);

        if (msg->frame.type != IDIST__CTS || msg->peer != peer || msg->frame.ctx != frame->ctx)
            continue;
        if (msg->frame.fingerprint.seq == frame->fingerprint.seq && msg->frame.tag == frame->tag)
            return msg;
    }

    return NULL;
}

// Sends a large message of a collective once the receiver has granted it.
static void idist__send_by_grant(idist__task *t, int peer, idist__transfer *xfer) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[peer];
    idist__message *grant = idist__send_find_grant(ring, peer, &xfer->frame);
    const idist__transfer *oldest = l->waiting.first;
    idist__frame rts = xfer->frame;

    if (grant) {
        uint64_t id = grant->frame.aux;
        idist__message_free(ring, l, grant);
        idist__link_send_data(ring, l, xfer, id);
        return;
    }

    idist__transfer_put(ring, &l->waiting, xfer, idist__index_frame_key(peer, &xfer->frame));
    if (oldest && oldest->task == t) return; // the peer already has an RTS of this call
    rts.type = IDIST__RTS;
    idist__link_control(ring, l, &rts, NULL);
}

// Chooses how to send a message: eagerly, after the receiver has granted it, or after an RTS.
static void idist__send_choose(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    size_t nbytes = xfer->nbytes;

    if (xfer->frame.fingerprint.kind != IDIST__SEND && idist__link_grants(l, nbytes)) {
        xfer->frame.type = IDIST__DATA;
    } else if (idist__link_is_eager(l, nbytes) && l->window >= nbytes + IDIST__FRAME_BYTES) {
        xfer->frame.type = IDIST__EAGER;
        xfer->piece = nbytes;
        l->window -= nbytes + IDIST__FRAME_BYTES;
    } else {
        xfer->frame.type = IDIST__RTS;
        xfer->id = xfer->frame.id = ++ring->next_id;
        if (idist__link_exposes_memory(l, &xfer->frame.flags))
            xfer->frame.aux = (uint64_t)(uintptr_t)xfer->data;
    }
}

static void idist__send_post(idist__task *t, int world_rank, uint32_t tag, const void *data,
                             size_t nbytes, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__link *l = &ring->links[world_rank];
    idist__transfer *xfer;

    if (ring->failed == t->group) return; // the data to send may be wrong

    xfer = idist__transfer_new(ring);

    if (!xfer) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    xfer->task = t;
    xfer->send = true;
    xfer->data = (char *)(uintptr_t)data;
    xfer->nbytes = nbytes;
    xfer->frame.ctx = t->group->ctx;
    xfer->frame.tag = tag;
    xfer->frame.fingerprint = *fingerprint;
    xfer->frame.nbytes = nbytes;

    if (fingerprint->kind == IDIST__SEND) {
        l->p2p_sent++;
        idist__op_of(t)->transfer = xfer;
    }

    idist__send_choose(ring, l, xfer);
    if (fingerprint->kind != IDIST__SEND) idist__history_tell_past(t, &xfer->frame);

    if (!l->open || l->write_dead) {
        idist__link_push(l, xfer); // the peer is gone: the task ends when the group fails
        return;
    }

    idist__link_want(ring, l);

    if (xfer->frame.type == IDIST__DATA) {
        idist__send_by_grant(t, world_rank, xfer);
        return;
    }

    idist__link_push(l, xfer);

    if (fingerprint->kind == IDIST__SEND) {
        bool may_wait = xfer->frame.type == IDIST__EAGER && idist__link_may_cork(l, t, nbytes);

        l->sent_ns = t->started_ns;

        if (may_wait) {
            idist__link_cork(ring, l, nbytes);
            return;
        }
    }

    idist__link_flush(ring, l);
}

// Posts a send of nbytes to a rank of the group, for a step of a collective.
static void idist__send_step(idist__task *t, int to, uint32_t step, const void *data,
                             size_t nbytes) {
    idist__op *op = idist__op_of(t);
    idist__fingerprint fingerprint = idist__op_fingerprint(t);

    op->sends_pending++;
    idist__send_post(t, idist__group_world_rank(t->group, to), step, data, nbytes, &fingerprint);
}

// Sends a message to ourselves. Until a receive takes the message, it is one of the unexpected
// messages of our own link. A small message is copied there. A large message stays in the sender's
// buffer, and the receive copies it from that buffer.
static void idist__send_to_self(idist__task *t, const idist__fingerprint *fingerprint) {
    idist__ring *ring = idist__ring_of(t->group->w);
    int me = ring->w->group.rank;
    idist__link *l = &ring->links[me];
    size_t nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    bool eager = nbytes <= IDIST__EAGER_BYTES;
    idist__transfer *sender = eager ? NULL : idist__transfer_new(ring), *v;
    idist__message *msg;
    idist__frame frame;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__EAGER;
    frame.ctx = t->group->ctx;
    frame.tag = (uint32_t)t->call.tag;
    frame.fingerprint = *fingerprint;
    frame.nbytes = nbytes;
    msg = idist__message_new(ring, l, &frame, eager ? nbytes : 0);

    if (!msg || (!eager && !sender)) {
        if (msg) idist__message_free(ring, l, msg);
        if (sender) idist__transfer_free(ring, sender);
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    msg->moved = nbytes;

    if (eager) {
        idist__block_copy(msg->data, t->call.send, nbytes);
        idist__task_complete(t, IDIST_OK, "");
    } else {
        sender->task = t;
        sender->send = true;
        sender->data = (char *)(uintptr_t)t->call.send;
        sender->nbytes = nbytes;
        msg->self_send = sender;
    }

    v = idist__match_recv(ring, t->group, me, &msg->frame);
    if (v) idist__message_give(ring, l, me, msg, v);
    else idist__message_rekey(ring, msg, frame.tag);
}

static idist__fingerprint idist__send_fingerprint(const idist_group *g, const idist__call *call) {
    idist__fingerprint fingerprint;

    memset(&fingerprint, 0, sizeof fingerprint);
    fingerprint.kind = IDIST__SEND;
    fingerprint.dtype = (uint8_t)call->dtype;
    fingerprint.check = idist__fingerprint_tagged(g->w, call, call->count);
    fingerprint.root = g->rank;

    return fingerprint;
}

static void idist__send_start(idist__task *t) {
    const idist__call *call = &t->call;
    idist__fingerprint fingerprint = idist__send_fingerprint(t->group, call);

    if (call->root == t->group->rank) {
        idist__send_to_self(t, &fingerprint);
        return;
    }

    idist__send_post(t, idist__group_world_rank(t->group, call->root), (uint32_t)call->tag,
                     call->send, call->count * idist_dtype_size(call->dtype), &fingerprint);
}

// Waits briefly for another rank in a call that runs without a task (`quick` in core/model.h).
// Returns false if the call has waited long enough, if another thread needs the lock, or if a
// failure is recorded. The call must then become a task.
static bool idist__send_quick_wait(const idist__ring *ring, int turns) {
    const idist__world *w = ring->w;
    int most =
        w->wait.spin_ns ? (int)(w->wait.spin_budget_ns / IDIST__TURN_NS) : IDIST__QUICK_YIELDS;

    if (ring->failed || __atomic_load_n(&w->wait.lock_waiter_count, __ATOMIC_RELAXED)) return false;
    if (turns >= most) return false;
    if (w->wait.spin_ns) idist__os_cpu_relax();
    else idist__os_thread_yield();

    return true;
}

// Tries to send a message immediately, without a task, a transfer or the clock. Returns true if the
// transport accepted the whole message. Otherwise returns false, for example if an earlier send
// still waits for space.
static bool idist__send_quick(idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = &ring->links[idist__group_world_rank(g, call->root)];
    idist__frame frame;

    if (!l->open || !l->transport->write_message || l->out || l->write_dead) return false;
    if (ring->failed || call->count > IDIST__EAGER_BYTES) return false;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__EAGER;
    frame.ctx = g->ctx;
    frame.tag = (uint32_t)call->tag;
    frame.fingerprint = idist__send_fingerprint(g, call);
    frame.nbytes = call->count * idist_dtype_size(call->dtype);

    if (!idist__link_is_eager(l, (size_t)frame.nbytes)) return false;
    if (l->window < frame.nbytes + sizeof frame) return false;

    if (!l->transport->write_message(l->port, &frame, call->send, (size_t)frame.nbytes))
        return false;

    l->window -= (size_t)frame.nbytes + sizeof frame;
    l->p2p_sent++;

    return true;
}

// ---- ring/msg/recv.h -----------------------------------------------------------------------------

// ring/msg/recv.h: posts receives

// Posts a receive of nbytes from a rank of the group, for a step of a collective, in slot 0 to 31.
// Also sets the bit of the slot in slots_pending. A receive in slot -1 is only counted.
static void idist__recv_step(idist__task *t, int slot, int from, uint32_t step, void *data,
                             size_t nbytes) {
    idist__op *op = idist__op_of(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    int peer = idist__group_world_rank(t->group, from);
    idist__link *l = &ring->links[peer];
    idist__transfer *xfer = idist__transfer_new(ring);
    idist__index_node *hook;
    uint64_t key;

    op->recvs_pending++;
    if (slot >= 0) op->slots_pending |= 1u << slot;

    if (!xfer) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    xfer->task = t;
    xfer->slot = slot;
    xfer->data = (char *)data;
    xfer->nbytes = nbytes;
    xfer->frame.ctx = t->group->ctx;
    xfer->frame.tag = step;
    xfer->frame.fingerprint = idist__op_fingerprint(t);
    key = idist__index_key(xfer->frame.ctx, peer, false, t->seq);
    idist__transfer_put(ring, &l->posted, xfer, key);
    idist__link_want(ring, l);
    if (idist__link_grants(l, nbytes)) idist__link_grant(ring, l, xfer);

    for (hook = ring->messages[key % IDIST__BUCKETS].first; hook; hook = hook->next) {
        idist__message *msg = idist__index_message(hook);

        if (msg->peer != peer || msg->claim || msg->frame.ctx != xfer->frame.ctx) continue;
        if (msg->frame.fingerprint.kind == IDIST__SEND || msg->frame.type > IDIST__RTS) continue;
        if (msg->frame.fingerprint.seq != t->seq || msg->frame.tag != step) continue;
        xfer = idist__match_frame(ring, l, peer, &msg->frame);
        if (xfer) idist__message_give(ring, l, peer, msg, xfer);
        return;
    }
}

// Returns the link from which a receive may take its next message directly, or NULL if there is
// none.
static idist__link *idist__recv_link(const idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = call->root >= 0 ? &ring->links[idist__group_world_rank(g, call->root)] : NULL;

    if (!l || !l->open || !l->transport->peek_header) return NULL;

    return l->early || l->in_moved || l->ended || ring->failed ? NULL : l;
}

// Returns true if a receive can directly take the message that begins with this frame. Otherwise
// the receive must become a task.
static bool idist__recv_wants(const idist_group *g, const idist__call *call, const idist__link *l,
                              const idist__frame *frame) {
    if (frame->type != IDIST__EAGER || frame->ctx != g->ctx ||
        frame->fingerprint.kind != IDIST__SEND)
        return false;
    if (frame->fingerprint.dtype != (int)call->dtype || frame->fingerprint.check > call->count)
        return false;
    if (!idist__matching_has_tag(call, (int)frame->tag)) return false;
    if (frame->nbytes > IDIST__EAGER_BYTES || frame->nbytes + sizeof *frame > l->their_window)
        return false;

    return frame->nbytes == frame->fingerprint.check * idist_dtype_size(call->dtype);
}

// Accounts for a message that a receive has taken from the link.
static void idist__recv_taken(idist__ring *ring, const idist__call *call, idist__link *l,
                              const idist__frame *frame) {
    l->p2p_received++;
    l->peer_waits.type = 0;
    l->their_window -= (size_t)frame->nbytes + sizeof *frame;
    idist__link_consumed(ring, l, (size_t)frame->nbytes);
    idist__matching_describe(call, call->root, (int)frame->tag, call->dtype,
                             (size_t)frame->fingerprint.check);
}

// Takes the message with this header out of the link, if the receive accepts the message and the
// whole message has arrived.
static bool idist__recv_take(const idist_group *g, const idist__call *call, idist__link *l,
                             const idist__frame *frame) {
    if (!idist__recv_wants(g, call, l, frame)) return false;
    if (!l->transport->read_message(l->port, call->recv, (size_t)frame->nbytes)) return false;
    idist__recv_taken(idist__ring_of(g->w), call, l, frame);

    return true;
}

// Tries a blocking receive while no other call is in progress. Waits briefly for the next message,
// and takes it if the receive accepts the message and the whole message has arrived.
static bool idist__recv_quick(const idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__link *l = idist__recv_link(g, call);
    idist__frame frame;
    int turns;

    if (!l) return false;
    for (turns = 0; !l->transport->peek_header(l->port, &frame); turns++)
        if (!idist__send_quick_wait(ring, turns)) return false;

    return idist__recv_take(g, call, l, &frame);
}

// Returns true if a receive of idist_recv accepts this message from world rank `from`.
static bool idist__recv_takes(const idist__task *t, const idist__message *msg, int from) {
    if (msg->peer != from || msg->claim || msg->frame.type > IDIST__RTS) return false;
    if (msg->frame.fingerprint.kind != IDIST__SEND || msg->frame.ctx != t->group->ctx) return false;
    return idist__matching_matches(t, from, (int)msg->frame.tag);
}

// Returns the first message from world rank `from` that a receive accepts, or NULL. Messages from
// one rank keep their order.
static idist__message *idist__recv_first(idist__ring *ring, const idist__task *t, int from) {
    idist__message *msg = ring->links[from].early;
    idist__index_node *hook;
    uint64_t key = idist__index_key(t->group->ctx, from, true, (uint32_t)t->call.tag);

    if (!msg || t->call.tag == IDIST_ANY_TAG) {
        while (msg && !idist__recv_takes(t, msg, from)) msg = msg->next;
        return msg;
    }

    hook = ring->messages[key % IDIST__BUCKETS].first;
    while (hook && !idist__recv_takes(t, idist__index_message(hook), from)) hook = hook->next;

    return hook ? idist__index_message(hook) : NULL;
}

// Adds a receive of idist_recv to the list for its kind.
static void idist__recv_post(idist__ring *ring, idist__task *t, idist__transfer *xfer) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int root = t->call.root;
    uint64_t key;

    if (root >= 0) idist__link_want(ring, &ring->links[t->group->ranks[root]]);

    if (root == IDIST_ANY_SOURCE || t->call.tag == IDIST_ANY_TAG) {
        idist__transfer_append(&rg->wild, xfer);
        return;
    }

    key = idist__index_key(t->group->ctx, t->group->ranks[root], true, (uint32_t)t->call.tag);
    idist__transfer_put(ring, &rg->recvs, xfer, key);
}

// Posts a receive of idist_recv. If a message that the receive accepts has already arrived from any
// possible source, gives the earliest such message to the receive.
static void idist__recv_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    idist__transfer *xfer = idist__transfer_new(ring);
    idist__message *msg, *earliest = NULL;
    int from = t->call.root, end = from + 1;
    uint32_t tag;

    if (!xfer) {
        idist__task_complete(t, IDIST_ERR_NO_MEMORY, "out of memory");
        return;
    }

    xfer->task = t;
    xfer->data = (char *)t->call.recv;
    xfer->nbytes = t->call.count * idist_dtype_size(t->call.dtype);
    idist__op_of(t)->transfer = xfer;
    idist__recv_post(ring, t, xfer);

    if (from == IDIST_ANY_SOURCE) {
        from = 0;
        end = t->group->size;
    }

    for (; from < end; from++) {
        msg = idist__recv_first(ring, t, t->group->ranks[from]);
        if (msg && (!earliest || msg->stamp < earliest->stamp)) earliest = msg;
    }

    if (!earliest) return;
    // No older receive accepts the message, so this receive gets the message or fails.
    tag = earliest->frame.tag;
    xfer = idist__match_recv(ring, t->group, earliest->peer, &earliest->frame);
    if (xfer)
        idist__message_give(ring, &ring->links[earliest->peer], earliest->peer, earliest, xfer);
    else idist__message_rekey(ring, earliest, tag);
}

// ---- ring/share/region.h -------------------------------------------------------------------------

// ring/share/region.h: the memory that a rank shows to the other ranks
//
//   head      slot 0 | slot 1 | ... | slot 31 | progress
//   buffers   buffer 0 | buffer 1 | buffer 2
//
// A slot announces one call. It holds the call's number, its fingerprint and a small contribution.
// A large contribution passes through the three buffers, one chunk at a time. The progress counters
// count chunks over all calls of the group:
//
//   EXPOSED   our part of the chunk is in our buffer
//   REDUCED   our block of the chunk is reduced over all ranks and is in our buffer; only in
//             all_reduce and reduce
//   FREED     we have read all data that we need from the chunk

#define IDIST__REGION_SLOTS 32
#define IDIST__SLOTS_AHEAD 16 // half of the slots; see ring/share/slot.h
#define IDIST__FLAT_BYTES ((size_t)4096)
#define IDIST__INLINE_BYTES ((size_t)32)
// Size of a slot. The last line holds the fingerprint of the previous call if that call used
// messages.
#define IDIST__SLOT_BYTES (2 * IDIST__LINE + IDIST__FLAT_BYTES)
#define IDIST__REGION_HEAD_BYTES \
    (IDIST__REGION_SLOTS * IDIST__SLOT_BYTES + sizeof(idist__region_progress))
#define IDIST__CHUNK_MAX ((size_t)384 * 1024)
enum { IDIST__BUFFERS = 3 };

typedef struct idist__call_slot { // one cache line; IDIST__FLAT_BYTES of payload follow
    uint32_t call_number;         // number among the shared calls; written last
    uint16_t past;                // digest of the earlier calls
    uint16_t zero;
    idist__fingerprint fingerprint;
    union {
        char bytes[IDIST__INLINE_BYTES]; // FLAT: a contribution of at most this size
        struct {                         // CHUNKED
            uint64_t send_at, recv_at;   // offsets of the buffers in the file; 0 if in no window
            // Addresses of the buffers in the rank's memory, or 0 if other ranks do not read these
            // buffers through the kernel.
            uint64_t remote_send;
            uint64_t remote_recv;
        } buffers;
        struct {              // CHUNKED, v-forms; the counts follow the line
            uint64_t largest; // elements of the largest part
        } parts;
    } u;
} idist__call_slot;

typedef enum idist__milestone {
    IDIST__EXPOSED,
    IDIST__REDUCED,
    IDIST__FREED,
    IDIST__MILESTONES
} idist__milestone;

typedef struct idist__region_progress { // two cache lines; other ranks write only to members_done
    idist__counter reached[IDIST__MILESTONES];
    char pad[40];
    // Number of members that have freed the group. Once all members have done so, another group can
    // use the region.
    uint32_t members_done;
    char pad2[60];
} idist__region_progress;

// Locations of a rank's contribution and result. The fields `send` and `recv` are addresses in this
// process, or NULL if the buffer is in no window. The fields `remote_send` and `remote_recv` are
// addresses in that rank's memory, or 0. The kernel reads from these addresses for us.
typedef struct idist__location {
    char *send, *recv;
    uint64_t remote_send, remote_recv;
} idist__location;

typedef struct idist__share { // the state of a group whose members share memory
    idist__segment *shm;
    char **heads, **buffers; // heads and buffers of the regions, by rank in the group
    uint32_t *entered;       // by rank: the last shared call that the rank is known to have entered
    const void **operands;   // scratch: one operand per rank
    idist__location *locations; // CHUNKED: locations by rank, in the current call
    size_t chunk_nbytes;        // size of a buffer

    idist__fingerprint fingerprints[IDIST__REGION_SLOTS]; // copies of the fingerprints in our slots
    uint16_t pasts[IDIST__REGION_SLOTS];
    uint32_t calls_entered;  // number of shared calls that we have entered
    uint32_t compared_calls; // the slots of all ranks have been compared up to this call
    uint64_t chunks_done;
    size_t recent_nbytes[2];   // sizes of the contributions in our last two slots
    idist__task *first, *last; // queue of shared calls; only the first call runs
    idist__task *quick_task;   // the task that idist__share_quick uses
    bool entered_early;        // idist__share_quick has already entered the next call
    uint32_t extents_open;     // number of extents of our window that all members have mapped
} idist__share;

static idist__call_slot *idist__region_slot(const idist__share *share, int rank,
                                            uint32_t call_number) {
    size_t at = (call_number % IDIST__REGION_SLOTS) * IDIST__SLOT_BYTES;
    return (idist__call_slot *)(void *)(share->heads[rank] + at);
}

// Returns the fingerprint of the call that the rank made before this call. The rank writes the
// fingerprint only if that earlier call used messages, so the caller must first compare its
// sequence number.
static idist__fingerprint *idist__region_previous_call(const idist__share *share, int rank,
                                                       uint32_t call_number) {
    char *slot = (char *)idist__region_slot(share, rank, call_number);
    return (idist__fingerprint *)(void *)(slot + IDIST__LINE + IDIST__FLAT_BYTES);
}

static idist__region_progress *idist__region_progress_of(const idist__share *share, int rank) {
    size_t at = IDIST__REGION_SLOTS * IDIST__SLOT_BYTES;
    return (idist__region_progress *)(void *)(share->heads[rank] + at);
}

static uint64_t idist__region_reached(const idist__share *share, int rank,
                                      idist__milestone milestone) {
    const idist__region_progress *progress = idist__region_progress_of(share, rank);
    return __atomic_load_n(&progress->reached[milestone], __ATOMIC_ACQUIRE);
}

static char *idist__region_buffer(const idist__share *share, int rank, uint64_t chunk) {
    return share->buffers[rank] + (size_t)(chunk % IDIST__BUFFERS) * share->chunk_nbytes;
}

// Copies to cache lines that other cores have in their caches. Bypasses the caches, or prefetches
// the next lines while it writes.
static void idist__region_write(const idist__share *share, char *to, const char *from,
                                size_t nbytes) {
    idist__pace *pace = &share->shm->pace;
    size_t at, lines = nbytes & ~(IDIST__LINE - 1);
    int64_t begin_ns;

    if (idist__pace_begin(pace, nbytes, &begin_ns)) {
        idist__os_cpu_stream(to, from, nbytes);
        idist__pace_end(pace, begin_ns, nbytes);
        return;
    }

    for (at = 0; at < lines; at += IDIST__LINE) {
        if (at + IDIST__PREFETCH_BYTES < lines)
            idist__os_cpu_prefetch_for_write(to + at + IDIST__PREFETCH_BYTES);
        memcpy(to + at, from + at, IDIST__LINE);
    }

    if (nbytes > lines) memcpy(to + lines, from + lines, nbytes - lines);
    idist__pace_end(pace, begin_ns, nbytes);
}

static idist__share *idist__region_share(const idist__task *t) {
    return idist__ring_group_of(t->group)->share;
}

// Wakes the members that sleep. Called after a write that the members may wait for.
static void idist__region_wake_members(const idist__share *share, const idist_group *g) {
    int i;

    if (!idist__doorbell_any_asleep(share->shm)) return;
    for (i = 0; i < g->size; i++)
        if (i != g->rank) idist__doorbell_wake_for_step(share->shm, share->shm->local[g->ranks[i]]);
}

// Publishes that this rank has reached a milestone in all chunks before number `chunks`.
static void idist__region_publish(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    idist__share *share = idist__region_share(t);
    idist__region_progress *progress = idist__region_progress_of(share, t->group->rank);

    idist__os_thread_handover();
    __atomic_store_n(&progress->reached[milestone], chunks, __ATOMIC_RELEASE);
    idist__region_wake_members(share, t->group);
    t->group->w->wait.moved_count++;
}

// ---- ring/share/flow.h ---------------------------------------------------------------------------

// ring/share/flow.h: tells which ranks contribute to a call, which ranks read, and how much

// Limit on n * n * nbytes, where each of n ranks contributes nbytes. Beyond the limit, it is faster
// if each rank reduces one block for all ranks than if every rank reduces everything.
#define IDIST__SPLIT_BYTES ((size_t)128 * 1024)

static bool idist__flow_contributes(const idist__op *op, idist__kind kind, int rank) {
    if (kind == IDIST__BROADCAST || kind == IDIST__SCATTER || kind == IDIST__SCATTERV)
        return rank == op->root;
    return kind != IDIST__BARRIER;
}

// Returns true if this rank reads, or waits for, the contribution of another rank.
static bool idist__flow_reads(const idist__task *t, int rank) {
    const idist__op *op = idist__op_of(t);

    switch (t->call.kind) {
    case IDIST__BROADCAST:
    case IDIST__SCATTER:
    case IDIST__SCATTERV: return rank == op->root;
    case IDIST__GATHER:
    case IDIST__GATHERV: return op->rank == op->root;
    case IDIST__REDUCE: return op->rank == op->root || op->algorithm == IDIST__ALGO_CHUNKED;
    case IDIST__SCAN:
    case IDIST__EXSCAN: return rank < op->rank;
    default: return true;
    }
}

// Returns true if each rank reduces one block for all ranks.
static bool idist__flow_is_split(const idist__op *op, idist__kind kind) {
    return kind == IDIST__REDUCE ||
           (kind == IDIST__ALL_REDUCE && (size_t)(op->n * op->n) * op->nbytes > IDIST__SPLIT_BYTES);
}

// Returns true if contributions are multiplied by a factor before the sum
// (idist_op_create_premul_sum).
static bool idist__flow_is_scaled(const idist__op *op) { return op->user && !op->user->fn; }

// Returns the number of elements in block `to` of our contribution.
static size_t idist__flow_send_count(const idist__task *t, int to) {
    return t->call.sendcounts ? t->call.sendcounts[to] : t->call.count;
}

// Returns the address of block `to` of our contribution.
static const char *idist__flow_send_at(const idist__task *t, int to) {
    const idist__op *op = idist__op_of(t);

    if (!idist__kind_gives_blocks(t->call.kind)) return op->in;
    if (t->call.sendcounts)
        return op->in + idist__extent_displ(t->call.sendcounts, t->call.senddispls, to) * op->size;
    return op->in + (size_t)to * op->nbytes;
}

static size_t idist__flow_min(size_t a, size_t b) { return a < b ? a : b; }

#define IDIST__PART_PREFETCH_BYTES ((size_t)512)

// Prefetches the start of a part. The processor predicts the next access inside a part, but not
// where the next part begins.
static void idist__flow_prefetch_part(const idist__task *t, int k) {
    const idist__part *part = &t->call.parts[k];
    size_t count, nbytes, at;

    if (k >= t->call.part_count) return;
    count = part->end - part[-1].end;
    nbytes = idist__flow_min(count * idist__op_of(t)->size, IDIST__PART_PREFETCH_BYTES);
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_cpu_prefetch_for_write(part->data + at);
}

// Returns the address of element `at` of our buffer, which begins at `base` or is in parts. Sets
// *run to the number of contiguous elements there, at most `count`.
static char *idist__flow_place(const idist__task *t, char *base, size_t at, size_t count,
                               size_t *run) {
    const idist__part *parts = t->call.parts;
    size_t size = idist__op_of(t)->size, first;
    int low = 0, high = t->call.part_count - 1; // the part with element `at` is in low .. high

    *run = count;
    if (!t->call.part_count) return base + at * size;

    while (low < high) {
        int middle = (low + high) / 2;
        if (parts[middle].end <= at) low = middle + 1;
        else high = middle;
    }

    idist__flow_prefetch_part(t, low + 1);
    first = low ? parts[low - 1].end : 0;
    if (*run > parts[low].end - at) *run = parts[low].end - at;

    return parts[low].data + (at - first) * size;
}

static size_t idist__flow_send_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    return (idist__kind_gives_blocks(t->call.kind) ? (size_t)op->n : 1) * op->nbytes;
}

// Returns the number of elements that we receive from a rank in calls that do not reduce.
static size_t idist__flow_recv_count(const idist__task *t, int from) {
    return t->call.recvcounts ? t->call.recvcounts[from] : t->call.count;
}

// Returns the address for the elements that we receive from a rank in calls that do not reduce.
static char *idist__flow_recv_at(const idist__task *t, int from) {
    const idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;

    if (!idist__kind_takes_blocks(call->kind)) return op->out;
    if (call->recvcounts)
        return op->out + idist__extent_displ(call->recvcounts, call->recvdispls, from) * op->size;
    return op->out + (size_t)from * op->nbytes;
}

// Returns how many elements of a block of `count` elements are in the chunk that begins at element
// `at`.
static size_t idist__flow_chunk_count(const idist__op *op, size_t count, size_t at) {
    return at < count ? idist__flow_min(count - at, op->u.shared.chunk_count) : 0;
}

// ---- ring/share/slot.h ---------------------------------------------------------------------------

// ring/share/slot.h: announces a call, and compares it with the calls of the other ranks
//
// A rank enters a call by writing its slot. Before a rank enters call k, it compares the slots of
// all ranks up to call k - 16 with its own calls. During call k, it also compares the slots of the
// ranks that it reads from, up to call k. So a rank that has entered call k no longer needs the
// slots of call k - 16. There are 32 slots, used in turn: the slot of call k + 16 overwrites the
// slot of call k - 16.
//
// A rank that waits for no other rank runs ahead. Examples are the root of a broadcast, and all
// ranks of a gather except the root. This matters if ranks share a processor: the further a rank
// runs ahead, the fewer context switches there are.
//
// The contribution to a CHUNKED call is read from one of three places:
//
//   in a buffer       one chunk at a time; the general case
//   in a window       idist_alloc allocated the contribution, so all ranks have mapped it
//   cross-memory      the kernel lets us read the memory of other processes; the slot has the
//                     address. The data is copied only once. But system calls are expensive, the
//                     kernel copies slowly, and a chunk in a buffer that many ranks read stays in
//                     the cache. Not used on processors where such reads are too slow
//                     (ring/join/segment_probe.h), unless IDIST_ALGO is "remote"
//
// A rank whose buffers are read in place does not return from the call until all ranks have read
// them.

// Minimum sizes at which cross-memory reads pay off, as measured. A broadcast also has a maximum.
#define IDIST__REMOTE_BYTES ((size_t)8 * 1024) // size of a block
#define IDIST__REMOTE_OVERSUBSCRIBED ((size_t)64 * 1024)
#define IDIST__REMOTE_BROADCAST_MAX ((size_t)2 << 20)
#define IDIST__REMOTE_REDUCTION ((size_t)2 << 20) // size of a whole contribution

static bool idist__slot_has_entered(idist__share *share, int rank, uint32_t call_number) {
    uint32_t seen;

    if ((int32_t)(share->entered[rank] - call_number) >= 0) return true;
    seen = __atomic_load_n(&idist__region_slot(share, rank, call_number)->call_number,
                           __ATOMIC_ACQUIRE);
    if ((int32_t)(seen - call_number) < 0) return false;

    idist__os_thread_handover();
    share->entered[rank] = seen;
    return true;
}

// Returns true if a rank has entered the call and has not withdrawn its slots. A rank that leaves a
// call with an error withdraws them. After a normal return, the slot stays current until it is used
// again. A rank that leaves a call with an error withdraws its slots.
static bool idist__slot_is_current(const idist__share *share, int rank, uint32_t call_number) {
    const idist__call_slot *slot = idist__region_slot(share, rank, call_number);
    return __atomic_load_n(&slot->call_number, __ATOMIC_ACQUIRE) == call_number;
}

// Fails the group because the slot of a rank differs from ours.
static void idist__slot_mismatch(idist__task *t, int rank, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    idist__ring *ring = idist__ring_of(t->group->w);
    const idist__fingerprint *ours = &share->fingerprints[call_number % IDIST__REGION_SLOTS],
                             *before = idist__history_before(t->group, ours);
    idist__fingerprint theirs = idist__region_slot(share, rank, call_number)->fingerprint;
    int peer = t->group->ranks[rank];
    const char *field = idist__fingerprint_difference(&theirs, ours);

    if (field || !idist__fingerprint_equal(&theirs, ours)) {
        idist__history_mismatch(ring, t->group, peer, &theirs, ours, field ? field : "sequence");
        return;
    }

    theirs = *idist__region_previous_call(share, rank, call_number);
    if (!before || theirs.seq != before->seq) theirs.kind = 0;
    idist__history_differs_before(ring, t->group, peer, ours, &theirs);
}

// Compares the calls of a rank with ours, from the last comparison up to this call. Returns false
// if a call differs; the group has then failed.
static bool idist__slot_compare(idist__task *t, int rank, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    uint32_t oldest = call_number - IDIST__SLOTS_AHEAD, number = share->compared_calls + 1;

    if ((int32_t)(oldest - share->compared_calls) > 0) number = oldest;

    for (; (int32_t)(call_number - number) >= 0; number++) {
        // Reads the copy of our fingerprint, because other cores are fetching the cache line of our
        // slot.
        uint32_t index = number % IDIST__REGION_SLOTS;
        const idist__call_slot *slot = idist__region_slot(share, rank, number);

        if (idist__fingerprint_equal(&slot->fingerprint, &share->fingerprints[index]) &&
            slot->past == share->pasts[index])
            continue;
        idist__slot_mismatch(t, rank, number);
        return false;
    }

    return true;
}

// Returns true if all other ranks have entered this call, and their calls up to this call are the
// same as ours. Fails the group if a call differs.
static bool idist__slot_compare_all(idist__task *t, uint32_t call_number) {
    idist__share *share = idist__region_share(t);
    int i;

    for (i = 0; i < t->group->size; i++) {
        if (i == t->group->rank) continue;
        idist__op_of(t)->u.shared.awaited = i;
        if (!idist__slot_has_entered(share, i, call_number)) return false;
    }

    for (i = 0; i < t->group->size; i++)
        if (i != t->group->rank && !idist__slot_compare(t, i, call_number)) return false;

    share->compared_calls = call_number;
    return true;
}

// Returns true if all ranks have read the slot that the next call overwrites. First tries to
// compare IDIST__SLOTS_AHEAD / 2 more calls, so that the next calls need no check.
static bool idist__slot_may_enter(idist__task *t) {
    const idist__share *share = idist__region_share(t);
    uint32_t call_number = share->calls_entered + 1 - IDIST__SLOTS_AHEAD;

    if ((int32_t)(share->compared_calls - call_number) >= 0) return true;
    if (idist__slot_compare_all(t, call_number + IDIST__SLOTS_AHEAD / 2)) return true;
    if (idist__ring_of(t->group->w)->failed) return false; // the calls differ

    return idist__slot_compare_all(t, call_number);
}

// Maps the extents that other ranks have added to their windows since the last call.
static void idist__slot_look_at_windows(const idist__task *t) {
    idist__world *w = t->group->w;
    idist__segment *seg = idist__region_share(t)->shm;

    if (!seg->window || !idist__view_is_news(seg) || idist__view_look(seg)) return;
    idist__log_print(
        &w->log, IDIST_LOG_INFO,
        "cannot map memory that another rank allocated with idist_alloc; buffers in that memory "
        "are copied");
}

// Returns the number of extents of our window that all members of the group have mapped.
static uint32_t idist__slot_count_open(const idist__task *t) {
    const idist__segment *seg = idist__region_share(t)->shm;
    uint32_t open = IDIST__EXTENTS;
    int i;

    for (i = 0; i < t->group->size; i++) {
        int rank = seg->local[t->group->ranks[i]];
        uint32_t count = rank == seg->me ? open : idist__view_mapped_by(seg, rank);
        if (count < open) open = count;
    }

    return open;
}

// Returns the file offset of one of our buffers, or 0 if not all members can read it in place.
static uint64_t idist__slot_window_offset(const idist__task *t, const void *p, size_t nbytes) {
    idist__share *share = idist__region_share(t);
    uint64_t offset;
    uint32_t extent = 0;

    if (!share->shm->window) return 0;
    offset = idist__view_offset(share->shm, p, nbytes, &extent);
    if (!offset || extent < share->extents_open) return offset;
    share->extents_open = idist__slot_count_open(t);

    return extent < share->extents_open ? offset : 0;
}

// Returns true if contributions are read from the memory of other processes. The result is the same
// on all ranks.
static bool idist__slot_is_remote(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    const idist__segment *seg = idist__region_share(t)->shm;
    idist__kind kind = t->call.kind;
    int setting = t->group->w->cfg.algorithm;

    if (!seg->reads_remote || setting == IDIST__ALGO_CHUNKED) return false;
    if (!seg->reads_fast && setting != IDIST__ALGO_REMOTE) return false;
    if (idist__kind_reduces(kind))
        return !seg->oversubscribed && idist__flow_send_nbytes(t) >= IDIST__REMOTE_REDUCTION;
    if (kind == IDIST__BROADCAST)
        return !seg->oversubscribed && op->nbytes >= IDIST__REMOTE_BYTES &&
               op->nbytes < IDIST__REMOTE_BROADCAST_MAX;
    if (kind == IDIST__ALL_GATHER && seg->oversubscribed && op->n > 4) return false;

    return op->nbytes >= (seg->oversubscribed ? IDIST__REMOTE_OVERSUBSCRIBED : IDIST__REMOTE_BYTES);
}

// Records the locations of a rank's buffers in a CHUNKED call.
static void idist__slot_locate(idist__task *t, int rank, const idist__call_slot *slot) {
    const idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    idist__location *location = &share->locations[rank];

    if (op->algorithm == IDIST__ALGO_FLAT) return;
    location->send =
        idist__view_pointer(share->shm, slot->u.buffers.send_at, idist__flow_send_nbytes(t));
    location->recv = idist__view_pointer(share->shm, slot->u.buffers.recv_at, op->nbytes);
    location->remote_send = location->send ? 0 : slot->u.buffers.remote_send;
    location->remote_recv = slot->u.buffers.remote_recv;
}

// Returns the address of a rank's contribution to a FLAT call.
static char *idist__slot_payload(const idist__task *t, int rank) {
    const idist__op *op = idist__op_of(t);
    idist__call_slot *slot =
        idist__region_slot(idist__region_share(t), rank, op->u.shared.call_number);

    return idist__flow_send_nbytes(t) <= sizeof slot->u.bytes ? slot->u.bytes : (char *)(slot + 1);
}

static void idist__slot_scale(const idist__task *t, char *buf, size_t count) {
    const idist__op *op = idist__op_of(t);
    if (idist__flow_is_scaled(op)) idist__reduce_scale(buf, count, t->call.dtype, op->user->factor);
}

// Replaces our contribution by a copy that other ranks can read. Used for memory that the kernel
// does not let them read, and for an all_to_all in place, which would overwrite the data that they
// read. The shared buffers cannot be used instead, because all ranks must read contributions in the
// same way. Returns false if the group has failed.
static bool idist__slot_copy_contribution(idist__task *t) {
    idist__op *op = idist__op_of(t);
    size_t nbytes = idist__flow_send_nbytes(t);

    op->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, nbytes);

    if (!op->memory) {
        idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
        return false;
    }

    memcpy(op->memory, op->in, nbytes);
    op->in = op->memory;

    return true;
}

// Writes the addresses of our buffers to the slot, if the kernel lets other ranks read the buffers.
// If not, a contribution to a reduction goes through shared memory, and any other contribution is
// first copied to memory that can be read. Returns false if the group has failed.
static bool idist__slot_offer_remote(idist__task *t, idist__call_slot *slot) {
    idist__op *op = idist__op_of(t);
    size_t nbytes = idist__flow_send_nbytes(t);
    bool is_open = slot->u.buffers.send_at || idist__os_process_memory_is_open(op->in, nbytes);

    if (!is_open && !idist__kind_reduces(t->call.kind)) {
        if (!op->memory && !idist__slot_copy_contribution(t)) return false;
        is_open = true; // other ranks can read the copy
    }

    if (!is_open) return true;
    slot->u.buffers.remote_send = (uint64_t)(uintptr_t)op->in;
    if (t->call.kind == IDIST__ALL_REDUCE && idist__os_process_memory_is_open(op->out, op->nbytes))
        slot->u.buffers.remote_recv = (uint64_t)(uintptr_t)op->out;

    return true;
}

// Writes the locations of our buffers to the slot, so that other ranks read the buffers in place.
// Offers no buffer if the call would overwrite the data that other ranks read. Returns false if the
// group has failed.
static bool idist__slot_offer_buffers(idist__task *t, idist__call_slot *slot) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    const idist__call *call = &t->call;
    bool scaled = idist__flow_is_scaled(op), all = call->kind == IDIST__ALL_REDUCE;
    bool overwrites =
        call->send == call->recv &&
        (call->kind == IDIST__ALL_TO_ALL || call->kind == IDIST__SCAN ||
         call->kind == IDIST__EXSCAN || (all && !idist__flow_is_split(op, call->kind)));

    idist__slot_look_at_windows(t);
    memset(&slot->u, 0, sizeof slot->u);
    memset(share->locations, 0, sizeof *share->locations * (size_t)op->n);
    op->u.shared.remote = !scaled && idist__slot_is_remote(t);

    if (op->u.shared.remote && overwrites && call->kind == IDIST__ALL_TO_ALL) {
        if (!idist__slot_copy_contribution(t)) return false;
        overwrites = false;
    }

    if (!idist__flow_contributes(op, call->kind, op->rank) || scaled || overwrites) return true;
    if (call->part_count) return true;

    slot->u.buffers.send_at = idist__slot_window_offset(t, op->in, idist__flow_send_nbytes(t));
    if (all) slot->u.buffers.recv_at = idist__slot_window_offset(t, op->out, op->nbytes);
    if (op->u.shared.remote && !idist__slot_offer_remote(t, slot)) return false;
    idist__slot_locate(t, op->rank, slot);
    op->u.shared.in_place = slot->u.buffers.send_at || slot->u.buffers.remote_send;

    return true;
}

// Returns the value that two ranks of a v-form compare for a count. The count of an all_to_allv is
// in bytes, and is converted to elements here, because each pair of ranks may use a different
// dtype. See idist__share_count_bytes.
static uint64_t idist__slot_pair(const idist__task *t, size_t count) {
    const idist__call *call = &t->call;
    size_t size = call->kind == IDIST__ALL_TO_ALLV ? idist_dtype_size(call->dtype) : 1;

    if (!count || !size) return 0;
    return idist__fingerprint_pair(t->group->w, call, count / size);
}

// Writes the counts of a v-form to the slot. Each other rank compares the count for itself with the
// count that it expects.
static void idist__slot_offer_counts(idist__task *t, idist__call_slot *slot) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    const idist__call *call = &t->call;
    uint64_t *counts = (uint64_t *)(void *)(slot + 1);
    size_t largest = call->count;
    int i;

    memset(share->locations, 0, sizeof *share->locations * (size_t)op->n);

    for (i = 0; i < op->n; i++) {
        size_t count = idist__flow_send_count(t, i);

        counts[i] = idist__slot_pair(t, count);
        if (count > largest) largest = count;
        if (call->recvcounts && call->recvcounts[i] > largest) largest = call->recvcounts[i];
    }

    op->u.shared.largest_count = largest;
    slot->u.parts.largest = largest;
}

// Writes our contribution to the slot of a FLAT call.
static void idist__slot_write_payload(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    char *payload = idist__slot_payload(t, op->rank);
    size_t nbytes = idist__flow_send_nbytes(t);
    size_t count = nbytes / (op->size ? op->size : 1); // NOLINT(clang-analyzer-core.DivideZero)

    idist__region_write(idist__region_share(t), payload, op->in, nbytes);
    idist__slot_scale(t, payload, count);
}

// Prefetches the cache lines of our next slot for writing, while the call can only wait. Assumes
// that the next contribution is as large as the larger of the last two.
static void idist__slot_prefetch_next(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    char *next = (char *)idist__region_slot(share, op->rank, op->u.shared.call_number + 1);
    size_t *recent = share->recent_nbytes, nbytes, at;

    recent[op->u.shared.call_number % 2] =
        op->algorithm == IDIST__ALGO_FLAT ? idist__flow_send_nbytes(t) : 0;
    nbytes = recent[0] > recent[1] ? recent[0] : recent[1];
    if (nbytes <= sizeof(idist__call_slot) - offsetof(idist__call_slot, u)) nbytes = 0;
    nbytes = idist__flow_min(nbytes, IDIST__PREFETCH_BYTES) + IDIST__LINE;
    for (at = 0; at < nbytes; at += IDIST__LINE) idist__os_cpu_prefetch_for_write(next + at);
}

// Writes our previous call to the slot, if that call used messages. A rank that made a different
// previous call needs our previous call for its error text.
static void idist__slot_tell_previous(const idist__task *t, const idist__fingerprint *fingerprint) {
    const idist__op *op = idist__op_of(t);
    const idist__fingerprint *before = idist__history_before(t->group, fingerprint);

    if (before && (before->algorithm & ~IDIST__ON_DEVICE) <= IDIST__ALGO_BANDWIDTH)
        *idist__region_previous_call(idist__region_share(t), op->rank, op->u.shared.call_number) =
            *before;
}

// Enters the call: fills in our slot and publishes it. Returns false if that was not possible; the
// group has then failed.
static bool idist__slot_enter(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    idist__call_slot *slot;
    idist__fingerprint fingerprint;
    uint32_t number = ++share->calls_entered;

    op->u.shared.call_number = number;
    slot = idist__region_slot(share, op->rank, number);

    if (op->algorithm == IDIST__ALGO_CHUNKED) {
        if (idist__kind_is_v(t->call.kind)) idist__slot_offer_counts(t, slot);
        else if (!idist__slot_offer_buffers(t, slot)) return false;
    } else if (idist__flow_contributes(op, t->call.kind, op->rank)) {
        idist__slot_write_payload(t);
    }

    fingerprint = idist__fingerprint_of_task(t, op->algorithm);
    idist__slot_tell_previous(t, &fingerprint);
    share->fingerprints[number % IDIST__REGION_SLOTS] = fingerprint;
    share->pasts[number % IDIST__REGION_SLOTS] = op->past;

    // Writes the fields before `u` last, and without a pause. The other ranks poll this line, and
    // would otherwise fetch it from our cache between two writes.
    slot->fingerprint = fingerprint;
    slot->past = op->past;
    idist__os_thread_handover();
    __atomic_store_n(&slot->call_number, number, __ATOMIC_RELEASE);
    idist__region_wake_members(share, t->group);

    idist__slot_prefetch_next(t);
    op->u.shared.entered = true;
    op->u.shared.next_rank = 0;

    return true;
}

// Compares the call of a rank with ours. In v-forms, also compares the count that only the two
// ranks know. Returns false if something differs; the group has then failed.
static bool idist__slot_agree(idist__task *t, int rank) {
    idist__op *op = idist__op_of(t);
    const idist__call_slot *slot =
        idist__region_slot(idist__region_share(t), rank, op->u.shared.call_number);
    uint64_t given, expected;
    char cause[400];

    if (!idist__slot_compare(t, rank, op->u.shared.call_number)) return false;

    if (!idist__kind_is_v(t->call.kind)) {
        idist__slot_locate(t, rank, slot);
        return true;
    }

    if (slot->u.parts.largest > op->u.shared.largest_count)
        op->u.shared.largest_count = (size_t)slot->u.parts.largest;
    if (!idist__flow_contributes(op, t->call.kind, rank) || !idist__flow_reads(t, rank))
        return true;

    given = ((const uint64_t *)(const void *)(slot + 1))[op->rank];
    expected = idist__slot_pair(t, idist__flow_recv_count(t, rank));
    if (given == expected) return true;

    idist__explain_pair(t->group->ranks[rank], given, t->group->ranks[op->rank], expected, t, cause,
                        sizeof cause);
    idist__ring_fail(idist__ring_of(t->group->w), t->group, IDIST_ERR_MISMATCH, cause);

    return false;
}

// Returns true if the ranks that we read from have entered this call, or all ranks if `all` is
// true. Also returns false if a rank's call differs from ours; the group has then failed.
static bool idist__slot_all_entered(idist__task *t, bool all) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    bool compared_all = true;
    int i;

    for (; op->u.shared.next_rank < op->n; op->u.shared.next_rank++) {
        int rank = op->u.shared.next_rank;
        if (rank == op->rank) continue;
        if (!all && !idist__flow_reads(t, rank)) continue;
        op->u.shared.awaited = rank;
        if (!idist__slot_has_entered(share, rank, op->u.shared.call_number)) return false;
        if (!idist__slot_agree(t, rank)) return false;
    }

    op->u.shared.next_rank = 0;
    for (i = 0; i < op->n && compared_all; i++)
        compared_all = all || i == op->rank || idist__flow_reads(t, i);
    if (compared_all) share->compared_calls = op->u.shared.call_number;

    return true;
}

// Completes the call. The group's next shared call becomes the first in the queue.
static void idist__slot_leave(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    share->first = op->u.shared.next;
    if (!share->first) share->last = NULL;
    idist__op_done(t);
}

// ---- ring/share/fetch.h --------------------------------------------------------------------------

// ring/share/fetch.h: reads contributions and reduces them

// Returns the address from which we read block `to` of a rank's contribution, from element `at` on.
static const char *idist__fetch_source(const idist__task *t, int rank, int to, size_t at) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    bool per_rank = idist__kind_gives_blocks(t->call.kind);
    size_t block = per_rank ? (size_t)to : 0, within;

    if (rank == op->rank && t->call.part_count) return idist__flow_place(t, NULL, at, 1, &within);
    if (rank == op->rank && !idist__flow_is_scaled(op))
        return idist__flow_send_at(t, to) + at * op->size;
    if (op->algorithm == IDIST__ALGO_FLAT) return idist__slot_payload(t, rank) + block * op->nbytes;
    if (share->locations[rank].send)
        return share->locations[rank].send + block * op->nbytes + at * op->size;

    within = at - op->u.shared.chunk * op->u.shared.chunk_count;
    return idist__region_buffer(share, rank, op->u.shared.first_chunk + op->u.shared.chunk) +
           (block * op->u.shared.chunk_count + within) * op->size;
}

// Computes out = in[0] (op) ... (op) in[n - 1] with the user's function. `out` may be one of the
// operands. The function overwrites its second operand, so we reduce into a copy of the last
// operand, from right to left and in pieces. Returns false if the function threw an exception; the
// group has then failed.
static bool idist__fetch_reduce_user(const idist__task *t, void *out, const void *const *in, int n,
                                     size_t count) {
    const idist__op *op = idist__op_of(t);
    uint64_t piece[IDIST__OP_PIECE / sizeof(uint64_t)];
    size_t at, k, most = sizeof piece / op->size; // NOLINT(clang-analyzer-core.DivideZero)
    int i;

    for (at = 0; at < count; at += k) {
        k = idist__flow_min(count - at, most);
        memcpy(piece, (const char *)in[n - 1] + at * op->size, k * op->size);
        for (i = n - 2; i >= 0; i--)
            if (!idist__combine_by_user(t, (const char *)in[i] + at * op->size, piece, k,
                                        t->call.dtype))
                return false;
        memcpy((char *)out + at * op->size, piece, k * op->size);
    }

    return true;
}

// Reduces n operands into `out`. Returns false if the group has failed.
static bool idist__fetch_reduce(const idist__task *t, void *out, const void *const *in, int n,
                                size_t count) {
    const idist__op *op = idist__op_of(t);

    if (op->user && op->user->fn) return idist__fetch_reduce_user(t, out, in, n, count);

    idist__reduce_many(out, in, n, count, t->call.dtype, op->user ? IDIST_SUM : t->call.op,
                       t->call.op == IDIST_AVG ? op->n : 0);
    return true;
}

// Copies from an address in another rank's memory. Returns false if the group has failed. Also
// returns false if that rank has left the call; an ABORT from that rank, with the reason, will then
// arrive.
static bool idist__fetch_remote(idist__task *t, int rank, uint64_t address, char *buf,
                                size_t nbytes) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int world_rank = t->group->ranks[rank];
    int err =
        idist__segment_read_remote(share->shm, share->shm->local[world_rank], address, buf, nbytes);
    char cause[300];

    if (!err) return true;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!idist__slot_is_current(share, rank, op->u.shared.call_number)) return false;

    snprintf(cause, sizeof cause,
             err == ESRCH ? "rank %d on %s was lost: its process ended"
                          : "the buffer of rank %d on %s cannot be read: %s",
             world_rank, t->group->w->nodes[world_rank].hostname, strerror(err));
    idist__ring_fail(idist__ring_of(t->group->w), t->group,
                     err == ESRCH ? IDIST_ERR_PEER_LOST : IDIST_ERR_SYSTEM, cause);

    return false;
}

// Returns the address of block `to` of a rank's contribution, from element `at` on, in the memory
// of that rank. Returns 0 if we do not read the contribution from that memory.
static uint64_t idist__fetch_remote_source(const idist__task *t, int rank, int to, size_t at) {
    const idist__op *op = idist__op_of(t);
    uint64_t address;

    if (!op->u.shared.remote || rank == op->rank) return 0;
    address = idist__region_share(t)->locations[rank].remote_send;
    if (!address) return 0;

    return address + (idist__kind_gives_blocks(t->call.kind) ? (size_t)to * op->nbytes : 0) +
           at * op->size;
}

// Reduces `count` elements of block `to`, from element `at` on, over the contributions of the first
// n ranks. Contributions in the memory of other processes are first copied to our memory, in
// pieces.
static bool idist__fetch_sum(idist__task *t, char *out, int n, int to, size_t at, size_t count) {
    const idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t done, k, most = count;
    int i;

    if (op->u.shared.remote)
        most = IDIST__REMOTE_PIECE / op->size; // NOLINT(clang-analyzer-core.DivideZero)

    for (done = 0; done < count; done += k) {
        k = idist__flow_min(count - done, most);

        for (i = 0; i < n; i++) {
            char *piece = share->shm->remote_pieces + (size_t)i * IDIST__REMOTE_PIECE;
            uint64_t address = idist__fetch_remote_source(t, i, to, at + done);

            if (address && !idist__fetch_remote(t, i, address, piece, k * op->size)) return false;
            share->operands[i] = address ? piece : idist__fetch_source(t, i, to, at + done);
        }

        if (!idist__fetch_reduce(t, out + done * op->size, share->operands, n, k)) return false;
    }

    return true;
}

// Reduces the contributions of the first n ranks in the slots of a FLAT call.
static bool idist__fetch_sum_flat(const idist__task *t, int n) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    size_t given = idist__flow_send_nbytes(t);
    size_t at = given <= IDIST__INLINE_BYTES ? offsetof(idist__call_slot, u) : IDIST__LINE;
    int i;

    if (given > op->nbytes) at += (size_t)op->rank * op->nbytes; // our block of each contribution
    for (i = 0; i < n; i++)
        share->operands[i] =
            (const char *)idist__region_slot(share, i, op->u.shared.call_number) + at;
    if (op->rank < n && !idist__flow_is_scaled(op))
        share->operands[op->rank] = idist__flow_send_at(t, op->rank);
    return idist__fetch_reduce(t, op->out, share->operands, n, op->count);
}

// Returns the number of contributions, from rank 0 on, that are reduced into our result.
static int idist__fetch_operand_count(const idist__task *t) {
    const idist__op *op = idist__op_of(t);

    if (t->call.kind == IDIST__SCAN) return op->rank + 1;
    if (t->call.kind == IDIST__EXSCAN) return op->rank;
    return op->n;
}

// Copies our block of each rank's contribution, from element `at` on.
static bool idist__fetch_blocks(idist__task *t, size_t at) {
    const idist__op *op = idist__op_of(t);
    int i;

    for (i = 0; i < op->n; i++) {
        int from = idist__block_wrap(op->rank + i, op->n); // a different start for each rank
        uint64_t address;
        size_t count;
        char *to;

        if (!idist__flow_reads(t, from)) continue;
        count = idist__flow_chunk_count(op, idist__flow_recv_count(t, from), at);
        if (!count) continue;

        to = idist__flow_recv_at(t, from) + at * op->size;
        address = idist__fetch_remote_source(t, from, op->rank, at);
        if (address && !idist__fetch_remote(t, from, address, to, count * op->size)) return false;
        if (!address)
            idist__block_copy(to, idist__fetch_source(t, from, op->rank, at), count * op->size);
    }

    return true;
}

// Copies or reduces the data that this rank needs from the chunk at element `at`, or from a FLAT
// call. idist__split_reduce_run does not use this function.
static bool idist__fetch_chunk(idist__task *t, size_t at) {
    const idist__op *op = idist__op_of(t);
    int n = idist__fetch_operand_count(t);
    size_t count;

    if (t->call.kind == IDIST__BARRIER) return true;
    if (!idist__kind_reduces(t->call.kind)) return idist__fetch_blocks(t, at);

    count = idist__flow_chunk_count(op, op->count, at); // reduce_scatterv: of our own block
    if ((t->call.kind == IDIST__REDUCE && op->rank != op->root) || !n || !count) return true;
    if (op->algorithm != IDIST__ALGO_FLAT)
        return idist__fetch_sum(t, op->out + at * op->size, n, op->rank, at, count);

    return idist__fetch_sum_flat(t, n);
}

// Returns true if the data that we have just read from the buffers of other ranks was valid. A rank
// that leaves the call with an error may reuse its buffers, but withdraws its slots first. An ABORT
// from that rank, with the reason, will then arrive.
static bool idist__fetch_was_valid(idist__task *t) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    __atomic_thread_fence(__ATOMIC_ACQUIRE);

    for (i = 0; i < op->n; i++) {
        if (i == op->rank || !idist__flow_reads(t, i)) continue;
        if (!idist__slot_is_current(share, i, op->u.shared.call_number)) return false;
    }

    return true;
}

// ---- ring/share/chunk.h --------------------------------------------------------------------------

// ring/share/chunk.h: runs shared calls, small ones at once and large ones in chunks
//
// Functions: idist__chunk_*, idist__flat_*.

//------------------------------------------------------------------------------
// collectives of small contributions
//
// Every rank writes its contribution to its slot. A contribution of at most 32 bytes fits into the
// slot's first cache line. Then the rank reads the slots of all other ranks and computes the result
// itself. All ranks reduce in the order of the ranks, so all get the same bits. Reading the slots
// takes one round of n - 1 cache misses. There is no synchronization at the end, because a slot is
// not reused before all ranks have read it.
//------------------------------------------------------------------------------

static void idist__flat_run(idist__task *t) {
    idist__op *op = idist__op_of(t);

    IDIST__CO_BEGIN(op)

    if (!op->u.shared.entered) {
        IDIST__CO_AWAIT(op, idist__slot_may_enter(t));
        idist__slot_enter(t);
    }

    IDIST__CO_AWAIT(op, idist__slot_all_entered(t, false));
    if (idist__fetch_chunk(t, 0)) idist__slot_leave(t);
    IDIST__CO_END(op)
}

//------------------------------------------------------------------------------
// collectives of large contributions, one chunk at a time
//
//   rank 0   expose 0   expose 1   take 0   expose 2   take 1   ...
//   rank 1   expose 0   expose 1   take 0   expose 2   take 1   ...
//
// A rank that exposes a chunk lets the other ranks read its part (EXPOSED in ring/share/region.h).
// A rank exposes up to one chunk ahead, so that no rank waits while there is something to copy. A
// rank writes to a buffer again only when all ranks have freed the chunk in that buffer.
//------------------------------------------------------------------------------

#define IDIST__CHUNK_OVERSUBSCRIBED ((size_t)128 * 1024)

// Returns true if all members have reached a milestone in all chunks before number `chunks`. If
// `only_sources` is true, checks only the members that we read from.
static bool idist__chunk_all_reached(idist__task *t, idist__milestone milestone, uint64_t chunks,
                                     bool only_sources) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    for (; op->u.shared.next_rank < op->n; op->u.shared.next_rank++) {
        int rank = op->u.shared.next_rank;
        if (rank == op->rank || (only_sources && !idist__flow_reads(t, rank))) continue;
        op->u.shared.awaited = rank;
        if (idist__region_reached(share, rank, milestone) < chunks) return false;
    }

    idist__os_thread_handover();
    op->u.shared.next_rank = 0;

    return true;
}

static bool idist__chunk_all(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    return idist__chunk_all_reached(t, milestone, chunks, false);
}

static bool idist__chunk_sources(idist__task *t, idist__milestone milestone, uint64_t chunks) {
    return idist__chunk_all_reached(t, milestone, chunks, true);
}

// Returns the number of elements in a cache line, or 1 if an element is larger than a line.
static size_t idist__chunk_line(const idist__op *op) {
    return op->size < IDIST__LINE ? IDIST__LINE / op->size
                                  : 1; // NOLINT(clang-analyzer-core.DivideZero)
}

// Returns the element at which block `b` of a chunk of `count` elements begins. Blocks consist of
// whole lines, so that no two ranks write to the same line.
static size_t idist__chunk_block_at(const idist__op *op, size_t count, int b) {
    size_t line = idist__chunk_line(op);
    size_t nlines = (count + line - 1) / line;

    return idist__flow_min(idist__block_at(nlines, op->n, b) * line, count);
}

// Copies elements of our contribution to a buffer.
static void idist__chunk_write(const idist__task *t, char *to, size_t at, size_t count) {
    const idist__op *op = idist__op_of(t);
    size_t run;

    for (; count; at += run, count -= run) {
        const char *from = idist__flow_place(t, (char *)op->in, at, count, &run);
        idist__region_write(idist__region_share(t), to, from, run * op->size);
        to += run * op->size;
    }
}

// Copies our part of a chunk to a buffer. If contributions are not scaled, leaves out the block
// that only we read. In a split reduction (ring/share/split_reduce.h), this is the block that we
// reduce. In other calls, it is the block for ourselves.
static void idist__chunk_copy(idist__task *t, size_t chunk) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    char *buffer = idist__region_buffer(share, op->rank, op->u.shared.first_chunk + chunk);
    bool per_rank = idist__kind_gives_blocks(t->call.kind), scaled = idist__flow_is_scaled(op);
    size_t at = chunk * op->u.shared.chunk_count;
    int to;

    if (idist__flow_is_split(op, t->call.kind) && !scaled) {
        size_t count = idist__flow_chunk_count(op, op->count, at);
        size_t begin = idist__chunk_block_at(op, count, op->rank),
               end = idist__chunk_block_at(op, count, op->rank + 1);
        idist__chunk_write(t, buffer, at, begin);
        idist__chunk_write(t, buffer + end * op->size, at + end, count - end);
        return;
    }

    for (to = 0; to < (per_rank ? op->n : 1); to++) {
        size_t count = idist__flow_chunk_count(op, idist__flow_send_count(t, to), at);
        char *block = buffer + (size_t)to * op->u.shared.chunk_count * op->size;

        if (per_rank && to == op->rank && !scaled) continue;
        idist__region_write(share, block, idist__flow_send_at(t, to) + at * op->size,
                            count * op->size);
        idist__slot_scale(t, block, count);
    }
}

// Exposes the current chunk and, if a buffer is free, the next chunk. Returns true if the current
// chunk is exposed.
static bool idist__chunk_expose(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__shared_op *shared = &op->u.shared;
    bool copies = idist__flow_contributes(op, t->call.kind, op->rank) && !shared->in_place;

    while (shared->exposed < shared->nchunks && shared->exposed < shared->chunk + 2) {
        uint64_t number = shared->first_chunk + shared->exposed;

        if (copies && number >= IDIST__BUFFERS &&
            !idist__chunk_all(t, IDIST__FREED, number - IDIST__BUFFERS + 1))
            break;
        if (copies) idist__chunk_copy(t, shared->exposed);
        shared->exposed++;
        idist__region_publish(t, IDIST__EXPOSED, number + 1);
    }

    return shared->exposed > shared->chunk;
}

// Returns the size of a chunk. Chunks are smaller on an oversubscribed host, whose ranks share the
// caches.
static size_t idist__chunk_nbytes(const idist__share *share) {
    return share->shm->oversubscribed
               ? idist__flow_min(share->chunk_nbytes, IDIST__CHUNK_OVERSUBSCRIBED)
               : share->chunk_nbytes;
}

// Returns true if elements of this size fit into chunks, and into the pieces in which they are
// reduced.
static bool idist__chunk_takes(const idist_group *g, const idist__share *share, size_t size) {
    return size <= IDIST__OP_PIECE && size <= idist__chunk_nbytes(share) / (size_t)g->size;
}

// Determines the size and number of the chunks of a call.
static void idist__chunk_plan(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t nblocks = idist__kind_gives_blocks(t->call.kind) ? (size_t)op->n : 1;
    size_t count = idist__kind_is_v(t->call.kind) ? op->u.shared.largest_count : op->count;
    size_t line = idist__chunk_line(op);
    size_t nbytes = idist__chunk_nbytes(share), chunk_count;

    chunk_count = nbytes / nblocks / op->size;
    if (chunk_count > line) chunk_count -= chunk_count % line;
    if (op->u.shared.remote && !idist__kind_reduces(t->call.kind))
        chunk_count = count; // one chunk, because no buffers are used

    op->u.shared.chunk_count = chunk_count;
    op->u.shared.nchunks = count ? (count - 1) / chunk_count + 1 : 1;
    op->u.shared.first_chunk = share->chunks_done;
    op->u.shared.next_rank = 0;
}

static void idist__chunk_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__shared_op *shared = &op->u.shared;

    IDIST__CO_BEGIN(op)
    IDIST__CO_AWAIT(op, idist__slot_may_enter(t));
    if (!idist__slot_enter(t)) return;

    if (idist__kind_is_v(t->call.kind)) {
        IDIST__CO_AWAIT(op, idist__slot_all_entered(t, true));
        idist__chunk_plan(t);
    } else {
        idist__chunk_plan(t);
        idist__chunk_expose(t);
        shared->next_rank = 0;
        IDIST__CO_AWAIT(op, idist__slot_all_entered(t, false));
    }

    for (shared->chunk = 0; shared->chunk < shared->nchunks; shared->chunk++) {
        IDIST__CO_AWAIT(op, idist__chunk_expose(t));
        shared->next_rank = 0;
        IDIST__CO_AWAIT(op, idist__chunk_sources(t, IDIST__EXPOSED,
                                                 shared->first_chunk + shared->chunk + 1));
        if (!idist__fetch_chunk(t, shared->chunk * shared->chunk_count)) return;
        if (!idist__fetch_was_valid(t)) return;
        idist__region_publish(t, IDIST__FREED, shared->first_chunk + shared->chunk + 1);
    }

    if (shared->in_place) // the caller may change its buffer once we return
        IDIST__CO_AWAIT(op,
                        idist__chunk_all(t, IDIST__FREED, shared->first_chunk + shared->nchunks));

    idist__region_share(t)->chunks_done = shared->first_chunk + shared->nchunks;
    idist__slot_leave(t);
    IDIST__CO_END(op)
}

// ---- ring/share/split_reduce.h -------------------------------------------------------------------

// ring/share/split_reduce.h: all_reduce and reduce in which each rank reduces one block
//
// The algorithm is a reduce-scatter followed by an all-gather in the same buffer. Each rank reads
// 1/n of every contribution, and 1/n of the result from every other rank. So the call uses all
// cores and the whole memory bandwidth. There are three variants:
//
//   through buffers   expose a chunk; reduce our block of the chunk into our buffer; copy the other
//                     blocks out of the buffers of the other ranks
//   direct            all buffers of an all_reduce are in windows: reduce our block of all
//                     contributions, write it to the results of all ranks. Every byte is read once
//                     and written once
//   cross-memory      reduce our block into our own result; read the other blocks from the results
//                     of the other ranks

#define IDIST__DIRECT_PIECE ((size_t)16384) // so that a piece stays in the first-level cache

static bool idist__split_reduce_sum_block(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = op->u.shared.chunk * op->u.shared.chunk_count,
           chunk_count = idist__flow_chunk_count(op, op->count, at),
           begin = idist__chunk_block_at(op, chunk_count, op->rank),
           count = idist__chunk_block_at(op, chunk_count, op->rank + 1) - begin;
    char *buffer =
        idist__region_buffer(share, op->rank, op->u.shared.first_chunk + op->u.shared.chunk);
    char *sum = buffer + begin * op->size, *out = op->out + (at + begin) * op->size;
    size_t run;

    if (!count) return true;

    if (t->call.kind == IDIST__REDUCE) // only the root needs the result
        return idist__fetch_sum(t, op->rank == op->root ? out : sum, op->n, 0, at + begin, count);

    for (at += begin; count; at += run, count -= run) {
        out = idist__flow_place(t, op->out, at, count, &run);
        if (!idist__fetch_sum(t, out, op->n, 0, at, run)) return false;
        idist__region_write(share, sum, out, run * op->size);
        sum += run * op->size;
    }

    return true;
}

// Copies elements from a buffer to our result.
static void idist__split_reduce_take(const idist__task *t, const char *from, size_t at,
                                     size_t count) {
    const idist__op *op = idist__op_of(t);
    size_t run;

    for (; count; at += run, count -= run) {
        char *to = idist__flow_place(t, op->out, at, count, &run);
        idist__block_copy(to, from, run * op->size);
        from += run * op->size;
    }
}

// Copies to our result the blocks of a chunk that the other ranks have reduced.
static void idist__split_reduce_take_blocks(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = op->u.shared.chunk * op->u.shared.chunk_count,
           count = idist__flow_chunk_count(op, op->count, at);
    int i;

    if (t->call.kind == IDIST__REDUCE && op->rank != op->root) return;

    for (i = 0; i < op->n; i++) {
        size_t begin = idist__chunk_block_at(op, count, i),
               end = idist__chunk_block_at(op, count, i + 1);
        const char *buffer =
            idist__region_buffer(share, i, op->u.shared.first_chunk + op->u.shared.chunk);

        if (i == op->rank) continue;
        idist__split_reduce_take(t, buffer + begin * op->size, at + begin, end - begin);
    }
}

// Returns true if all buffers are in windows.
static bool idist__split_reduce_is_direct(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    for (i = 0; i < op->n; i++)
        if (!share->locations[i].send || !share->locations[i].recv) return false;
    return true;
}

// Reduces our block of all contributions into the results of all ranks. Before each piece is
// written to the other ranks, checks that all ranks are still in the call, because a rank that has
// left may reuse its buffer.
static bool idist__split_reduce_sum_direct(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);
    size_t at = idist__chunk_block_at(op, op->count, op->rank),
           end = idist__chunk_block_at(op, op->count, op->rank + 1), k;
    int i;

    for (; at < end; at += k) {
        char *out = op->out + at * op->size;

        k = idist__flow_min(end - at, IDIST__DIRECT_PIECE / op->size);
        if (!idist__fetch_sum(t, out, op->n, 0, at, k)) return false;
        if (!idist__fetch_was_valid(t)) return false;
        for (i = 0; i < op->n; i++)
            if (i != op->rank)
                idist__pace_copy(&share->shm->window_pace, share->locations[i].recv + at * op->size,
                                 out, k * op->size);
    }

    return true;
}

// Reduces our block of all contributions into our own result.
static bool idist__split_reduce_sum_remote(idist__task *t) {
    idist__op *op = idist__op_of(t);
    size_t at = idist__chunk_block_at(op, op->count, op->rank),
           end = idist__chunk_block_at(op, op->count, op->rank + 1);

    return idist__fetch_sum(t, op->out + at * op->size, op->n, 0, at, end - at);
}

// Reads, from the results of the other ranks, the blocks that those ranks have reduced.
static bool idist__split_reduce_take_remote(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__share *share = idist__region_share(t);
    int i;

    for (i = 1; i < op->n; i++) {
        int from = idist__block_wrap(op->rank + i, op->n);
        size_t at = idist__chunk_block_at(op, op->count, from) * op->size,
               end = idist__chunk_block_at(op, op->count, from + 1) * op->size;

        if (end > at && !idist__fetch_remote(t, from, share->locations[from].remote_recv + at,
                                             op->out + at, end - at))
            return false;
    }

    return true;
}

static bool idist__split_reduce_sum_in_place(idist__task *t) {
    bool summed = idist__op_of(t)->u.shared.remote ? idist__split_reduce_sum_remote(t)
                                                   : idist__split_reduce_sum_direct(t);

    return summed && idist__fetch_was_valid(t);
}

// Returns true if each rank can read the results of all other ranks through the kernel. The result
// is the same on all ranks.
static bool idist__split_reduce_is_remote(const idist__task *t) {
    const idist__share *share = idist__region_share(t);
    int i;

    if (!idist__op_of(t)->u.shared.remote) return false;
    for (i = 0; i < t->group->size; i++)
        if (!share->locations[i].remote_recv) return false;

    return true;
}

// Chooses between direct and cross-memory. Returns false if the call goes through buffers.
static bool idist__split_reduce_skips_buffers(idist__task *t) {
    idist__shared_op *shared = &idist__op_of(t)->u.shared;
    bool direct;

    if (t->call.kind != IDIST__ALL_REDUCE) return false;
    direct = idist__split_reduce_is_direct(t);
    if (!direct && !idist__split_reduce_is_remote(t)) return false;

    shared->remote = !direct;
    shared->direct = direct;
    shared->nchunks = 1;

    return true;
}

static void idist__split_reduce_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__shared_op *shared = &op->u.shared;
    // Value that the progress counters reach with the current chunk.
    uint64_t next = shared->first_chunk + shared->chunk + 1;

    IDIST__CO_BEGIN(op)
    IDIST__CO_AWAIT(op, idist__slot_may_enter(t));
    if (!idist__slot_enter(t)) return;
    idist__chunk_plan(t);
    // If our contribution is not read in place, the call goes through buffers on all ranks.
    if (!shared->in_place) idist__chunk_expose(t);
    shared->next_rank = 0;
    IDIST__CO_AWAIT(op, idist__slot_all_entered(t, false));

    if (idist__split_reduce_skips_buffers(t)) {
        if (!idist__split_reduce_sum_in_place(t)) return;
        idist__region_publish(t, IDIST__REDUCED, shared->first_chunk + 1);
        IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__REDUCED, shared->first_chunk + 1));
        if (shared->remote && !idist__split_reduce_take_remote(t)) return;
        if (shared->remote && !idist__fetch_was_valid(t)) return;
        idist__region_publish(t, IDIST__FREED, shared->first_chunk + 1);
        if (shared->remote)
            IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__FREED, shared->first_chunk + 1));
    } else {
        for (shared->chunk = 0; shared->chunk < shared->nchunks; shared->chunk++) {
            IDIST__CO_AWAIT(op, idist__chunk_expose(t));
            shared->next_rank = 0;
            next = shared->first_chunk + shared->chunk + 1;
            IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__EXPOSED, next));
            if (!idist__split_reduce_sum_block(t) || !idist__fetch_was_valid(t)) return;
            idist__region_publish(t, IDIST__REDUCED, next);
            if (t->call.kind == IDIST__ALL_REDUCE || op->rank == op->root)
                IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__REDUCED, next));
            idist__split_reduce_take_blocks(t);
            idist__region_publish(t, IDIST__FREED, next);
        }

        if (shared->in_place)
            IDIST__CO_AWAIT(op, idist__chunk_all(t, IDIST__REDUCED,
                                                 shared->first_chunk + shared->nchunks));
    }

    idist__region_share(t)->chunks_done = shared->first_chunk + shared->nchunks;
    idist__slot_leave(t);
    IDIST__CO_END(op)
}

// ---- ring/share/share.h --------------------------------------------------------------------------

// ring/share/share.h: chooses, starts, progresses and cancels shared calls
//
// WHAT IT IS
//
// Shared calls are collectives of a group whose members all run on one host. Each member owns a
// region of shared memory that the other members can read. A member writes its contribution and its
// progress to its own region, and reads the regions of the other members. Members do not write to
// the regions of other members during calls, so there are no locks.
//
// HOW IT FITS
//
// ring/algo/choose.h decides how a call runs. The algorithms FLAT and CHUNKED are implemented here.
// All other algorithms are in ring/algo/.
//
// A SMALL ALL_REDUCE (up to 4 KiB, FLAT)
//
// idist__share_quick         runs the call at once if no other call is running
// idist__slot_may_enter      checks that all ranks have read the slot to be overwritten
// idist__slot_enter          writes fingerprint and contribution to our slot, publishes its number
// idist__slot_all_entered    polls the slots of the other ranks, compares their fingerprints
// idist__fetch_chunk         reduces all slots, in rank order, into the result
//
// A LARGE ALL_REDUCE (CHUNKED)
//
// idist__share_start         queues the task behind the group's other shared calls
// idist__split_reduce_run    a coroutine, resumed by idist__share_progress:
//   idist__slot_enter                publishes the slot, which has the locations of our buffers
//   idist__chunk_expose              copies our part of chunk i to buffer i % 3, publishes EXPOSED
//   idist__split_reduce_sum_block    reduces our block of the chunk over all ranks; then REDUCED
//   idist__split_reduce_take_blocks  copies the other ranks' blocks to our result; then FREED
// idist__slot_leave          completes the task; the next shared call becomes the first
//
// SOURCES
//
// Flat slots: Graham and Shipman, "MPI Support for Multi-core Architectures", 2008. Chunks, with
// reduce-scatter and all-gather in one buffer: Jain et al., "Framework for Scalable Intra-Node
// Collective Operations using Shared Memory", 2018.

#define IDIST__WRITERS_MS 100

static bool idist__share_serves(idist__algorithm algorithm) {
    return algorithm == IDIST__ALGO_FLAT || algorithm == IDIST__ALGO_CHUNKED;
}

// Returns FLAT or CHUNKED, or AUTO if the call does not use shared memory. The result is the same
// on all members.
static idist__algorithm idist__share_choose(const idist_group *g, const idist__call *call) {
    const idist__share *share = idist__ring_group_of(g)->share;
    int setting = g->w->cfg.algorithm;
    size_t nbytes;
    bool scaled = idist__reduce_op_is_user(call->op) && idist__kind_reduces(call->kind) &&
                  !idist__world_user_op(g, call)->fn;

    if (!share || setting == IDIST__ALGO_LATENCY || setting == IDIST__ALGO_BANDWIDTH)
        return IDIST__ALGO_AUTO;
    if (scaled && idist__dtype_is_narrow(call->dtype)) return IDIST__ALGO_AUTO;
    if (call->kind != IDIST__ALL_TO_ALLV && call->kind != IDIST__BARRIER &&
        !idist__chunk_takes(g, share, idist_dtype_size(call->dtype)))
        return IDIST__ALGO_AUTO;
    if (idist__kind_is_v(call->kind))
        return (size_t)g->size * sizeof(uint64_t) <= IDIST__FLAT_BYTES ? IDIST__ALGO_CHUNKED
                                                                       : IDIST__ALGO_AUTO;

    if (setting == IDIST__ALGO_CHUNKED && call->count) return IDIST__ALGO_CHUNKED;
    if (!call->count) return IDIST__ALGO_FLAT;
    if (call->count > IDIST__FLAT_BYTES)
        return IDIST__ALGO_CHUNKED; // before the product can overflow
    nbytes = call->count * idist_dtype_size(call->dtype);
    if (idist__kind_gives_blocks(call->kind)) nbytes *= (size_t)g->size;

    return nbytes <= IDIST__FLAT_BYTES ? IDIST__ALGO_FLAT : IDIST__ALGO_CHUNKED;
}

// Returns true if the buffer of a call may be in parts. This requires that the call goes through
// our shared buffers, block by block.
static bool idist__share_takes_parts(const idist_group *g, const idist__call *call) {
    size_t n = (size_t)g->size, nbytes = call->count * idist_dtype_size(call->dtype);

    if (call->kind != IDIST__ALL_REDUCE || idist__reduce_op_is_user(call->op)) return false;
    if (n * n * nbytes <= IDIST__SPLIT_BYTES || nbytes >= IDIST__REMOTE_REDUCTION) return false;

    return idist__share_choose(g, call) == IDIST__ALGO_CHUNKED;
}

// Converts the counts and displacements of an all_to_allv to bytes, because each pair of ranks may
// use a different dtype. Returns false if memory is exhausted.
static bool idist__share_count_bytes(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__call *call = &t->call;
    size_t n = (size_t)op->n, *counts, i;

    counts = (size_t *)idist__mem_raw(&t->group->w->cfg.mem, 4 * n * sizeof *counts);
    if (!counts) return false;

    for (i = 0; i < n; i++) {
        counts[i] = call->sendcounts[i] * op->size;
        counts[n + i] = idist__extent_displ(call->sendcounts, call->senddispls, (int)i) * op->size;
        counts[2 * n + i] = call->recvcounts[i] * op->size;
        counts[3 * n + i] =
            idist__extent_displ(call->recvcounts, call->recvdispls, (int)i) * op->size;
    }

    op->memory = (char *)counts;
    op->size = 1;
    call->sendcounts = counts;
    call->senddispls = counts + n;
    call->recvcounts = counts + 2 * n;
    call->recvdispls = counts + 3 * n;

    return true;
}

// Sets up the operands of a shared call. Shared calls do not widen narrow floats, unlike the
// algorithms over messages. Returns false if memory is exhausted.
static bool idist__share_prepare(idist__task *t, idist__algorithm algorithm) {
    idist__op *op = idist__op_of(t);
    idist__kind kind = t->call.kind;

    idist__op_prepare(t);
    op->algorithm = algorithm;
    op->u.shared.chunk_count = op->count;
    if (kind == IDIST__BROADCAST) op->in = op->out;

    if ((kind == IDIST__GATHERV || kind == IDIST__SCATTERV) && op->rank != op->root) {
        // Counts and displacements are valid only on the root.
        t->call.sendcounts = t->call.senddispls = NULL;
        t->call.recvcounts = t->call.recvdispls = NULL;
    }

    return kind != IDIST__ALL_TO_ALLV || idist__share_count_bytes(t);
}

// Queues a call behind the group's other shared calls. Starts the call if it is the first one.
static void idist__share_start(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__share *share = idist__region_share(t);

    if (op->algorithm == IDIST__ALGO_FLAT) op->run = idist__flat_run;
    else if (idist__flow_is_split(op, t->call.kind)) op->run = idist__split_reduce_run;
    else op->run = idist__chunk_run;

    if (share->entered_early) {
        op->u.shared.call_number = share->calls_entered;
        op->u.shared.entered = true;
        share->entered_early = false;
    }

    if (share->last) idist__op_of(share->last)->u.shared.next = t;
    else share->first = t;
    share->last = t;
    if (share->first == t) idist__op_run(t);
}

// Discards the failure that idist__share_quick records if our slot differs from another rank's
// slot. That function has not read the links. Another rank may have aborted the group, and this
// rank may not know that yet. So the call starts as usual: it first reads the links, and then
// compares again.
static void idist__share_reconsider(idist__ring *ring) {
    if (!ring->failed) return;
    ring->failed = NULL;
    ring->last_start_ns = 0;
}

// Runs a small blocking collective in a preallocated task, without queuing the task or reading the
// clock, if no other shared call of the group is running. Returns false if the call must start as
// usual. We may then already have entered the call (entered_early).
static bool idist__share_quick(idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__share *share = idist__ring_group_of(g)->share;
    idist__task *t;
    const idist__fingerprint *fingerprint;
    int turns;

    if (!share || share->first || ring->failed) return false;
    if (idist__share_choose(g, call) != IDIST__ALGO_FLAT) return false;
    if (idist__reduce_op_is_user(call->op) && idist__kind_reduces(call->kind))
        return false; // the user's function may throw

    t = share->quick_task;
    t->call = *call;
    t->seq = g->seq + 1;
    (void)idist__share_prepare(t, IDIST__ALGO_FLAT); // cannot fail: only a v-form needs memory
    idist__op_of(t)->past = idist__history_past(t);

    if (!idist__slot_may_enter(t)) {
        idist__share_reconsider(ring);
        return false;
    }

    idist__slot_enter(t);

    for (turns = 0; !idist__slot_all_entered(t, false); turns++) {
        if (idist__send_quick_wait(ring, turns)) continue;
        idist__share_reconsider(ring);
        share->entered_early = true;
        return false;
    }

    (void)idist__fetch_chunk(t, 0); // fails only if the user's op fails
    g->seq++;
    fingerprint = &share->fingerprints[share->calls_entered % IDIST__REGION_SLOTS];
    idist__history_append(idist__ring_group_of(g), fingerprint, idist__op_of(t)->past);

    return true;
}

// Resumes the first shared call of each group.
static void idist__share_progress(idist__ring *ring) {
    idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__share *share = g->rank >= 0 && g->impl ? idist__ring_group_of(g)->share : NULL;

        while (share && share->first) {
            const idist__task *t = share->first;
            idist__op_run(share->first);
            if (share->first == t || ring->failed) break;
        }

        if (ring->failed) break;
    }
}

// Returns the rank of this host whose next step we wait for, or -1 if we may also wait for anything
// else.
static int idist__share_awaited(const idist__ring *ring) {
    const idist__task *t = ring->w->tasks.running;
    const idist__share *share;

    if (!t || t->next || !idist__kind_is_collective(t->call.kind) || t->group->size == 1) return -1;
    if (!idist__share_serves(idist__op_of(t)->algorithm)) return -1;
    share = idist__region_share(t);
    if (!share || share->first != t) return -1;

    return ring->shm->local[t->group->ranks[idist__op_of(t)->u.shared.awaited]];
}

// Withdraws our slots after the group has failed here. A rank that is late must not continue with
// the contents of our slots. Instead, the rank reads its links and learns of the failure.
static void idist__share_withdraw(idist_group *g) {
    idist__share *share = idist__ring_group_of(g)->share;
    uint32_t i;

    for (i = 0; share && i < IDIST__REGION_SLOTS; i++)
        __atomic_store_n(&idist__region_slot(share, g->rank, i)->call_number,
                         share->calls_entered - ((uint32_t)1 << 30), __ATOMIC_RELEASE);

    __atomic_thread_fence(__ATOMIC_SEQ_CST); // before the caller may reuse its buffers
}

// Returns true if a member may still write to our result. A member checks our slot before it writes
// each piece.
static bool idist__share_may_write(const idist_group *g, const idist__op *op, int rank) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *share = idist__ring_group_of(g)->share;

    return rank != g->rank && ring->links[g->ranks[rank]].open &&
           idist__region_reached(share, rank, IDIST__REDUCED) <= op->u.shared.first_chunk &&
           idist__slot_is_current(share, rank, op->u.shared.call_number);
}

// Waits until no other member can write to our result. Called when a call in which other ranks
// write to our result (`direct`) ends early. The wait for a member ends when the member has written
// everything, has left the call itself, or is dead. This function checks for a death itself,
// because another rank may have reported the failure. A stopped rank would never finish, so all
// waits end after IDIST__WRITERS_MS.
static void idist__share_await_writers(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    const idist__share *share = idist__ring_group_of(g)->share;
    const idist__op *op = share && share->first ? idist__op_of(share->first) : NULL;
    int64_t until_ns = idist__os_clock_deadline(IDIST__WRITERS_MS);
    int i;

    if (!op || !op->u.shared.direct) return;

    for (i = 0; i < g->size; i++) {
        const idist__pipe_port *port = &ring->shm->ports[ring->shm->local[g->ranks[i]]];

        while (idist__share_may_write(g, op, i) && !idist__pipe_peer_gone(port) &&
               idist__os_clock_now_ns() < until_ns)
            idist__os_thread_yield();
    }
}

// Removes a call from the queue of its group.
static void idist__share_cancel(idist__task *t) {
    idist__share *share = idist__region_share(t);
    idist__task **at, *last = NULL;

    if (!share) return;
    for (at = &share->first; *at && *at != t; at = &idist__op_of(*at)->u.shared.next) last = *at;
    if (*at) *at = idist__op_of(t)->u.shared.next;
    if (share->last == t) share->last = last;
}

// Returns true if a call cannot complete before rank `rank` of the group enters the call, or an
// earlier call.
static bool idist__share_needs(const idist__task *t, int rank) {
    const idist__op *op = idist__op_of(t);
    const idist__shared_op *shared = &op->u.shared;
    idist__share *share = idist__region_share(t);
    uint64_t number = shared->first_chunk + shared->exposed; // number of the next chunk to expose

    if (!share || share->first != t) return false;
    if (!shared->entered) // see idist__slot_may_enter
        return !idist__slot_has_entered(share, rank, share->calls_entered + 1 - IDIST__SLOTS_AHEAD);
    if (idist__slot_has_entered(share, rank, shared->call_number)) return false;
    if (idist__flow_reads(t, rank)) return true;
    if (op->algorithm != IDIST__ALGO_CHUNKED) return false;
    if (!idist__flow_contributes(op, t->call.kind, op->rank)) return false;

    // We can continue only when the rank has read our contribution. If the contribution is read in
    // place, the rank must have read all of it. Otherwise it must have read the chunk whose buffer
    // we need next.
    if (shared->in_place) return true;
    if (shared->exposed >= shared->nchunks || number < IDIST__BUFFERS) return false;
    return idist__region_reached(share, rank, IDIST__FREED) < number - IDIST__BUFFERS + 1;
}

// Records, for error texts, the last call that every other rank has reached, as its slot shows.
static void idist__share_update_seen(const idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    int i, index;

    for (i = 0; rg->share && i < t->group->size; i++) {
        for (index = 0; index < IDIST__REGION_SLOTS; index++) {
            idist__call_slot *slot = idist__region_slot(rg->share, i, (uint32_t)index);
            uint32_t number = __atomic_load_n(&slot->call_number, __ATOMIC_ACQUIRE);
            idist__fingerprint fingerprint = slot->fingerprint;

            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (!number || __atomic_load_n(&slot->call_number, __ATOMIC_RELAXED) != number)
                continue; // its owner is writing
            if ((int32_t)(fingerprint.seq - rg->seen[i].seq) <= 0) continue;
            rg->seen[i].seq = fingerprint.seq;
            rg->seen[i].fingerprint = fingerprint;
        }
    }
}

// ---- ring/share/pool.h ---------------------------------------------------------------------------

// ring/share/pool.h: lends regions to groups
//
// Every rank has a few regions in the shared file. The world gets the first region of each rank
// without an exchange. Memory for this region is reserved from the start. Memory for the other
// regions is reserved when they are first needed, in the order of their numbers.
//
// A new group gets one region of each member. The members exchange the numbers of the regions that
// they offer (idist__pool_offer_region). If every member offers one, the group's collectives use
// these regions (idist__pool_meet). Otherwise the group's collectives use messages. A member that
// frees the group increments members_done in each of these regions. A region is free again when all
// members have done so. A member that never learned the numbers of the regions sends LEFT instead.

// Returns the head of a region. The first region of a rank has larger buffers than the other
// regions, and its head is in the front.
static char *idist__pool_head(const idist__segment *seg, int rank, int index) {
    char *second = idist__segment_part(seg, rank) + seg->buffers_at;
    size_t nbytes = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * seg->chunk_nbytes[1];

    if (index == 0) return idist__segment_front(seg, rank) + sizeof(idist__doorbell);
    second += IDIST__BUFFERS * seg->chunk_nbytes[0];
    return second + (size_t)(index - 1) * nbytes;
}

static char *idist__pool_buffers(const idist__segment *seg, int rank, int index) {
    if (index == 0) return idist__segment_part(seg, rank) + seg->buffers_at;
    return idist__pool_head(seg, rank, index) + IDIST__REGION_HEAD_BYTES;
}

static idist__region_progress *idist__pool_progress(const idist__segment *seg, int rank,
                                                    int index) {
    size_t at = IDIST__REGION_SLOTS * IDIST__SLOT_BYTES;
    return (idist__region_progress *)(void *)(idist__pool_head(seg, rank, index) + at);
}

// Reserves memory for one of our regions, if that has not been done before. Returns 0 or an errno.
static int idist__pool_reserve(idist__segment *seg, int index) {
    int error;
    const char *head = idist__pool_head(seg, seg->me, index);
    const char *buffers = idist__pool_buffers(seg, seg->me, index);
    size_t nbytes = IDIST__BUFFERS * seg->chunk_nbytes[index > 0];

    if (index < seg->reserved_count) return 0;
    error = idist__os_memory_reserve(seg->fd, (size_t)(head - seg->base), IDIST__REGION_HEAD_BYTES);
    if (!error) error = idist__os_memory_reserve(seg->fd, (size_t)(buffers - seg->base), nbytes);
    if (!error) seg->reserved_count = index + 1;

    return error;
}

// Clears the calls of the group that used this region of ours before. Contributions may stay in the
// slots, because ranks read them only in calls that have been entered.
static void idist__pool_clear(const idist__segment *seg, int index) {
    char *head = idist__pool_head(seg, seg->me, index);
    size_t at;

    for (at = 0; at < IDIST__REGION_SLOTS * IDIST__SLOT_BYTES; at += IDIST__SLOT_BYTES) {
        memset(head + at, 0, IDIST__LINE);
        memset(head + at + IDIST__LINE + IDIST__FLAT_BYTES, 0, IDIST__LINE);
    }

    memset(idist__pool_progress(seg, seg->me, index), 0, sizeof(idist__region_progress));
}

// Chooses the region that we offer to the other members of a new group. Returns 1 plus its number,
// or 0 if we offer none.
static uint64_t idist__pool_offer_region(idist_group *g) {
    idist__segment *seg = idist__ring_of(g->w)->shm;
    uint32_t nmembers = 0;
    int i;

    for (i = 0; seg && i < g->size; i++) nmembers += seg->local[g->ranks[i]] >= 0;
    if (nmembers < 2) return 0;
    if (g->status != IDIST_OK) return 0; // a member that knows of the failure may already have left

    for (i = 0; i < seg->region_count; i++) {
        if (seg->taken[i]) {
            const idist__region_progress *progress = idist__pool_progress(seg, seg->me, i);
            uint32_t done = __atomic_load_n(&progress->members_done, __ATOMIC_ACQUIRE);
            if (done < seg->region_members[i]) continue;
        }

        if (idist__pool_reserve(seg, i)) return 0;
        idist__pool_clear(seg, i);
        seg->taken[i] = true;
        seg->region_members[i] = nmembers;
        seg->region_groups[i] = g->ctx;
        return (uint64_t)i + 1;
    }

    return 0;
}

static void idist__pool_discard(const idist_allocator *mem, idist__share *share) {
    idist__mem_free(mem, share->quick_task);
    idist__mem_free(mem, share->heads);
    idist__mem_free(mem, share->buffers);
    idist__mem_free(mem, share->entered);
    idist__mem_free(mem, share->operands);
    idist__mem_free(mem, share->locations);
    idist__mem_free(mem, share);
}

// Counts a member that has freed the group without using the region that we offered for it.
static void idist__pool_member_left(const idist__ring *ring, uint64_t ctx) {
    idist__segment *seg = ring->shm;
    int i;

    for (i = 0; seg && i < seg->region_count; i++) {
        if (!seg->taken[i] || seg->region_groups[i] != ctx) continue;
        __atomic_fetch_add(&idist__pool_progress(seg, seg->me, i)->members_done, 1u,
                           __ATOMIC_RELEASE);
    }
}

// Sends LEFT to the other members on this host, because we no longer need their regions. We do not
// know the numbers of these regions, because the exchange of the numbers failed.
static void idist__pool_decline(const idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__frame frame;
    int i;

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__LEFT;
    frame.ctx = g->ctx;

    for (i = 0; i < g->size; i++) {
        if (i == g->rank) idist__pool_member_left(ring, g->ctx);
        else if (ring->shm->local[g->ranks[i]] >= 0)
            idist__link_control(ring, &ring->links[g->ranks[i]], &frame, NULL);
    }
}

// Releases the regions of the members when the group is freed.
static void idist__pool_leave(idist_group *g) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist__share *share = rg->share;
    int i;

    if (!rg->met && !g->inner && idist__ring_of(g->w)->shm) idist__pool_decline(g);
    if (!share) return;

    for (i = 0; i < g->size; i++) {
        if (!share->heads[i]) continue;
        __atomic_fetch_add(&idist__region_progress_of(share, i)->members_done, 1u,
                           __ATOMIC_RELEASE);
    }

    idist__pool_discard(&g->w->cfg.mem, share);
    rg->share = NULL;
}

static idist__share *idist__pool_new_share(const idist_allocator *mem, size_t size) {
    idist__share *share = (idist__share *)idist__mem_alloc(mem, sizeof *share);

    if (!share) return NULL;
    share->heads = (char **)idist__mem_alloc(mem, sizeof *share->heads * size);
    share->buffers = (char **)idist__mem_alloc(mem, sizeof *share->buffers * size);
    share->entered = (uint32_t *)idist__mem_alloc(mem, sizeof *share->entered * size);
    share->operands = (const void **)idist__mem_alloc(mem, sizeof *share->operands * size);
    share->locations = (idist__location *)idist__mem_alloc(mem, sizeof *share->locations * size);
    share->quick_task =
        (idist__task *)idist__mem_alloc(mem, sizeof(idist__task) + sizeof(idist__op));

    if (!share->heads || !share->buffers || !share->entered || !share->operands ||
        !share->locations || !share->quick_task) {
        idist__pool_discard(mem, share);
        return NULL;
    }

    return share;
}

// Sets up the shared calls of a group. `offers` contains 1 plus the number of the region that each
// member offers, or 0 if it offers none. If a member offers none, or the group is too large for the
// buffers, the group's collectives use messages.
static idist_status idist__pool_meet(idist_group *g, const uint64_t *offers) {
    idist__segment *seg = idist__ring_of(g->w)->shm;
    idist__share *share;
    int i;

    for (i = 0; i < g->size; i++) {
        if (!seg || seg->local[g->ranks[i]] < 0) break;
        if (!offers[i] || offers[i] > (uint64_t)seg->region_count) break;
    }

    if (i < g->size || (size_t)g->size * IDIST__LINE > seg->chunk_nbytes[1]) {
        if (seg && offers[g->rank]) seg->region_members[offers[g->rank] - 1] = 0; // free again
        return IDIST_OK;
    }

    share = idist__pool_new_share(&g->w->cfg.mem, (size_t)g->size);
    if (!share) return IDIST_ERR_NO_MEMORY;

    idist__ring_group_of(g)->share = share;
    share->shm = seg;
    share->chunk_nbytes = seg->chunk_nbytes[0];
    share->quick_task->group = g;
    share->quick_task->impl = share->quick_task + 1;

    for (i = 0; i < g->size; i++) {
        share->heads[i] = idist__pool_head(seg, seg->local[g->ranks[i]], (int)offers[i] - 1);
        share->buffers[i] = idist__pool_buffers(seg, seg->local[g->ranks[i]], (int)offers[i] - 1);
        // All members cut a call into the same chunks, which must fit into the buffers of the
        // smallest region.
        if (offers[i] > 1) share->chunk_nbytes = seg->chunk_nbytes[1];
    }

    return IDIST_OK;
}

// ---- ring/algo/stream.h --------------------------------------------------------------------------

// ring/algo/stream.h: pipelines that receive, reduce and forward chunks
//
// The bandwidth algorithms cut a block into chunks of IDIST__CHUNK_BYTES. So a rank can reduce and
// forward one chunk while it receives the next chunk:
//
//   receive   | c0 | c1 | c2 | c3 |
//   take           | c0 | c1 | c2 | c3 |          take: reduce into the result, for example
//   send                | c0 | c1 | c2 | c3 |
//
// Apart from the numbers of items, a stream is described by:
//
//   recv_at(i)   peer, address and size of item i to receive; address NULL for a scratch slot
//   take(i)      processes item i once it has arrived; NULL if there is nothing to do
//   send_at(i)   peer, address and size of item i to send
//   head         number of items that can be sent before anything has been received
//
// Item i is sent when i < head or item i - head has been taken. A rank in a ring first sends its
// own block, then forwards the items that it took. So head is the number of chunks in a block. An
// inner rank of a chain only forwards items, so head is 0. Items are taken in order. The tag of a
// message is the index of its item.
//
// Several receives are posted ahead, each in a slot. The sender may send a large chunk only when it
// knows that the receive is posted. So a network of high latency needs more slots: enough for the
// data in flight, plus two for the chunks that are being taken.

static size_t idist__stream_slot_count(const idist_group *g) {
    uint64_t under_way = idist__ring_group_of(g)->spans_hosts ? g->w->machine.network_nbytes : 0;
    uint64_t count = (under_way + IDIST__CHUNK_BYTES - 1) / IDIST__CHUNK_BYTES + 2;

    if (count < IDIST__SLOTS) return IDIST__SLOTS;
    return count < IDIST__SLOTS_MOST ? (size_t)count : IDIST__SLOTS_MOST;
}

static char *idist__stream_slot(const idist__op *op, size_t index) {
    const idist__stream_op *stream = &op->u.stream;
    return stream->slots + (index % op->slot_count) * stream->chunk_count * op->size;
}

static void idist__stream_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;

    for (;;) {
        while (stream->posted < stream->recv_total &&
               stream->posted < stream->taken + op->slot_count) {
            size_t index = stream->posted++;
            idist__item item = stream->recv_at(t, index);
            char *data = item.data;

            if (!data && stream->slots) data = idist__stream_slot(op, index);
            idist__recv_step(t, (int)(index % op->slot_count), item.peer, (uint32_t)index, data,
                             item.nbytes);
        }

        while (stream->sent < stream->send_total &&
               (stream->sent < stream->head || stream->sent - stream->head < stream->taken) &&
               op->sends_pending < (int)op->slot_count) {
            size_t index = stream->sent++;
            idist__item item = stream->send_at(t, index);
            idist__send_step(t, item.peer, (uint32_t)index, item.data, item.nbytes);
        }

        if (stream->taken == stream->posted ||
            (op->slots_pending & (1u << (stream->taken % op->slot_count))))
            break;
        if (stream->take) stream->take(t, stream->taken);
        stream->taken++;
    }

    if (stream->taken == stream->recv_total && stream->sent == stream->send_total &&
        !op->sends_pending)
        idist__op_done(t);
}

// Returns chunk `index` of a block of `count` elements. Chunks beyond the end of the block are
// empty.
static idist__item idist__stream_chunk(const idist__op *op, char *block, size_t count, size_t index,
                                       int peer) {
    const idist__stream_op *stream = &op->u.stream;
    idist__item item;
    size_t first = index * stream->chunk_count < count ? index * stream->chunk_count : count;
    size_t chunk_count = count - first < stream->chunk_count ? count - first : stream->chunk_count;

    item.peer = peer;
    item.data = block ? block + first * op->size : NULL;
    item.nbytes = chunk_count * op->size;

    return item;
}

// Cuts blocks of at most `count` elements into chunks.
static void idist__stream_cut(idist__op *op, size_t count) {
    idist__stream_op *stream = &op->u.stream;
    size_t chunk_count = IDIST__CHUNK_BYTES / (op->size ? op->size : 1);

    if (!chunk_count) chunk_count = 1; // an element is larger than a chunk
    stream->chunk_count = chunk_count;
    stream->block_chunks = 1;
    if (count) stream->block_chunks = (count - 1) / chunk_count + 1;
    if (stream->block_chunks == 1) stream->chunk_count = count ? count : 1;
}

static void idist__stream_begin(idist__op *op, size_t recv_count, size_t send_count, size_t head,
                                idist__item (*recv_at)(idist__task *, size_t),
                                idist__item (*send_at)(idist__task *, size_t),
                                void (*take)(idist__task *, size_t)) {
    idist__stream_op *stream = &op->u.stream;

    stream->recv_total = recv_count;
    stream->send_total = send_count;
    stream->head = head;
    stream->recv_at = recv_at;
    stream->send_at = send_at;
    stream->take = take;
    op->run = idist__stream_run;
}

// ---- ring/algo/ring_algo.h -----------------------------------------------------------------------

// ring/algo/ring_algo.h: all_reduce, reduce_scatter and all_gather of large messages
//
// The n ranks form a ring. Each rank sends to its right neighbor (rank + 1) and receives from its
// left neighbor (rank - 1). So every rank sends and receives all the time.
//
// all_reduce. The buffer is cut into n blocks, which travel around the ring twice. In step s, rank
// r sends block r - s (mod n) and receives block r - s - 1 (mod n):
//
//            first lap: reduce               second lap: copy
//            step 0   step 1   step 2        step 3   step 4   step 5
//   rank 0   sends 0  sends 3  sends 2  ->1  sends 1  sends 0  sends 3
//   rank 1   sends 1  sends 0  sends 3  ->2  sends 2  sends 1  sends 0      ->b: holds the complete
//   rank 2   sends 2  sends 1  sends 0  ->3  sends 3  sends 2  sends 1           sum of block b
//   rank 3   sends 3  sends 2  sends 1  ->0  sends 0  sends 3  sends 2
//
// In the first lap, a rank adds its own part to each block that it receives, and forwards the sum.
// After n - 1 steps, every rank holds the complete sum of one block. The second lap distributes
// these sums to all ranks.
//
//   bytes sent per rank   2 B (n - 1) / n, the least possible for any n
//   latency               2 (n - 1) messages in sequence, so doubling is faster for small B
//
// No data is copied beforehand. The first sends read the send buffer directly, and sums are written
// directly to the receive buffer. Working in place is safe, because the second lap overwrites a
// block only with data that depends on our first send of this block.
//
// reduce_scatter is the first lap alone, in (n - 1) messages of B bytes. Each rank begins one block
// earlier, so that rank r ends up with block r. Partial sums stay in scratch memory. The last sum
// is written to the receive buffer.
//
// all_gather and all_gatherv are the second lap alone, in (n - 1) messages of B bytes.
//
// A reduction starts at a different rank for each block, so the operation must commute.
//
// COSTS in ring/algo/choose.h defines B.

// Returns the block that item `index` belongs to: our rank, minus the step of the item, minus
// `back` (mod n).
static int idist__ring_algo_block(const idist__op *op, size_t index, int back) {
    return idist__block_wrap(op->rank - (int)(index / op->u.stream.block_chunks) - back, op->n);
}

static int idist__ring_algo_left(const idist__op *op) {
    return idist__block_wrap(op->rank - 1, op->n);
}

static int idist__ring_algo_right(const idist__op *op) {
    return idist__block_wrap(op->rank + 1, op->n);
}

// ---- all_reduce ----

static bool idist__ring_algo_in_first_lap(const idist__op *op, size_t index) {
    return index < (size_t)(op->n - 1) * op->u.stream.block_chunks;
}

// Returns the chunk of item `index` in a block of a buffer. The address is NULL if `buffer` is
// NULL.
static idist__item idist__ring_algo_all_reduce_item(const idist__op *op, const char *buffer,
                                                    size_t index, int block, int peer) {
    size_t at = idist__block_at(op->count, op->n, block) * op->size;
    char *data = buffer ? (char *)(uintptr_t)buffer + at : NULL;

    return idist__stream_chunk(op, data, idist__block_count(op->count, op->n, block),
                               index % op->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_all_reduce_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *to = idist__ring_algo_in_first_lap(op, index) ? NULL : op->out;
    return idist__ring_algo_all_reduce_item(op, to, index, idist__ring_algo_block(op, index, 1),
                                            idist__ring_algo_left(op));
}

static idist__item idist__ring_algo_all_reduce_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *from = index < op->u.stream.block_chunks ? op->in : op->out;
    return idist__ring_algo_all_reduce_item(op, from, index, idist__ring_algo_block(op, index, 0),
                                            idist__ring_algo_right(op));
}

// Returns true if an item of the first lap completes the sum of its chunk. This is the case in the
// last step of the lap.
static bool idist__ring_algo_completes_sum(const idist__op *op, size_t index) {
    return index >= (size_t)(op->n - 2) * op->u.stream.block_chunks;
}

// Adds our part to a chunk that arrives in the first lap. For AVG, also divides a complete sum
// here: once for all ranks, and while the chunk is in the cache.
static void idist__ring_algo_all_reduce_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    idist_dtype dtype = idist__dtype_is_narrow(t->call.dtype) ? IDIST_F32 : t->call.dtype;
    int block = idist__ring_algo_block(op, index, 1);
    idist__item own, sum;
    const void *both[2];
    size_t count;

    if (!idist__ring_algo_in_first_lap(op, index)) return; // already received into the result
    own = idist__ring_algo_all_reduce_item(op, op->in, index, block, 0);
    sum = idist__ring_algo_all_reduce_item(op, op->out, index, block, 0);
    count = own.nbytes / op->size;
    both[0] = idist__stream_slot(op, index);
    both[1] = own.data;

    if (t->call.op == IDIST_AVG && idist__ring_algo_completes_sum(op, index))
        idist__reduce_many(sum.data, both, 2, count, dtype, IDIST_AVG, op->n);
    else idist__combine(t, sum.data, (const char *)both[0], own.data, count, t->call.dtype);
}

static void idist__ring_algo_all_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    size_t steps = 2 * (size_t)(op->n - 1);

    idist__stream_cut(op, idist__block_count(op->count, op->n, 0));
    idist__stream_begin(op, steps * stream->block_chunks, steps * stream->block_chunks,
                        stream->block_chunks, idist__ring_algo_all_reduce_recv,
                        idist__ring_algo_all_reduce_send, idist__ring_algo_all_reduce_take);
}

// ---- reduce_scatter, reduce_scatterv ----

// Returns the number of elements in the largest block.
static size_t idist__ring_algo_largest_block(const idist__op *op, const idist__call *call) {
    size_t largest = 0;
    int i;

    for (i = 0; i < op->n; i++)
        if (idist__extent_block_count(call, i) > largest)
            largest = idist__extent_block_count(call, i);
    return largest;
}

// Returns the chunk of item `index` in a block of a buffer of n blocks. The address is NULL if
// `buffer` is NULL.
static idist__item idist__ring_algo_reduce_scatter_item(const idist__task *t, const char *buffer,
                                                        size_t index, int block, int peer) {
    const idist__op *op = idist__op_of(t);
    size_t at = idist__extent_block_at(&t->call, block) * op->size;
    char *data = buffer ? (char *)(uintptr_t)buffer + at : NULL;

    return idist__stream_chunk(op, data, idist__extent_block_count(&t->call, block),
                               index % op->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_reduce_scatter_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__ring_algo_reduce_scatter_item(t, NULL, index,
                                                idist__ring_algo_block(op, index, 2),
                                                idist__ring_algo_left(op));
}

static idist__item idist__ring_algo_reduce_scatter_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const idist__stream_op *stream = &op->u.stream;
    const char *from = index < stream->block_chunks ? op->in : op->work;

    return idist__ring_algo_reduce_scatter_item(t, from, index,
                                                idist__ring_algo_block(op, index, 1),
                                                idist__ring_algo_right(op));
}

static void idist__ring_algo_reduce_scatter_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const idist__stream_op *stream = &op->u.stream;
    int block = idist__ring_algo_block(op, index, 2);
    idist__item own, sum;

    own = idist__ring_algo_reduce_scatter_item(t, op->in, index, block, 0);
    if (idist__ring_algo_completes_sum(op, index))
        sum = idist__stream_chunk(op, op->out, op->count, index % stream->block_chunks, 0);
    else sum = idist__ring_algo_reduce_scatter_item(t, op->work, index, block, 0);
    idist__combine(t, sum.data, idist__stream_slot(op, index), own.data, own.nbytes / op->size,
                   t->call.dtype);
}

static void idist__ring_algo_reduce_scatter(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    size_t items;

    idist__stream_cut(op, idist__ring_algo_largest_block(op, &t->call));
    items = (size_t)(op->n - 1) * stream->block_chunks;
    idist__stream_begin(op, items, items, stream->block_chunks,
                        idist__ring_algo_reduce_scatter_recv, idist__ring_algo_reduce_scatter_send,
                        idist__ring_algo_reduce_scatter_take);
}

// ---- all_gather, all_gatherv ----

static size_t idist__ring_algo_all_gather_at(const idist__task *t, int block) {
    const idist__call *call = &t->call;
    if (call->recvcounts) return idist__extent_displ(call->recvcounts, call->recvdispls, block);
    return (size_t)block * idist__op_of(t)->count;
}

static idist__item idist__ring_algo_all_gather_item(const idist__task *t, size_t index, int block,
                                                    int peer) {
    const idist__op *op = idist__op_of(t);
    size_t count = t->call.recvcounts ? t->call.recvcounts[block] : op->count;
    char *data = op->out + idist__ring_algo_all_gather_at(t, block) * op->size;
    return idist__stream_chunk(op, data, count, index % op->u.stream.block_chunks, peer);
}

static idist__item idist__ring_algo_all_gather_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__ring_algo_all_gather_item(t, index, idist__ring_algo_block(op, index, 1),
                                            idist__ring_algo_left(op));
}

static idist__item idist__ring_algo_all_gather_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__ring_algo_all_gather_item(t, index, idist__ring_algo_block(op, index, 0),
                                            idist__ring_algo_right(op));
}

static void idist__ring_algo_all_gather(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    const size_t *counts = t->call.recvcounts;
    size_t largest = op->count;
    size_t items;
    int i;

    for (i = 0; counts && i < op->n; i++)
        if (counts[i] > largest) largest = counts[i];

    idist__block_copy(op->out + idist__ring_algo_all_gather_at(t, op->rank) * op->size, op->in,
                      op->nbytes);
    idist__stream_cut(op, largest);
    items = (size_t)(op->n - 1) * stream->block_chunks;
    idist__stream_begin(op, items, items, stream->block_chunks, idist__ring_algo_all_gather_recv,
                        idist__ring_algo_all_gather_send, NULL);
}

// ---- ring/algo/chain.h ---------------------------------------------------------------------------

// ring/algo/chain.h: broadcast, reduce and scan of large messages
//
// The n ranks form a line, and each rank forwards the c chunks of the buffer to the next rank. Once
// the first chunk has reached the end of the line, every link carries data all the time:
//
//   n = 4, c = 3    step 0   step 1   step 2   step 3   step 4
//   link 0 -> 1     chunk 0  chunk 1  chunk 2
//   link 1 -> 2              chunk 0  chunk 1  chunk 2
//   link 2 -> 3                       chunk 0  chunk 1  chunk 2
//
//   bytes sent per rank   B
//   latency               n - 2 + c steps of one chunk each: little more than the time to send B
//                         bytes if c is large
//
// Let v be the number of a rank, counted from the root. A broadcast runs upwards from v = 0. A
// reduction runs from v = n - 1 down to v = 0, and each rank adds its own part. A scan runs in the
// order of the ranks, so it also works for operations that do not commute.
//
// A binomial tree sends B bytes log n times in sequence. The tree is faster while B is small.
//
// COSTS in ring/algo/choose.h defines B and log.

static int idist__chain_relative_rank(const idist__op *op) { // returns v
    return idist__block_wrap(op->rank - op->root, op->n);
}

// ---- broadcast ----

static idist__item idist__chain_broadcast_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, op->out, op->count, index,
                               idist__block_wrap(op->rank - 1, op->n));
}

static idist__item idist__chain_broadcast_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, op->out, op->count, index,
                               idist__block_wrap(op->rank + 1, op->n));
}

static void idist__chain_broadcast(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    int v = idist__chain_relative_rank(op);
    bool first = v == 0;
    bool last = v == op->n - 1;

    idist__stream_cut(op, op->count);
    idist__stream_begin(op, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_broadcast_recv,
                        idist__chain_broadcast_send, NULL);
}

// ---- reduce ----

static idist__item idist__chain_reduce_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, NULL, op->count, index, idist__block_wrap(op->rank + 1, op->n));
}

static idist__item idist__chain_reduce_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *from = idist__chain_relative_rank(op) == op->n - 1 ? op->in : op->work;
    return idist__stream_chunk(op, (char *)(uintptr_t)from, op->count, index,
                               idist__block_wrap(op->rank - 1, op->n));
}

static void idist__chain_reduce_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    idist__item own = idist__stream_chunk(op, (char *)(uintptr_t)op->in, op->count, index, 0);
    char *to = op->rank == op->root ? op->out : op->work;
    idist__item sum = idist__stream_chunk(op, to, op->count, index, 0);

    idist__combine(t, sum.data, own.data, idist__stream_slot(op, index), own.nbytes / op->size,
                   t->call.dtype);
}

static void idist__chain_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    int v = idist__chain_relative_rank(op);
    bool first = v == op->n - 1;
    bool last = v == 0;

    idist__stream_cut(op, op->count);
    idist__stream_begin(op, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_reduce_recv,
                        idist__chain_reduce_send, idist__chain_reduce_take);
}

// ---- scan, exscan ----
//
// A rank forwards the prefix that includes its own part. The result of a scan is this prefix. The
// result of an exscan is the prefix that the rank received.

static idist__item idist__chain_scan_recv(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    return idist__stream_chunk(op, NULL, op->count, index, op->rank - 1);
}

static idist__item idist__chain_scan_send(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    const char *from = t->call.kind == IDIST__SCAN ? op->out : op->work;

    if (op->rank == 0) from = op->in;
    return idist__stream_chunk(op, (char *)(uintptr_t)from, op->count, index, op->rank + 1);
}

static void idist__chain_scan_take(idist__task *t, size_t index) {
    const idist__op *op = idist__op_of(t);
    idist__item own = idist__stream_chunk(op, (char *)(uintptr_t)op->in, op->count, index, 0);
    idist__item out = idist__stream_chunk(op, op->out, op->count, index, 0);
    char *received = idist__stream_slot(op, index);
    size_t count = own.nbytes / op->size;

    if (t->call.kind == IDIST__SCAN) {
        idist__combine(t, out.data, received, own.data, count, t->call.dtype);
        return;
    }

    if (op->rank < op->n - 1) {
        idist__item sum = idist__stream_chunk(op, op->work, op->count, index, 0);
        idist__combine(t, sum.data, received, own.data, count, t->call.dtype);
    }

    idist__block_copy(out.data, received, out.nbytes); // last, since in place it overwrites `own`
}

static void idist__chain_scan(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__stream_op *stream = &op->u.stream;
    bool first = op->rank == 0;
    bool last = op->rank == op->n - 1;

    if (first && t->call.kind == IDIST__SCAN) idist__block_copy(op->out, op->in, op->nbytes);
    idist__stream_cut(op, op->count);
    idist__stream_begin(op, first ? 0 : stream->block_chunks, last ? 0 : stream->block_chunks,
                        first ? stream->block_chunks : 0, idist__chain_scan_recv,
                        idist__chain_scan_send, idist__chain_scan_take);
}

// ---- ring/algo/direct.h --------------------------------------------------------------------------

// ring/algo/direct.h: one message per pair of ranks: gather, scatter, all_to_all, v-forms
//
// A rank sends all data for another rank in one message. In step s, a rank sends to rank + 1 + s
// and receives from rank - 1 - s (mod n). So no two ranks send to the same rank in the same step:
//
//   n = 4    step 0   step 1   step 2
//   rank 0   -> 1     -> 2     -> 3
//   rank 1   -> 2     -> 3     -> 0
//   rank 2   -> 3     -> 0     -> 1
//   rank 3   -> 0     -> 1     -> 2
//
//   bytes sent per rank   B (n - 1) for all_to_all; B to or from the root for gather and scatter
//   latency               n - 1 messages, up to 8 at a time in each direction
//
// Each byte is sent only once. Trees and Bruck's algorithm forward blocks through other ranks. The
// v-forms gatherv, scatterv and all_to_allv always work this way, because only the two ends of a
// message know its size.
//
// The tag of a message is the distance between its two ranks, which both ends know.
//
// COSTS in ring/algo/choose.h defines B.

enum { IDIST__DIRECT_MESSAGES = 8 }; // maximum messages in progress in each direction

// Returns the message to or from a peer. If the peer is our own rank, returns our block for
// ourselves, or the place of this block in the result.
static idist__item idist__direct_item(const idist__task *t, int peer, bool receives) {
    const idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;
    const size_t *counts = receives ? call->recvcounts : call->sendcounts;
    const size_t *displs = receives ? call->recvdispls : call->senddispls;
    const char *buffer = receives ? op->out : op->in;
    size_t count = counts ? counts[peer] : op->count;
    size_t at = 0;
    bool has_block_per_rank;
    idist__item item;

    if (receives)
        has_block_per_rank = call->kind != IDIST__SCATTER && call->kind != IDIST__SCATTERV;
    else has_block_per_rank = call->kind != IDIST__GATHER && call->kind != IDIST__GATHERV;
    if (has_block_per_rank)
        at = counts ? idist__extent_displ(counts, displs, peer) : (size_t)peer * op->count;

    item.peer = peer;
    item.nbytes = count * op->size;
    item.data = (char *)(uintptr_t)buffer + at * op->size;

    return item;
}

// Returns the peer at this distance. On a rank other than the root of a gather or scatter, returns
// the root.
static int idist__direct_peer(const idist__task *t, int distance) {
    const idist__op *op = idist__op_of(t);
    if (idist__kind_has_root(t->call.kind) && op->rank != op->root) return op->root;
    return idist__block_wrap(op->rank + distance, op->n);
}

static idist__item idist__direct_recv(idist__task *t, size_t index) {
    return idist__direct_item(t, idist__direct_peer(t, -1 - (int)index), true);
}

static idist__item idist__direct_send(idist__task *t, size_t index) {
    return idist__direct_item(t, idist__direct_peer(t, 1 + (int)index), false);
}

// Posts as many receives and sends as the limit on messages in progress allows. Unlike in
// idist__stream_run, no send waits for a receive.
static void idist__direct_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__direct_op *state = &op->u.direct;

    for (;;) {
        while (state->posted < state->recv_total && op->recvs_pending < IDIST__DIRECT_MESSAGES) {
            idist__item item = idist__direct_recv(t, state->posted++);
            idist__recv_step(t, -1, item.peer,
                             (uint32_t)idist__block_wrap(op->rank - item.peer, op->n), item.data,
                             item.nbytes);
        }

        if (state->sent == state->send_total || op->sends_pending >= IDIST__DIRECT_MESSAGES) break;

        {
            idist__item item = idist__direct_send(t, state->sent++);
            idist__send_step(t, item.peer, (uint32_t)idist__block_wrap(item.peer - op->rank, op->n),
                             item.data, item.nbytes);
        }
    }

    if (state->posted == state->recv_total && !op->recvs_pending &&
        state->sent == state->send_total && !op->sends_pending)
        idist__op_done(t);
}

static void idist__direct_begin(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__kind kind = t->call.kind;
    bool scatters = kind == IDIST__SCATTER || kind == IDIST__SCATTERV;
    bool is_root = op->rank == op->root;
    size_t recv_count = (size_t)(op->n - 1);
    size_t send_count = (size_t)(op->n - 1);

    if (idist__kind_has_root(kind)) {
        size_t peers = is_root ? (size_t)(op->n - 1) : 1;
        bool sends = scatters == is_root;
        send_count = sends ? peers : 0;
        recv_count = sends ? 0 : peers;
    }

    if (!idist__kind_has_root(kind) || is_root) { // our own part
        idist__item from = idist__direct_item(t, op->rank, false);
        idist__item to = idist__direct_item(t, op->rank, true);
        idist__block_copy(to.data, from.data, to.nbytes);
    }

    op->u.direct.recv_total = recv_count;
    op->u.direct.send_total = send_count;
    op->run = idist__direct_run;
}

// Begins an all_to_all. In place, received messages would overwrite blocks that are not sent yet,
// so the contribution is first copied to scratch memory.
static void idist__direct_all_to_all(idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (t->call.send == t->call.recv && op->nbytes) {
        idist__block_copy(op->work, op->in, (size_t)op->n * op->nbytes);
        op->in = op->work;
    }

    idist__direct_begin(t);
}

// ---- ring/algo/tree.h ----------------------------------------------------------------------------

// ring/algo/tree.h: barrier; broadcast, reduce, gather and scatter of small messages
//
// Functions: idist__tree_*, idist__dissemination_*.

//------------------------------------------------------------------------------
// barrier
//
// In round k, rank r signals rank r + 2^k and waits for rank r - 2^k (mod n). After log n rounds,
// each rank has learned, directly or through other ranks, that all n ranks have entered (Hensgen,
// Finkel, Manber 1988):
//
// n = 5, ranks that have entered, as known to rank 0 after each round:
//
//   round 0: 0 4     round 1: 0 4 3 2     round 2: 0 4 3 2 1
//
//   bytes sent per rank   none: log n empty messages
//   latency               log n, for any n
//
// This algorithm and the following ones are straight-line code between CO_BEGIN and CO_END; see
// ring/msg/op.h. State that must survive a CO_AWAIT is stored in idist__op. For a barrier, this
// state is 2^k.
//------------------------------------------------------------------------------

static void idist__dissemination_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__dissemination_op *state = &op->u.dissemination;
    int n = op->n;
    int rank = op->rank;

    IDIST__CO_BEGIN(op)

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, NULL, 0);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         NULL, 0);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    }

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

//------------------------------------------------------------------------------
// broadcast, reduce, gather and scatter of small messages
//
// The ranks form a binomial tree over v, the number of a rank counted from the root. The parent of
// v is v without its lowest set bit. The children of v are v plus each power of two below that bit:
//
//               0
//         ______|______
//        4      2      1        n = 8. The subtree of v is v .. v + (lowest set bit) - 1, a run of
//       / \     |               consecutive ranks. So in a gather or scatter, each rank holds one
//      6   5    3               run of blocks.
//      |
//      7
//
//   bytes sent per rank   broadcast, reduce: B to each child or to the parent; gather, scatter: the
//                         blocks of a whole subtree in one message
//   latency               log n messages in sequence
//
// A broadcast or scatter starts with the child that has the largest subtree. A reduce or gather
// uses the same tree in the other direction.
//
// COSTS in ring/algo/choose.h defines B and log.
//------------------------------------------------------------------------------

// Returns our v. A reduction with an operation that does not commute uses a tree whose root is rank
// 0. Such a tree keeps the order of the ranks.
static int idist__tree_relative_rank(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    bool commutes = !op->user || op->user->commutative;
    bool from_root = t->call.kind != IDIST__REDUCE || commutes;

    return from_root ? idist__block_wrap(op->rank - op->root, op->n) : op->rank;
}

// Returns the distance from v to its parent, which is the lowest set bit of v. For the root,
// returns the smallest power of two that is not below n.
static int idist__tree_distance(int v, int n) {
    int distance;
    for (distance = 1; distance < n && !(v & distance); distance *= 2) continue;
    return distance;
}

// Returns the number of ranks in the subtree of v, including v.
static int idist__tree_size(int v, int n) {
    int distance = idist__tree_distance(v, n);
    return v + distance < n ? distance : n - v;
}

static void idist__tree_broadcast(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);

    IDIST__CO_BEGIN(op)
    state->distance = idist__tree_distance(v, n);

    if (v) {
        idist__recv_step(t, 0, idist__block_wrap(v - state->distance + op->root, n), 0, op->out,
                         op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    }

    // A large message is sent to one child after another, starting with the child that has the
    // largest subtree. If it were sent to all children at the same time, even the first child would
    // receive the whole message only at the end.
    for (state->distance /= 2; state->distance; state->distance /= 2) {
        if (v + state->distance >= n) continue;
        idist__send_step(t, idist__block_wrap(v + state->distance + op->root, n), 0, op->out,
                         op->nbytes);
        IDIST__CO_AWAIT(op, !op->sends_pending || op->nbytes <= IDIST__EAGER_BYTES);
    }

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a reduce. Our sum covers the ranks v .. v + distance - 1. The sum that arrives covers the
// next `distance` ranks, so the order of the ranks is kept. If the operation does not commute, v is
// the rank, and rank 0 sends the result to the root.
//
// The scratch memory holds the sum, followed by one received message.
static void idist__tree_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);
    int base = idist__block_wrap(op->rank - v, n); // the rank with v = 0
    char *received = op->work + op->nbytes;

    IDIST__CO_BEGIN(op)
    idist__block_copy(op->work, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n && !(v & state->distance); state->distance *= 2) {
        if (v + state->distance >= n) continue;
        idist__recv_step(t, 0, idist__block_wrap(v + state->distance + base, n), 0, received,
                         op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
        idist__combine(t, op->work, op->work, received, op->count, t->call.dtype);
    }

    if (v)
        idist__send_step(t, idist__block_wrap(v - state->distance + base, n), 0, op->work,
                         op->nbytes);
    else if (op->rank != op->root) idist__send_step(t, op->root, 1, op->work, op->nbytes);

    if (op->rank == op->root && v) {
        idist__recv_step(t, 0, base, 1, op->out, op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    } else if (op->rank == op->root) {
        idist__block_copy(op->out, op->work, op->nbytes);
    }

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a gather. The scratch memory holds the blocks of v, v + 1, ... in this order. The root
// copies the blocks to their places in the result.
static void idist__tree_gather(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);
    int i;

    IDIST__CO_BEGIN(op)
    idist__block_copy(op->work, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n && !(v & state->distance); state->distance *= 2)
        if (v + state->distance < n)
            idist__recv_step(t, -1, idist__block_wrap(v + state->distance + op->root, n), 0,
                             op->work + (size_t)state->distance * op->nbytes,
                             (size_t)idist__tree_size(v + state->distance, n) * op->nbytes);

    IDIST__CO_AWAIT(op, !op->recvs_pending);

    if (v)
        idist__send_step(t, idist__block_wrap(v - state->distance + op->root, n), 0, op->work,
                         (size_t)idist__tree_size(v, n) * op->nbytes);
    else
        for (i = 0; i < n; i++)
            idist__block_copy(op->out + (size_t)idist__block_wrap(i + op->root, n) * op->nbytes,
                              op->work + (size_t)i * op->nbytes, op->nbytes);

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a scatter. The scratch memory holds the blocks of v, v + 1, ... in this order.
static void idist__tree_scatter(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__tree_op *state = &op->u.tree;
    int n = op->n;
    int v = idist__tree_relative_rank(t);
    int i;

    IDIST__CO_BEGIN(op)
    state->distance = idist__tree_distance(v, n);

    if (v) {
        idist__recv_step(t, 0, idist__block_wrap(v - state->distance + op->root, n), 0, op->work,
                         (size_t)idist__tree_size(v, n) * op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
    } else {
        for (i = 0; i < n; i++)
            idist__block_copy(op->work + (size_t)i * op->nbytes,
                              op->in + (size_t)idist__block_wrap(i + op->root, n) * op->nbytes,
                              op->nbytes);
    }

    for (state->distance /= 2; state->distance; state->distance /= 2)
        if (v + state->distance < n)
            idist__send_step(t, idist__block_wrap(v + state->distance + op->root, n), 0,
                             op->work + (size_t)state->distance * op->nbytes,
                             (size_t)idist__tree_size(v + state->distance, n) * op->nbytes);

    IDIST__CO_AWAIT(op, !op->sends_pending);
    idist__block_copy(op->out, op->work, op->nbytes);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// ---- ring/algo/doubling.h ------------------------------------------------------------------------

// ring/algo/doubling.h: all_reduce, reduce_scatter, scan and exscan of small messages
//
// Recursive doubling. In round k, partners at distance 2^k exchange their sums and add them. After
// log n rounds, every rank has the sum over all ranks:
//
//   n = 4     rank 0      rank 1      rank 2      rank 3
//   start     0           1           2           3
//   round 0   0 1 <-----> 0 1         2 3 <-----> 2 3
//   round 1   0 1 2 3     0 1 2 3     0 1 2 3     0 1 2 3      0 <-> 2, 1 <-> 3
//
//   bytes sent per rank   B log n (for reduce_scatter, B is all n blocks)
//   latency               log n messages, the least possible
//
// The sum of a partner covers the ranks just below or just above the ranks of our sum. So the order
// of the ranks is kept, and all ranks combine the same operands in the same order.
//
// If n is not a power of two, let p be the largest power of two below n. The first 2 (n - p) ranks
// form pairs. The odd rank of a pair sends its contribution to the even rank, sits out the rounds,
// and receives the result at the end:
//
//   n = 6, p = 4    1 -> 0, 3 -> 2;   0, 2, 4, 5 act as ranks 0, 1, 2, 3;   0 -> 1, 2 -> 3
//
// Scans (Hillis and Steele). In round k, rank r sends its sum to rank r + 2^k, and adds the sum
// that it receives from rank r - 2^k. The sum then covers the 2^(k+1) ranks up to r. At the end of
// an exscan, each rank sends its prefix to the next rank.
//
// COSTS in ring/algo/choose.h defines B and log.

enum { IDIST__DOUBLING_RESULT = 1 << 30 }; // tag of a finished result

// Returns p, or n if n is a power of two. Computes the value once per call.
static int idist__doubling_active_ranks(idist__doubling_op *state, int n) {
    if (!state->active_ranks) state->active_ranks = 1;
    while (state->active_ranks * 2 <= n) state->active_ranks *= 2;
    return state->active_ranks;
}

// Runs an all_reduce or a reduce_scatter. An all_reduce builds the sum in the receive buffer; a
// reduce_scatter builds the sum in scratch memory. The rest of the scratch memory holds one
// received message.
static void idist__doubling_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__doubling_op *state = &op->u.doubling;
    int rank = op->rank;
    int excess = op->n - idist__doubling_active_ranks(state, op->n);
    int partner;
    bool is_paired = rank < 2 * excess;
    bool sits_out = is_paired && rank % 2;
    int number = is_paired ? rank / 2 : rank - excess; // our number among the p ranks that exchange
    bool scatter = idist__kind_scatters_sum(t->call.kind);
    size_t count = scatter ? idist__extent_block_at(&t->call, op->n) : op->count;
    size_t nbytes = count * op->size;
    char *sum = scatter ? op->work : op->out;
    char *received = scatter ? op->work + nbytes : op->work;

    IDIST__CO_BEGIN(op)
    idist__block_copy(sum, op->in, nbytes);

    if (sits_out) {
        idist__send_step(t, rank - 1, 0, sum, nbytes);
    } else if (is_paired) {
        idist__recv_step(t, 0, rank + 1, 0, received, nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending);
        idist__combine(t, sum, sum, received, count, t->call.dtype);
    }

    for (state->distance = 1; state->distance < state->active_ranks && !sits_out;
         state->distance *= 2) {
        partner = number ^ state->distance;
        partner = partner < excess ? 2 * partner : partner + excess;
        idist__recv_step(t, 0, partner, (uint32_t)state->distance, received, nbytes);
        idist__send_step(t, partner, (uint32_t)state->distance, sum, nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
        if (number & state->distance) idist__combine(t, sum, received, sum, count, t->call.dtype);
        else idist__combine(t, sum, sum, received, count, t->call.dtype);
    }

    if (sits_out) {
        IDIST__CO_AWAIT(op, !op->sends_pending);
        idist__recv_step(t, 0, rank - 1, IDIST__DOUBLING_RESULT, sum, nbytes);
    } else if (is_paired) {
        idist__send_step(t, rank + 1, IDIST__DOUBLING_RESULT, sum, nbytes);
    }

    IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
    if (scatter)
        idist__block_copy(op->out, sum + idist__extent_block_at(&t->call, rank) * op->size,
                          op->nbytes);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Runs a scan or an exscan. The scratch memory holds the sum, followed by one received message.
static void idist__doubling_scan(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__doubling_op *state = &op->u.doubling;
    int n = op->n;
    int rank = op->rank;
    char *sum = op->work;
    char *received = op->work + op->nbytes;

    IDIST__CO_BEGIN(op)
    idist__block_copy(sum, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        if (rank >= state->distance)
            idist__recv_step(t, 0, rank - state->distance, (uint32_t)state->distance, received,
                             op->nbytes);
        if (rank + state->distance < n)
            idist__send_step(t, rank + state->distance, (uint32_t)state->distance, sum, op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
        if (rank >= state->distance)
            idist__combine(t, sum, received, sum, op->count, t->call.dtype);
    }

    if (t->call.kind == IDIST__SCAN) {
        idist__block_copy(op->out, sum, op->nbytes);
    } else {
        if (rank) idist__recv_step(t, 0, rank - 1, IDIST__DOUBLING_RESULT, op->out, op->nbytes);
        if (rank + 1 < n) idist__send_step(t, rank + 1, IDIST__DOUBLING_RESULT, sum, op->nbytes);
    }

    IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// ---- ring/algo/bruck.h ---------------------------------------------------------------------------

// ring/algo/bruck.h: all_gather and all_to_all of small messages
//
// Both algorithms (Bruck et al. 1997) need log n rounds for any n, which need not be a power of
// two.
//
// all_gather. After round k, rank r holds the blocks r, r + 1, ... r + 2^(k+1) - 1 (mod n) in
// scratch memory, in this order. The last round fetches only the blocks that are missing. At the
// end, the blocks are rotated into place:
//
//   n = 5, rank 3    start: 3     round 0: 3 4     round 1: 3 4 0 1     round 2: 3 4 0 1 2
//
//   bytes sent per rank   B (n - 1), as in a ring
//   latency               log n messages instead of n - 1
//
// all_to_all. The blocks of rank r are numbered by the distance that they have to travel: block i
// is for rank r + i (mod n). In round k, all blocks whose number has bit k set travel 2^k ranks in
// one message. So each block arrives in the round of its highest set bit:
//
//   n = 8            round 0: 1 rank     round 1: 2 ranks     round 2: 4 ranks
//   blocks sent      1 3 5 7             2 3 6 7              4 5 6 7
//
//   bytes sent per rank   B n/2 log n: blocks travel up to log n times
//   latency               log n messages instead of n - 1
//
// COSTS in ring/algo/choose.h defines B and log.

static void idist__bruck_all_gather(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__bruck_op *state = &op->u.bruck;
    int n = op->n;
    int rank = op->rank;
    int blocks;

    IDIST__CO_BEGIN(op)
    idist__block_copy(op->work, op->in, op->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        blocks = state->distance < n - state->distance ? state->distance : n - state->distance;
        idist__recv_step(t, 0, idist__block_wrap(rank + state->distance, n),
                         (uint32_t)state->distance, op->work + (size_t)state->distance * op->nbytes,
                         (size_t)blocks * op->nbytes);
        idist__send_step(t, idist__block_wrap(rank - state->distance, n), (uint32_t)state->distance,
                         op->work, (size_t)blocks * op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
    }

    idist__block_copy(op->out + (size_t)rank * op->nbytes, op->work,
                      (size_t)(n - rank) * op->nbytes);
    idist__block_copy(op->out, op->work + (size_t)(n - rank) * op->nbytes,
                      (size_t)rank * op->nbytes);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Copies the blocks that travel over this distance to `packed`, or back from `packed` if `unpack`
// is true. Returns the number of these blocks.
static size_t idist__bruck_pack(const idist__op *op, int distance, char *packed, bool unpack) {
    size_t blocks = 0;
    int i;

    for (i = 0; i < op->n; i++) {
        char *block = op->work + (size_t)i * op->nbytes;
        char *in_pack = packed + blocks * op->nbytes;

        if (!(i & distance)) continue;
        if (unpack) idist__block_copy(block, in_pack, op->nbytes);
        else idist__block_copy(in_pack, block, op->nbytes);
        blocks++;
    }

    return blocks;
}

// Runs an all_to_all. The scratch memory holds n blocks, the blocks to send, and the blocks
// received.
static void idist__bruck_all_to_all(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__bruck_op *state = &op->u.bruck;
    int n = op->n;
    int rank = op->rank;
    int i;
    char *packed = op->work + (size_t)n * op->nbytes;
    char *received = packed + (size_t)n * op->nbytes;

    IDIST__CO_BEGIN(op)

    for (i = 0; i < n; i++)
        idist__block_copy(op->work + (size_t)i * op->nbytes,
                          op->in + (size_t)idist__block_wrap(rank + i, n) * op->nbytes, op->nbytes);

    for (state->distance = 1; state->distance < n; state->distance *= 2) {
        state->packed_blocks = idist__bruck_pack(op, state->distance, packed, false);
        idist__recv_step(t, 0, idist__block_wrap(rank - state->distance, n),
                         (uint32_t)state->distance, received, state->packed_blocks * op->nbytes);
        idist__send_step(t, idist__block_wrap(rank + state->distance, n), (uint32_t)state->distance,
                         packed, state->packed_blocks * op->nbytes);
        IDIST__CO_AWAIT(op, !op->slots_pending && !op->sends_pending);
        idist__bruck_pack(op, state->distance, received, true);
    }

    // Block i came from the rank that is i ranks before us.
    for (i = 0; i < n; i++)
        idist__block_copy(op->out + (size_t)idist__block_wrap(rank - i, n) * op->nbytes,
                          op->work + (size_t)i * op->nbytes, op->nbytes);

    idist__op_done(t);
    IDIST__CO_END(op)
}

// ---- ring/algo/host_plan.h -----------------------------------------------------------------------

// ring/algo/host_plan.h: plans the steps of a call inside hosts and between their leaders
//
// Ranks of one host share memory. Hosts are connected by a slower network. So a collective over
// several hosts becomes a sequence of collectives on two smaller groups:
//
//   local     the members on this host
//   leaders   the first member of each host, which is the leader of that host
//
//                    step 1, local         step 2, leaders           step 3, local
//   all_reduce       reduce to leader      all_reduce                broadcast
//   reduce           reduce to leader      reduce to the leader of   the leader sends the result
//                                          the root's host           to the root
//   reduce_scatter   reduce to leader      reduce, one per host      scatter
//   all_gather       gather on leader      all_gatherv               broadcast
//   broadcast        on the root's host    broadcast                 on the other hosts
//   barrier          barrier               barrier                   barrier
//
//   bytes over the network   each host sends what a rank sends in the algorithm of step 2
//   latency                  two local steps, and one step among as many ranks as there are hosts
//
// A large all_reduce, reduce or broadcast is cut into pieces, so that the network is busy from the
// first piece to the last. Step 2 lags one round behind step 1, and step 3 lags two rounds:
//
//   round           0   1   2   3   4
//   step 1, lag 0   a   b   c
//   step 2, lag 1       a   b   c
//   step 3, lag 2           a   b   c
//
// So in round r, a step works on piece r - lag, if there is one.
//
// The plan of a call is the list of the steps that this rank takes, in the order of their rounds.
// All members of an inner group take the steps of this group in the same order.
// ring/algo/host_run.h executes the plan.
//
//   idist__host_plan_serves    returns true if a call can run this way
//   idist__host_plan_make      makes the plan
//
// A plan is used if a group spans several hosts, at least one host has several members, and
// IDIST_ALGO is `auto` or `remote`. The following calls use messages among all ranks instead:
//
//   reductions of narrow floats                they would be rounded twice
//   operations that do not commute             they need the order of the ranks
//   all_gather, reduce_scatter                 only if the ranks of some host are not consecutive
//   gather, scatter, all_to_all, scan, v-forms

typedef struct idist__host_step { // a call on `local` or `leaders`
    idist_group *group;
    idist__kind kind;
    const void *send;
    void *recv;
    size_t count;
    const size_t *recvcounts, *recvdispls; // for an all_gatherv
    int root;
    size_t round;
    bool completes_sum; // recv then holds the sum over all ranks, which AVG divides
} idist__host_step;

enum {
    IDIST__HOST_STEPS = 3,  // steps of a piece; a reduce_scatter has one more for each host
    IDIST__HOST_MAX_LAG = 2 // rounds by which the last step lags behind the first step
};

// Minimum size of a piece, per host. Smaller pieces would cost more in latency than their overlap
// gains. On a network of high latency, a piece is IDIST__HOST_PIECE_NETWORKS times the
// bandwidth-delay product, because the hosts synchronize after each piece.
#define IDIST__HOST_PIECE_BYTES ((size_t)512 * 1024)
#define IDIST__HOST_PIECE_NETWORKS 8

// Returns true if a call can be split into calls inside hosts and between them.
static bool idist__host_plan_serves(const idist_group *g, const idist__call *call) {
    const idist__ring_group *rg = idist__ring_group_of(g);
    int setting = g->w->cfg.algorithm;

    if (!rg->nhosts || (setting != IDIST__ALGO_AUTO && setting != IDIST__ALGO_REMOTE)) return false;

    switch (call->kind) {
    case IDIST__BARRIER:
    case IDIST__BROADCAST: return true;
    case IDIST__ALL_GATHER: return rg->in_order;
    case IDIST__ALL_REDUCE:
    case IDIST__REDUCE: break;
    case IDIST__REDUCE_SCATTER:
        if (!rg->in_order) return false;
        break;
    default: return false;
    }

    if (idist__dtype_is_narrow(call->dtype)) return false;

    return !idist__reduce_op_is_user(call->op) || idist__world_user_op(g, call)->commutative;
}

// ---- pieces and steps ----

typedef struct idist__host_piece { // a piece of a call's elements
    size_t at;                     // offset in bytes
    size_t count;
} idist__host_piece;

// Returns the number of pieces of a call, which is the same on all ranks.
static size_t idist__host_plan_piece_count(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    uint64_t of_host = IDIST__HOST_PIECE_NETWORKS * t->group->w->machine.network_nbytes, nbytes;
    bool is_cut = t->call.kind == IDIST__ALL_REDUCE || t->call.kind == IDIST__REDUCE ||
                  t->call.kind == IDIST__BROADCAST;

    if (of_host < IDIST__HOST_PIECE_BYTES) of_host = IDIST__HOST_PIECE_BYTES;
    nbytes = of_host * (uint64_t)idist__ring_group_of(t->group)->nhosts;

    return is_cut && op->nbytes > nbytes ? (size_t)(op->nbytes / nbytes) : 1;
}

// Finds the piece, out of n pieces, that a step works on in a round. Returns false if there is no
// such piece. The step takes the first piece in round `lag`, and the last piece in round n - 1 +
// lag.
static bool idist__host_plan_cut(const idist__op *op, size_t n, size_t round, size_t lag,
                                 idist__host_piece *piece) {
    size_t count = op->count / n, rest = op->count % n; // the first `rest` pieces are one larger
    size_t index;

    if (round < lag || round - lag >= n) return false;
    index = round - lag;
    piece->count = count + (index < rest ? 1 : 0);
    piece->at = (count * index + (index < rest ? index : rest)) * op->size;

    return true;
}

// Appends a step to the plan.
static idist__host_step *idist__host_plan_add(idist__op *op, size_t round, idist_group *group,
                                              idist__kind kind, const void *send, void *recv,
                                              size_t count, int root) {
    idist__host_step *step = &op->u.host.steps[op->u.host.step_count++];

    step->round = round;
    step->group = group;
    step->kind = kind;
    step->send = send;
    step->recv = recv;
    step->count = count;
    step->root = root;

    return step;
}

// ---- the plan of each operation ----

typedef struct idist__host_plan_input { // data that a plan needs besides the call
    char *collected;                    // scratch of a leader for the data of its host
    size_t *counts, *displs;            // counts and displs of the hosts' blocks, in elements
    int root_in_leaders;                // rank in `leaders` of the leader of the root's host
    int root_in_local;                  // rank of the root in `local`, -1 if it is on another host
} idist__host_plan_input;

// Adds the first step of a reduction, which computes the sum over this host on its leader. A rank
// that is alone on its host copies its contribution instead.
static void idist__host_plan_reduce_local(idist__task *t, size_t round, const void *in, char *sum,
                                          size_t count) {
    idist__op *op = idist__op_of(t);
    idist_group *local = idist__ring_group_of(t->group)->local;

    if (local) {
        idist__host_plan_add(op, round, local, IDIST__REDUCE, in, sum, count, 0);
        return;
    }

    idist__block_copy(sum, in, count * op->size);
    if (op->user && !op->user->fn) idist__reduce_scale(sum, count, t->call.dtype, op->user->factor);
}

static void idist__host_plan_all_reduce(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_plan_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + IDIST__HOST_MAX_LAG; round++) {
        if (idist__host_plan_cut(op, n, round, 0, &piece))
            idist__host_plan_reduce_local(t, round, op->in + piece.at, op->out + piece.at,
                                          piece.count);

        if (rg->leaders && idist__host_plan_cut(op, n, round, 1, &piece)) {
            step = idist__host_plan_add(op, round, rg->leaders, IDIST__ALL_REDUCE,
                                        op->out + piece.at, op->out + piece.at, piece.count, -1);
            step->completes_sum = true;
        }

        if (rg->local && idist__host_plan_cut(op, n, round, 2, &piece))
            idist__host_plan_add(op, round, rg->local, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, 0);
    }
}

// Adds the last step of a reduce whose root is on this host but is not the leader.
static void idist__host_plan_reduce_last(idist__task *t, const idist__host_plan_input *input,
                                         size_t round, char *sum, size_t count) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__host_step *step;

    if (rg->leaders) {
        idist__host_plan_add(op, round, rg->local, IDIST__SEND, sum, NULL, count,
                             input->root_in_local);
    } else if (op->rank == op->root) {
        step = idist__host_plan_add(op, round, rg->local, IDIST__RECV, NULL, sum, count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_reduce(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = op->rank == op->root ? op->out : input->collected;
    size_t n = idist__host_plan_piece_count(t), round;
    idist__host_piece piece;
    idist__host_step *step;

    for (round = 0; round < n + IDIST__HOST_MAX_LAG; round++) {
        if (idist__host_plan_cut(op, n, round, 0, &piece))
            idist__host_plan_reduce_local(t, round, op->in + piece.at, sum + piece.at, piece.count);

        if (rg->leaders && idist__host_plan_cut(op, n, round, 1, &piece)) {
            step = idist__host_plan_add(op, round, rg->leaders, IDIST__REDUCE, sum + piece.at,
                                        sum + piece.at, piece.count, input->root_in_leaders);
            step->completes_sum = input->root_in_local == 0;
        }

        // If root_in_local <= 0, this host needs no last step, because the root is its leader or is
        // on another host.
        if (input->root_in_local > 0 && idist__host_plan_cut(op, n, round, 2, &piece))
            idist__host_plan_reduce_last(t, input, round, sum + piece.at, piece.count);
    }
}

static void idist__host_plan_reduce_scatter(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *sum = input->collected;
    char *own = sum + (size_t)op->rank * op->nbytes; // on a leader: the first block of its host
    idist__host_step *step;
    size_t round = 0;
    int host;

    idist__host_plan_reduce_local(t, round++, op->in, sum, op->count * (size_t)op->n);

    for (host = 0; rg->leaders && host < rg->nhosts; host++) {
        char *blocks = sum + input->displs[host] * op->size;
        bool is_result = host == rg->leaders->rank && !rg->local;

        step = idist__host_plan_add(op, round++, rg->leaders, IDIST__REDUCE, blocks,
                                    is_result ? op->out : blocks, input->counts[host], host);
        step->completes_sum = is_result;
    }

    if (rg->local) {
        step =
            idist__host_plan_add(op, round, rg->local, IDIST__SCATTER, own, op->out, op->count, 0);
        step->completes_sum = true;
    }
}

static void idist__host_plan_all_gather(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    char *own = op->out + (size_t)op->rank * op->nbytes;
    idist__host_step *step;

    if (rg->local) idist__host_plan_add(op, 0, rg->local, IDIST__GATHER, op->in, own, op->count, 0);
    else if (op->in != own) idist__block_copy(own, op->in, op->nbytes);

    if (rg->leaders) {
        step = idist__host_plan_add(op, 1, rg->leaders, IDIST__ALL_GATHERV, own, op->out,
                                    input->counts[rg->leaders->rank], -1);
        step->recvcounts = input->counts;
        step->recvdispls = input->displs;
    }

    if (rg->local)
        idist__host_plan_add(op, 2, rg->local, IDIST__BROADCAST, NULL, op->out,
                             op->count * (size_t)op->n, 0);
}

static void idist__host_plan_broadcast(idist__task *t, const idist__host_plan_input *input) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t n = idist__host_plan_piece_count(t), round;
    idist__host_piece piece;

    for (round = 0; round < n + IDIST__HOST_MAX_LAG; round++) {
        if (rg->local && input->root_in_local >= 0 && idist__host_plan_cut(op, n, round, 0, &piece))
            idist__host_plan_add(op, round, rg->local, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, input->root_in_local);
        if (rg->leaders && idist__host_plan_cut(op, n, round, 1, &piece))
            idist__host_plan_add(op, round, rg->leaders, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, input->root_in_leaders);
        if (rg->local && input->root_in_local < 0 && idist__host_plan_cut(op, n, round, 2, &piece))
            idist__host_plan_add(op, round, rg->local, IDIST__BROADCAST, NULL, op->out + piece.at,
                                 piece.count, 0);
    }
}

static void idist__host_plan_barrier(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->local) idist__host_plan_add(op, 0, rg->local, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->leaders) idist__host_plan_add(op, 1, rg->leaders, IDIST__BARRIER, NULL, NULL, 0, -1);
    if (rg->local) idist__host_plan_add(op, 2, rg->local, IDIST__BARRIER, NULL, NULL, 0, -1);
}

// Finds the leader of the root's host among the leaders, and the root among the local members.
static void idist__host_plan_find_root(const idist__task *t, idist__host_plan_input *input) {
    const idist__op *op = idist__op_of(t);
    const idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    input->root_in_leaders = 0;
    input->root_in_local = op->root == op->rank ? 0 : -1;
    if (op->root < 0) return;

    for (i = 0; rg->leaders && i < rg->nhosts; i++)
        if (idist__ring_group_host(rg->leaders, i) == idist__ring_group_host(g, op->root))
            input->root_in_leaders = i;
    for (i = 0; rg->local && i < rg->local->size; i++)
        if (rg->local->ranks[i] == g->ranks[op->root]) input->root_in_local = i;
}

// Counts the elements in the blocks of each host. The ranks of a host are consecutive.
static void idist__host_plan_count_blocks(const idist__task *t,
                                          const idist__host_plan_input *input) {
    const idist__op *op = idist__op_of(t);
    const idist_group *g = t->group;
    int i, host = -1;

    for (i = 0; i < op->n; i++) {
        if (i == 0 || idist__ring_group_host(g, i) != idist__ring_group_host(g, i - 1))
            input->displs[++host] = (size_t)i * op->count;
        input->counts[host] += op->count;
    }
}

// Makes the plan of a call in op->memory, which holds the steps, the counts and displs of the
// hosts, and the data that a leader collects, in this order. Returns false if memory is exhausted.
static bool idist__host_plan_make(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    size_t nhosts = (size_t)rg->nhosts;
    size_t max_steps = IDIST__HOST_STEPS * idist__host_plan_piece_count(t) + nhosts;
    size_t steps_nbytes = max_steps * sizeof(idist__host_step);
    size_t table_nbytes = steps_nbytes + 2 * nhosts * sizeof(size_t);
    size_t collected_nbytes = 0;
    idist__host_plan_input input;

    if (rg->leaders && t->call.kind == IDIST__REDUCE) collected_nbytes = op->nbytes;
    if (rg->leaders && t->call.kind == IDIST__REDUCE_SCATTER)
        collected_nbytes = op->nbytes * (size_t)op->n;

    op->memory = (char *)idist__mem_raw(&t->group->w->cfg.mem, table_nbytes + collected_nbytes);
    if (!op->memory) return false;
    memset(op->memory, 0, table_nbytes);
    op->u.host.steps = (idist__host_step *)(void *)op->memory;

    input.counts = (size_t *)(void *)(op->memory + steps_nbytes);
    input.displs = input.counts + nhosts;
    input.collected = op->memory + table_nbytes;
    if (rg->in_order) idist__host_plan_count_blocks(t, &input);
    idist__host_plan_find_root(t, &input);

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: idist__host_plan_all_reduce(t); break;
    case IDIST__REDUCE: idist__host_plan_reduce(t, &input); break;
    case IDIST__REDUCE_SCATTER: idist__host_plan_reduce_scatter(t, &input); break;
    case IDIST__ALL_GATHER: idist__host_plan_all_gather(t, &input); break;
    case IDIST__BROADCAST: idist__host_plan_broadcast(t, &input); break;
    default: idist__host_plan_barrier(t); break;
    }

    return true;
}

// ---- ring/algo/host_run.h ------------------------------------------------------------------------

// ring/algo/host_run.h: executes the plan of a call over several hosts
//
// A call over several hosts has a plan, which is a list of steps in rounds (ring/algo/host_plan.h).
// The call executes one round after another. Each step of a round is a separate task. The group of
// the task consists of the members on this host, or of the leaders of all hosts. The steps of a
// round run at the same time.
//
// Calls on the same group queue up (idist__ring_group.first), and only the first call runs. So all
// ranks take the steps in the same order. The steps of two calls never mix on the inner groups.
//
//   idist__host_run_start      appends a call to the queue, and runs it if the queue was empty
//   idist__host_run_call       makes the plan; in each round, begins steps, waits, divides averages
//   idist__host_run_progress   resumes the first call of each group once its round has completed
//   idist__host_run_cancel     removes a call from the queue once no step uses the call's memory
//
// A call owns the tasks of its steps (idist__host_op.running). The tasks are freed when their round
// has completed or the call is cancelled. If a step fails, the call fails with the same status and
// text.

static void idist__host_run_no_memory(const idist__task *t) {
    idist__ring_fail_memory(idist__ring_of(t->group->w), t->group);
}

// Begins a step, and stores the task of the step in *begun. The call owns the task, which may end
// before this function returns. If the task fails, the call also fails. If the step cannot begin,
// *begun stays NULL, and the call fails.
static void idist__host_run_begin_step(idist__task *t, const idist__host_step *step,
                                       idist__task **begun) {
    idist__op *op = idist__op_of(t);
    idist_group *group = step->group;
    bool on_leaders = group == idist__ring_group_of(t->group)->leaders;
    bool scales = op->user && !op->user->fn;
    idist__task *child;

    if (group->status != IDIST_OK) { // NOLINT(clang-analyzer-core.NullDereference)
        idist__ring_fail(idist__ring_of(t->group->w), t->group, group->status, group->cause);
        return;
    }

    child = idist__task_new(group);
    if (!child) {
        idist__host_run_no_memory(t);
        return;
    }

    child->call = t->call;
    child->call.kind = step->kind;
    child->call.send = step->send;
    child->call.recv = step->recv;
    child->call.count = step->count;
    child->call.recvcounts = step->recvcounts;
    child->call.recvdispls = step->recvdispls;
    child->call.root = step->root;
    child->call.u.user = op->user;
    if (t->call.op == IDIST_AVG || (scales && on_leaders)) child->call.op = IDIST_SUM;

    child->whole = idist__fingerprint_of_task(t, IDIST__ALGO_BY_HOST);
    child->parent_past = op->past;
    child->timeout_ms = -1; // the parent has a deadline, and says what it waits for
    child->late.announced = true;
    child->late.warned = true;
    *begun = child;
    idist__task_start(child);
}

// Begins all steps of the current round.
static void idist__host_run_begin_round(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    const idist__host_step *first = &host->steps[host->current];
    size_t i, left = host->step_count - host->current;

    for (i = 0; i < left && first[i].round == first->round; i++) {
        host->running_count = i + 1;
        idist__host_run_begin_step(t, &first[i], &host->running[i]);
        if (t->group->status != IDIST_OK || !host->running[i]) return; // the plan may be freed
    }
}

// Returns true if all steps of the current round have ended, or one of them has failed, and
// idist__host_run_round_done has not freed the tasks yet.
static bool idist__host_run_round_ended(const idist__host_op *host) {
    size_t i, done_count = 0;

    for (i = 0; i < host->running_count && host->running[i]; i++) {
        if (host->running[i]->state != IDIST__TASK_DONE) continue;
        if (host->running[i]->status != IDIST_OK) return true;
        done_count++;
    }

    return done_count && done_count == host->running_count;
}

// Returns the task of a step that a call waits for, or NULL if there is none.
IDIST__UNUSED static idist__task *idist__host_run_awaited_step(const idist__task *t) {
    const idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && host->running[i]->state != IDIST__TASK_DONE)
            return host->running[i];

    return NULL;
}

// If the current round has completed, frees its tasks and returns true. If a step has failed, fails
// the call and returns false; the tasks are freed when the call is cancelled.
static bool idist__host_run_round_done(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    if (!idist__host_run_round_ended(host)) return false;

    for (i = 0; i < host->running_count; i++) {
        const idist__task *child = host->running[i];

        if (!child || child->state != IDIST__TASK_DONE || child->status == IDIST_OK) continue;
        // The step failed by itself or with its group.
        idist__ring_fail(idist__ring_of(t->group->w), t->group, child->status,
                         child->group->status == IDIST_OK ? child->text : child->group->cause);
        return false;
    }

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// Divides the sums that the current round has completed if the operation is AVG, and advances to
// the next round.
static void idist__host_run_next_round(idist__task *t) {
    const idist__op *op = idist__op_of(t);
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t end = host->current + host->running_count;

    for (; host->current < end; host->current++) {
        const idist__host_step *step = &host->steps[host->current];
        if (step->completes_sum && t->call.op == IDIST_AVG)
            idist__reduce_divide(step->recv, step->count, t->call.dtype, op->n);
    }

    host->running_count = 0;
}

// Removes a call from the queue of its group.
static void idist__host_run_leave_queue(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__task **at, *before = NULL;

    for (at = &rg->first; *at && *at != t; at = &idist__op_of(*at)->u.host.next) before = *at;

    if (*at) *at = idist__op_of(t)->u.host.next;
    if (rg->last == t) rg->last = before;
}

// Runs a call until it must wait or has completed.
static void idist__host_run_call(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist__host_op *host = &op->u.host;

    if (!host->steps && !idist__host_plan_make(t)) {
        idist__host_run_no_memory(t);
        return;
    }

    IDIST__CO_BEGIN(op)

    while (host->current < host->step_count) {
        idist__host_run_begin_round(t);
        IDIST__CO_AWAIT(op, idist__host_run_round_done(t));
        idist__host_run_next_round(t);
    }

    idist__host_run_leave_queue(t);
    idist__op_done(t);
    IDIST__CO_END(op)
}

// Fills in the backend's part of a task for a call over several hosts.
static void idist__host_run_prepare(idist__task *t) {
    idist__op_prepare(t);
    idist__op_of(t)->algorithm = IDIST__ALGO_BY_HOST;
    idist__op_of(t)->run = idist__host_run_call;
}

// Appends a call to the queue of its group, and runs the call if it is the first in the queue.
static void idist__host_run_start(idist__task *t) {
    idist__ring_group *rg = idist__ring_group_of(t->group);

    if (rg->last) idist__op_of(rg->last)->u.host.next = t;
    else rg->first = t;
    rg->last = t;
    if (rg->first == t) idist__op_run(t);
}

// Removes a call from the queue and frees the tasks of its steps. Returns false if a step is still
// running, because the step uses the memory of the call. Normally no step is running, because the
// two inner groups fail before the group to which they belong.
static bool idist__host_run_cancel(idist__task *t) {
    idist__host_op *host = &idist__op_of(t)->u.host;
    size_t i;

    for (i = 0; i < host->running_count; i++)
        if (host->running[i] && host->running[i]->state != IDIST__TASK_DONE) return false;

    idist__host_run_leave_queue(t);

    for (i = 0; i < host->running_count; i++) {
        if (host->running[i]) idist__task_free(host->running[i]);
        host->running[i] = NULL;
    }

    return true;
}

// Resumes the first call of each group once its round has completed, and the next call once the
// first call is done.
static void idist__host_run_progress(idist__ring *ring) {
    const idist_group *g;

    for (g = &ring->w->group; g; g = g->next) {
        idist__ring_group *rg = g->rank >= 0 && g->impl ? idist__ring_group_of(g) : NULL;

        while (rg && rg->first && !ring->failed) {
            const idist__task *t = rg->first;
            const idist__op *op = idist__op_of(t);
            const idist__host_op *host = &op->u.host;

            if ((host->running_count && !idist__host_run_round_ended(host)) || op->running) break;
            idist__op_run(rg->first);
            if (rg->first == t && !idist__host_run_round_ended(host)) break;
        }
    }
}

// ---- ring/algo/choose.h --------------------------------------------------------------------------

// ring/algo/choose.h: chooses the algorithm of a collective, and allocates its scratch memory
//
// Each other file of ring/algo holds one family of algorithms and can be read by itself. No
// algorithm uses a socket directly. An algorithm posts non-blocking sends and receives of ring/msg,
// and runs again (ring/msg/op.h) when one of them completes. The engine (ring/engine/start_task.h)
// calls this file to choose the algorithm of a collective. There are three kinds of algorithms:
//
//   over messages   the algorithms of this folder
//   host_plan.h     splits a collective into calls inside hosts and calls between hosts
//   ring/share      for ranks that share memory
//
// COSTS
//
// n is the number of ranks, B the number of bytes that one rank contributes, and c the number of
// chunks. log is log2, rounded up. A message takes a latency a, plus b per byte. A part o of the
// latency occupies the sender or the receiver. The rest of the latency overlaps if there are
// several messages. A reduction also takes time for each byte received, so its time has the same
// factors as b.
//
//   operation        few steps (latency)                  few bytes (bandwidth)
//   barrier          dissemination  a log n               -
//   broadcast        binomial tree  (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
//   reduce           binomial tree  (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
//   all_reduce       doubling       (a + bB) log n        ring    2 (n - 1) (a + bB/n)
//   reduce_scatter   doubling       (a + bBn) log n       ring    (n - 1) (a + bB)
//   all_gather       Bruck          a log n + bB (n - 1)  ring    (n - 1) (a + bB)
//   gather, scatter  binomial tree  a log n + bB (n - 1)  direct  a + (n - 1) (o + bB)
//   all_to_all       Bruck          (a + bBn/2) log n     direct  a + (n - 1) (o + bB)
//   scan             doubling       (a + bB) log n        chain   (a + bB/c) (n - 2 + c)
//   exscan           doubling       (a + bB) (log n + 1)  chain   (a + bB/c) (n - 2 + c)
//   v-forms          -                                    direct; all_gatherv as a ring;
//                                                         reduce_scatterv as reduce_scatter
//
// For reduce_scatter, scatter and all_to_all, B is one of n blocks. For the other operations, B is
// the whole contribution. idist__choose_table determines which column a call uses.
// tests/unit/model.c runs these algorithms on a LogGP network (make model). `make tune` measures
// the sizes at which the two columns take the same time.
//
// REPRODUCIBILITY
//
// Each block of a result is computed by one rank, or by several ranks that combine the same
// operands in the same order. So all ranks get the same bits. The order does not depend on which
// message arrives first.
//
// SOURCES
//
// Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
// 2005. Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997. Patarasuk and
// Yuan, "Bandwidth optimal all-reduce", 2009. Hensgen, Finkel, Manber, "Two algorithms for barrier
// synchronization", 1988. Hillis and Steele, "Data parallel algorithms", 1986.
//
// THE CHOICE
//
// idist__choose_algorithm takes the first algorithm in this table that can run the call:
//
//   group                                      algorithm
//   on several hosts, with several members     BY_HOST   the operations that host_plan.h lists
//   on some of them
//   whose members share memory                 FLAT      up to 4 KiB in the slot of a rank
//                                              CHUNKED   more, and v-forms
//   any                                        LATENCY   as idist__choose_table says
//                                              BANDWIDTH
//
// A setting of IDIST_ALGO may rule out rows. Every setting but `auto` and `remote` rules out
// BY_HOST. `latency` and `bandwidth` rule out shared memory. `chunked` rules out FLAT, except for
// calls without elements.
//
// All members of a group make the same choice, because the choice depends only on values that are
// equal on all members. The choice is part of the fingerprint. tests/unit/algo.c prints the choice
// for every operation.
//
// THE PATH OF A COLLECTIVE OVER MESSAGES
//
// ring/engine/start_task.h begins the call:
//
//   idist__choose_begin     fills in idist__op from the call: ranks, operands, reduction; allocates
//                           scratch memory; widens or scales the input of a reduction
//   idist__history_add      records the fingerprint, which includes the algorithm (ring/msg/)
//   idist__choose_run       starts the algorithm
//   idist__choose_finish    ends a reduction: divides an average, unless a ring has done so, and
//                           narrows to the dtype of the call
//
// Floats of 16 and 8 bits are widened to F32 for a reduction, so that they are rounded only once.

typedef struct idist__choice { // NOLINT(clang-analyzer-optin.performance.Padding)
    idist__kind kind;
    // Runs the algorithm of few steps, or is NULL if the call always uses `bandwidth`.
    void (*latency)(idist__task *t);
    // Contribution of one rank up to which `latency` is faster, in KiB.
    size_t latency_kib;
    // Begins the algorithm of few bytes, or is NULL if the call always uses `latency`.
    void (*bandwidth)(idist__task *t);
    // True if `bandwidth` also works for operations that do not commute.
    bool keeps_order;
} idist__choice;

// Read a row as follows: all_reduce uses recursive doubling up to 64 KiB per rank, and a ring for
// larger contributions. The limits hold for up to IDIST__CHOICE_RANKS ranks. They were measured
// with idist_perf over unix sockets and loopback TCP at 2 to 8 ranks, and `make tune` measures them
// on other machines. A limit is low where the latency algorithm forwards blocks through several
// ranks. For reduce_scatter, scatter and all_to_all, the limit is for one block.
// idist__choose_limit computes the limits for more ranks, and for networks between hosts.
static const idist__choice idist__choose_table[] = {
    // clang-format off
    // operation             few steps                 KiB  few bytes                        order
    {IDIST__BARRIER,         idist__dissemination_run, 0,   NULL,                            true},
    {IDIST__BROADCAST,       idist__tree_broadcast,    256, idist__chain_broadcast,          true},
    {IDIST__REDUCE,          idist__tree_reduce,       256, idist__chain_reduce,             false},
    {IDIST__ALL_REDUCE,      idist__doubling_reduce,   64,  idist__ring_algo_all_reduce,     false},
    {IDIST__REDUCE_SCATTER,  idist__doubling_reduce,   16,  idist__ring_algo_reduce_scatter, false},
    {IDIST__ALL_GATHER,      idist__bruck_all_gather,  16,  idist__ring_algo_all_gather,     true},
    {IDIST__GATHER,          idist__tree_gather,       2,   idist__direct_begin,             true},
    {IDIST__SCATTER,         idist__tree_scatter,      2,   idist__direct_begin,             true},
    {IDIST__ALL_TO_ALL,      idist__bruck_all_to_all,  2,   idist__direct_all_to_all,        true},
    {IDIST__SCAN,            idist__doubling_scan,     128, idist__chain_scan,               true},
    {IDIST__EXSCAN,          idist__doubling_scan,     128, idist__chain_scan,               true},
    {IDIST__ALL_GATHERV,     NULL,                     0,   idist__ring_algo_all_gather,     true},
    {IDIST__GATHERV,         NULL,                     0,   idist__direct_begin,             true},
    {IDIST__SCATTERV,        NULL,                     0,   idist__direct_begin,             true},
    {IDIST__ALL_TO_ALLV,     NULL,                     0,   idist__direct_begin,             true},
    {IDIST__REDUCE_SCATTERV, idist__doubling_reduce,   16,  idist__ring_algo_reduce_scatter, false},
    // clang-format on
};

static const idist__choice *idist__choose_row(idist__kind kind) {
    const idist__choice *row = idist__choose_table;
    while (row->kind != kind) row++;
    return row;
}

enum {
    IDIST__CHOICE_RANKS = 8,
    IDIST__CHOICE_RANKS_MOST = 65536, // for more ranks, limits stay the same
    IDIST__CHOICE_LATENCY = 8 * 1024, // a / b where the limits of the table were measured
    IDIST__CHOICE_COPY = 4,           // bytes that memory copies in the time b
    IDIST__CHOICE_OVERHEAD = 12,      // approximate a / o between hosts
    // Maximum of a / b. This maximum and the next one are needed because an interface may report a
    // wrong bandwidth.
    IDIST__CHOICE_LATENCY_MOST = 512 * 1024,
    // Maximum of the limits that follow from a / b, for each IDIST__CHOICE_RANKS ranks.
    IDIST__CHOICE_MOST = 512 * 1024
};

// Returns the contribution of a rank, in bytes, for which both algorithms take the same time. The
// result follows from COSTS at the top of this file, but does not include the time that reductions
// take. `latency` is a / b, the number of bytes that the network transfers in the time of an empty
// message. Returns UINT64_MAX if the algorithm of few steps is never slower.
static uint64_t idist__choose_break_even(idist__kind kind, uint64_t n, uint64_t latency) {
    uint64_t log = 0, direct;
    // Number of steps of doubling. If n is not a power of two, the excess ranks need one step
    // before the rounds and one step after them.
    uint64_t folded_log;

    while ((uint64_t)1 << log < n) log++;
    folded_log = (n & (n - 1)) ? log + 1 : log;

    switch (kind) {
    case IDIST__ALL_REDUCE:
        if (folded_log * n == 2 * (n - 1)) return UINT64_MAX;
        return (2 * (n - 1) - folded_log) * n * latency / (folded_log * n - 2 * (n - 1));
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV:
        if (folded_log * n == n - 1 || n - 1 < folded_log) return 0;
        return (n - 1 - folded_log) * latency / (folded_log * n - (n - 1));
    case IDIST__ALL_GATHER:                                      // Bruck copies n blocks once more
        return IDIST__CHOICE_COPY * (n - 1 - log) * latency / n; // NOLINT(*-core.DivideZero)
    case IDIST__GATHER:
    case IDIST__SCATTER: // in a tree, half of the blocks wait for the other half
    case IDIST__ALL_TO_ALL:
        direct = latency + (n - 1) * latency / IDIST__CHOICE_OVERHEAD;
        if (direct <= log * latency || n < 4) return 0;
        return (direct - log * latency) /
               (kind == IDIST__ALL_TO_ALL ? n * log / 2 - (n - 1) : n / 2);
    default: break;
    }

    if (kind == IDIST__EXSCAN) log++;
    if (n - 1 < log) return 0;
    if (log == 1) return kind == IDIST__BROADCAST ? UINT64_MAX : IDIST__CHUNK_BYTES;

    // A chain takes (n - 2) steps of one chunk, plus a, plus b for each byte.
    return ((n - 2) * (latency + IDIST__CHUNK_BYTES) + latency - log * latency) / (log - 1);
}

// Returns true if the bandwidth algorithm is `direct`. Its messages overlap, which helps little on
// one host.
static bool idist__choose_is_direct(idist__kind kind) {
    return kind == IDIST__GATHER || kind == IDIST__SCATTER || kind == IDIST__ALL_TO_ALL;
}

// Returns the limit for a group over several hosts.
static uint64_t idist__choose_between_hosts(const idist__choice *row, uint64_t n,
                                            uint64_t latency) {
    uint64_t groups = (n + IDIST__CHOICE_RANKS - 1) / IDIST__CHOICE_RANKS;
    uint64_t most = groups * IDIST__CHOICE_MOST;
    uint64_t even;

    if (idist__choose_is_direct(row->kind)) most = (uint64_t)row->latency_kib * 1024;
    if (latency > IDIST__CHOICE_LATENCY_MOST) latency = IDIST__CHOICE_LATENCY_MOST;
    even = idist__choose_break_even(row->kind, n, latency);

    return even < most ? even : most;
}

// Returns the limit for a group on one host, which is the limit in the table. For more than
// IDIST__CHOICE_RANKS ranks, the limit changes in proportion to the break-even.
static uint64_t idist__choose_inside_host(const idist__choice *row, uint64_t n) {
    uint64_t limit = (uint64_t)row->latency_kib * 1024;
    uint64_t at_table, at_n;

    if (n <= IDIST__CHOICE_RANKS || idist__choose_is_direct(row->kind)) return limit;
    at_table = idist__choose_break_even(row->kind, IDIST__CHOICE_RANKS, IDIST__CHOICE_LATENCY);
    at_n = idist__choose_break_even(row->kind, n, IDIST__CHOICE_LATENCY);

    return at_table ? limit * at_n / at_table : limit;
}

// Returns the contribution of a rank up to which the latency algorithm is used. Uses integer
// arithmetic, so that every rank computes the same limit.
static size_t idist__choose_limit(const idist_group *g, const idist__choice *row) {
    int n = g->size < IDIST__CHOICE_RANKS_MOST ? g->size : IDIST__CHOICE_RANKS_MOST;
    uint64_t latency = idist__ring_group_of(g)->spans_hosts ? g->w->machine.latency_nbytes : 0;
    uint64_t limit = latency && n > 1 ? idist__choose_between_hosts(row, (uint64_t)n, latency)
                                      : idist__choose_inside_host(row, (uint64_t)n);

    return limit < SIZE_MAX ? (size_t)limit : SIZE_MAX;
}

// Returns true if elements are widened to F32 for the reduction.
static bool idist__choose_widens(const idist__call *call, const idist__user_op *user) {
    bool is_function = user && user->fn;
    return idist__kind_reduces(call->kind) && idist__dtype_is_narrow(call->dtype) && !is_function;
}

// Returns true if the operation multiplies each contribution by a factor and then sums.
static bool idist__choose_scales(const idist__call *call, const idist__user_op *user) {
    return idist__kind_reduces(call->kind) && user && !user->fn;
}

// Chooses between LATENCY and BANDWIDTH for a collective over messages.
static idist__algorithm idist__choose_over_messages(const idist_group *g, const idist__call *call) {
    const idist__choice *row = idist__choose_row(call->kind);
    bool has_user_op = idist__kind_reduces(call->kind) && idist__reduce_op_is_user(call->op);
    const idist__user_op *user = has_user_op ? idist__world_user_op(g, call) : NULL;
    bool commutes = !has_user_op || user->commutative;
    size_t size = idist__choose_widens(call, user) ? sizeof(float) : idist_dtype_size(call->dtype);
    size_t count = call->count;

    if (call->kind == IDIST__REDUCE_SCATTERV) // the same on all ranks: a block of average size
        count = idist__block_at(idist__extent_block_at(call, g->size), g->size, 1);
    if (!row->bandwidth) return IDIST__ALGO_LATENCY;
    if (!row->latency) return IDIST__ALGO_BANDWIDTH;
    if (!count || (!commutes && !row->keeps_order)) return IDIST__ALGO_LATENCY;
    if (idist__kind_reduces(call->kind) && size > IDIST__CHUNK_BYTES) // no slot holds an element
        return IDIST__ALGO_LATENCY;
    if (g->w->cfg.algorithm == IDIST__ALGO_LATENCY) return IDIST__ALGO_LATENCY;
    if (g->w->cfg.algorithm == IDIST__ALGO_BANDWIDTH) return IDIST__ALGO_BANDWIDTH;

    return count * size <= idist__choose_limit(g, row) ? IDIST__ALGO_LATENCY
                                                       : IDIST__ALGO_BANDWIDTH;
}

static idist__algorithm idist__choose_algorithm(const idist_group *g, const idist__call *call) {
    idist__algorithm algorithm = idist__share_choose(g, call);

    if (idist__host_plan_serves(g, call)) return IDIST__ALGO_BY_HOST;
    return algorithm != IDIST__ALGO_AUTO ? algorithm : idist__choose_over_messages(g, call);
}

// ---- operands ----

static void idist__choose_operands(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;

    idist__op_prepare(t);

    if (idist__choose_widens(&t->call, op->user)) {
        op->size = sizeof(float);
        op->nbytes = op->count * op->size;
    }

    if (idist__kind_reduces(call->kind) && !(op->user && op->user->fn))
        op->reduce = idist__reduce_table[(unsigned)call->dtype]
                                        [op->user ? (unsigned)IDIST_SUM : (unsigned)call->op];
}

// Returns the number of elements that this rank contributes.
static size_t idist__choose_input_count(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    return idist__kind_scatters_sum(t->call.kind) ? idist__extent_block_at(&t->call, op->n)
                                                  : op->count;
}

// ---- scratch memory ----
//
//   | widened or scaled input | widened result | memory of the algorithm | slots of a stream |
//   | one element, if it is larger than IDIST__OP_PIECE |
//
// Each part begins at a multiple of 64 bytes, and may be empty.

static size_t idist__choose_align(size_t nbytes) { return (nbytes + 63) & ~(size_t)63; }

static size_t idist__choose_latency_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    size_t n = (size_t)op->n;

    switch (t->call.kind) {
    case IDIST__ALL_REDUCE: return op->nbytes;
    case IDIST__REDUCE:
    case IDIST__SCAN:
    case IDIST__EXSCAN: return 2 * op->nbytes;
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV: return 2 * idist__choose_input_count(t) * op->size;
    case IDIST__ALL_GATHER: return n * op->nbytes;
    case IDIST__GATHER:
    case IDIST__SCATTER:
        return (size_t)idist__tree_size(idist__tree_relative_rank(t), op->n) * op->nbytes;
    case IDIST__ALL_TO_ALL: return 3 * n * op->nbytes;
    default: return 0;
    }
}

static size_t idist__choose_bandwidth_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);
    size_t n = (size_t)op->n;

    switch (t->call.kind) {
    case IDIST__REDUCE: return op->rank != op->root ? op->nbytes : 0;
    case IDIST__EXSCAN: return op->nbytes;
    case IDIST__REDUCE_SCATTER:
    case IDIST__REDUCE_SCATTERV: return idist__choose_input_count(t) * op->size;
    case IDIST__ALL_TO_ALL: return t->call.send == t->call.recv ? n * op->nbytes : 0;
    default: return 0;
    }
}

static size_t idist__choose_slots_nbytes(const idist__task *t) {
    const idist__op *op = idist__op_of(t);

    size_t nbytes = op->nbytes;

    if (!idist__kind_reduces(t->call.kind) || op->algorithm != IDIST__ALGO_BANDWIDTH) return 0;

    if (idist__kind_scatters_sum(t->call.kind))
        nbytes = idist__ring_algo_largest_block(op, &t->call) * op->size;
    if (nbytes >= IDIST__CHUNK_BYTES) return op->slot_count * IDIST__CHUNK_BYTES;
    return op->slot_count * idist__choose_align(nbytes);
}

// Allocates the scratch memory. Returns false if memory is exhausted.
static bool idist__choose_allocate(idist__task *t) {
    idist__op *op = idist__op_of(t);
    bool widens = idist__choose_widens(&t->call, op->user);
    size_t input = 0;
    size_t result = widens ? idist__choose_align(op->nbytes) : 0;
    size_t work = op->algorithm == IDIST__ALGO_LATENCY ? idist__choose_latency_nbytes(t)
                                                       : idist__choose_bandwidth_nbytes(t);
    size_t slots = idist__choose_slots_nbytes(t), element = 0;

    work = idist__choose_align(work);
    if (op->user && op->user->fn && op->size > IDIST__OP_PIECE) element = op->size;
    if (widens || idist__choose_scales(&t->call, op->user))
        input = idist__choose_align(idist__choose_input_count(t) * op->size);

    if (input + result + work + slots + element) {
        op->memory =
            (char *)idist__mem_raw(&t->group->w->cfg.mem, input + result + work + slots + element);
        if (!op->memory) return false;
    }

    op->work = op->memory ? op->memory + input + result : idist__op_buffer(NULL);
    if (slots) op->u.stream.slots = op->work + work;
    if (element) op->element = op->work + work + slots;
    if (widens && op->memory) op->out = op->memory + input;

    return true;
}

// Copies the input of a reduction to scratch memory if the reduction widens or scales.
static void idist__choose_convert_input(idist__task *t) {
    idist__op *op = idist__op_of(t);
    idist_dtype dtype = t->call.dtype;
    size_t count = idist__choose_input_count(t);
    bool widens = idist__choose_widens(&t->call, op->user);
    bool scales = idist__choose_scales(&t->call, op->user);

    if (!count || (!widens && !scales)) return;
    if (widens) idist__small_float_widen((float *)(void *)op->memory, op->in, count, dtype);
    else idist__block_copy(op->memory, op->in, count * op->size);

    op->in = op->memory;
    if (scales)
        idist__reduce_scale(op->memory, count, widens ? IDIST_F32 : dtype, op->user->factor);
}

// ---- begin, run, finish ----

// Ends a reduction: divides an average, and narrows a widened result. On ranks that get a result,
// op->out holds the result before these steps.
static void idist__choose_finish(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__call *call = &t->call;
    bool widens = idist__choose_widens(&t->call, op->user);
    bool has_result = (call->kind != IDIST__REDUCE || op->rank == op->root) &&
                      (call->kind != IDIST__EXSCAN || op->rank != 0);
    bool is_finished =
        call->kind == IDIST__ALL_REDUCE && op->algorithm != IDIST__ALGO_LATENCY; // by a ring

    if (!has_result) return;
    if (!op->user && !is_finished)
        idist__reduce_finish(op->out, op->count, widens ? IDIST_F32 : call->dtype, call->op, op->n);
    if (widens)
        idist__small_float_narrow(call->recv, (const float *)(const void *)op->out, op->count,
                                  call->dtype);
}

// Prepares a collective. Returns false if memory is exhausted.
static bool idist__choose_begin(idist__task *t, idist__algorithm algorithm) {
    idist__op *op = idist__op_of(t);

    idist__choose_operands(t);
    op->algorithm = algorithm;
    op->slot_count = idist__stream_slot_count(t->group);
    if (!idist__choose_allocate(t)) return false;
    idist__choose_convert_input(t);
    if (idist__kind_reduces(t->call.kind)) op->finish = idist__choose_finish;

    return true;
}

static void idist__choose_run(idist__task *t) {
    idist__op *op = idist__op_of(t);
    const idist__choice *row = idist__choose_row(t->call.kind);

    if (op->algorithm == IDIST__ALGO_LATENCY) op->run = row->latency;
    else row->bandwidth(t);
}

// ---- ring/connect/attempt.h ----------------------------------------------------------------------

// ring/connect/attempt.h: one attempt of a rank to connect to another
//
//     WAITS  ->  CONNECTS  ->  GREETS  ->  the connection becomes a link
//
// From CONNECTS and GREETS, an attempt may return to WAITS for at most 40 ms.

enum {
    // Time after which an unanswered connect is retried. A handshake has no time limit, because the
    // peer may not be in a call.
    IDIST__ATTEMPT_MS = 3000,
    IDIST__ATTEMPT_WAIT_MS = 20,
    IDIST__ATTEMPT_NAME_MS = 100 // wait before a name that is not known yet is looked up again
};

typedef struct idist__where { // the address where a rank listens for another rank
    char text[160];           // "tcp:[ADDRESS]:PORT" or "unix:NAME"
} idist__where;

typedef enum idist__attempt_state {
    IDIST__ATTEMPT_WAITS,    // until due_ns
    IDIST__ATTEMPT_CONNECTS, // until due_ns at most
    IDIST__ATTEMPT_GREETS    // the handshake is under way
} idist__attempt_state;

typedef struct idist__attempt { // one attempt to connect to a rank
    struct idist__attempt *next;
    int rank;
    int socket; // index of the socket in the link
    idist__attempt_state state;
    int64_t due_ns;
    idist__handshake handshake; // its fd is the connection in all states, or -1
} idist__attempt;

// The outcome of an attempt or of an accept. A function with an event parameter returns true if it
// has stored an event there.
typedef struct idist__connect_event {
    int rank;            // the peer, or -1 if this rank cannot accept connections
    idist_status status; // IDIST_OK if the link to the peer is connected
    int error;           // the errno of a failed connect, or 0 if idist__me.text has the reason
} idist__connect_event;

static void idist__attempt_wait(idist__attempt *attempt, int ms) {
    idist__os_descriptor_close(&attempt->handshake.fd);
    attempt->state = IDIST__ATTEMPT_WAITS;
    attempt->due_ns = idist__os_clock_deadline(ms);
}

// Returns true if the peer may have accepted an attempt, because this rank has begun to send its
// proof of identity.
static bool idist__attempt_is_known(const idist__attempt *attempt) {
    return attempt->state == IDIST__ATTEMPT_GREETS && attempt->handshake.stage >= IDIST__AUTH_PROOF;
}

// Handles a failed connect. Returns false if there is no event, because the attempt will simply be
// repeated.
static bool idist__attempt_failed(idist__attempt *attempt, int error, idist__connect_event *event) {
    idist_status status =
        idist__os_socket_out_of_fds(error) ? IDIST_ERR_NO_FDS : IDIST_ERR_PEER_LOST;

    idist__attempt_wait(attempt, IDIST__ATTEMPT_WAIT_MS);
    if (error == EAGAIN || error == ETIMEDOUT || error == EINTR || error == ENOBUFS ||
        error == ENOMEM) // the peer's accept queue may be full, or memory is short
        return false;
    event->rank = attempt->rank;
    event->error = error;
    event->status = status;

    return true;
}

// Begins to connect: WAITS -> CONNECTS. Returns true if there is an event.
static bool idist__attempt_begin(idist__attempt *attempt, const idist__where *where,
                                 idist__connect_event *event) {
    idist__os_address address;
    int fd;

    event->rank = attempt->rank;
    event->status = idist__address_parse(&address, where->text);
    if (event->status != IDIST_OK) return true;
    fd = idist__os_socket_connect_begin(&address);
    if (fd < 0) return idist__attempt_failed(attempt, errno, event);

    memset(&attempt->handshake, 0, sizeof attempt->handshake);
    attempt->handshake.fd = fd;
    attempt->state = IDIST__ATTEMPT_CONNECTS;
    attempt->due_ns = idist__os_clock_deadline(IDIST__ATTEMPT_MS);

    return false;
}

// ---- ring/connect/connector.h --------------------------------------------------------------------

// ring/connect/connector.h: all connections in the making: listeners, attempts, handshakes
//
// Connects two ranks by a local socket or TCP. While ranks join (ring/join/), they make only the
// connections that they are certain to need. In a large world without shared memory, there are few
// such connections. Every other connection is made when the first message needs it (ring/engine/).
//
// WHO CONNECTS
//
// Each rank listens, and each may connect to any other. Each end proves that it knows the job's
// key, and sends its rank. Two ranks may connect to each other at the same time. They keep the
// connection that the higher rank began:
//
//   - a rank refuses the connection of a lower rank if its own connection has already reached
//     that rank;
//   - a rank accepts the connection of a higher rank, and drops its own attempt.
//
// The accepting rank decides after the peer has proven its identity, and before sending its own
// last message of the handshake. An accepted connection becomes a link. A rank that is refused
// tries again a little later; usually the other rank has connected to it in the meantime.
//
// A link over TCP may have several sockets (see ring/msg/). Each socket is connected separately, by
// either rank; the link is connected when all of its sockets are.
//
// Processes that do not belong to the job may connect too. If an incoming handshake fails, its
// connection is closed and forgotten.
//
//     idist__connector_start   starts an attempt to connect to a rank
//     idist__connector_polls   fills a poll set with the descriptors to watch
//     idist__connector_next    advances all handshakes without blocking, up to the next event
//
// An attempt ends with the event that reports its outcome. There is one exception: after an
// IDIST_ERR_NO_FDS event, the attempt continues.

enum {
    IDIST__CONNECTOR_POLLS = 2 + IDIST__PENDING_SLOTS, // poll entries that are not for attempts
    IDIST__CONNECTOR_LOOK_MS = 50 // interval for checking silent incoming handshakes
};

typedef struct idist__connector {
    idist__ring *ring;
    int rank;             // our rank
    int listeners[2];     // local socket, TCP; -1 if none
    idist__where *where;  // by rank
    int socket_count;     // number of sockets of a link over TCP
    uint64_t job;         // number of the job
    uint8_t key[32];      // authenticates connections of this job
    bool listener_ready;  // a connection may wait at a listener
    bool leaves;          // no new attempts
    bool waits_for_names; // set while ranks join: a host name may become known
    // The rank whose host name could not be resolved in the last attempt to connect to it.
    int unknown_rank;
    // Error text of the last failed lookup of a host name, or "" if none has failed.
    char unknown[256];
    // Time before which nothing is accepted while descriptors are short, or 0 if they are not.
    int64_t no_fds_until_ns;
    idist__attempt *attempts;
    idist__pending incoming;
    int incoming_count; // handshakes in `incoming`
} idist__connector;

static void idist__connector_free(idist__connector *conn) {
    const idist_allocator *mem;

    if (!conn) return;
    mem = &conn->ring->w->cfg.mem;

    while (conn->attempts) {
        idist__attempt *attempt = conn->attempts;
        conn->attempts = attempt->next;
        idist__os_descriptor_close(&attempt->handshake.fd);
        idist__mem_free(mem, attempt);
    }

    idist__pending_close(&conn->incoming);
    idist__os_descriptor_close(&conn->listeners[0]);
    idist__os_descriptor_close(&conn->listeners[1]);
    idist__mem_free(mem, conn->where);
    idist__mem_free(mem, conn);
}

static idist__connector *idist__connector_new(idist__ring *ring) {
    const idist_allocator *mem = &ring->w->cfg.mem;
    size_t n = (size_t)ring->w->group.size;
    idist__connector *conn = (idist__connector *)idist__mem_alloc(mem, sizeof *conn);

    if (!conn) return NULL;
    conn->ring = ring;
    conn->rank = ring->w->group.rank;
    conn->listeners[0] = -1;
    conn->listeners[1] = -1;
    conn->socket_count = 1;
    idist__pending_init(&conn->incoming);
    conn->where = (idist__where *)idist__mem_alloc(mem, sizeof *conn->where * n);
    if (conn->where) return conn;

    idist__connector_free(conn);

    return NULL;
}

// Returns true if this rank reaches the given rank through a local socket.
static bool idist__connector_is_local(const idist__connector *conn, int rank) {
    return idist__address_is_local(conn->where[rank].text);
}

// Returns the list pointer that points to an attempt, or the list's final NULL pointer if there is
// no such attempt.
static idist__attempt **idist__connector_find(idist__connector *conn, int rank, int socket) {
    idist__attempt **at = &conn->attempts;
    while (*at && ((*at)->rank != rank || (*at)->socket != socket)) at = &(*at)->next;
    return at;
}

// Removes an attempt from the list and frees it, whether or not it is done. Does nothing if `at` is
// the end of the list.
static void idist__connector_drop(idist__connector *conn, idist__attempt **at) {
    idist__attempt *attempt = *at;

    if (!attempt) return;
    *at = attempt->next;
    idist__os_descriptor_close(&attempt->handshake.fd);
    idist__mem_free(&conn->ring->w->cfg.mem, attempt);
}

// Drops all attempts to connect to a rank.
static void idist__connector_give_up(idist__connector *conn, int rank) {
    int i;

    for (i = 0; i < IDIST__SOCKETS_MAX; i++)
        idist__connector_drop(conn, idist__connector_find(conn, rank, i));
}

// Returns true if the link to a rank has never been connected and this socket of it is missing.
static bool idist__connector_lacks(const idist__connector *conn, int rank, int socket) {
    const idist__link *l = &conn->ring->links[rank];
    bool is_new = !l->transport || (l->open && !idist__link_is_connected(l));

    return is_new && socket < l->sockets.count && l->sockets.fds[socket] < 0;
}

// Starts to connect to a rank, unless attempts are already under way. Returns false if out of
// memory.
static bool idist__connector_start(idist__connector *conn, int rank) {
    int socket;

    for (socket = 0; socket < IDIST__SOCKETS_MAX && !conn->leaves; socket++) {
        idist__attempt **end = idist__connector_find(conn, rank, socket), *a;

        if (*end || !idist__connector_lacks(conn, rank, socket)) continue;
        a = (idist__attempt *)idist__mem_alloc(&conn->ring->w->cfg.mem, sizeof *a);
        if (!a) return false;
        a->rank = rank;
        a->socket = socket;
        a->handshake.fd = -1;
        *end = a;
    }

    return true;
}

// Makes the connection of a finished handshake a socket of a link. Returns true if there is an
// event: either the link is connected, or it cannot be watched.
static bool idist__connector_add(idist__connector *conn, idist__handshake *shake, int socket,
                                 idist__connect_event *event) {
    int rank = (int)shake->theirs.rank;
    bool local = idist__connector_is_local(conn, rank);
    idist__link *l = &conn->ring->links[rank];

    if (!local) idist__os_socket_measured(shake->fd);
    l->sockets.fds[socket] = shake->fd;
    shake->fd = -1;
    idist__connector_drop(conn, idist__connector_find(conn, rank, socket));
    if (!idist__sockets_is_complete(&l->sockets)) return false;

    event->rank = rank;
    event->status = IDIST_OK;

    if (!idist__link_open(conn->ring, l, local ? &idist__transport_unix : &idist__transport_tcp,
                          &l->sockets)) {
        event->error = errno;
        event->status = idist__fail_errno("watching a connection", errno);
        idist__sockets_close(&l->sockets);
    }

    return true;
}

// ---- accepting ----

// Closes our own attempts to connect to higher ranks, because descriptors are short. These ranks
// may be connecting to us, and their connections need descriptors. Otherwise two ranks with one
// descriptor each would wait for each other. Returns true if it closed any.
static bool idist__connector_give_way(idist__connector *conn) {
    idist__attempt *attempt;
    bool any = false;

    for (attempt = conn->attempts; attempt; attempt = attempt->next) {
        if (attempt->rank < conn->rank || attempt->state == IDIST__ATTEMPT_WAITS) continue;
        if (idist__attempt_is_known(attempt)) continue; // the answer is on its way
        idist__attempt_wait(attempt, 2 * IDIST__ATTEMPT_WAIT_MS);
        any = true;
    }

    return any;
}

static bool idist__connector_accept(idist__connector *conn, int listener,
                                    idist__connect_event *event) {
    idist__handshake *shake = idist__pending_slot(&conn->incoming);

    while (shake) {
        int fd = idist__os_socket_accept(listener);

        if (fd < 0 && idist__os_socket_out_of_fds(errno)) {
            conn->no_fds_until_ns = idist__os_clock_deadline(IDIST__ATTEMPT_WAIT_MS);
            if (idist__pending_evict(&conn->incoming)) return false; // strangers hold the fds
            if (idist__connector_give_way(conn)) return false;
            event->rank = -1;
            event->status = IDIST_ERR_NO_FDS;
            return true;
        }

        if (fd < 0) return false;
        idist__os_descriptor_close(&shake->fd);
        idist__auth_begin(shake, fd, true, conn->key, IDIST__ROLE_LINK, conn->job, conn->rank,
                          conn->ring->w->group.size, idist__os_clock_deadline(IDIST__PENDING_MS));
        idist__auth_set_secrecy(shake, idist__secret_secrecy(&conn->ring->w->cfg.secret));
        shake->asks = true;
        shake->ready = true;
        shake = idist__pending_slot(&conn->incoming);
    }

    return false;
}

// Returns true if we accept the peer of a handshake, which has proven its rank. A lower rank is
// refused only if our own attempt has reached it.
static bool idist__connector_welcomes(idist__connector *conn, const idist__handshake *shake) {
    int rank = (int)shake->theirs.rank;
    int socket = (int)shake->theirs.socket;
    const idist__attempt *ours;

    if (rank < 0 || rank >= conn->ring->w->group.size || rank == conn->rank) return false;
    if (socket < 0 || !idist__connector_lacks(conn, rank, socket)) return false;

    ours = *idist__connector_find(conn, rank, socket);

    return rank > conn->rank || !ours || ours->state != IDIST__ATTEMPT_GREETS;
}

// Advances an incoming handshake. Returns true if there is an event.
static bool idist__connector_answer(idist__connector *conn, idist__handshake *shake,
                                    idist__connect_event *event) {
    bool done = false;
    int socket;
    idist_status status;

    shake->ready = false;
    status = idist__auth_step(shake, &done);
    socket = (int)shake->theirs.socket;

    if (status == IDIST_OK && shake->proven) {
        if (!idist__connector_welcomes(conn, shake)) {
            idist__os_descriptor_close(&shake->fd);
            return false;
        }

        shake->asks = false;
        status = idist__auth_step(shake, &done);
    }

    if (status == IDIST_OK && !done) return false;

    if (status == IDIST_OK && idist__connector_lacks(conn, (int)shake->theirs.rank, socket))
        return idist__connector_add(conn, shake, socket, event);

    idist__os_descriptor_close(&shake->fd);
    if (status != IDIST_OK)
        idist__log_print(&conn->ring->w->log, IDIST_LOG_DEBUG, "a connection was refused: %s",
                         idist__me.text);

    return false;
}

// Accepts connections, and advances all incoming handshakes. Returns true at the first event.
static bool idist__connector_receive(idist__connector *conn, idist__connect_event *event) {
    int64_t now_ns = idist__os_clock_now_ns();
    bool is_full = conn->incoming_count == IDIST__PENDING_SLOTS;
    bool waited = conn->no_fds_until_ns && now_ns >= conn->no_fds_until_ns;
    bool happened = false;
    int i;

    if (waited) conn->no_fds_until_ns = 0;

    for (i = 0; i < 2 && !conn->no_fds_until_ns && (conn->listener_ready || is_full || waited); i++)
        if (conn->listeners[i] >= 0 && !happened)
            happened = idist__connector_accept(conn, conn->listeners[i], event);

    conn->listener_ready = false;

    for (i = 0; i < IDIST__PENDING_SLOTS && !happened; i++) {
        idist__handshake *shake = &conn->incoming.place[i];

        if (shake->fd >= 0 && shake->ready) happened = idist__connector_answer(conn, shake, event);
        if (shake->fd >= 0 && now_ns >= shake->deadline_ns) idist__os_descriptor_close(&shake->fd);
    }

    conn->incoming_count = idist__pending_count(&conn->incoming);

    return happened;
}

// ---- connecting ----

// Begins the handshake of an attempt once its socket is connected: CONNECTS -> GREETS. Returns true
// if there is an event.
static bool idist__connector_connected(idist__connector *conn, idist__attempt *attempt,
                                       idist__connect_event *event) {
    bool local = idist__connector_is_local(conn, attempt->rank);
    int error, fd = attempt->handshake.fd;

    if (!idist__os_poll_wait(fd, IDIST__OS_WRITABLE, 0)) {
        if (idist__os_clock_now_ns() < attempt->due_ns) return false;
        return idist__attempt_failed(attempt, ETIMEDOUT, event);
    }

    error = idist__os_socket_connect_end(&fd, local);
    attempt->handshake.fd = fd;
    if (error) return idist__attempt_failed(attempt, error, event);

    idist__auth_begin(&attempt->handshake, fd, false, conn->key, IDIST__ROLE_LINK, conn->job,
                      conn->rank, conn->ring->w->group.size, IDIST__FOREVER);
    idist__auth_set_socket(&attempt->handshake, attempt->socket);
    idist__auth_set_secrecy(&attempt->handshake, idist__secret_secrecy(&conn->ring->w->cfg.secret));
    attempt->handshake.ready = true;
    attempt->state = IDIST__ATTEMPT_GREETS;

    return false;
}

// Advances the handshake of an attempt. Returns true if there is an event.
static bool idist__connector_greet(idist__connector *conn, idist__attempt *attempt,
                                   idist__connect_event *event) {
    idist__handshake *shake = &attempt->handshake;
    bool done = false;
    idist_status status;

    shake->ready = false;
    status = idist__auth_step(shake, &done);
    if (status == IDIST_OK && !done) return false;

    if (status != IDIST_OK && shake->broke) {              // refused, or the peer had no free slot
        idist__attempt_wait(attempt, 5 + conn->rank % 16); // ranks retry at different times
        return false;
    }

    if (status == IDIST_OK && (int)shake->theirs.rank == attempt->rank)
        return idist__connector_add(conn, shake, attempt->socket, event); // frees the attempt

    if (status == IDIST_OK)
        status = idist__fail(IDIST_ERR_AUTH, "another rank listens at its address");
    event->rank = attempt->rank;
    event->status = status;

    return true;
}

// Handles a failure to resolve the host name of a rank. Returns false if the lookup will be
// repeated.
static bool idist__connector_unknown(idist__connector *conn, idist__attempt *attempt,
                                     const idist__connect_event *event) {
    if (!conn->waits_for_names || event->error || event->status != IDIST_ERR_SYSTEM) return true;

    if (!conn->unknown[0])
        idist__log_print(
            &conn->ring->w->log, IDIST_LOG_WARN,
            "%s (IDIST_ADDR of rank %d); retrying until the name resolves or the time to join is "
            "up",
            idist__me.text, attempt->rank);
    conn->unknown_rank = attempt->rank;
    idist__text_copy(conn->unknown, sizeof conn->unknown, idist__me.text);
    idist__attempt_wait(attempt, IDIST__ATTEMPT_NAME_MS);

    return false;
}

// Advances an attempt, and may free it. Returns true if there is an event. In that case all
// attempts to connect to the rank have been freed, unless descriptors are short.
static bool idist__connector_try(idist__connector *conn, idist__attempt *attempt,
                                 idist__connect_event *event) {
    int rank = attempt->rank;
    bool happened = false;

    if (attempt->state == IDIST__ATTEMPT_WAITS && idist__os_clock_now_ns() >= attempt->due_ns) {
        happened = idist__attempt_begin(attempt, &conn->where[rank], event);
        if (happened) happened = idist__connector_unknown(conn, attempt, event);
        else if (rank == conn->unknown_rank) conn->unknown[0] = 0;
    }

    if (!happened && attempt->state == IDIST__ATTEMPT_CONNECTS)
        happened = idist__connector_connected(conn, attempt, event);
    if (!happened && attempt->state == IDIST__ATTEMPT_GREETS && attempt->handshake.ready)
        happened = idist__connector_greet(conn, attempt, event);
    if (happened && event->status != IDIST_ERR_NO_FDS) idist__connector_give_up(conn, rank);

    return happened;
}

// ---- all of them ----

// Stops connecting, because this rank is leaving the world. Drops the attempts that no peer can
// have accepted. An attempt in which this rank has begun to send its proof of identity continues,
// because the peer may have accepted it; BYE is then sent on its link. Returns true if any attempt
// is left.
static bool idist__connector_leave(idist__connector *conn) {
    const idist__attempt *attempt = conn->attempts;

    conn->leaves = true;

    while (attempt) {
        const idist__attempt *next = attempt->next;

        if (!idist__attempt_is_known(attempt))
            idist__connector_drop(conn,
                                  idist__connector_find(conn, attempt->rank, attempt->socket));
        attempt = next;
    }

    return conn->attempts != NULL;
}

// Returns the time at which the connector has work even if poll reports nothing.
static int64_t idist__connector_due_ns(const idist__connector *conn) {
    const idist__attempt *attempt;
    int64_t due_ns = IDIST__FOREVER;

    if (conn->incoming_count) due_ns = idist__os_clock_deadline(IDIST__CONNECTOR_LOOK_MS);
    if (conn->no_fds_until_ns && conn->no_fds_until_ns < due_ns) due_ns = conn->no_fds_until_ns;
    for (attempt = conn->attempts; attempt; attempt = attempt->next)
        if (attempt->state != IDIST__ATTEMPT_GREETS && attempt->due_ns < due_ns)
            due_ns = attempt->due_ns;

    return due_ns;
}

// Returns the largest number of poll entries that idist__connector_polls fills.
static size_t idist__connector_capacity(const idist__connector *conn) {
    return IDIST__CONNECTOR_POLLS + (size_t)conn->ring->w->group.size * (size_t)conn->socket_count;
}

// Fills a poll set. Returns the number of entries.
static int idist__connector_polls(const idist__connector *conn, idist__os_poll_entry *entries) {
    bool accepts = conn->incoming_count < IDIST__PENDING_SLOTS && !conn->no_fds_until_ns;
    const idist__attempt *attempt;
    int i, count = 0;

    for (i = 0; i < 2; i++)
        if (conn->listeners[i] >= 0 && accepts)
            idist__os_poll_watch(&entries[count++], conn->listeners[i], IDIST__OS_READABLE);

    for (attempt = conn->attempts; attempt; attempt = attempt->next)
        if (attempt->state != IDIST__ATTEMPT_WAITS)
            idist__os_poll_watch(&entries[count++], attempt->handshake.fd,
                                 attempt->state == IDIST__ATTEMPT_CONNECTS
                                     ? IDIST__OS_WRITABLE
                                     : idist__auth_awaits(&attempt->handshake));

    if (conn->incoming_count) count += idist__pending_fill_polls(&conn->incoming, entries + count);

    return count;
}

// Notes that poll has reported at least one of the entries. Does not check which one, because
// another thread may have closed some of them in the meantime. Instead, every listener and every
// handshake is tried.
static void idist__connector_polled(idist__connector *conn) {
    idist__attempt *attempt;
    int i;

    conn->listener_ready = true;
    for (attempt = conn->attempts; attempt; attempt = attempt->next)
        attempt->handshake.ready = true;
    for (i = 0; i < IDIST__PENDING_SLOTS && conn->incoming_count; i++)
        conn->incoming.place[i].ready = true;
}

// Advances everything until there is an event. Returns false if no further progress is possible
// now.
static bool idist__connector_next(idist__connector *conn, idist__connect_event *event) {
    idist__attempt *attempt, *next;

    memset(event, 0, sizeof *event);

    for (attempt = conn->attempts; attempt; attempt = next) {
        next = attempt->next;
        if (idist__connector_try(conn, attempt, event)) return true;
    }

    if (!conn->listener_ready && !conn->incoming_count && !conn->no_fds_until_ns) return false;

    return idist__connector_receive(conn, event);
}

// ---- ring/engine/deadlock.h ----------------------------------------------------------------------

// ring/engine/deadlock.h: finds two ranks that wait for each other in different calls
//
// Ranks compare the fingerprints of their calls. But calls on different groups, or a receive and a
// collective, exchange no fingerprints. Therefore a rank that has waited for a while sends a WAITS
// frame. Two ranks can never proceed if all of the following is true of each of them:
//
//   - the rank has one thread and one call in progress, which blocks without its own time-out, so
//     it can do nothing else;
//   - the call needs a transfer that only the other rank can begin; or it is a collective that no
//     rank completes before all have entered it, and the other rank waits in a send or receive
//     instead;
//   - the other rank has not begun the missing transfer, and nothing in transit can replace it.
//
// In case of doubt, no deadlock is reported, and the call fails at its deadline. Another thread, a
// request, or a group that no longer exists here is a reason for doubt.

static bool idist__deadlock_has_transfer(const idist__transfer_list *list, const idist__task *t) {
    const idist__transfer *xfer;

    for (xfer = list->first; xfer; xfer = xfer->next)
        if (xfer->task == t) return true;

    return false;
}

// Returns true if a receive has found no message yet.
static bool idist__deadlock_is_unmatched(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    const idist__transfer *xfer = idist__op_of(t)->transfer;
    return xfer && (xfer->list == &rg->recvs || xfer->list == &rg->wild);
}

// Returns true if t needs a transfer that only this link's peer can begin.
static bool idist__deadlock_needs(const idist__link *l, const idist__task *t, int group_rank) {
    const idist__op *op = idist__op_of(t);

    if (t->call.kind == IDIST__RECV)
        return t->call.root == group_rank && idist__deadlock_is_unmatched(t);

    if (t->call.kind != IDIST__SEND &&
        op->algorithm == IDIST__ALGO_BY_HOST) { // check the step under way
        const idist__task *step = idist__host_run_awaited_step(t);
        int rank = -1;

        if (step) rank = idist__ring_group_of(step->group)->rank_of[t->group->ranks[group_rank]];
        return rank >= 0 && idist__deadlock_needs(l, step, rank);
    }

    if (t->call.kind != IDIST__SEND && idist__share_serves(op->algorithm))
        return idist__share_needs(t, group_rank);

    return idist__deadlock_has_transfer(&l->posted, t) ||
           idist__deadlock_has_transfer(&l->waiting, t);
}

// Returns true if t is a collective that needs all members, and the peer waits in a send or receive
// before it has entered t. The peer's contribution may arrive through other ranks, so there may be
// no transfer that shows this.
static bool idist__deadlock_needs_entry(const idist__task *t, const idist__frame *waits) {
    if (!idist__kind_is_p2p((idist__kind)waits->fingerprint.kind)) return false;
    if ((int32_t)(t->seq - waits->tag) <= 0) return false; // tag: the last call that it has entered

    switch (t->call.kind) {
    case IDIST__BARRIER: return true;
    case IDIST__ALL_REDUCE:
    case IDIST__ALL_GATHER:
    case IDIST__REDUCE_SCATTER:
    case IDIST__ALL_TO_ALL: return t->call.count > 0;
    default: return false;
    }
}

// Returns true if the message or answer that the peer waits for may still come from this rank.
static bool idist__deadlock_may_answer(idist__ring *ring, const idist__link *l,
                                       const idist__frame *waits) {
    const idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    const idist__message *msg;

    if (waits->fingerprint.kind == IDIST__RECV)
        return waits->aux != l->p2p_sent; // aux: our messages that the peer had received
    if (waits->fingerprint.kind != IDIST__SEND)
        return !g || (int32_t)(waits->fingerprint.seq - g->seq) <= 0; // we have entered it too

    for (msg = l->early; msg; msg = msg->next)
        if (msg->frame.type == IDIST__RTS && msg->frame.id == waits->id)
            return false; // the message is here, and no receive wants it

    return true;
}

static void idist__deadlock_find(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    const idist__frame *waits = &l->peer_waits;
    idist__task *ours;
    idist_group *theirs;
    char cause[400];
    bool same_group;
    int rank;

    if (waits->type != IDIST__WAITS || waits->flags != (IDIST__NEEDS_YOU | IDIST__ONLY_CALL))
        return;
    ours = idist__task_only_call(ring->w);
    if (!ours || !ours->late.announced) return;
    rank = idist__ring_group_of(ours->group)->rank_of[peer];
    same_group = ours->group->ctx == waits->ctx;
    if (rank < 0 || (same_group && ours->seq == waits->fingerprint.seq && ours->seq)) return;
    if (!idist__deadlock_needs(l, ours, rank) &&
        !(same_group && idist__deadlock_needs_entry(ours, waits)))
        return;
    if (idist__deadlock_may_answer(ring, l, waits)) return;

    theirs = idist__world_find_group(ring->w, waits->ctx);
    idist__explain_deadlock(ours, peer, &waits->fingerprint, same_group, cause, sizeof cause);
    idist__ring_fail(ring, ours->group, IDIST_ERR_MISMATCH, cause);
    idist__ring_settle(ring);
    if (theirs) idist__ring_fail(ring, theirs, IDIST_ERR_MISMATCH, cause);
}

// ---- ring/engine/ask.h ---------------------------------------------------------------------------

// ring/engine/ask.h: finds the members that hold up a call, and the ranks that they wait for
//
// Functions: idist__ask_*, idist__absent_*.

//------------------------------------------------------------------------------
// which members hold up a call
//
// For each member, a rank records the last call that the member is known to have entered
// (idist__seen). Once the rank has sent WAITS, it also knows which members have answered.
//------------------------------------------------------------------------------

// Returns the world rank whose message is arriving for a receive, or -1 if no message has begun to
// arrive.
static int idist__absent_sender(const idist__task *t) {
    const idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    for (i = 0; i < g->size; i++) {
        const idist__link *l = &ring->links[g->ranks[i]];
        bool is_sender = l->in_transfer && l->in_transfer->task == t;

        if (is_sender || idist__deadlock_has_transfer(&l->receiving, t)) return g->ranks[i];
    }

    return -1;
}

typedef enum idist__absence { // ways in which a member may hold up a call; a set of bits
    IDIST__ABSENT = 1,        // the member has not entered the call
    IDIST__SILENT = 2,        // the member was asked and has not answered
    IDIST__NEEDED = 4         // this rank waits for something that only the member can send
} idist__absence;

static int idist__absent_how(const idist__task *t, int rank) {
    const idist_group *g = t->group;
    const idist__seen *seen = &idist__ring_group_of(g)->seen[rank];
    const idist__link *l = &idist__ring_of(g->w)->links[g->ranks[rank]];
    bool entered = (int32_t)(seen->seq - t->seq) >= 0;
    int64_t asked_ns = idist__timer_asked_ns(t);
    int absence = 0;

    if (t->whole.kind && seen->fingerprint.whole == t->whole.seq)
        entered = true; // an earlier step of the same larger call counts too
    if (!entered) absence |= IDIST__ABSENT;
    if (asked_ns && l->here_ns < asked_ns && !l->bye) absence |= IDIST__SILENT;
    if (idist__deadlock_needs(l, t, rank)) absence |= IDIST__NEEDED;

    return absence;
}

// Returns the first member at or after `rank` that is absent in all of the given ways, or the
// group's size if there is none.
static int idist__absent_next(const idist__task *t, int rank, int absence) {
    const idist_group *g = t->group;

    while (rank < g->size && (rank == g->rank || (idist__absent_how(t, rank) & absence) != absence))
        rank++;

    return rank;
}

// Returns the world rank that a call waits for, or -1 if it waits for no particular rank. Prefers a
// member that does not answer, then one whose data this rank needs, then one that has not entered
// the call.
static int idist__absent_whom(const idist__task *t) {
    static const int order[] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                IDIST__ABSENT | IDIST__NEEDED, IDIST__NEEDED, IDIST__ABSENT};
    const idist_group *g = t->group;
    int i, rank;

    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t))
        return idist__absent_sender(t);
    if (idist__kind_is_p2p(t->call.kind)) return t->call.root < 0 ? -1 : g->ranks[t->call.root];

    idist__share_update_seen(t);

    for (i = 0; i < (int)IDIST__COUNT_OF(order); i++) {
        rank = idist__absent_next(t, 0, order[i]);
        if (rank < g->size) return g->ranks[rank];
    }

    return -1;
}

//------------------------------------------------------------------------------
// which ranks those members wait for
//
// A rank that holds up a call may itself wait for another rank, which may be stopped. So before a
// call fails or a warning is written, this rank sends ASK to the ranks that it waits for. Each of
// these ranks answers with the rank that it waits for (ANSWER), and that rank is asked next:
//
//     rank 0            rank 1              rank 2 (stopped)
//       | --- ASK ------> |
//       |                 | --- ASK --------> |     because of PASS_ON: does it answer rank 1?
//       | <-- ANSWER 2 -- |                   |
//       | --- ASK ----------------------------> |
//
// Halfway through the remaining time, the ranks are asked again. At that point each of them knows
// whether the rank that it waits for answers. A rank has at most one unanswered ASK to each other
// rank, so the number of frames queued in a link is bounded. No ASK is sent before a call is nearly
// out of time.
//------------------------------------------------------------------------------

enum { IDIST__ASK_MOST = 8 }; // limit on the members that a call asks, and on the ranks in a chain
// Time without an answer after which a rank counts as silent.
#define IDIST__ASK_SILENCE_NS (50 * IDIST__MS)

// Returns true if a rank was asked and does not answer.
static bool idist__ask_is_silent(const idist__link *l) {
    return l->asks && l->open && idist__os_clock_now_ns() - l->asked_ns >= IDIST__ASK_SILENCE_NS;
}

static void idist__ask_rank(idist__ring *ring, int rank, uint8_t flags) {
    idist__link *l = &ring->links[rank];
    idist__frame frame;

    if (rank == ring->w->group.rank || l->asks) return;
    idist__link_want(ring, l);
    if (!idist__link_is_connected(l)) return;
    l->asks = true;
    l->asked_ns = idist__os_clock_now_ns();

    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__ASK;
    frame.flags = flags;
    idist__link_control(ring, l, &frame, NULL);
}

// Asks a rank, unless it has already been asked in this round.
static void idist__ask_once(idist__ring *ring, int rank) {
    if (ring->links[rank].asked_ns < ring->asking_ns) idist__ask_rank(ring, rank, IDIST__PASS_ON);
}

// Begins a round of ASK frames for a call that is nearly out of time. Calls that run out of time at
// about the same time share a round.
static void idist__ask_begin(idist__ring *ring, const idist__task *t) {
    static const int order[] = {IDIST__NEEDED, IDIST__ABSENT};
    int64_t now_ns = idist__os_clock_now_ns(), until_ns, again_ns;
    int whom = idist__absent_whom(t), i, rank, count = 0;

    if (now_ns - ring->asking_ns > IDIST__ASK_SILENCE_NS) ring->asking_ns = now_ns;
    (void)idist__timer_ask_at(t, &until_ns);
    again_ns = now_ns + (until_ns - now_ns) / 2;
    if (!ring->ask_again_ns || again_ns < ring->ask_again_ns) ring->ask_again_ns = again_ns;
    if (whom >= 0) idist__ask_once(ring, whom);
    if (idist__kind_is_p2p(t->call.kind)) return;

    for (i = 0; i < (int)IDIST__COUNT_OF(order); i++) {
        rank = idist__absent_next(t, 0, order[i]);

        for (; rank < t->group->size && count < IDIST__ASK_MOST; count++) {
            idist__ask_once(ring, t->group->ranks[rank]);
            rank = idist__absent_next(t, rank + 1, order[i]);
        }
    }
}

// When it is time, asks again each rank that has answered in this round.
static void idist__ask_again(idist__ring *ring) {
    int i;

    if (idist__os_clock_now_ns() < ring->ask_again_ns) return;
    ring->ask_again_ns = 0;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].answered_ns > ring->asking_ns) idist__ask_rank(ring, i, IDIST__PASS_ON);
}

// Returns the call in which the program waits, or NULL if there is none.
static const idist__task *idist__ask_call(const idist__world *w) {
    const idist__task *t, *oldest = NULL;

    for (t = w->tasks.running; t && w->wait.blocked_count; t = t->next) {
        if (t->group->inner || idist__task_is_detached(t) || t->state == IDIST__TASK_ON_DEVICE)
            continue;
        if (!idist__task_is_async(t)) return t;
        oldest = t;
    }

    return oldest;
}

// Returns the rank that `rank` waits for, according to its answer in this round. Returns -1 if
// `rank` has not answered or waits for no rank.
static int idist__ask_answered(const idist__ring *ring, int rank) {
    const idist__link *l = &ring->links[rank];

    if (idist__ask_is_silent(l) || !l->answered_ns || l->answered_ns < ring->asking_ns) return -1;
    return (int)l->answer.aux - 1;
}

// Follows the answers, beginning with the answer of `rank`, until one is missing or a rank occurs
// twice. Stores the ranks in chain[], beginning with `rank`, and returns their number, at most
// IDIST__ASK_MOST.
static int idist__ask_follow(const idist__ring *ring, int rank, int *chain) {
    int count = 1, i;

    chain[0] = rank;

    while (count < IDIST__ASK_MOST) {
        bool is_end = ring->links[rank].answer.flags & IDIST__UNANSWERED;

        if (rank == ring->w->group.rank) break;
        rank = idist__ask_answered(ring, rank);
        if (rank < 0) break;
        for (i = 0; i < count && chain[i] != rank; i++) continue;
        if (i < count) break;
        chain[count++] = rank;
        if (is_end) break;
    }

    return count;
}

// Appends to a text the chain in which each rank waits for the next, beginning with `rank`. Names
// only the two ends of a long chain. Returns true if there was anything to append.
static bool idist__ask_explain(const idist__ring *ring, int rank, char *text, size_t capacity) {
    int chain[IDIST__ASK_MOST], count = idist__ask_follow(ring, rank, chain), i;
    const idist__rank_info *nodes = ring->w->nodes;
    const idist__link *l = NULL;

    for (i = 0; i + 1 < count; i++) {
        l = &ring->links[chain[i]];
        if (i == 1 && count > 3) idist__text_append(text, capacity, "; ...");
        if (i && i < count - 2) continue;
        idist__text_append(text, capacity, "; rank %d waits for rank %d on %s in %s", chain[i],
                           chain[i + 1], nodes[chain[i + 1]].hostname,
                           idist__kind_names[l->answer.fingerprint.kind]);
    }

    rank = chain[count - 1];

    if (l && l->answer.flags & IDIST__UNANSWERED)
        idist__text_append(text, capacity, ", which does not answer rank %d", chain[count - 2]);
    else if (idist__ask_is_silent(&ring->links[rank]))
        idist__text_append(text, capacity, "; rank %d does not answer rank %d", rank,
                           ring->w->group.rank);
    else return count > 1;

    return true;
}

// ---- ring/engine/missing.h -----------------------------------------------------------------------

// ring/engine/missing.h: names the ranks that a call waits for
//
// A warning or an error about a late call names the ranks that hold it up. The text also names the
// rank that got no answer, because after a partial network failure, a rank that is alive may find
// itself in the list.

// Appends a note to a text if this rank ran out of descriptors during the call. In that case this
// rank could not connect to the ranks that the text names.
static void idist__missing_fds(const idist__task *t, char *text, size_t capacity) {
    if (idist__ring_of(t->group->w)->no_fds_ns > t->started_ns)
        idist__text_append(text, capacity,
                           "; this rank is out of file descriptors: raise ulimit -n");
}

static bool idist__missing_is_running(const idist_group *g, uint32_t seq) {
    const idist__task *t = g->w->tasks.running;

    while (t && (t->group != g || t->seq != seq)) t = t->next;

    return t != NULL;
}

// Returns the last call before t that this rank has completed and that depends on every member. All
// members have entered such a call. Returns NULL if the history contains no such call.
static const idist__fingerprint *idist__missing_common(const idist__task *t) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    uint32_t back;

    for (back = 1; back < IDIST__HISTORY; back++) {
        const idist__fingerprint *past = &rg->history[(t->seq - back) % IDIST__HISTORY];
        bool sums = past->kind == IDIST__ALL_REDUCE &&
                    idist__dtype_is_builtin((idist_dtype)past->dtype) &&
                    past->check; // with 0 elements no rank waits

        if (past->seq != t->seq - back) return NULL;
        if (past->algorithm & IDIST__ON_DEVICE || !(sums || past->kind == IDIST__BARRIER)) continue;
        if (!idist__missing_is_running(t->group, past->seq)) return past;
    }

    return NULL;
}

// Returns the last call in which this rank saw a member take part. If the member must have entered
// a later call, returns that call instead, because in many algorithms a rank receives from only a
// few others.
static const idist__fingerprint *idist__missing_last_seen(const idist__task *t, int rank) {
    const idist__seen *seen = &idist__ring_group_of(t->group)->seen[rank];
    const idist__fingerprint *common = idist__missing_common(t);

    if (common && (int32_t)(common->seq - seen->seq) > 0) return common;

    return &seen->fingerprint;
}

// Names the peer of a message, and the rank that the peer waits for. Returns the number of ranks
// that hold up the call.
static int idist__missing_peer(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    int whom = idist__absent_whom(t), count = 1;

    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t)) {
        if (!t->patient || whom < 0) return 0; // the receive gets more time
        idist__text_append(text, capacity, "rank %d on %s, whose message has begun to arrive", whom,
                           g->w->nodes[whom].hostname);
    } else {
        count = idist__explain_missing_peer(t, text, capacity);
    }

    if (whom >= 0) idist__ask_explain(idist__ring_of(g->w), whom, text, capacity);
    idist__missing_fds(t, text, capacity);

    return count;
}

// Names the member that this rank needs, if that member has said which rank it waits for. Called
// when every member has entered the call and answers, but the data does not arrive. Returns the
// number of ranks named.
static int idist__missing_needed(const idist__task *t, char *text, size_t capacity) {
    const idist_group *g = t->group;
    char chain[300] = "";
    int rank = idist__absent_next(t, 0, IDIST__NEEDED);

    if (rank == g->size) return 0;
    if (!idist__ask_explain(idist__ring_of(g->w), g->ranks[rank], chain, sizeof chain)) return 0;
    idist__explain_missing_rank(g, rank, idist__missing_last_seen(t, rank), 0, text, capacity);
    idist__text_append(text, capacity, "%s", chain);

    return 1;
}

// Names the members that hold up a call, and returns their number. These are the members that match
// the first row of order[] that any member matches. A rank that has not entered the call may itself
// be waiting in an earlier call; in that case it answers. A rank that has entered the call may have
// been stopped since, or may have finished the call and be computing. In the latter case, this rank
// needs nothing from it.
static int idist__missing_name(idist__task *t, char *text, size_t capacity) {
    static const int order[] = {IDIST__ABSENT | IDIST__SILENT, IDIST__SILENT | IDIST__NEEDED,
                                IDIST__ABSENT, IDIST__SILENT};
    idist_group *g = t->group;
    const idist__ring *ring = idist__ring_of(g->w);
    idist__task *step;
    int i, row, first = 0, count = 0;

    if (idist__kind_is_p2p(t->call.kind)) return idist__missing_peer(t, text, capacity);

    step =
        idist__op_of(t)->algorithm == IDIST__ALGO_BY_HOST ? idist__host_run_awaited_step(t) : NULL;

    if (step && !t->late.announced) { // no member has been asked yet
        if (!idist__missing_name(step, text, capacity))
            idist__text_append(text, capacity, "ranks of another host");
        return 1;
    }

    idist__share_update_seen(t);

    for (row = 0; row < (int)IDIST__COUNT_OF(order) && !count; row++) {
        first = i = idist__absent_next(t, 0, order[row]);
        for (; i < g->size; i = idist__absent_next(t, i + 1, order[row]))
            idist__explain_missing_rank(g, i, idist__missing_last_seen(t, i), count++, text,
                                        capacity);
    }

    if (count > 8) idist__text_append(text, capacity, " and %d more", count - 8);
    if (!count) count = idist__missing_needed(t, text, capacity);
    else if (order[row - 1] & IDIST__SILENT)
        idist__text_append(text, capacity, ", which %s not answer rank %d",
                           count > 1 ? "do" : "does", g->w->group.rank);
    else idist__ask_explain(ring, g->ranks[first], text, capacity);
    idist__missing_fds(t, text, capacity);

    return count;
}

// ---- ring/engine/incoming.h ----------------------------------------------------------------------

// ring/engine/incoming.h: carries out the frames that arrive
//
// A frame is a header of 64 bytes and, for some types, a payload. ring/msg/ring_model.h lists the
// types. The reader (ring/engine/progress.h) calls idist__incoming_begin when a header is complete.
// Then it writes the payload to link.target, or drops the payload if link.target is NULL. Finally
// it calls idist__incoming_end.
//
// A peer is authenticated but may be faulty. None of its frames can make this rank write out of
// bounds or read a payload that the type does not carry. The function idist__incoming_is_allowed
// checks every header, and the link is closed if one is malformed. Some fields appear in error
// texts: a status, and the kind and root of a call. These fields must have values that a rank of
// this world can send.

// Writes a default text for a failure whose sender had no memory for a text.
static void idist__incoming_excuse(const idist__ring *ring, idist__link *l, int peer) {
    snprintf(l->text, sizeof l->text, "rank %d on %s reports a failure without its cause", peer,
             ring->w->nodes[peer].hostname);
}

// Handles ABORT: a group has failed on another rank. If the group does not exist here yet, keeps
// the frame until it does.
static void idist__incoming_abort(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    int status = (int)(int64_t)l->in.aux;
    idist__message *msg;

    l->text[l->in.nbytes] = 0;
    if (!l->in.nbytes) idist__incoming_excuse(ring, l, peer);
    if (l->peer_waits.ctx == l->in.ctx) l->peer_waits.type = 0; // the peer's call has ended

    if (g) {
        idist__group_fail(g, (idist_status)status, l->text);
        return;
    }

    if (idist__message_find_closed(ring, l->in.ctx)) return;
    msg = idist__message_new(ring, l, &l->in, sizeof l->text);
    if (!msg) return;
    msg->frame.aux = (uint64_t)(int64_t)status;
    memcpy(msg->data, l->text, sizeof l->text);
}

// Handles WAITS: the peer waits in a call, perhaps for this rank. Answers that this rank has
// entered the call too, or which call of the group it entered last. If the two ranks' calls do not
// match, both ranks learn of the mismatch.
static void idist__incoming_waits(idist__ring *ring, idist__link *l, int peer) {
    const idist__frame *waits = &l->in;
    idist_group *g = idist__world_find_group(ring->w, waits->ctx);
    const idist__closed *closed = g ? NULL : idist__message_find_closed(ring, waits->ctx);
    bool p2p = waits->fingerprint.kind == IDIST__SEND || waits->fingerprint.kind == IDIST__RECV;
    idist__frame answer;

    l->peer_waits = *waits;

    // The peer may not have been connected when the group failed.
    if (closed && closed->status != IDIST_OK)
        idist__link_abort(ring, l, waits->ctx, closed->status, "the group had already failed");

    if (!p2p && g && g->status == IDIST_OK) {
        if (!idist__history_agrees(ring, g, peer, waits)) return;
        answer = *waits;
        answer.type = IDIST__HERE;
        if ((int32_t)(waits->fingerprint.seq - g->seq) > 0)
            answer.fingerprint = idist__ring_group_of(g)->history[g->seq % IDIST__HISTORY];
        idist__link_control(ring, l, &answer, NULL);
    }

    idist__deadlock_find(ring, peer);
}

// Handles ASK: a call of the peer is nearly out of time. Answers with the rank that this rank waits
// for, and sets UNANSWERED if that rank does not answer this rank.
static void idist__incoming_ask(idist__ring *ring, idist__link *l) {
    const idist__task *t = idist__ask_call(ring->w);
    int whom = t ? idist__absent_whom(t) : -1;
    bool pass_on = l->in.flags & IDIST__PASS_ON;
    idist__frame answer;

    if (whom == ring->w->group.rank) whom = -1;
    memset(&answer, 0, sizeof answer);
    answer.type = IDIST__ANSWER;
    answer.aux = (uint64_t)whom + 1;
    if (whom >= 0) answer.fingerprint = idist__fingerprint_of_task(t, IDIST__ALGO_AUTO);
    if (whom >= 0 && idist__ask_is_silent(&ring->links[whom])) answer.flags = IDIST__UNANSWERED;
    idist__link_control(ring, l, &answer, NULL);
    if (whom >= 0 && pass_on) idist__ask_rank(ring, whom, 0);
}

// Handles ANSWER, the reply to an ASK from this rank. Then asks the rank that the peer waits for.
static void idist__incoming_answer(idist__ring *ring, idist__link *l) {
    int whom = (int)l->in.aux - 1;

    l->asks = false;
    l->answered_ns = idist__os_clock_now_ns();
    l->answer = l->in;
    if (whom >= 0 && l->asked_ns >= ring->asking_ns && ring->asking_ns) idist__ask_once(ring, whom);
}

// Handles BYE: the peer leaves the world. After a failure the peer sends nothing more, and reads
// nothing.
static void idist__incoming_bye(idist__ring *ring, idist__link *l, int peer) {
    idist__world *w = ring->w;

    l->bye = true;
    l->bye_status = (idist_status)(int)(int64_t)l->in.aux;
    ring->left_count++;
    if (l->bye_status == IDIST_OK) return;

    l->text[l->in.nbytes] = 0;
    if (!l->in.nbytes) idist__incoming_excuse(ring, l, peer);
    if (w->group.rank >= 0) idist__ring_fail(ring, &w->group, l->bye_status, l->text);
    idist__link_close(ring, l);
}

// Handles HERE, the reply to a WAITS from this rank.
static void idist__incoming_here(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);

    l->here_ns = idist__os_clock_now_ns();
    if (g && g->status == IDIST_OK) idist__history_agrees(ring, g, peer, &l->in);
}

static void idist__incoming_no_memory(idist__ring *ring, idist_group *g) {
    idist__ring_fail_memory(ring, g ? g : &ring->w->group);
}

// Handles EAGER and RTS, which begin a message. The payload of an EAGER is written to the matching
// receive's buffer, or to newly allocated memory if there is no such receive. An RTS has no
// payload. Returns false if the frame is malformed.
static bool idist__incoming_message(idist__ring *ring, idist__link *l, int peer) {
    idist__frame *frame = &l->in;
    idist_group *g = idist__world_find_group(ring->w, frame->ctx);
    bool p2p = frame->fingerprint.kind == IDIST__SEND;
    bool closed = !g && idist__message_find_closed(ring, frame->ctx);
    idist__transfer *receive;

    if (p2p && !idist__fingerprint_has_nbytes(&frame->fingerprint, frame->nbytes)) return false;

    if (p2p) l->p2p_received++;
    l->peer_waits.type = 0;
    receive = idist__match_frame(ring, l, peer, frame);

    if (frame->type == IDIST__RTS) {
        if (receive) idist__link_answer_rts(ring, l, peer, receive, frame);
        else if (!closed && !idist__message_new(ring, l, frame, 0))
            idist__incoming_no_memory(ring, g);
        l->left = 0;
        return true;
    }

    l->in_transfer = receive;

    if (receive) {
        receive->frame = *frame;
        l->target = receive->data;
    } else if (!closed && (!g || g->status == IDIST_OK)) {
        l->in_message = idist__message_new(ring, l, frame, (size_t)frame->nbytes);
        l->target = l->in_message ? l->in_message->data : NULL;
        if (!l->in_message) idist__incoming_no_memory(ring, g);
    }

    return true;
}

// Finds the send that a CTS or PULLED answers, and takes it out of its list. Returns NULL if the
// send has been cancelled.
static idist__transfer *idist__incoming_answered(idist__ring *ring, const idist__link *l) {
    idist__transfer *xfer = idist__transfer_find(ring, &l->waiting, l->in.id);
    if (xfer) idist__transfer_take(xfer);
    return xfer;
}

// Handles a CTS that answers no RTS: the peer has posted a receive of a collective. If this rank
// has not posted the send yet, keeps the frame until it does.
static void idist__incoming_granted(idist__ring *ring, idist__link *l, int peer) {
    idist_group *g = idist__world_find_group(ring->w, l->in.ctx);
    idist__transfer *xfer;

    if (g ? g->status != IDIST_OK : idist__message_find_closed(ring, l->in.ctx) != NULL) return;
    if (g && !idist__history_agrees(ring, g, peer, &l->in)) return;

    xfer = idist__match_step(ring, &l->waiting, peer, &l->in);
    if (xfer) idist__link_send_data(ring, l, xfer, l->in.aux);
    else if (!idist__message_new(ring, l, &l->in, 0)) idist__incoming_no_memory(ring, g);
}

// Handles CTS: the peer has a buffer for a message.
static void idist__incoming_clear_to_send(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *xfer;

    if (!l->in.id) {
        idist__incoming_granted(ring, l, peer);
        return;
    }

    xfer = idist__incoming_answered(ring, l);
    if (xfer) idist__link_send_data(ring, l, xfer, l->in.aux);
}

// Handles PULLED: the peer has read a message directly from this rank's memory.
static void idist__incoming_pulled(idist__ring *ring, const idist__link *l) {
    idist__transfer *xfer = idist__incoming_answered(ring, l);
    if (xfer) idist__transfer_done(ring, xfer);
}

// Handles DATA, a piece of a message that this rank has asked for. Returns false if the piece is
// longer than the rest of the message, or carries a number that this rank did not assign.
static bool idist__incoming_data(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *xfer = idist__transfer_find(ring, &l->receiving, l->in.id);

    if (!xfer) {
        xfer = idist__match_granted(ring, l, peer, &l->in);
        if (xfer && (!xfer->granted || xfer->id != l->in.id)) return false;
    }

    if (xfer && l->in.nbytes > xfer->nbytes - xfer->moved) return false;
    l->in_transfer = xfer; // NULL if the receive has been cancelled
    l->target = xfer ? xfer->data + xfer->moved : NULL;

    return true;
}

// Returns true if the frame carries the status of a failure.
static bool idist__incoming_has_failure(const idist__frame *frame) {
    int64_t status = (int64_t)frame->aux;
    return status < 0 && status >= INT32_MIN && idist__fail_is_failure((int)status);
}

// Returns true if a rank of this world can be in the call that the frame names.
static bool idist__incoming_names_call(const idist__ring *ring, const idist__frame *frame) {
    const idist__fingerprint *print = &frame->fingerprint;

    if (frame->type == IDIST__HERE && !print->kind && !print->seq)
        return true; // the peer has entered no call yet
    if (frame->type == IDIST__ANSWER && !frame->aux) return true;
    if (frame->type < IDIST__WAITS && print->kind == IDIST__RECV) return false;

    return print->kind > IDIST__NONE && print->kind < IDIST__KIND_COUNT && print->root >= -1 &&
           idist__fingerprint_root(print) < ring->w->group.size;
}

// Returns true if the peer may send this header. Called for frames that carry no message.
static bool idist__incoming_is_control(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *frame = &l->in;
    bool has_text = frame->type == IDIST__ABORT || (frame->type == IDIST__BYE && frame->aux);

    if (has_text) return frame->nbytes <= IDIST__TEXT_BYTES && idist__incoming_has_failure(frame);
    if (frame->type == IDIST__CREDIT) return frame->nbytes <= IDIST__WINDOW_BYTES - l->window;
    if (frame->nbytes) return false;

    switch (frame->type) {
    case IDIST__CTS: return frame->id || idist__incoming_names_call(ring, frame);
    case IDIST__WAITS:
    case IDIST__HERE: return idist__incoming_names_call(ring, frame);
    case IDIST__LEFT: return ring->shm && ring->shm->local[peer] >= 0;
    case IDIST__ANSWER:
        if (frame->aux > (uint64_t)ring->w->group.size || !l->asks) return false;
        return idist__incoming_names_call(ring, frame);
    case IDIST__PULLED:
    case IDIST__BYE:
    case IDIST__ASK: return true;
    default: return false;
    }
}

// Returns true if the peer may send this header. Unexpected messages are limited by the eager
// window and, for groups that do not exist here, by IDIST__UNKNOWN_MAX. Frames without payload
// (RTS, CTS) for groups that exist are not limited, because a correct rank may have any number of
// calls in progress.
static bool idist__incoming_is_allowed(const idist__ring *ring, const idist__link *l, int peer) {
    const idist__frame *frame = &l->in;
    const idist_group *g = idist__world_find_group(ring->w, frame->ctx);
    bool names_group =
        frame->type <= IDIST__DATA || (frame->type >= IDIST__WAITS && frame->type <= IDIST__LEFT);

    if (names_group && g && idist__ring_group_of(g)->rank_of[peer] < 0) return false;

    switch (frame->type) {
    case IDIST__EAGER:
        if (frame->nbytes > IDIST__EAGER_BYTES || !idist__incoming_names_call(ring, frame))
            return false;
        return frame->nbytes + IDIST__FRAME_BYTES <= l->their_window;
    case IDIST__RTS: return idist__incoming_names_call(ring, frame);
    case IDIST__DATA:
        return frame->nbytes <= IDIST__PIECE_BYTES && idist__incoming_names_call(ring, frame);
    default: return idist__incoming_is_control(ring, l, peer);
    }
}

// Handles a complete header. Returns false if it is malformed.
static bool idist__incoming_begin(idist__ring *ring, idist__link *l, int peer) {
    bool ok = true;

    l->in_transfer = NULL;
    l->in_message = NULL;
    l->target = NULL;
    if (!idist__incoming_is_allowed(ring, l, peer)) return false;

    l->left = (size_t)l->in.nbytes;

    switch (l->in.type) {
    case IDIST__EAGER:
        l->their_window -= (size_t)l->in.nbytes + IDIST__FRAME_BYTES;
        ok = idist__incoming_message(ring, l, peer);
        break;
    case IDIST__RTS: ok = idist__incoming_message(ring, l, peer); break;
    case IDIST__CTS: idist__incoming_clear_to_send(ring, l, peer); break;
    case IDIST__DATA: ok = idist__incoming_data(ring, l, peer); break;
    case IDIST__PULLED: idist__incoming_pulled(ring, l); break;
    case IDIST__CREDIT:
        l->window += (size_t)l->in.nbytes;
        l->left = 0; // nbytes is the credit; no payload follows
        break;
    case IDIST__WAITS: idist__incoming_waits(ring, l, peer); break;
    case IDIST__HERE: idist__incoming_here(ring, l, peer); break;
    case IDIST__ABORT: l->target = l->text; break;
    case IDIST__LEFT: idist__pool_member_left(ring, l->in.ctx); break;
    case IDIST__ASK: idist__incoming_ask(ring, l); break;
    case IDIST__ANSWER: idist__incoming_answer(ring, l); break;
    default: l->target = l->text; break; // IDIST__BYE
    }

    return ok;
}

// Finishes a frame whose payload is complete.
static void idist__incoming_end(idist__ring *ring, idist__link *l, int peer) {
    idist__transfer *xfer = l->in_transfer;
    idist__message *msg = l->in_message;

    l->in_transfer = NULL;
    l->in_message = NULL;

    if (l->in.type == IDIST__EAGER) {
        if (msg) {
            msg->moved = (size_t)l->in.nbytes;
            if (msg->claim) idist__message_give(ring, l, peer, msg, msg->claim);
            return;
        }

        idist__link_consumed(ring, l, (size_t)l->in.nbytes);
        if (xfer) idist__transfer_received(ring, xfer, peer);
    } else if (l->in.type == IDIST__DATA && xfer) {
        xfer->moved += (size_t)l->in.nbytes;
        if (xfer->moved < xfer->nbytes) return;
        idist__transfer_take(xfer);
        idist__transfer_received(ring, xfer, peer);
    } else if (l->in.type == IDIST__ABORT) {
        idist__incoming_abort(ring, l, peer);
    } else if (l->in.type == IDIST__BYE) {
        idist__incoming_bye(ring, l, peer);
    }
}

// ---- ring/engine/announce.h ----------------------------------------------------------------------

// ring/engine/announce.h: announces the calls in which this rank waits
//
// A rank announces the call in which it waits to connected members, and to each other member once
// it connects. Before the call fails, the rank announces it a second time (g->asked_ns), and
// connects to all members. The error text then names the members that do not answer.

// Tells a member, given by its rank in the group, that this rank waits in t.
static void idist__announce_to(idist__ring *ring, const idist__task *t, bool only_call, int rank) {
    const idist__ring_group *rg = idist__ring_group_of(t->group);
    idist__link *l = &ring->links[t->group->ranks[rank]];
    bool p2p = idist__kind_is_p2p(t->call.kind);
    const idist__transfer *xfer;
    idist__frame frame;

    if (rank == t->group->rank || (p2p && t->call.root != rank)) return;
    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__WAITS;
    frame.ctx = t->group->ctx;
    frame.fingerprint = p2p ? idist__fingerprint_of_task(t, IDIST__ALGO_AUTO)
                            : rg->history[t->seq % IDIST__HISTORY];
    frame.aux = l->p2p_received;
    frame.tag = t->group->seq;

    // Only the search for deadlocks needs these flags and this id. While this rank can do something
    // else, there is no deadlock.
    if (only_call) frame.flags = IDIST__ONLY_CALL;
    if (only_call && idist__deadlock_needs(l, t, rank)) frame.flags |= IDIST__NEEDS_YOU;
    for (xfer = l->waiting.first; xfer && p2p && only_call; xfer = xfer->next)
        if (xfer->task == t) frame.id = xfer->id;

    idist__link_control(ring, l, &frame, NULL);
    idist__deadlock_find(ring, t->group->ranks[rank]);
}

// Tells the other members of the group that this rank waits in t. They can then report a mismatch,
// or answer that they are alive.
static void idist__announce_wait(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool asks_all = t->group->asked_ns > t->started_ns;
    bool only_call = idist__task_only_call(ring->w) == t;
    int i;

    if (!t->group->inner && t->state != IDIST__TASK_ON_DEVICE && (t->late.asked || asks_all))
        idist__ask_begin(ring, t);
    if (t->late.asked) return; // the peer of the message has been told already

    for (i = 0; i < t->group->size && t->group->size > 1; i++) {
        idist__announce_to(ring, t, only_call, i);
        if (asks_all) idist__link_want(ring, &ring->links[t->group->ranks[i]]);
    }

    idist__ring_settle(ring);
}

// Tells a rank that has just connected what the other ranks have already been told.
static void idist__announce_late(idist__ring *ring, int peer) {
    idist__world *w = ring->w;
    idist__link *l = &ring->links[peer];
    const idist__task *t, *only = idist__task_only_call(w);
    const idist_group *g;

    // While the world is being closed, the rank_of table of its group no longer exists, but peers
    // must still learn that the world failed.
    for (g = &w->group; g; g = g->next)
        if (g->status != IDIST_OK &&
            (g == &w->group || (g->rank >= 0 && idist__ring_group_of(g)->rank_of[peer] >= 0)))
            idist__link_abort(ring, l, g->ctx, g->status, g->cause);

    // NOLINTNEXTLINE(clang-analyzer-*NullDereference)
    for (t = w->tasks.running; t && !ring->failed; t = t->next) {
        int rank = idist__ring_group_of(t->group)->rank_of[peer];
        if (t->late.announced && t->state != IDIST__TASK_DONE && !t->group->inner && rank >= 0)
            idist__announce_to(ring, t, t == only, rank);
    }

    if (ring->said_bye) idist__link_bye(ring, l);
    idist__link_flush(ring, l);
}

// ---- ring/engine/progress.h ----------------------------------------------------------------------

// ring/engine/progress.h: reads links, writes what is queued, finds links that have ended
//
// Drives the calls of the ring backend. Polls the links, hands frames to incoming.h, and decides
// which ended links mean a lost rank. Everything in ring/engine runs under the world's lock, which
// is released only while a thread sleeps.
//
// PATH OF A MESSAGE
//
// idist__progress_run       called by a thread that waits in a call, or by the progress thread
// idist__progress_move      for each link, writes what is queued and reads what has arrived
// idist__progress_read      reads bytes, directly into a large message or through the link's stage
// idist__progress_parse     cuts the stage into frames and payloads
// idist__incoming_begin     checks a complete header, and sets the payload's destination
// idist__incoming_end       ends the receive when the payload is complete
// idist__op_run             resumes the algorithm that posted the receive
//
// A link has a stage: memory for bytes that were read ahead. One read may deliver many small
// frames. The rest of a large payload bypasses the stage: it is read directly to its destination.
//
// With few links it is cheapest to try to read every one. With many links, ring->watch tells which
// ones have data. Links on which a read costs no system call are always tried.

enum {
    IDIST__PROGRESS_READS = 16,    // reads of one link before the next link's turn
    IDIST__PROGRESS_DIRECT = 4096, // bytes of the smallest payload that bypasses the stage
    IDIST__PROGRESS_FEW = 4,       // most polled links for which reading each is cheaper than poll
    IDIST__PROGRESS_TURNS = 8,     // one in this many polls by a caller reads all links
    IDIST__PROGRESS_WAKES = 3      // entries of a poll set before the connector's
};

static size_t idist__progress_least(size_t a, size_t b) { return a < b ? a : b; }

// Takes a frame, or the part of it that has arrived, out of the stage. Most frames have arrived
// completely, and copying a constant size takes a fifth of the instructions.
static void idist__progress_take_frame(idist__link *l, size_t unread) {
    size_t nbytes = idist__progress_least(IDIST__FRAME_BYTES - l->in_moved, unread);

    if (nbytes == IDIST__FRAME_BYTES) memcpy(&l->in, l->stage + l->at, IDIST__FRAME_BYTES);
    else memcpy((char *)&l->in + l->in_moved, l->stage + l->at, nbytes);
    l->in_moved += nbytes;
    l->at += nbytes;
}

// Cuts the bytes in the stage into frames and payloads, until `frames` frames are complete. Returns
// false if a frame is malformed.
static bool idist__progress_parse(idist__ring *ring, idist__link *l, int peer, size_t frames) {
    while (l->open && l->at < l->end && frames) {
        size_t unread = l->end - l->at;
        size_t nbytes;

        if (l->in_moved < IDIST__FRAME_BYTES) {
            idist__progress_take_frame(l, unread);
            if (l->in_moved < IDIST__FRAME_BYTES) break;
            if (!idist__incoming_begin(ring, l, peer)) return false;
        } else {
            nbytes = idist__progress_least(l->left, unread);

            if (l->target) {
                memcpy(l->target, l->stage + l->at, nbytes);
                l->target += nbytes;
            }

            l->left -= nbytes;
            l->at += nbytes;
        }

        if (l->in_moved == IDIST__FRAME_BYTES && !l->left) {
            l->in_moved = 0;
            frames--;
            idist__incoming_end(ring, l, peer);
        }

        idist__ring_settle(ring); // before a later frame completes the call that failed
    }

    if (l->at == l->end) l->at = l->end = 0;

    return true;
}

// Closes a link that can no longer be used. Declares the peer lost, unless it has sent BYE.
static void idist__progress_lost(idist__ring *ring, int peer, const char *how) {
    idist__link *l = &ring->links[peer];

    if (!l->open) return;
    idist__link_close(ring, l);
    if (!l->bye) idist__group_lose_rank(ring->w, peer, how);
}

// Returns the number of bytes to read into the stage, which is empty. If the transport shows
// headers without a system call, returns the size of the header for a frame with a large payload.
// The payload is then copied only once, to its destination.
static size_t idist__progress_capacity(const idist__link *l) {
    idist__frame frame;

    if (l->in_moved || !l->transport->peek_header || !l->transport->peek_header(l->port, &frame))
        return IDIST__STAGE_BYTES;
    if (frame.nbytes < IDIST__PROGRESS_DIRECT || frame.type == IDIST__RTS)
        return IDIST__STAGE_BYTES;
    return IDIST__FRAME_BYTES;
}

// Reads what has arrived, up to a limit. Returns false if the stream has just ended or broken: see
// idist__progress_judge.
static bool idist__progress_read(idist__ring *ring, int peer) {
    idist__link *l = &ring->links[peer];
    int reads;

    if (l->open && l->at < l->end && !idist__progress_parse(ring, l, peer, SIZE_MAX))
        idist__progress_lost(ring, peer, "it sent a malformed frame");

    for (reads = 0; reads < IDIST__PROGRESS_READS && l->open && !l->ended; reads++) {
        bool direct =
            l->in_moved == IDIST__FRAME_BYTES && l->left >= IDIST__PROGRESS_DIRECT && l->target;
        size_t capacity = direct ? l->left : idist__progress_capacity(l);
        ptrdiff_t n = l->transport->read(l->port, direct ? l->target : l->stage, capacity);

        if (n == 0) break;

        if (n < 0) {
            l->ended = true;
            l->ended_errno = errno;
            return false;
        }

        if (direct) {
            l->target += n;
            l->left -= (size_t)n;
            if (l->left) continue;
            l->in_moved = 0;
            idist__incoming_end(ring, l, peer);
            idist__ring_settle(ring);
            continue;
        }

        l->at = 0;
        l->end = (size_t)n;

        if (!idist__progress_parse(ring, l, peer, SIZE_MAX)) {
            idist__progress_lost(ring, peer, "it sent a malformed frame");
            break;
        }

        if ((size_t)n < capacity) break; // most likely there is no more
    }

    if (l->open && l->polled) idist__link_watch_next(ring, l, l->watched_out >= 0);

    return true;
}

// Copies the next frame in the stage of a link. Returns true if it is a complete EAGER message.
static bool idist__progress_staged(const idist__link *l, idist__frame *frame) {
    size_t unread = l->end - l->at;

    if (unread < sizeof *frame) return false;
    memcpy(frame, l->stage + l->at, sizeof *frame);

    return frame->type == IDIST__EAGER && frame->nbytes <= unread - sizeof *frame;
}

// Reads what has arrived on a link if its stage is empty. Returns true if the stage holds any
// bytes.
static bool idist__progress_fill(idist__link *l) {
    idist__frame frame;

    if (l->at < l->end) return true;
    if (!l->transport->peek_header(l->port, &frame)) return false;
    l->at = 0;
    l->end = (size_t)l->transport->read(l->port, l->stage, IDIST__STAGE_BYTES);

    return true;
}

// Tries to complete a receive without creating a task. Called if the receive has a request, if
// other calls are in progress, or if the link's stage holds bytes. Takes a message out of the
// stage, or a large one directly from the link. Messages that match earlier receives are first
// delivered to those receives.
static bool idist__progress_take(const idist_group *g, const idist__call *call) {
    idist__ring *ring = idist__ring_of(g->w);
    const idist__ring_group *rg = idist__ring_group_of(g);
    idist__link *l = idist__recv_link(g, call);
    int peer = l ? idist__link_rank(ring, l) : -1;
    idist__frame frame;

    if (!l) return false;
    if (l->at == l->end && !rg->recvs.first && !rg->wild.first &&
        l->transport->peek_header(l->port, &frame) && frame.nbytes >= IDIST__PROGRESS_DIRECT)
        return idist__recv_take(g, call, l, &frame);
    if (!idist__progress_fill(l)) return false;

    for (;;) {
        if (!idist__progress_staged(l, &frame) || frame.ctx != g->ctx) return false;
        if (frame.fingerprint.kind != IDIST__SEND) return false;
        if (!rg->recvs.first && !rg->wild.first) break;
        if (!idist__match_oldest(ring, g, peer, &frame)) break;
        if (!idist__progress_parse(ring, l, peer, 1)) {
            idist__progress_lost(ring, peer, "it sent a malformed frame");
            idist__ring_settle(ring);
            return false;
        }

        if (l->early || !l->open || g->status != IDIST_OK || !idist__progress_fill(l)) return false;
    }

    if (!idist__recv_wants(g, call, l, &frame)) return false;
    idist__block_copy(call->recv, l->stage + l->at + sizeof frame, (size_t)frame.nbytes);
    l->at += sizeof frame + (size_t)frame.nbytes;
    idist__recv_taken(ring, call, l, &frame);

    return true;
}

// Returns true if the process of a rank is known to have died, rather than to have left the world.
static bool idist__progress_has_died(const idist__ring *ring, int peer) {
    int local = ring->shm ? ring->shm->local[peer] : -1;
    return local >= 0 && idist__liveness_get(ring->shm, local) == IDIST__ENDED_DIED;
}

// Declares ranks lost because their streams have ended: all such ranks if `all` is set, otherwise
// only those that are known to have died.
static void idist__progress_declare(idist__ring *ring, bool all) {
    int i, me = ring->w->group.rank;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];
        char how[300];

        if (!l->open || !l->ended || !(all || idist__progress_has_died(ring, i))) continue;
        if (!idist__link_is_connected(l))
            snprintf(how, sizeof how,
                     "no connection to it from rank %d is possible (%s): it died, or left after a "
                     "failure",
                     me, ring->unreachable);
        else if (l->ended_errno)
            snprintf(how, sizeof how, "its connection to rank %d broke: %s", me,
                     strerror(l->ended_errno));
        else
            snprintf(how, sizeof how,
                     "its process ended, or closed the connection without idist_finalize");
        idist__progress_lost(ring, i, how);
    }
}

// Decides which ranks are lost after a stream has ended. When one rank dies, other ranks that learn
// of the death may end too, which ends their streams. These ranks may have sent the reason before
// they ended, so this function first reads everything that has arrived. Ranks whose processes have
// died are declared first, because such a rank is more likely to be the original cause than a rank
// that has left.
static void idist__progress_judge(idist__ring *ring) {
    int i;

    if (ring->shm) {
        idist__liveness_look(ring->shm, ring->shm->n);
        idist__liveness_any(ring->shm);
    }

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];

        if (l->open && !l->ended) idist__progress_read(ring, i);
        while (l->open && !l->ended && idist__progress_has_died(ring, i)) {
            ring->shm->ports[ring->shm->local[i]].look = true; // makes the read check for its death
            idist__progress_read(ring, i);                     // the rest of what the rank wrote
        }
    }

    if (ring->shm) idist__share_progress(ring); // a rank may leave once it has done its part
    idist__ring_settle(ring);

    idist__progress_declare(ring, false);
    idist__progress_declare(ring, true);
}

// Returns a call that waits for the peer or has something to send to it. Returns NULL if there is
// no such call.
static const idist__task *idist__progress_needs(const idist__ring *ring, int peer) {
    const idist__link *l = &ring->links[peer];
    const idist__transfer *xfer;
    const idist__task *t;

    for (xfer = l->out; xfer; xfer = xfer->next)
        if (xfer->task) return xfer->task;

    for (t = ring->w->tasks.running; t; t = t->next) {
        int rank = idist__ring_group_of(t->group)->rank_of[peer];
        if (rank < 0 || rank == t->group->rank || t->state == IDIST__TASK_ON_DEVICE) continue;
        if (idist__deadlock_needs(l, t, rank)) return t;
    }

    return NULL;
}

static bool idist__progress_all_left(const idist_group *g) {
    const idist__ring *ring = idist__ring_of(g->w);
    int i;

    for (i = 0; i < g->size; i++)
        if (i != g->rank && !ring->links[g->ranks[i]].bye) return false;

    return g->size > 1;
}

// Returns a receive from any source that can no longer be matched, or NULL if there is none. That
// is a receive in a group that contains the peer, and of which all members except this rank have
// left.
static const idist__task *idist__progress_forsaken(const idist__ring *ring, int peer) {
    const idist__task *t;

    for (t = ring->w->tasks.running; t; t = t->next) {
        if (t->call.kind != IDIST__RECV || t->call.root != IDIST_ANY_SOURCE ||
            t->state == IDIST__TASK_ON_DEVICE)
            continue;
        if (idist__ring_group_of(t->group)->rank_of[peer] < 0) continue;
        if (idist__deadlock_is_unmatched(t) && idist__progress_all_left(t->group)) return t;
    }

    return NULL;
}

// Fails the group of a call that needs a rank that has left the world. If the rank left after a
// failure, that failure is the cause. If the call is a message to or from the rank, the text adds
// that the rank has left.
static void idist__progress_miss(idist__ring *ring, const idist__task *t, int peer) {
    const idist__link *l = &ring->links[peer];
    idist_group *g = t->group;
    const char *host = ring->w->nodes[peer].hostname;
    char cause[400];

    if (g->inner) g = idist__ring_group_of(g)->whole;

    if (l->bye_status == IDIST_OK) {
        snprintf(cause, sizeof cause, "rank %d on %s was lost: it has left the world", peer, host);
        idist__ring_fail(ring, g, IDIST_ERR_PEER_LOST, cause);
        return;
    }

    idist__text_copy(cause, sizeof cause, l->text);
    if (idist__kind_is_p2p(t->call.kind))
        idist__text_append(cause, sizeof cause, "; rank %d on %s left the world afterwards", peer,
                           host);
    idist__ring_fail(ring, g, l->bye_status, cause);
}

// Finds calls that need a rank that has left the world, and fails their groups. A rank completes
// its calls before it leaves, so the other ranks can complete these calls as well. But a rank that
// has left begins no new call.
static void idist__progress_left(idist__ring *ring) {
    const idist__task *t;
    int i;

    for (i = 0; i < ring->w->group.size && !ring->failed; i++) {
        if (!ring->links[i].bye) continue;
        // A rank leaves cleanly only after all ranks have called idist_finalize. The calls that
        // other threads of this rank are in then end because this rank closes its world.
        if (ring->w->life.closing && ring->links[i].bye_status == IDIST_OK) continue;
        t = idist__progress_needs(ring, i);
        if (!t) t = idist__progress_forsaken(ring, i);
        if (t) idist__progress_miss(ring, t, i);
    }
}

// Warns once that this process is out of file descriptors. Calls that need a connection keep
// trying, and may miss their deadline.
static void idist__progress_short_of_fds(idist__ring *ring) {
    if (!ring->no_fds_ns)
        idist__log_print(&ring->w->log, IDIST_LOG_WARN,
                         "out of file descriptors: this rank cannot connect to others; raise "
                         "ulimit -n");
    ring->no_fds_ns = idist__os_clock_now_ns();
}

// Handles a rank that cannot be reached. If no call needs the rank, it may have left the world
// cleanly. Returns true if the rank is lost.
static bool idist__progress_unreachable(idist__ring *ring, const idist__connect_event *event) {
    idist__link *l = &ring->links[event->rank];

    if (!idist__progress_needs(ring, event->rank)) return false;
    l->ended = true;
    l->ended_errno = event->error;
    idist__text_copy(ring->unreachable, sizeof ring->unreachable,
                     event->error ? strerror(event->error) : idist__me.text);

    return true;
}

// Connects the links that want a connection, and accepts the connections that other ranks make.
// Returns true if anything has happened.
static bool idist__progress_connect(idist__ring *ring) {
    idist__connector *conn = ring->connector;
    idist__connect_event event;
    bool happened = false, ended = false;

    if (!conn) return false;

    while (ring->wanted) {
        idist__link *l = ring->wanted;

        ring->wanted = l->next_wanted;
        l->wanted = false;
        if (!l->open || idist__link_is_connected(l)) continue;
        if (idist__connector_start(conn, idist__link_rank(ring, l))) continue;
        idist__ring_fail_memory(ring, &ring->w->group);
        happened = true;
    }

    while (idist__connector_next(conn, &event)) {
        if (event.status == IDIST_ERR_NO_FDS) {
            idist__progress_short_of_fds(ring);
            continue;
        }

        happened = true;
        if (event.status == IDIST_OK) idist__announce_late(ring, event.rank);
        else if (idist__progress_unreachable(ring, &event)) ended = true;
    }

    if (ended) idist__progress_judge(ring);

    return happened;
}

// Serves the links on which ring->watch reports an event.
static void idist__progress_serve(idist__ring *ring) {
    idist__os_watch_events events;
    int i, count = idist__os_watch_take(ring->watch, &events);
    bool ended = false;

    for (i = 0; i < count; i++) {
        int rank = idist__os_watch_tag(&events, i);
        idist__link *l = &ring->links[rank];

        if (l->open && idist__os_watch_writable(&events, i)) idist__link_flush(ring, l);
        if (!l->open || !idist__os_watch_readable(&events, i)) continue;
        if (!idist__progress_read(ring, rank)) ended = true;
    }

    if (ended) idist__progress_judge(ring);
}

// Fills a poll set with the descriptors that can wake this rank. Returns the number of entries.
static int idist__progress_watch(idist__ring *ring, idist__os_poll_entry *polls) {
    idist__os_poll_watch(&polls[0], ring->wake, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[1], ring->shm ? ring->shm->beacon : -1, IDIST__OS_READABLE);
    idist__os_poll_watch(&polls[2], ring->watch, IDIST__OS_READABLE);
    if (!ring->connector) return IDIST__PROGRESS_WAKES;

    return IDIST__PROGRESS_WAKES +
           idist__connector_polls(ring->connector, polls + IDIST__PROGRESS_WAKES);
}

// Waits until the links have an event, the deadline passes or `wake` is called. Then serves the
// links.
static void idist__progress_sleep(idist__ring *ring, int64_t until_ns) {
    idist__os_poll_entry *polls = ring->polls;
    int i, ready, count;

    if (idist__progress_connect(ring)) until_ns = 0; // the caller must see what has happened

    if (ring->connector) {
        int64_t due_ns = idist__connector_due_ns(ring->connector);
        if (due_ns < until_ns) until_ns = due_ns;
    }

    count = idist__progress_watch(ring, polls);
    idist__os_mutex_unlock(&ring->w->lock);
    ready = idist__os_poll(polls, count, idist__os_clock_ms_until(until_ns));
    idist__os_mutex_lock(&ring->w->lock);

    if (ready <= 0) return;
    if (idist__os_poll_ready(&polls[0])) idist__os_poll_wakeup_clear(ring->wake);
    if (idist__os_poll_ready(&polls[1])) idist__os_beacon_clear(ring->shm->beacon);
    if (idist__os_poll_ready(&polls[2])) idist__progress_serve(ring);

    for (i = IDIST__PROGRESS_WAKES; i < count && !idist__os_poll_ready(&polls[i]); i++) continue;
    if (i == count) return;
    idist__connector_polled(ring->connector);
    idist__progress_connect(ring);
}

// Serves the links and advances the connections, without blocking. Uses its own poll set, because
// another thread may be in idist__progress_sleep.
static void idist__progress_turn(idist__ring *ring) {
    idist__os_poll_entry *polls = ring->polls + ring->poll_capacity;
    int count;

    if (ring->watch >= 0) idist__progress_serve(ring);
    if (!ring->connector) return;

    idist__progress_connect(ring);
    count = idist__connector_polls(ring->connector, polls);
    if (count <= 0 || idist__os_poll(polls, count, 0) <= 0) return;
    idist__connector_polled(ring->connector);
    idist__progress_connect(ring);
}

// Returns true if an algorithm waits for a frame from this link.
static bool idist__progress_awaits(const idist__link *l) {
    return l->posted.first || l->receiving.first || l->waiting.first;
}

static bool idist__progress_awaits_any(const idist__ring *ring) {
    int i;

    for (i = 0; i < ring->w->group.size; i++)
        if (ring->links[i].polled && idist__progress_awaits(&ring->links[i])) return true;

    return false;
}

// Makes all progress that is possible without blocking. If `all` is false and only a few links are
// polled, skips the polled links that no algorithm waits for, unless that would skip all of them.
static void idist__progress_move(idist__ring *ring, bool all) {
    bool few = ring->polled_link_count <= IDIST__PROGRESS_FEW && !ring->connector, ended = false;
    int i;

    if (ring->shm) idist__liveness_any(ring->shm); // if a rank has ended, the reads below say which
    if (few && !all) all = !idist__progress_awaits_any(ring);

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        if (!l->open || (l->polled && !few && !l->corked)) continue;
        if (l->out) idist__link_flush(ring, l);
        if (l->polled && (!few || (!all && !idist__progress_awaits(l)))) continue;
        if (!idist__progress_read(ring, i)) ended = true;
    }

    if (ended) idist__progress_judge(ring);
    if (!few) idist__progress_turn(ring);
    if (ring->shm) idist__share_progress(ring);
    if (ring->w->nnodes > 1) idist__host_run_progress(ring);
    if (ring->left_count) idist__progress_left(ring);
    if (ring->ask_again_ns) idist__ask_again(ring);
}

// Writes the sends that are held back. Called before a sleep.
static void idist__progress_uncork(idist__ring *ring) {
    int i;

    for (i = 0; ring->corked_count && i < ring->w->group.size; i++)
        if (ring->links[i].corked) idist__link_flush(ring, &ring->links[i]);
}

// Makes all progress that is possible without blocking, on all links.
static void idist__progress_move_all(idist__ring *ring) { idist__progress_move(ring, true); }

// Returns the interval at which a rank looks for processes of its host that have ended.
static int64_t idist__progress_look_ns(const idist__segment *seg) {
    return idist__liveness_patience(seg) * IDIST__LOOK_NS;
}

// Warns once that the system does not let us see whether other processes of this host have ended.
static void idist__progress_is_blind(idist__ring *ring) {
    if (!ring->told_blind)
        idist__log_print(
            &ring->w->log, IDIST_LOG_WARN,
            "cannot detect that other processes of this host have ended (%s), except by a "
            "time-out; IDIST_TRANSPORT=socket avoids this",
            strerror(ring->shm->blind_error));
    ring->told_blind = true;
}

// If it is time, checks whether a process on this host has ended, which neither reading nor the
// doorbell reports. Also checks the sockets for input, because this rank may never sleep. If
// `waits` is set, this rank is about to sleep. Otherwise it is busy, and checks only a few beacons.
static void idist__progress_look(idist__ring *ring, int64_t now_ns, bool waits) {
    if (!ring->shm || now_ns - ring->looked_ns <= idist__progress_look_ns(ring->shm)) return;
    ring->looked_ns = now_ns;
    idist__liveness_look(ring->shm,
                         waits ? idist__liveness_share(ring->shm) : IDIST__ENDED_LOOKS_LEAST);
    if (ring->shm->blind_error) idist__progress_is_blind(ring);
    if (idist__liveness_any(ring->shm)) idist__progress_move_all(ring);
    if (ring->polled_link_count) idist__progress_turn(ring);
}

// Makes progress for a caller that polls. A read that finds nothing costs a system call, so links
// that no algorithm waits for are read less often.
static void idist__progress_run(idist__world *w) {
    idist__ring *ring = idist__ring_of(w);

    idist__progress_move(ring, ring->polled_count++ % IDIST__PROGRESS_TURNS == 0);
    idist__ring_settle(ring);
}

// ---- ring/engine/sleep.h -------------------------------------------------------------------------

// ring/engine/sleep.h: sleeps, wakes, and waits until everything is written
//
// A rank sleeps in one of three ways:
//
//   no shared memory             in poll, on ring->watch (all connections), the connector's
//                                sockets, and this process's wake-up descriptor
//   shared memory and sockets    in poll as well, with its beacon in the set; its doorbell says
//                                ASLEEP_IN_POLL, so ranks of this host wake it through the beacon
//   shared memory only           on its doorbell, a futex (ASLEEP_ON_WORD)
//
// With shared memory the rank also checks for processes that have ended. It does so every
// IDIST__LOOK_NS (10 ms), in a long wait every 30 ms, and less often while many ranks sleep. See
// ring/shm/liveness.h.
//
// A rank marks its doorbell before it sleeps and then checks everything once more, so no wake-up is
// lost between the check and the sleep. A doorbell that has been rung is not rung again. The last
// check may itself consume a wake-up (it polls when there are many sockets), so we sleep only while
// the doorbell is still marked. Another thread that reads the links while we sleep may also consume
// a wake-up; that thread must call `wake` afterwards.

// Sleeps beside the other ranks of this host, in poll or on the doorbell. Returns when something
// happens or it is time to look for processes that have ended. Each sleep that nothing interrupts
// makes the next one a little longer.
static void idist__sleep_near_others(idist__ring *ring, int64_t now_ns, int64_t until_ns) {
    idist__world *w = ring->w;
    const idist__segment *seg = ring->shm;
    int64_t look_ns = now_ns + idist__progress_look_ns(seg) + ring->extra_sleep_ns;
    int64_t wake_ns = look_ns < until_ns ? look_ns : until_ns;

    if (ring->polled_link_count) {
        idist__progress_sleep(ring, wake_ns);
    } else {
        idist__os_mutex_unlock(&w->lock);
        idist__os_wake_await_word(&idist__segment_doorbell(seg, seg->me)->asleep,
                                  IDIST__ASLEEP_ON_WORD, wake_ns);
        idist__os_mutex_lock(&w->lock);
    }

    if (idist__os_clock_now_ns() < look_ns) ring->extra_sleep_ns = 0;
    else if (ring->extra_sleep_ns < 2 * IDIST__LOOK_NS) ring->extra_sleep_ns += IDIST__MS;
}

// Sleeps until input arrives, `wake` is called or the deadline passes. Handles what has arrived.
static void idist__sleep_begin(idist__world *w, int64_t until_ns) {
    idist__ring *ring = idist__ring_of(w);
    const idist__segment *seg = ring->shm;
    uint32_t ended = w->wait.ended_count;
    int64_t now_ns = idist__os_clock_now_ns();
    uint32_t place = ring->polled_link_count ? IDIST__ASLEEP_IN_POLL : IDIST__ASLEEP_ON_WORD;
    int awaited;

    idist__progress_uncork(ring);
    if (ring->ask_again_ns && ring->ask_again_ns < until_ns) until_ns = ring->ask_again_ns;

    if (!seg) {
        idist__progress_sleep(ring, until_ns);
        idist__ring_settle(ring);
        return;
    }

    idist__progress_look(ring, now_ns, true);
    awaited = idist__share_awaited(ring);
    idist__doorbell_arm(seg, place, awaited);
    idist__progress_move_all(ring);

    if (w->wait.ended_count == ended && !ring->failed && !idist__doorbell_was_rung(seg) &&
        idist__share_awaited(ring) == awaited)
        idist__sleep_near_others(ring, now_ns, until_ns);

    idist__doorbell_disarm(seg);
    idist__ring_settle(ring);
}

// Tells the other ranks of the host whether this rank is in a call that waits.
static void idist__sleep_attend(idist__world *w, bool waits) {
    const idist__ring *ring = idist__ring_of(w);
    if (ring->shm) idist__doorbell_attend(ring->shm, waits);
}

// Ends the sleep of a thread of this process. The caller holds the world's lock.
static void idist__sleep_wake(idist__world *w) {
    const idist__ring *ring = idist__ring_of(w);
    const idist__segment *seg = ring->shm;

    if (seg && __atomic_load_n(&idist__segment_doorbell(seg, seg->me)->asleep, __ATOMIC_RELAXED) ==
                   IDIST__ASLEEP_ON_WORD)
        idist__doorbell_wake(seg, seg->me);
    else idist__os_poll_wakeup_signal(ring->wake);
}

// Returns true if frames are waiting to be written. When all ranks leave cleanly, also returns true
// while a BYE has yet to arrive or an attempt to connect continues.
static bool idist__sleep_is_busy(const idist__ring *ring, bool clean) {
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];
        if (!idist__link_is_connected(l)) continue;
        if (l->out && !l->write_dead) return true;
        if (clean && !l->bye && l->transport->lossy_close) return true;
    }

    return clean && ring->connector && idist__connector_leave(ring->connector);
}

static void idist__sleep_drain(idist__ring *ring, bool clean, int64_t until_ns) {
    while (idist__sleep_is_busy(ring, clean) && idist__os_clock_ms_until(until_ns) != 0) {
        // Our doorbell is not marked, so no rank wakes us when a pipe has space again.
        int64_t soon_ns = idist__os_clock_now_ns() + IDIST__MS;

        idist__progress_sleep(ring, soon_ns < until_ns && ring->shm ? soon_ns : until_ns);
        idist__progress_look(ring, idist__os_clock_now_ns(), true);
        idist__progress_move_all(ring);
    }
}

static void idist__sleep_flush(idist__world *w, int64_t until_ns) {
    idist__sleep_drain(idist__ring_of(w), false, until_ns);
    idist__ring_settle(idist__ring_of(w));
}

// ---- ring/engine/start_task.h --------------------------------------------------------------------

// ring/engine/start_task.h: starts calls, and checks them against other ranks
//
// idist__start_task_start runs a call in one of five ways:
//
//   send, recv                 ring/msg/
//   a group of one rank        core/, a copy
//   members share memory       ring/share/
//   members on several hosts   ring/algo/host_run.h
//   otherwise                  ring/algo/choose.h, messages between ranks
//
// A collective of several ranks first records its fingerprint. Then it compares this fingerprint
// with those that other ranks have already sent for the call with the same number.

static void idist__start_task_compare(idist__ring *ring, const idist__task *t) {
    idist_group *g = t->group;
    const idist__ring_group *rg = idist__ring_group_of(g);
    const idist__fingerprint *ours = &rg->history[t->seq % IDIST__HISTORY];
    int i;

    for (i = 0; i < g->size; i++) {
        uint64_t key = idist__index_key(g->ctx, g->ranks[i], false, t->seq);
        idist__index_node *hook = ring->messages[key % IDIST__BUCKETS].first;
        const char *field = NULL;

        if (i == g->rank) continue;
        if (rg->seen[i].seq == t->seq && rg->seen[i].fingerprint.seq == t->seq)
            field = idist__fingerprint_difference(&rg->seen[i].fingerprint, ours);
        if (field)
            idist__history_mismatch(ring, g, g->ranks[i], &rg->seen[i].fingerprint, ours, field);

        for (; hook && !ring->failed; hook = hook->next) {
            const idist__message *msg = idist__index_message(hook);

            if (msg->peer != g->ranks[i] || msg->frame.ctx != g->ctx ||
                msg->frame.fingerprint.seq != t->seq)
                continue;
            if (msg->frame.fingerprint.kind == IDIST__SEND || msg->frame.type > IDIST__CTS)
                continue;
            idist__history_agrees(ring, g, g->ranks[i], &msg->frame);
        }
    }
}

// Tries to complete a blocking call without creating a task, while no task is running. Returns
// false if the call needs a task.
static bool idist__start_task_quick(idist_group *g, const idist__call *call) {
    const idist__link *l;

    if (call->kind == IDIST__SEND) return idist__send_quick(g, call);
    if (call->kind != IDIST__RECV) return idist__share_quick(g, call);
    l = idist__recv_link(g, call);
    if (!l) return false;

    return l->at < l->end ? idist__progress_take(g, call) : idist__recv_quick(g, call);
}

static bool idist__start_task_quick_message(idist_group *g, const idist__call *call) {
    return call->kind == IDIST__SEND ? idist__send_quick(g, call) : idist__progress_take(g, call);
}

// Before a call starts, reads the frames that have arrived, because they may report that the call's
// group has failed.
static void idist__start_task_listen(idist__ring *ring, const idist__task *t) {
    if (t->started_ns - ring->last_start_ns > IDIST__MS && !t->group->inner) {
        idist__progress_move_all(ring);
        idist__ring_settle(ring);
        if (t->state == IDIST__TASK_DONE) return;
    }

    ring->last_start_ns = t->started_ns;

    // A sleeping rank looks for processes that have ended, but this rank may never sleep.
    if (!t->group->inner) {
        idist__progress_look(ring, t->started_ns, false);
        idist__ring_settle(ring);
    }
}

static void idist__start_task_start_collective(idist__ring *ring, idist__task *t,
                                               idist__algorithm algorithm) {
    bool shared = idist__share_serves(algorithm);
    bool by_host = algorithm == IDIST__ALGO_BY_HOST, prepared = true;

    if (shared) prepared = idist__share_prepare(t, algorithm);
    else if (by_host) idist__host_run_prepare(t);
    else prepared = idist__choose_begin(t, algorithm);

    if (!prepared) {
        idist__ring_fail_memory(ring, t->group);
        return;
    }

    idist__history_add(t, idist__op_of(t), algorithm);
    idist__start_task_compare(ring, t);

    if (shared) {
        idist__share_start(t);
    } else if (by_host) {
        idist__host_run_start(t);
    } else {
        idist__choose_run(t);
        if (!ring->failed) idist__op_run(t);
    }
}

static void idist__start_task_start(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool collective = idist__kind_is_collective(t->call.kind);
    idist__algorithm algorithm = IDIST__ALGO_AUTO;

    if (ring->shm) idist__doorbell_widen(ring->shm);
    if (collective) idist__mem_clear(t->impl, sizeof(idist__op));
    else idist__op_of(t)->transfer = NULL;

    if (collective && t->group->size > 1) algorithm = idist__choose_algorithm(t->group, &t->call);

    idist__start_task_listen(ring, t);
    if (t->state == IDIST__TASK_DONE) return;

    if (t->call.kind == IDIST__SEND) idist__send_start(t);
    else if (t->call.kind == IDIST__RECV) idist__recv_start(t);
    else if (t->group->size == 1) idist__self_collective(t);
    else idist__start_task_start_collective(ring, t, algorithm);

    idist__ring_settle(ring);
}

// ---- ring/engine/cancel.h ------------------------------------------------------------------------

// ring/engine/cancel.h: cancels a call, and tells other ranks that a group failed
//
// After idist__cancel_task, the call's buffers are not accessed again, whatever still arrives. A
// task's transfers in the links are handled according to their state:
//
//   receives posted, or matched    removed; payloads that still arrive for them are dropped
//   sends not begun                removed; the credit of an eager send is returned
//   sends partly written           completed from a copy, to keep the stream valid
//   sends that wait for CTS        removed; the answer is ignored
//
// If no other rank has seen the call, cancelling it has no consequences. If a peer has already seen
// it, the group fails too. The return values tell which is the case.

// Invalidates the addresses that this rank has announced in RTS frames. From now on, peers on this
// host discard what they read at these addresses.
static void idist__cancel_withdraw(const idist__ring *ring) {
    if (!ring->shm) return;
    __atomic_fetch_add(&idist__segment_doorbell(ring->shm, ring->shm->me)->withdrawn, 1u,
                       __ATOMIC_SEQ_CST);
}

// Removes the transfers of a task from a list. Returns true if there were any.
static bool idist__cancel_list(idist__ring *ring, const idist__transfer_list *list,
                               const idist__task *t) {
    idist__transfer *xfer, *next;
    bool any = false;

    for (xfer = list->first; xfer; xfer = next) {
        next = xfer->next;
        if (xfer->task != t) continue;
        idist__transfer_take(xfer);
        idist__transfer_free(ring, xfer);
        any = true;
    }

    return any;
}

// Completes a frame that is partly written. Copies the payload, because the buffer belongs to the
// caller again.
static void idist__cancel_written(idist__ring *ring, idist__link *l, idist__transfer *xfer) {
    size_t unwritten = xfer->piece - xfer->piece_moved;

    if (idist__kind_is_p2p(xfer->task->call.kind)) idist__op_of(xfer->task)->transfer = NULL;
    xfer->task = NULL;
    if (xfer->frame.type == IDIST__RTS) idist__cancel_withdraw(ring);

    if (!unwritten) {
        // Once written, an RTS would wait for its CTS. Changing its type here, after the type was
        // written, prevents that.
        if (xfer->frame.type == IDIST__RTS) xfer->frame.type = IDIST__CREDIT;
        xfer->nbytes = xfer->piece = xfer->piece_moved = xfer->moved = 0;
        return;
    }

    xfer->owned = (char *)idist__mem_raw(&ring->w->cfg.mem, unwritten);

    if (!xfer->owned) {
        idist__link_write_failed(ring, l);
        return;
    }

    memcpy(xfer->owned, xfer->data + xfer->moved + xfer->piece_moved, unwritten);
    xfer->data = xfer->owned;
    xfer->moved = xfer->piece_moved = 0;
    xfer->nbytes = xfer->piece = unwritten;
}

// Removes a task's transfers from the output queue. Returns true if the peer may have seen any of
// them.
static bool idist__cancel_queue(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__transfer **at = &l->out;
    bool known = false;

    if (l->out && l->out->task == t && l->out->frame_moved + l->out->piece_moved > 0) {
        known = true;
        idist__cancel_written(ring, l, l->out);
    }

    while (*at) {
        idist__transfer *xfer = *at;

        if (xfer->task != t) {
            at = &xfer->next;
            continue;
        }

        known = known || xfer->started;
        if (xfer->frame.type == IDIST__EAGER) l->window += xfer->nbytes + IDIST__FRAME_BYTES;
        *at = xfer->next;
        idist__transfer_free(ring, xfer);
    }

    l->out_end = at;

    return known;
}

// Detaches a task from the unexpected messages of a link. Returns true if the task had claimed one.
static bool idist__cancel_early(idist__ring *ring, idist__link *l, const idist__task *t) {
    idist__message *msg, *next;
    bool claimed = false;

    for (msg = l->early; msg; msg = next) {
        next = msg->next;

        if (msg->claim && msg->claim->task == t) {
            idist__transfer_free(ring, msg->claim);
            msg->claim = NULL;
            claimed = true;
        }

        if (msg->self_send && msg->self_send->task == t) {
            idist__transfer_free(ring, msg->self_send);
            idist__message_free(ring, l, msg);
        }
    }

    return claimed;
}

// Removes a task's transfers from all links. Returns true if a peer may have seen any of them.
static bool idist__cancel_links(idist__ring *ring, const idist__task *t) {
    bool known = false;
    int i;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];

        if (l->in_transfer && l->in_transfer->task == t) {
            idist__transfer *xfer = l->in_transfer;
            if (l->in.type == IDIST__EAGER) idist__transfer_free(ring, xfer); // in no list
            l->in_transfer = NULL;
            l->target = NULL;
            known = true;
        }

        known |= idist__cancel_early(ring, l, t);
        known |= idist__cancel_queue(ring, l, t);
        if (ring->shm && idist__deadlock_has_transfer(&l->waiting, t)) idist__cancel_withdraw(ring);
        known |= idist__cancel_list(ring, &l->waiting, t);
        known |= idist__cancel_list(ring, &l->receiving, t);
        idist__cancel_list(ring, &l->posted, t);
    }

    return known;
}

// Cancels a send that waits for CTS, or a receive that has found no message. This is a fast path:
// such a task has one transfer, and thousands of tasks may be cancelled at the same time. Returns
// false for any other task.
static bool idist__cancel_waiting(idist__ring *ring, const idist__task *t) {
    idist__transfer *xfer = idist__kind_is_p2p(t->call.kind) ? idist__op_of(t)->transfer : NULL;

    if (!xfer || !xfer->list) return false;
    if (t->call.kind == IDIST__RECV && !idist__deadlock_is_unmatched(t)) return false;
    if (t->call.kind == IDIST__SEND) idist__cancel_withdraw(ring);
    idist__transfer_take(xfer);
    idist__transfer_free(ring, xfer);

    return true;
}

// Withdraws the announcement that this rank waits in a receive.
static void idist__cancel_announced(idist__ring *ring, const idist__task *t) {
    idist__frame frame;

    if (!t->late.announced || t->call.root < 0) return;
    memset(&frame, 0, sizeof frame);
    frame.type = IDIST__WAITS;
    frame.fingerprint.kind = IDIST__RECV;
    idist__link_control(ring, &ring->links[idist__group_world_rank(t->group, t->call.root)], &frame,
                        NULL);
}

static void idist__cancel_collective(idist__ring *ring, idist__task *t) {
    idist__op *op = idist__op_of(t);

    if (op->algorithm == IDIST__ALGO_BY_HOST && !idist__host_run_cancel(t)) return;
    if (idist__share_serves(op->algorithm)) idist__share_cancel(t);

    idist__mem_free(&ring->w->cfg.mem, op->memory);
    op->memory = NULL;
}

static bool idist__cancel_task(idist__task *t) {
    idist__ring *ring = idist__ring_of(t->group->w);
    bool was_waiting = idist__cancel_waiting(ring, t);
    bool known = was_waiting || idist__cancel_links(ring, t); // the peer knows of a waiting send

    if (t->call.kind == IDIST__SEND) return !known;

    if (t->call.kind == IDIST__RECV) {
        idist__cancel_announced(ring, t);
        return was_waiting;
    }

    idist__cancel_collective(ring, t);

    return false;
}

// Cancels a receive if it has found no message. Such a receive is in a list of its group, and in no
// link's list.
static bool idist__cancel_retract(idist__task *t) {
    return idist__deadlock_is_unmatched(t) && idist__cancel_task(t);
}

// Tells the other members that a group failed.
static void idist__cancel_tell(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    const idist__ring_group *rg = idist__ring_group_of(g);
    int i;

    idist__share_withdraw(g);

    for (i = 0; i < g->size; i++)
        if (i != g->rank)
            idist__link_abort(ring, &ring->links[g->ranks[i]], g->ctx, g->status, g->cause);

    if (rg->local) idist__group_fail(rg->local, g->status, g->cause);
    if (rg->leaders) idist__group_fail(rg->leaders, g->status, g->cause);
    idist__share_await_writers(g);
}

// ---- ring/engine/members.h -----------------------------------------------------------------------

// ring/engine/members.h: opens and closes a group, and its groups by host
//
// Frames for a group may arrive before the group exists on this rank. The links keep these frames
// until the group is opened. Closing a group drops the frames that are left. The ring remembers the
// contexts of the IDIST__CLOSED groups that were closed last, and drops frames that arrive for
// these groups.
//
// Once a group is open, its members meet. If they all share memory, each member has offered a
// region of shared memory, and collectives use these regions. If the members are on several hosts,
// the group gets two inner groups for collectives by host (`local` and `leaders`, see
// ring/algo/host_plan.h).

enum { IDIST__GROUP_LOCAL = 1, IDIST__GROUP_LEADERS = 2 }; // mixed into the parent's context

// Drops the frames that have arrived for a context, and marks the context as closed so that later
// frames are dropped too.
static void idist__members_drop(idist__ring *ring, uint64_t ctx, idist_status status) {
    idist__closed *closed = &ring->closed[ring->nclosed++ % IDIST__CLOSED];
    int i;

    closed->ctx = ctx;
    closed->status = status;

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *msg, *next;

        for (msg = l->early; msg; msg = next) {
            bool complete = msg->frame.type == IDIST__EAGER && msg->moved == msg->frame.nbytes;
            size_t nbytes = (size_t)msg->frame.nbytes;

            next = msg->next;
            if (msg->frame.ctx != ctx) continue;
            idist__message_free(ring, l, msg);
            if (complete && i != ring->w->group.rank) idist__link_consumed(ring, l, nbytes);
        }
    }
}

static bool idist__members_spans_hosts(const idist_group *g) {
    const idist__rank_info *nodes = g->w->nodes;
    int i;

    for (i = 1; i < g->size; i++)
        if (nodes[g->ranks[i]].host != nodes[g->ranks[0]].host) return true;

    return false;
}

static void idist__members_close(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    bool has_failed = g->status != IDIST_OK && !g->inner && rg->spans_hosts;
    bool drops_local = has_failed && !rg->local, drops_leaders = has_failed && !rg->leaders;
    const idist_group *parent;

    idist__members_drop(ring, g->ctx, g->status);
    if (rg->local) idist__group_free(rg->local);
    if (rg->leaders) idist__group_free(rg->leaders);

    // If the group failed before this rank made the groups by host, other ranks may already have
    // sent frames for those groups.
    if (drops_local)
        idist__members_drop(ring, idist__hash_mix(g->ctx, IDIST__GROUP_LOCAL), g->status);
    if (drops_leaders)
        idist__members_drop(ring, idist__hash_mix(g->ctx, IDIST__GROUP_LEADERS), g->status);

    for (parent = &g->w->group; g->inner && parent; parent = parent->next) {
        idist__ring_group *of =
            parent->rank >= 0 && parent->impl ? idist__ring_group_of(parent) : NULL;
        if (of && of->local == g) of->local = NULL;
        if (of && of->leaders == g) of->leaders = NULL;
    }

    idist__pool_leave(g);
    idist__mem_free(&g->w->cfg.mem, rg->rank_of);
    idist__mem_free(&g->w->cfg.mem, rg->seen);
}

// Handles the frames that a rank sent for this group before the group existed here.
static void idist__members_hear(idist_group *g, idist__link *l) {
    idist__message *msg;

    for (msg = l->early; msg; msg = msg->next) {
        if (msg->frame.ctx != g->ctx || !msg->unknown) continue;
        msg->unknown = false;
        l->unknown_count--;
    }

    for (msg = l->early; msg; msg = msg->next)
        if (msg->frame.ctx == g->ctx && msg->frame.type == IDIST__ABORT)
            idist__group_fail(g, (idist_status)(int)(int64_t)msg->frame.aux, msg->data);
}

// Initializes the ring's part of a group.
static idist_status idist__members_init(idist_group *g) {
    idist__ring *ring = idist__ring_of(g->w);
    idist__ring_group *rg = idist__ring_group_of(g);
    const idist_allocator *mem = &g->w->cfg.mem;
    int i;

    rg->rank_of = (int *)idist__mem_alloc(mem, sizeof(int) * (size_t)g->w->group.size);
    rg->seen = (idist__seen *)idist__mem_alloc(mem, sizeof *rg->seen * (size_t)g->size);

    if (!rg->rank_of || !rg->seen) {
        idist__mem_free(mem, rg->rank_of);
        idist__mem_free(mem, rg->seen);
        return IDIST_ERR_NO_MEMORY;
    }

    rg->spans_hosts = idist__members_spans_hosts(g);
    for (i = 0; i < g->w->group.size; i++) rg->rank_of[i] = -1;
    for (i = 0; i < g->size; i++) rg->rank_of[g->ranks[i]] = i;

    for (i = 0; i < g->size; i++) {
        idist__link *l = &ring->links[g->ranks[i]];

        idist__members_hear(g, l);

        if (i != g->rank && !l->open && !l->bye) {
            char cause[200];
            snprintf(cause, sizeof cause, "rank %d on %s was lost", g->ranks[i],
                     g->w->nodes[g->ranks[i]].hostname);
            idist__group_fail(g, IDIST_ERR_PEER_LOST, cause);
        }
    }

    return IDIST_OK;
}

// ---- groups by host ----

// Creates an inner group of another group. The members are given as world ranks.
static idist_status idist__members_new_inner(idist_group *parent, uint64_t salt, const int *ranks,
                                             int n, idist_group **out) {
    idist__world *w = parent->w;
    idist_group *g = idist__group_new(w, n);
    idist_status status;

    if (!g) return IDIST_ERR_NO_MEMORY;
    idist__group_set(g, idist__hash_mix(parent->ctx, salt), ranks, n);
    g->inner = true;
    status = idist__members_init(g);

    if (status != IDIST_OK) {
        g->rank = -1; // the group is not open
        idist__group_free(g);
        return status;
    }

    idist__ring_group_of(g)->whole = parent;
    g->next = w->group.next;
    w->group.next = g;
    *out = g;

    return IDIST_OK;
}

typedef struct idist__group_hosts { // the members of a group by host
    uint64_t *local_offers;         // regions that the members on this host offer
    int *local, *leaders; // world ranks: the members on this host, the first member of each host
    int local_count, leader_count;
    bool in_order; // the members of each host are consecutive
} idist__group_hosts;

static void idist__members_find_hosts(const idist_group *g, const uint64_t *offers,
                                      idist__group_hosts *hosts) {
    int i, k, changes = 1;

    for (i = 0; i < g->size; i++) {
        uint64_t host = idist__ring_group_host(g, i);

        for (k = 0; k < i && idist__ring_group_host(g, k) != host; k++) continue;

        if (k == i) hosts->leaders[hosts->leader_count++] = g->ranks[i];
        if (i && host != idist__ring_group_host(g, i - 1)) changes++;
        if (host != idist__ring_group_host(g, g->rank)) continue;
        hosts->local_offers[hosts->local_count] = offers ? offers[i] : 1;
        hosts->local[hosts->local_count++] = g->ranks[i];
    }

    hosts->in_order = changes == hosts->leader_count;
}

static idist_status idist__members_split_by_host(idist_group *g, const idist__group_hosts *hosts) {
    idist__ring_group *rg = idist__ring_group_of(g);
    idist_status status = IDIST_OK;

    rg->nhosts = hosts->leader_count;
    rg->in_order = hosts->in_order;

    if (hosts->local_count > 1)
        status = idist__members_new_inner(g, IDIST__GROUP_LOCAL, hosts->local, hosts->local_count,
                                          &rg->local);
    if (status == IDIST_OK && rg->local) status = idist__pool_meet(rg->local, hosts->local_offers);
    if (status == IDIST_OK && hosts->local[0] == g->w->group.rank)
        status = idist__members_new_inner(g, IDIST__GROUP_LEADERS, hosts->leaders,
                                          hosts->leader_count, &rg->leaders);

    return status;
}

// Sets up a group's shared-memory regions, or its groups by host. The array `offers` contains the
// region that each member offers. For the world `offers` is NULL: each member offers its first
// region. The world needs no exchange, because all ranks know the table of hosts and all first
// regions are free.
static idist_status idist__members_meet(idist_group *g, const uint64_t *offers) {
    const idist_allocator *mem = &g->w->cfg.mem;
    size_t n = (size_t)g->size;
    idist__group_hosts hosts;
    idist_status status = IDIST_OK;

    idist__ring_group_of(g)->met = true;
    memset(&hosts, 0, sizeof hosts);
    hosts.local_offers =
        (uint64_t *)idist__mem_alloc(mem, n * (sizeof *hosts.local_offers + 2 * sizeof(int)));
    if (!hosts.local_offers) return IDIST_ERR_NO_MEMORY;
    hosts.local = (int *)(void *)(hosts.local_offers + n);
    hosts.leaders = hosts.local + n;
    idist__members_find_hosts(g, offers, &hosts);

    if (hosts.leader_count == 1) status = idist__pool_meet(g, hosts.local_offers);
    else if (hosts.leader_count < g->size) status = idist__members_split_by_host(g, &hosts);

    idist__mem_free(mem, hosts.local_offers);

    return status;
}

static idist_status idist__members_open(idist_group *g) {
    idist_status status = idist__members_init(g);

    if (status != IDIST_OK || g != &g->w->group) return status;
    idist__pool_offer_region(g);
    status = idist__members_meet(g, NULL);
    if (status != IDIST_OK) idist__members_close(g);

    return status;
}

// ---- memory that other ranks can reach ----

static void *idist__members_alloc(idist__world *w, size_t nbytes) {
    idist__segment *seg = idist__ring_of(w)->shm;
    void *p = seg && seg->window ? idist__window_alloc(seg->window, nbytes) : NULL;

    if (p) idist__view_publish(seg);
    return p;
}

// ---- ring/join/join_state.h ----------------------------------------------------------------------

// ring/join/join_state.h: the state of a join, and names of values in the store

typedef struct idist__record { // what a rank publishes about itself
    char hostname[64];
    uint64_t host;       // equal for all ranks of a host
    char local[64];      // address of the rank's local socket, or ""
    uint64_t processors; // equal for all ranks on the same processors
    uint32_t shm;        // nonzero if the rank takes part in shared memory
    uint32_t algorithm;  // the rank's IDIST_ALGO, which must be equal on all ranks
    // idist__config_reach_key if the rank has reached the store through loopback, otherwise 0.
    uint64_t loopback;
} idist__record;

typedef struct idist__tcp_record {
    char text[160];         // where a rank listens: "tcp:[ADDRESS]:PORT"
    uint32_t round_trip_us; // round trip to the store's server; 0 if not known
    uint32_t mbits;         // bandwidth of the interface; 0 if not known
    uint32_t sockets;       // the rank's IDIST_SOCKETS; 0 if automatic
    uint64_t window_nbytes; // bytes that can be in flight in one socket; 0 if not known
} idist__tcp_record;

typedef struct idist__join {
    idist__world *w;
    idist__ring *ring;
    idist_store *store;
    bool owns_store;              // we opened the store; otherwise it is a view of the user's store
    bool lost_server;             // the server ended while we opened the store
    bool others_know;             // another process has told all ranks why we give up
    bool told_by_server;          // the server has told all ranks, because a process has ended
    bool voting;                  // we gave up while the connections of this host carry votes
    bool warned;                  // we have logged that the server refused a process
    char prefix[64];              // prefix of our names in the store
    idist__tcp_record *tcp;       // by rank; NULL if there is no TCP
    const idist__record *records; // by rank
    idist__connector *connector;
    bool *wanted;     // by rank: true if a connection is needed now and missing
    int wanted_count; // number of entries of `wanted` that are true
    int64_t deadline_ns;
} idist__join;

// Formats the name of a value in the store: a value of one rank, or of the whole job if rank < 0.
static void idist__join_state_name(const idist__join *j, char *name, size_t capacity,
                                   const char *what, int rank) {
    if (rank < 0) snprintf(name, capacity, "%s%s", j->prefix, what);
    else snprintf(name, capacity, "%s%s/%d", j->prefix, what, rank);
}

static idist_status idist__join_state_set(idist__join *j, const char *what, int rank,
                                          const void *value, size_t nbytes) {
    char name[128];
    idist__join_state_name(j, name, sizeof name, what, rank);
    return idist__store_post(j->store, name, value, nbytes);
}

// Returns true if the store belongs to a torch agent, which outlives the workers.
static bool idist__join_state_is_torch(const idist__join *j) {
    return j->w->cfg.meet.kind == IDIST__MEET_TORCH;
}

// Returns the server of our store if it runs in this process, or NULL otherwise.
static const idist__server *idist__join_state_server(const idist__join *j) {
    if (!j->owns_store || j->store->run != idist__client_run) return NULL;
    return ((const idist__client_store *)j->store->impl)->server;
}

// Returns the interval in ms at which a waiting rank asks whether another rank has given up. The
// interval is longer in a large world, where all ranks ask one server.
static int idist__join_state_ask_ms(const idist__join *j) {
    return j->w->group.size < 800 ? 100 + j->w->group.size / 2 : 500;
}

// Returns the number of milliseconds until the deadline, at least 1, or -1 if there is no deadline.
static int idist__join_state_ms_left(const idist__join *j) {
    int64_t left;

    if (j->deadline_ns == IDIST__FOREVER) return -1;
    left = (j->deadline_ns - idist__os_clock_now_ns()) / IDIST__MS;
    if (left < 1) return 1;
    return left > INT32_MAX ? INT32_MAX : (int)left;
}

// ---- ring/join/join_failure.h --------------------------------------------------------------------

// ring/join/join_failure.h: a rank that cannot join tells the other ranks why
//
// If one rank cannot join, no rank can. A rank that has already joined learns of the failure in its
// first call, because the world's group has failed. The other ranks should not have to wait for the
// time-out. Therefore the rank that gives up writes the reason into the store under "failed", which
// waiting ranks check regularly. A rank that has read the reason counts itself in "heard". The
// owner of the store keeps the store open until all ranks have read the reason, but for at most
// half a second.
//
// A process that dies cannot write the reason. The store's server sets "failed" on behalf of that
// process; see launch/draw.h.

enum { IDIST__FAILURE_STAY_MS = 500, IDIST__FAILURE_LOST_MS = 300 };

// Fails because descriptors are short. Rank 0 needs the most descriptors: for each rank, one
// connection to the store and the sockets of a link.
static idist_status idist__join_failure_no_fds(const idist__join *j) {
    int sockets = j->connector ? j->connector->socket_count : 1;

    return idist__fail(
        IDIST_ERR_NO_FDS,
        "initialize: out of file descriptors; a world of %d needs up to %d: raise ulimit -n",
        j->w->group.size, (1 + sockets) * j->w->group.size + 8);
}

// Appends a possible cause, which the server has observed, to the error text that names the late
// ranks.
static idist_status idist__join_failure_hint(const idist__join *j) {
    const idist__server *server = idist__join_state_server(j);
    int refused = server ? __atomic_load_n(&server->refused_count, __ATOMIC_RELAXED) : 0;

    if (server && __atomic_load_n(&server->other_byte_order, __ATOMIC_RELAXED))
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". A rank runs on a machine of another byte order; mixed worlds are not supported");
    else if (server && __atomic_load_n(&server->is_unlike, __ATOMIC_ACQUIRE))
        idist__text_append(idist__me.text, sizeof idist__me.text, ". Meanwhile %s", server->unlike);
    else if (refused)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". %d connections were refused or broke: a wrong secret, another build, a process of "
            "another job, or a rank that died",
            refused);

    return IDIST_ERR_TIMEOUT;
}

// If joining failed because the server of the store ended, changes the error text so that it names
// the server's process.
static void idist__join_failure_of_store(const idist__join *j, idist_status status) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__join_state_is_torch(j);
    bool lost = j->lost_server || (j->store && j->store->is_lost);
    const char *cause = idist__text_behind(idist__me.text, "initialize: ");

    if (status != IDIST_ERR_PEER_LOST || !lost) return;
    idist__fail(status, "initialize: %s: %s",
                by_rank_0 ? "rank 0 was lost, or gave up" : "the store's server was lost",
                idist__text_behind(cause, "store: "));
}

// Immediately logs that a process with another secret has connected, because the ranks may wait for
// that process until they time out. The process may also be unrelated to the job.
static void idist__join_failure_warn(idist__join *j) {
    const idist__server *server = idist__join_state_server(j);

    if (j->warned || !server || !__atomic_load_n(&server->is_unlike, __ATOMIC_ACQUIRE)) return;
    j->warned = true;
    idist__log_print(&j->w->log, IDIST_LOG_WARN,
                     "initialize: %s (unless that process is not part of this job)",
                     server->unlike);
}

// If some rank has given up, fails for the same reason. Otherwise returns IDIST_OK.
static idist_status idist__join_failure_check(idist__join *j) {
    const idist__server *server = idist__join_state_server(j);
    idist__failure failure;
    char name[128];
    const char *names[1];
    bool exists = false;
    size_t nbytes = 0;
    idist_status status;

    if (server && __atomic_load_n(&server->out_of_fds, __ATOMIC_RELAXED))
        return idist__join_failure_no_fds(j);
    idist__join_failure_warn(j);

    names[0] = name;
    idist__join_state_name(j, name, sizeof name, "failed", -1);
    status = idist_store_check(j->store, names, 1, &exists);
    if (status == IDIST_ERR_PEER_LOST) return status;
    if (status != IDIST_OK || !exists) return IDIST_OK;
    status = idist_store_get(j->store, name, &failure, sizeof failure, &nbytes, 1000);
    if (status != IDIST_OK || nbytes != sizeof failure) return IDIST_OK;

    failure.text[sizeof failure.text - 1] = 0;
    j->others_know = true;
    j->told_by_server = failure.by_will != 0;

    if (failure.status == IDIST_ERR_TIMEOUT) { // the text names the ranks that are late
        idist__fail(IDIST_ERR_TIMEOUT, "initialize: %s", failure.text);
        return idist__join_failure_hint(j);
    }

    if (failure.rank < 0)
        return idist__fail((idist_status)failure.status,
                           "initialize: a process with an assigned rank could not join: %s",
                           failure.text);

    return idist__fail((idist_status)failure.status, "initialize: rank %d could not join: %s",
                       (int)failure.rank, failure.text);
}

// Keeps the store open until all other ranks have read the reason, but for at most
// IDIST__FAILURE_STAY_MS.
static void idist__join_failure_stay(idist__join *j) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_STAY_MS);
    int64_t heard = 0;
    int others = j->w->group.size - 1 - (j->told_by_server ? 1 : 0);
    char name[128];

    idist__join_state_name(j, name, sizeof name, "heard", -1);

    while (idist_store_add(j->store, name, 0, &heard) == IDIST_OK && heard < others) {
        if (idist__os_clock_now_ns() >= until_ns) break;
        idist__os_clock_pause_ms(5);
    }
}

// Tells the other ranks why this rank gives up, unless they know the reason already.
static void idist__join_failure_tell(idist__join *j, idist_status status) {
    idist__failure failure;
    char name[128], text[sizeof idist__me.text];
    int64_t heard;

    if (!j->store || !j->prefix[0]) return;
    memcpy(text, idist__me.text, sizeof text); // the store may overwrite the text
    memset(&failure, 0, sizeof failure);
    failure.status = (int32_t)status;
    failure.rank = j->w->group.rank;
    idist__text_copy(failure.text, sizeof failure.text, idist__text_behind(text, "initialize: "));

    // If the reason does not reach the store, the other ranks find out when the store ends.
    idist__join_state_name(j, name, sizeof name, "failed", -1);
    if (!j->others_know) idist_store_set(j->store, name, &failure, sizeof failure);
    idist__store_drop_will(j->store);

    idist__join_state_name(j, name, sizeof name, "heard", -1);
    if (failure.rank > 0) idist_store_add(j->store, name, 1, &heard);
    else if (j->owns_store) idist__join_failure_stay(j);
    memcpy(idist__me.text, text, sizeof text);
}

// Fails because the connection to a rank ended. First waits for up to IDIST__FAILURE_LOST_MS for a
// reason in the store. The rank may have given up and stored its reason, or the server may be about
// to report that the rank died.
static idist_status idist__join_failure_lost(idist__join *j, int rank, const char *how) {
    int64_t until_ns = idist__os_clock_deadline(IDIST__FAILURE_LOST_MS);
    char text[300];

    idist__text_copy(text, sizeof text, how); // `how` may point to the text of the last failure

    do {
        idist_status status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        idist__os_clock_pause_ms(10);
    } while (idist__os_clock_ms_until(until_ns) != 0);

    return idist__fail(IDIST_ERR_PEER_LOST, "initialize: rank %d on %s was lost: %s", rank,
                       j->w->nodes[rank].hostname, text);
}

// Fails because the time is up and the store's server does not answer.
static idist_status idist__join_failure_silent(const idist__join *j) {
    bool by_rank_0 = j->w->cfg.store == NULL && !idist__join_state_is_torch(j);

    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: %s no longer answers: it is stopped, or the network to it is down",
        by_rank_0 ? "rank 0" : "the store's server");
}

// Fails because the time is up and rank 0 has not set a value that the whole job needs.
static idist_status idist__join_failure_without_0(idist__join *j, const char *name) {
    const char *names[1];
    bool exists;

    names[0] = name;
    if (idist_store_check(j->store, names, 1, &exists) == IDIST_ERR_TIMEOUT)
        return idist__join_failure_silent(j);

    idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank 0 did not show up within %d ms",
                j->w->cfg.init_timeout_ms);

    return idist__join_failure_hint(j);
}

// Fails because the time is up. Names the ranks at or above `rank` that have not set a value.
static idist_status idist__join_failure_late(idist__join *j, const char *what, int rank) {
    char name[128], text[300] = "";
    int i, missing = 0;
    idist_status status;

    for (i = rank; i < j->w->group.size; i++) {
        const char *names[1];
        bool exists = true;

        names[0] = name;
        idist__join_state_name(j, name, sizeof name, what, i);
        status = idist_store_check(j->store, names, 1, &exists);
        if (status == IDIST_ERR_TIMEOUT) return idist__join_failure_silent(j);
        if (status != IDIST_OK || exists) continue;
        if (missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);
    }

    if (!missing)
        return idist__fail(IDIST_ERR_TIMEOUT, "initialize: rank %d showed up too late, after %d ms",
                           rank, j->w->cfg.init_timeout_ms);

    if (strcmp(what, "joined") == 0) {
        idist__fail(
            IDIST_ERR_TIMEOUT,
            "initialize: %d of %d ranks showed up, but did not finish connecting to others within "
            "%d ms: rank %s%s. Possible causes: a firewall, a missing route, or a stopped rank",
            missing, j->w->group.size, j->w->cfg.init_timeout_ms, text,
            missing > 16 ? ", ..." : "");
        return idist__join_failure_hint(j);
    }

    idist__fail(IDIST_ERR_TIMEOUT,
                "initialize: %d of %d ranks did not show up within %d ms: rank %s%s", missing,
                j->w->group.size, j->w->cfg.init_timeout_ms, text, missing > 16 ? ", ..." : "");
    if (!j->w->cfg.store && j->w->cfg.meet.kind == IDIST__MEET_LOCAL)
        idist__text_append(
            idist__me.text, sizeof idist__me.text,
            ". The ranks meet at a local socket; ranks of another user, network namespace "
            "(container) or host cannot reach it");
    if (j->w->cfg.rank_drawn)
        idist__text_append(idist__me.text, sizeof idist__me.text,
                           ". Ranks are assigned at %s: start %d processes that meet there",
                           j->w->cfg.meet.name, j->w->group.size);

    return idist__join_failure_hint(j);
}

// ---- ring/join/join_store.h ----------------------------------------------------------------------

// ring/join/join_store.h: opens the store, and waits for values in it
//
// Successive worlds in the same store must not see each other's values. Therefore each rank counts
// its worlds in the store, and the count is part of all names. In a store that idist has opened
// itself, the count can only be 1; a higher count means that two processes have the same rank. A
// torch agent keeps its store when it restarts the workers, so with torch the number of restarts is
// also part of the names.

enum { IDIST__JOIN_BATCH = 64 }; // values that one request waits for

// Identifies the server of the store through which this thread last tried to join.
IDIST__TLS uint64_t idist__join_store_last_server;

// Waits for a value. After a time-out the error names the ranks that have not set the value. If
// `cause` is given, the error instead names the ranks that have not set `cause`, a value that must
// exist first. For a value of the whole job, which rank 0 sets, `rank` is -1.
static idist_status idist__join_store_get(idist__join *j, const char *what, int rank,
                                          const char *cause, void *value, size_t nbytes) {
    char name[128];
    size_t received = 0;
    int ask_ms = idist__join_state_ask_ms(j);
    idist_status status;

    idist__join_state_name(j, name, sizeof name, what, rank);

    do {
        int ms = idist__join_state_ms_left(j);

        if (ms < 0 || ms > ask_ms) ms = ask_ms;
        status = idist_store_get(j->store, name, value, nbytes, &received, ms);
        if (status == IDIST_OK && received != nbytes)
            return idist__fail(IDIST_ERR_UNSUPPORTED,
                               "initialize: rank %d was built from another version of idist.h",
                               rank < 0 ? 0 : rank); // values of the job come from rank 0
        if (status != IDIST_ERR_TIMEOUT) return status;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
    } while (idist__os_clock_ms_until(j->deadline_ns) != 0);

    if (rank < 0 && !cause) return idist__join_failure_without_0(j, name);

    return idist__join_failure_late(j, cause ? cause : what, rank < 0 ? 0 : rank);
}

// Waits until the `count` ranks that begin with `first` have set a value. `count` is at most
// IDIST__JOIN_BATCH.
static idist_status idist__join_store_await_some(idist__join *j, const char *what, int first,
                                                 int count) {
    char names[IDIST__JOIN_BATCH][128];
    const char *list[IDIST__JOIN_BATCH];
    int i, ask_ms = idist__join_state_ask_ms(j);
    idist_status status;

    for (i = 0; i < count; i++) {
        idist__join_state_name(j, names[i], sizeof names[i], what, first + i);
        list[i] = names[i];
    }

    do {
        int ms = idist__join_state_ms_left(j);

        if (ms < 0 || ms > ask_ms) ms = ask_ms;
        status = idist__store_await_keys(j->store, list, (size_t)count, ms);
        if (status != IDIST_ERR_TIMEOUT) return status;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
    } while (idist__os_clock_ms_until(j->deadline_ns) != 0);

    return idist__join_failure_late(j, what, 0);
}

// Waits until all ranks have set a value. Makes few requests, because each request may have to wait
// for a processor that hundreds of ranks compete for.
static idist_status idist__join_store_await_all(idist__join *j, const char *what) {
    int first, n = j->w->group.size;
    idist_status status = IDIST_OK;

    for (first = 0; first < n && status == IDIST_OK; first += IDIST__JOIN_BATCH) {
        int left = n - first;

        if (left > IDIST__JOIN_BATCH) left = IDIST__JOIN_BATCH;
        status = idist__join_store_await_some(j, what, first, left);
    }

    return status;
}

// Opens the store of a new world. Rank 0 may still serve, at the same address, the store of the
// last world that this thread joined or failed to join. Rank 0 may also close that store during our
// handshake. Such a close can happen only once. So a server that is lost after that is the server
// of the new world.
static idist_status idist__join_store_open_new(idist__join *j, const idist_store_desc *desc) {
    idist__config *cfg = &j->w->cfg;
    uint64_t last = desc->server ? 0 : idist__join_store_last_server;
    idist_store_desc d = *desc;
    bool may_close = last != 0;
    char text[IDIST__MEET_NBYTES];

    for (;;) {
        idist_status status = idist__store_open(&cfg->meet, &d, cfg->listener, &j->store);
        bool closes = may_close && status == IDIST_ERR_PEER_LOST;

        if (closes) may_close = false;
        cfg->listener = -1; // the store owns the listener now

        if (status == IDIST_OK && last && idist__store_server_id(j->store) == last) {
            idist_store_close(&j->store);
            closes = true;
        }

        if (status == IDIST_OK && !closes)
            idist__join_store_last_server = idist__store_server_id(j->store);
        if (!closes) return status;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0)
            return idist__fail(IDIST_ERR_TIMEOUT,
                               "store: rank 0 at %s has not started the next world",
                               idist__meet_print(&cfg->meet, text, sizeof text));
        idist__os_clock_pause_ms(1);
        d.timeout_ms = idist__join_state_ms_left(j);
    }
}

// Opens the store of a new world at the job's address. If the store is in a file, waits until the
// last world's store is gone. This thread may have left the last world before the other ranks.
static idist_status idist__join_store_open_next(idist__join *j, idist_store_desc *desc) {
    idist__config *cfg = &j->w->cfg;
    bool again = false;

    for (;;) {
        idist_status status = idist__join_store_open_new(j, desc);

        if (status == IDIST_ERR_ADDR_IN_USE && cfg->may_draw)
            return idist__fail(
                status,
                "initialize: %s (this process is rank 0; to have a rank assigned, set no rank, or "
                "desc.rank -1)",
                idist__me.text);
        j->lost_server = status == IDIST_ERR_PEER_LOST;
        if (status != IDIST_OK) return idist__fail(status, "initialize: %s", idist__me.text);
        j->owns_store = true;
        if (!cfg->may_draw) return IDIST_OK;
        status = idist__draw_check_given(cfg, j->store, &again);
        if (!again) return status;

        idist_store_close(&j->store);
        j->owns_store = false;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0) return idist__draw_still_held(cfg);
        idist__os_clock_pause_ms(IDIST__DRAW_AGAIN_MS);
        desc->timeout_ms = idist__join_state_ms_left(j);
    }
}

// Opens a store of our own, at the address from the launcher or the environment.
static idist_status idist__join_store_open_own(idist__join *j) {
    idist__config *cfg = &j->w->cfg;
    idist_store_desc desc;
    idist_status status;

    if (cfg->meet.kind == IDIST__MEET_NONE)
        return idist__fail(IDIST_ERR_ENV,
                           "rank %d of %d (%s): MASTER_ADDR is not set, so the ranks cannot find "
                           "each other. Set MASTER_ADDR and MASTER_PORT to rank 0's host and a "
                           "free port there (127.0.0.1 when all ranks are on this host)",
                           cfg->rank, cfg->world_size,
                           cfg->rank_var ? cfg->rank_var : cfg->launcher);

    if (cfg->meet.kind == IDIST__MEET_PMI) {
        status = idist__pmi_share_address(cfg);
        if (status != IDIST_OK) return status;
    }

    if (cfg->drawn) { // our rank was assigned from this store
        j->store = cfg->drawn;
        cfg->drawn = NULL;
        j->owns_store = true;
        return IDIST_OK;
    }

    memset(&desc, 0, sizeof desc);
    desc.server = cfg->rank == 0;
    desc.timeout_ms = cfg->init_timeout_ms;
    desc.secret = cfg->secret.nbytes ? cfg->secret.bytes : NULL;
    desc.secret_nbytes = cfg->secret.nbytes;
    desc.allocator = cfg->mem;

    return idist__join_store_open_next(j, &desc);
}

static idist_status idist__join_store_rank_taken(const idist__join *j) {
    const idist__config *cfg = &j->w->cfg;

    return idist__fail(IDIST_ERR_RANK_TAKEN,
                       "initialize: another process is already rank %d of this job (%s)", cfg->rank,
                       cfg->rank_var ? cfg->rank_var : "desc.rank");
}

// Returns true if the count of this rank's worlds arrives with the answer to its next request,
// which saves a round trip. See idist__join_store_claim.
static bool idist__join_store_claims_late(const idist__join *j) {
    if (!j->owns_store || j->w->cfg.rank == 0 || idist__join_state_is_torch(j)) return false;
    return j->store->run == idist__client_run; // NOLINT(clang-analyzer-core.NullDereference)
}

// Checks that no other process has claimed our rank. `status` is the result of the request sent
// after our claim. If another process has the rank, or we cannot tell, this rank publishes nothing
// about itself.
static idist_status idist__join_store_claim(idist__join *j, idist_status status) {
    if (!idist__join_store_claims_late(j)) return status;

    if (idist__store_posted_sum(j->store) == 1) return status;
    j->prefix[0] = 0;

    return status == IDIST_OK ? idist__join_store_rank_taken(j) : status;
}

static idist_status idist__join_store_open(idist__join *j) {
    const idist__config *cfg = &j->w->cfg;
    const char *restart = idist__os_env("TORCHELASTIC_RESTART_COUNT");
    bool torch = idist__join_state_is_torch(j);
    char base[40] = "idist", name[64], failed[64];
    int64_t world_number = 0;
    idist_status status;

    // A view of the caller's store has its own answer_by_ns, so setting it does not change the
    // caller's store.
    status =
        cfg->store ? idist_store_prefix(cfg->store, "", &j->store) : idist__join_store_open_own(j);
    if (status != IDIST_OK) return status;
    j->store->answer_by_ns = j->deadline_ns; // NOLINT(clang-analyzer-core.NullDereference)

    if (torch) snprintf(base, sizeof base, "idist-%.20s", restart ? restart : "0");
    snprintf(name, sizeof name, "%s/%d", base, cfg->rank);
    snprintf(failed, sizeof failed, "%s/%%/failed", base);

    if (idist__join_store_claims_late(j)) {
        snprintf(j->prefix, sizeof j->prefix, "%s/1/", base);
        return idist__claim_run(j->store, name, failed, cfg->rank, NULL);
    }

    status = idist__claim_run(j->store, name, failed, cfg->rank, &world_number);
    if (status != IDIST_OK) return status;
    if (j->owns_store && world_number != 1 && !torch) return idist__join_store_rank_taken(j);

    snprintf(j->prefix, sizeof j->prefix, "%s/%lld/", base, (long long)world_number);

    return IDIST_OK;
}

// Publishes that this rank is done. Rank 0 closes the store only when all ranks are done, because
// until then the ranks learn through the store that a process has died. This rank does not wait for
// an answer, because rank 0 may close the store before it answers.
//
// If the store is in a file, the other ranks wait until the store has ended. If they open another
// world in the same file, they must not find the store of this world. Over sockets,
// idist__join_store_open_new ensures this, and saves a round trip for ranks that open no other
// world.
static idist_status idist__join_store_leave(idist__join *j) {
    char one = 1;
    idist_status status = idist__join_state_set(j, "joined", j->w->group.rank, &one, sizeof one);

    if (status == IDIST_OK) idist__store_drop_will(j->store);
    if (!j->owns_store || status != IDIST_OK) return status;
    if (j->w->group.rank == 0) return idist__join_store_await_all(j, "joined");
    idist__store_await_end(j->store, j->deadline_ns);

    return IDIST_OK;
}

// ---- ring/join/records.h -------------------------------------------------------------------------

// ring/join/records.h: exchanges the job number, and a record of every rank
//
// Rank 0 generates a random job number. The key of all connections is derived from this number and
// the secret. Then each rank publishes a record: its host, and the address of its local socket.
// Rank 0 collects the records in one table, so that n ranks make 2 n requests instead of n * n. The
// table tells whether TCP is needed at all.

// Agrees on the job number and the number of ranks. Rank 0 publishes them, and every other rank
// compares the number of ranks with its own.
static idist_status idist__records_agree_on_job(idist__join *j) {
    uint64_t job[2] = {0, 0}; // number of the job, number of ranks
    uint8_t key[32];
    idist_status status;

    if (j->w->group.rank == 0) {
        idist__os_random(job, sizeof job);
        job[1] = (uint64_t)j->w->group.size;
        status = idist__join_state_set(j, "job", -1, job, sizeof job);
    } else {
        status = idist__join_store_get(j, "job", -1, NULL, job, sizeof job);
        status = idist__join_store_claim(j, status);
    }

    if (status != IDIST_OK) return status;
    if (job[1] != (uint64_t)j->w->group.size)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: rank 0 was started with a world of %llu ranks, this rank with %d%s",
            (unsigned long long)job[1], j->w->group.size,
            j->owns_store ? ""
                          : "; or desc.store still holds an earlier world: give each world its own "
                            "prefix (idist_store_prefix)");

    j->connector->job = job[0];
    idist__secret_key(&j->w->cfg.secret, key);
    idist__sha_hmac(key, "links", &job[0], sizeof job[0], NULL, 0, j->connector->key);

    return IDIST_OK;
}

static idist_status idist__records_listen_local(idist__join *j, idist__record *me) {
    idist__os_address address;
    uint64_t id[2];
    idist_status status;

    idist__os_random(id, sizeof id);
    snprintf(me->local, sizeof me->local, "unix:idist-%016llx%016llx", (unsigned long long)id[0],
             (unsigned long long)id[1]);
    status = idist__address_parse(&address, me->local);
    if (status != IDIST_OK) return status;

    return idist__connection_listen(&address, me->local, &j->connector->listeners[0]);
}

// Finds the local address of our connection to the store. Returns false if the store belongs to the
// user, or is not reached by TCP.
static bool idist__records_store_address(const idist__join *j, idist__os_address *address) {
    return j->owns_store && j->store->run == idist__client_run &&
           idist__os_socket_own_address(((idist__client_store *)j->store->impl)->fd, address) &&
           !idist__os_socket_is_local(address);
}

// Finds the address to publish: 127.0.0.1 if `by_loopback` is set and IDIST_ADDR is not.
// `by_loopback` is set in two cases. In the first, all ranks are on one host, and the user wants
// TCP. In the second, all ranks have reached the store through loopback, so they can also reach
// each other through loopback.
static idist_status idist__records_own_address(const idist__join *j, bool by_loopback,
                                               idist__own_address *own) {
    idist__os_address hint;

    if (!by_loopback || idist__os_env("IDIST_ADDR"))
        return idist__interface_choose(idist__records_store_address(j, &hint) ? &hint : NULL, own);

    memset(own, 0, sizeof *own);
    idist__text_copy(own->ip, sizeof own->ip, "127.0.0.1");

    return IDIST_OK;
}

// Listens on all addresses if a secret keeps strangers out. Otherwise listens only at the published
// address, or at this host's own address if IDIST_ADDR gives one that cannot be used here. If
// IDIST_ADDR gives a name, every rank resolves the name on its own host, and the results may
// differ.
static idist_status idist__records_listen_at(idist__join *j, const idist__own_address *own,
                                             bool by_loopback) {
    const idist__secret *secret = &j->w->cfg.secret;
    int *listener = &j->connector->listeners[1];
    bool is_loopback = idist__address_host_is_loopback(own->ip);
    idist__os_address address, hint;
    bool has_hint = idist__records_store_address(j, &hint);
    idist_status status;

    if (secret->nbytes && !is_loopback)
        return idist__connection_listen_everywhere(0, own->ip, listener);
    if (secret->insecure && !is_loopback && !by_loopback)
        return idist__connection_listen_beyond(own, has_hint ? &hint : NULL, 0, own->ip, listener);

    status = idist__address_tcp(&address, own->ip, 0);
    if (status != IDIST_OK && (is_loopback || secret->insecure))
        return idist__fail(status, "initialize: IDIST_ADDR: %s", idist__me.text);
    if (status == IDIST_OK && (secret->insecure || idist__os_socket_is_loopback(&address)))
        return idist__connection_listen(&address, own->ip, listener);

    return idist__fail(IDIST_ERR_NO_SECRET,
                       "initialize: listening at %s, beyond this host, needs a shared secret: set "
                       "IDIST_SECRET or IDIST_SECRET_FILE on all ranks, or IDIST_INSECURE=1 to "
                       "trust the network",
                       own->ip);
}

static idist_status idist__records_listen_tcp(idist__join *j, bool by_loopback) {
    idist__world *w = j->w;
    idist__tcp_record *me = &j->tcp[w->group.rank];
    idist__os_address address;
    idist__own_address own;
    idist_status status = idist__records_own_address(j, by_loopback, &own);

    if (status == IDIST_OK) status = idist__records_listen_at(j, &own, by_loopback);
    if (status != IDIST_OK) return status;
    if (!idist__os_socket_own_address(j->connector->listeners[1], &address))
        return idist__fail_errno("initialize: asking for the port of a listener", errno);
    snprintf(me->text, sizeof me->text, "tcp:[%s]:%d", own.ip, idist__os_socket_port(&address));
    snprintf(w->about.advertised, sizeof w->about.advertised, own.ifname[0] ? "%s (%s)" : "%s",
             own.ip, own.ifname);

    if (idist__records_store_address(j, &address))
        me->round_trip_us =
            idist__os_socket_round_trip_us(((idist__client_store *)j->store->impl)->fd);
    if (own.ifname[0]) me->mbits = idist__os_socket_interface_mbits(own.ifname);
    me->sockets = (uint32_t)w->cfg.sockets;
    me->window_nbytes = idist__os_socket_window_nbytes();

    return IDIST_OK;
}

// Exchanges the rows of a table. Every rank has filled in its own row. Rank 0 collects the rows,
// under the name `row`, and publishes the whole table as `all`.
static idist_status idist__records_exchange(idist__join *j, const char *row, const char *all,
                                            void *table, size_t row_nbytes) {
    char *rows = (char *)table;
    int i, n = j->w->group.size, me = j->w->group.rank;
    idist_status status =
        idist__join_state_set(j, row, me, rows + (size_t)me * row_nbytes, row_nbytes);

    if (status != IDIST_OK) return status;
    if (me) return idist__join_store_get(j, all, -1, row, table, row_nbytes * (size_t)n);

    for (i = 1; i < n; i++) {
        status = idist__join_store_get(j, row, i, NULL, rows + (size_t)i * row_nbytes, row_nbytes);
        if (status != IDIST_OK) return status;
    }

    return idist__join_state_set(j, all, -1, table, row_nbytes * (size_t)n);
}

// Combines the network properties in all records: the longest round trip, the lowest bandwidth, the
// smallest window and the highest number of sockets. All ranks have the same table, so they get the
// same result.
static idist__tcp_record idist__records_network(const idist__join *j) {
    idist__tcp_record all;
    int i;

    memset(&all, 0, sizeof all);

    for (i = 0; i < j->w->group.size; i++) {
        const idist__tcp_record *record = &j->tcp[i];
        uint64_t window_nbytes = record->window_nbytes;

        if (record->round_trip_us > all.round_trip_us) all.round_trip_us = record->round_trip_us;
        if (record->mbits && (!all.mbits || record->mbits < all.mbits)) all.mbits = record->mbits;
        if (record->sockets > all.sockets && record->sockets <= IDIST__SOCKETS_MAX)
            all.sockets = record->sockets;
        if (window_nbytes && (!all.window_nbytes || window_nbytes < all.window_nbytes))
            all.window_nbytes = window_nbytes;
    }

    return all;
}

// Returns the number of bytes in flight when the network is full: bandwidth times round trip.
// Assumes at least 1000 Mbit/s, because virtual interfaces report a bandwidth that is too low, or
// none. Posting more receives than needed costs little.
static uint64_t idist__records_network_nbytes(const idist__tcp_record *network) {
    enum { LEAST_MBITS = 1000 };
    uint64_t least = LEAST_MBITS, mbits = network->mbits > least ? network->mbits : least;

    return network->round_trip_us * mbits / 8;
}

// Returns the number of sockets that fill the network when each holds one window of data. Uses only
// the reported bandwidth, because unneeded sockets compete with each other on a slow link.
static int idist__records_fill_sockets(const idist__tcp_record *network) {
    uint64_t nbytes = (uint64_t)network->round_trip_us * network->mbits / 8;
    uint64_t count = network->window_nbytes ? nbytes / network->window_nbytes + 1 : 1;

    return count < IDIST__SOCKETS_MAX ? (int)count : IDIST__SOCKETS_MAX;
}

// Records the properties of the network between the hosts, and the number of sockets of a link.
static void idist__records_measure(idist__join *j, bool by_loopback) {
    enum { OVERHEAD_US = 5 }; // time that the sender and the receiver add
    idist__tcp_record network = idist__records_network(j);
    char *text = j->w->about.network;
    size_t capacity = sizeof j->w->about.network;

    if (!by_loopback) j->w->machine.network_nbytes = idist__records_network_nbytes(&network);
    j->connector->socket_count = by_loopback ? 1 : idist__records_fill_sockets(&network);
    if (network.sockets) j->connector->socket_count = (int)network.sockets;

    if (!by_loopback && network.round_trip_us && network.mbits) {
        uint64_t one_way_us = network.round_trip_us / 2 + OVERHEAD_US;

        j->w->machine.latency_nbytes = one_way_us * network.mbits / 8;
        snprintf(text, capacity, "%u us round trip, %u Mbit/s, ", network.round_trip_us,
                 network.mbits);
    }

    if (text[0] || j->connector->socket_count > 1)
        idist__text_append(text, capacity, "%d socket%s to each rank", j->connector->socket_count,
                           j->connector->socket_count > 1 ? "s" : "");
}

// Exchanges the addresses of the TCP sockets, and derives the number of sockets of a link.
static idist_status idist__records_exchange_tcp(idist__join *j, bool by_loopback) {
    size_t i, n = (size_t)j->w->group.size;
    idist_status status;

    j->tcp = (idist__tcp_record *)idist__mem_alloc(&j->w->cfg.mem, sizeof *j->tcp * n);
    if (!j->tcp) return IDIST_ERR_NO_MEMORY;
    status = idist__records_listen_tcp(j, by_loopback);
    if (status != IDIST_OK) return status;

    status = idist__records_exchange(j, "tcp", "tcps", j->tcp, sizeof *j->tcp);
    for (i = 0; i < n; i++) j->tcp[i].text[sizeof j->tcp->text - 1] = 0;
    if (status == IDIST_OK) idist__records_measure(j, by_loopback);

    return status;
}

// Checks the record of a rank and stores its host.
static idist_status idist__records_enter(idist__join *j, idist__record *record, int rank) {
    idist__world *w = j->w;

    record->hostname[sizeof record->hostname - 1] = 0;
    record->local[sizeof record->local - 1] = 0;
    idist__text_copy(w->nodes[rank].hostname, sizeof w->nodes[rank].hostname, record->hostname);
    w->nodes[rank].host = record->host;

    if (record->algorithm != (uint32_t)w->cfg.algorithm)
        return idist__fail(
            IDIST_ERR_ENV,
            "initialize: IDIST_ALGO (desc.algorithm) differs between rank %d and rank %d", rank,
            w->group.rank);

    return IDIST_OK;
}

static idist_status idist__records_make(idist__join *j, idist__record *records) {
    idist__world *w = j->w;
    idist__record *me = &records[w->group.rank];
    uint64_t host = idist__config_host_key(&w->cfg);
    bool one_host = true, all_local = true, all_loopback = true;
    idist__os_address address;
    idist_status status = IDIST_OK;
    int i;

    idist__text_copy(me->hostname, sizeof me->hostname, w->about.hostname);
    me->host = host;
    me->processors = idist__config_processor_key();
    me->shm = w->cfg.transport == IDIST__TRANSPORT_AUTO;
    me->algorithm = (uint32_t)w->cfg.algorithm;
    if (idist__records_store_address(j, &address) && idist__os_socket_is_loopback(&address))
        me->loopback = idist__config_reach_key();
    if (w->cfg.transport != IDIST__TRANSPORT_TCP) status = idist__records_listen_local(j, me);
    if (status == IDIST_OK)
        status = idist__records_exchange(j, "node", "nodes", records, sizeof *records);

    for (i = 0; i < w->group.size && status == IDIST_OK; i++) {
        status = idist__records_enter(j, &records[i], i);
        if (records[i].host != host) one_host = false;
        if (!records[i].local[0]) all_local = false; // that rank uses TCP only
        if (!me->loopback || records[i].loopback != me->loopback) all_loopback = false;
        if (records[i].processors != me->processors) continue;
        if (i < w->group.rank) w->machine.sharing_rank++;
        w->machine.sharing_size++;
    }

    j->records = records;
    if (status == IDIST_OK && !(one_host && all_local)) // all ranks reach the same decision
        status = idist__records_exchange_tcp(j, one_host || all_loopback);

    return status;
}

// ---- ring/join/links.h ---------------------------------------------------------------------------

// ring/join/links.h: makes the connections that ranks need from the start
//
// Ranks that share memory need connections only while they join. They connect in a tree to agree on
// the memory, and then close the connections. In a world of up to IDIST__LINKS_MANY ranks, all
// other pairs connect. In a larger world, a pair connects if its distance around the ring of all
// ranks is a power of two. These pairs are the partners in the algorithms with few steps, and the
// neighbors in ring algorithms. Reports of a failure spread over their connections. All other pairs
// connect on demand.
//
//   idist__links_want             marks a connection to a rank as wanted
//   idist__links_connect          makes the wanted connections; the higher rank of a pair connects
//   idist__links_connect_others   connects the pairs that share no memory
//
// A failed incoming handshake is ignored. A failed outgoing handshake fails the join. But if the
// connection merely broke, or the host name is not known yet, the rank tries again.

enum {
    IDIST__LINKS_POLL_MS = 20,
    IDIST__LINKS_ASK_MS = 400 // before a rank first asks whether another rank has given up
};

#ifndef IDIST__LINKS_MANY // a test with few ranks sets this to 0
#define IDIST__LINKS_MANY 64
#endif
#ifndef IDIST__LINKS_NEAR // a test sets this to 0: all connections are made on demand
#define IDIST__LINKS_NEAR 1
#endif

// Returns true if two ranks of a large world connect while they join.
static bool idist__links_are_near(int a, int b, int n) {
    int there = a < b ? b - a : a - b, back = n - there;
    return IDIST__LINKS_NEAR && (!(there & (there - 1)) || !(back & (back - 1)));
}

// Finds the address where each rank listens for us: a local socket if possible, otherwise TCP.
static void idist__links_find(idist__join *j) {
    const idist__record *me = &j->records[j->w->group.rank];
    int i;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *other = &j->records[i];
        bool local = j->w->cfg.transport != IDIST__TRANSPORT_TCP && other->host == me->host &&
                     other->local[0];
        const char *where = local ? other->local : j->tcp[i].text;

        idist__text_copy(j->connector->where[i].text, sizeof j->connector->where->text, where);
        idist__sockets_set_count(&j->ring->links[i].sockets,
                                 local ? 1 : j->connector->socket_count);
    }
}

static idist_status idist__links_late(const idist__join *j) {
    const idist__connector *conn = j->connector;
    char text[300] = "";
    int i, missing = 0;

    for (i = 0; i < j->w->group.size; i++)
        if (j->wanted[i] && missing++ < 16)
            idist__text_append(text, sizeof text, "%s%d", missing > 1 ? ", " : "", i);

    // The other ranks repeat this text, so the text names this rank.
    if (conn->unknown[0] && j->wanted[conn->unknown_rank])
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s was not connected within %d ms to rank %s%s: "
                           "%s (IDIST_ADDR of rank %d)",
                           j->w->group.rank, j->w->about.hostname, j->w->cfg.init_timeout_ms, text,
                           missing > 16 ? ", ..." : "", conn->unknown, conn->unknown_rank);
    return idist__fail(
        IDIST_ERR_TIMEOUT,
        "initialize: rank %d on %s was not connected within %d ms to rank %s%s. Possible causes: "
        "a firewall, a missing route, or a stopped rank",
        j->w->group.rank, j->w->about.hostname, j->w->cfg.init_timeout_ms, text,
        missing > 16 ? ", ..." : "");
}

// Returns true if `where` is an address inside this host, and the user has set the host id, which
// may be wrong. Ranks with the same host id connect by local sockets or through loopback.
static bool idist__links_trust_host_id(const idist__join *j, const char *where) {
    bool is_local = idist__address_is_local(where) || idist__address_is_loopback(where);
    return is_local && j->w->cfg.host_id[0];
}

// Returns true if a rank of another host has published a loopback address. Normally only the
// IDIST_ADDR of that rank causes this.
static bool idist__links_misled(const idist__join *j, int rank, const char *where) {
    bool same_host = j->records[rank].host == j->records[j->w->group.rank].host;
    char host[sizeof j->tcp->text];
    int port;

    return !same_host && idist__address_is_tcp(where) &&
           idist__parse_host_port(where + 4, host, sizeof host, &port) &&
           idist__address_host_is_loopback(host);
}

// Fails because a connection could not be made.
static idist_status idist__links_failed(idist__join *j, const idist__connect_event *event) {
    const char *where = event->rank < 0 ? "" : j->connector->where[event->rank].text;
    char how[sizeof idist__me.text];

    if (event->status == IDIST_ERR_NO_FDS) return idist__join_failure_no_fds(j);

    if (idist__os_socket_is_unreachable(event->error))
        return idist__fail(IDIST_ERR_SYSTEM,
                           "initialize: rank %d on %s cannot be reached at %s (%s): the network "
                           "interface is down, no route leads there, or rank %d on %s has no "
                           "address of that kind",
                           event->rank, j->w->nodes[event->rank].hostname, where,
                           strerror(event->error), j->w->group.rank, j->w->about.hostname);

    idist__text_copy(how, sizeof how, idist__me.text);
    if (!event->error)
        return idist__fail(event->status, "initialize: connecting to rank %d on %s: %s",
                           event->rank, j->w->nodes[event->rank].hostname, how);

    snprintf(how, sizeof how, "no connection to %s: %s", where, strerror(event->error));
    if (idist__links_trust_host_id(j, where))
        idist__text_append(
            how, sizeof how,
            ". It has the IDIST_HOSTID (desc.host_id) of this rank, \"%s\", which only ranks of "
            "one host may share",
            j->w->cfg.host_id);
    else if (idist__links_misled(j, event->rank, where))
        idist__text_append(how, sizeof how,
                           ". That is a loopback address, which the IDIST_ADDR of rank %d gives: "
                           "other hosts cannot reach it",
                           event->rank);

    return idist__join_failure_lost(j, event->rank, how);
}

// Advances all connections as far as possible without blocking.
static idist_status idist__links_progress(idist__join *j) {
    idist__connect_event event;

    while (idist__connector_next(j->connector, &event)) {
        if (event.status != IDIST_OK) return idist__links_failed(j, &event);
        if (j->wanted[event.rank]) j->wanted_count--;
        j->wanted[event.rank] = false;
    }

    return IDIST_OK;
}

// Sleeps until something is ready, then advances the connections.
static idist_status idist__links_turn(idist__join *j, idist__os_poll_entry *entries) {
    int count = idist__connector_polls(j->connector, entries);
    int ms = idist__os_clock_ms_until(j->deadline_ns), ready;

    if (ms == 0) return idist__links_late(j);
    if (ms < 0 || ms > IDIST__LINKS_POLL_MS) ms = IDIST__LINKS_POLL_MS;
    ready = idist__os_poll(entries, count, ms);
    if (ready < 0 && errno != EINTR) return idist__fail_errno("poll", errno);
    if (ready > 0) idist__connector_polled(j->connector);

    return idist__links_progress(j);
}

// Marks a connection to a rank as wanted, unless it exists already.
static void idist__links_want(idist__join *j, int rank) {
    if (j->wanted[rank] || j->ring->links[rank].open) return;
    j->wanted[rank] = true;
    j->wanted_count++;
}

// Makes the wanted connections.
static idist_status idist__links_connect(idist__join *j) {
    size_t capacity = idist__connector_capacity(j->connector);
    idist__os_poll_entry *entries =
        (idist__os_poll_entry *)idist__mem_alloc(&j->w->cfg.mem, sizeof *entries * capacity);
    int64_t asked_ns = idist__os_clock_now_ns();
    int64_t ask_ns = IDIST__LINKS_ASK_MS * IDIST__MS;
    idist_status status = entries ? IDIST_OK : IDIST_ERR_NO_MEMORY;
    int i;

    j->connector->waits_for_names = true;
    for (i = 0; i < j->w->group.rank && status == IDIST_OK; i++)
        if (j->wanted[i] && !idist__connector_start(j->connector, i)) status = IDIST_ERR_NO_MEMORY;
    if (status == IDIST_OK) status = idist__links_progress(j);

    while (status == IDIST_OK && j->wanted_count) {
        status = idist__links_turn(j, entries);

        if (status == IDIST_OK && idist__os_clock_now_ns() - asked_ns > ask_ns) {
            int64_t begun_ns = idist__os_clock_now_ns();

            status = idist__join_failure_check(j); // handshakes make no progress while we ask
            asked_ns = idist__os_clock_now_ns();
            ask_ns = idist__join_state_ask_ms(j) * IDIST__MS + 4 * (asked_ns - begun_ns);
        }
    }

    j->connector->waits_for_names = false;
    idist__mem_free(&j->w->cfg.mem, entries);

    return status;
}

// Connects to the ranks with which we do not share memory: to all of them, or in a large world only
// to some.
static idist_status idist__links_connect_others(idist__join *j) {
    int i, me = j->w->group.rank, n = j->w->group.size;
    bool many = n > IDIST__LINKS_MANY, lacks_some = false;
    idist_status status;

    for (i = 0; i < n; i++)
        if (i != me && (!many || idist__links_are_near(i, me, n))) idist__links_want(j, i);

    status = idist__links_connect(j);
    if (status != IDIST_OK || !many) return status;

    for (i = 0; i < n; i++) {
        idist__link *l = &j->ring->links[i];

        if (i == me || l->open) continue;
        idist__link_open(j->ring, l, &idist__transport_none, NULL);
        lacks_some = true;
    }

    if (lacks_some) { // the ring makes the remaining connections
        j->ring->connector = j->connector;
        j->connector = NULL;
    }

    return IDIST_OK;
}

// ---- ring/join/segment_layout.h ------------------------------------------------------------------

// ring/join/segment_layout.h: the layout of the memory that the ranks of a host share
//
// ring/shm/segment.h has a picture of the file. Three numbers determine all offsets and sizes.
// These are the number of ranks on this host, the shared memory per rank (the root's
// desc.shm_nbytes), and the window size. All ranks know the first number, so only the other two are
// sent down the tree.
//
//   pipes      a rank has one pipe from each rank: as large as possible, at most IDIST__PIPE_MAX,
//              and all pipes together at most a quarter of the rank's memory
//   region 0   half of the remaining memory is for its buffers, up to IDIST__CHUNK_MAX each
//   others     as many regions as fit, with buffers of a quarter of the size
//   window     a hole that costs nothing until idist_alloc fills it: as large as the host's
//              memory, because a program may allocate all of it
//
// If the memory is too small for region 0, there are no regions, and collectives use messages.

// Returns the size of the file.
static size_t idist__segment_layout_file_nbytes(const idist__segment *seg) {
    return seg->window_at + (size_t)seg->n * seg->window_nbytes;
}

static size_t idist__segment_layout_round_up(size_t nbytes) {
    return (nbytes + IDIST__PAGE - 1) & ~(IDIST__PAGE - 1);
}

// Sets the offsets and sizes in *seg. The caller has set seg->n.
static void idist__segment_layout_set(idist__segment *seg, size_t shm_nbytes,
                                      size_t window_nbytes) {
    size_t used, room, first, other, chunk, page = idist__os_memory_page_nbytes();

    seg->pipe_nbytes = IDIST__PIPE_MAX;
    while (seg->pipe_nbytes > IDIST__PAGE && (size_t)seg->n * seg->pipe_nbytes > shm_nbytes / 4)
        seg->pipe_nbytes /= 2;

    seg->pipes_at = sizeof(idist__catalog) + (size_t)seg->n * sizeof(uint32_t);
    seg->pipes_at = (seg->pipes_at + IDIST__LINE - 1) & ~(IDIST__LINE - 1);
    seg->buffers_at = seg->pipes_at + (size_t)seg->n * (sizeof(idist__pipe) + seg->pipe_nbytes);
    seg->buffers_at = idist__segment_layout_round_up(seg->buffers_at) + IDIST__BUFFERS_SKEW;
    used = sizeof(idist__doorbell) + seg->buffers_at;
    room = shm_nbytes > used ? shm_nbytes - used : 0;

    chunk = room / (2 * IDIST__BUFFERS);
    if (chunk > IDIST__CHUNK_MAX) chunk = IDIST__CHUNK_MAX;
    seg->chunk_nbytes[0] = chunk & ~(IDIST__LINE - 1);
    seg->chunk_nbytes[1] = (chunk / 4) & ~(IDIST__LINE - 1);
    first = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * seg->chunk_nbytes[0];
    other = IDIST__REGION_HEAD_BYTES + IDIST__BUFFERS * seg->chunk_nbytes[1];

    seg->region_count = room < first ? 0 : 1 + (int)((room - first) / other);
    if (seg->region_count > (int)IDIST__COUNT_OF(seg->taken))
        seg->region_count = (int)IDIST__COUNT_OF(seg->taken);

    seg->front_nbytes = sizeof(idist__doorbell);
    seg->part_nbytes = seg->buffers_at;

    if (seg->region_count) {
        seg->front_nbytes += IDIST__REGION_HEAD_BYTES;
        seg->part_nbytes += IDIST__BUFFERS * seg->chunk_nbytes[0];
        seg->part_nbytes += (size_t)(seg->region_count - 1) * other;
    }

    seg->front_nbytes = idist__segment_layout_round_up(seg->front_nbytes);
    seg->part_nbytes = idist__segment_layout_round_up(seg->part_nbytes);
    seg->parts_at = IDIST__PAGE + (size_t)seg->n * seg->front_nbytes;
    seg->window_at = seg->parts_at + (size_t)seg->n * seg->part_nbytes;
    seg->window_at = (seg->window_at + page - 1) / page * page; // mapped separately
    seg->window_nbytes = window_nbytes;
    seg->reserved_count = 0;
}

// Returns the size of a window: a power of two of at least 1 GiB. The window covers the host's
// memory, unless all windows together reach 4 TiB first. Returns 0 if addresses have 32 bits.
static size_t idist__segment_layout_window_nbytes(int n) {
    uint64_t ram = idist__os_segment_ram();
    uint64_t nbytes = (uint64_t)1 << 30;

    if (sizeof(void *) < 8) return 0;
    while (nbytes < ram && nbytes * (uint64_t)n < (uint64_t)1 << 42) nbytes *= 2;

    return (size_t)nbytes;
}

// ---- ring/join/segment_map.h ---------------------------------------------------------------------

// ring/join/segment_map.h: makes, maps and frees the memory that the ranks of a host share
//
// The file has no name. The host's root makes the file, and sends the descriptor down the tree to
// the other ranks (ring/join/segment_agree.h). Every rank maps the file.
//
//   idist__segment_map_new       allocates this rank's own state of the segment
//   idist__segment_map_create    makes the file; on the root only
//   idist__segment_map_open      maps the file, and reserves our memory that other ranks write to
//   idist__segment_map_free      undoes whichever of these steps were done
//
// A file in memory has pages only where a process has written. If the memory of the host or
// container is exhausted, the first write to a page ends the process (SIGBUS). So each rank
// reserves its part of the file before any rank uses it. A rank that cannot reserve its part merely
// votes against the segment.

static void idist__segment_map_free(const idist_allocator *mem, idist__segment *seg) {
    if (!seg) return;
    idist__view_unmap_all(seg);
    if (seg->base) idist__os_memory_unmap(seg->base, seg->window_at);
    idist__os_descriptor_close(&seg->fd);
    idist__os_descriptor_close(&seg->beacon);
    idist__os_descriptor_close(&seg->observer);
    idist__mem_free(mem, seg->views);
    idist__mem_free(mem, seg->local);
    idist__mem_free(mem, seg->processes);
    idist__mem_free(mem, seg->remote_pieces);
    idist__mem_free(mem, seg->ports);
    idist__mem_free(mem, seg);
}

// Allocates a segment that is not mapped yet. Returns NULL if out of memory. The array seg->local
// has space for 2 * world_size ranks, because the caller keeps a second table there.
static idist__segment *idist__segment_map_new(const idist_allocator *mem, size_t world_size) {
    idist__segment *seg = (idist__segment *)idist__mem_alloc(mem, sizeof *seg);

    if (!seg) return NULL;
    seg->fd = -1;
    seg->beacon = -1;
    seg->observer = -1;
    seg->local = (int *)idist__mem_alloc(mem, sizeof *seg->local * 2 * world_size);
    seg->ports = (idist__pipe_port *)idist__mem_alloc(mem, sizeof *seg->ports * world_size);
    seg->processes =
        (idist__os_process *)idist__mem_alloc(mem, sizeof *seg->processes * world_size);
    seg->remote_pieces = (char *)idist__mem_raw(mem, IDIST__REMOTE_PIECE * world_size);
    seg->views = (idist__view *)idist__mem_alloc(mem, sizeof *seg->views * world_size);
    if (seg->local && seg->ports && seg->processes && seg->remote_pieces && seg->views) return seg;

    idist__segment_map_free(mem, seg);

    return NULL;
}

// Makes the file, and sets the layout. The file has no windows if a limit on the size of files
// leaves no space for them. Returns 0, or an errno.
static int idist__segment_map_create(idist__segment *seg, size_t shm_nbytes) {
    idist__segment_layout_set(seg, shm_nbytes, idist__segment_layout_window_nbytes(seg->n));
    seg->fd = idist__os_memory_file(idist__segment_layout_file_nbytes(seg));
    if (seg->fd >= 0) return 0;

    idist__segment_layout_set(seg, shm_nbytes, 0);
    seg->fd = idist__os_memory_file(idist__segment_layout_file_nbytes(seg));

    return seg->fd < 0 ? errno : 0;
}

// Reserves memory for our doorbell, our catalog and the pipes to us. Returns 0, or an errno.
static int idist__segment_map_reserve(const idist__segment *seg) {
    size_t me = (size_t)seg->me;
    int fd = seg->fd, error = 0;

    if (idist__os_segment_nbytes(fd) < idist__segment_layout_file_nbytes(seg)) return EINVAL;
    if (!me) error = idist__os_memory_reserve(fd, 0, IDIST__PAGE);
    if (!error)
        error = idist__os_memory_reserve(fd, IDIST__PAGE + me * seg->front_nbytes,
                                         sizeof(idist__doorbell));
    if (!error)
        error =
            idist__os_memory_reserve(fd, seg->parts_at + me * seg->part_nbytes, seg->buffers_at);

    return error;
}

// Maps the file, reserves our memory in it, and adds our processors to the host's set. Returns 0,
// or an errno.
static int idist__segment_map_open(idist__segment *seg) {
    idist__os_cpu_set cpus;
    int i, error = idist__segment_map_reserve(seg);

    if (error) return error;
    seg->base = (char *)idist__os_memory_map(seg->fd, 0, seg->window_at);
    if (!seg->base) return errno;

    if (seg->window_nbytes) {
        size_t at = seg->window_at + (size_t)seg->me * seg->window_nbytes;
        seg->window = idist__window_open(seg->fd, at, seg->window_nbytes);
        if (!seg->window) return ENOMEM;
    }

    idist__os_cpu_usable(&cpus);
    for (i = 0; i < IDIST__CPU_WORDS; i++)
        __atomic_fetch_or(&idist__segment_header_of(seg)->cpus.bits[i], cpus.bits[i],
                          __ATOMIC_RELAXED);

    // Reserves the world's region: every member assumes that all members have it.
    return seg->region_count ? idist__pool_reserve(seg, 0) : 0;
}

// ---- ring/join/segment_probe.h -------------------------------------------------------------------

// ring/join/segment_probe.h: tests if ranks of a host can read each other's memory, and how fast
//
// A rank can read another process's memory through the kernel (os/process.h). That saves a copy.
// There may be three obstacles. A container or a security module may forbid such reads. If two
// ranks are in different containers, the pid of one rank may belong to another process in the other
// container. Finally, the processor may take several times as long to read data in another core's
// cache.
//
//   idist__segment_probe_prepare    each rank stores in its doorbell the addresses of a random
//                                   number and of a sample of its memory
//   -                               the ranks vote, so all of them have prepared
//   idist__segment_probe_reads      each rank reads the number of every other rank, and times
//                                   reading the sample of the rank before it
//
// The result is a vote: all ranks of a host use the fastest way that all of them can use. Each rank
// writes its sample twice: to its private memory, and to the pipe from the rank that will read it.
// The reader compares the time of a read through the kernel with the time of a copy from the pipe.

enum { // votes; the lowest vote decides
    IDIST__READS_NOT,
    IDIST__READS_SLOWLY,
    IDIST__READS_FAST
};

// Prepares the speed test that the next rank runs. Writes to a block of our private memory and to a
// block of the pipe from that rank, which is still unused. Both blocks are then in our cache, as
// contributions usually are.
static void idist__segment_probe_leave_sample(const idist__segment *seg) {
    if (seg->n == 1 || seg->pipe_nbytes < IDIST__SAMPLE_BYTES) return;
    memset(seg->remote_pieces, 1, IDIST__SAMPLE_BYTES);
    memset(idist__segment_pipe(seg, (seg->me + 1) % seg->n, seg->me) + 1, 1, IDIST__SAMPLE_BYTES);
}

// Publishes the addresses that the other ranks need to read our memory. The segment is mapped
// already.
static void idist__segment_probe_prepare(idist__segment *seg) {
    idist__doorbell *bell = idist__segment_doorbell(seg, seg->me);

    idist__os_random(&seg->proof, sizeof seg->proof);
    bell->pid = idist__os_process_id();
    bell->proof = seg->proof;
    bell->proof_address = (uint64_t)(uintptr_t)&seg->proof;
    bell->sample_address = (uint64_t)(uintptr_t)seg->remote_pieces;
    idist__segment_probe_leave_sample(seg);
}

// Returns true if we can read the memory of all other ranks, and each pid belongs to the right
// process.
static bool idist__segment_probe_reads_all(idist__segment *seg) {
    int i;

    for (i = 0; i < seg->n; i++) {
        const idist__doorbell *bell = idist__segment_doorbell(seg, i);
        uint64_t proof = 0;
        uint64_t proof_address = bell->proof_address;

        seg->processes[i] = (idist__os_process)bell->pid;
        if (seg->processes[i] <= 0) return false;
        if (idist__segment_read_remote(seg, i, proof_address, &proof, sizeof proof) != 0)
            return false;
        if (proof != bell->proof) return false;
    }

    return true;
}

// Returns true if the kernel reads the memory of another process at least half as fast as we read
// memory shared with it. Some processors need five times as long for data in the other process's
// cache. The sample is read in small pieces, and the fastest piece counts, because interrupts may
// have slowed down the others.
static bool idist__segment_probe_reads_fast(const idist__segment *seg) {
    int from = (seg->me + seg->n - 1) % seg->n;
    const char *shared = (const char *)(idist__segment_pipe(seg, seg->me, from) + 1);
    uint64_t address = idist__segment_doorbell(seg, from)->sample_address;
    char *to = seg->remote_pieces + IDIST__SAMPLE_BYTES;
    int64_t remote_ns = IDIST__FOREVER, shared_ns = IDIST__FOREVER;
    size_t at;

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__PAGE) to[at] = shared[at]; // maps the pages

    for (at = 0; at < IDIST__SAMPLE_BYTES; at += IDIST__SAMPLE_PIECE) {
        int64_t begin_ns = idist__os_clock_now_ns(), between_ns, end_ns;

        if (idist__segment_read_remote(seg, from, address + at, to, IDIST__SAMPLE_PIECE) != 0)
            return false;
        between_ns = idist__os_clock_now_ns();
        memcpy(to, shared + at, IDIST__SAMPLE_PIECE);
        end_ns = idist__os_clock_now_ns();
        if (between_ns - begin_ns < remote_ns) remote_ns = between_ns - begin_ns;
        if (end_ns - between_ns < shared_ns) shared_ns = end_ns - between_ns;
    }

    return remote_ns <= 2 * shared_ns;
}

// Returns this rank's vote on how to read the memory of other ranks. Called when all ranks have
// prepared. Ranks that share cores cannot measure the speed, and vote IDIST__READS_FAST. Uses
// head->cpus, because rank 0 may not have written head->ncores yet.
static char idist__segment_probe_reads(idist__segment *seg) {
    const idist__segment_header *head = idist__segment_header_of(seg);

    if (!idist__segment_probe_reads_all(seg)) return IDIST__READS_NOT;
    if (seg->n == 1 || seg->n > idist__os_cpu_set_count(&head->cpus)) return IDIST__READS_FAST;
    if (seg->pipe_nbytes < IDIST__SAMPLE_BYTES) return IDIST__READS_FAST;
    return idist__segment_probe_reads_fast(seg) ? IDIST__READS_FAST : IDIST__READS_SLOWLY;
}

// ---- ring/join/segment_vote.h --------------------------------------------------------------------

// ring/join/segment_vote.h: the ranks of a host vote, and the lowest vote decides
//
// The ranks of a host form a binomial tree. Its root is the lowest rank. In the tree, the ranks of
// a host are numbered from 0. The parent's number is the rank's number with its lowest set bit
// cleared:
//
//   0 --+-- 1          a rank has at most log2(n) children,
//       +-- 2 -- 3     and the tree has log2(n) levels below the root
//       +-- 4 --+-- 5
//               +-- 6 -- 7
//
// A ballot holds a vote, which is a number, and the reason if the rank votes against. Each rank
// waits for the ballots of its children. It compares these ballots with its own, and sends the
// lowest one to its parent. Then it waits for the winning ballot, and passes that ballot on to its
// children. In this way every rank learns the result, and the reason of a rank that voted against:
//
//   up      leaf -> ... -> root     the lowest ballot so far
//   down    root -> ... -> leaf     the lowest ballot of all
//
// The ballots travel over the connections of the tree (ring/join/links.h), before any frames. If a
// rank fails during a vote, its connections end, and with them the vote of all ranks. Each rank
// that waits for the failed rank reads the reason from the store (ring/join/join_failure.h).

enum { IDIST__VOTE_CHILDREN = 32 }; // most children of a rank

typedef struct idist__vote_tree { // our place in the tree, in world ranks
    const int *ranks;             // all ranks of this host, by rank on this host
    int parent;                   // -1 if we are the root
    int children[IDIST__VOTE_CHILDREN];
    int child_count;
} idist__vote_tree;

enum { // votes on whether the segment is used
    IDIST__VOTE_FAILED,
    IDIST__VOTE_FENCED, // mapped, but the kernel has no membarrier: writers need a fence
    IDIST__VOTE_MAPPED
};

typedef struct idist__ballot { // a ballot as it travels through the tree
    char vote;
    char why[255]; // for IDIST__VOTE_FAILED: which rank failed, and why
} idist__ballot;

// Finds the place of rank `me` in a tree of n ranks.
static void idist__segment_vote_set_tree(idist__vote_tree *tree, const int *ranks, int n, int me) {
    int bit;

    tree->ranks = ranks;
    tree->parent = me ? ranks[me & (me - 1)] : -1;
    tree->child_count = 0;
    for (bit = 1; me + bit < n && !(me & bit); bit *= 2)
        tree->children[tree->child_count++] = ranks[me + bit];
}

static idist_status idist__segment_vote_broken(idist__join *j, int rank) {
    if (errno == ETIMEDOUT)
        return idist__fail(IDIST_ERR_TIMEOUT,
                           "initialize: rank %d on %s did not answer while the ranks of this host "
                           "set up their shared memory: it is stopped, too slow, or waits for a "
                           "rank that is",
                           rank, j->w->nodes[rank].hostname);

    return idist__join_failure_lost(
        j, rank, "its connection ended while the ranks of this host agreed on shared memory");
}

// Waits until a link can be read. Meanwhile, regularly checks whether a rank has given up, which
// may be why nothing arrives.
static idist_status idist__segment_vote_await(idist__join *j, int rank) {
    idist_status status;

    for (;;) {
        int64_t ask_ns = idist__os_clock_deadline(idist__join_state_ask_ms(j));

        if (idist__os_poll_wait(j->ring->links[rank].sockets.fds[0], IDIST__OS_READABLE,
                                ask_ns < j->deadline_ns ? ask_ns : j->deadline_ns))
            return IDIST_OK;
        status = idist__join_failure_check(j);
        if (status != IDIST_OK) return status;
        errno = ETIMEDOUT;
        if (idist__os_clock_ms_until(j->deadline_ns) == 0)
            return idist__segment_vote_broken(j, rank);
    }
}

// Receives the ballot of a rank.
static idist_status idist__segment_vote_hear(idist__join *j, int rank, idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];
    idist_status status = idist__segment_vote_await(j, rank);

    if (status != IDIST_OK) return status;
    if (!idist__connection_read_all(sock, ballot, sizeof *ballot, j->deadline_ns))
        return idist__segment_vote_broken(j, rank);
    ballot->why[sizeof ballot->why - 1] = 0;

    return IDIST_OK;
}

static idist_status idist__segment_vote_say(idist__join *j, int rank, const idist__ballot *ballot) {
    int sock = j->ring->links[rank].sockets.fds[0];

    if (idist__connection_write_all(sock, ballot, sizeof *ballot, j->deadline_ns)) return IDIST_OK;
    return idist__segment_vote_broken(j, rank);
}

// Votes, and replaces our ballot with the lowest ballot of this host.
static idist_status idist__segment_vote_decide(idist__join *j, const idist__vote_tree *tree,
                                               idist__ballot *ballot) {
    idist_status status = IDIST_OK;
    int i;

    for (i = 0; i < tree->child_count && status == IDIST_OK; i++) {
        idist__ballot other;

        status = idist__segment_vote_hear(j, tree->children[i], &other);
        if (status == IDIST_OK && other.vote < ballot->vote) *ballot = other;
    }

    if (tree->parent >= 0 && status == IDIST_OK) {
        status = idist__segment_vote_say(j, tree->parent, ballot);
        if (status == IDIST_OK) status = idist__segment_vote_hear(j, tree->parent, ballot);
    }

    for (i = 0; i < tree->child_count && status == IDIST_OK; i++)
        status = idist__segment_vote_say(j, tree->children[i], ballot);
    if (status != IDIST_OK) ballot->vote = IDIST__VOTE_FAILED;

    return status;
}

// ---- ring/join/segment_beacon.h ------------------------------------------------------------------

// ring/join/segment_beacon.h: opens and checks the beacons of the ranks of a host
//
// Ranks that share memory have no connection to each other. So a rank learns from a beacon
// (os/beacon.h) that the process of another rank has ended; ring/shm/liveness.h checks the beacons.
// Each rank opens its own beacon before it connects to any rank. From then on, other ranks may
// check the beacon.
//
// A system may forbid the sockets that beacons need. In that case the loss of a rank would go
// unnoticed, so the ranks do not share memory. Each rank checks the beacons of its parent and
// children in the tree (ring/join/segment_vote.h), and votes against the segment if it cannot see
// them. These beacons are open already, because their ranks are connected to this rank.

// Sets *address to the beacon of a rank: the name of the rank's local socket with "-beacon"
// appended.
static bool idist__segment_beacon_find(const idist__join *j, int rank, idist__os_address *address) {
    char where[sizeof j->records->local + 8];

    snprintf(where, sizeof where, "%s-beacon", j->records[rank].local);

    return idist__address_parse(address, where) == IDIST_OK;
}

// Finds the beacons of all ranks of this host, and opens our own. Returns 0, or an errno.
static int idist__segment_beacon_light(const idist__join *j, idist__segment *seg,
                                       const int *ranks) {
    int i;

    for (i = 0; i < seg->n; i++)
        if (!idist__segment_beacon_find(j, ranks[i], &seg->ports[i].beacon)) return EINVAL;

    seg->beacon = idist__os_beacon_light(&seg->ports[seg->me].beacon);
    if (seg->beacon < 0) return errno;
    seg->observer = idist__os_beacon_observer();
    if (seg->observer < 0) return errno;
    seg->next_look = seg->me;

    return 0;
}

// Checks our own beacon and the beacons of our parent and children. Returns 0 if the system lets us
// see them all, or an errno.
static int idist__segment_beacon_see(const idist__segment *seg) {
    int bit, error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me].beacon);

    if (!error && seg->me)
        error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me & (seg->me - 1)].beacon);
    for (bit = 1; !error && seg->me + bit < seg->n && !(seg->me & bit); bit *= 2)
        error = idist__os_beacon_look(seg->observer, &seg->ports[seg->me + bit].beacon);

    return error;
}

// ---- ring/join/take_over.h -----------------------------------------------------------------------

// ring/join/take_over.h: replaces the links inside a host by pipes in shared memory
//
// The ranks of a host agree on their segment over a tree of local sockets. During this time, the
// other links inside the host are still closed. Once all ranks have mapped the segment, each rank
// opens all links inside the host on pipes, and closes the tree's connections. No byte is lost,
// because nothing is sent over these connections after the last vote. Frames are sent only through
// the pipes.
//
//   link to            before         after, if we join     after, if we give up
//   parent, children   local socket   pipe                  local socket
//   others             closed         pipe                  pipe
//
// A rank may give up after all ranks have mapped the segment. Such a rank opens pipes only to the
// ranks that are not its parent or children. These ranks may have joined, and are told through the
// pipes why the rank gave up. Between parent and child, votes may still be in transit, and a frame
// would be mistaken for a vote. A child that has joined learns from its parent's beacon that the
// parent has ended.

// Describes in w->about.sharing how the ranks of this host share memory. Warns if the memory is too
// small for collectives.
static void idist__take_over_describe(const idist__join *j, const idist__segment *seg) {
    idist__world *w = j->w;

    snprintf(w->about.sharing, sizeof w->about.sharing, "shared memory, %zu KiB per rank%s; %s",
             w->cfg.shm_nbytes >> 10,
             seg->region_count ? "" : ", too little for collectives, so they use messages",
             seg->reads_fast ? "large buffers are read from the other process"
             : seg->reads_remote
                 ? "large buffers are copied, because the kernel reads other processes slowly"
                 : "large buffers are copied");
    if (!seg->region_count && seg->me == 0)
        idist__log_print(&w->log, IDIST_LOG_WARN, "on this host: %s", w->about.sharing);
}

// Gives the ring its segment, and the links inside this host their pipes. The array `ranks`
// contains the world ranks of this host; `status` tells whether this rank joins or gives up.
static void idist__take_over_links(idist__join *j, idist__segment *seg, const int *ranks,
                                   idist_status status) {
    const idist__segment_header *head = idist__segment_header_of(seg);
    int i;

    seg->fenced = head->fenced != 0;
    seg->oversubscribed = seg->n > (int)head->ncores;
    j->w->machine.ncores = (int)head->ncores;

    for (i = 0; i < seg->n; i++) {
        idist__link *l = &j->ring->links[ranks[i]];
        idist__pipe_port *port = &seg->ports[i];

        seg->local[ranks[i]] = i;
        if (i == seg->me || (status != IDIST_OK && idist__link_is_connected(l))) continue;
        port->shm = seg;
        port->peer = i;
        port->in = idist__segment_pipe(seg, i, seg->me);
        port->out = idist__segment_pipe(seg, seg->me, i);
        idist__link_open(j->ring, l, &idist__pipe_transport, port); // closes the connection
    }

    j->ring->shm = seg;
    idist__take_over_describe(j, seg);
}

// ---- ring/join/segment_agree.h -------------------------------------------------------------------

// ring/join/segment_agree.h: the ranks of a host agree on a segment that all of them share
//
// The ranks of a host form a tree (ring/join/segment_vote.h). Each rank opens its beacon and
// connects to its parent. The root makes the file and sends its descriptor to its children. Every
// rank that receives the descriptor sends it on to its own children. Each rank maps the file,
// reserves its own pipes and first region, and votes on whether that worked:
//
//   root           makes the file    sends it    maps it   collects votes   sends the lowest
//   other ranks    receive it        send it     map it    collect votes,   receive the lowest
//                                                          send the lowest  and send it
//
// The file is used only if every rank succeeded. A second vote then decides whether the ranks read
// each other's memory through the kernel (ring/join/segment_probe.h), and pipes replace the sockets
// of the links (ring/join/take_over.h). If a rank failed, the tree's connections stay open, and the
// other pairs connect as well. The vote tells every rank which rank could not map the file, and
// why.
//
//   idist__segment_agree_share            the entry point; does all of this
//     idist__segment_beacon_light         from now on other ranks may check our beacon
//     idist__links_connect                connects to our parent and children
//     idist__segment_beacon_see           checks that the system lets us see beacons
//     idist__segment_agree_pass           receives the descriptor and sends it on
//     idist__segment_agree_vote_map       maps the file; first vote
//     idist__segment_agree_vote_reads     second vote
//     idist__take_over_links              replaces sockets with pipes
//
// MESSAGES
//
//   idist__segment_hello   parent to child, with the descriptor (or none if the root has no file)
//   idist__ballot          child to parent, then parent to child; twice

typedef struct idist__segment_hello { // sent with the descriptor; see ring/join/segment_layout.h
    uint64_t shm_nbytes, window_nbytes;
} idist__segment_hello;

// ---- passing the descriptor down the tree ----

// Sends a message with a descriptor, which may be -1.
static bool idist__segment_agree_send(int sock, const void *buf, size_t nbytes, int fd,
                                      int64_t deadline_ns) {
    ptrdiff_t sent = idist__os_segment_send(sock, buf, nbytes, fd);

    while (sent < 0 && errno == EAGAIN) {
        if (!idist__os_poll_wait(sock, IDIST__OS_WRITABLE, deadline_ns)) return false;
        sent = idist__os_segment_send(sock, buf, nbytes, fd);
    }

    return sent == (ptrdiff_t)nbytes; // a new socket never cuts a short message
}

// Receives a message. Sets *fd to its descriptor, or to -1 if it has none. On failure errno is 0 if
// the peer has closed the connection.
static bool idist__segment_agree_receive(int sock, void *buf, size_t nbytes, int *fd,
                                         int64_t deadline_ns) {
    ptrdiff_t received;

    *fd = -1;
    errno = ETIMEDOUT;
    if (!idist__os_poll_wait(sock, IDIST__OS_READABLE, deadline_ns)) return false;
    received = idist__os_segment_receive(sock, buf, nbytes, fd);
    if (received == 0) errno = 0;
    if (received <= 0) return false;

    return idist__connection_read_all(sock, (char *)buf + received, nbytes - (size_t)received,
                                      deadline_ns);
}

// Makes the file or receives its descriptor, and sends the descriptor to our children. If there is
// no file, sets *error to the reason; the ranks still vote.
static idist_status idist__segment_agree_pass(idist__join *j, idist__segment *seg,
                                              const idist__vote_tree *tree, int *error) {
    const idist__link *links = j->ring->links;
    idist__segment_hello hello;
    idist_status status;
    int i;

    *error = EINVAL;
    hello.shm_nbytes = j->w->cfg.shm_nbytes;

    if (tree->parent >= 0) {
        status = idist__segment_vote_await(j, tree->parent);
        if (status != IDIST_OK) return status;
        if (!idist__segment_agree_receive(links[tree->parent].sockets.fds[0], &hello, sizeof hello,
                                          &seg->fd, j->deadline_ns))
            return idist__segment_vote_broken(j, tree->parent);
        idist__segment_layout_set(seg, (size_t)hello.shm_nbytes, (size_t)hello.window_nbytes);
        if (seg->fd >= 0) *error = 0;
    } else {
        *error = idist__segment_map_create(seg, (size_t)hello.shm_nbytes);
        hello.window_nbytes = seg->window_nbytes;
    }

    for (i = 0; i < tree->child_count; i++)
        if (!idist__segment_agree_send(links[tree->children[i]].sockets.fds[0], &hello,
                                       sizeof hello, seg->fd, j->deadline_ns))
            return idist__segment_vote_broken(j, tree->children[i]);

    return IDIST_OK;
}

// ---- the two votes ----

// States in the ballot that this rank cannot share memory, and why: it cannot see beacons, or
// something else failed.
static void idist__segment_agree_refuse(const idist__join *j, const idist__segment *seg,
                                        int beacon_error, int error, idist__ballot *ballot) {
    char limit[160] = "";

    ballot->vote = IDIST__VOTE_FAILED;
    if (!beacon_error) idist__os_memory_limit(seg->window_at, limit, sizeof limit);
    snprintf(ballot->why, sizeof ballot->why, "rank %d: %s%s", j->w->group.rank,
             beacon_error ? "processes on this host cannot detect that another one has ended: "
                          : "",
             *limit ? limit : strerror(beacon_error ? beacon_error : error));
}

// Maps the file, unless an error has already occurred, and votes on the result. Sets *all if every
// rank of this host has mapped the file.
static idist_status idist__segment_agree_vote_map(idist__join *j, idist__segment *seg,
                                                  const idist__vote_tree *tree, int beacon_error,
                                                  int error, bool *all) {
    idist__ballot ballot;
    idist_status status;

    memset(&ballot, 0, sizeof ballot);
    ballot.vote = idist__os_cpu_fence_others(true) ? IDIST__VOTE_MAPPED : IDIST__VOTE_FENCED;
    if (!error && !beacon_error) error = idist__segment_map_open(seg);
    if (error || beacon_error) idist__segment_agree_refuse(j, seg, beacon_error, error, &ballot);
    else idist__segment_probe_prepare(seg);

    status = idist__segment_vote_decide(j, tree, &ballot);
    *all = status == IDIST_OK && ballot.vote > IDIST__VOTE_FAILED;

    if (status == IDIST_OK && !*all) {
        snprintf(j->w->about.sharing, sizeof j->w->about.sharing, "no shared memory: %s",
                 ballot.why);
        idist__log_print(&j->w->log, IDIST_LOG_INFO, "%s", j->w->about.sharing);
    }

    if (*all && seg->me == 0) {
        idist__segment_header *head = idist__segment_header_of(seg);
        head->ncores = (uint32_t)idist__os_cpu_set_count(&head->cpus);
        head->fenced = ballot.vote == IDIST__VOTE_FENCED || seg->n > (int)head->ncores;
    }

    return status;
}

// Votes on how the ranks read each other's memory. All ranks of this host have mapped the file.
static idist_status idist__segment_agree_vote_reads(idist__join *j, idist__segment *seg,
                                                    const idist__vote_tree *tree) {
    idist__ballot ballot;
    idist_status status;

    memset(&ballot, 0, sizeof ballot);
    ballot.vote = idist__segment_probe_reads(seg);
    status = idist__segment_vote_decide(j, tree, &ballot);
    seg->reads_remote = ballot.vote >= IDIST__READS_SLOWLY;
    seg->reads_fast = ballot.vote == IDIST__READS_FAST;

    return status;
}

// ---- all of it ----

// Finds the ranks of this host that take part, and this rank's number among them. Stores their
// world ranks in `ranks`.
static void idist__segment_agree_find_ranks(const idist__join *j, idist__segment *seg, int *ranks) {
    const idist__record *own = &j->records[j->w->group.rank];
    int i;

    for (i = 0; i < j->w->group.size; i++) {
        const idist__record *record = &j->records[i];

        seg->local[i] = -1;
        if (!record->shm || record->host != own->host || !record->local[0]) continue;
        if (i == j->w->group.rank) seg->me = seg->n;
        ranks[seg->n++] = i;
    }
}

// Agrees on the segment with the other ranks of this host, if there are any. Sets *all if every
// rank of this host has mapped the file, even if this rank fails later.
static idist_status idist__segment_agree_run(idist__join *j, idist__segment *seg,
                                             const idist__vote_tree *tree, bool *all) {
    int i, beacon_error, error = 0;
    idist_status status;

    if (seg->n < 2) return IDIST_OK;
    beacon_error = idist__segment_beacon_light(j, seg, tree->ranks);

    if (tree->parent >= 0) idist__links_want(j, tree->parent);
    for (i = 0; i < tree->child_count; i++) idist__links_want(j, tree->children[i]);
    status = idist__links_connect(j);
    if (!beacon_error) beacon_error = idist__segment_beacon_see(seg);

    if (status == IDIST_OK) status = idist__segment_agree_pass(j, seg, tree, &error);
    if (status == IDIST_OK)
        status = idist__segment_agree_vote_map(j, seg, tree, beacon_error, error, all);
    if (status == IDIST_OK && *all) status = idist__segment_agree_vote_reads(j, seg, tree);

    return status;
}

// Shares memory with the other ranks of this host, if all of them can.
static idist_status idist__segment_agree_share(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    int size = j->w->group.size, *ranks;
    idist__segment *seg;
    idist__vote_tree tree;
    bool all = false;
    idist_status status;

    if (!j->records[j->w->group.rank].shm) return IDIST_OK;
    seg = idist__segment_map_new(mem, (size_t)size);
    if (!seg) return IDIST_ERR_NO_MEMORY;

    ranks = seg->local + size; // allocated together with seg->local
    idist__segment_agree_find_ranks(j, seg, ranks);
    idist__segment_vote_set_tree(&tree, ranks, seg->n, seg->me);
    status = idist__segment_agree_run(j, seg, &tree, &all);

    if (all) idist__take_over_links(j, seg, ranks, status);
    else idist__segment_map_free(mem, seg);
    j->voting = status != IDIST_OK;

    return status;
}

// ---- ring/join/join.h ----------------------------------------------------------------------------

// ring/join/join.h: all steps of a join, in order; makes and frees the ring
//
// Carries out idist_initialize in the ring backend. The ranks meet in a key-value store, learn
// where each rank listens, and agree on shared memory inside each host. Then they connect the pairs
// without shared memory: all of these pairs, or only some of them in a large world
// (ring/join/links.h). After that no rank needs the store. The ranks also stop listening, unless
// some connections will be made on demand.
//
// The entry point is idist__join_open.
//
// STEPS
//
// The ranks write the following into the store, in this order; R is a rank. All names without
// `idist/` begin with a prefix that no other world uses.
//
//   idist/ranks whether ranks were given (only in a file)       idist__draw_check_given
//   idist/R     number of worlds that rank R has opened here    idist__join_store_open
//   job         number of the job, number of ranks (rank 0)     idist__records_agree_on_job
//   node/R      the record of rank R                            idist__records_exchange
//   nodes       all records, collected by rank 0
//   tcp/R       where rank R listens for other hosts            idist__records_listen_tcp
//   -           ranks of a host map one file in memory          idist__segment_agree_share
//   -           each rank connects to lower ranks               idist__links_connect
//   joined/R    rank R is done; rank 0 waits for all ranks and  idist__join_store_leave
//               closes the store
//
// If a rank cannot join, the ranks also write:
//
//   failed      why the rank gave up                            idist__join_failure_tell
//   heard       number of ranks that have read `failed`

enum { IDIST__OPEN_NBYTES = 20 << 20 }; // a thread's stack, the store's server, buffers

static void idist__join_free(idist__ring *ring) {
    const idist_allocator *mem = &ring->w->cfg.mem;
    int i;

    if (ring->shm) idist__liveness_tell(ring->shm, ring->shm->me, IDIST__ENDED_LEFT);

    for (i = 0; ring->links && i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];
        idist__message *msg, *next;

        idist__link_close(ring, l);
        idist__sockets_close(&l->sockets); // closes sockets of links that were not complete
        idist__link_write_failed(ring, l); // frees what was not written

        for (msg = l->early; msg; msg = next) {
            next = msg->next;
            idist__message_free(ring, l, msg);
        }
    }

    while (ring->idle) {
        idist__transfer *xfer = ring->idle;
        ring->idle = xfer->next;
        idist__mem_free(mem, xfer);
    }

    idist__connector_free(ring->connector);
    idist__os_descriptor_close(&ring->wake);
    idist__os_descriptor_close(&ring->watch);
    idist__segment_map_free(mem, ring->shm);
    idist__mem_free(mem, ring->links);
    idist__mem_free(mem, ring->stages);
    idist__mem_free(mem, ring->polls);
    idist__mem_free(mem, ring);
}

// Allocates the ring. On failure *out is NULL, or a partly initialized ring that the caller passes
// to idist__join_free.
static idist_status idist__join_new(idist__world *w, idist__ring **out) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__ring *ring = (idist__ring *)idist__mem_alloc(mem, sizeof *ring);
    size_t n = (size_t)w->group.size, i;

    *out = ring;
    if (!ring) return IDIST_ERR_NO_MEMORY;
    ring->w = w;
    ring->watch = -1;
    ring->wake = idist__os_poll_wakeup_new();
    if (ring->wake >= 0) ring->watch = idist__os_watch_new();
    if (ring->watch < 0)
        return idist__fail_errno("initialize: cannot create a wake-up descriptor", errno);

    ring->links = (idist__link *)idist__mem_alloc(mem, sizeof *ring->links * n);
    ring->stages = (char *)idist__mem_raw(mem, IDIST__STAGE_BYTES * n);
    if (!ring->links) return IDIST_ERR_NO_MEMORY;

    for (i = 0; i < n; i++) {
        idist__link *l = &ring->links[i];
        l->out_end = &l->out;
        l->early_end = &l->early;
        l->window = IDIST__WINDOW_BYTES;
        l->their_window = IDIST__WINDOW_BYTES;
        l->watched_in = -1;
        l->watched_out = -1;
        idist__sockets_init(&l->sockets);
        if (ring->stages) l->stage = ring->stages + i * IDIST__STAGE_BYTES;
    }

    return ring->stages ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Allocates the poll sets. Called once the number of sockets is known.
static idist_status idist__join_polls(idist__ring *ring) {
    int i;

    ring->poll_capacity = (size_t)IDIST__PROGRESS_WAKES + (size_t)IDIST__CONNECTOR_POLLS;
    for (i = 0; ring->links && i < ring->w->group.size; i++)
        ring->poll_capacity += (size_t)ring->links[i].sockets.count;
    ring->polls =
        (idist__os_poll_entry *)idist__mem_alloc(&ring->w->cfg.mem,
                                                 sizeof *ring->polls * 2 * ring->poll_capacity);

    return ring->polls ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Meets the other ranks. Called once the store is open.
static idist_status idist__join_meet(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;
    size_t n = (size_t)j->w->group.size;
    idist__record *records = (idist__record *)idist__mem_alloc(mem, sizeof *records * n);
    idist_status status;

    j->wanted = (bool *)idist__mem_alloc(mem, sizeof *j->wanted * n);
    j->connector = idist__connector_new(j->ring);

    if (!records || !j->wanted || !j->connector) {
        idist__mem_free(mem, records);
        return IDIST_ERR_NO_MEMORY;
    }

    status = idist__records_agree_on_job(j);
    if (status == IDIST_OK) status = idist__records_make(j, records);
    if (status == IDIST_OK) idist__links_find(j);
    if (status == IDIST_OK) status = idist__segment_agree_share(j);
    if (status == IDIST_OK) status = idist__links_connect_others(j);
    if (status == IDIST_OK) status = idist__join_polls(j->ring);
    if (status == IDIST_OK) status = idist__join_store_leave(j);

    j->records = NULL;
    idist__mem_free(mem, records);

    return status;
}

// Tells the ranks that may have joined why this rank could not join. Adds this rank's number to the
// text, unless the text already names the ranks at fault. The text of a time-out or a loss names
// them, and so does a reason that came from another rank.
static void idist__join_tell_joined(const idist__join *j, idist_status status) {
    idist__ring *ring = j->ring;
    char text[sizeof idist__me.text], cause[IDIST__TEXT_BYTES] = "";
    int i;

    memcpy(text, idist__me.text, sizeof text); // sending may overwrite the text
    if (!j->others_know && status != IDIST_ERR_TIMEOUT && status != IDIST_ERR_PEER_LOST)
        snprintf(cause, sizeof cause, "rank %d could not join: ", ring->w->group.rank);
    idist__text_append(cause, sizeof cause, "%s", idist__text_behind(text, "initialize: "));

    for (i = 0; i < ring->w->group.size; i++) {
        idist__link *l = &ring->links[i];

        if (!idist__link_is_connected(l)) continue;
        if (j->voting && l->transport != &idist__pipe_transport) continue; // votes in transit
        idist__link_abort(ring, l, ring->w->group.ctx, status, cause);
    }

    memcpy(idist__me.text, text, sizeof text);
}

// Frees what was needed only to join, whether joining succeeded or not.
static void idist__join_end(idist__join *j) {
    const idist_allocator *mem = &j->w->cfg.mem;

    idist__os_descriptor_close(&j->w->cfg.listener);
    idist__connector_free(j->connector);
    idist__mem_free(mem, j->wanted);
    idist__mem_free(mem, j->tcp);

    if (j->store) {
        char text[sizeof idist__me.text];
        memcpy(text, idist__me.text, sizeof text); // closing may overwrite the text
        idist_store_close(&j->store);
        memcpy(idist__me.text, text, sizeof text);
    }
}

// Warns if a memory limit may keep this rank from joining or from sharing memory. The warning is
// needed because the error texts of other ranks cannot name the limit.
static void idist__join_warn_of_limit(idist__world *w) {
    size_t needed = 2 * w->cfg.shm_nbytes + IDIST__OPEN_NBYTES;
    char limit[160];

    idist__os_memory_limit(needed, limit, sizeof limit);
    if (*limit)
        idist__log_print(&w->log, IDIST_LOG_WARN,
                         "initialize: %s; to share memory with the other ranks of this host, this "
                         "rank needs at least %zu KiB more",
                         limit, needed >> 10);
}

static idist_status idist__join_open(idist__world *w) {
    idist__join j;
    idist_status status = IDIST_OK;

    memset(&j, 0, sizeof j);
    j.w = w;
    j.deadline_ns = idist__os_clock_deadline(w->cfg.init_timeout_ms);
    if (w->group.size > 1) idist__join_warn_of_limit(w);

    // This call is made early, because it takes 15 ms once there is a second thread, such as the
    // store's server.
    if (w->cfg.transport == IDIST__TRANSPORT_AUTO && w->group.size > 1)
        idist__os_cpu_fence_others(true);

    // The store is opened first, so that the other ranks learn of any later failure.
    if (w->group.size > 1) status = idist__join_store_open(&j);
    else idist__text_copy(w->nodes[0].hostname, sizeof w->nodes[0].hostname, w->about.hostname);

    if (status == IDIST_OK) status = idist__join_new(w, &j.ring);
    if (status == IDIST_OK)
        status = w->group.size > 1 ? idist__join_meet(&j) : idist__join_polls(j.ring);
    idist__join_failure_of_store(&j, status);

    w->impl = j.ring;
    // The ranks that have joined are told first, because one of their calls may be about to time
    // out, and the store may be slow.
    if (status != IDIST_OK && j.ring && j.ring->links) idist__join_tell_joined(&j, status);
    if (status != IDIST_OK) idist__join_failure_tell(&j, status);
    idist__join_end(&j);

    if (status == IDIST_OK && !j.ring->polled_link_count)
        idist__os_descriptor_close(&j.ring->watch); // nothing will ever be watched

    if (status != IDIST_OK && j.ring) idist__join_free(j.ring);

    return status;
}

// ---- ring/ring_backend.h -------------------------------------------------------------------------

// ring/ring_backend.h: leaves the other ranks when a world closes; the table of the backend
//
// Functions: idist__ring_backend_*, idist__close_*.

//------------------------------------------------------------------------------
// leaving the other ranks
//
// After the last barrier: every rank sends BYE and waits until all of its frames are written. On
// TCP, closing a connection that holds unread input could destroy output that the peer has not read
// yet. So on TCP the rank also waits for the peer's BYE.
//
// After a failure of the world: every rank also sends BYE, with the reason. In groups that the
// failure does not concern, the other ranks can still finish the calls that the leaving rank has
// completed (idist__progress_left). The rank writes the frames that are queued and shuts down its
// side of each connection. Then it discards incoming data until the peers have closed their sides,
// for at most IDIST__CLOSE_FAILED_MS. Closing immediately could destroy an ABORT that a peer has
// not read yet. If ranks connect on demand, the rank keeps accepting connections during this time.
// Otherwise a rank that connects late would be refused, and would report this rank as the cause.
//------------------------------------------------------------------------------

enum { IDIST__CLOSE_CLEAN_MS = 5000, IDIST__CLOSE_FAILED_MS = 200 };

// Ends our side of a connection, and discards the data that has arrived. Returns true if the peer
// has closed its side.
static bool idist__close_discard(int fd) {
    char dropped[4096];

    idist__os_socket_end_stream(fd);
    while (idist__os_socket_read(fd, dropped, sizeof dropped) > 0) continue;

    return idist__os_socket_at_end(fd);
}

// Ends our side of the connections, and discards the data that has arrived. Fills a poll set with
// the connections that the peers have not closed yet. Returns the number of entries.
static int idist__close_polls(const idist__ring *ring, idist__os_poll_entry *entries) {
    int i, k, count = 0;

    for (i = 0; i < ring->w->group.size; i++) {
        const idist__link *l = &ring->links[i];

        for (k = 0; k < l->sockets.count && l->open && l->transport->lossy_close; k++)
            if (!idist__close_discard(l->sockets.fds[k]))
                idist__os_poll_watch(&entries[count++], l->sockets.fds[k], IDIST__OS_READABLE);
    }

    return count;
}

static void idist__close_linger(idist__ring *ring, int64_t until_ns) {
    idist__os_poll_entry *entries = ring->polls;
    idist__connector *conn = ring->connector;
    int count;

    if (conn) idist__connector_leave(conn);

    do {
        if (conn) idist__progress_connect(ring);
        count = idist__close_polls(ring, entries);
        if (conn) count += idist__connector_polls(conn, entries + count);
        if (!count) break;
        idist__os_poll(entries, count, idist__os_clock_ms_until(until_ns));
        if (conn) idist__connector_polled(conn);
    } while (idist__os_clock_ms_until(until_ns) != 0);
}

static void idist__close_world(idist__world *w, bool clean) {
    idist__ring *ring = idist__ring_of(w);
    int64_t until_ns =
        idist__os_clock_deadline(clean ? IDIST__CLOSE_CLEAN_MS : IDIST__CLOSE_FAILED_MS);
    int i;

    idist__os_mutex_lock(&w->lock);
    w->group.rank = -1; // frames that still arrive concern no group
    ring->said_bye = clean || w->group.status != IDIST_OK;
    ring->bye_status = clean ? IDIST_OK : w->group.status;
    for (i = 0; i < w->group.size && ring->said_bye; i++) idist__link_bye(ring, &ring->links[i]);

    idist__sleep_drain(ring, clean, until_ns);
    if (!clean) idist__close_linger(ring, until_ns);
    idist__pool_leave(&w->group);
    idist__os_mutex_unlock(&w->lock);

    idist__join_free(ring);
}

//------------------------------------------------------------------------------
// the table of the backend's functions
//------------------------------------------------------------------------------

static idist_status idist__ring_backend_claim(idist__config *config, const char **why) {
    *why = "a world of 1 needs no backend";
    return config->world_size == 1 && !config->backends[0] ? IDIST_ERR_NO_BACKEND : IDIST_OK;
}

// Fills the table of the backend. Functions that this backend does not have stay NULL. Also fills
// the transports' tables, because this function runs once, under a lock, before a world can open.
static void idist__ring_backend_fill(idist_backend_api *api) {
    idist__sockets_fill_transports();
    idist__pipe_fill_transport();

    api->name = "ring";
    api->task_nbytes = sizeof(idist__op);
    api->group_nbytes = sizeof(idist__ring_group);

    api->claim = idist__ring_backend_claim;
    api->open = idist__join_open;
    api->close = idist__close_world;

    api->group_open = idist__members_open; // ring/engine/members.h
    api->group_close = idist__members_close;
    api->group_offer = idist__pool_offer_region;
    api->group_meet = idist__members_meet;

    api->quick = idist__start_task_quick; // ring/engine/start_task.h
    api->takes_parts = idist__share_takes_parts;
    api->start = idist__start_task_start;
    api->announce = idist__announce_wait;

    api->quick_message = idist__start_task_quick_message;
    api->progress = idist__progress_run; // ring/engine/progress.h, ring/engine/sleep.h
    api->sleep = idist__sleep_begin;
    api->wake = idist__sleep_wake;
    api->attend = idist__sleep_attend;
    api->flush = idist__sleep_flush;

    api->cancel = idist__cancel_task; // ring/engine/cancel.h
    api->retract = idist__cancel_retract;
    api->tell = idist__cancel_tell;
    api->missing = idist__missing_name;
    api->alloc = idist__members_alloc;
}

const idist_backend_api *idist_ring_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__ring_backend_fill);
}

__attribute__((constructor(IDIST__REGISTER_GENERAL))) static void
idist__ring_backend_register(void) {
    (void)idist_register_backend(idist_ring_backend());
}

// ---- base/end.h ----------------------------------------------------------------------------------

// base/end.h: undoes the settings of base/begin.h
//
// In a drop-in, tools/drop_ins.py adds an #undef for each macro of the implementation here, so that
// no macro reaches the program. Has no include guard, because each drop-in includes this file.

#ifdef IDIST__FAST_MATH
#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#pragma pop_macro("__NO_MATH_ERRNO__")
#pragma pop_macro("__NO_TRAPPING_MATH__")
#pragma pop_macro("__NO_SIGNED_ZEROS__")
#pragma pop_macro("__RECIPROCAL_MATH__")
#pragma pop_macro("__ASSOCIATIVE_MATH__")
#pragma pop_macro("__FINITE_MATH_ONLY__")
#pragma pop_macro("__FAST_MATH__")
#endif
#undef IDIST__FAST_MATH
#endif

#pragma pop_macro("max")
#pragma pop_macro("min")
#pragma pop_macro("lock")
#pragma pop_macro("small")
#if defined(__SANITIZE_THREAD__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC diagnostic pop
#endif
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#undef IDIST__ASK_SILENCE_NS
#undef IDIST__BUFFERS_SKEW
#undef IDIST__CALLBACK
#undef IDIST__CATCH_EXIT
#undef IDIST__CHUNK_BYTES
#undef IDIST__CHUNK_MAX
#undef IDIST__CHUNK_OVERSUBSCRIBED
#undef IDIST__COPIED_BYTES
#undef IDIST__CORK_BYTES
#undef IDIST__CORK_MESSAGE
#undef IDIST__CORK_NS
#undef IDIST__COUNT_OF
#undef IDIST__CO_AWAIT
#undef IDIST__CO_BEGIN
#undef IDIST__CO_END
#undef IDIST__DIRECT_PIECE
#undef IDIST__EAGER_EXPOSED_BYTES
#undef IDIST__FLAT_BYTES
#undef IDIST__FRAME_BYTES
#undef IDIST__HISTORY
#undef IDIST__HOST_PIECE_BYTES
#undef IDIST__HOST_PIECE_NETWORKS
#undef IDIST__INLINE
#undef IDIST__INLINE_BYTES
#undef IDIST__LINE
#undef IDIST__LINKS_MANY
#undef IDIST__LINKS_NEAR
#undef IDIST__LOOK_NS
#undef IDIST__NOINLINE
#undef IDIST__NO_ALIAS
#undef IDIST__OS_MUTEX_INIT
#undef IDIST__PAGE
#undef IDIST__PART_PREFETCH_BYTES
#undef IDIST__PIECE_BYTES
#undef IDIST__PIPE_MAX
#undef IDIST__PREFETCH_BYTES
#undef IDIST__PRINTF
#undef IDIST__QUICK_YIELDS
#undef IDIST__REGION_HEAD_BYTES
#undef IDIST__REGION_SLOTS
#undef IDIST__REMOTE_BROADCAST_MAX
#undef IDIST__REMOTE_BYTES
#undef IDIST__REMOTE_OVERSUBSCRIBED
#undef IDIST__REMOTE_PIECE
#undef IDIST__REMOTE_REDUCTION
#undef IDIST__SAMPLE_BYTES
#undef IDIST__SAMPLE_PIECE
#undef IDIST__SLICE_BYTES
#undef IDIST__SLOTS
#undef IDIST__SLOTS_AHEAD
#undef IDIST__SLOTS_MOST
#undef IDIST__SLOT_BYTES
#undef IDIST__SPLIT_BYTES
#undef IDIST__STAGE_BYTES
#undef IDIST__STRIPE_BYTES
#undef IDIST__TEXT_BYTES
#undef IDIST__TLS
#undef IDIST__TRY
#undef IDIST__TURN_NS
#undef IDIST__UNUSED
#undef IDIST__UNWIND_END
#undef IDIST__VECTORIZE
#undef IDIST__WINDOW_BYTES
#undef IDIST__WRITERS_MS

#endif // IDIST_IMPLEMENTATION
