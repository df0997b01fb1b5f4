// os_body: a test replaces src/os/linux with its own body. Its clock runs a hundred times as fast,
// so a time-out of 20 s takes 200 ms.
#define IDIST__OS_BODIES "fast_os.h"
#define IDIST_IMPLEMENTATION
#include "idist.h"

#include "tap.h"

int main(void) {
    int64_t begin_ns = fast_os_real_ns(), real_ms;
    idist_opts opts;
    idist_status status;
    int x = 0;

    memset(&opts, 0, sizeof opts);
    opts.timeout_ms = 20000;
    tap_ok(idist_initialize(NULL) == IDIST_OK, "a world of 1 begins");
    status = idist_recv(&x, 1, IDIST_I32, 0, 7, NULL, &opts);
    real_ms = (fast_os_real_ns() - begin_ns) / 1000000;
    tap_is(status, IDIST_ERR_TIMEOUT, "a receive without a message times out");
    tap_like(idist_last_error(), "not done after 2", "after 20 s of its own time, or a few more");
    tap_ok(real_ms >= 190 && real_ms < 10000, "which takes about 200 ms");
    tap_diag("%d ms", (int)real_ms);
    tap_ok(idist_finalize() == IDIST_OK, "it ends");
    return tap_done();
}
