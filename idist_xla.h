/* idist_xla.h - v0.2.0 - XLA devices for idist: TPUs, and others with a PJRT plug-in - MIT license

DO THIS

    Include this file in the file that defines IDIST_IMPLEMENTATION:

        // app.c: every rank contributes 1; all of them get the number of ranks
        #define IDIST_IMPLEMENTATION
        #include "idist.h"
        #include "idist_xla.h"
        #include <stdio.h>
        int main(void) {
            float one = 1;
            idist_xla_buffer *x = NULL;
            if (idist_initialize(NULL) != IDIST_OK ||
                idist_xla_buffer_put(&one, 1, IDIST_F32, NULL, &x) != IDIST_OK ||
                idist_all_reduce(x, x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK ||
                idist_xla_buffer_get(x, &one, sizeof one, -1) != IDIST_OK)
                return printf("%s\n", idist_last_error()), 1;
            printf("rank %d on %s: %g\n", idist_get_rank(), idist_device(), one);
            idist_xla_buffer_free(&x);
            return idist_finalize() != IDIST_OK;
        }

        cc app.c -o app
        IDIST_XLA_LIB=/path/to/plug-in.so ./app

    No header of XLA is needed. The plug-in is loaded at run time; the first of these is used:

        desc.xla_api        a plug-in and a client that the program has opened
        IDIST_XLA_LIB       the file of any PJRT plug-in
        TPU_LIBRARY_PATH    libtpu.so
        libtpu              in Python's environments, then where the loader looks

    libtpu is loaded only on a machine that has a TPU chip. PJRT 0.57 or later is needed.

    Status: this code has never run on a TPU. It is tested with two CPU plug-ins, on which ranks are
    threads of one process, and with a stand-in for several processes.

BUFFERS

    XLA has no device pointers, and a PJRT_Buffer never changes. So device memory is an
    idist_xla_buffer, a handle that a program passes wherever a call takes a buffer. A call that
    writes to the handle replaces the PJRT_Buffer behind the handle. A world without such a device
    takes no handles. A call in place may reuse the memory of the input for the result (donation).

    A handle has addresses of its own, as many as the buffer has bytes. (char *)x + 8 is the part of
    the buffer from byte 8 on, and a call takes such a part as well. Nobody can read or write these
    addresses: a program that passes a handle to memcpy ends with a segmentation fault.

WHO IS A RANK

    processes   one process per TPU chip: idist_spawn, idistrun, srun. idist tells libtpu which chip
                is whose (TPU_VISIBLE_CHIPS, TPU_PROCESS_ADDRESSES, ...), unless these variables are
                set. IDIST_TPU_VARIABLES marks the variables that idist has set, so that a later
                world may replace them.
    threads     one process opens a world per thread (idist_open), and its devices are divided among
                the threads. XLA's CPU plug-in has as many devices as IDIST_XLA_CPU_DEVICES says.

    A rank uses the device whose index is its local rank modulo the number of devices of its
    process. desc.device or IDIST_DEVICE overrides that: "tpu:1" is the second TPU of the process,
    "xla:1" its second device, and "cpu" means no device. idist_device() returns the number that the
    plug-in gives the device.

HOW DEVICE MEMORY TRAVELS

    idist_device_backend() returns the device backend in use. desc.device_backend or
    IDIST_DEVICE_BACKEND selects one:

        xla      programs in StableHLO, compiled once and kept: all_reduce, reduce, broadcast,
                 all_gather, reduce_scatter and all_to_all of whole buffers, for the ops SUM, PROD,
                 MIN, MAX and AVG, and the bitwise ops where the plug-in has them
        staged   everything else, and everything if the devices do not form one world of XLA: the
                 buffers are copied to the host, and the host's backend does the call

    Compiling takes milliseconds on a CPU, and may take seconds on a TPU. Calls share a program if
    they have the same kind, shapes, dtype, op, root and group. A process keeps 256 programs. A user
    program that varies its counts should round them up to a few values.

    XLA rounds 16-bit and 8-bit floats at every step, and does not define MIN and MAX of a NaN. On a
    TPU, F64 is a pair of F32, with the range of F32. Integer results have the bits of the host's
    results.

    In one collective, either all ranks pass device memory, even ranks with 0 elements, or none
    does. Otherwise the call fails with IDIST_ERR_MISMATCH. A part of a buffer is staged by copying
    the whole buffer. A message may go from a device to the host memory of another rank.

CALLS

    opts.request       runs in the background until idist_wait or idist_test completes it
    opts.stream        IDIST_ERR_UNSUPPORTED: PJRT has no streams
    idist_barrier, and the _bytes and _alloc functions   stay on the host

    Before a program is launched, all ranks meet on the host. They compare the call, and agree on
    the order of all programs. So different calls, late ranks and lost ranks give the same errors as
    on the host, before any rank has entered XLA. If the call times out after all ranks have agreed,
    its program still runs, because the devices of other ranks wait for it. Programs of several
    groups never wait for each other in a circle. Calls of two worlds of one process have no such
    order: do not let them overlap.

PROGRAMS OF YOUR OWN

    A training step with stablehlo.all_reduce inside runs over the ranks of idist:
    idist_xla_compile_options gives the options under which replica i is rank i of a group.
    examples/13_xla_train.c shows it. Three rules apply:

      - launch such programs in the same order on all ranks, after idist_wait if a request is open
      - ranks that are threads of one process run one compiled program, not one each
      - call idist_barrier before each launch: XLA waits without a deadline for a rank that is lost

FAILURES

    If the plug-in reports an error on one rank, the call fails with IDIST_ERR_DEVICE on all ranks.
    If a rank is lost while its program runs, the others get IDIST_ERR_PEER_LOST. In both cases the
    devices of other ranks may wait inside the program forever, and programs of all groups wait
    behind it; on CPUs, XLA ends the process after 40 s ("Termination timeout"). A call in place
    that fails may lose the contents of its buffer. Then idist_xla_buffer_get returns
    IDIST_ERR_DEVICE.

CONTENTS

    [xla:buffers] has the declarations. The implementation follows. Its files are in src/xla/.
    Generated from src/ by tools/drop_ins.py: change the files there.
*/
#ifndef IDIST_H
#include "idist.h"
#endif
#if IDIST_VERSION_MAJOR != 0 || IDIST_VERSION_MINOR != 2 || IDIST_VERSION_PATCH != 0
#error "idist_xla.h is version 0.2.0, and idist.h another one: copy both from the same release"
#endif
#ifndef IDIST_XLA_H
#define IDIST_XLA_H

#ifdef __cplusplus
extern "C" {
#endif

//------------------------------------------------------------------------------
// [xla:buffers]  buffers, and what programs of your own need
//
// A group of NULL is the world. Functions that return a pointer or a size return NULL or 0 on
// failure; idist_last_error says why.
//------------------------------------------------------------------------------

// Device memory of this rank: a handle, and an address that nobody can access.
typedef struct idist_xla_buffer idist_xla_buffer;

// Creates a buffer of one dimension on this rank's device and copies `count` elements of host
// memory into the buffer, or zeros if data is NULL. Blocks until the data has been read. Any thread
// may call. Returns IDIST_ERR_ARG for count 0 and for a dtype that XLA does not have (pairs, user
// dtypes), IDIST_ERR_STATE without a world, IDIST_ERR_NO_DEVICE, IDIST_ERR_DEVICE or
// IDIST_ERR_NO_MEMORY.
IDIST_API idist_status idist_xla_buffer_put(const void *data, size_t count, idist_dtype dtype,
                                            idist_group *group, idist_xla_buffer **buffer);

// Makes a buffer from a PJRT_Buffer on this rank's device, for example from a result of your own
// program. The buffer may have up to 16 dimensions; calls take its elements in row-major order.
// idist treats a buffer of bools as IDIST_U8. A result that is not 0 becomes 1. Use IDIST_LOR or
// IDIST_LAND, because IDIST_SUM wraps at 256. On success the PJRT_Buffer belongs to idist. Returns
// the errors of idist_xla_buffer_put, and IDIST_ERR_UNSUPPORTED for a type that idist does not
// have.
IDIST_API idist_status idist_xla_buffer_adopt(void *pjrt_buffer, idist_group *group,
                                              idist_xla_buffer **buffer);

// Copies a whole buffer to host memory of nbytes, which must be the size of the buffer. Waits for
// the programs that compute the buffer, but not for requests of idist: wait for those first.
// Returns IDIST_ERR_ARG, IDIST_ERR_DEVICE, IDIST_ERR_STATE in a process forked from the owner's, or
// IDIST_ERR_TIMEOUT after timeout_ms (0: does not wait, -1: no limit).
IDIST_API idist_status idist_xla_buffer_get(const idist_xla_buffer *buffer, void *data,
                                            size_t nbytes, int timeout_ms);

// Returns the PJRT_Buffer of a buffer, as an input for a program of your own. The PJRT_Buffer stays
// valid until the next call that writes to the buffer. idist keeps ownership.
IDIST_API void *idist_xla_buffer_pjrt(const idist_xla_buffer *buffer);

// Frees a buffer and sets the pointer to NULL. Calls in progress keep the memory until they end. A
// buffer may outlive the world.
IDIST_API idist_status idist_xla_buffer_free(idist_xla_buffer **buffer);

// Returns the PJRT_Api of the plug-in, or NULL if none is loaded. If desc.xla_api is set, returns
// that table until the last world and the last buffer are gone. Any thread may call.
IDIST_API const void *idist_xla_api(void);

// Returns the PJRT_Client of this process, which idist owns unless it came from desc.xla_client.
IDIST_API void *idist_xla_client(idist_group *group);

// Returns the PJRT_Device of this rank.
IDIST_API void *idist_xla_device(idist_group *group);

// Writes a serialized CompileOptionsProto for a program over a group: one replica per member,
// replica i on the device of rank i. Returns the number of bytes. Writes nothing if the capacity is
// smaller. Fails with IDIST_ERR_UNSUPPORTED if the members cannot run one program, for example
// because two members share a device.
IDIST_API size_t idist_xla_compile_options(idist_group *group, void *options, size_t capacity);

// Returns the backend that moves memory of XLA's devices, beside the world's backend for host
// memory.
IDIST_API const idist_backend_api *idist_xla_backend(void);

#ifdef __cplusplus
} // extern "C"
#endif

#endif // IDIST_XLA_H

// The API ends here; the implementation follows.

#if defined(IDIST_IMPLEMENTATION) && !defined(IDIST_XLA_IMPLEMENTATION_DONE)
#define IDIST_XLA_IMPLEMENTATION_DONE

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

// ---- xla/pjrt.h ----------------------------------------------------------------------------------

// xla/pjrt.h: the part of PJRT's C ABI that idist uses
//
// PJRT is the interface of XLA's plug-ins: one table of functions, each of which takes a pointer to
// one struct of arguments. A struct begins with its size and grows only at its end, and functions
// are only added at the end of the table. So these declarations serve every plug-in from 0.57 on,
// and idist needs no header of XLA. A plug-in refuses a struct that is smaller than the one it was
// compiled with. So each struct here ends with zeros for the fields of newer plug-ins.
//
// tests/xla/pjrt_abi.c compares numbers, offsets and sizes with a real pjrt_c_api.h.

enum {
    IDIST__PJRT_MAJOR = 0,
    IDIST__PJRT_MINOR = 57, // the oldest version whose table has today's order
    IDIST__PJRT_NEWER = 96  // bytes for fields that idist does not know
};

// One row per function: its name in PJRT, and its place in the table.
#define IDIST__PJRT_FUNCTIONS(X)                     \
    X(ERROR_DESTROY, Error_Destroy, 0)               \
    X(ERROR_MESSAGE, Error_Message, 1)               \
    X(INITIALIZE, Plugin_Initialize, 3)              \
    X(EVENT_DESTROY, Event_Destroy, 5)               \
    X(EVENT_IS_READY, Event_IsReady, 6)              \
    X(EVENT_AWAIT, Event_Await, 8)                   \
    X(CLIENT_CREATE, Client_Create, 10)              \
    X(CLIENT_DESTROY, Client_Destroy, 11)            \
    X(PLATFORM_NAME, Client_PlatformName, 12)        \
    X(PROCESS_INDEX, Client_ProcessIndex, 13)        \
    X(PLATFORM_VERSION, Client_PlatformVersion, 14)  \
    X(DEVICES, Client_AddressableDevices, 16)        \
    X(COMPILE, Client_Compile, 20)                   \
    X(PUT, Client_BufferFromHostBuffer, 22)          \
    X(DEVICE_ID, DeviceDescription_Id, 23)           \
    X(DEVICE_DESCRIPTION, Device_GetDescription, 29) \
    X(PROGRAM_DESTROY, LoadedExecutable_Destroy, 50) \
    X(EXECUTE, LoadedExecutable_Execute, 55)         \
    X(BUFFER_DESTROY, Buffer_Destroy, 58)            \
    X(BUFFER_TYPE, Buffer_ElementType, 59)           \
    X(BUFFER_DIMS, Buffer_Dimensions, 60)            \
    X(BUFFER_DEVICE, Buffer_Device, 65)              \
    X(GET, Buffer_ToHostBuffer, 70)                  \
    X(BUFFER_READY, Buffer_ReadyEvent, 72)

enum {
#define IDIST__X(name, pjrt_name, place) IDIST__PJRT_##name = place,
    IDIST__PJRT_FUNCTIONS(IDIST__X)
#undef IDIST__X
        IDIST__PJRT_LAST = IDIST__PJRT_BUFFER_READY
};

// Takes the arguments of one call. Returns an error, or NULL.
typedef void *(*idist__pjrt_fn)(void *args);

typedef struct idist__pjrt_version {
    size_t nbytes;
    void *extensions;
    int major, minor;
} idist__pjrt_version;

// PJRT_Api. The plug-in owns the table, which stays until the process ends.
typedef struct idist__pjrt_api {
    size_t nbytes; // of the table: a plug-in that lacks the last functions has a smaller one
    void *extensions;
    idist__pjrt_version version;
    idist__pjrt_fn functions[IDIST__PJRT_LAST + 1];
} idist__pjrt_api;

// Defines the struct of arguments for a function.
#define IDIST__PJRT_ARGS(name, fields)                 \
    typedef struct idist__pjrt_##name {                \
        size_t nbytes;                                 \
        void *extensions;                              \
        fields unsigned char newer[IDIST__PJRT_NEWER]; \
    } idist__pjrt_##name

// clang-format off
IDIST__PJRT_ARGS(none, );
IDIST__PJRT_ARGS(object, void *object; void *out; ); // a question with one pointer as answer
IDIST__PJRT_ARGS(number, void *object; int out; );
IDIST__PJRT_ARGS(flag, void *object; bool out; );
IDIST__PJRT_ARGS(string, const void *object; const char *text; size_t nbytes_of_text; );
IDIST__PJRT_ARGS(client_create,
    const void *options; size_t option_count;
    void *get_callback; void *get_arg; void *put_callback; void *put_arg;
    void *client; );
IDIST__PJRT_ARGS(devices, void *client; void *const *devices; size_t count; );
IDIST__PJRT_ARGS(compile,
    void *client; const void *program; const char *options; size_t options_nbytes;
    void *loaded; );
IDIST__PJRT_ARGS(put,
    void *client; const void *data; int type;
    const int64_t *dims; size_t dim_count; const int64_t *strides; size_t stride_count;
    int semantics; void *device; void *memory; void *layout;
    void *done; void *buffer; );
IDIST__PJRT_ARGS(get, void *buffer; void *layout; void *data; size_t data_nbytes; void *done; );
IDIST__PJRT_ARGS(dims, void *buffer; const int64_t *dims; size_t count; );
IDIST__PJRT_ARGS(execute_options,
    void *send_callbacks; void *recv_callbacks; size_t send_count; size_t recv_count;
    int launch_id; const int64_t *not_donated; size_t not_donated_count; );
IDIST__PJRT_ARGS(execute,
    void *loaded; void *options;
    void *const *const *inputs; size_t device_count; size_t input_count;
    void **const *outputs; void **done; void *device; );
// clang-format on

// Structs that are parts of others have exactly the size that the plug-in knows.
typedef struct idist__pjrt_program {
    size_t nbytes;
    void *extensions;
    char *code;
    size_t code_nbytes;
    const char *format;
    size_t format_nbytes;
} idist__pjrt_program;

typedef struct idist__pjrt_named_value { // a PJRT_NamedValue that is an integer
    size_t nbytes;
    void *extensions;
    const char *name;
    size_t name_nbytes;
    int type;
    int64_t value;
    size_t value_count;
} idist__pjrt_named_value;

typedef struct idist__pjrt_tiled_layout { // a PJRT_Buffer_MemoryLayout that is tiled
    size_t nbytes;
    void *extensions;
    struct {
        size_t nbytes;
        void *extensions;
        const int64_t *minor_to_major;
        size_t minor_to_major_count;
        const int64_t *tile_dims;
        const size_t *tile_dim_counts;
        size_t tile_count;
    } tiled;
    int type;
} idist__pjrt_tiled_layout;

enum {
    IDIST__PJRT_INT64 = 1,             // PJRT_NamedValue_kInt64
    IDIST__PJRT_BOOL = 1,              // PJRT_Buffer_Type_PRED
    IDIST__PJRT_TILED = 0,             // PJRT_Buffer_MemoryLayout_Type_Tiled
    IDIST__PJRT_UNTIL_TRANSFERRED = 1, // PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes
    IDIST__PJRT_DIMS = 16              // most dimensions of a buffer
};

// The names of a dtype in StableHLO, and its number in PJRT (PJRT_Buffer_Type). `bits` is the
// unsigned integer of equal size.
typedef struct idist__pjrt_type {
    const char *name, *bits;
    int number;
} idist__pjrt_type;

// Returns the names of a dtype, or NULL if XLA does not have it.
static const idist__pjrt_type *idist__pjrt_type_of(idist_dtype dtype) {
    static const idist__pjrt_type types[] = {{"i8", "ui8", 2},        {"ui8", "ui8", 6},
                                             {"i16", "ui16", 3},      {"ui16", "ui16", 7},
                                             {"i32", "ui32", 4},      {"ui32", "ui32", 8},
                                             {"i64", "ui64", 5},      {"ui64", "ui64", 9},
                                             {"f16", "ui16", 10},     {"bf16", "ui16", 13},
                                             {"f32", "ui32", 11},     {"f64", "ui64", 12},
                                             {"f8E4M3FN", "ui8", 17}, {"f8E5M2", "ui8", 16}};

    return (size_t)dtype < IDIST__COUNT_OF(types) ? &types[dtype] : NULL;
}

// Returns the dtype with a number of PJRT, or IDIST_DTYPE_COUNT if idist does not have the type. A
// bool of XLA is a byte.
static idist_dtype idist__pjrt_dtype(int number) {
    int i;

    if (number == IDIST__PJRT_BOOL) return IDIST_U8;
    for (i = 0; idist__pjrt_type_of((idist_dtype)i); i++)
        if (idist__pjrt_type_of((idist_dtype)i)->number == number) return (idist_dtype)i;

    return IDIST_DTYPE_COUNT;
}

// Prepares a struct of arguments: its size, and zeros.
static void idist__pjrt_init(void *args, size_t nbytes) {
    memset(args, 0, nbytes);
    memcpy(args, &nbytes, sizeof nbytes);
}

// Frees an error. Returns false if there was one, and writes its text to `why`.
static bool idist__pjrt_check(const idist__pjrt_api *api, void *error, char *why, size_t capacity) {
    idist__pjrt_string message;
    idist__pjrt_object args;
    int n;

    if (!error) return true;

    // In PJRT, the two functions that are called here return void, so their results are ignored.
    idist__pjrt_init(&message, sizeof message);
    message.object = error;
    api->functions[IDIST__PJRT_ERROR_MESSAGE](&message);
    n = message.nbytes_of_text < 1000 ? (int)message.nbytes_of_text : 1000;
    snprintf(why, capacity, "%.*s", n, message.text ? message.text : "");

    idist__pjrt_init(&args, sizeof args);
    args.object = error;
    api->functions[IDIST__PJRT_ERROR_DESTROY](&args);

    return false;
}

// Calls a function of the plug-in. Returns false on failure, and writes the reason to `why`.
static bool idist__pjrt_call(const idist__pjrt_api *api, int place, void *args, char *why,
                             size_t capacity) {
    return idist__pjrt_check(api, api->functions[place](args), why, capacity);
}

// Destroys an event, a buffer, a program or a client. Accepts NULL.
static void idist__pjrt_destroy(const idist__pjrt_api *api, int place, void *object) {
    idist__pjrt_object args;
    char ignored[8];

    if (!object) return;
    idist__pjrt_init(&args, sizeof args);
    args.object = object;
    idist__pjrt_call(api, place, &args, ignored, sizeof ignored);
}

// Waits for an event and destroys it. Returns false if the work that the event stands for has
// failed. Accepts NULL. Blocks without a deadline.
static bool idist__pjrt_await(const idist__pjrt_api *api, void *event, char *why, size_t capacity) {
    idist__pjrt_object args;
    bool ok;

    if (!event) return true;
    idist__pjrt_init(&args, sizeof args);
    args.object = event;
    ok = idist__pjrt_call(api, IDIST__PJRT_EVENT_AWAIT, &args, why, capacity);
    idist__pjrt_destroy(api, IDIST__PJRT_EVENT_DESTROY, event);

    return ok;
}

// Returns the pointer that a function gives for an object, or NULL with the reason in `why`.
static void *idist__pjrt_ask(const idist__pjrt_api *api, int place, void *object, char *why,
                             size_t capacity) {
    idist__pjrt_object args;

    idist__pjrt_init(&args, sizeof args);
    args.object = object;

    return idist__pjrt_call(api, place, &args, why, capacity) ? args.out : NULL;
}

// Returns the number that a function gives for an object, or -1 with the reason in `why`.
static int idist__pjrt_ask_number(const idist__pjrt_api *api, int place, void *object, char *why,
                                  size_t capacity) {
    idist__pjrt_number args;

    idist__pjrt_init(&args, sizeof args);
    args.object = object;

    return idist__pjrt_call(api, place, &args, why, capacity) ? args.out : -1;
}

// Writes the text that a function gives for a client, or "" on failure.
static void idist__pjrt_ask_text(const idist__pjrt_api *api, int place, void *client, char *text,
                                 size_t capacity) {
    idist__pjrt_string args;
    char ignored[8];

    text[0] = 0;
    idist__pjrt_init(&args, sizeof args);
    args.object = client;
    if (!idist__pjrt_call(api, place, &args, ignored, sizeof ignored)) return;
    snprintf(text, capacity, "%.*s", (int)(args.nbytes_of_text & 0xffff), args.text);
}

// ---- xla/tpu.h -----------------------------------------------------------------------------------

// xla/tpu.h: the variables that libtpu reads when it is loaded
//
// libtpu forms a slice from TPU_* variables. If a variable is missing, libtpu asks the metadata
// server of Google's cloud, 30 times per value. On a machine without that server this takes
// minutes. idist knows the ranks and their hosts. If there is one process per chip, idist sets the
// variables that the user has not set. Nothing is set if several ranks are threads of one process,
// because that process owns all chips of the host. The values follow torch_xla
// (torch_xla/_internal/tpu.py).

enum {
    IDIST__TPU_VENDOR = 0x1ae0,
    IDIST__TPU_PORT = 8476,
    IDIST__TPU_BOUNDS = 2, // index of TPU_PROCESS_BOUNDS in idist__tpu_names
    IDIST__TPU_VARIABLES = 6
};

static const char *const idist__tpu_names[IDIST__TPU_VARIABLES] = {"TPU_VISIBLE_CHIPS",
                                                                   "TPU_CHIPS_PER_PROCESS_BOUNDS",
                                                                   "TPU_PROCESS_BOUNDS",
                                                                   "TPU_PROCESS_ADDRESSES",
                                                                   "TPU_PROCESS_PORT",
                                                                   "CLOUD_TPU_TASK_ID"};

// Returns the variables that idist set for an earlier world, perhaps in the process from which this
// process was started, as bits. Such variables do not count as the user's.
static int64_t idist__tpu_own_variables(void) {
    const char *text = idist__os_env("IDIST_TPU_VARIABLES");
    int64_t own = 0;

    return text && idist__parse_int(text, 0, (1 << IDIST__TPU_VARIABLES) - 1, &own) ? own : 0;
}

// Returns true if the user has set a variable.
static bool idist__tpu_is_users(int variable) {
    return idist__os_env(idist__tpu_names[variable]) &&
           !(idist__tpu_own_variables() >> variable & 1);
}

// Sets the variables that the user has not set, and records them in IDIST_TPU_VARIABLES. Ignores
// values that are empty. Returns false if memory cannot be allocated.
static bool idist__tpu_export(const char *const values[IDIST__TPU_VARIABLES]) {
    int64_t own = idist__tpu_own_variables();
    char number[24];
    int i;

    for (i = 0; i < IDIST__TPU_VARIABLES; i++) {
        if (!values[i][0] || idist__tpu_is_users(i)) continue;
        if (!idist__os_env_set(idist__tpu_names[i], values[i])) return false;
        own |= (int64_t)1 << i;
    }

    snprintf(number, sizeof number, "%d", (int)own);

    return idist__os_env_set("IDIST_TPU_VARIABLES", number);
}

// Returns true if this machine has a TPU chip. Without a chip, libtpu must not be loaded.
static bool idist__tpu_has_chip(void) { return idist__os_pci_has_vendor(IDIST__TPU_VENDOR); }

// Returns the grid of the processes of one host, or NULL if idist does not know the grid.
static const char *idist__tpu_bounds(int processes) {
    switch (processes) {
    case 1: return "1,1,1";
    case 4: return "2,2,1";
    case 8: return "2,4,1";
    default: return NULL;
    }
}

// Multiplies two grids "x,y,z" into `bounds`. Returns false if one of them is no grid.
static bool idist__tpu_multiply(const char *a, const char *b, char *bounds, size_t capacity) {
    int x[3], y[3], end_a = 0, end_b = 0, i;

    if (sscanf(a, "%d,%d,%d%n", &x[0], &x[1], &x[2], &end_a) != 3 || a[end_a]) return false;
    if (sscanf(b, "%d,%d,%d%n", &y[0], &y[1], &y[2], &end_b) != 3 || b[end_b]) return false;

    for (i = 0; i < 3; i++)
        if (x[i] < 1 || x[i] > 4096 || y[i] < 1 || y[i] > 4096) return false;
    snprintf(bounds, capacity, "%d,%d,%d", x[0] * y[0], x[1] * y[1], x[2] * y[2]);

    return true;
}

// Writes the grid of all processes. Returns false, with the reason, if idist cannot know the grid.
static bool idist__tpu_process_bounds(const idist__world *w, char *bounds, size_t capacity,
                                      char *why, size_t why_capacity) {
    const char *hosts = idist__os_env("TPU_HOST_BOUNDS");
    const char *chips = idist__os_env("TPU_CHIPS_PER_HOST_BOUNDS");
    const char *own = idist__tpu_bounds(w->nodes[w->group.rank].local_size);

    if (idist__tpu_is_users(IDIST__TPU_BOUNDS)) return true; // idist keeps the user's value
    if (!chips) chips = own;
    if (!hosts && w->nnodes == 1) hosts = "1,1,1";
    if (hosts && chips && idist__tpu_multiply(hosts, chips, bounds, capacity)) return true;
    snprintf(why, why_capacity,
             "set TPU_PROCESS_BOUNDS: the grid of %d processes on %d hosts is not known "
             "(TPU_HOST_BOUNDS x TPU_CHIPS_PER_HOST_BOUNDS would tell)",
             w->group.size, w->nnodes);

    return false;
}

// Writes "host:port" of every rank, separated by commas.
static void idist__tpu_addresses(const idist__world *w, char *text, size_t capacity) {
    int i;

    text[0] = 0;
    for (i = 0; i < w->group.size; i++)
        idist__text_append(text, capacity, "%s%s:%d", i ? "," : "",
                           w->nnodes == 1 ? "localhost" : w->nodes[i].hostname,
                           IDIST__TPU_PORT + w->nodes[i].local_rank);
}

// Sets the variables that libtpu needs if there is one process per chip, except those that the user
// has set. `chip` is the number of the chip on this host. Returns false, with the reason, if idist
// does not know a value.
static bool idist__tpu_set_variables(const idist__world *w, int chip, char *why, size_t capacity) {
    size_t nbytes = 100 * (size_t)w->group.size;
    char *addresses, bounds[40] = "", number[16], port[16], task[16];
    const char *values[IDIST__TPU_VARIABLES];
    bool ok;

    if (!idist__tpu_process_bounds(w, bounds, sizeof bounds, why, capacity)) return false;
    addresses = (char *)idist__mem_alloc(&w->cfg.mem, nbytes);
    snprintf(why, capacity, "out of memory");
    if (!addresses) return false;

    idist__tpu_addresses(w, addresses, nbytes);
    snprintf(number, sizeof number, "%d", chip);
    snprintf(port, sizeof port, "%d", IDIST__TPU_PORT + w->nodes[w->group.rank].local_rank);
    snprintf(task, sizeof task, "%d", w->group.rank);
    values[0] = number;
    values[1] = "1,1,1";
    values[IDIST__TPU_BOUNDS] = bounds;
    values[3] = addresses;
    values[4] = port;
    values[5] = task;
    ok = idist__tpu_export(values);
    idist__mem_free(&w->cfg.mem, addresses);

    return ok;
}

// ---- xla/pjrt_load.h -----------------------------------------------------------------------------

// xla/pjrt_load.h: finds and loads a PJRT plug-in
//
// The first of these that exists is used:
//
//     IDIST_XLA_LIB       any plug-in: a TPU's, a CPU's, a GPU's
//     TPU_LIBRARY_PATH    libtpu.so, as for JAX
//     libtpu              in a Python environment, then where the loader looks
//
// libtpu is loaded only on a machine with a TPU chip: see xla/tpu.h.

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

// ---- xla/xla_model.h -----------------------------------------------------------------------------

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

// ---- xla/compile_options.h -----------------------------------------------------------------------

// xla/compile_options.h: an encoder for CompileOptionsProto
//
// A program over a group has one replica per member; replica i runs on the device of rank i:
//
//     CompileOptionsProto        executable_build_options = 3
//       ExecutableBuildOptions   num_replicas = 4, num_partitions = 5, device_assignment = 9
//         DeviceAssignment       replica_count = 1, computation_count = 2, computation_devices = 3
//           ComputationDevice    replica_device_ids = 1, packed
//
// (xla/pjrt/proto/compile_options.proto and xla/xla_data.proto.) A message is a sequence of fields.
// Each field is a tag, followed by a number, or by a length and that many bytes. All integers are
// varints: seven bits per byte, lowest first.

// A message being written. If `data` is NULL, only the size is computed.
typedef struct idist__proto {
    char *data;
    size_t nbytes;
} idist__proto;

static void idist__proto_varint(idist__proto *proto, uint64_t value) {
    do {
        if (proto->data)
            proto->data[proto->nbytes] = (char)((value & 127) | (value > 127 ? 128 : 0));
        proto->nbytes++;
        value >>= 7;
    } while (value);
}

// Appends a field that is an integer.
static void idist__proto_integer(idist__proto *proto, int field, uint64_t value) {
    idist__proto_varint(proto, (uint64_t)field << 3);
    idist__proto_varint(proto, value);
}

// Appends the tag and the length of a field that is a message of nbytes. The message follows.
static void idist__proto_message(idist__proto *proto, int field, size_t nbytes) {
    idist__proto_varint(proto, (uint64_t)field << 3 | 2);
    idist__proto_varint(proto, nbytes);
}

// Appends the device of each replica.
static void idist__proto_device_ids(idist__proto *proto, const idist_group *g) {
    const idist__xla_rank_info *infos = idist__xla_of(g->w)->infos;
    int i;

    for (i = 0; i < g->size; i++)
        idist__proto_varint(proto, (uint64_t)infos[g->ranks[i]].device_id);
}

// Writes a message whose parts have these sizes: [0] the ids, [1] ComputationDevice, [2]
// DeviceAssignment, [3] ExecutableBuildOptions. Updates the sizes. If a call does not change the
// sizes, the lengths that it wrote are right.
static void idist__proto_options(idist__proto *proto, const idist_group *g, size_t nbytes[4]) {
    uint64_t n = (uint64_t)g->size;
    size_t begin[4];

    idist__proto_message(proto, 3, nbytes[3]);
    begin[3] = proto->nbytes;
    idist__proto_integer(proto, 4, n);
    idist__proto_integer(proto, 5, 1);
    idist__proto_message(proto, 9, nbytes[2]);
    begin[2] = proto->nbytes;
    idist__proto_integer(proto, 1, n);
    idist__proto_integer(proto, 2, 1);
    idist__proto_message(proto, 3, nbytes[1]);
    begin[1] = proto->nbytes;
    idist__proto_message(proto, 1, nbytes[0]);
    begin[0] = proto->nbytes;
    idist__proto_device_ids(proto, g);

    for (n = 0; n < 4; n++) nbytes[n] = proto->nbytes - begin[n];
}

// Writes the options of a program over a group, if they fit. Returns the number of bytes.
static size_t idist__proto_write(const idist_group *g, char *data, size_t capacity) {
    size_t nbytes[4] = {0, 0, 0, 0};
    idist__proto proto;
    int turn;

    // The length of a message has more bytes when the message is long. Five turns are enough: a
    // longer length changes only the messages around it.
    for (turn = 0; turn < 5; turn++) {
        proto.data = NULL;
        proto.nbytes = 0;
        idist__proto_options(&proto, g, nbytes);
    }

    if (proto.nbytes > capacity) return proto.nbytes;
    proto.data = data;
    proto.nbytes = 0;
    idist__proto_options(&proto, g, nbytes);

    return proto.nbytes;
}

// ---- xla/stablehlo.h -----------------------------------------------------------------------------

