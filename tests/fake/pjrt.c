// pjrt.c - a stand-in for a PJRT plug-in, as a shared library
//
// Runs the programs that idist writes (xla/stablehlo.h), for I32, I64, F32 and F64. The devices
// belong to this process, or to several processes that share a file, like the chips of a TPU slice.
// Tests of several processes need this stand-in, because the real plug-in for CPUs supports only
// one. These variables configure the stand-in and cause faults:
//
//     FAKE_PJRT_WORLD=file      processes with this variable form one world, one device each
//     FAKE_PJRT_MINOR=n         the minor version of the ABI (default 90)
//     FAKE_PJRT_GROWN=1         require each struct to be 64 bytes larger than idist's
//     FAKE_PJRT_REFUSE=text     refuse to compile programs that contain the text ...
//     FAKE_PJRT_ON=n            ... and cause the faults below, only on process n (default: all)
//     FAKE_PJRT_FAULT=fail      running a program fails
//     FAKE_PJRT_FAULT=late      a program fails after it has begun
//     FAKE_PJRT_FAULT=slow      running a program takes 1.5 seconds
//     FAKE_PJRT_FAULT=hang      running a program never ends
//     FAKE_PJRT_FAULT=die       the process kills itself while it runs a program
//     FAKE_PJRT_AFTER=n         the fault happens after n programs (default 0)
//     FAKE_PJRT_SLOW=step       the step takes 1.5 seconds: compile, put or get; or "ready": a
//                               buffer is never ready
//     FAKE_PJRT_BROKEN=step     the step fails: put or get
#define IDIST_IMPLEMENTATION
#include "idist.h"
#include "idist_xla.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

enum { MAX_REPLICAS = 16, SLOTS = 16, SLOT_NBYTES = 65536, GROWN_NBYTES = 64 };

typedef struct fake_error {
    char text[200];
} fake_error;

typedef struct fake_device {
    int id;
} fake_device;

typedef struct fake_buffer {
    int type;
    int64_t dims[IDIST__PJRT_DIMS];
    size_t dim_count, nbytes;
    char *data; // NULL once donated
    fake_device *device;
} fake_buffer;

// What a program does, read from its text.
typedef struct fake_program {
    char kind[24]; // all_reduce, ...
    char op[16];   // add, ...
    char type[8];
    bool divides, broadcasts, donates;
    int root, n;
    int ids[MAX_REPLICAS];
    size_t in_count, out_count;
    int64_t dims[IDIST__PJRT_DIMS]; // of the result
    size_t dim_count;
} fake_program;

// A launch in progress, in memory that all processes share.
typedef struct fake_slot {
    int launch_id; // 0: free
    int first_id;  // device of replica 0
    int arrived, left;
    char data[MAX_REPLICAS][SLOT_NBYTES];
} fake_slot;

typedef struct fake_world {
    pthread_mutex_t lock;
    bool has_lock;
    int process_count;
    fake_slot slots[SLOTS];
} fake_world;

static struct {
    fake_world *world;
    fake_device devices[MAX_REPLICAS];
    void *device_list[MAX_REPLICAS];
    int device_count, process;
    int run_count; // atomic
} fake;

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static bool is_chosen(void) {
    const char *on = setting("FAKE_PJRT_ON");
    return !on || atoi(on) == fake.process;
}

static bool is_set_to(const char *name, const char *value) {
    const char *set = setting(name);
    return set && !strcmp(set, value);
}

IDIST__PRINTF(1, 2) static void *error_of(const char *fmt, ...);
static void *error_of(const char *fmt, ...) {
    fake_error *e = (fake_error *)calloc(1, sizeof *e);
    va_list args;
    if (!e) abort();
    va_start(args, fmt);
    vsnprintf(e->text, sizeof e->text, fmt, args);
    va_end(args);
    return e;
}

