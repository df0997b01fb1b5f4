/* idist_base.h - v0.2.0 - errors, memory, log, dtypes, reductions, hashes - MIT licence

    Part of the implementation of idist; idist.h includes it where IDIST_IMPLEMENTATION is defined.

WHAT IT IS

    What every other room needs and what knows nothing of ranks: how a failure gets its text, memory
    and log lines through the caller's functions, the dtypes, the kernels that reduce them, hashes.

CONTENTS

      [base:fail]    status names, and the text of a thread's last failure
      [base:callback] calling functions of the program
      [base:text]    copying, appending and decoding text
      [base:number]  numbers with fractions as text, in every locale
      [base:mem]     memory through the caller's allocator
      [base:window]  memory that all ranks of the host have mapped, for idist_alloc
      [base:log]     one line at a time, to the caller's logger or to stderr
      [base:type]    names and sizes of dtypes and ops
      [base:isa]     the instruction set that loops over elements use
      [base:mode]    the floating-point mode in which numbers are reduced
      [base:float]   floats of 16 and 8 bits
      [base:reduce]  out = lo (op) hi, for all dtypes and ops
      [base:sha]     SHA-256 (FIPS 180-4) and HMAC (RFC 2104)
      [base:hash]    fast hashes for ids
*/
#ifndef IDIST_BASE_H
#define IDIST_BASE_H

//------------------------------------------------------------------------------
// [base:fail]  status names, and the text of a thread's last failure
// uses -
//------------------------------------------------------------------------------

typedef struct idist__task idist__task;
typedef struct idist__world idist__world;

typedef struct idist__thread { // thread-local state
    char text[1024];           // of idist_last_error
    char kept_text[1024];      // `text` as it was before the first failure inside a call
    int quiet_depth;           // > 0: inside a call that may succeed in spite of a failure
    bool has_kept;             // kept_text is in use
    char config[2048];         // of idist_show_config
    char names[512];           // of idist_available_backends
    char hostname[64];         // of idist_hostname before there is a world
    char group_text[1024];     // of the first failure inside idist_group_begin
    int callbacks;             // > 0: inside a function of the caller's, which must not call us
    char thrown[256];          // what that function has thrown; "": nothing
    int group_depth;           // open idist_group_begin calls
    idist_status group_status; // first failure inside them
    idist__task *group_tasks;  // what they have started
    idist__task *group_last;   // the last one of these
    idist__world *held_world;  // its device backend holds some of them back until the end
    uint64_t file_world;       // that it met last in a file, see [launch:draw]
    uint64_t join_server;      // of the store by which it last tried to join, see [join:store]
    int64_t join_until_ns;     // while it joins: when it gives up; otherwise 0
} idist__thread;

IDIST__TLS idist__thread idist__me;

const char *idist_status_name(idist_status status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case IDIST_##name: return "IDIST_" #name;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    }

    return "IDIST_ERR_UNKNOWN";
}

const char *idist_status_string(idist_status status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case IDIST_##name: return text;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    }

    return "unknown status";
}

// Returns true if a number that another process has sent is the status of a failure.
IDIST__UNUSED static bool idist__fail_is_failure(int status) {
    switch (status) {
#define IDIST__X(name, value, text) \
    case value: return value != 0;
        IDIST_STATUS_MAP(IDIST__X)
#undef IDIST__X
    default: return false;
    }
}

const char *idist_last_error(void) { return idist__me.text; }

void idist_set_last_error(const char *text) {
    size_t n = text ? strlen(text) : 0;

    if (n >= sizeof idist__me.text) n = sizeof idist__me.text - 1;
    if (n) memmove(idist__me.text, text, n); // text may be that of idist_last_error
    idist__me.text[n] = 0;
}

// Every failure passes through here at the place where it is noticed. The text says what happened,
// to whom, and what to do. Its arguments may include the previous text, to which a caller adds what
// it was doing.
IDIST__PRINTF(2, 3) static idist_status idist__fail(idist_status status, const char *fmt, ...) {
    char text[sizeof idist__me.text];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);

    if (idist__me.quiet_depth && !idist__me.has_kept) {
        memcpy(idist__me.kept_text, idist__me.text, sizeof idist__me.kept_text);
        idist__me.has_kept = true;
    }

    memcpy(idist__me.text, text, sizeof text);
    return status;
}

// Begins a part of a call that may succeed although something fails on the way: an attempt that is
// repeated, or replaced by another one. A failure then changes idist_last_error only if the
// outermost such part ends with it.
static inline void idist__fail_begin(void) {
    if (!idist__me.quiet_depth++) idist__me.has_kept = false;
}

// Ends such a part, which returns this status.
static inline idist_status idist__fail_end(idist_status status) {
    idist__thread *self = &idist__me;

    if (!--self->quiet_depth && self->has_kept && status == IDIST_OK)
        memcpy(self->text, self->kept_text, sizeof self->text);
    return status;
}

// The same for a failed system call, with the system's words for errno.
static idist_status idist__fail_errno(const char *what, int err) {
    idist_status status = IDIST_ERR_SYSTEM;

    if (err == EMFILE)
        return idist__fail(IDIST_ERR_NO_FDS, "%s: %s: raise ulimit -n", what, strerror(err));
    if (err == ENFILE) status = IDIST_ERR_NO_FDS; // those of the whole machine
    if (err == ENOMEM) status = IDIST_ERR_NO_MEMORY;
    if (err == ENOSPC) status = IDIST_ERR_NO_SPACE;
    if (err == EADDRINUSE) status = IDIST_ERR_ADDR_IN_USE;
    return idist__fail(status, "%s: %s", what, strerror(err));
}

//------------------------------------------------------------------------------
// [base:callback]  calling functions of the program
// uses fail
//
// A callback runs with locks held. So it must not call idist, and this thread is not cancelled in
// it. IDIST__CALLBACK (idist_begin.h) makes the call; where the implementation is C++, what the
// callback has thrown is in idist__me.thrown afterwards, and the caller turns that into an error.
//------------------------------------------------------------------------------

#if defined(__cplusplus) && defined(__EXCEPTIONS)
// Keeps what a function of the program has thrown.
static void idist__callback_note(const char *what) {
    snprintf(idist__me.thrown, sizeof idist__me.thrown, "%s", *what ? what : "no text");
}
#endif

// Returns true once if the callback that was just made has thrown something: the text of the
// failure is then "all_reduce: the user op threw an exception: ...".
static bool idist__callback_threw(const char *name, const char *callback) {
    if (!idist__me.thrown[0]) return false;
    idist__fail(IDIST_ERR_CALLBACK, "%s: %s threw an exception: %s", name, callback,
                idist__me.thrown);
    idist__me.thrown[0] = 0;
    return true;
}

//------------------------------------------------------------------------------
// [base:text]  copying, appending and decoding text
// uses -
//------------------------------------------------------------------------------

// Appends to a string in a buffer of `capacity` bytes. What does not fit is cut off.
IDIST__PRINTF(3, 4)
static void idist__text_append(char *buf, size_t capacity, const char *fmt, ...) {
    size_t used = strlen(buf);
    va_list args;

    va_start(args, fmt);
    vsnprintf(buf + used, capacity - used, fmt, args);
    va_end(args);
}

// Copies a string to a buffer of `capacity` bytes. What does not fit is cut off.
static void idist__text_copy(char *to, size_t capacity, const char *from) {
    size_t nbytes = strlen(from);

    if (nbytes >= capacity) nbytes = capacity - 1;
    memcpy(to, from, nbytes);
    to[nbytes] = 0;
}

// Decodes the first character of a text in UTF-8. Returns how many bytes the character has, 0 at
// the end of the text, or -1 if the text does not begin with a character.
IDIST__UNUSED static int idist__text_decode(const char *text, uint32_t *code) {
    static const uint32_t lowest[5] = {0, 0, 0x80, 0x800, 0x10000}; // by the number of bytes
    const unsigned char *from = (const unsigned char *)text;
    int i, nbytes = from[0] < 0x80 ? 1 : from[0] < 0xe0 ? 2 : from[0] < 0xf0 ? 3 : 4;

    *code = from[0];
    if (nbytes == 1) return from[0] ? 1 : 0;
    if (from[0] < 0xc0 || from[0] > 0xf7) return -1;
    *code &= 0x7fu >> nbytes;

    for (i = 1; i < nbytes; i++) {
        if ((from[i] & 0xc0) != 0x80) return -1;
        *code = *code << 6 | (from[i] & 0x3fu);
    }

    if (*code < lowest[nbytes] || *code > 0x10ffff || (*code >= 0xd800 && *code < 0xe000))
        return -1;

    return nbytes;
}