// xla/stablehlo.h: a call as a StableHLO program
//
// A program has one replica per member of the group. It flattens the input, performs the
// collective, and gives the result the shape of the buffer that receives it:
//
//     func @main(%in: tensor<2x3xf32>) -> tensor<2x3xf32> {
//       %flat = reshape %in
//       %done = "stablehlo.all_reduce"(%flat) ({ ... add ... }) {replica_groups = [[0, 1]]}
//       %out = reshape %done
//       return %out
//     }
//
// XLA has no broadcast on CPUs and TPUs. Instead, a program adds the root's bits and the other
// ranks' zeros as unsigned integers, which is exact even for NaN and -0.

// A program while it is being written.
typedef struct idist__hlo {
    char *text;
    size_t capacity;
    const idist_group *g;
    const idist__call *call;
    const idist__pjrt_type *type;
    char flat_in[48], flat_out[48]; // types: "tensor<6xf32>"
    char in[320], out[320];         // "tensor<2x3xf32>"
} idist__hlo;

// Appends a line.
IDIST__PRINTF(2, 3) static void idist__hlo_put(idist__hlo *hlo, const char *fmt, ...) {
    size_t used = strlen(hlo->text);
    va_list args;

    va_start(args, fmt);
    vsnprintf(hlo->text + used, hlo->capacity - used, fmt, args);
    va_end(args);
    idist__text_append(hlo->text, hlo->capacity, "\n");
}

// Writes the type of a buffer.
static void idist__hlo_shape(char *text, size_t capacity, const idist__xla_buffer *buffer) {
    int i;

    snprintf(text, capacity, "tensor<");
    for (i = 0; i < buffer->dim_count; i++)
        idist__text_append(text, capacity, "%lldx", (long long)buffer->dims[i]);
    idist__text_append(text, capacity, "%s>", idist__pjrt_type_of(buffer->dtype)->name);
}

// Appends the attribute that says which replicas take part: all of them, in order.
static void idist__hlo_put_groups(idist__hlo *hlo) {
    int i;

    idist__text_append(hlo->text, hlo->capacity, "      replica_groups = dense<[[");
    for (i = 0; i < hlo->g->size; i++)
        idist__text_append(hlo->text, hlo->capacity, "%s%d", i ? ", " : "", i);
    idist__hlo_put(hlo, "]]> : tensor<1x%dxi64>", hlo->g->size);
}

// Appends the function that reduces two elements.
static void idist__hlo_put_region(idist__hlo *hlo, const char *op, const char *type) {
    idist__hlo_put(hlo, "    ^bb0(%%x: tensor<%s>, %%y: tensor<%s>):", type, type);
    idist__hlo_put(hlo, "      %%z = stablehlo.%s %%x, %%y : tensor<%s>", op, type);
    idist__hlo_put(hlo, "      stablehlo.return %%z : tensor<%s>", type);
}

// Returns XLA's name for an op, or NULL if programs do not support the op.
static const char *idist__hlo_op(idist_op op) {
    switch (op) {
    case IDIST_SUM:
    case IDIST_AVG: return "add";
    case IDIST_PROD: return "multiply";
    case IDIST_MIN: return "minimum";
    case IDIST_MAX: return "maximum";
    case IDIST_BAND: return "and";
    case IDIST_BOR: return "or";
    case IDIST_BXOR: return "xor";
    default: return NULL;
    }
}

// Returns true if a dtype represents the number of ranks exactly, so that an AVG can divide by it.
// Returns false for 8-bit floats.
static bool idist__hlo_can_divide(idist_dtype dtype, int n) {
    switch (dtype) {
    case IDIST_I8: return n <= 127;
    case IDIST_U8: return n <= 255;
    case IDIST_I16: return n <= 32767;
    case IDIST_F16: return n <= 2048;
    case IDIST_BF16: return n <= 256;
    case IDIST_F8E4M3:
    case IDIST_F8E5M2: return false;
    default: return true;
    }
}

// Returns true if a program can perform a call. All members get the same answer.
static bool idist__hlo_supports(const idist_group *g, const idist__call *call) {
    if (!call->count || !idist__pjrt_type_of(call->dtype)) return false;

    switch (call->kind) {
    case IDIST__ALL_REDUCE:
    case IDIST__REDUCE:
    case IDIST__REDUCE_SCATTER:
        if (!idist__hlo_op(call->op)) return false;
        return call->op != IDIST_AVG || idist__hlo_can_divide(call->dtype, g->size);
    case IDIST__BROADCAST:
    case IDIST__ALL_GATHER:
    case IDIST__ALL_TO_ALL: return true;
    default: return false;
    }
}

// Appends an all_reduce or reduce_scatter that reads %flat and defines %done.
static void idist__hlo_put_reduce(idist__hlo *hlo) {
    bool scatters = hlo->call->kind == IDIST__REDUCE_SCATTER, divides = hlo->call->op == IDIST_AVG;
    const char *type = hlo->type->name;
    bool is_float = type[0] == 'f' || type[0] == 'b';

    idist__hlo_put(hlo, "    %%%s = \"stablehlo.%s\"(%%flat) ({", divides ? "sum" : "done",
                   scatters ? "reduce_scatter" : "all_reduce");
    idist__hlo_put_region(hlo, idist__hlo_op(hlo->call->op), type);
    idist__hlo_put(hlo, "    }) {%s", scatters ? "scatter_dimension = 0 : i64," : "");
    idist__hlo_put_groups(hlo);
    idist__hlo_put(hlo, "    } : (%s) -> %s", hlo->flat_in, hlo->flat_out);
    if (!divides) return;
    idist__hlo_put(hlo, "    %%n = stablehlo.constant dense<%d%s> : %s", hlo->g->size,
                   is_float ? ".0" : "", hlo->flat_out);
    idist__hlo_put(hlo, "    %%done = stablehlo.divide %%sum, %%n : %s", hlo->flat_out);
}

// Appends a broadcast that reads %flat and defines %done.
static void idist__hlo_put_broadcast(idist__hlo *hlo) {
    char bits[48];

    snprintf(bits, sizeof bits, "tensor<%zux%s>", hlo->call->count, hlo->type->bits);
    idist__hlo_put(hlo, "    %%id = stablehlo.replica_id : tensor<ui32>");
    idist__hlo_put(hlo, "    %%root = stablehlo.constant dense<%d> : tensor<ui32>",
                   hlo->call->root);
    idist__hlo_put(hlo, "    %%is_root = stablehlo.compare EQ, %%id, %%root : (tensor<ui32>, "
                        "tensor<ui32>) -> tensor<i1>");
    idist__hlo_put(hlo, "    %%own = stablehlo.bitcast_convert %%flat : (%s) -> %s", hlo->flat_in,
                   bits);
    idist__hlo_put(hlo, "    %%zero = stablehlo.constant dense<0> : %s", bits);
    idist__hlo_put(hlo,
                   "    %%part = \"stablehlo.select\"(%%is_root, %%own, %%zero) : "
                   "(tensor<i1>, %s, %s) -> %s",
                   bits, bits, bits);

    idist__hlo_put(hlo, "    %%sum = \"stablehlo.all_reduce\"(%%part) ({");
    idist__hlo_put_region(hlo, "add", hlo->type->bits);
    idist__hlo_put(hlo, "    }) {");
    idist__hlo_put_groups(hlo);
    idist__hlo_put(hlo, "    } : (%s) -> %s", bits, bits);

    idist__hlo_put(hlo, "    %%done = stablehlo.bitcast_convert %%sum : (%s) -> %s", bits,
                   hlo->flat_out);
}

// Appends an all_gather or all_to_all that reads %flat and defines %done. Moves elements as
// unsigned integers, because XLA may move 16-bit and 8-bit floats as F32, which changes the bits of
// a NaN.
static void idist__hlo_put_exchange(idist__hlo *hlo) {
    bool gathers = hlo->call->kind == IDIST__ALL_GATHER;
    size_t n = (size_t)hlo->g->size, count = hlo->call->count;
    char in[48], out[48];

    snprintf(in, sizeof in, "tensor<%zux%s>", gathers ? count : n * count, hlo->type->bits);
    snprintf(out, sizeof out, "tensor<%zux%s>", n * count, hlo->type->bits);
    idist__hlo_put(hlo, "    %%own = stablehlo.bitcast_convert %%flat : (%s) -> %s", hlo->flat_in,
                   in);

    idist__hlo_put(hlo, "    %%all = \"stablehlo.%s\"(%%own) {",
                   gathers ? "all_gather" : "all_to_all");
    if (gathers) idist__hlo_put(hlo, "      all_gather_dim = 0 : i64,");
    else
        idist__hlo_put(hlo,
                       "      split_dimension = 0 : i64, concat_dimension = 0 : i64, "
                       "split_count = %d : i64,",
                       hlo->g->size);
    idist__hlo_put_groups(hlo);
    idist__hlo_put(hlo, "    } : (%s) -> %s", in, out);

    idist__hlo_put(hlo, "    %%done = stablehlo.bitcast_convert %%all : (%s) -> %s", out,
                   hlo->flat_out);
}

// Sets the types of a program. `in` and `out` are the buffers whose shapes the program has.
static void idist__hlo_set_types(idist__hlo *hlo, const idist__xla_buffer *in,
                                 const idist__xla_buffer *out) {
    hlo->type = idist__pjrt_type_of(hlo->call->dtype);
    idist__hlo_shape(hlo->in, sizeof hlo->in, in);
    idist__hlo_shape(hlo->out, sizeof hlo->out, out);
    snprintf(hlo->flat_in, sizeof hlo->flat_in, "tensor<%zux%s>", in->count, hlo->type->name);
    snprintf(hlo->flat_out, sizeof hlo->flat_out, "tensor<%zux%s>", out->count, hlo->type->name);
}

// Writes the program of a call for which idist__hlo_supports returns true. The input is shaped like
// `in`, and the result like `out`. Returns text that the caller frees, or NULL if memory cannot be
// allocated.
static char *idist__hlo_write(const idist_group *g, const idist__call *call,
                              const idist__xla_buffer *in, const idist__xla_buffer *out) {
    idist__hlo hlo;

    hlo.g = g;
    hlo.call = call;
    hlo.capacity = 6000 + 12 * (size_t)g->size;
    hlo.text = (char *)idist__mem_alloc(NULL, hlo.capacity);
    if (!hlo.text) return NULL;
    idist__hlo_set_types(&hlo, in, out);

    // The result may take the memory of the input. idist__xla_worker_execute decides whether it
    // does.
    idist__hlo_put(&hlo, "module @idist {");
    idist__hlo_put(&hlo, "  func.func public @main(%%in: %s%s) -> %s {", hlo.in,
                   strcmp(hlo.in, hlo.out) == 0 ? " {tf.aliasing_output = 0 : i32}" : "", hlo.out);
    idist__hlo_put(&hlo, "    %%flat = stablehlo.reshape %%in : (%s) -> %s", hlo.in, hlo.flat_in);

    if (call->kind == IDIST__BROADCAST) idist__hlo_put_broadcast(&hlo);
    else if (idist__kind_reduces(call->kind)) idist__hlo_put_reduce(&hlo);
    else idist__hlo_put_exchange(&hlo);

    idist__hlo_put(&hlo, "    %%out = stablehlo.reshape %%done : (%s) -> %s", hlo.flat_out,
                   hlo.out);
    idist__hlo_put(&hlo, "    return %%out : %s", hlo.out);
    idist__hlo_put(&hlo, "  }\n}");

    return hlo.text;
}

// ---- xla/xla_home.h ------------------------------------------------------------------------------

// xla/xla_home.h: the plug-in and its client, shared by the worlds of a process

// Creates the client. A plug-in for CPUs creates IDIST_XLA_CPU_DEVICES devices; other plug-ins have
// no such option. Returns false with the reason in `why`.
static bool idist__xla_home_create(idist__xla_home *home, char *why, size_t capacity) {
    static const char name[] = "cpu_device_count";
    const char *text = idist__os_env("IDIST_XLA_CPU_DEVICES");
    idist__pjrt_named_value option;
    idist__pjrt_client_create args;
    int64_t count = 0;

    idist__pjrt_init(&option, sizeof option);
    idist__pjrt_init(&args, sizeof args);

    if (text && !idist__parse_int(text, 1, 1024, &count)) {
        snprintf(why, capacity, "IDIST_XLA_CPU_DEVICES=%.40s: use a number from 1 to 1024", text);
        return false;
    }

    option.name = name;
    option.name_nbytes = sizeof name - 1;
    option.type = IDIST__PJRT_INT64;
    option.value = count;
    option.value_count = 1;
    args.options = &option;
    args.option_count = text ? 1 : 0;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_CLIENT_CREATE, &args, why, capacity)) return false;
    home->client = args.client;

    return true;
}

// Asks the client for its devices. Returns false with the reason in `why`.
static bool idist__xla_home_describe(idist__xla_home *home, char *why, size_t capacity) {
    idist__pjrt_devices args;

    idist__pjrt_init(&args, sizeof args);
    args.client = home->client;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_DEVICES, &args, why, capacity)) return false;
    home->devices = args.devices;
    home->ndevices = (int)args.count;
    home->process_index =
        idist__pjrt_ask_number(home->api, IDIST__PJRT_PROCESS_INDEX, home->client, why, capacity);
    idist__pjrt_ask_text(home->api, IDIST__PJRT_PLATFORM_NAME, home->client, home->platform,
                         sizeof home->platform);
    idist__pjrt_ask_text(home->api, IDIST__PJRT_PLATFORM_VERSION, home->client, home->version,
                         sizeof home->version);
    if (home->ndevices < 1) snprintf(why, capacity, "the client has no device");

    return home->ndevices >= 1 && home->process_index >= 0;
}

// Sets the plug-in's table, which idist_xla_api reads without a lock.
static void idist__xla_home_set_api(idist__xla_home *home, const idist__pjrt_api *api) {
    __atomic_store_n(&home->api, api, __ATOMIC_RELEASE);
}

// Closes the client, or forgets it if it is the program's. Called with home->slow held. A plug-in
// that idist loaded stays loaded for the next client.
static void idist__xla_home_close(idist__xla_home *home) {
    if (!home->adopted) idist__pjrt_destroy(home->api, IDIST__PJRT_CLIENT_DESTROY, home->client);
    else idist__xla_home_set_api(home, home->loaded);
    home->client = NULL;
}

// Opens a client, or uses the program's. Called with home->slow held.
static bool idist__xla_home_open(idist__xla_home *home, const idist__config *cfg, char *why,
                                 size_t capacity) {
    bool ok;

    if (!cfg->xla_api && !home->loaded) home->loaded = idist__pjrt_load(why, capacity);
    idist__xla_home_set_api(home,
                            cfg->xla_api ? (const idist__pjrt_api *)cfg->xla_api : home->loaded);
    if (!home->api) return false;
    home->adopted = cfg->xla_client != NULL;
    home->client = cfg->xla_client;
    if (!home->client && !idist__xla_home_create(home, why, capacity)) return false;

    ok = idist__xla_home_describe(home, why, capacity);
    if (!ok) idist__xla_home_close(home);

    return ok;
}

// Returns true unless the client belongs to a process from which this one was forked.
static bool idist__xla_home_is_own(const idist__xla_home *home) {
    uint32_t process = __atomic_load_n(&home->process, __ATOMIC_RELAXED);
    return !process || process == idist__world_process();
}

// Counts one more user of the client, and opens the client for the first user. Returns false with
// the reason in `why`.
static bool idist__xla_home_enter(idist__xla_home *home, const idist__config *cfg, char *why,
                                  size_t capacity) {
    bool ok = true;

    snprintf(why, capacity,
             "this process was forked from one that uses XLA; use start_method \"exec\"");
    if (!idist__xla_home_is_own(home)) return false;
    snprintf(why, capacity, "desc.xla_client must be the same in each world of a process");
    idist__os_mutex_lock(&home->slow);
    if (!home->client) ok = idist__xla_home_open(home, cfg, why, capacity);
    else if (cfg->xla_client && cfg->xla_client != home->client) ok = false;

    if (ok) {
        idist__os_mutex_lock(&home->lock);
        home->users++;
        __atomic_store_n(&home->process, idist__world_process(), __ATOMIC_RELAXED);
        idist__os_mutex_unlock(&home->lock);
    }

    idist__os_mutex_unlock(&home->slow);

    return ok;
}

// Destroys a list of programs.
static void idist__xla_home_free_programs(idist__xla_home *home, idist__xla_program *program) {
    while (program) {
        idist__xla_program *next = program->next;

        idist__pjrt_destroy(home->api, IDIST__PJRT_PROGRAM_DESTROY, program->loaded);
        idist__mem_free(NULL, program->source.text);
        idist__mem_free(NULL, program->source.options);
        idist__mem_free(NULL, program);
        program = next;
    }
}

// Counts one user less. The last one destroys the client, unless the program owns it. Only
// destroying the client can block. A thread that holds a world's lock never destroys the client,
// because the world is itself a user.
static void idist__xla_home_leave(idist__xla_home *home) {
    bool last;

    idist__os_mutex_lock(&home->lock);
    last = --home->users == 0;
    idist__os_mutex_unlock(&home->lock);
    if (!last) return;

    idist__os_mutex_lock(&home->slow);
    idist__os_mutex_lock(&home->lock);
    last = home->users == 0 && home->client; // no other thread has entered, or left, meanwhile
    idist__os_mutex_unlock(&home->lock);

    if (last) {
        idist__xla_home_free_programs(home, home->programs);
        home->programs = NULL;
        idist__xla_home_close(home);
        __atomic_store_n(&home->process, 0u, __ATOMIC_RELAXED);
    }

    idist__os_mutex_unlock(&home->slow);
}