// Refuses a struct that is too small, as real plug-ins do.
static void *check(const void *args, size_t nbytes) {
    size_t got, want = nbytes - IDIST__PJRT_NEWER + (setting("FAKE_PJRT_GROWN") ? GROWN_NBYTES : 0);
    memcpy(&got, args, sizeof got);
    return got < want ? error_of("struct of %zu bytes, expected %zu", got, want) : NULL;
}
#define CHECK(args, type)                                       \
    do {                                                        \
        void *error_ = check(args, sizeof(idist__pjrt_##type)); \
        if (error_) return error_;                              \
    } while (0)

// Takes the time that FAKE_PJRT_SLOW demands for a step. Returns true if the step fails.
static bool pause_or_fail(const char *step) {
    if (is_set_to("FAKE_PJRT_SLOW", step)) usleep(1500000);
    return is_set_to("FAKE_PJRT_BROKEN", step);
}

//---- errors and events ----

static void *error_destroy(void *args) {
    free(((idist__pjrt_object *)args)->object);
    return NULL;
}

static void *error_message(void *args) {
    idist__pjrt_string *a = (idist__pjrt_string *)args;
    a->text = ((const fake_error *)a->object)->text;
    a->nbytes_of_text = strlen(a->text);
    return NULL;
}

// An event has already happened when it is created, so any pointer can be an event. This event says
// that a program has failed.
static char failed_event;

static void *event_destroy(void *args) {
    CHECK(args, object);
    return NULL;
}

static void *event_is_ready(void *args) {
    CHECK(args, flag);
    ((idist__pjrt_flag *)args)->out = !is_set_to("FAKE_PJRT_SLOW", "ready");
    return NULL;
}

static void *event_await(void *args) {
    CHECK(args, object);
    if (((idist__pjrt_object *)args)->object != &failed_event) return NULL;
    return error_of("INTERNAL: the chip melts");
}

static void *nothing(void *args) {
    CHECK(args, none);
    return NULL;
}

//---- the client ----

static void open_world(void) {
    const char *path = setting("FAKE_PJRT_WORLD");
    int fd = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    pthread_mutexattr_t shared;
    void *map;
    if (path && (fd < 0 || ftruncate(fd, sizeof(fake_world)) != 0)) abort();
    map = mmap(NULL, sizeof(fake_world), PROT_READ | PROT_WRITE,
               path ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS, fd, 0);
    if (map == MAP_FAILED) abort();
    if (fd >= 0) close(fd);
    fake.world = (fake_world *)map;
    // The first process prepares the lock; the other processes wait until it is ready.
    if (__atomic_fetch_add(&fake.world->process_count, 0, __ATOMIC_ACQ_REL) == 0 && !path) {
        pthread_mutex_init(&fake.world->lock, NULL);
        fake.process = 0;
        return;
    }
    fake.process = __atomic_fetch_add(&fake.world->process_count, 1, __ATOMIC_ACQ_REL);
    if (fake.process == 0) {
        pthread_mutexattr_init(&shared);
        pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&fake.world->lock, &shared);
        __atomic_store_n(&fake.world->has_lock, true, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&fake.world->has_lock, __ATOMIC_ACQUIRE)) usleep(1000);
}

static void lock_world(void) {
    if (pthread_mutex_lock(&fake.world->lock) == EOWNERDEAD)
        pthread_mutex_consistent(&fake.world->lock);
}

static void *client_create(void *args) {
    idist__pjrt_client_create *a = (idist__pjrt_client_create *)args;
    const idist__pjrt_named_value *option = (const idist__pjrt_named_value *)a->options;
    int i;
    CHECK(args, client_create);
    if (!fake.world) open_world();
    fake.device_count = a->option_count && !setting("FAKE_PJRT_WORLD") ? (int)option->value : 1;
    if (fake.device_count > MAX_REPLICAS) return error_of("too many devices");
    for (i = 0; i < fake.device_count; i++) {
        fake.devices[i].id = 10 * fake.process + i + 3;
        fake.device_list[i] = &fake.devices[i];
    }
    a->client = &fake;
    return NULL;
}

static void *platform_name(void *args) {
    idist__pjrt_string *a = (idist__pjrt_string *)args;
    CHECK(args, string);
    a->text = "fake";
    a->nbytes_of_text = 4;
    return NULL;
}

static void *process_index(void *args) {
    CHECK(args, number);
    ((idist__pjrt_number *)args)->out = fake.process;
    return NULL;
}

static void *devices(void *args) {
    idist__pjrt_devices *a = (idist__pjrt_devices *)args;
    CHECK(args, devices);
    a->devices = fake.device_list;
    a->count = (size_t)fake.device_count;
    return NULL;
}

static void *device_id(void *args) {
    idist__pjrt_number *a = (idist__pjrt_number *)args;
    CHECK(args, number);
    a->out = ((const fake_device *)a->object)->id;
    return NULL;
}

static void *device_description(void *args) {
    idist__pjrt_object *a = (idist__pjrt_object *)args;
    CHECK(args, object);
    a->out = a->object;
    return NULL;
}

//---- programs ----

static uint64_t varint(const unsigned char **at) {
    uint64_t value = 0;
    int shift = 0;
    do value |= (uint64_t)(**at & 127) << shift, shift += 7;
    while (*(*at)++ & 128);
    return value;
}

// Reads the number of replicas and the device ids of a CompileOptionsProto, whose messages are
// nested. Returns false if a field is missing.
static bool read_options(fake_program *p, const unsigned char *at, size_t nbytes) {
    static const int path[] = {3, 9, 3, 1}; // see xla/compile_options.h
    const unsigned char *end = at + nbytes;
    int depth = 0;
    while (at < end) {
        uint64_t tag = varint(&at), value = varint(&at);
        if ((tag & 7) == 0) {
            if (depth == 1 && tag >> 3 == 4) p->n = (int)value;
            continue;
        }
        if ((int)(tag >> 3) != path[depth]) return false;
        end = at + value;
        if (++depth == 4) break;
    }
    if (depth != 4 || p->n < 1 || p->n > MAX_REPLICAS) return false;
    for (depth = 0; depth < p->n && at < end; depth++) p->ids[depth] = (int)varint(&at);
    return depth == p->n && at == end;
}

// Reads "tensor<2x3xf32>".
static bool read_type(const char *at, int64_t *dims, size_t *dim_count, char type[8],
                      size_t *count) {
    *dim_count = 0;
    *count = 1;
    if (!at || strncmp(at, "tensor<", 7) != 0) return false;
    for (at += 7; *at >= '0' && *at <= '9'; at++) {
        dims[*dim_count] = strtoll(at, (char **)(uintptr_t)&at, 10);
        *count *= (size_t)dims[(*dim_count)++];
        if (*at != 'x') return false;
    }
    return sscanf(at, "%7[a-z0-9]>", type) == 1;
}

static bool read_text(fake_program *p, const char *text) {
    const char *main = strstr(text, "@main(%in: "), *out = main ? strstr(main, ") -> ") : NULL;
    const char *kinds[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"};
    int64_t dims[IDIST__PJRT_DIMS];
    const char *root = strstr(text, "%root = stablehlo.constant dense<"), *op;
    size_t i, unused;
    if (!out || !read_type(main + 11, dims, &unused, p->type, &p->in_count) ||
        !read_type(out + 5, p->dims, &p->dim_count, p->type, &p->out_count))
        return false;
    for (i = 0; i < 4; i++)
        if (strstr(text, kinds[i])) snprintf(p->kind, sizeof p->kind, "%s", kinds[i]);
    op = strstr(text, "%z = stablehlo.");
    if (op && sscanf(op + 15, "%15[a-z]", p->op) != 1) return false;
    p->divides = strstr(text, "stablehlo.divide") != NULL;
    p->broadcasts = root != NULL;
    p->root = root ? atoi(root + 33) : 0;
    p->donates = strstr(text, "tf.aliasing_output = 0") != NULL;
    return p->kind[0] != 0;
}

static void *compile(void *args) {
    idist__pjrt_compile *a = (idist__pjrt_compile *)args;
    const idist__pjrt_program *code = (const idist__pjrt_program *)a->program;
    const char *refuse = setting("FAKE_PJRT_REFUSE");
    fake_program *p = (fake_program *)calloc(1, sizeof *p);
    char *text = (char *)calloc(1, code->code_nbytes + 1);
    void *error = check(args, sizeof *a);
    if (!p || !text) abort();
    memcpy(text, code->code, code->code_nbytes);
    if (error) return error;
    pause_or_fail("compile");
    if (!read_options(p, (const unsigned char *)a->options, a->options_nbytes))
        error = error_of("INVALID_ARGUMENT: compile options");
    else if (!read_text(p, text)) error = error_of("INVALID_ARGUMENT: not a program of idist");
    else if (strcmp(p->type, "i32") && strcmp(p->type, "i64") && strcmp(p->type, "f32") &&
             strcmp(p->type, "f64"))
        error = error_of("UNIMPLEMENTED: type %s", p->type);
    else if (refuse && is_chosen() && strstr(text, refuse))
        error = error_of("UNIMPLEMENTED: refused: %.100s", refuse);
    free(text);
    if (error) free(p);
    else a->loaded = p;
    return error;
}

static void *free_object(void *args) {
    CHECK(args, object);
    free(((idist__pjrt_object *)args)->object);
    return NULL;
}

// Finds the slot of a launch, or takes a free slot. Called with the world's lock held.
static fake_slot *find_slot(const fake_program *p, int launch_id) {
    fake_slot *spare = NULL;
    int i;
    for (i = 0; i < SLOTS; i++) {
        fake_slot *slot = &fake.world->slots[i];
        if (slot->launch_id == launch_id && slot->first_id == p->ids[0]) return slot;
        if (!slot->launch_id) spare = slot;
    }
    if (!spare) abort();
    memset(spare, 0, offsetof(fake_slot, data));
    spare->launch_id = launch_id;
    spare->first_id = p->ids[0];
    return spare;
}

#define REDUCE(T)                                        \
    for (i = 0; i < count; i++) {                        \
        T x, y;                                          \
        memcpy(&x, acc + i * sizeof x, sizeof x);        \
        memcpy(&y, in + i * sizeof y, sizeof y);         \
        if (!strcmp(p->op, "add")) x = (T)(x + y);       \
        if (!strcmp(p->op, "multiply")) x = (T)(x * y);  \
        if (!strcmp(p->op, "minimum") && y < x) x = y;   \
        if (!strcmp(p->op, "maximum") && y > x) x = y;   \
        if (p->divides && is_last) x = (T)(x / (T)p->n); \
        memcpy(acc + i * sizeof x, &x, sizeof x);        \
    }

#define REDUCE_BITS(T)                                 \
    for (i = 0; i < count; i++) {                      \
        T x, y;                                        \
        memcpy(&x, acc + i * sizeof x, sizeof x);      \
        memcpy(&y, in + i * sizeof y, sizeof y);       \
        if (!strcmp(p->op, "and")) x = (T)(x & y);     \
        else if (!strcmp(p->op, "or")) x = (T)(x | y); \
        else x = (T)(x ^ y);                           \
        memcpy(acc + i * sizeof x, &x, sizeof x);      \
    }

static void reduce(const fake_program *p, char *acc, const char *in, size_t count, bool is_last) {
    size_t i;
    bool is_bitwise = !strcmp(p->op, "and") || !strcmp(p->op, "or") || !strcmp(p->op, "xor");
    if (is_bitwise && !strcmp(p->type, "i32")) REDUCE_BITS(int32_t)
    if (is_bitwise && !strcmp(p->type, "i64")) REDUCE_BITS(int64_t)
    if (is_bitwise) return;
    if (!strcmp(p->type, "i32")) REDUCE(int32_t)
    if (!strcmp(p->type, "i64")) REDUCE(int64_t)
    if (!strcmp(p->type, "f32")) REDUCE(float)
    if (!strcmp(p->type, "f64")) REDUCE(double)
}

// Computes the result of one replica from the inputs of all replicas.
static void compute(const fake_program *p, const fake_slot *slot, int me, char *out, size_t size) {
    size_t nbytes = p->out_count * size, part;
    int i;
    if (p->broadcasts) {
        memcpy(out, slot->data[p->root], nbytes);
    } else if (!strcmp(p->kind, "all_gather")) {
        for (i = 0; i < p->n; i++)
            memcpy(out + (size_t)i * p->in_count * size, slot->data[i], p->in_count * size);
    } else if (!strcmp(p->kind, "all_to_all")) {
        part = nbytes / (size_t)p->n;
        for (i = 0; i < p->n; i++)
            memcpy(out + (size_t)i * part, slot->data[i] + (size_t)me * part, part);
    } else {
        part = strcmp(p->kind, "reduce_scatter") ? 0 : (size_t)me * nbytes;
        memcpy(out, slot->data[0] + part, nbytes);
        for (i = 1; i < p->n; i++)
            reduce(p, out, slot->data[i] + part, p->out_count, i == p->n - 1);
    }
}

// Causes the requested fault. Returns an error, or NULL. Sets *fails_late if the program fails
// after it has begun.
static void *commit_fault(bool *fails_late) {
    const char *fault = setting("FAKE_PJRT_FAULT"), *after = setting("FAKE_PJRT_AFTER");
    int number = __atomic_fetch_add(&fake.run_count, 1, __ATOMIC_RELAXED);
    if (!fault || !is_chosen() || number < (after ? atoi(after) : 0)) return NULL;
    if (!strcmp(fault, "fail")) return error_of("INTERNAL: the chip is on fire");
    *fails_late = !strcmp(fault, "late");
    if (!strcmp(fault, "slow")) usleep(1500000);
    if (!strcmp(fault, "die")) kill(getpid(), SIGKILL);
    while (!strcmp(fault, "hang")) pause();
    return NULL;
}

// Waits for all replicas of a launch, and computes the result. If a replica never comes, the wait
// never ends, as in XLA.
static char *meet(const fake_program *p, int launch_id, int me, const char *in, size_t size) {
    char *out = (char *)malloc(p->out_count * size);
    fake_slot *slot;
    if (!out || p->in_count * size > SLOT_NBYTES) abort();
    lock_world();
    slot = find_slot(p, launch_id);
    memcpy(slot->data[me], in, p->in_count * size);
    slot->arrived++;
    while (slot->arrived < p->n) {
        pthread_mutex_unlock(&fake.world->lock);
        usleep(50);
        lock_world();
    }
    compute(p, slot, me, out, size);
    if (++slot->left == p->n) slot->launch_id = 0;
    pthread_mutex_unlock(&fake.world->lock);
    return out;
}

static void *execute(void *args) {
    idist__pjrt_execute *a = (idist__pjrt_execute *)args;
    const idist__pjrt_execute_options *options = (const idist__pjrt_execute_options *)a->options;
    const fake_program *p = (const fake_program *)a->loaded;
    fake_buffer *in = (fake_buffer *)a->inputs[0][0];
    fake_buffer *out = (fake_buffer *)calloc(1, sizeof *out);
    size_t size = p->type[1] == '6' ? 8 : 4;
    void *error = check(args, sizeof *a);
    bool fails_late = false;
    int me = 0;
    if (!out) abort();
    if (!error) error = check(options, sizeof *options);
    if (!error && !in->data) error = error_of("INVALID_ARGUMENT: the buffer was donated");
    if (!error && in->nbytes != p->in_count * size)
        error = error_of("INVALID_ARGUMENT: %zu bytes for %zu", in->nbytes, p->in_count * size);
    while (me < p->n && p->ids[me] != ((const fake_device *)a->device)->id) me++;
    if (!error && (me == p->n || in->device != a->device))
        error = error_of("INVALID_ARGUMENT: a device that is not the program's");
    if (!error) error = commit_fault(&fails_late);
    if (error) {
        free(out);
        return error;
    }
    out->data = meet(p, options->launch_id, me, in->data, size);
    out->type = in->type;
    out->device = in->device;
    out->nbytes = p->out_count * size;
    out->dim_count = p->dim_count;
    memcpy(out->dims, p->dims, sizeof out->dims);
    if (p->donates && !options->not_donated_count) {
        free(in->data);
        in->data = NULL;
    }
    a->outputs[0][0] = out;
    a->done[0] = fails_late ? (void *)&failed_event : (void *)&fake;
    return NULL;
}

//---- buffers ----

static void *put(void *args) {
    idist__pjrt_put *a = (idist__pjrt_put *)args;
    fake_buffer *b = (fake_buffer *)calloc(1, sizeof *b);
    idist_dtype dtype = idist__pjrt_dtype(a->type);
    size_t i;
    CHECK(args, put);
    if (pause_or_fail("put")) return error_of("INTERNAL: the bus is broken");
    if (!b || dtype == IDIST_DTYPE_COUNT) return error_of("INVALID_ARGUMENT: type %d", a->type);
    b->type = a->type;
    b->dim_count = a->dim_count;
    b->nbytes = idist_dtype_size(dtype);
    b->device = (fake_device *)a->device;
    for (i = 0; i < a->dim_count; i++) {
        b->dims[i] = a->dims[i];
        b->nbytes *= (size_t)a->dims[i];
    }
    b->data = (char *)malloc(b->nbytes);
    if (!b->data) abort();
    memcpy(b->data, a->data, b->nbytes);
    a->buffer = b;
    a->done = &fake;
    return NULL;
}

static void *get(void *args) {
    idist__pjrt_get *a = (idist__pjrt_get *)args;
    const fake_buffer *b = (const fake_buffer *)a->buffer;
    CHECK(args, get);
    if (pause_or_fail("get")) return error_of("INTERNAL: the bus is broken");
    if (!b->data) return error_of("INVALID_ARGUMENT: the buffer was donated");
    if (a->data_nbytes < b->nbytes) return error_of("INVALID_ARGUMENT: too small");
    memcpy(a->data, b->data, b->nbytes);
    a->done = &fake;
    return NULL;
}

static void *buffer_destroy(void *args) {
    fake_buffer *b = (fake_buffer *)((idist__pjrt_object *)args)->object;
    CHECK(args, object);
    free(b->data);
    free(b);
    return NULL;
}

static void *buffer_type(void *args) {
    idist__pjrt_number *a = (idist__pjrt_number *)args;
    CHECK(args, number);
    a->out = ((const fake_buffer *)a->object)->type;
    return NULL;
}

static void *buffer_dims(void *args) {
    idist__pjrt_dims *a = (idist__pjrt_dims *)args;
    CHECK(args, dims);
    a->dims = ((const fake_buffer *)a->buffer)->dims;
    a->count = ((const fake_buffer *)a->buffer)->dim_count;
    return NULL;
}

static void *buffer_device(void *args) {
    idist__pjrt_object *a = (idist__pjrt_object *)args;
    CHECK(args, object);
    a->out = ((const fake_buffer *)a->object)->device;
    return NULL;
}

static void *buffer_ready(void *args) {
    CHECK(args, object);
    ((idist__pjrt_object *)args)->out = &fake;
    return NULL;
}

const idist__pjrt_api *GetPjrtApi(void);
const idist__pjrt_api *GetPjrtApi(void) {
    static idist__pjrt_api api;
    const char *minor = setting("FAKE_PJRT_MINOR");
    api.nbytes = sizeof api;
    api.version.minor = minor ? atoi(minor) : 90;
    api.functions[IDIST__PJRT_ERROR_DESTROY] = error_destroy;
    api.functions[IDIST__PJRT_ERROR_MESSAGE] = error_message;
    api.functions[IDIST__PJRT_INITIALIZE] = nothing;
    api.functions[IDIST__PJRT_EVENT_DESTROY] = event_destroy;
    api.functions[IDIST__PJRT_EVENT_IS_READY] = event_is_ready;
    api.functions[IDIST__PJRT_EVENT_AWAIT] = event_await;
    api.functions[IDIST__PJRT_CLIENT_CREATE] = client_create;
    api.functions[IDIST__PJRT_CLIENT_DESTROY] = event_destroy;
    api.functions[IDIST__PJRT_PLATFORM_NAME] = platform_name;
    api.functions[IDIST__PJRT_PLATFORM_VERSION] = platform_name;
    api.functions[IDIST__PJRT_PROCESS_INDEX] = process_index;
    api.functions[IDIST__PJRT_DEVICES] = devices;
    api.functions[IDIST__PJRT_COMPILE] = compile;
    api.functions[IDIST__PJRT_PUT] = put;
    api.functions[IDIST__PJRT_DEVICE_ID] = device_id;
    api.functions[IDIST__PJRT_DEVICE_DESCRIPTION] = device_description;
    api.functions[IDIST__PJRT_PROGRAM_DESTROY] = free_object;
    api.functions[IDIST__PJRT_EXECUTE] = execute;
    api.functions[IDIST__PJRT_BUFFER_DESTROY] = buffer_destroy;
    api.functions[IDIST__PJRT_BUFFER_TYPE] = buffer_type;
    api.functions[IDIST__PJRT_BUFFER_DIMS] = buffer_dims;
    api.functions[IDIST__PJRT_BUFFER_DEVICE] = buffer_device;
    api.functions[IDIST__PJRT_GET] = get;
    api.functions[IDIST__PJRT_BUFFER_READY] = buffer_ready;
    return &api;
}
