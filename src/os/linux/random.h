// os/linux/random.h: random bytes
#pragma once

#include "os/random.h"
#include "os/unwind.h"
#include "os/clock.h"

// Gets up to nbytes random bytes. Returns their number, or -1 with errno. Makes the system call by
// number, because glibc before 2.25 has no getrandom(). Kernels before 3.17 do not have the call.
static ssize_t idist__os_random_some(void *buf, size_t nbytes) {
    ssize_t n = -1;
    int fd;

#ifdef SYS_getrandom
    n = syscall(SYS_getrandom, buf, nbytes, 0);
    if (n >= 0 || errno == EINTR) return n;
#endif
    fd = IDIST__OS_CALL(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
    if (fd < 0) return -1;

    do n = IDIST__OS_CALL(read(fd, buf, nbytes));
    while (n < 0 && errno == EINTR);
    IDIST__OS_CALL(close(fd));

    return n > 0 ? n : -1;
}

static void idist__os_random(void *buf, size_t nbytes) {
    unsigned char *p = (unsigned char *)buf;

    while (nbytes) {
        ssize_t n = idist__os_random_some(p, nbytes);

        if (n > 0) {
            p += n;
            nbytes -= (size_t)n;
        } else if (errno != EINTR) {
            int64_t mix =
                idist__os_clock_now_ns() ^ ((int64_t)getpid() << 32) ^ (int64_t)(uintptr_t)p;
            size_t k = nbytes < sizeof mix ? nbytes : sizeof mix;
            memcpy(p, &mix, k);
            p += k;
            nbytes -= k;
        }
    }
}
