// stablehlo.h - compiles a StableHLO program over the ranks of a group, and runs the program on the
// device of this rank. Needs pjrt_c_api.h, which XLA and its plug-ins bring along.
#ifndef EXAMPLES_STABLEHLO_H
#define EXAMPLES_STABLEHLO_H

#include <pjrt_c_api.h>

#include <stdio.h>
#include <string.h>

#define STABLEHLO_NEW(type, name)  \
    type name;                     \
    memset(&name, 0, sizeof name); \
    name.struct_size = sizeof(name)

// Prints an error of PJRT and frees the error. Returns 1 if there was one.
static inline int stablehlo_failed(const char *what, PJRT_Error *error) {
    const PJRT_Api *api = (const PJRT_Api *)idist_xla_api();
    STABLEHLO_NEW(PJRT_Error_Message_Args, message);
    STABLEHLO_NEW(PJRT_Error_Destroy_Args, destroy);

    if (!error) return 0;
    message.error = destroy.error = error;
    api->PJRT_Error_Message(&message);
    fprintf(stderr, "%s: %.*s\n", what, (int)message.message_size, message.message);
    api->PJRT_Error_Destroy(&destroy);

    return 1;
}

// Writes a program with every `name` in its text replaced by `value`. Returns 1 if the program does
// not fit.
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
static inline PJRT_LoadedExecutable *stablehlo_compile(char *text, idist_group *group) {
    const PJRT_Api *api = (const PJRT_Api *)idist_xla_api();
    char options[4096];
    STABLEHLO_NEW(PJRT_Program, program);
    STABLEHLO_NEW(PJRT_Client_Compile_Args, args);

    program.code = text;
    program.code_size = strlen(text);
    program.format = "mlir";
    program.format_size = 4;
    args.client = (PJRT_Client *)idist_xla_client(group);
    args.program = &program;
    args.compile_options = options;
    args.compile_options_size = idist_xla_compile_options(group, options, sizeof options);
    if (stablehlo_failed("compile", api->PJRT_Client_Compile(&args))) return NULL;

    return args.executable;
}

// Runs a program on this rank's device and waits for the end. Every rank of the program's group
// calls this function, with an equal launch_id. Returns 1 on failure.
static inline int stablehlo_run(PJRT_LoadedExecutable *program, PJRT_Buffer **in, size_t count,
                                PJRT_Buffer **out, int launch_id, idist_group *group) {
    const PJRT_Api *api = (const PJRT_Api *)idist_xla_api();
    PJRT_Buffer *const *inputs[1];
    PJRT_Buffer **outputs[1];
    PJRT_Event *done[1];
    STABLEHLO_NEW(PJRT_ExecuteOptions, options);
    STABLEHLO_NEW(PJRT_LoadedExecutable_Execute_Args, args);
    STABLEHLO_NEW(PJRT_Event_Await_Args, await);
    STABLEHLO_NEW(PJRT_Event_Destroy_Args, destroy);

    inputs[0] = in;
    outputs[0] = out;
    options.launch_id = launch_id;
    args.executable = program;
    args.options = &options;
    args.argument_lists = inputs;
    args.num_devices = 1;
    args.num_args = count;
    args.output_lists = outputs;
    args.device_complete_events = done;
    args.execute_device = (PJRT_Device *)idist_xla_device(group);
    if (stablehlo_failed("execute", api->PJRT_LoadedExecutable_Execute(&args))) return 1;

    await.event = destroy.event = done[0];
    if (stablehlo_failed("await", api->PJRT_Event_Await(&await))) return 1;
    return stablehlo_failed("destroy", api->PJRT_Event_Destroy(&destroy));
}

// Frees a program. Accepts NULL.
static inline void stablehlo_free(PJRT_LoadedExecutable *program) {
    STABLEHLO_NEW(PJRT_LoadedExecutable_Destroy_Args, args);

    args.executable = program;
    if (program)
        stablehlo_failed("free",
                         ((const PJRT_Api *)idist_xla_api())->PJRT_LoadedExecutable_Destroy(&args));
}
#endif