// ---- xla/xla_value.h -----------------------------------------------------------------------------

// xla/xla_value.h: contents of buffers, and copies between host and device
//
// A PJRT_Buffer never changes: whoever writes to a buffer creates a new value. A thread that still
// reads the old value is one of its users.

// Wraps a PJRT_Buffer, and takes ownership of it. Returns NULL if memory cannot be allocated; the
// caller keeps the PJRT_Buffer then.
static idist__xla_value *idist__xla_value_new(void *pjrt) {
    idist__xla_value *value = (idist__xla_value *)idist__mem_alloc(NULL, sizeof *value);

    if (!value) return NULL;
    value->pjrt = pjrt;
    value->users = 1;

    return value;
}

// Counts one more user of a buffer's value, so that the value stays. The caller drops the value.
static idist__xla_value *idist__xla_value_take(idist__xla_home *home, idist__xla_buffer *buffer) {
    idist__xla_value *value;

    idist__os_mutex_lock(&home->lock);
    value = buffer->value;
    value->users++;
    idist__os_mutex_unlock(&home->lock);

    return value;
}

// Returns true if only the buffer and the caller use a value.
static bool idist__xla_value_is_alone(idist__xla_home *home, const idist__xla_value *value) {
    bool alone;

    idist__os_mutex_lock(&home->lock);
    alone = value->users == 2;
    idist__os_mutex_unlock(&home->lock);

    return alone;
}

// Counts one user less. The last one destroys the PJRT_Buffer.
static void idist__xla_value_drop(idist__xla_home *home, idist__xla_value *value) {
    bool last;

    idist__os_mutex_lock(&home->lock);
    last = --value->users == 0;
    idist__os_mutex_unlock(&home->lock);
    if (!last) return;
    idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, value->pjrt);
    idist__mem_free(NULL, value);
}

// Gives a buffer new contents. Takes ownership of the PJRT_Buffer. Returns false if memory cannot
// be allocated; then the PJRT_Buffer is destroyed and the buffer keeps its old contents.
static bool idist__xla_value_replace(idist__xla_home *home, idist__xla_buffer *buffer, void *pjrt) {
    idist__xla_value *value = idist__xla_value_new(pjrt), *old;

    if (!value) {
        idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, pjrt);
        return false;
    }

    idist__os_mutex_lock(&home->lock);
    old = buffer->value;
    buffer->value = value;
    idist__os_mutex_unlock(&home->lock);
    idist__xla_value_drop(home, old);

    return true;
}

// Copies host memory to the device of a buffer, and returns a PJRT_Buffer of its shape, or NULL
// with the reason in `why`. Blocks until the plug-in has read the memory.
static void *idist__xla_value_put(const idist__xla_home *home, const idist__xla_buffer *shape,
                                  const void *data, char *why, size_t capacity) {
    idist__pjrt_put args;

    idist__pjrt_init(&args, sizeof args);
    args.client = home->client;
    args.data = data;
    args.type = shape->type;
    args.dims = shape->dims;
    args.dim_count = (size_t)shape->dim_count;
    args.semantics = IDIST__PJRT_UNTIL_TRANSFERRED;
    args.device = shape->device;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_PUT, &args, why, capacity)) return NULL;
    if (idist__pjrt_await(home->api, args.done, why, capacity)) return args.buffer;
    idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, args.buffer);

    return NULL;
}

// Copies a value to host memory, in row-major order whatever its layout on the device is. Blocks
// until the value has been computed and copied. Returns false with the reason in `why`.
static bool idist__xla_value_get(const idist__xla_home *home, const idist__xla_buffer *shape,
                                 const idist__xla_value *value, void *data, char *why,
                                 size_t capacity) {
    idist__pjrt_tiled_layout layout;
    int64_t minor_to_major[IDIST__PJRT_DIMS];
    idist__pjrt_get args;
    int i;

    for (i = 0; i < shape->dim_count; i++) minor_to_major[i] = shape->dim_count - 1 - i;
    idist__pjrt_init(&layout, sizeof layout);
    idist__pjrt_init(&layout.tiled, sizeof layout.tiled);
    layout.tiled.minor_to_major = minor_to_major;
    layout.tiled.minor_to_major_count = (size_t)shape->dim_count;
    layout.type = IDIST__PJRT_TILED;

    idist__pjrt_init(&args, sizeof args);
    args.buffer = value->pjrt;
    args.layout = shape->dim_count > 1 ? &layout : NULL;
    args.data = data;
    args.data_nbytes = shape->nbytes;
    if (!idist__pjrt_call(home->api, IDIST__PJRT_GET, &args, why, capacity)) return false;

    return idist__pjrt_await(home->api, args.done, why, capacity);
}

// Waits until a value has been computed, or the deadline. Returns false on a failure of the device,
// with the reason in `why`, or at the deadline, with *late set.
static bool idist__xla_value_wait(const idist__xla_home *home, const idist__xla_value *value,
                                  int64_t deadline_ns, bool *late, char *why, size_t capacity) {
    void *event = idist__pjrt_ask(home->api, IDIST__PJRT_BUFFER_READY, value->pjrt, why, capacity);
    idist__pjrt_flag args;
    int turns = 0;

    *late = false;
    if (!event) return false;

    for (;;) {
        idist__pjrt_init(&args, sizeof args);
        args.object = event;
        if (!idist__pjrt_call(home->api, IDIST__PJRT_EVENT_IS_READY, &args, why, capacity) ||
            args.out)
            break;
        *late = idist__os_clock_now_ns() > deadline_ns;
        if (*late) break;
        if (++turns <= 50) idist__os_thread_yield();
        else idist__os_clock_pause_ns(turns <= 100 ? 50000 : 1000000);
    }

    if (!*late) return idist__pjrt_await(home->api, event, why, capacity);
    idist__pjrt_destroy(home->api, IDIST__PJRT_EVENT_DESTROY, event);

    return false;
}

// ---- xla/xla_buffer.h ----------------------------------------------------------------------------

// xla/xla_buffer.h: handles of device memory, and their addresses

// Returns true if a pointer is in the range of addresses for buffers. Takes no lock, because the
// range never moves. For a call on host memory, this check is the only cost of XLA.
static bool idist__xla_buffer_is(const void *p) {
    const char *arena = __atomic_load_n(&idist__xla_home_one.arena, __ATOMIC_ACQUIRE);

    return arena && (uintptr_t)p - (uintptr_t)arena < idist__xla_home_one.arena_nbytes;
}

// Returns the index in home->buffers of the first buffer that ends above an address. Called with
// home->lock held.
static size_t idist__xla_buffer_search(const idist__xla_home *home, const char *p) {
    size_t low = 0, high = home->buffer_count;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (home->buffers[middle]->at + home->buffers[middle]->nbytes > p) high = middle;
        else low = middle + 1;
    }

    return low;
}

// Returns the buffer that has an address and counts one more user of it, or NULL if no buffer has
// the address.
static idist__xla_buffer *idist__xla_buffer_take(idist__xla_home *home, const void *p) {
    const char *at = (const char *)p;
    idist__xla_buffer *buffer = NULL;
    size_t place;

    if (!idist__xla_buffer_is(p)) return NULL;
    idist__os_mutex_lock(&home->lock);
    place = idist__xla_buffer_search(home, at);
    if (place < home->buffer_count && home->buffers[place]->at <= at &&
        !home->buffers[place]->freed)
        buffer = home->buffers[place];
    if (buffer) buffer->users++;
    idist__os_mutex_unlock(&home->lock);

    return buffer;
}

// Counts one user less. The last user releases the addresses and the contents.
static void idist__xla_buffer_drop(idist__xla_home *home, idist__xla_buffer *buffer) {
    idist__xla_buffer **at;
    bool last;
    size_t place;

    if (!buffer) return;
    idist__os_mutex_lock(&home->lock);
    last = --buffer->users == 0;

    if (last) {
        place = idist__xla_buffer_search(home, buffer->at);
        at = &home->buffers[place];
        home->buffer_count--;
        memmove(at, at + 1, (home->buffer_count - place) * sizeof *at);
    }

    idist__os_mutex_unlock(&home->lock);
    if (!last) return;
    idist__xla_value_drop(home, buffer->value);
    idist__mem_free(NULL, buffer);
    idist__xla_home_leave(home);
}

// Reserves the range of addresses. Halves the size until the limit of the process allows the range.
// Called with home->lock held.
static bool idist__xla_buffer_reserve(idist__xla_home *home) {
    int bits = IDIST__XLA_ARENA_BITS < sizeof(size_t) * 8 ? IDIST__XLA_ARENA_BITS : 30;
    char *arena = NULL;

    if (home->arena) return true;
    for (; bits >= 24 && !arena; bits--) arena = idist__os_memory_addresses((size_t)1 << bits);
    if (!arena) return false;
    home->arena_nbytes = (size_t)1 << (bits + 1);
    __atomic_store_n(&home->arena, arena, __ATOMIC_RELEASE);

    return true;
}

// Grows home->buffers if needed, so that one more entry fits. Called with home->lock held.
static bool idist__xla_buffer_grow(idist__xla_home *home) {
    size_t capacity = home->buffer_capacity ? 2 * home->buffer_capacity : 64;
    idist__xla_buffer **buffers;

    if (home->buffer_count < home->buffer_capacity) return true;
    buffers = (idist__xla_buffer **)idist__mem_alloc(NULL, capacity * sizeof(void *));
    if (!buffers) return false;
    if (home->buffer_count) memcpy(buffers, home->buffers, home->buffer_count * sizeof(void *));
    idist__mem_free(NULL, home->buffers);
    home->buffers = buffers;
    home->buffer_capacity = capacity;

    return true;
}

// Finds addresses for a buffer, after the last buffer or in the first gap, and adds the buffer to
// home->buffers. At least one page stays free between two buffers. Called with home->lock held.
static bool idist__xla_buffer_place(idist__xla_home *home, idist__xla_buffer *buffer) {
    size_t page = idist__os_memory_page_nbytes(), at = 0, end, place = home->buffer_count;
    size_t wanted = (buffer->nbytes + 2 * page - 1) & ~(page - 1);
    const idist__xla_buffer *last = place ? home->buffers[place - 1] : NULL;

    if (wanted < buffer->nbytes || wanted > home->arena_nbytes) return false;
    if (last) at = ((size_t)(last->at - home->arena) + last->nbytes + 2 * page - 1) & ~(page - 1);

    if (at > home->arena_nbytes - wanted) { // the first gap that is large enough
        for (at = 0, place = 0; place < home->buffer_count; place++) {
            if ((size_t)(home->buffers[place]->at - home->arena) >= at + wanted) break;
            end = (size_t)(home->buffers[place]->at - home->arena) + home->buffers[place]->nbytes;
            at = (end + 2 * page - 1) & ~(page - 1);
        }

        if (at > home->arena_nbytes - wanted) return false;
    }

    buffer->at = home->arena + at;
    memmove(&home->buffers[place + 1], &home->buffers[place],
            (home->buffer_count - place) * sizeof(void *));
    home->buffers[place] = buffer;
    home->buffer_count++;

    return true;
}

// Gives a buffer its addresses, and counts the buffer as a user of the client. The buffer owns its
// value. Returns false, and changes nothing, if memory or addresses run out.
static bool idist__xla_buffer_enter(idist__xla_home *home, idist__xla_buffer *buffer) {
    bool ok;

    idist__os_mutex_lock(&home->lock);
    ok = idist__xla_buffer_reserve(home) && idist__xla_buffer_grow(home) &&
         idist__xla_buffer_place(home, buffer);
    if (ok) home->users++;
    idist__os_mutex_unlock(&home->lock);

    return ok;
}

// ---- xla/xla_program.h ---------------------------------------------------------------------------

// xla/xla_program.h: programs, compiled once per process
//
// A compiled program is found by its text and its compile options, which name the devices of the
// group. Ranks that are threads of one process share it. A program that the plug-in refuses is kept
// as well, so that the plug-in is asked once.

// Finds a program and makes it the most recently used one. Called with home->lock held.
static idist__xla_program *idist__xla_program_search(idist__xla_home *home,
                                                     const idist__xla_source *source) {
    idist__xla_program **at, *program;

    for (at = &home->programs; (program = *at) != NULL; at = &program->next)
        if (program->source.options_nbytes == source->options_nbytes &&
            !strcmp(program->source.text, source->text) &&
            !memcmp(program->source.options, source->options, source->options_nbytes))
            break;
    if (!program) return NULL;

    *at = program->next;
    program->next = home->programs;
    home->programs = program;

    return program;
}

// Finds a program and counts one more user. Returns NULL if it was not compiled yet.
static idist__xla_program *idist__xla_program_find(idist__xla_home *home,
                                                   const idist__xla_source *source) {
    idist__xla_program *program;

    idist__os_mutex_lock(&home->lock);
    program = idist__xla_program_search(home, source);
    if (program) program->users++;
    idist__os_mutex_unlock(&home->lock);

    return program;
}

// Counts one user less. Accepts NULL.
static void idist__xla_program_drop(idist__xla_home *home, idist__xla_program *program) {
    if (!program) return;
    idist__os_mutex_lock(&home->lock);
    program->users--;
    idist__os_mutex_unlock(&home->lock);
}

// Removes the least recently used programs from the list if the list is longer than
// IDIST__XLA_PROGRAMS. Called with home->lock held. Returns a list for
// idist__xla_home_free_programs.
static idist__xla_program *idist__xla_program_evict(idist__xla_home *home) {
    idist__xla_program **at = &home->programs, *out = NULL, *program;
    int kept = 0;

    while ((program = *at) != NULL) {
        if (++kept <= IDIST__XLA_PROGRAMS || program->users) {
            at = &program->next;
            continue;
        }

        *at = program->next;
        program->next = out;
        out = program;
    }

    return out;
}

// Lets the plug-in compile a program. On failure program->loaded stays NULL and `why` has the
// reason. Takes milliseconds on a CPU, and seconds on a TPU.
static void idist__xla_program_load(const idist__xla_home *home, idist__xla_program *program,
                                    char *why, size_t capacity) {
    static const char format[] = "mlir";
    idist__pjrt_program code;
    idist__pjrt_compile args;

    idist__pjrt_init(&code, sizeof code);
    code.code = program->source.text;
    code.code_nbytes = strlen(program->source.text);
    code.format = format;
    code.format_nbytes = sizeof format - 1;
    idist__pjrt_init(&args, sizeof args);
    args.client = home->client;
    args.program = &code;
    args.options = program->source.options;
    args.options_nbytes = program->source.options_nbytes;
    if (idist__pjrt_call(home->api, IDIST__PJRT_COMPILE, &args, why, capacity))
        program->loaded = args.loaded;
}

// Compiles a program, unless another thread has just compiled an equal program. A new program takes
// ownership of the source and clears *source. Counts one more user. Returns NULL if memory cannot
// be allocated. If the plug-in refuses the program, `why` has the reason; otherwise `why` is "".
static idist__xla_program *idist__xla_program_make(idist__xla_home *home, idist__xla_source *source,
                                                   char *why, size_t capacity) {
    idist__xla_program *program, *old = NULL;

    why[0] = 0;
    idist__os_mutex_lock(&home->slow); // so that ranks that are threads compile a program once
    program = idist__xla_program_find(home, source);

    if (!program && (program = (idist__xla_program *)idist__mem_alloc(NULL, sizeof *program))) {
        program->source = *source;
        memset(source, 0, sizeof *source);
        program->hash = idist__hash(program->source.text, strlen(program->source.text));
        program->hash |= 1; // 0 says that a rank has no program
        program->users = 1;
        idist__xla_program_load(home, program, why, capacity);
        idist__os_mutex_lock(&home->lock);
        program->next = home->programs;
        home->programs = program;
        old = idist__xla_program_evict(home);
        idist__os_mutex_unlock(&home->lock);
    }

    idist__os_mutex_unlock(&home->slow);
    idist__xla_home_free_programs(home, old);

    return program;
}

// ---- xla/xla_worker.h ----------------------------------------------------------------------------

// xla/xla_worker.h: the thread that waits for the device
//
// The worker of a world takes one job after another. Jobs in x->jobs come first: they compile and
// copy, and need no other rank. Programs in x->ordered come next. All ranks must launch their
// programs in one order, because otherwise two devices could wait for each other. A program runs
// when its ticket is final and no smaller ticket is in the list, final or not. (Skeen's total order
// multicast: the members propose tickets, and the largest proposal becomes the ticket.)
//
// A proposal is made when all members have started the call. From then on, the ticket becomes final
// without any action by the user's program, so a proposal does not delay other calls for long.

// Frees a job and what the job holds.
static void idist__xla_worker_free(idist__xla *x, idist__xla_job *job) {
    const idist_allocator *mem = &x->w->cfg.mem;

    idist__xla_program_drop(x->home, job->program);
    idist__xla_buffer_drop(x->home, job->send);
    idist__xla_buffer_drop(x->home, job->recv);
    idist__pjrt_destroy(x->home->api, IDIST__PJRT_BUFFER_DESTROY, job->output);
    if (job->recv_copy != job->send_copy) idist__mem_free(mem, job->recv_copy);
    idist__mem_free(mem, job->send_copy);
    idist__mem_free(mem, job->ranges);
    idist__mem_free(NULL, job->source.text);
    idist__mem_free(NULL, job->source.options);
    idist__mem_free(mem, job);
}