//------------------------------------------------------------------------------
// [base:number]  numbers with fractions as text, in every locale
// uses -
//
// The functions printf and strtod use the decimal point of the program's locale. Everywhere else in
// idist, numbers with fractions are printed by the functions of this section (`make lint` checks).
//------------------------------------------------------------------------------

enum { IDIST__NUMBER_NBYTES = 40 }; // of a number as text, with the 0 at its end

// Copies what printf has printed to text. The decimal point becomes a period, and -nan becomes nan.
static const char *idist__number_convert(char *text, const char *printed) {
    const char *from = printed;
    char *to = text;
    bool in_point = false;

    if (strstr(printed, "nan")) from = "nan";

    for (; *from; from++) {
        bool is_point = !strchr("0123456789+-einfa", *from); // perhaps one of its several bytes

        if (!is_point) *to++ = *from;
        else if (!in_point) *to++ = '.';
        in_point = is_point;
    }

    *to = 0;

    return text;
}

// Prints like %.*g with at most 17 digits. Returns text, which has IDIST__NUMBER_NBYTES bytes.
IDIST__UNUSED static const char *idist__number_print(char *text, double value, int digits) {
    char printed[64];

    snprintf(printed, sizeof printed, "%.*g", digits, value);
    return idist__number_convert(text, printed);
}

// Prints like %.*f with at most 9 decimals, and numbers from 1e15 on like %g. Returns text.
IDIST__UNUSED static const char *idist__number_print_fixed(char *text, double value, int decimals) {
    char printed[64];

    if (!(value > -1e15 && value < 1e15)) return idist__number_print(text, value, 6);
    snprintf(printed, sizeof printed, "%.*f", decimals, value);
    return idist__number_convert(text, printed);
}

// Prints the fewest of 15 to 17 digits that give the same double when they are read. Returns text.
IDIST__UNUSED static const char *idist__number_print_exact(char *text, double value) {
    char printed[64];
    int digits;

    for (digits = 15; digits <= 17; digits++) {
        snprintf(printed, sizeof printed, "%.*g", digits, value);
        if (strtod(printed, NULL) == value) break;
    }

    return idist__number_convert(text, printed);
}

//------------------------------------------------------------------------------
// [base:mem]  memory through the caller's allocator
// uses os:memory fail
//------------------------------------------------------------------------------

// Records that nbytes could not be allocated, and the limit that was in the way, if one was.
static void idist__mem_refused(size_t nbytes) {
    char limit[160];

    idist__os_memory_limit(nbytes, limit, sizeof limit);
    idist__fail(IDIST_ERR_NO_MEMORY, "out of memory: cannot allocate %zu bytes%s%s", nbytes,
                *limit ? ": " : "", limit);
}

// Calls alloc_fn. An exception, such as std::bad_alloc, counts as NULL.
IDIST__NOINLINE static void *idist__mem_ask(const idist_allocator *a, size_t nbytes) {
    void *p = NULL;

    IDIST__CALLBACK(p = a->alloc_fn(nbytes, a->user));
    idist__me.thrown[0] = 0;
    return p;
}

// Calls free_fn. An exception is dropped, as there is nothing that the caller could do.
IDIST__NOINLINE static void idist__mem_give_back(const idist_allocator *a, void *p) {
    IDIST__CALLBACK(a->free_fn(p, a->user));
    idist__me.thrown[0] = 0;
}

// Not zeroed: for large buffers that are written before they are read. NULL: out of memory, and
// idist_last_error says so.
static void *idist__mem_raw(const idist_allocator *a, size_t nbytes) {
    void *p;

    if (!nbytes) nbytes = 1;
    p = a && a->alloc_fn ? idist__mem_ask(a, nbytes) : malloc(nbytes);
    if (!p) idist__mem_refused(nbytes);
    return p;
}

// The same, zeroed.
static void *idist__mem_alloc(const idist_allocator *a, size_t nbytes) {
    void *p = idist__mem_raw(a, nbytes);

    if (p) memset(p, 0, nbytes ? nbytes : 1);
    return p;
}

// Zeroes an object of 128 bytes or more where nanoseconds count. Hides the size from gcc, which
// would otherwise emit `rep stos`; starting that takes longer than the whole memset.
static inline void idist__mem_clear(void *p, size_t nbytes) {
    __asm__("" : "+r"(nbytes));
    memset(p, 0, nbytes);
}

static void idist__mem_free(const idist_allocator *a, void *p) {
    if (!p) return;
    if (a && a->free_fn) idist__mem_give_back(a, p);
    else free(p);
}

// Frees a list whose entries begin with the pointer to the next one.
IDIST__UNUSED static void idist__mem_free_list(const idist_allocator *mem, void *first) {
    while (first) {
        void *next = *(void **)first;
        idist__mem_free(mem, first);
        first = next;
    }
}

//------------------------------------------------------------------------------
// [base:window]  memory that all ranks of the host have mapped, for idist_alloc
// uses mutex os:memory process
//
// A window is this rank's part of a file that the ranks of the host share; the others read what
// lies in the window without a copy. The window is as large as the memory of the host, but takes
// neither memory nor addresses until idist_alloc needs them: the window grows by extents, which the
// owner maps at once and the others when they first look for new ones ([shm:window]).
//
//   | extent 0 | extent 1 | extent 2      | hole ...
//
// idist_alloc takes pages from the first gap that is large enough. Blocks may outlive the world,
// and the mappings go with the last of them. idist_free finds the window by the address, hence the
// list of all windows.
//------------------------------------------------------------------------------

enum { IDIST__EXTENTS = 40 }; // of a window; each is larger than half of those before it together
#define IDIST__EXTENT_MIN ((size_t)1 << 20)

typedef struct idist__block {
    struct idist__block *next; // by address
    size_t at, nbytes;         // within the extent
} idist__block;

typedef struct idist__window_extent {
    char *map;
    size_t at, nbytes; // within the window
    idist__block *blocks;
} idist__window_extent;

typedef struct idist__window {
    struct idist__window *next;
    int fd;                    // the file, not ours; -1: the memory is somebody else's
    idist__os_process process; // a child made by fork must not discard pages that its parent uses
    size_t at, nbytes;         // our part of the file
    idist__window_extent extents[IDIST__EXTENTS];
    uint32_t extent_count; // written last: an extent below it never changes its place
    size_t block_count;
    bool closed; // the world is gone; unmapped with the last block
} idist__window;

static idist__os_mutex idist__windows_lock = IDIST__OS_MUTEX_INIT;
static idist__window *idist__windows;

// Unmaps and frees a window, under the lock.
static void idist__window_unmap(idist__window *window) {
    idist__window **at;
    uint32_t i;

    for (at = &idist__windows; *at != window; at = &(*at)->next) continue;
    *at = window->next;
    for (i = 0; i < window->extent_count && window->fd >= 0; i++)
        idist__os_memory_unmap(window->extents[i].map, window->extents[i].nbytes);
    free(window);
}

// Makes a window of nbytes bytes of a file, from `at` on. The file must stay open until the window
// is closed. NULL: out of memory.
IDIST__UNUSED static idist__window *idist__window_open(int fd, size_t at, size_t nbytes) {
    idist__window *window = (idist__window *)calloc(1, sizeof *window);

    if (!window) return NULL;
    window->fd = fd;
    window->process = idist__os_process_id();
    window->at = at;
    window->nbytes = nbytes;

    idist__os_mutex_lock(&idist__windows_lock);
    window->next = idist__windows;
    idist__windows = window;
    idist__os_mutex_unlock(&idist__windows_lock);

    return window;
}

// Makes a window of memory that somebody else has mapped, and unmaps after the window is closed.
// NULL: out of memory.
IDIST__UNUSED static idist__window *idist__window_adopt(char *memory, size_t nbytes) {
    idist__window *window = idist__window_open(-1, 0, nbytes);

    if (!window) return NULL;
    window->extents[0].map = memory;
    window->extents[0].nbytes = nbytes;
    __atomic_store_n(&window->extent_count, 1, __ATOMIC_RELEASE);

    return window;
}

