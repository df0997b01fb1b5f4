// from_mpi.c - the statements of docs/from-mpi.md, exactly as the page prints them. Checks what
// they do. from_mpi.sh compares this file with the page, and runs the program with 1 to 4 ranks.
#include "idist.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 4 };

#define CHECK(call)                                                                \
    do {                                                                           \
        if ((call) == IDIST_OK) break;                                             \
        fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, idist_last_error()); \
        exit(1);                                                                   \
    } while (0)
#define REQUIRE(condition)                                                \
    do {                                                                  \
        if (condition) break;                                             \
        fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition); \
        exit(1);                                                          \
    } while (0)

// clang-format off

static void communicators(int rank, int n, idist_group *group) {
    idist_group *self, *copy, *host, *joint, *other;
    int i, ranks[MAX_RANKS], both[MAX_RANKS];
    idist_request request;

    CHECK(idist_barrier(NULL));
    idist_new_group_by_members(NULL, &rank, 1, 0, &self);
    REQUIRE(idist_group_size(self) == 1 && idist_group_rank(self) == 0);
    idist_split(group, 0, idist_group_rank(group), &copy);
    REQUIRE(idist_group_rank(copy) == idist_group_rank(group));
    idist_free_group(&copy);
    idist_split_start(group, 0, idist_group_rank(group), &copy, &request);
    CHECK(idist_wait(&request));
    REQUIRE(idist_group_size(copy) == n);
    idist_split(NULL, idist_get_node_rank(), 0, &host);
    REQUIRE(idist_group_size(host) == n);
    for (i = 0; i < n; i++) ranks[i] = idist_group_translate(group, i, NULL);
    REQUIRE(ranks[n - 1] == n - 1);
    for (i = 0; i < n; i++) both[i] = n - 1 - i;
    idist_new_group_by_members(NULL, both, n, 1, &joint);
    other = host;
    REQUIRE(idist_group_rank(joint) == n - 1 - rank);
    REQUIRE(idist_group_translate(group, 0, other) == 0);
    CHECK(idist_free_group(&self));
    CHECK(idist_free_group(&copy));
    CHECK(idist_free_group(&joint));
    CHECK(idist_free_group(&host));
}

static void groups_of_two(int rank) {
    idist_group *group;
    int ranks[2] = {1, 0};

    idist_new_group(ranks, 2, &group);
    REQUIRE(idist_group_rank(group) == (rank < 2 ? rank : -1));
    idist_free_group(&group);
    if (rank > 1) return;
    idist_new_group_by_members(NULL, ranks, 2, 0, &group);
    REQUIRE(idist_group_rank(group) == 1 - rank);
    idist_free_group(&group);
}

static void grids(int rank, int n) {
    idist_group *row;
    int i, dims[2], coords[2], right, me = rank;

    for (dims[0] = 1, i = 1; i * i <= n; i++) if (n % i == 0) dims[0] = i;
    dims[1] = n / dims[0];
    REQUIRE(dims[0] * dims[1] == n && dims[0] <= dims[1]);
    coords[0] = rank / dims[1], coords[1] = rank % dims[1];
    rank = coords[0] * dims[1] + coords[1];
    REQUIRE(rank == me);
    right = coords[0] * dims[1] + (coords[1] + 1) % dims[1];
    REQUIRE(right >= 0 && right < n);
    idist_split(NULL, coords[0], coords[1], &row);
    REQUIRE(idist_group_size(row) == dims[1] && idist_group_rank(row) == coords[1]);
    CHECK(idist_free_group(&row));
}