// Hands the worker a job that compiles or copies.
static void idist__xla_worker_add(idist__xla *x, idist__xla_job *job, idist__xla_work work) {
    job->work = work;
    job->next = NULL;
    *x->jobs_end = job;
    x->jobs_end = &job->next;
    idist__os_cond_signal(&x->work);
}

// Inserts a job into x->ordered, sorted by ticket.
static void idist__xla_worker_order(idist__xla *x, idist__xla_job *job) {
    idist__xla_job **at = &x->ordered;

    while (*at && (*at)->ticket < job->ticket) at = &(*at)->next;
    job->work = IDIST__XLA_EXECUTE;
    job->next = *at;
    *at = job;
    idist__os_cond_signal(&x->work);
}

// Removes a job from its list. Does nothing if the job is in no list.
static void idist__xla_worker_remove(idist__xla *x, idist__xla_job *job) {
    idist__xla_job **at;

    for (at = &x->ordered; *at && *at != job; at = &(*at)->next) continue;

    if (*at) {
        *at = job->next;
        idist__os_cond_signal(&x->work); // the next one may be final
        return;
    }

    for (at = &x->jobs; *at && *at != job; at = &(*at)->next) continue;
    if (*at && (*at = job->next) == NULL) x->jobs_end = at;
}

// Detaches a job from its call. Frees the job, unless the worker is using it; then the worker frees
// the job.
static void idist__xla_worker_release(idist__xla *x, idist__xla_job *job) {
    idist__xla_worker_remove(x, job);
    job->task = NULL;
    if (!job->running) idist__xla_worker_free(x, job);
}

// If the members have agreed on the place of a job's program, detaches the job from its call, but
// leaves the program in x->ordered: the devices of the other members wait for it, without a
// deadline. The worker runs the program and drops the result. Otherwise changes nothing and returns
// false.
static bool idist__xla_worker_orphan(const idist__xla *x, idist__xla_job *job) {
    const idist__xla_job *ordered = x->ordered;

    while (ordered && ordered != job) ordered = ordered->next;
    if (!ordered || !job->placed) return false;
    job->task = NULL;

    return true;
}

// Copies the contents of a buffer to host memory.
static bool idist__xla_worker_get(idist__xla *x, idist__xla_buffer *buffer, char *data,
                                  idist__xla_job *job) {
    idist__xla_value *value = idist__xla_value_take(x->home, buffer);
    bool ok = idist__xla_value_get(x->home, buffer, value, data, job->why, sizeof job->why);

    idist__xla_value_drop(x->home, value);
    return ok;
}

// Copies the buffers of a staged call to host memory.
static bool idist__xla_worker_fetch(idist__xla *x, idist__xla_job *job) {
    if (job->send_copy && !idist__xla_worker_get(x, job->send, job->send_copy, job)) return false;
    if (!job->fetches_recv) return true;
    return idist__xla_worker_get(x, job->recv, job->recv_copy, job);
}

// Copies the parts that a staged call has written into `whole`, which holds the buffer's contents.
// A bool must be 0 or 1 on the device, so any other byte becomes 1.
static void idist__xla_worker_merge(const idist__xla_job *job, char *whole) {
    bool is_bool = job->recv->type == IDIST__PJRT_BOOL;
    size_t k;
    int i;

    for (i = 0; i < job->range_count; i++) {
        const idist__xla_range *range = &job->ranges[i];

        if (whole != job->recv_copy)
            memcpy(whole + range->at, job->recv_copy + range->at, range->nbytes);
        for (k = 0; k < range->nbytes && is_bool; k++)
            whole[range->at + k] = whole[range->at + k] != 0;
    }
}

// Copies to the device what a staged call has written. Other calls may have changed other parts of
// the buffer meanwhile, so the rest of the buffer is fetched now.
static bool idist__xla_worker_store(idist__xla *x, idist__xla_job *job) {
    bool is_whole = job->range_count == 1 && job->ranges[0].nbytes == job->recv->nbytes;
    char *whole = is_whole ? job->recv_copy : (char *)idist__mem_raw(NULL, job->recv->nbytes);

    job->lacks_memory = !whole;

    if (whole && (is_whole || idist__xla_worker_get(x, job->recv, whole, job))) {
        idist__xla_worker_merge(job, whole);
        job->output = idist__xla_value_put(x->home, job->recv, whole, job->why, sizeof job->why);
    }

    if (!is_whole) idist__mem_free(NULL, whole);

    return job->output != NULL;
}

// Runs the program of a call on this rank's device, and waits for the result. The result takes the
// memory of the input only if the call is in place and nobody else reads the input. This is decided
// here, because the program's text must be the same on all ranks.
static bool idist__xla_worker_execute(idist__xla *x, idist__xla_job *job) {
    idist__xla_buffer *in = job->send ? job->send : job->recv;
    idist__xla_value *value = idist__xla_value_take(x->home, in);
    static const int64_t first = 0;
    idist__pjrt_execute_options options;
    idist__pjrt_execute args;
    void *inputs[1], *outputs[1], *done[1] = {NULL};
    void *const *input_lists[1];
    void **output_lists[1];
    bool ok;

    inputs[0] = value->pjrt;
    input_lists[0] = inputs;
    outputs[0] = NULL;
    output_lists[0] = outputs;
    idist__pjrt_init(&options, sizeof options);
    options.launch_id = (int)((x->launch_base + job->ticket) & 0x7fffffff);
    options.not_donated = &first;
    job->donated = job->in_place && idist__xla_value_is_alone(x->home, value);
    options.not_donated_count = job->donated ? 0 : 1;
    idist__pjrt_init(&args, sizeof args);
    args.loaded = job->program->loaded;
    args.options = &options;
    args.inputs = input_lists;
    args.device_count = 1;
    args.input_count = 1;
    args.outputs = output_lists;
    args.done = done;
    args.device = x->device;

    ok = idist__pjrt_call(x->home->api, IDIST__PJRT_EXECUTE, &args, job->why, sizeof job->why);
    if (ok) job->output = outputs[0];
    if (ok) ok = idist__pjrt_await(x->home->api, done[0], job->why, sizeof job->why);
    idist__xla_value_drop(x->home, value);

    return ok;
}

// Does the work of a job, without the world's lock.
static bool idist__xla_worker_perform(idist__xla *x, idist__xla_job *job) {
    switch (job->work) {
    case IDIST__XLA_COMPILE:
        job->program = idist__xla_program_make(x->home, &job->source, job->why, sizeof job->why);
        job->lacks_memory = !job->program;
        return job->program != NULL;
    case IDIST__XLA_FETCH: return idist__xla_worker_fetch(x, job);
    case IDIST__XLA_STORE: return idist__xla_worker_store(x, job);
    default: return idist__xla_worker_execute(x, job);
    }
}

// Returns the next job, taken out of its list, or NULL if the worker has to wait.
static idist__xla_job *idist__xla_worker_next(idist__xla *x) {
    idist__xla_job *job = x->jobs;

    if (job) {
        x->jobs = job->next;
        if (!x->jobs) x->jobs_end = &x->jobs;
        return job;
    }

    job = x->ordered;
    if (!job || !job->placed) return NULL;
    x->ordered = job->next;

    return job;
}

// ---- xla/xla_call.h ------------------------------------------------------------------------------

// xla/xla_call.h: the steps of a call on device memory
//
//     idist__xla_call_step    the next step of the call at the head of a lane
//     idist__xla_call_landed  the host's backend has done its part of a call
//     idist__xla_call_worked  the worker has done its part of a call

// Fails the group because this rank's device has failed.
static void idist__xla_call_fail(idist__task *t, const char *why) {
    char cause[IDIST__XLA_REASON + 100];

    snprintf(cause, sizeof cause, "rank %d: the device: %s", t->group->w->group.rank, why);
    idist__group_fail(t->group, IDIST_ERR_DEVICE, cause);
}

// Takes a call out of its lane.
static void idist__xla_call_dequeue(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_group *group = idist__xla_group_of(t->group);
    idist__task **at;

    if (op->lane == IDIST__XLA_NO_LANE) return;

    for (at = &group->queue[op->lane]; *at; at = &idist__xla_op_of(*at)->next_queued) {
        if (*at != t) continue;
        if ((*at = op->next_queued) == NULL) group->queue_end[op->lane] = at;
        idist__xla_of(t->group->w)->queue_changed = true; // the next calls may go on
        return;
    }
}

// Ends the device's part of a call. A program on whose place the members have agreed still runs,
// unless a member is lost or its device has failed.
static void idist__xla_call_end(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla *x = idist__xla_of(t->group->w);
    idist_status status = t->group->status;
    bool may_run = status != IDIST_ERR_PEER_LOST && status != IDIST_ERR_DEVICE;

    idist__xla_call_dequeue(t);
    if (op->job && !(may_run && idist__xla_worker_orphan(x, op->job)))
        idist__xla_worker_release(x, op->job);
    op->job = NULL;
    op->state = IDIST__XLA_ENDED;
}

// Completes a call whose result is in place.
static void idist__xla_call_complete(idist__task *t) {
    idist__xla_call_end(t);
    idist__task_complete(t, IDIST_OK, "");
}

// Gives the host's backend a part of a call. The first part carries the fingerprint of the call,
// which the ranks compare. The part may have ended already on return.
static void idist__xla_call_start_part(idist__task *t, const idist__call *part) {
    idist__xla_op *op = idist__xla_op_of(t);
    const idist_backend_api *host = idist__xla_of(t->group->w)->host_backend;

    t->call = *part;
    t->call.label = op->call.label;
    t->state = IDIST__TASK_ON_HOST;
    t->late.announced = false;
    t->group->w->wait.timers_due_ns = 0; // the timers look at the task again

    if (!idist__kind_is_p2p(part->kind)) {
        t->seq = ++t->group->seq;

        if (t->on_device && !t->whole.kind) {
            t->whole = op->fingerprint;
            t->whole.seq = t->seq;
        }
    }

    memset(t->impl, 0, host->task_nbytes); // to the host's backend the part is a new task
    host->start(t);
}

// Starts an all_reduce that replaces each number with the largest among the members.
static void idist__xla_call_start_max(idist__task *t, uint64_t *numbers, size_t count) {
    idist__call part;

    idist__call_init(&part, IDIST__ALL_REDUCE, numbers, numbers, count, IDIST_U64);
    part.op = IDIST_MAX;
    idist__xla_call_start_part(t, &part);
}

// ---- a call as a program ----

// Returns true if the `count` elements at `p` are exactly a whole buffer of this dtype, or if count
// is 0. Returns false for a buffer of bools, because idist's programs do not have that type.
static bool idist__xla_call_fits(const idist__xla_buffer *buffer, const void *p, size_t count,
                                 idist_dtype dtype) {
    if (!count) return true;
    return buffer && buffer->at == (const char *)p && buffer->count == count &&
           buffer->type == idist__pjrt_type_of(dtype)->number;
}

// Returns true if this rank can perform a call by a program. Other ranks may differ: see
// idist__xla_call_meet.
static bool idist__xla_call_has_program(const idist__task *t) {
    const idist__xla_op *op = idist__xla_op_of(t);
    const idist__call *call = &op->call;
    idist__extent e;

    if (idist__extent_of(t->group, call, &e) != IDIST_OK) return false;
    return idist__xla_call_fits(op->job->send, call->send, e.send, call->dtype) &&
           idist__xla_call_fits(op->job->recv, call->recv, e.recv, call->dtype);
}

// Writes the source of a call's program. Returns false if memory cannot be allocated.
static bool idist__xla_call_write_source(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;
    const idist__xla_group *group = idist__xla_group_of(t->group);
    const idist__xla_buffer *in = job->send ? job->send : job->recv;
    const idist__xla_buffer *out = job->recv ? job->recv : job->send;

    job->source.text = idist__hlo_write(t->group, &op->call, in, out);
    job->source.options = (char *)idist__mem_alloc(NULL, group->options_nbytes);
    if (!job->source.text || !job->source.options) return false;
    memcpy(job->source.options, group->options, group->options_nbytes);
    job->source.options_nbytes = group->options_nbytes;

    return true;
}

// Finds the program of a call, or lets the worker compile it. Returns false if the call waits for
// the worker, or has failed.
static bool idist__xla_call_find_program(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;

    op->state = IDIST__XLA_COMPILED;
    if (!idist__xla_call_has_program(t)) return true; // votes with 0

    if (!idist__xla_call_write_source(t)) {
        idist__group_fail_memory(t->group);
        return false;
    }

    job->program = idist__xla_program_find(x->home, &job->source);
    if (job->program) return true;
    op->state = IDIST__XLA_COMPILING;
    idist__xla_worker_add(x, job, IDIST__XLA_COMPILE);

    return false;
}

// Starts the meeting, in which the members compare their programs. A rank whose buffers do not fit,
// or whose plug-in refuses the program, votes with 0. All members run the program if the largest
// vote equals the smallest vote, which is the complement of the largest complement.
static void idist__xla_call_meet(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    const idist__xla_program *program = op->job->program;

    op->state = IDIST__XLA_MEETING;
    op->votes[0] = program && program->loaded ? program->hash : 0;
    op->votes[1] = ~op->votes[0];
    idist__xla_call_start_max(t, op->votes, 2);
}

// Returns true if all members have the same program.
static bool idist__xla_call_is_unanimous(const idist__xla_op *op) {
    return op->votes[0] && op->votes[0] == ~op->votes[1];
}

// Proposes a place for the call among the programs that this rank runs. Two proposals are never
// equal, because a proposal modulo world_size is the rank that made it.
static void idist__xla_call_order(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    uint64_t n = (uint64_t)x->w->group.size;

    idist__xla_call_dequeue(t); // this is the last part for the host's backend
    op->state = IDIST__XLA_ORDERING;
    op->ticket = op->job->ticket = ++x->clock * n + (uint64_t)x->w->group.rank;
    idist__xla_worker_order(x, op->job);
    idist__xla_call_start_max(t, &op->ticket, 1);
}

// Records the place that the members agreed on, and lists the program under the final ticket.
static void idist__xla_call_place(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    uint64_t clock = op->ticket / (uint64_t)x->w->group.size;

    if (x->clock < clock) x->clock = clock;
    op->state = IDIST__XLA_LAUNCHING;
    idist__xla_worker_remove(x, op->job);
    op->job->ticket = op->ticket;
    op->job->placed = true;
    idist__xla_worker_order(x, op->job);
}

// ---- a staged call ----

// Allocates host memory for the buffers of a staged call. Sets *fetches if the worker has to fill
// some of it. Returns false if memory cannot be allocated.
static bool idist__xla_call_allocate(idist__task *t, bool *fetches) {
    const idist_allocator *mem = &t->group->w->cfg.mem;
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;
    bool is_one = job->send && job->send == job->recv;

    // An all_to_allv in place would overwrite data that is still to be sent.
    if (op->call.kind == IDIST__ALL_TO_ALLV) is_one = false;

    job->fetches_recv =
        job->recv && op->call.kind == IDIST__BROADCAST && op->call.root == t->group->rank;
    *fetches = job->send || job->fetches_recv;
    if (job->send) job->send_copy = (char *)idist__mem_raw(mem, job->send->nbytes);
    if (is_one) job->recv_copy = job->send_copy;
    else if (job->recv) job->recv_copy = (char *)idist__mem_raw(mem, job->recv->nbytes);

    return (!job->send || job->send_copy) && (!job->recv || job->recv_copy);
}

// Begins to stage a call. Returns false if the call waits for the worker, or has failed.
static bool idist__xla_call_stage(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    bool fetches = false;

    if (!idist__xla_call_allocate(t, &fetches)) {
        idist__group_fail_memory(t->group);
        return false;
    }

    op->state = IDIST__XLA_FETCHED;
    if (!fetches) return true;
    op->state = IDIST__XLA_FETCHING;
    idist__xla_worker_add(idist__xla_of(t->group->w), op->job, IDIST__XLA_FETCH);

    return false;
}

// Starts a staged call on the host's backend, with the host copies of the buffers.
static void idist__xla_call_start_staged(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;
    idist__call part = op->call;

    idist__xla_call_dequeue(t);
    op->state = IDIST__XLA_ON_HOST;
    if (job->send) part.send = job->send_copy + ((const char *)op->call.send - job->send->at);
    if (job->recv) part.recv = job->recv_copy + ((char *)op->call.recv - job->recv->at);
    if (part.kind == IDIST__RECV && !part.info) part.info = &op->info;
    if (op->user.used) part.u.user = &op->user;
    idist__xla_call_start_part(t, &part);
}

// Adds a part of the receive buffer to the list of parts that the call has written.
static void idist__xla_call_add_range(idist__xla_job *job, const char *p, size_t nbytes) {
    if (!nbytes) return;
    job->ranges[job->range_count].at = (size_t)(p - job->recv->at);
    job->ranges[job->range_count].nbytes = nbytes;
    job->range_count++;
}

