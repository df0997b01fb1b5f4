// env.c - fuzzes the launch detection: whatever the environment contains, idist_initialize joins a
// world of 1 or fails
//
// The input consists of lines. The first byte of each line picks a name from the list below, and
// the rest is the value. The list has no init methods, because a random file:// would create files.
// No input may make the library crash, wait for long, or leave a world behind after a failure.
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include <stdlib.h>
#include <string.h>

// clang-format off
static const char *const names[] = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "IDIST_RANK", "IDIST_WORLD_SIZE",
    "IDIST_BACKEND", "IDIST_TRANSPORT", "IDIST_ALGO", "IDIST_TIMEOUT_MS", "IDIST_SECRET",
    "IDIST_HOSTID", "IDIST_LOG", "IDIST_SOCKETS"};
// clang-format on
enum { N_NAMES = sizeof names / sizeof names[0] };

static void drop_log(idist_log_level level, const char *line, void *user) {
    (void)level;
    (void)line;
    (void)user;
}

// Unsets all variables of the list and sets those that the input contains.
static void set_environment(const char *text, size_t nbytes) {
    for (int i = 0; i < N_NAMES; i++) unsetenv(names[i]);
    while (nbytes > 0) {
        const char *end = (const char *)memchr(text, '\n', nbytes);
        size_t n = end ? (size_t)(end - text) : nbytes;
        char value[256];
        if (n > 1 && n < sizeof value) {
            memcpy(value, text + 1, n - 1);
            value[n - 1] = 0;
            setenv(names[(unsigned char)text[0] % N_NAMES], value, 1);
        }
        text += n + (end ? 1 : 0);
        nbytes -= n + (end ? 1 : 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    idist_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.logger.log_fn = drop_log;
    // A larger world waits for ranks that do not exist, so the time-outs are short. The library
    // parses the numbers before it waits.
    desc.init_timeout_ms = 20;
    desc.timeout_ms = 20;
    set_environment((const char *)data, nbytes);
    idist_status status = idist_initialize(&desc);
    if (status == IDIST_OK && (idist_get_world_size() != 1 || idist_finalize() != IDIST_OK))
        abort();
    if (status != IDIST_OK && (idist_last_error()[0] == 0 || idist_is_initialized())) abort();
    return 0;
}