IDIST__UNUSED static void idist__window_close(idist__window *window) {
    idist__os_mutex_lock(&idist__windows_lock);
    window->closed = true;
    if (!window->block_count) idist__window_unmap(window);
    idist__os_mutex_unlock(&idist__windows_lock);
}

// Adds an extent with room for nbytes, under the lock. NULL: the window is full, or there are no
// addresses for the extent.
static idist__window_extent *idist__window_grow(idist__window *window, size_t nbytes) {
    size_t page = idist__os_memory_page_nbytes(), at = 0, size;
    uint32_t count = window->extent_count;
    idist__window_extent *extent = &window->extents[count];

    if (window->fd < 0 || count == IDIST__EXTENTS) return NULL;
    if (count) at = extent[-1].at + extent[-1].nbytes;
    if (nbytes > window->nbytes - at) return NULL;

    size = at / 2 / page * page;
    if (size < IDIST__EXTENT_MIN) size = IDIST__EXTENT_MIN;
    if (size < nbytes || size > window->nbytes - at) size = nbytes;
    extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);

    if (!extent->map) { // a limit, which may leave room for what is needed now
        size = nbytes;
        extent->map = (char *)idist__os_memory_map(window->fd, window->at + at, size);
    }

    if (!extent->map) return NULL;
    extent->at = at;
    extent->nbytes = size;
    __atomic_store_n(&window->extent_count, count + 1, __ATOMIC_RELEASE);

    return extent;
}

// Returns where a block of nbytes fits into the blocks of an extent, and its offset in *at. NULL:
// no gap is large enough. Under the lock.
static idist__block **idist__window_gap(idist__window_extent *extent, size_t nbytes, size_t *at) {
    idist__block **link;

    *at = 0;
    for (link = &extent->blocks; *link && (*link)->at - *at < nbytes; link = &(*link)->next)
        *at = (*link)->at + (*link)->nbytes;

    return extent->nbytes - *at < nbytes ? NULL : link;
}

// Finds a place for a block in the window, which grows if need be, and takes memory for the block.
// NULL: there is no place, or no memory. Under the lock.
static char *idist__window_place(idist__window *window, idist__block *block) {
    idist__window_extent *extent = NULL;
    idist__block **link = NULL;
    uint32_t i;

    for (i = 0; i < window->extent_count && !link; i++) {
        extent = &window->extents[i];
        link = idist__window_gap(extent, block->nbytes, &block->at);
    }

    if (!link) {
        extent = idist__window_grow(window, block->nbytes);
        if (extent) link = idist__window_gap(extent, block->nbytes, &block->at);
    }

    if (!link) return NULL;
    if (window->fd >= 0 && idist__os_memory_reserve(window->fd, window->at + extent->at + block->at,
                                                    block->nbytes) != 0)
        return NULL;

    block->next = *link;
    *link = block;
    window->block_count++;

    return extent->map + block->at;
}

// Allocates zeroed pages. NULL: no gap is large enough, or out of memory.
IDIST__UNUSED static void *idist__window_alloc(idist__window *window, size_t nbytes) {
    size_t page = idist__os_memory_page_nbytes();
    idist__block *block = NULL;
    char *memory;

    if (nbytes <= window->nbytes) block = (idist__block *)malloc(sizeof *block);
    if (!block) return NULL;
    block->nbytes = (nbytes + page - 1) / page * page + (nbytes ? 0 : page);

    idist__os_mutex_lock(&idist__windows_lock);
    memory = idist__window_place(window, block);
    if (memory && window->fd < 0) memset(memory, 0, nbytes);
    idist__os_mutex_unlock(&idist__windows_lock);
    if (!memory) free(block);

    return memory;
}

// Returns the extent that p lies in, or NULL. The caller holds the lock, or owns p, which keeps the
// extent.
static idist__window_extent *idist__window_extent_of(idist__window *window, const void *p) {
    uint32_t count = __atomic_load_n(&window->extent_count, __ATOMIC_ACQUIRE), i;

    for (i = 0; i < count; i++) {
        idist__window_extent *extent = &window->extents[i];
        if ((const char *)p >= extent->map && (const char *)p < extent->map + extent->nbytes)
            return extent;
    }

    return NULL;
}

// Frees the block that begins at p; nothing, if that was freed before. False: p lies in no window.
static bool idist__window_free(void *p) {
    idist__window_extent *extent = NULL;
    idist__window *window;
    idist__block **link, *block = NULL;

    idist__os_mutex_lock(&idist__windows_lock);
    for (window = idist__windows; window; window = window->next) {
        extent = idist__window_extent_of(window, p);
        if (extent) break;
    }

    if (extent) {
        for (link = &extent->blocks; *link && (char *)p != extent->map + (*link)->at;)
            link = &(*link)->next;
        block = *link;
        if (block) *link = block->next;
    }

    if (block) {
        if (window->fd >= 0 && window->process == idist__os_process_id())
            idist__os_memory_discard(p, block->nbytes);
        window->block_count--;
        if (window->closed && !window->block_count) idist__window_unmap(window);
    }

    idist__os_mutex_unlock(&idist__windows_lock);
    free(block);

    return extent != NULL;
}

//------------------------------------------------------------------------------
// [base:log]  one line at a time, to the caller's logger or to stderr
// uses unwind os:env mutex fail
//------------------------------------------------------------------------------

typedef struct idist__log {
    idist_logger logger;
    idist_log_level level;
    char who[96]; // whose lines these are: "rank 3/8 host"
} idist__log;

static idist__os_mutex idist__log_lock = IDIST__OS_MUTEX_INIT;
// Printed before the next line, to erase the progress bar that it would be glued to. Under the
// lock.
static const char *idist__log_before = "";

// Reads IDIST_LOG. An unknown level is an error, and the level is then the default (warn).
static idist_status idist__log_init(idist__log *log, const idist_logger *logger) {
    static const char *const names[] = {"", "error", "warn", "info", "debug"};
    const char *env = idist__os_env("IDIST_LOG");
    int i;

    memset(log, 0, sizeof *log);
    if (logger) log->logger = *logger;
    log->level = IDIST_LOG_WARN;
    if (!env) return IDIST_OK;

    for (i = 1; i <= 4; i++)
        if (strcmp(env, names[i]) == 0) {
            log->level = (idist_log_level)i;
            return IDIST_OK;
        }

    return idist__fail(IDIST_ERR_ENV, "IDIST_LOG=%s: use error, warn, info or debug", env);
}

static void idist__log_to_stderr(const char *line) {
    int cancel_state = idist__os_unwind_block_cancel();

    fprintf(stderr, "%s%s\n", idist__log_before, line);
    idist__log_before = "";
    idist__os_unwind_allow_cancel(cancel_state);
}

// Calls a logger. False: it has thrown an exception, which this reports, and the line is still to
// be logged. Under the lock.
IDIST__NOINLINE static bool idist__log_call(const idist_logger *logger, idist_log_level level,
                                            const char *line) {
    char thrown[320];

    IDIST__CALLBACK(logger->log_fn(level, line, logger->user));
    if (!idist__me.thrown[0]) return true;

    snprintf(thrown, sizeof thrown, "idist: the logger threw an exception: %s", idist__me.thrown);
    idist__me.thrown[0] = 0;
    idist__log_to_stderr(thrown);

    return false;
}

// One line, if the level is at most that of the log.
IDIST__PRINTF(3, 4)
static void idist__log_print(const idist__log *log, idist_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    char text[1024], line[1200];
    va_list args;

    if (level > log->level) return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(line, sizeof line, "idist %s%s%s: %s", log->who, log->who[0] ? " " : "", names[level],
             text);
    idist__os_mutex_lock(&idist__log_lock);
    if (!log->logger.log_fn || !idist__log_call(&log->logger, level, line))
        idist__log_to_stderr(line);
    idist__os_mutex_unlock(&idist__log_lock);
}

//------------------------------------------------------------------------------
// [base:type]  names and sizes of dtypes and ops
// uses -
//
// A dtype that a program creates has its number in the lowest byte, which is all that fingerprints
// carry of it, and its size above.
//------------------------------------------------------------------------------

enum {
    IDIST__USER_DTYPES = 128, // numbers from IDIST_DTYPE_USER on
    IDIST__DTYPE_MAX_NBYTES = 1 << 22
};

static const char *const idist__dtype_names[IDIST_DTYPE_COUNT] = {
    "I8",   "U8",  "I16", "U16",    "I32",    "U32",     "I64",     "U64",     "F16",
    "BF16", "F32", "F64", "F8E4M3", "F8E5M2", "F32_I64", "F64_I64", "I32_I64", "I64_I64"};
