// os/mutex_init.h: what a lock in static memory begins as
//
// Included by base/begin.h, and like that file without a guard: each drop-in has locks of its own.

#define IDIST__OS_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER
