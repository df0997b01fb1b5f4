// base/fail.h: status names, the text of a thread's last failure, callbacks
//
// Functions: idist__fail_*, idist__callback_*.
//
// The code that notices a failure calls idist__fail once, with the status and the text of the
// failure. idist_last_error returns the text. Functions of the program are also called through this
// file, so that their exceptions are caught.
#pragma once

//------------------------------------------------------------------------------
// status names, and the text of a thread's last failure
//------------------------------------------------------------------------------

typedef struct idist__thread { // thread-local state
    char text[1024];           // the result of idist_last_error
    char kept_text[1024];      // `text` before the first failure inside a call
    int quiet_depth;           // > 0 inside a call that may succeed despite a failure
    bool has_kept;             // kept_text is in use
    int callbacks;             // > 0 inside a callback, which must not call idist
    char thrown[256];          // what the callback has thrown, or ""
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
    if (n) memmove(idist__me.text, text, n); // text may be the result of idist_last_error
    idist__me.text[n] = 0;
}

// Records a failure where it is noticed, and returns its status. Every failure passes through this
// function. The text says what happened, to whom, and what to do about it. The arguments may
// include the previous text, to which a caller adds what it was doing.
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

// Begins a part of a call that may succeed despite a failure inside it: an attempt that is
// repeated, or replaced by another attempt. A failure then changes idist_last_error only if the
// outermost such part fails.
static inline void idist__fail_begin(void) {
    if (!idist__me.quiet_depth++) idist__me.has_kept = false;
}

// Ends a part of a call that idist__fail_begin began. `status` is the result of the part, and is
// returned.
static inline idist_status idist__fail_end(idist_status status) {
    idist__thread *self = &idist__me;

    if (!--self->quiet_depth && self->has_kept && status == IDIST_OK)
        memcpy(self->text, self->kept_text, sizeof self->text);
    return status;
}

// Records the failure of a system call, with the system's text for errno.
static idist_status idist__fail_errno(const char *what, int err) {
    idist_status status = IDIST_ERR_SYSTEM;

    if (err == EMFILE)
        return idist__fail(IDIST_ERR_NO_FDS, "%s: %s: raise ulimit -n", what, strerror(err));
    if (err == ENFILE) status = IDIST_ERR_NO_FDS; // the machine has no descriptors left
    if (err == ENOMEM) status = IDIST_ERR_NO_MEMORY;
    if (err == ENOSPC) status = IDIST_ERR_NO_SPACE;
    if (err == EADDRINUSE) status = IDIST_ERR_ADDR_IN_USE;
    return idist__fail(status, "%s: %s", what, strerror(err));
}

//------------------------------------------------------------------------------
// calling functions of the program
//
// A callback runs with locks held. So a callback must not call idist, and cancellation of its
// thread is disabled. IDIST__CALLBACK (base/begin.h) makes the call. If the implementation is
// compiled as C++, idist__me.thrown then says what the callback has thrown, and the caller reports
// an error.
//------------------------------------------------------------------------------

#if defined(__cplusplus) && defined(__EXCEPTIONS)
// Records what a function of the program has thrown.
static void idist__callback_note(const char *what) {
    snprintf(idist__me.thrown, sizeof idist__me.thrown, "%s", *what ? what : "no text");
}
#endif

// Returns true, once, if the last callback has thrown an exception. Records the failure as
// "all_reduce: the user op threw an exception: ...".
static bool idist__callback_threw(const char *name, const char *callback) {
    if (!idist__me.thrown[0]) return false;
    idist__fail(IDIST_ERR_CALLBACK, "%s: %s threw an exception: %s", name, callback,
                idist__me.thrown);
    idist__me.thrown[0] = 0;
    return true;
}