static void messages(int rank, int n) {
    float x[3] = {1, 2, 3}, copy[3], y[2][3];
    int next = rank + 1, last = (rank + n - 1) % n, i, to[2], from[2];
    idist_request request;
    idist_opts opts = {0};
    bool cancelled;

    if (next < n) idist_send(x, 3, IDIST_F32, next, 0, NULL);
    if (rank > 0) CHECK(idist_recv(copy, 3, IDIST_F32, rank - 1, 0, NULL, NULL));
    next %= n;
    if (rank == 0 && n > 1) { // MPI_Ssend
        idist_send(x, 3, IDIST_F32, 1, 1, NULL);
        idist_recv(NULL, 0, IDIST_U8, 1, 2, NULL, NULL);
    } else if (rank == 1) {
        CHECK(idist_recv(copy, 3, IDIST_F32, 0, 1, NULL, NULL));
        idist_send(NULL, 0, IDIST_U8, 0, 2, NULL);
    }

    opts.request = &request; // MPI_Bsend
    memcpy(copy, x, sizeof x);
    idist_send(copy, 3, IDIST_F32, next, 3, &opts);
    CHECK(idist_recv(y[0], 3, IDIST_F32, last, 3, NULL, NULL));
    idist_wait(&request);
    idist_sendrecv(copy, 3, next, 4, x, 3, last, 4, IDIST_F32, NULL, NULL);
    REQUIRE(x[2] == 3 && y[0][1] == 2);

    to[0] = from[1] = next, to[1] = from[0] = last;
    idist_group_begin();
    for (i = 0; i < 2; i++) {
        idist_send(x, 3, IDIST_F32, to[i], 5, NULL);
        idist_recv(y[i], 3, IDIST_F32, from[i], 5, NULL, NULL);
    }
    CHECK(idist_group_end());
    idist_group_begin();
    idist_group_end();

    opts.request = &request;
    REQUIRE(idist_recv(y, 3, IDIST_F32, last, 99, NULL, &opts) == IDIST_OK);
    idist_cancel(&request, &cancelled);
    REQUIRE(cancelled && idist_wait(&request) == IDIST_ERR_CANCELLED);
}

static void requests_and_plans(void) {
    idist_request request, requests[2];
    size_t index, count, indices[2];
    idist_opts opts = {0};
    idist_plan *plan;
    bool done = false;
    int i;

    idist_plan_create(&plan);
    opts.plan = plan;
    CHECK(idist_barrier(&opts));
    idist_plan_start(plan, &request);
    while (!done) idist_test(&request, &done);
    CHECK(idist_plan_free(&plan));
    opts.plan = NULL;

    for (i = 0; i < 2; i++) {
        opts.request = &requests[i];
        CHECK(idist_barrier(&opts));
    }
    idist_wait_all(requests, 2);
    for (i = 0; i < 2; i++) {
        opts.request = &requests[i];
        CHECK(idist_barrier(&opts));
    }
    idist_wait_any(requests, 2, &index);
    idist_wait_some(requests, 2, indices, &count);
    REQUIRE(index < 2 && count == 1 && indices[0] == 1 - index);
    idist_test_all(requests, 2, &done);
    REQUIRE(done);
    opts.request = &request;
    CHECK(idist_barrier(&opts));
    idist_request_free(&request);
}

