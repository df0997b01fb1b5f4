// test.c - two ranks add up their numbers.
#define IDIST_IMPLEMENTATION
#include <idist.h>
#include <stdio.h>

static int work(int local_rank, void *arg) {
    float x = 1.0f + (float)local_rank;
    (void)arg;
    if (idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK) return 1;
    printf("rank %d of %d: %g, idist %s\n", idist_get_rank(), idist_get_world_size(), (double)x,
           IDIST_VERSION);
    return x < 3.0f || x > 3.0f;
}

int main(void) {
    if (idist_spawn(work, NULL, 2, NULL) == IDIST_OK) return 0;
    fprintf(stderr, "%s\n", idist_last_error());
    return 1;
}
