// xla/xla_program.h: programs, compiled once per process
//
// A compiled program is found by its text and its compile options, which name the devices of the
// group. Ranks that are threads of one process share it. A program that the plug-in refuses is kept
// as well, so that the plug-in is asked once.
#pragma once

#include "os/thread.h"
#include "base/mem.h"
#include "base/hash.h"
#include "xla/pjrt.h"
#include "xla/xla_model.h"
#include "xla/xla_home.h"

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