static void largest(const void *in, void *inout, size_t count, idist_dtype dtype, void *arg) {
    const float *a = (const float *)in;
    float *b = (float *)inout;
    size_t i;

    (void)dtype, (void)arg;
    for (i = 0; i < count; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
}

static void collectives(int rank, int n) {
    float x[3] = {1, 2, (float)rank}, sum[3] = {1, 1, 1}, all[3 * MAX_RANKS];
    double z[2 * 3] = {1, 2, 3, 4, 5, 6};
    idist_op op;

    idist_op_create(largest, NULL, true, NULL, &op);
    CHECK(idist_all_reduce(x, sum, 3, IDIST_F32, op, NULL));
    REQUIRE(sum[2] == (float)(n - 1));
    idist_op_free(op, NULL);
    idist_reduce_local(x, sum, 3, IDIST_F32, IDIST_SUM);
    REQUIRE(sum[0] == 2 && sum[2] == (float)(n - 1 + rank));
    idist_all_reduce(x, x, 3, IDIST_F32, IDIST_SUM, NULL);
    REQUIRE(x[1] == 2 * (float)n);
    memcpy(all + 3 * rank, x, sizeof x);
    idist_all_gather(all + 3 * rank, all, 3, IDIST_F32, NULL);
    REQUIRE(all[3 * n - 2] == 2 * (float)n);
    idist_all_reduce(z, z, 2 * 3, IDIST_F64, IDIST_SUM, NULL);
    REQUIRE(z[5] == 6 * n);
}

typedef struct particle {
    double position[3];
    int kind;
} particle;

static void types(void) {
    double matrix[3][2] = {{1, 2}, {3, 4}, {5, 6}}, column[3];
    long number = 7, got = 0;
    unsigned char packed[64];
    size_t at = 0, i;
    idist_dtype dtype;
    particle p = {{1, 2, 3}, 4};

    dtype = IDIST_DTYPE(&number);
    REQUIRE(idist_dtype_size(dtype) == sizeof number);
    idist_dtype_create(sizeof(long double), "long double", NULL, &dtype);
    REQUIRE(idist_dtype_size(dtype) == sizeof(long double));
    CHECK(idist_dtype_free(dtype, NULL));
    idist_dtype_create(sizeof(particle), "particle", NULL, &dtype);
    CHECK(idist_broadcast(&p, 1, dtype, 0, NULL));
    idist_dtype_free(dtype, NULL);
    for (i = 0; i < 3; i++) column[i] = matrix[i][1];
    CHECK(idist_broadcast(column, 3, IDIST_F64, 0, NULL));
    memcpy(packed + at, &number, sizeof number);
    at += sizeof number;
    CHECK(idist_broadcast(packed, at, IDIST_U8, 0, NULL));
    memcpy(&got, packed, sizeof got);
    REQUIRE(got == 7 && column[2] == 6 && p.kind == 4);
}

static void files(int rank, int n, const char *path) {
    char text[16];
    uint64_t nbytes = (uint64_t)snprintf(text, sizeof text, "rank %d\n", rank), offset = 0;
    int file = open(path, O_WRONLY | O_CREAT, 0600);
    ssize_t written;
    void *p;

    idist_exscan(&nbytes, &offset, 1, IDIST_U64, IDIST_SUM, NULL);
    written = pwrite(file, text, nbytes, (off_t)offset);
    REQUIRE(written == (ssize_t)nbytes && offset == 7 * (uint64_t)rank);
    CHECK(idist_barrier(NULL));
    REQUIRE(lseek(file, 0, SEEK_END) == 7 * n);
    close(file);
    p = idist_alloc(1000, NULL);
    REQUIRE(p != NULL);
    idist_free(p);
}

static void worlds(int rank, int n) {
    idist_group *world;
    idist_store *store;
    struct timespec now;
    int64_t next;
    idist_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.world_size = 1; // by itself
    (void)rank, (void)n;
    idist_open(&desc, &world);
    REQUIRE(idist_group_size(world) == 1);
    CHECK(idist_close(&world));
    CHECK(idist_store_open("mem://", NULL, &store));
    idist_store_add(store, "next", 1, &next);
    REQUIRE(next == 1);
    CHECK(idist_store_close(&store));
    clock_gettime(CLOCK_MONOTONIC, &now);
    REQUIRE(now.tv_sec >= 0 && idist_is_initialized() && idist_hostname()[0]);
    REQUIRE(idist_status_string(IDIST_OK)[0] && idist_show_config()[0]);
}

static int work(int local_rank, void *arg) {
    int rank = idist_get_rank(), n = idist_get_world_size();
    idist_group *group;

    (void)local_rank;
    CHECK(idist_split(NULL, 0, rank, &group));
    communicators(rank, n, group);
    if (n > 1) groups_of_two(rank);
    grids(rank, n);
    messages(rank, n);
    requests_and_plans();
    collectives(rank, n);
    types();
    files(rank, n, (const char *)arg);
    worlds(rank, n);
    idist_free_group(&group);
    CHECK(idist_barrier(NULL));
    if (n == 1) {
        idist_abort(NULL);
        REQUIRE(idist_barrier(NULL) == IDIST_ERR_ABORTED);
    }
    printf("rank %d of %d: fine\n", rank, n);
    return 0;
}

// clang-format on

int main(int argc, char **argv) {
    idist_desc desc;

    if (argc < 3) return 2;
    memset(&desc, 0, sizeof desc);
    desc.timeout_ms = desc.init_timeout_ms = 20000;
    if (idist_spawn(work, argv[2], atoi(argv[1]), &desc) == IDIST_OK) return 0;
    fprintf(stderr, "%s\n", idist_last_error());
    return 1;
}
