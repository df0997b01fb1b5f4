// stablehlo.h - compiles a StableHLO program over the ranks of a group, and runs the program on the
// device of this rank. Declares only the parts of PJRT's C ABI that it needs. A program that uses
// more of PJRT includes pjrt_c_api.h, which is shipped with XLA's plug-ins.
#ifndef EXAMPLES_STABLEHLO_H
#define EXAMPLES_STABLEHLO_H

#include <stdio.h>
#include <string.h>

// Indices of functions in a plug-in's table.
enum {
    PJRT_ERROR_DESTROY = 0,
    PJRT_ERROR_MESSAGE = 1,
    PJRT_EVENT_DESTROY = 5,
    PJRT_EVENT_AWAIT = 8,
    PJRT_COMPILE = 20,
    PJRT_PROGRAM_DESTROY = 50,
    PJRT_EXECUTE = 55
};

// The table. Each function takes a pointer to a struct and returns an error, or NULL.
typedef struct pjrt_table {
    size_t nbytes;
    void *extensions;
    struct {
        size_t nbytes;
        void *extensions;
        int major, minor;
    } version;
    void *(*functions[PJRT_EXECUTE + 1])(void *args);
} pjrt_table;

// Arguments of functions. Each struct ends with zeros for fields that newer plug-ins have.
typedef struct pjrt_object {
    size_t nbytes;
    void *extensions, *object;
    char newer[96];
} pjrt_object;

typedef struct pjrt_message {
    size_t nbytes;
    void *extensions, *error;
    const char *text;
    size_t text_nbytes;
    char newer[96];
} pjrt_message;

typedef struct pjrt_program { // a part of pjrt_compile, so its size is exact
    size_t nbytes;
    void *extensions;
    char *code;
    size_t code_nbytes;
    const char *format;
    size_t format_nbytes;
} pjrt_program;

typedef struct pjrt_compile {
    size_t nbytes;
    void *extensions, *client;
    pjrt_program *program;
    const char *options;
    size_t options_nbytes;
    void *result;
    char newer[96];
} pjrt_compile;

typedef struct pjrt_options {
    size_t nbytes;
    void *extensions, *send, *recv;
    size_t send_count, recv_count;
    int launch_id;
    char newer[160];
} pjrt_options;

typedef struct pjrt_execute {
    size_t nbytes;
    void *extensions, *program;
    pjrt_options *options;
    void *const *const *inputs;
    size_t device_count, input_count;
    void **const *outputs;
    void **done;
    void *device;
    char newer[96];
} pjrt_execute;

#define STABLEHLO_NEW(type, name)  \
    type name;                     \
    memset(&name, 0, sizeof name); \
    name.nbytes = sizeof name

// Calls a function of the plug-in. If the function returns an error, prints the error and returns
// 1.
static inline int stablehlo_call(int function, void *args) {
    const pjrt_table *table = (const pjrt_table *)idist_xla_api();
    void *error = table->functions[function](args);
    STABLEHLO_NEW(pjrt_message, message);
    STABLEHLO_NEW(pjrt_object, destroy);

    if (!error) return 0;
    message.error = destroy.object = error;
    table->functions[PJRT_ERROR_MESSAGE](&message);
    fprintf(stderr, "XLA: %.*s\n", (int)message.text_nbytes, message.text);
    table->functions[PJRT_ERROR_DESTROY](&destroy);

    return 1;
}

// Replaces every `name` in a program's text with `value`. Returns 1 if the result does not fit.
static inline int stablehlo_replace(char *program, size_t capacity, const char *name,
                                    const char *value) {
    char *at = program;

    while ((at = strstr(at, name)) != NULL) {
        size_t more = strlen(value), less = strlen(name), rest = strlen(at + less) + 1;

        if ((size_t)(at - program) + more + rest > capacity) return 1;
        memmove(at + more, at + less, rest);
        memcpy(at, value, more);
        at += more;
    }

    return 0;
}

// Compiles a program for the ranks of a group: replica i is rank i. Returns NULL on failure.
static inline void *stablehlo_compile(char *text, idist_group *group) {
    char options[4096];
    STABLEHLO_NEW(pjrt_program, program);
    STABLEHLO_NEW(pjrt_compile, args);

    program.code = text;
    program.code_nbytes = strlen(text);
    program.format = "mlir";
    program.format_nbytes = 4;
    args.client = idist_xla_client(group);
    args.program = &program;
    args.options = options;
    args.options_nbytes = idist_xla_compile_options(group, options, sizeof options);
    if (!args.client || !args.options_nbytes || args.options_nbytes > sizeof options) return NULL;

    return stablehlo_call(PJRT_COMPILE, &args) ? NULL : args.result;
}

// Runs a program on this rank's device and waits until it ends. Every rank of the program's group
// calls this function with the same launch_id. Returns 1 on failure.
static inline int stablehlo_run(void *program, void **in, size_t count, void **out, int launch_id,
                                idist_group *group) {
    void *const *inputs[1];
    void **outputs[1], *done[1];
    STABLEHLO_NEW(pjrt_options, options);
    STABLEHLO_NEW(pjrt_execute, args);
    STABLEHLO_NEW(pjrt_object, event);

    inputs[0] = in;
    outputs[0] = out;
    options.launch_id = launch_id;
    args.program = program;
    args.options = &options;
    args.inputs = inputs;
    args.device_count = 1;
    args.input_count = count;
    args.outputs = outputs;
    args.done = done;
    args.device = idist_xla_device(group);
    if (stablehlo_call(PJRT_EXECUTE, &args)) return 1;

    event.object = done[0];
    if (stablehlo_call(PJRT_EVENT_AWAIT, &event)) return 1;
    return stablehlo_call(PJRT_EVENT_DESTROY, &event);
}

// Frees a program. Accepts NULL.
static inline void stablehlo_free(void *program) {
    STABLEHLO_NEW(pjrt_object, args);

    args.object = program;
    if (program) stablehlo_call(PJRT_PROGRAM_DESTROY, &args);
}
#endif
