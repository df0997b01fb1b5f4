// xla/pjrt.h: the part of PJRT's C ABI that idist uses
//
// PJRT is the interface of XLA's plug-ins: one table of functions, each of which takes a pointer to
// one struct of arguments. A struct begins with its size and grows only at its end, and functions
// are only added at the end of the table. So these declarations serve every plug-in from 0.57 on,
// and idist needs no header of XLA. A plug-in refuses a struct that is smaller than the one it was
// compiled with. So each struct here ends with zeros for the fields of newer plug-ins.
//
// tests/xla/pjrt_abi.c compares numbers, offsets and sizes with a real pjrt_c_api.h.
#pragma once


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