// Lists the parts of the receive buffer that a staged call has written on this rank. Returns false
// if memory cannot be allocated.
static bool idist__xla_call_find_ranges(idist__task *t) {
    const idist_group *g = t->group;
    const idist__call *call = &idist__xla_op_of(t)->call;
    const idist_recv_info *info = call->info ? call->info : &idist__xla_op_of(t)->info;
    idist__xla_job *job = idist__xla_op_of(t)->job;
    size_t size = idist_dtype_size(call->dtype), count;
    char *recv = (char *)call->recv;
    idist__extent e;
    int i;

    job->ranges = (idist__xla_range *)idist__mem_alloc(&g->w->cfg.mem,
                                                       sizeof *job->ranges * (size_t)(g->size + 1));
    if (!job->ranges || idist__extent_of(g, call, &e) != IDIST_OK) return false;
    if (call->kind == IDIST__BROADCAST && call->root == g->rank) return true;
    if (call->kind == IDIST__EXSCAN && g->rank == 0) return true;

    if (call->recvcounts && idist__kind_takes_blocks(call->kind)) {
        for (i = 0; i < g->size; i++) {
            char *at = idist__extent_part(call, recv, i, g->rank, false, &count);
            idist__xla_call_add_range(job, at, count * size);
        }
        return true;
    }

    count = call->kind == IDIST__RECV ? info->count : e.recv;
    idist__xla_call_add_range(job, recv, count * size);

    return true;
}

// Begins to store the result of a staged call. Returns true if there is nothing to store. Returns
// false if the worker copies the result to the device first, or if the group has failed.
static bool idist__xla_call_store(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;

    if (!job->recv || op->call.peeks) return true;

    if (!idist__xla_call_find_ranges(t)) {
        op->state = IDIST__XLA_STORING;
        idist__group_fail_memory(t->group);
        return false;
    }

    if (!job->range_count) return true;
    op->state = IDIST__XLA_STORING;
    idist__xla_worker_add(idist__xla_of(t->group->w), job, IDIST__XLA_STORE);

    return false;
}

// ---- entry points ----

// Performs the next step of the call at the head of a lane. Returns false if the call waits, or has
// failed.
static bool idist__xla_call_step(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);

    switch (op->state) {
    case IDIST__XLA_QUEUED:
        if (!op->job) { // a call on host memory that came after calls on device memory
            idist__xla_call_dequeue(t);
            op->state = IDIST__XLA_ON_HOST;
            if (op->user.used) op->call.u.user = &op->user;
            idist__xla_call_start_part(t, &op->call);
            return true;
        }

        return op->may_have_program ? idist__xla_call_find_program(t) : idist__xla_call_stage(t);

    case IDIST__XLA_COMPILED: idist__xla_call_meet(t); return true;

    case IDIST__XLA_MET:
        if (!idist__xla_call_is_unanimous(op)) return idist__xla_call_stage(t);
        idist__xla_call_order(t);
        return true;

    case IDIST__XLA_FETCHED: idist__xla_call_start_staged(t); return true;
    default: return false;
    }
}

// Performs the steps of all calls that can go on. Called with the world's lock held.
static void idist__xla_call_run(idist_group *g) {
    idist__xla_group *group = idist__xla_group_of(g);
    idist__task *t;
    int lane;

    if (!group) return;
    idist__fail_begin();

    for (lane = 0; lane < IDIST__XLA_LANES; lane++)
        while ((t = group->queue[lane]) != NULL)
            if (!idist__xla_call_step(t) && group->queue[lane] == t) break;

    idist__fail_end(IDIST_OK); // failures are stored in the tasks
}

// Handles the end of a part on the host. Returns true if the call is over. May be called in the
// middle of any function of the host's backend, so the next step is left to idist__xla_call_run.
static bool idist__xla_call_landed(idist__task *t, idist_status status) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla *x = idist__xla_of(t->group->w);
    bool over = false;

    if (op->state == IDIST__XLA_ENDED) return true;

    if (status != IDIST_OK) {
        idist__xla_call_end(t);
        return true;
    }

    t->state = IDIST__TASK_ON_DEVICE;

    switch (op->state) {
    case IDIST__XLA_MEETING: op->state = IDIST__XLA_MET; break;
    case IDIST__XLA_ORDERING: idist__xla_call_place(t); break;
    case IDIST__XLA_ON_HOST: over = idist__xla_call_store(t); break;
    default: break;
    }

    if (over) idist__xla_call_end(t);
    x->queue_changed = true;
    if (!over && x->w->wait.driver != IDIST__DRIVER_NONE) x->host_backend->wake(x->w);

    return over;
}

// Logs, once per program, that the plug-in refuses the program of a call.
static void idist__xla_call_log_refusal(const idist__task *t) {
    const idist__xla_op *op = idist__xla_op_of(t);

    if (op->job->why[0])
        idist__log_print(&t->group->w->log, IDIST_LOG_INFO,
                         "XLA refuses a program for %s, which is staged through the host: %s",
                         idist__kind_names[op->call.label], op->job->why);
}

// Continues a call after the worker has done its part.
static void idist__xla_call_worked(idist__task *t) {
    idist__xla_op *op = idist__xla_op_of(t);
    idist__xla_job *job = op->job;

    if (!job->ok) {
        if (job->lacks_memory) idist__group_fail_memory(t->group);
        else idist__xla_call_fail(t, job->why);
        return;
    }

    switch (op->state) {
    case IDIST__XLA_COMPILING:
        idist__xla_call_log_refusal(t);
        op->state = IDIST__XLA_COMPILED;
        idist__xla_call_run(t->group);
        return;
    case IDIST__XLA_FETCHING:
        op->state = IDIST__XLA_FETCHED;
        idist__xla_call_run(t->group);
        return;
    default: break;
    }

    // The result of a reduce belongs to the root alone.
    if (job->recv && job->output) {
        void *output = job->output;

        job->output = NULL;

        if (!idist__xla_value_replace(idist__xla_of(t->group->w)->home, job->recv, output)) {
            idist__group_fail_memory(t->group);
            return;
        }
    }

    idist__xla_call_complete(t);
}

// ---- xla/xla_engine.h ----------------------------------------------------------------------------

// xla/xla_engine.h: the device's part of a backend
//
// A world with a device has a backend that consists of these functions. Calls on host memory go on
// to the host's backend.
//
// The parts of a call reach the host's backend in the program's order, so that all ranks number
// them alike. A collective waits in its lane (idist__xla_lane) until all earlier collectives of the
// group have begun their last part. This is also true for a collective on host memory. A send waits
// for earlier sends.

// Allocates this rank's part of a group.
static idist_status idist__xla_engine_group_make(idist_group *g) {
    const idist_allocator *mem = &g->w->cfg.mem;
    idist__xla_group *group = (idist__xla_group *)idist__mem_alloc(mem, sizeof *group);
    int lane;

    if (!group) return IDIST_ERR_NO_MEMORY;
    group->options_nbytes = idist__proto_write(g, NULL, 0);
    group->options = (char *)idist__mem_alloc(mem, group->options_nbytes);

    if (!group->options) {
        idist__mem_free(mem, group);
        return IDIST_ERR_NO_MEMORY;
    }

    idist__proto_write(g, group->options, group->options_nbytes);
    for (lane = 0; lane < IDIST__XLA_LANES; lane++) group->queue_end[lane] = &group->queue[lane];
    g->device = group;

    return IDIST_OK;
}

// Finds the buffer that has nbytes at an address, and counts one more user of it. Returns NULL if
// there is none on this rank's device.
static idist__xla_buffer *idist__xla_engine_take(idist__xla *x, const void *p, size_t nbytes) {
    idist__xla_buffer *buffer = idist__xla_buffer_take(x->home, p);

    if (!buffer) return NULL;
    if (buffer->device == x->device &&
        buffer->nbytes - (size_t)((const char *)p - buffer->at) >= nbytes)
        return buffer;
    idist__xla_buffer_drop(x->home, buffer);

    return NULL;
}

// Checks that this rank has a buffer with nbytes at an address.
static idist_status idist__xla_engine_check(const idist_group *g, const char *name, const void *p,
                                            size_t nbytes) {
    idist__xla *x = idist__xla_of(g->w);
    idist__xla_buffer *buffer = idist__xla_buffer_take(x->home, p);
    bool is_own = buffer && buffer->device == x->device;
    size_t left = buffer ? buffer->nbytes - (size_t)((const char *)p - buffer->at) : 0;

    idist__xla_buffer_drop(x->home, buffer);
    if (!is_own)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: an address of this rank's call is no idist_xla_buffer of this rank "
                           "(freed already?)",
                           name);
    if (left < nbytes)
        return idist__fail(IDIST_ERR_ARG,
                           "%s: the idist_xla_buffer has %zu bytes from that address on, and the "
                           "call needs %zu",
                           name, left, nbytes);

    return IDIST_OK;
}

// Decides whether a call is for the device, from the addresses of its buffers.
static idist_status idist__xla_engine_route(idist_group *g, const idist__call *call,
                                            const idist_opts *opts, bool *on_device,
                                            bool *detached) {
    const char *name = idist__kind_names[call->label];
    bool send = idist__xla_buffer_is(call->send), recv = idist__xla_buffer_is(call->recv);
    idist_status status = IDIST_OK;
    idist__extent e;
    size_t size;

    (void)detached;
    if (opts->stream)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "%s: XLA has no streams: leave opts.stream NULL, and use a request",
                           name);
    *on_device = send || recv;
    if (!*on_device || idist__extent_of(g, call, &e) != IDIST_OK) return IDIST_OK;
    if ((e.send && !send) || (e.recv && !recv))
        return idist__fail(IDIST_ERR_ARG, "%s: one buffer is an idist_xla_buffer, the other is not",
                           name);
    size = idist_dtype_size(call->dtype);
    if (e.send) status = idist__xla_engine_check(g, name, call->send, e.send * size);
    if (status == IDIST_OK && e.recv)
        status = idist__xla_engine_check(g, name, call->recv, e.recv * size);
    if (status != IDIST_OK) return status;
    if (g->device || g->status != IDIST_OK) return IDIST_OK;

    return idist__xla_engine_group_make(g);
}

// Gives a task an empty op. The memory of the op is kept when the task is used again. Returns false
// if memory cannot be allocated.
static bool idist__xla_engine_op_make(idist__task *t) {
    const idist_allocator *mem = &t->group->w->cfg.mem;

    if (!t->device) t->device = idist__mem_alloc(mem, sizeof(idist__xla_op));
    if (!t->device) return false;
    memset(t->device, 0, sizeof(idist__xla_op));

    return true;
}

// Finds the buffers of a call, and allocates its job. Returns false, with the reason in `why`, if
// memory cannot be allocated, or if this rank has no buffer at an address.
static bool idist__xla_engine_take_buffers(idist__task *t, const char **why) {
    idist__xla *x = idist__xla_of(t->group->w);
    idist__xla_op *op = idist__xla_op_of(t);
    const idist__call *call = &op->call;
    size_t size = idist_dtype_size(call->dtype);
    idist__extent e;

    *why = "is out of memory";
    op->job = (idist__xla_job *)idist__mem_alloc(&x->w->cfg.mem, sizeof *op->job);
    if (!op->job || idist__extent_of(t->group, call, &e) != IDIST_OK) return false;
    op->job->task = t;
    if (e.send) op->job->send = idist__xla_engine_take(x, call->send, e.send * size);
    if (e.recv) op->job->recv = idist__xla_engine_take(x, call->recv, e.recv * size);
    op->job->in_place = !op->job->send || op->job->send == op->job->recv;
    *why = "has freed an idist_xla_buffer while a call with it began";

    return (!e.send || op->job->send) && (!e.recv || op->job->recv);
}

// Fills in what the device needs to know about a call.
static void idist__xla_engine_op_fill(idist__task *t) {
    idist_group *g = t->group;
    idist__xla_op *op = idist__xla_op_of(t);

    op->fingerprint = idist__fingerprint_of_call(g->w, &t->call, 0);
    op->fingerprint.algorithm = IDIST__ON_DEVICE;
    op->may_have_program =
        idist__xla_of(g->w)->path == IDIST__XLA_BY_PROGRAM && idist__hlo_supports(g, &op->call);
}

// Copies the user op of a call that waits for its turn, because the program may free the op.
static void idist__xla_engine_keep_user_op(idist__task *t) {
    if (!t->call.u.user && idist__kind_reduces(t->call.kind) &&
        idist__reduce_op_is_user(t->call.op))
        idist__xla_op_of(t)->user = *idist__world_user_op(t->group, &t->call);
}

// Returns the lane in which a call waits for its turn.
static idist__xla_lane idist__xla_engine_lane_of(const idist__call *call) {
    if (call->kind == IDIST__RECV) return IDIST__XLA_NO_LANE;
    return call->kind == IDIST__SEND ? IDIST__XLA_SENDS : IDIST__XLA_COLLECTIVES;
}

// Appends a call to its lane.
static void idist__xla_engine_enqueue(idist__task *t) {
    idist__xla_group *group = idist__xla_group_of(t->group);
    idist__xla_op *op = idist__xla_op_of(t);

    *group->queue_end[op->lane] = t;
    group->queue_end[op->lane] = &op->next_queued;
}

// Undoes the numbering of a task. Each part of the call gets its own number when the host's backend
// starts it.
static void idist__xla_engine_unstart(idist__task *t) {
    t->state = IDIST__TASK_ON_DEVICE;
    if (t->seq) t->group->seq--;
    t->seq = 0;
    memset(t->impl, 0, idist__xla_of(t->group->w)->host_backend->task_nbytes);
}

// Starts a receive, which waits for no other call.
static void idist__xla_engine_start_receive(idist__task *t) {
    bool fetches = false;

    if (!idist__xla_call_allocate(t, &fetches)) idist__group_fail_memory(t->group);
    else idist__xla_call_start_staged(t);
}

// Starts a task. A call on host memory with nothing before it in its lane goes to the host's
// backend at once.
static void idist__xla_engine_start(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    const idist__xla_group *group = idist__xla_group_of(t->group);
    idist__xla_lane lane = idist__xla_engine_lane_of(&t->call);
    bool on_device = t->on_device;
    const char *why = "is out of memory";
    idist__xla_op *op;

    if (!on_device && (!group || lane == IDIST__XLA_NO_LANE || !group->queue[lane])) {
        x->host_backend->start(t);
        return;
    }

    t->on_device = false; // until there is something to undo
    idist__xla_engine_unstart(t);

    if (!idist__xla_engine_op_make(t)) {
        idist__group_fail_memory(t->group);
        return;
    }

    op = idist__xla_op_of(t);
    op->call = t->call;
    op->lane = lane;
    idist__xla_engine_keep_user_op(t);
    t->on_device = on_device;

    if (on_device && !idist__xla_engine_take_buffers(t, &why)) {
        idist__group_fail_self(t->group, IDIST_ERR_ARG, why);
        return;
    }

    if (on_device) idist__xla_engine_op_fill(t);

    if (lane == IDIST__XLA_NO_LANE) {
        idist__xla_engine_start_receive(t);
        return;
    }

    idist__xla_engine_enqueue(t);
    idist__xla_call_run(t->group);
}

// Sends or receives a message without a task. Returns false if the host's backend cannot do so at
// once. Also returns false while earlier sends wait in the lane, because the message would overtake
// them.
static bool idist__xla_engine_quick_message(idist_group *g, const idist__call *call) {
    const idist__xla_group *group = idist__xla_group_of(g);

    if (group && call->kind == IDIST__SEND && group->queue[IDIST__XLA_SENDS]) return false;
    return idist__xla_of(g->w)->host_backend->quick_message(g, call);
}

// Continues the calls whose jobs the worker has finished.
static void idist__xla_engine_continue(idist__world *w) {
    idist__task *t, *next;

    for (t = w->tasks.running; t; t = next) {
        idist__xla_op *op = t->on_device ? idist__xla_op_of(t) : NULL;

        next = t->next;
        if (!op || !op->worked) continue;
        op->worked = false;
        idist__xla_call_worked(t);
        next = w->tasks.running; // a task is gone, perhaps the next one
    }
}

// Progresses the host's backend, then performs the steps of calls that can continue.
static void idist__xla_engine_progress(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    idist_group *g;

    x->host_backend->progress(w);
    if (!x->queue_changed) return;
    x->queue_changed = false;
    if (w->machine.single_threaded) idist__xla_engine_continue(w);

    for (g = &w->group; g; g = g->next)
        if (g->device) idist__xla_call_run(g);
}

// Sleeps in the host's backend, unless a call can continue.
static void idist__xla_engine_sleep(idist__world *w, int64_t until_ns) {
    const idist__xla *x = idist__xla_of(w);

    x->host_backend->sleep(w, x->queue_changed ? 0 : until_ns);
}

// Cancels a task. A program that is already running continues in the worker, and
// idist__xla_engine_finish handles its result.
static bool idist__xla_engine_cancel(idist__task *t) {
    idist__xla *x = idist__xla_of(t->group->w);
    bool done = true;

    if (!t->on_device && t->state != IDIST__TASK_ON_DEVICE) return x->host_backend->cancel(t);
    if (!t->device) return true; // there was no memory for it
    if (t->state == IDIST__TASK_ON_HOST) done = x->host_backend->cancel(t);

    switch (idist__xla_op_of(t)->state) {
    case IDIST__XLA_MET:
    case IDIST__XLA_LAUNCHING:
    case IDIST__XLA_STORING: done = false; break; // other ranks have done their part
    default: break;
    }

    t->state = IDIST__TASK_ON_HOST;
    idist__xla_call_end(t);

    return done;
}