static const uint8_t idist__dtype_sizes[IDIST_DTYPE_COUNT] = {1,
                                                              1,
                                                              2,
                                                              2,
                                                              4,
                                                              4,
                                                              8,
                                                              8,
                                                              2,
                                                              2,
                                                              4,
                                                              8,
                                                              1,
                                                              1,
                                                              sizeof(idist_f32_i64),
                                                              sizeof(idist_f64_i64),
                                                              sizeof(idist_i32_i64),
                                                              sizeof(idist_i64_i64)};
static const char *const idist__op_names[IDIST_OP_COUNT] = {"SUM",   "PROD", "MIN",  "MAX",
                                                            "AVG",   "BAND", "BOR",  "BXOR",
                                                            "LAND",  "LOR",  "LXOR", "MINLOC",
                                                            "MAXLOC"};

// The number of a dtype that a program created, from 0 on; -1 for all others.
static int idist__dtype_user_number(idist_dtype dtype) {
    int number = (int)(((unsigned)dtype & 255u) - IDIST_DTYPE_USER);

    if ((int)dtype < IDIST_DTYPE_USER || number < 0 || number >= IDIST__USER_DTYPES) return -1;
    return (unsigned)dtype >> 8 <= IDIST__DTYPE_MAX_NBYTES ? number : -1;
}

size_t idist_dtype_size(idist_dtype dtype) {
    if ((unsigned)dtype < IDIST_DTYPE_COUNT) return idist__dtype_sizes[(unsigned)dtype];
    return idist__dtype_user_number(dtype) >= 0 ? (unsigned)dtype >> 8 : 0;
}

const char *idist_dtype_name(idist_dtype dtype) {
    if ((unsigned)dtype < IDIST_DTYPE_COUNT) return idist__dtype_names[(unsigned)dtype];
    return idist_dtype_size(dtype) ? "user dtype" : "unknown dtype";
}

const char *idist_op_name(idist_op op) {
    if ((unsigned)op < IDIST_OP_COUNT) return idist__op_names[(unsigned)op];
    return (int)op >= IDIST_OP_USER && (int)op <= IDIST_OP_LAST ? "user op" : "unknown op";
}

static bool idist__dtype_is_float(idist_dtype dtype) {
    return dtype >= IDIST_F16 && dtype <= IDIST_F8E5M2;
}

// A value and an index.
static bool idist__dtype_is_pair(idist_dtype dtype) {
    return dtype >= IDIST_F32_I64 && dtype <= IDIST_I64_I64;
}

// Floats of 16 and 8 bits, which are reduced as F32.
static bool idist__dtype_is_narrow(idist_dtype dtype) {
    return idist__dtype_is_float(dtype) && dtype != IDIST_F32 && dtype != IDIST_F64;
}

//------------------------------------------------------------------------------
// [base:isa]  the instruction set that loops over elements use
// uses -
//
// Every loop over elements exists once per instruction set, here and in [base:reduce]: `base` is
// what the compiler was asked for, the others run where the processor has them. All give the same
// bits, so the machines of a world may differ.
//------------------------------------------------------------------------------

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#define IDIST__X86 1
#define IDIST__ISA_avx2 __attribute__((target("avx2,f16c")))
#define IDIST__ISA_avx512 __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#endif
#define IDIST__ISA_base

typedef enum idist__isa { IDIST__BASE, IDIST__AVX2, IDIST__AVX512, IDIST__ISA_COUNT } idist__isa;

static idist__isa idist__isa_used; // set once, before main, by idist__reduce_start

// The best instruction set of this processor that its operating system lets us use.
static idist__isa idist__isa_best(void) {
#ifdef IDIST__X86
    unsigned a, b, c, d;

    __builtin_cpu_init();
    // Through cpuid, because not all compilers know the name f16c.
    if (!__builtin_cpu_supports("avx2") || !__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C))
        return IDIST__BASE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return IDIST__AVX2;
    return IDIST__AVX512;
#else
    return IDIST__BASE;
#endif
}

//------------------------------------------------------------------------------
// [base:mode]  the floating-point mode in which numbers are reduced and converted
// uses -
//
// A library built with -ffast-math sets flush-to-zero in the thread that loads it, a program may
// round upwards in one of its threads: the same sum would have other bits in the progress thread,
// or on another rank. So numbers are reduced and converted in the mode that a C program begins with
// (nearest, subnormals kept, no traps), whatever mode the thread is in. Reading the mode takes two
// nanoseconds.
//
//     uint32_t mode = idist__mode_enter();
//     ...
//     idist__mode_leave(mode);
//------------------------------------------------------------------------------

#if defined(__SSE__)
#define IDIST__MODE_BITS 0xffc0u  // of MXCSR: DAZ, the masks of exceptions, rounding, FTZ
#define IDIST__MODE_PLAIN 0x1f80u // all exceptions are masked
IDIST__INLINE uint32_t idist__mode_read(void) { return __builtin_ia32_stmxcsr(); }
IDIST__INLINE void idist__mode_write(uint32_t mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
#define IDIST__MODE_BITS 0xffffffffu // of FPCR
#define IDIST__MODE_PLAIN 0u
IDIST__INLINE uint32_t idist__mode_read(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (uint32_t)mode;
}
IDIST__INLINE void idist__mode_write(uint32_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode));
}
#else // unknown: the mode of the thread stays
#define IDIST__MODE_BITS 0u
#define IDIST__MODE_PLAIN 0u
IDIST__INLINE uint32_t idist__mode_read(void) { return 0; }
IDIST__INLINE void idist__mode_write(uint32_t mode) { (void)mode; }
#endif

// Enters the mode that a program begins with. Returns the mode of the thread, for
// idist__mode_leave.
IDIST__INLINE uint32_t idist__mode_enter(void) {
    uint32_t mode = idist__mode_read();

    if ((mode & IDIST__MODE_BITS) != IDIST__MODE_PLAIN) idist__mode_write(IDIST__MODE_PLAIN);
    __asm__ volatile("" : : : "memory"); // no operand is loaded before
    return mode;
}

IDIST__INLINE void idist__mode_leave(uint32_t mode) {
    __asm__ volatile("" : : : "memory"); // every result has been stored
    if ((mode & IDIST__MODE_BITS) != IDIST__MODE_PLAIN) idist__mode_write(mode);
}

//------------------------------------------------------------------------------
// [base:float]  floats of 16 and 8 bits
// uses isa mode
//
// All conversions are computed without branches, which would keep the loops that use them from
// being vectorized: zero and subnormals are computed as well, and selected by a mask.
//------------------------------------------------------------------------------

IDIST__INLINE float idist__small_float_from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

IDIST__INLINE uint32_t idist__small_float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

// From a float with e bits of exponent and m of fraction, in the manner of IEEE 754. `special` is
// the first code that is not a finite number: infinity, or NaN in formats that have no infinity.
IDIST__INLINE float idist__small_float_decode(uint32_t x, uint32_t e, uint32_t m,
                                              uint32_t special) {
    uint32_t abs = x & ((1u << (e + m)) - 1), sign = x >> (e + m) << 31,
             bias = 128 - (1u << (e - 1)); // of the exponents
    uint32_t u = (abs << (23 - m)) + (bias << 23), low = 0 - (uint32_t)(abs >> m == 0);
    float subnormal = (float)(int32_t)abs * idist__small_float_from_bits((bias + 1 - m) << 23);

    if ((int32_t)abs >= (int32_t)special) u |= 0x7f800000u;
    if ((int32_t)abs > (int32_t)special) u |= 0x400000u; // quiet
    return idist__small_float_from_bits(sign | (u & ~low) |
                                        (idist__small_float_to_bits(subnormal) & low));
}

