// who: prints where a launcher put each rank. Rank 0 prints a line per rank, after all agreed on a
// sum
//
//     LAUNCHER ./who [status [rank]]
//
//     launcher slurm, size 5, nodes 3
//     rank 0: local 0 of 3, node 0
//     ...
//
// If a status is given, the given rank ends with this status, or all ranks do. WHO_SHOWS=WORD:
// every rank prints the lines of idist_show_config that begin with WORD, and how long the rank took
// to join. WHO_FATE="RANK HOW": RANK ends by SIGKILL if HOW is kill, with status 7 if HOW is exit,
// or with idist_abort and status 9 if HOW is abort. The other ranks then end with status 3. They
// end by SIGABRT if HOW is killA or exitA.

#include "idist.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern char **environ;

typedef struct place {
    int32_t local, local_size, node, nodes;
} place;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void show(const char *word) {
    const char *line = idist_show_config();
    while (*line) {
        int nbytes = (int)strcspn(line, "\n");
        if (strncmp(line, word, strlen(word)) == 0) printf("%.*s\n", nbytes, line);
        line += nbytes;
        if (*line) line++;
    }
}

static int meet_fate(const char *fate, int rank) {
    const char *how = strchr(fate, ' ');
    if (atoi(fate) == rank && how) {
        if (strncmp(how, " kill", 5) == 0) raise(SIGKILL);
        if (strncmp(how, " exit", 5) == 0) _Exit(7);
        idist_abort(NULL);
        return 9;
    }
    while (idist_barrier(NULL) == IDIST_OK) continue;
    if (how && strchr(how, 'A')) abort();
    idist_finalize();
    return 3;
}

int main(int argc, char **argv) {
    int32_t sum = 1, vars = 0;
    place own, *all;
    int64_t begun_ms = now_ms();
    for (int i = 0; environ[i]; i++) vars += (int32_t)strlen(environ[i]);
    if (idist_initialize(NULL) != IDIST_OK) {
        fprintf(stderr, "%s\n", idist_last_error());
        return 1;
    }
    int64_t joined_ms = now_ms();
    for (int i = 0; environ[i]; i++) vars -= (int32_t)strlen(environ[i]);
    int rank = idist_get_rank(), n = idist_get_world_size();
    own.local = idist_get_local_rank();
    own.local_size = idist_get_nproc_per_node();
    own.node = idist_get_node_rank();
    own.nodes = idist_get_nnodes();
    all = (place *)calloc((size_t)n, sizeof *all);
    if (!all || idist_all_gather(&own, all, 4, IDIST_I32, NULL) != IDIST_OK ||
        idist_all_reduce(&sum, &sum, 1, IDIST_I32, IDIST_SUM, NULL) != IDIST_OK || sum != n ||
        vars != 0) {
        fprintf(stderr, "rank %d: sum %d of %d, environment changed by %d: %s\n", rank, sum, n,
                vars, idist_last_error());
        return 1;
    }
    if (getenv("WHO_FATE")) {
        free(all);
        return meet_fate(getenv("WHO_FATE"), rank);
    }
    if (getenv("WHO_SHOWS")) {
        show(getenv("WHO_SHOWS"));
        printf("joined in %d ms\n", (int)(joined_ms - begun_ms));
    }
    if (rank == 0) printf("launcher %s, size %d, nodes %d\n", idist_launcher(), n, own.nodes);
    for (int i = 0; rank == 0 && i < n; i++)
        printf("rank %d: local %d of %d, node %d\n", i, all[i].local, all[i].local_size,
               all[i].node);
    free(all);
    if (idist_finalize() != IDIST_OK) return 1;
    return argc > 1 && (argc < 3 || atoi(argv[2]) == rank) ? atoi(argv[1]) : 0;
}