static void idist__xla_engine_announce(idist__task *t) {
    if (t->state != IDIST__TASK_ON_DEVICE) idist__xla_of(t->group->w)->host_backend->announce(t);
}

// Returns what this rank waits for inside the plug-in, for an error text.
static const char *idist__xla_engine_unfinished(const idist__xla_op *op) {
    if (op->job && !op->job->running) return "has not finished earlier work";
    if (op->state == IDIST__XLA_COMPILING) return "has not finished compiling the program";
    return op->state == IDIST__XLA_LAUNCHING ? "has not finished" : "has not finished a copy";
}

static int idist__xla_engine_missing(idist__task *t, char *text, size_t capacity) {
    const idist__xla_group *group = idist__xla_group_of(t->group);
    const idist__xla_op *op = idist__xla_op_of(t);
    const idist__world *w = t->group->w;
    const idist__xla_job *first = idist__xla_of(w)->ordered;

    if (t->state != IDIST__TASK_ON_DEVICE)
        return idist__xla_of(w)->host_backend->missing(t, text, capacity);
    if (op->state == IDIST__XLA_QUEUED && op->lane != IDIST__XLA_NO_LANE &&
        group->queue[op->lane] != t) // waits for the call at the head of the lane
        return idist__xla_engine_missing(group->queue[op->lane], text, capacity);
    if (op->state == IDIST__XLA_LAUNCHING && !op->job->running && first && first != op->job &&
        first->task)
        return idist__xla_engine_missing(first->task, text, capacity); // waits for its turn
    idist__text_append(text, capacity, "rank %d on %s itself, whose device %s", w->group.rank,
                       w->about.hostname, idist__xla_engine_unfinished(op));

    return 1;
}

static void idist__xla_engine_launch(idist__world *w) { (void)w; }

static idist_status idist__xla_engine_follow(idist__task *t, void *stream) {
    (void)t;
    (void)stream;
    return idist__fail(IDIST_ERR_UNSUPPORTED, "wait_stream: XLA has no streams: use idist_wait");
}

// Continues the call whose job has ended. If the host's backend allows one thread only, leaves this
// to a thread of the program. If the call was cancelled, frees the job. If the result took the
// memory of the input, first makes the result the contents of the buffer.
static void idist__xla_engine_finish(idist__xla *x, idist__xla_job *job) {
    void *output = job->output;

    if (job->task && !x->w->machine.single_threaded) {
        idist__xla_call_worked(job->task);
        return;
    }

    if (job->task) {
        idist__xla_op_of(job->task)->worked = true;
        x->queue_changed = true;
        return;
    }

    if (x->w->life.abandoned) return; // the program's allocator may be gone

    if (job->donated && job->ok) {
        job->output = NULL;
        idist__xla_value_replace(x->home, job->recv, output);
    }

    idist__xla_worker_free(x, job);
}

// Takes jobs until the world ends. Then runs only programs for which other ranks wait.
static void *idist__xla_engine_work(void *arg) {
    idist__xla *x = (idist__xla *)arg;
    idist__world *w = x->w;
    idist__xla_job *job;

    idist__world_lock(w);

    while (!x->stops || (x->ordered && x->ordered->placed)) {
        job = idist__xla_worker_next(x);

        if (!job) {
            idist__os_cond_wait(&x->work, &w->lock, IDIST__FOREVER);
            continue;
        }

        job->running = true;
        idist__os_mutex_unlock(&w->lock);
        job->ok = idist__xla_worker_perform(x, job);
        idist__world_lock(w);
        job->running = false;

        idist__xla_engine_finish(x, job);
        idist__world_wake_driver(w);
    }

    x->has_left = true;
    idist__os_cond_signal(&x->left);
    idist__os_mutex_unlock(&w->lock);

    return NULL;
}

// Ends the worker, as idist_device_api demands of threads that have released the lock. A worker
// stays in a program forever if another rank never runs that program. Then the world is abandoned.
static void idist__xla_engine_end_calls(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    int64_t deadline_ns = idist__os_clock_deadline(IDIST__XLA_LEAVE_MS);

    if (!x->has_worker) return;
    idist__world_lock(w);
    x->stops = true;
    idist__os_cond_signal(&x->work);
    while (!x->has_left && idist__os_clock_now_ns() < deadline_ns)
        idist__os_cond_wait(&x->left, &w->lock, deadline_ns);
    if (!x->has_left) w->life.abandoned = true;
    idist__os_mutex_unlock(&w->lock);
    x->has_worker = false;

    if (x->has_left) {
        idist__os_thread_join(x->worker);
        return;
    }

    idist__os_thread_detach(x->worker);
    idist__log_print(&w->log, IDIST_LOG_WARN,
                     "a program of XLA has not finished: its thread and the client stay until the "
                     "process ends");
}

static void idist__xla_engine_group_close(idist_group *g) {
    const idist_allocator *mem = &g->w->cfg.mem;
    idist__xla_group *group = idist__xla_group_of(g);

    idist__xla_of(g->w)->host_backend->group_close(g);
    if (!group || g->w->life.abandoned) return;
    idist__mem_free(mem, group->options);
    idist__mem_free(mem, group);
    g->device = NULL;
}

// Frees the device of a world, except what an abandoned worker may touch.
static void idist__xla_engine_free(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    const idist_allocator *mem = &w->cfg.mem;
    idist__task *t;

    if (x->host_backend) w->backend = x->host_backend;
    if (w->life.abandoned) return;

    for (t = w->tasks.all; t; t = t->older) {
        idist__mem_free(mem, t->device);
        t->device = NULL;
    }

    w->device = NULL;
    w->device_api = NULL;
    idist__os_cond_destroy(&x->work);
    idist__os_cond_destroy(&x->left);
    if (x->home) idist__xla_home_leave(x->home);
    idist__mem_free(mem, x->infos);
    idist__mem_free(mem, x);
}

static void idist__xla_engine_close(idist__world *w, bool clean) {
    idist__xla_engine_free(w);
    w->backend->close(w, clean);
}

// ---- xla/xla_join.h ------------------------------------------------------------------------------

// xla/xla_join.h: the choice of the device and of the path, agreed by all ranks

// The names of the paths, which desc.device_backend may have besides "auto".
static const char *const idist__xla_path_names[] = {"auto", "xla", "staged"};

// Returns the path that desc.device_backend names, or -1 if no path has the name.
static int idist__xla_join_path_named(const char *asked) {
    if (!asked[0]) return IDIST__XLA_ANY_PATH;
    if (strcmp(asked, "xla") == 0) return IDIST__XLA_BY_PROGRAM;
    return strcmp(asked, "staged") == 0 ? IDIST__XLA_BY_STAGING : -1;
}

// Returns true if desc.device names a device of this backend. Sets *number to the number of the
// device, or to -1 if the name has none.
static bool idist__xla_join_device_named(const char *asked, int *number) {
    int64_t value;

    *number = -1;
    if (strncmp(asked, "tpu", 3) != 0 && strncmp(asked, "xla", 3) != 0) return false;
    if (!asked[3]) return true;
    if (asked[3] != ':' || !idist__parse_int(asked + 4, 0, 4095, &value)) return false;
    *number = (int)value;

    return true;
}

// Returns a number that is equal for ranks that are threads of one process, and only for those.
static uint64_t idist__xla_join_process(const idist__world *w) {
    idist__config real = w->cfg;

    memset(real.host_id, 0, sizeof real.host_id); // the program's name for the host does not count
    return idist__hash_mix(idist__config_host_key(&real),
                           idist__hash_mix((uint64_t)idist__os_process_id(),
                                           idist__os_process_space()));
}

// Returns true if this rank is the only one of its process.
static bool idist__xla_join_is_alone(const idist__world *w, const idist__xla_rank_info *infos) {
    int i;

    for (i = 0; i < w->group.size; i++)
        if (i != w->group.rank && infos[i].process == infos[w->group.rank].process) return false;
    return true;
}

// Returns true if the user asks for a TPU, and not for any device of XLA.
static bool idist__xla_join_wants_tpu(const idist__world *w) {
    const char *asked = w->cfg.device, *pjrt_device = idist__os_env("PJRT_DEVICE");

    if (asked[0]) return strncmp(asked, "tpu", 3) == 0;
    return pjrt_device && strcmp(pjrt_device, "TPU") == 0;
}

// Opens the client and chooses this rank's device. Returns false with the reason in `why`.
static bool idist__xla_join_open(idist__world *w, bool is_alone, char *why, size_t capacity) {
    idist__xla *x = idist__xla_of(w);
    int local_rank = w->nodes[w->group.rank].local_rank, number, at;

    idist__xla_join_device_named(w->cfg.device, &number);
    if (is_alone && !w->cfg.xla_client && !idist__os_env("IDIST_XLA_LIB") &&
        idist__tpu_has_chip() &&
        !idist__tpu_set_variables(w, number < 0 ? local_rank : number, why, capacity))
        return false;
    if (!idist__xla_home_enter(&idist__xla_home_one, &w->cfg, why, capacity)) return false;

    x->home = &idist__xla_home_one;

    if (idist__xla_join_wants_tpu(w) && strcmp(x->home->platform, "tpu") != 0) {
        snprintf(why, capacity, "the plug-in has devices of platform \"%s\", not TPUs",
                 x->home->platform);
        return false;
    }

    at = number < 0 ? local_rank % x->home->ndevices : number;
    if (is_alone && x->home->ndevices == 1) at = 0; // TPU_VISIBLE_CHIPS has chosen
    if (at < x->home->ndevices) x->device = x->home->devices[at];
    else snprintf(why, capacity, "device %d of %d", at, x->home->ndevices);

    return x->device != NULL;
}

// Finds the device of this rank.
static void idist__xla_join_probe(idist__world *w, bool is_alone, idist__xla_rank_info *info) {
    idist__xla *x = idist__xla_of(w);
    const char *asked = w->cfg.device;
    char version[sizeof x->home->platform + sizeof x->home->version];
    void *description = NULL;
    int number;

    info->named = idist__xla_join_device_named(asked, &number) || w->cfg.xla_client ||
                  idist__xla_join_wants_tpu(w);
    info->wanted = idist__xla_join_path_named(w->cfg.device_backend);
    idist__os_random(&info->launch_base, sizeof info->launch_base);
    snprintf(info->reason, sizeof info->reason, "the requested device is \"cpu\"");
    if (strcmp(asked, "cpu") == 0) return;

    if (!idist__xla_join_open(w, is_alone, info->reason, sizeof info->reason)) return;
    description = idist__pjrt_ask(x->home->api, IDIST__PJRT_DEVICE_DESCRIPTION, x->device,
                                  info->reason, sizeof info->reason);
    if (!description) return;
    info->device_id = idist__pjrt_ask_number(x->home->api, IDIST__PJRT_DEVICE_ID, description,
                                             info->reason, sizeof info->reason);
    info->process_index = x->home->process_index;
    snprintf(version, sizeof version, "%s %s", x->home->platform, x->home->version);
    info->version = idist__hash(version, strlen(version));
    info->found = info->device_id >= 0;
}

// Returns true if the ranks of a pair can be replicas of one program. Otherwise writes the reason.
static bool idist__xla_join_may_pair(const idist__xla_rank_info *a, const idist__xla_rank_info *b,
                                     char *why, size_t capacity) {
    if (a->version != b->version)
        snprintf(why, capacity, "they have plug-ins of different versions");
    else if (a->device_id == b->device_id && a->process == b->process)
        snprintf(why, capacity,
                 "they share a device (IDIST_XLA_CPU_DEVICES makes more devices of a CPU)");
    else if (a->device_id == b->device_id ||
             (a->process_index == b->process_index) != (a->process == b->process))
        snprintf(why, capacity, "their processes do not belong to one world of XLA");
    else return true;

    return false;
}

// Returns true if every two members of a group can be replicas of one program. Otherwise writes the
// reason.
static bool idist__xla_join_may_run(const idist_group *g, char *why, size_t capacity) {
    const idist__xla_rank_info *infos = idist__xla_of(g->w)->infos;
    char reason[160];
    int i, k;

    for (i = 1; i < g->size; i++)
        for (k = 0; k < i; k++) {
            if (idist__xla_join_may_pair(&infos[g->ranks[k]], &infos[g->ranks[i]], reason,
                                         sizeof reason))
                continue;
            snprintf(why, capacity, "rank %d and rank %d: %s", g->ranks[k], g->ranks[i], reason);
            return false;
        }

    return true;
}

// Chooses the path, which is the same on all ranks.
static idist_status idist__xla_join_agree_path(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    bool may_run;
    char why[240];
    int i;

    for (i = 1; i < w->group.size; i++)
        if (x->infos[i].wanted != x->infos[0].wanted)
            return idist__fail(IDIST_ERR_ENV,
                               "initialize: rank 0 and rank %d differ in IDIST_DEVICE_BACKEND", i);

    x->launch_base = x->infos[0].launch_base;
    x->path = (idist__xla_path)x->infos[0].wanted;
    if (x->path == IDIST__XLA_BY_STAGING) return IDIST_OK;
    may_run = idist__xla_join_may_run(&w->group, why, sizeof why);
    if (!may_run && x->path == IDIST__XLA_BY_PROGRAM)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "initialize: device backend xla cannot be used: %s; "
                           "IDIST_DEVICE_BACKEND=staged can",
                           why);
    if (!may_run)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device memory is staged through the host: %s",
                         why);
    x->path = may_run ? IDIST__XLA_BY_PROGRAM : IDIST__XLA_BY_STAGING;

    return IDIST_OK;
}

// Finds one outcome for all ranks: a device each, no device at all, or one error.
static idist_status idist__xla_join_agree(idist__world *w, bool *all) {
    const idist__xla_rank_info *infos = idist__xla_of(w)->infos;
    bool is_named = false;
    int i, without = -1;

    for (i = w->group.size - 1; i >= 0; i--) {
        if (!infos[i].found) without = i;
        if (infos[i].named) is_named = true;
    }

    *all = without < 0;
    if (*all) return idist__xla_join_agree_path(w);
    if (is_named)
        return idist__fail(IDIST_ERR_NO_DEVICE, "initialize: rank %d has no device: %s", without,
                           infos[without].reason);
    snprintf(w->about.no_device, sizeof w->about.no_device, "rank %d has none: %.160s", without,
             infos[without].reason);
    idist__log_print(&w->log, IDIST_LOG_INFO, "no device: %s", w->about.no_device);

    return IDIST_OK;
}

// Installs the device backend in front of the host's backend.
static void idist__xla_join_install(idist__world *w) {
    static const idist_device_api device_api = {idist__xla_engine_route, idist__xla_engine_launch,
                                                idist__xla_call_landed, idist__xla_engine_follow,
                                                idist__xla_engine_end_calls};
    idist__xla *x = idist__xla_of(w);
    bool is_tpu = strncmp(x->home->platform, "tpu", 3) == 0;

    x->host_backend = w->backend;
    x->api = *w->backend;
    x->api.start = idist__xla_engine_start;
    x->api.progress = idist__xla_engine_progress;
    x->api.sleep = idist__xla_engine_sleep;
    x->api.cancel = idist__xla_engine_cancel;
    x->api.announce = idist__xla_engine_announce;
    x->api.missing = idist__xla_engine_missing;
    x->api.group_close = idist__xla_engine_group_close;
    x->api.close = idist__xla_engine_close;
    if (x->api.quick_message) x->api.quick_message = idist__xla_engine_quick_message;
    snprintf(w->about.device_name, sizeof w->about.device_name, "%s:%d", is_tpu ? "tpu" : "xla",
             x->infos[w->group.rank].device_id);
    w->about.device_backend = idist__xla_path_names[x->path];
    w->backend = &x->api;
    w->device_api = &device_api;
}

// Starts the worker and installs the device backend. Called with the world's lock held.
static idist_status idist__xla_join_begin(idist__world *w) {
    idist__xla *x = idist__xla_of(w);
    int err = idist__os_thread_start(&x->worker, idist__xla_engine_work, x);

    if (err) return idist__fail_errno("initialize: starting a thread for XLA", err);
    x->has_worker = true;
    w->machine.foreign_thread_count++;
    idist__xla_join_install(w);

    return IDIST_OK;
}

// Allocates what the device backend keeps for a world.
static idist_status idist__xla_join_allocate(idist__world *w) {
    const idist_allocator *mem = &w->cfg.mem;
    idist__xla *x = (idist__xla *)idist__mem_alloc(mem, sizeof *x);

    if (!x) return IDIST_ERR_NO_MEMORY;
    w->device = x;
    x->w = w;
    x->jobs_end = &x->jobs;
    idist__os_cond_init(&x->work);
    idist__os_cond_init(&x->left);
    x->infos =
        (idist__xla_rank_info *)idist__mem_alloc(mem, sizeof *x->infos * (size_t)w->group.size);

    return x->infos ? IDIST_OK : IDIST_ERR_NO_MEMORY;
}

