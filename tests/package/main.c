// main.c - two ranks add up their numbers. Without arguments, the program spawns the ranks. With an
// argument, it joins the ranks of a launcher.
#include <idist.h>
#include <stdio.h>
#include <string.h>

static int work(int local_rank, void *arg) {
    float x = 1.0f + (float)idist_get_rank();
    (void)local_rank;
    (void)arg;

    if (idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, NULL) != IDIST_OK) return 1;
    printf("rank %d of %d over %s: %g, idist %s\n", idist_get_rank(), idist_get_world_size(),
           idist_backend(), (double)x, IDIST_VERSION);
    return 0;
}

int main(int argc, char **argv) {
    idist_desc desc;
    (void)argv;

    memset(&desc, 0, sizeof desc);
    if (argc == 1) desc.nproc_per_node = 2;
    if (idist_parallel_run(&desc, work, NULL) == IDIST_OK) return 0;
    fprintf(stderr, "%s\n", idist_last_error());
    return 1;
}