// To such a float: rounds to nearest, ties to even. What is larger than the code `most` becomes
// `most`, a NaN becomes `nan`. Subnormals: adding a float whose last bit is worth the smallest
// subnormal rounds to a multiple of that.
IDIST__INLINE uint32_t idist__small_float_encode(float f, uint32_t e, uint32_t m, uint32_t most,
                                                 uint32_t nan) {
    uint32_t u = idist__small_float_to_bits(f), abs = u & 0x7fffffffu, bias = 128 - (1u << (e - 1)),
             unit = (bias + 24 - m) << 23;
    uint32_t low = 0 - (uint32_t)((int32_t)abs < (int32_t)((bias + 1) << 23));
    uint32_t subnormal = idist__small_float_to_bits(idist__small_float_from_bits(abs) +
                                                    idist__small_float_from_bits(unit)) -
                         unit;
    uint32_t x = (abs - (bias << 23) + (1u << (22 - m)) - 1 + ((abs >> (23 - m)) & 1u)) >> (23 - m);

    x = (x & ~low) | (subnormal & low);
    if ((int32_t)x > (int32_t)most) x = most;

    return (int32_t)abs > 0x7f800000 ? nan : x | u >> 31 << (e + m);
}

// F16, as the hardware does it (F16C, Arm): overflow gives infinity, a NaN becomes quiet and keeps
// its payload.
IDIST__INLINE float idist__small_float_from_half(uint16_t h) {
    return idist__small_float_decode(h, 5, 10, 0x7c00);
}
IDIST__INLINE uint16_t idist__small_float_to_half(float f) {
    uint32_t u = idist__small_float_to_bits(f),
             nan = ((u >> 16) & 0x8000u) | 0x7e00u | ((u >> 13) & 0x3ffu);
    return (uint16_t)idist__small_float_encode(f, 5, 10, 0x7c00, nan);
}

// F8, as CUDA's __nv_fp8_e4m3 and __nv_fp8_e5m2: infinity becomes the largest finite number, too.
IDIST__INLINE float idist__small_float_from_f8e4m3(uint8_t h) {
    return idist__small_float_decode(h, 4, 3, 0x7f);
}
IDIST__INLINE float idist__small_float_from_f8e5m2(uint8_t h) {
    return idist__small_float_decode(h, 5, 2, 0x7c);
}
IDIST__INLINE uint8_t idist__small_float_to_f8e4m3(float f) {
    return (uint8_t)idist__small_float_encode(f, 4, 3, 0x7e, 0x7f);
}
IDIST__INLINE uint8_t idist__small_float_to_f8e5m2(float f) {
    return (uint8_t)idist__small_float_encode(f, 5, 2, 0x7b, 0x7f);
}

IDIST__INLINE float idist__small_float_from_bf16(uint16_t h) {
    return idist__small_float_from_bits((uint32_t)h << 16);
}
IDIST__INLINE uint16_t idist__small_float_to_bf16(float f) {
    uint32_t u = idist__small_float_to_bits(f), quiet = ~u & 0x400000u,
             round = 0x7fffu + ((u >> 16) & 1u);
    return (uint16_t)((u + ((int32_t)(u & 0x7fffffffu) > 0x7f800000 ? quiet : round)) >> 16);
}

// Element types that may lie at any address: user buffers need not be aligned.
#define IDIST__UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t IDIST__UNALIGNED idist__any_u8;
typedef int8_t IDIST__UNALIGNED idist__any_i8;
typedef uint16_t IDIST__UNALIGNED idist__any_u16;
typedef int16_t IDIST__UNALIGNED idist__any_i16;
typedef uint32_t IDIST__UNALIGNED idist__any_u32;
typedef int32_t IDIST__UNALIGNED idist__any_i32;
typedef uint64_t IDIST__UNALIGNED idist__any_u64;
typedef int64_t IDIST__UNALIGNED idist__any_i64;
typedef float IDIST__UNALIGNED idist__any_f32;
typedef double IDIST__UNALIGNED idist__any_f64;

// clang warns of loops that it does not vectorize, as at -O0. Until the end of the kernels.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define IDIST__CONVERTERS(name, type, from, to, isa)                                        \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__small_float_widen_##name##_##isa(  \
        float *dst, const void *src, size_t count) {                                        \
        const idist__any_##type *s = (const idist__any_##type *)src;                        \
        size_t i;                                                                           \
        IDIST__NO_ALIAS                                                                     \
        for (i = 0; i < count; i++) dst[i] = from(s[i]);                                    \
    }                                                                                       \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__small_float_narrow_##name##_##isa( \
        void *dst, const float *src, size_t count) {                                        \
        idist__any_##type *d = (idist__any_##type *)dst;                                    \
        size_t i;                                                                           \
        IDIST__NO_ALIAS                                                                     \
        for (i = 0; i < count; i++) d[i] = to(src[i]);                                      \
    }

IDIST__CONVERTERS(half, u16, idist__small_float_from_half, idist__small_float_to_half, base)
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, base)
IDIST__CONVERTERS(f8e4m3, u8, idist__small_float_from_f8e4m3, idist__small_float_to_f8e4m3, base)
IDIST__CONVERTERS(f8e5m2, u8, idist__small_float_from_f8e5m2, idist__small_float_to_f8e5m2, base)

#ifdef IDIST__X86
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, avx2)
IDIST__CONVERTERS(bf16, u16, idist__small_float_from_bf16, idist__small_float_to_bf16, avx512)
IDIST__CONVERTERS(f8e4m3, u8, idist__small_float_from_f8e4m3, idist__small_float_to_f8e4m3, avx2)
IDIST__CONVERTERS(f8e5m2, u8, idist__small_float_from_f8e5m2, idist__small_float_to_f8e5m2, avx2)

// In assembly because reading <immintrin.h> would cost every program a quarter of a second.
typedef float idist__f32x8 __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint16_t idist__u16x8 __attribute__((vector_size(16), aligned(1), may_alias));

IDIST__ISA_avx2 static void idist__small_float_widen_half_avx2(float *dst, const void *src,
                                                               size_t count) {
    const idist__any_u16 *s = (const idist__any_u16 *)src;
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) {
        idist__f32x8 v;
        __asm__("vcvtph2ps %1, %0" : "=x"(v) : "m"(*(const idist__u16x8 *)(const void *)(s + i)));
        *(idist__f32x8 *)(void *)(dst + i) = v;
    }

    for (; i < count; i++) dst[i] = idist__small_float_from_half(s[i]);
}

IDIST__ISA_avx2 static void idist__small_float_narrow_half_avx2(void *dst, const float *src,
                                                                size_t count) {
    idist__any_u16 *d = (idist__any_u16 *)dst;
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) { // 0 rounds to nearest, ties to even
        idist__f32x8 v = *(const idist__f32x8 *)(const void *)(src + i);
        __asm__("vcvtps2ph $0, %1, %0" : "=m"(*(idist__u16x8 *)(void *)(d + i)) : "x"(v));
    }

    for (; i < count; i++) d[i] = idist__small_float_to_half(src[i]);
}
#endif