// Finds out which device each rank has, and whether all of them have one. The first exchange tells
// which ranks share a process. This must be known before libtpu is loaded, because it decides
// whether idist sets the variables of xla/tpu.h. Called with the world's lock held.
static idist_status idist__xla_join_meet(idist__world *w, bool *all) {
    idist__xla *x = idist__xla_of(w);
    int nthreads = idist__os_thread_count();
    idist__xla_rank_info mine;
    idist_status status;

    memset(&mine, 0, sizeof mine);
    mine.process = idist__xla_join_process(w);
    status = idist__survey(&w->group, &mine, x->infos, sizeof mine);
    if (status != IDIST_OK) return status;
    idist__xla_join_probe(w, idist__xla_join_is_alone(w, x->infos), &mine);
    w->machine.foreign_thread_count += idist__os_thread_count() - nthreads;
    status = idist__survey(&w->group, &mine, x->infos, sizeof mine);
    if (status != IDIST_OK) return status;

    return idist__xla_join_agree(w, all);
}

// Looks for a device on each rank of a new world. If all ranks have one, puts the device backend in
// front of the host's backend. Collective.
static idist_status idist__xla_join_wrap(idist__world *w) {
    idist_status status = idist__xla_join_allocate(w);
    bool all = false;

    idist__world_lock(w);
    if (status == IDIST_OK) status = idist__xla_join_meet(w, &all);
    if (status == IDIST_OK && all) status = idist__xla_join_begin(w);
    // If the world has failed, this rank reports the failure in its next call, as do ranks that
    // returned from this function earlier.
    if (w->group.status == IDIST_ERR_ABORTED || w->group.status == IDIST_ERR_MISMATCH)
        status = IDIST_OK;
    if (!w->device_api && !w->about.no_device[0])
        snprintf(w->about.no_device, sizeof w->about.no_device,
                 "the world failed before it had one");
    idist__os_mutex_unlock(&w->lock);

    if (w->device_api)
        idist__log_print(&w->log, IDIST_LOG_INFO, "device %s, device backend %s",
                         w->about.device_name, w->about.device_backend);
    else if (w->device) idist__xla_engine_free(w);

    return status;
}

static idist_status idist__xla_join_claim(idist__config *cfg, const char **why) {
    const char *path = cfg->device_backend, *device = cfg->device;
    int number;

    if (!cfg->xla_api != !cfg->xla_client)
        return idist__fail(IDIST_ERR_ARG,
                           "initialize: set both of desc.xla_api and desc.xla_client, or neither");
    *why = "desc.device or desc.device_backend names a device or a path of idist_nccl.h";
    if (strcmp(path, "nccl") == 0 || strcmp(path, "ipc") == 0) return IDIST_ERR_NO_BACKEND;
    if (strncmp(device, "cuda", 4) == 0) return IDIST_ERR_NO_BACKEND;
    if (device[0] && strcmp(device, "cpu") != 0 && !idist__xla_join_device_named(device, &number))
        return idist__fail(IDIST_ERR_ENV,
                           "initialize: device \"%.40s\" is none of cpu, tpu, tpu:0, "
                           "xla, xla:0, ...",
                           device);
    if (idist__xla_join_path_named(path) >= 0) return IDIST_OK;

    return idist__fail(cfg->device_backend_in_desc ? IDIST_ERR_ARG : IDIST_ERR_ENV,
                       "initialize: device backend \"%.40s\" (IDIST_DEVICE_BACKEND) is none of "
                       "auto, xla, staged",
                       path);
}

static void idist__xla_join_fill(idist_backend_api *api) {
    api->name = "xla";
    api->claim = idist__xla_join_claim;
    api->wrap = idist__xla_join_wrap;
}

const idist_backend_api *idist_xla_backend(void) {
    static idist_backend_api api;
    return idist__backend_fill(&api, idist__xla_join_fill);
}

__attribute__((constructor(IDIST__REGISTER_XLA))) static void idist__xla_join_register(void) {
    (void)idist_register_backend(idist_xla_backend());
}

// ---- xla/xla_api.h -------------------------------------------------------------------------------

// xla/xla_api.h: the public functions: buffers, and access to the plug-in

// Locks the world of a group, which must have a device of XLA. On failure nothing is locked.
static idist_status idist__xla_api_enter(const char *name, idist_group *group, idist_group **g) {
    idist_status status = idist__call_enter(name, group, g);
    const idist__world *w;

    if (status != IDIST_OK) return status;
    w = (*g)->w;
    if (w->device_api && w->backend->start == idist__xla_engine_start) return IDIST_OK;
    status = idist__fail(IDIST_ERR_NO_DEVICE, "%s: the world has no device of XLA%s%s", name,
                         w->about.no_device[0] ? ": " : "", w->about.no_device);
    idist__os_mutex_unlock(&(*g)->w->lock);

    return status;
}

const void *idist_xla_api(void) {
    return __atomic_load_n(&idist__xla_home_one.api, __ATOMIC_ACQUIRE);
}

void *idist_xla_client(idist_group *group) {
    idist_group *g;
    void *client;

    if (idist__xla_api_enter("xla_client", group, &g) != IDIST_OK) return NULL;
    client = idist__xla_of(g->w)->home->client;
    idist__os_mutex_unlock(&g->w->lock);

    return client;
}

void *idist_xla_device(idist_group *group) {
    idist_group *g;
    void *device;

    if (idist__xla_api_enter("xla_device", group, &g) != IDIST_OK) return NULL;
    device = idist__xla_of(g->w)->device;
    idist__os_mutex_unlock(&g->w->lock);

    return device;
}

size_t idist_xla_compile_options(idist_group *group, void *options, size_t capacity) {
    idist_group *g;
    size_t nbytes = 0;
    char why[240];

    if (idist__xla_api_enter("xla_compile_options", group, &g) != IDIST_OK) return 0;
    if (g->rank < 0)
        idist__fail(IDIST_ERR_STATE, "xla_compile_options: this rank is not a member of the group");
    else if (!idist__xla_join_may_run(g, why, sizeof why))
        idist__fail(IDIST_ERR_UNSUPPORTED,
                    "xla_compile_options: no program can run over the ranks: %s", why);
    else nbytes = idist__proto_write(g, (char *)options, capacity);
    idist__os_mutex_unlock(&g->w->lock);

    return nbytes;
}

// Creates a buffer like `shape` whose value is this PJRT_Buffer. Takes ownership of the PJRT_Buffer
// on success.
static idist_status idist__xla_api_enter_buffer(idist__xla_home *home, idist__xla_buffer *shape,
                                                void *pjrt, const char *name,
                                                idist_xla_buffer **out) {
    idist__xla_buffer *buffer = (idist__xla_buffer *)idist__mem_alloc(NULL, sizeof *buffer);
    idist__xla_value *value = buffer ? idist__xla_value_new(pjrt) : NULL;

    if (value) {
        *buffer = *shape;
        buffer->value = value;
        buffer->users = 1;
    }

    if (value && idist__xla_buffer_enter(home, buffer)) {
        *out = (idist_xla_buffer *)buffer->at;
        return IDIST_OK;
    }

    idist__mem_free(NULL, value);
    idist__mem_free(NULL, buffer);

    return idist__fail(IDIST_ERR_NO_MEMORY,
                       "%s: no memory, or no addresses (ulimit -v), for %zu "
                       "bytes",
                       name, shape->nbytes);
}

// Creates a buffer with the caller's data, or with zeros if data is NULL. Blocks, without the
// world's lock.
static idist_status idist__xla_api_put(idist__xla_home *home, idist__xla_buffer *shape,
                                       const void *data, idist_xla_buffer **buffer) {
    void *zeros = data ? NULL : idist__mem_alloc(NULL, shape->nbytes), *pjrt;
    char why[IDIST__XLA_REASON];
    idist_status status;

    if (!data && !zeros) return IDIST_ERR_NO_MEMORY;
    pjrt = idist__xla_value_put(home, shape, data ? data : zeros, why, sizeof why);
    idist__mem_free(NULL, zeros);
    if (!pjrt) return idist__fail(IDIST_ERR_DEVICE, "xla_buffer_put: %s", why);
    status = idist__xla_api_enter_buffer(home, shape, pjrt, "xla_buffer_put", buffer);
    if (status != IDIST_OK) idist__pjrt_destroy(home->api, IDIST__PJRT_BUFFER_DESTROY, pjrt);

    return status;
}

// Counts one more user of the open client.
static void idist__xla_api_stay(idist__xla_home *home) {
    idist__os_mutex_lock(&home->lock);
    home->users++;
    idist__os_mutex_unlock(&home->lock);
}

idist_status idist_xla_buffer_put(const void *data, size_t count, idist_dtype dtype,
                                  idist_group *group, idist_xla_buffer **buffer) {
    idist__xla_buffer shape;
    idist__xla_home *home;
    idist_status status;
    idist_group *g;

    if (!buffer) return idist__fail(IDIST_ERR_ARG, "xla_buffer_put: buffer is NULL");
    *buffer = NULL;
    if (!idist__pjrt_type_of(dtype))
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_put: XLA has no dtype %d", (int)dtype);
    if (!count || count > SIZE_MAX / 16)
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_put: a buffer needs at least one element, "
                                          "and must fit into memory");
    status = idist__xla_api_enter("xla_buffer_put", group, &g);
    if (status != IDIST_OK) return status;

    memset(&shape, 0, sizeof shape);
    home = idist__xla_of(g->w)->home;
    shape.device = idist__xla_of(g->w)->device;
    shape.type = idist__pjrt_type_of(dtype)->number;
    shape.dtype = dtype;
    shape.count = count;
    shape.nbytes = count * idist_dtype_size(dtype);
    shape.dims[0] = (int64_t)count;
    shape.dim_count = 1;
    idist__xla_api_stay(home); // the world may end meanwhile
    idist__os_mutex_unlock(&g->w->lock);

    status = idist__xla_api_put(home, &shape, data, buffer);
    idist__xla_home_leave(home);

    return status;
}

// Asks a PJRT_Buffer for its shape.
static idist_status idist__xla_api_describe(const idist__xla_home *home, void *pjrt,
                                            idist__xla_buffer *shape) {
    char why[IDIST__XLA_REASON];
    idist__pjrt_dims args;
    size_t i;

    shape->type = idist__pjrt_ask_number(home->api, IDIST__PJRT_BUFFER_TYPE, pjrt, why, sizeof why);
    shape->dtype = idist__pjrt_dtype(shape->type);
    shape->device = idist__pjrt_ask(home->api, IDIST__PJRT_BUFFER_DEVICE, pjrt, why, sizeof why);
    idist__pjrt_init(&args, sizeof args);
    args.buffer = pjrt;
    if (!shape->device ||
        !idist__pjrt_call(home->api, IDIST__PJRT_BUFFER_DIMS, &args, why, sizeof why))
        return idist__fail(IDIST_ERR_DEVICE, "xla_buffer_adopt: %s", why);
    if (shape->dtype == IDIST_DTYPE_COUNT)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "xla_buffer_adopt: idist does not have the type of this buffer");
    if (args.count > IDIST__PJRT_DIMS)
        return idist__fail(IDIST_ERR_UNSUPPORTED,
                           "xla_buffer_adopt: a buffer of %zu dimensions; idist takes up to %d",
                           args.count, IDIST__PJRT_DIMS);

    shape->count = 1;
    shape->dim_count = (int)args.count;

    for (i = 0; i < args.count; i++) {
        shape->dims[i] = args.dims[i];
        shape->count *= (size_t)args.dims[i];
    }

    shape->nbytes = shape->count * idist_dtype_size(shape->dtype);
    if (!shape->count)
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_adopt: the buffer has no element");

    return IDIST_OK;
}

idist_status idist_xla_buffer_adopt(void *pjrt_buffer, idist_group *group,
                                    idist_xla_buffer **buffer) {
    idist__xla_buffer shape;
    idist__xla_home *home;
    idist_status status;
    idist_group *g;
    void *device;

    if (!buffer || !pjrt_buffer)
        return idist__fail(IDIST_ERR_ARG, "xla_buffer_adopt: %s is NULL",
                           buffer ? "pjrt_buffer" : "buffer");
    *buffer = NULL;
    status = idist__xla_api_enter("xla_buffer_adopt", group, &g);
    if (status != IDIST_OK) return status;

    memset(&shape, 0, sizeof shape);
    home = idist__xla_of(g->w)->home;
    device = idist__xla_of(g->w)->device;
    status = idist__xla_api_describe(home, pjrt_buffer, &shape);
    if (status == IDIST_OK && shape.device != device)
        status = idist__fail(IDIST_ERR_ARG,
                             "xla_buffer_adopt: the buffer is not on the device of this rank");
    if (status == IDIST_OK)
        status = idist__xla_api_enter_buffer(home, &shape, pjrt_buffer, "xla_buffer_adopt", buffer);
    idist__os_mutex_unlock(&g->w->lock);

    return status;
}

// Finds the buffer of a handle, and counts one more user.
static idist_status idist__xla_api_take(const char *name, const idist_xla_buffer *handle,
                                        idist__xla_buffer **buffer) {
    *buffer = NULL;
    if (!idist__xla_home_is_own(&idist__xla_home_one))
        return idist__fail(IDIST_ERR_STATE,
                           "%s: this process was forked from the one that has the buffer", name);
    *buffer = idist__xla_buffer_take(&idist__xla_home_one, handle);
    if (*buffer && (*buffer)->at == (const char *)handle) return IDIST_OK;
    idist__xla_buffer_drop(&idist__xla_home_one, *buffer);

    return idist__fail(IDIST_ERR_ARG, "%s: no such buffer (freed already?)", name);
}

void *idist_xla_buffer_pjrt(const idist_xla_buffer *buffer) {
    idist__xla_buffer *found;
    void *pjrt;

    if (idist__xla_api_take("xla_buffer_pjrt", buffer, &found) != IDIST_OK) return NULL;
    idist__os_mutex_lock(&idist__xla_home_one.lock);
    pjrt = found->value->pjrt;
    idist__os_mutex_unlock(&idist__xla_home_one.lock);
    idist__xla_buffer_drop(&idist__xla_home_one, found);

    return pjrt;
}

idist_status idist_xla_buffer_get(const idist_xla_buffer *buffer, void *data, size_t nbytes,
                                  int timeout_ms) {
    int64_t deadline_ns = timeout_ms < 0 ? IDIST__FOREVER : idist__os_clock_deadline(timeout_ms);
    idist__xla_home *home = &idist__xla_home_one;
    idist_status status = IDIST_OK;
    char why[IDIST__XLA_REASON];
    idist__xla_buffer *found;
    idist__xla_value *value;
    bool late;

    if (!data) return idist__fail(IDIST_ERR_ARG, "xla_buffer_get: data is NULL");
    status = idist__xla_api_take("xla_buffer_get", buffer, &found);
    if (status != IDIST_OK) return status;
    value = idist__xla_value_take(home, found);

    if (nbytes != found->nbytes)
        status = idist__fail(IDIST_ERR_ARG, "xla_buffer_get: the buffer has %zu bytes, not %zu",
                             found->nbytes, nbytes);
    else if (!idist__xla_value_wait(home, value, deadline_ns, &late, why, sizeof why))
        status = late ? idist__fail(IDIST_ERR_TIMEOUT,
                                    "xla_buffer_get: the device has not finished after %d ms",
                                    timeout_ms)
                      : idist__fail(IDIST_ERR_DEVICE, "xla_buffer_get: %s", why);
    else if (!idist__xla_value_get(home, found, value, data, why, sizeof why))
        status = idist__fail(IDIST_ERR_DEVICE, "xla_buffer_get: %s", why);

    idist__xla_value_drop(home, value);
    idist__xla_buffer_drop(home, found);

    return status;
}

idist_status idist_xla_buffer_free(idist_xla_buffer **buffer) {
    idist__xla_buffer *found;
    idist_status status;
    bool first;

    if (!buffer || !*buffer) return IDIST_OK;
    status = idist__xla_api_take("xla_buffer_free", *buffer, &found);
    *buffer = NULL;
    if (status != IDIST_OK) return status;
    idist__os_mutex_lock(&idist__xla_home_one.lock);
    first = !found->freed; // another thread may free the buffer at this moment
    found->freed = true;
    idist__os_mutex_unlock(&idist__xla_home_one.lock);
    idist__xla_buffer_drop(&idist__xla_home_one, found);
    if (first) idist__xla_buffer_drop(&idist__xla_home_one, found); // the program's own use

    return IDIST_OK;
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

#undef IDIST__CALLBACK
#undef IDIST__CATCH_EXIT
#undef IDIST__COUNT_OF
#undef IDIST__INLINE
#undef IDIST__NOINLINE
#undef IDIST__NO_ALIAS
#undef IDIST__OS_MUTEX_INIT
#undef IDIST__PJRT_ARGS
#undef IDIST__PJRT_FUNCTIONS
#undef IDIST__PRINTF
#undef IDIST__TLS
#undef IDIST__TRY
#undef IDIST__UNUSED
#undef IDIST__UNWIND_END
#undef IDIST__VECTORIZE

#endif // IDIST_IMPLEMENTATION