// The converters of an instruction set, by dtype from F16 on.
#define IDIST__CONVERTER(name, isa) \
    { idist__small_float_widen_##name##_##isa, idist__small_float_narrow_##name##_##isa }
#define IDIST__CONVERTER_ROW(isa, wide)                                            \
    {                                                                              \
        IDIST__CONVERTER(half, isa), IDIST__CONVERTER(bf16, wide), {0, 0}, {0, 0}, \
            IDIST__CONVERTER(f8e4m3, isa), IDIST__CONVERTER(f8e5m2, isa)           \
    }
static const struct {
    void (*widen)(float *dst, const void *src, size_t count);
    void (*narrow)(void *dst, const float *src, size_t count);
} idist__type_converters[][IDIST_DTYPE_COUNT - IDIST_F16] = {
    IDIST__CONVERTER_ROW(base, base),
#ifdef IDIST__X86
    IDIST__CONVERTER_ROW(avx2, avx2),
    IDIST__CONVERTER_ROW(avx2, avx512),
#endif
};

static void idist__small_float_widen(float *dst, const void *src, size_t count, idist_dtype dtype) {
    uint32_t mode = idist__mode_enter();

    idist__type_converters[idist__isa_used][dtype - IDIST_F16].widen(dst, src, count);
    idist__mode_leave(mode);
}

static void idist__small_float_narrow(void *dst, const float *src, size_t count,
                                      idist_dtype dtype) {
    uint32_t mode = idist__mode_enter();

    idist__type_converters[idist__isa_used][dtype - IDIST_F16].narrow(dst, src, count);
    idist__mode_leave(mode);
}

//------------------------------------------------------------------------------
// [base:reduce]  out = lo (op) hi, for all dtypes and ops
// uses fail type isa mode float
//------------------------------------------------------------------------------

// `lo` comes from the lower ranks. Equal operands in equal order give equal bits on every
// processor, whatever the instruction set and wherever an element lies in its buffer. out may be lo
// or hi: element i is read before it is written and no other element depends on it, which is what
// IDIST__NO_ALIAS promises.
typedef void (*idist__reduce_fn)(void *out, const void *lo, const void *hi, size_t count);
typedef idist__reduce_fn idist__reduce_row[IDIST_OP_COUNT];

#define IDIST__KERNEL(name, isa, type, wide, expr)                                             \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__reduce_##name##_##isa(void *out,      \
                                                                               const void *lo, \
                                                                               const void *hi, \
                                                                               size_t count) { \
        idist__any_##type *o = (idist__any_##type *)out;                                       \
        const idist__any_##type *a = (const idist__any_##type *)lo,                            \
                                *b = (const idist__any_##type *)hi;                            \
        size_t i;                                                                              \
        IDIST__NO_ALIAS                                                                        \
        for (i = 0; i < count; i++) {                                                          \
            wide x = (wide)a[i], y = (wide)b[i];                                               \
            o[i] = (idist__any_##type)(expr);                                                  \
        }                                                                                      \
    }

// Sums and products wrap modulo 2^bits: they are computed unsigned, in a type that C does not
// promote to a signed one.
#define IDIST__KERNELS_INT(i, u, wide, isa)                       \
    IDIST__KERNEL(min_##i, isa, i, idist__any_##i, x < y ? x : y) \
    IDIST__KERNEL(max_##i, isa, i, idist__any_##i, x > y ? x : y) \
    IDIST__KERNEL(min_##u, isa, u, idist__any_##u, x < y ? x : y) \
    IDIST__KERNEL(max_##u, isa, u, idist__any_##u, x > y ? x : y) \
    IDIST__KERNEL(sum_##u, isa, u, wide, x + y)                   \
    IDIST__KERNEL(prod_##u, isa, u, wide, x *y)                   \
    IDIST__KERNEL(band_##u, isa, u, wide, x &y)                   \
    IDIST__KERNEL(bor_##u, isa, u, wide, x | y)                   \
    IDIST__KERNEL(bxor_##u, isa, u, wide, x ^ y)                  \
    IDIST__KERNEL(land_##u, isa, u, wide, (x && y) ? 1 : 0)       \
    IDIST__KERNEL(lor_##u, isa, u, wide, (x || y) ? 1 : 0)        \
    IDIST__KERNEL(lxor_##u, isa, u, wide, (!x != !y) ? 1 : 0)
// Of two NaNs x wins here, because a processor returns one of them and a compiler may swap the
// operands. x < y is false when either is NaN, so MIN and MAX return the NaN of either side.
#define IDIST__KERNELS_FLOAT(f, wide, isa)                          \
    IDIST__KERNEL(sum_##f, isa, f, wide, x + (x != x ? x : y))      \
    IDIST__KERNEL(prod_##f, isa, f, wide, x *(x != x ? x : y))      \
    IDIST__KERNEL(min_##f, isa, f, wide, (x < y || x != x) ? x : y) \
    IDIST__KERNEL(max_##f, isa, f, wide, (x > y || x != x) ? x : y)

#define IDIST__ROW_INT(type, u, isa)                                            \
    {                                                                           \
        idist__reduce_sum_##u##_##isa, idist__reduce_prod_##u##_##isa,          \
            idist__reduce_min_##type##_##isa, idist__reduce_max_##type##_##isa, \
            idist__reduce_sum_##u##_##isa, idist__reduce_band_##u##_##isa,      \
            idist__reduce_bor_##u##_##isa, idist__reduce_bxor_##u##_##isa,      \
            idist__reduce_land_##u##_##isa, idist__reduce_lor_##u##_##isa,      \
            idist__reduce_lxor_##u##_##isa, 0, 0                                \
    }
#define IDIST__ROW_FLOAT(f, isa)                                          \
    {                                                                     \
        idist__reduce_sum_##f##_##isa, idist__reduce_prod_##f##_##isa,    \
            idist__reduce_min_##f##_##isa, idist__reduce_max_##f##_##isa, \
            idist__reduce_sum_##f##_##isa, 0, 0, 0, 0, 0, 0, 0, 0         \
    }
#define IDIST__ROW_PAIR(pair) \
    { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, idist__reduce_minloc_##pair, idist__reduce_maxloc_##pair }

// Beyond the first-level cache AVX-512 beats AVX2 only where AVX2 lacks an instruction: products,
// MIN and MAX of 64 bits. The floats have it too, for sums that stay in that cache. More instances
// would only make this header slower to compile.
#define IDIST__KERNELS_NARROW(isa)              \
    IDIST__KERNELS_INT(i8, u8, uint32_t, isa)   \
    IDIST__KERNELS_INT(i16, u16, uint32_t, isa) \
    IDIST__KERNELS_INT(i32, u32, uint32_t, isa)
#define IDIST__KERNELS_WIDE(isa)                \
    IDIST__KERNELS_INT(i64, u64, uint64_t, isa) \
    IDIST__KERNELS_FLOAT(f32, float, isa)       \
    IDIST__KERNELS_FLOAT(f64, double, isa)

IDIST__KERNELS_NARROW(base)
IDIST__KERNELS_WIDE(base)
#ifdef IDIST__X86
IDIST__KERNELS_NARROW(avx2)
IDIST__KERNELS_WIDE(avx2)
IDIST__KERNELS_WIDE(avx512)
#endif

// out = (lo + hi) / n: the last step of AVG, in one pass over memory instead of two. Where n is a
// power of two, the product with 1 / n equals the quotient, and takes less time.
typedef void (*idist__average_fn)(void *out, const void *lo, const void *hi, size_t count, int n);

#define IDIST__KERNEL_AVERAGE(name, f, type, isa, by_n, expr)                                  \
    IDIST__VECTORIZE IDIST__ISA_##isa static void idist__reduce_##name##_##f##_##isa(          \
        void *out, const void *lo, const void *hi, size_t count, int n) {                      \
        idist__any_##f *o = (idist__any_##f *)out;                                             \
        const idist__any_##f *a = (const idist__any_##f *)lo, *b = (const idist__any_##f *)hi; \
        type by = by_n;                                                                        \
        size_t i;                                                                              \
        IDIST__NO_ALIAS                                                                        \
        for (i = 0; i < count; i++) {                                                          \
            type x = a[i], y = b[i], sum = x + (x != x ? x : y);                               \
            o[i] = expr;                                                                       \
        }                                                                                      \
    }
#define IDIST__KERNELS_AVERAGE(f, type, isa)                                \
    IDIST__KERNEL_AVERAGE(average_mul, f, type, isa, 1 / (type)n, sum * by) \
    IDIST__KERNEL_AVERAGE(average_div, f, type, isa, (type)n, sum / by)

IDIST__KERNELS_AVERAGE(f32, float, base)
IDIST__KERNELS_AVERAGE(f64, double, base)
#ifdef IDIST__X86
IDIST__KERNELS_AVERAGE(f32, float, avx2)
IDIST__KERNELS_AVERAGE(f64, double, avx2)
#endif

#ifdef __clang__
#pragma clang diagnostic pop
#endif

// MINLOC and MAXLOC: the pair whose value is best, or of equal values that with the lowest index. A
// NaN beats every number, and of two NaNs that with the lowest index wins.
#define IDIST__KERNEL_PAIR(name, pair, better, is_nan)                                            \
    static void idist__reduce_##name##_##pair(void *out, const void *lo, const void *hi,          \
                                              size_t count) {                                     \
        size_t i;                                                                                 \
        for (i = 0; i < count; i++) {                                                             \
            idist_##pair x, y;                                                                    \
            bool x_is_nan, y_is_nan, tie, take_y;                                                 \
            memcpy(&x, (const char *)lo + i * sizeof x, sizeof x);                                \
            memcpy(&y, (const char *)hi + i * sizeof y, sizeof y);                                \
            x_is_nan = is_nan(x.value);                                                           \
            y_is_nan = is_nan(y.value);                                                           \
            tie = x.value == y.value || (x_is_nan && y_is_nan);                                   \
            take_y = tie ? y.index < x.index : y_is_nan || (!x_is_nan && y.value better x.value); \
            memcpy((char *)out + i * sizeof x, take_y ? &y : &x, sizeof x);                       \
        }                                                                                         \
    }
#define IDIST__FLOAT_IS_NAN(x) ((x) != (x))
#define IDIST__INT_IS_NAN(x) false
#define IDIST__KERNELS_PAIR(pair, is_nan)       \
    IDIST__KERNEL_PAIR(minloc, pair, <, is_nan) \
    IDIST__KERNEL_PAIR(maxloc, pair, >, is_nan)

IDIST__KERNELS_PAIR(f32_i64, IDIST__FLOAT_IS_NAN)
IDIST__KERNELS_PAIR(f64_i64, IDIST__FLOAT_IS_NAN)
IDIST__KERNELS_PAIR(i32_i64, IDIST__INT_IS_NAN)
IDIST__KERNELS_PAIR(i64_i64, IDIST__INT_IS_NAN)

// By instruction set, dtype and op. AVG adds; the division comes at the end. Narrow floats are
// reduced as F32.
#define IDIST__REDUCE_TABLE(narrow, wide)                                                          \
    {                                                                                              \
        IDIST__ROW_INT(i8, u8, narrow), IDIST__ROW_INT(u8, u8, narrow),                            \
            IDIST__ROW_INT(i16, u16, narrow), IDIST__ROW_INT(u16, u16, narrow),                    \
            IDIST__ROW_INT(i32, u32, narrow), IDIST__ROW_INT(u32, u32, narrow),                    \
            IDIST__ROW_INT(i64, u64, wide), IDIST__ROW_INT(u64, u64, wide),                        \
            IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), \
            IDIST__ROW_FLOAT(f64, wide), IDIST__ROW_FLOAT(f32, wide), IDIST__ROW_FLOAT(f32, wide), \
            IDIST__ROW_PAIR(f32_i64), IDIST__ROW_PAIR(f64_i64), IDIST__ROW_PAIR(i32_i64),          \
            IDIST__ROW_PAIR(i64_i64)                                                               \
    }
static const idist__reduce_row idist__reduce_tables[][IDIST_DTYPE_COUNT] = {
    IDIST__REDUCE_TABLE(base, base),
#ifdef IDIST__X86
    IDIST__REDUCE_TABLE(avx2, avx2),
    IDIST__REDUCE_TABLE(avx2, avx512),
#endif
};

// By instruction set: of F32 and F64 over a power of two of ranks, and over others.
#define IDIST__ROW_AVERAGE(isa)                                                      \
    {                                                                                \
        idist__reduce_average_mul_f32_##isa, idist__reduce_average_mul_f64_##isa,    \
            idist__reduce_average_div_f32_##isa, idist__reduce_average_div_f64_##isa \
    }
static const idist__average_fn idist__average_tables[][4] = {
    IDIST__ROW_AVERAGE(base),
#ifdef IDIST__X86
    IDIST__ROW_AVERAGE(avx2),
    IDIST__ROW_AVERAGE(avx2),
#endif
};

// By dtype and op, for this processor.
static const idist__reduce_row *idist__reduce_table = idist__reduce_tables[IDIST__BASE];

static void idist__reduce_use(idist__isa isa) {
    idist__isa_used = isa;
    idist__reduce_table = idist__reduce_tables[isa];
}

// Runs before main, so that no thread sees the table change and no call has to check.
__attribute__((constructor)) static void idist__reduce_start(void) {
    idist__reduce_use(idist__isa_best());
}

// Whether a product with 1 / n equals the quotient.
static bool idist__reduce_is_exact(int n) { return (n & (n - 1)) == 0; }

// What adds the last operand of an AVG over n ranks and divides. NULL: these are two steps. On an
// x87 they always are: it would divide a sum that has not been rounded.
static idist__average_fn idist__reduce_average(idist_dtype dtype, int n) {
    const idist__average_fn *row = idist__average_tables[idist__isa_used];
    bool is_rounded = FLT_EVAL_METHOD == 0;

    if (!is_rounded || n == 0 || (dtype != IDIST_F32 && dtype != IDIST_F64)) return NULL;
    if (!idist__reduce_is_exact(n)) row += 2;

    return dtype == IDIST_F64 ? row[1] : row[0];
}

// buf[i] = buf[i] / n: the end of AVG. The caller has entered the mode.
IDIST__VECTORIZE static void idist__reduce_quotients(void *buf, size_t count, idist_dtype dtype,
                                                     int n) {
    bool is_power_of_2 = idist__reduce_is_exact(n);
    size_t i;

    if (dtype == IDIST_F32 && is_power_of_2) {
        for (i = 0; i < count; i++) ((idist__any_f32 *)buf)[i] *= 1 / (float)n;
        return;
    }

    if (dtype == IDIST_F64 && is_power_of_2) {
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= 1 / (double)n;
        return;
    }

    switch (dtype) {
#define IDIST__DIVIDE(id, type, cast)                                         \
    case id:                                                                  \
        for (i = 0; i < count; i++)                                           \
            ((idist__any_##type *)buf)[i] =                                   \
                (idist__any_##type)(((idist__any_##type *)buf)[i] / (cast)n); \
        break;
        IDIST__DIVIDE(IDIST_I8, i8, int)
        IDIST__DIVIDE(IDIST_U8, u8, int)
        IDIST__DIVIDE(IDIST_I16, i16, int)
        IDIST__DIVIDE(IDIST_U16, u16, int)
        IDIST__DIVIDE(IDIST_I32, i32, int)
        IDIST__DIVIDE(IDIST_U32, u32, uint32_t)
        IDIST__DIVIDE(IDIST_I64, i64, int64_t)
        IDIST__DIVIDE(IDIST_U64, u64, uint64_t)
        IDIST__DIVIDE(IDIST_F32, f32, float)
        IDIST__DIVIDE(IDIST_F64, f64, double)
    default: break;
#undef IDIST__DIVIDE
    }
}

IDIST__NOINLINE static void idist__reduce_divide(void *buf, size_t count, idist_dtype dtype,
                                                 int n) {
    uint32_t mode = idist__mode_enter();

    idist__reduce_quotients(buf, count, dtype, n);
    idist__mode_leave(mode);
}

// acc[i] = lo[i] (op) hi[i], by a kernel of idist__reduce_table.
IDIST__UNUSED static void idist__reduce_by(idist__reduce_fn kernel, void *acc, const void *lo,
                                           const void *hi, size_t count) {
    uint32_t mode = idist__mode_enter();

    kernel(acc, lo, hi, count);
    idist__mode_leave(mode);
}

// The last step of a reduction: the division of AVG, and 0 or 1 as the result of logical ops, even
// when only one rank contributes.
static void idist__reduce_finish(void *buf, size_t count, idist_dtype dtype, idist_op op, int n) {
    if (op == IDIST_AVG) idist__reduce_divide(buf, count, dtype, n);
    if ((op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR) && dtype < IDIST_F16)
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](buf, buf, buf, count);
}

// In pieces of 4 KiB, so that intermediate results stay in the first-level cache, and memory sees
// each input once and out once. Only the last operand's step writes to out, which may be an input
// that is still to be read.
__attribute__((noinline)) static void idist__reduce_pieces(void *out, const void *const *in, int n,
                                                           size_t count, idist_dtype dtype,
                                                           idist_op op, int divide_by) {
    enum { PIECE = 4096 };
    // For any dtype. Aligned, because vectors that straddle cache lines cost a third of the speed.
    float sum[PIECE / sizeof(float)] __attribute__((aligned(64))),
        wide[PIECE / sizeof(float)] __attribute__((aligned(64)));
    bool narrow = idist__dtype_is_narrow(dtype);
    size_t size = idist_dtype_size(dtype), at, k;
    size_t piece =
        PIECE / (narrow ? sizeof(float) : size); // NOLINT(clang-analyzer-core.DivideZero)
    idist__reduce_fn fn = idist__reduce_table[(unsigned)dtype][(unsigned)op];
    idist__average_fn average = NULL;
    int i;

    if (n > 1) average = idist__reduce_average(narrow ? IDIST_F32 : dtype, divide_by);

    for (at = 0; at < count; at += k) {
        char *o = (char *)out + at * size;
        const void *lo = (const char *)in[0] + at * size;
        k = count - at < piece ? count - at : piece;

        if (narrow) {
            idist__small_float_widen(sum, lo, k, dtype);
            lo = sum;
        }

        for (i = 1; i < n; i++) {
            const void *hi = (const char *)in[i] + at * size;

            if (narrow) {
                idist__small_float_widen(wide, hi, k, dtype);
                hi = wide;
            }

            if (average && i == n - 1) average(narrow ? (void *)sum : o, lo, hi, k, divide_by);
            else fn(narrow || i < n - 1 ? (void *)sum : o, lo, hi, k);
            lo = sum;
        }

        if (divide_by && !average)
            idist__reduce_quotients(narrow ? (void *)sum : o, k, narrow ? IDIST_F32 : dtype,
                                    divide_by);
        if (narrow) idist__small_float_narrow(o, sum, k, dtype);
    }
}

// out = in[0] (op) in[1] ... (op) in[n - 1] from left to right; with AVG divided by `divide_by`,
// which is 0 otherwise. n >= 1. out may be one of the inputs; otherwise they do not overlap. Narrow
// floats are rounded once, at the end.
static void idist__reduce_many(void *out, const void *const *in, int n, size_t count,
                               idist_dtype dtype, idist_op op, int divide_by) {
    bool narrow = idist__dtype_is_narrow(dtype);
    idist__average_fn average = idist__reduce_average(dtype, divide_by);
    uint32_t mode = idist__mode_enter();

    if (n == 1 && (op == IDIST_LAND || op == IDIST_LOR || op == IDIST_LXOR)) { // makes it 0 or 1
        idist__reduce_table[(unsigned)dtype][IDIST_LAND](out, in[0], in[0], count);
    } else if (n == 1 && !(narrow && divide_by)) {
        if (out != in[0] && count) memcpy(out, in[0], count * idist_dtype_size(dtype));
        if (divide_by) idist__reduce_quotients(out, count, dtype, divide_by);
    } else if (n == 2 && !narrow && !divide_by) {
        idist__reduce_table[(unsigned)dtype][(unsigned)op](out, in[0], in[1], count);
    } else if (n == 2 && average) {
        average(out, in[0], in[1], count, divide_by);
    } else {
        idist__reduce_pieces(out, in, n, count, dtype, op, divide_by);
    }

    idist__mode_leave(mode);
}

// buf[i] = buf[i] * factor, of any floating dtype: the first step of a premultiplied sum.
static void idist__reduce_scale(void *buf, size_t count, idist_dtype dtype, double factor) {
    uint32_t mode = idist__mode_enter();
    float wide[256];
    size_t at, i, k;

    if (dtype == IDIST_F64)
        for (i = 0; i < count; i++) ((idist__any_f64 *)buf)[i] *= factor;
    if (dtype == IDIST_F32)
        for (i = 0; i < count; i++)
            ((idist__any_f32 *)buf)[i] = (float)(((idist__any_f32 *)buf)[i] * factor);

    for (at = 0; idist__dtype_is_narrow(dtype) && at < count; at += k) {
        char *p = (char *)buf + at * idist_dtype_size(dtype);
        k = count - at < IDIST__COUNT_OF(wide) ? count - at : IDIST__COUNT_OF(wide);
        idist__small_float_widen(wide, p, k, dtype);
        for (i = 0; i < k; i++) wide[i] = (float)(wide[i] * factor);
        idist__small_float_narrow(p, wide, k, dtype);
    }

    idist__mode_leave(mode);
}

idist_status idist_reduce_local(const void *in, void *inout, size_t count, idist_dtype dtype,
                                idist_op op) {
    const void *operands[2];

    if ((unsigned)dtype >= IDIST_DTYPE_COUNT)
        return idist__fail(IDIST_ERR_ARG, "reduce_local: invalid dtype %d", (int)dtype);
    if ((unsigned)op >= IDIST_OP_COUNT || op == IDIST_AVG)
        return idist__fail(IDIST_ERR_ARG, "reduce_local: op %s (%d) is not supported here",
                           idist_op_name(op), (int)op);
    if (!idist__reduce_table[(unsigned)dtype][(unsigned)op])
        return idist__fail(IDIST_ERR_ARG, "reduce_local: %s does not take %s", idist_op_name(op),
                           idist_dtype_name(dtype));
    if (count && (!in || !inout))
        return idist__fail(IDIST_ERR_ARG, "reduce_local: a buffer is NULL");
    operands[0] = in;
    operands[1] = inout;
    idist__reduce_many(inout, operands, 2, count, dtype, op, 0);

    return IDIST_OK;
}

//------------------------------------------------------------------------------
// [base:sha]  SHA-256 (FIPS 180-4) and HMAC (RFC 2104)
// uses -
//------------------------------------------------------------------------------

typedef struct idist__sha {
    uint32_t h[8];
    uint64_t nbytes;
    uint8_t block[64];
} idist__sha;

static void idist__sha_block(idist__sha *s, const uint8_t *p) {
    static const uint32_t k[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b,
                                   0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
                                   0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7,
                                   0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
                                   0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152,
                                   0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
                                   0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
                                   0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
                                   0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819,
                                   0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
                                   0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
                                   0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
                                   0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64], v[8], t1, t2;
    int i;
#define IDIST__ROR(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
    for (i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] +
               (IDIST__ROR(w[i - 15], 7) ^ IDIST__ROR(w[i - 15], 18) ^ (w[i - 15] >> 3)) +
               (IDIST__ROR(w[i - 2], 17) ^ IDIST__ROR(w[i - 2], 19) ^ (w[i - 2] >> 10));
    memcpy(v, s->h, sizeof v);

    for (i = 0; i < 64; i++) {
        t1 = v[7] + (IDIST__ROR(v[4], 6) ^ IDIST__ROR(v[4], 11) ^ IDIST__ROR(v[4], 25)) +
             ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
        t2 = (IDIST__ROR(v[0], 2) ^ IDIST__ROR(v[0], 13) ^ IDIST__ROR(v[0], 22)) +
             ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + t2;
    }

    for (i = 0; i < 8; i++) s->h[i] += v[i];
#undef IDIST__ROR
}

static void idist__sha_begin(idist__sha *s) {
    static const uint32_t h0[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memset(s, 0, sizeof *s);
    memcpy(s->h, h0, sizeof h0);
}

static void idist__sha_add(idist__sha *s, const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;

    while (nbytes) {
        size_t at = (size_t)(s->nbytes & 63), k = 64 - at < nbytes ? 64 - at : nbytes;
        memcpy(s->block + at, p, k);
        s->nbytes += k;
        p += k;
        nbytes -= k;
        if ((s->nbytes & 63) == 0) idist__sha_block(s, s->block);
    }
}

static void idist__sha_end(idist__sha *s, uint8_t out[32]) {
    uint64_t nbits = s->nbytes * 8;
    uint8_t tail[8], pad = 0x80;
    int i;

    idist__sha_add(s, &pad, 1);
    pad = 0;
    while ((s->nbytes & 63) != 56) idist__sha_add(s, &pad, 1);
    for (i = 0; i < 8; i++) tail[i] = (uint8_t)(nbits >> (56 - 8 * i));
    idist__sha_add(s, tail, 8);
    for (i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

// out = HMAC-SHA256(key, label | a | b). A key of 32 bytes is never hashed first.
static void idist__sha_hmac(const uint8_t key[32], const char *label, const void *a, size_t na,
                            const void *b, size_t nb, uint8_t out[32]) {
    idist__sha s;
    uint8_t pad[64], inner[32];
    int i;

    for (i = 0; i < 64; i++) pad[i] = (uint8_t)((i < 32 ? key[i] : 0) ^ 0x36);
    idist__sha_begin(&s);
    idist__sha_add(&s, pad, 64);
    idist__sha_add(&s, label, strlen(label));
    idist__sha_add(&s, a, na);
    idist__sha_add(&s, b, nb);
    idist__sha_end(&s, inner);
    for (i = 0; i < 64; i++) pad[i] ^= 0x36 ^ 0x5c;
    idist__sha_begin(&s);
    idist__sha_add(&s, pad, 64);
    idist__sha_add(&s, inner, 32);
    idist__sha_end(&s, out);
}

//------------------------------------------------------------------------------
// [base:hash]  fast hashes for ids
// uses -
//
// Not for secrets.
//------------------------------------------------------------------------------

// A well-mixed 64-bit number from two: splitmix64's finaliser.
static uint64_t idist__hash_mix(uint64_t a, uint64_t b) {
    uint64_t x = a + b * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// FNV-1a, mixed.
static uint64_t idist__hash(const void *data, size_t nbytes) {
    const uint8_t *p = (const uint8_t *)data;
    uint64_t h = 0xcbf29ce484222325u;
    size_t i;

    for (i = 0; i < nbytes; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return idist__hash_mix(h, nbytes);
}

#endif // IDIST_BASE_H
