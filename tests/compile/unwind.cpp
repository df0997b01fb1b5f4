// unwind: functions of a C++ program that throw, longjmp or exit their thread inside idist
//
// unwind CASE HOW runs the case and prints the lines that unwind.sh compares. HOW says how the
// worker's function ends.
#ifdef WITH_TRAIN
#include "idist.hpp"
#include "idist_train.h"
#else
#include "idist.h"
#endif

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <pthread.h>
#include <stdexcept>
#include <string>
#include <unistd.h>

namespace {

std::string how; // how the worker's function ends
std::jmp_buf before;
pid_t parent;

int worker(int local_rank, void *) {
    float x = 1;
    if (local_rank == 1 && how == "throw") throw std::runtime_error("no such map");
    if (local_rank == 1 && how == "throw-int") throw 5;
    if (local_rank == 1 && how == "longjmp") std::longjmp(before, 1);
    if (local_rank == 1 && how == "pthread_exit") pthread_exit(nullptr);
    if (local_rank == 1 && how == "own-longjmp") {
        static std::jmp_buf own;
        // stays inside the function, so there is nothing to report
        if (setjmp(own) == 0) std::longjmp(own, 1);
    }
    return idist_all_reduce(&x, &x, 1, IDIST_F32, IDIST_SUM, nullptr) != IDIST_OK;
}

// Spawns two workers. Prints "second parent" if a worker returns from this call.
int spawn(bool parallel, const char *start_method) {
    idist_desc d;
    idist_status status = IDIST_OK;
    std::memset(&d, 0, sizeof d);
    d.nproc_per_node = 2;
    d.timeout_ms = d.init_timeout_ms = 20000;
    d.start_method = start_method;
    if (setjmp(before) == 0) {
        try {
            status = parallel ? idist_parallel_run(&d, worker, nullptr)
                              : idist_spawn(worker, nullptr, 2, &d);
        } catch (...) {
            std::puts("an exception came out of idist");
        }
    }
    if (getpid() != parent || std::getenv("IDIST_SPAWN")) std::puts("second parent");
    else std::printf("%s %s\n", idist_status_name(status), status ? idist_last_error() : "");
    return 0;
}

bool throws;

void op(const void *in, void *inout, size_t count, idist_dtype, void *) {
    if (throws) throw std::runtime_error("overflow in the op");
    for (size_t i = 0; i < count; i++)
        static_cast<float *>(inout)[i] += static_cast<const float *>(in)[i];
}

int task(void *) { throw std::runtime_error("no such data set"); }

void *allocate(size_t nbytes, void *) {
    if (throws) throw std::bad_alloc();
    return std::malloc(nbytes);
}

void give_back(void *p, void *) { std::free(p); }
void log_line(idist_log_level, const char *, void *) { throw std::runtime_error("disk full"); }

// Prints the status that this rank got and its error text.
void report(const char *what, idist_status status) {
    static int rank = -1; // still needed after the world is closed
    if (idist_is_initialized()) rank = idist_get_rank();
    std::printf("rank %d %s: %s %s\n", rank, what, idist_status_name(status),
                status ? idist_last_error() : "");
}

int op_rank(int count) {
    idist_op sum;
    std::string x(4 * static_cast<size_t>(count), '\0');
    if (idist_op_create(op, nullptr, true, nullptr, &sum)) return 1;
    throws = idist_get_rank() == 1;
    report("op",
           idist_all_reduce(&x[0], &x[0], static_cast<size_t>(count), IDIST_F32, sum, nullptr));
    throws = false;
    report("next", idist_barrier(nullptr));
    return 0;
}

#ifdef WITH_TRAIN
void order(size_t *, size_t, uint64_t, int, void *) { throw std::runtime_error("no order"); }

int fetch(void *, const size_t *, size_t, void *) { throw std::runtime_error("no such image"); }

int metric(const void *, size_t, void *, double *) { throw std::runtime_error("no metric"); }

int track(const idist_scalar *, void *) { throw std::runtime_error("no tracker"); }

idist_status start(idist_bucket *, void *) { throw std::runtime_error("no codec"); }
idist_status finish(idist_bucket *, void *) { return IDIST_OK; }

// Tests functions of the program that the training helpers call.
void train_case(const std::string &name) {
    if (name == "order") {
        idist_sampler_desc d;
        idist_sampler *sampler = nullptr;
        std::memset(&d, 0, sizeof d);
        d.length = 10;
        d.order_fn = order;
        report("order", idist_sampler_create(&d, &sampler));
    }
    if (name == "fetch" || name == "fetch-threads") {
        idist_loader_desc d;
        idist_sampler_desc sd;
        idist_loader *loader = nullptr;
        idist_batch batch;
        std::memset(&d, 0, sizeof d);
        std::memset(&sd, 0, sizeof sd);
        sd.length = 10;
        if (idist_sampler_create(&sd, &d.sampler)) return;
        d.batch_size = 2;
        d.batch_nbytes = 8;
        d.fetch = fetch;
        d.num_workers = name == "fetch" ? 0 : 2;
        if (idist_loader_create(&d, &loader)) return report("create", IDIST_ERR_ARG);
        report(name.c_str(), idist_loader_next(loader, &batch));
        idist_loader_free(&loader);
        idist_sampler_free(&d.sampler);
    }
    if (name == "metric") {
        double value = 0;
        float row = 1;
        report("metric", idist_epoch_metric(&row, 1, sizeof row, metric, nullptr, &value, nullptr));
    }
    if (name == "track") {
        idist_summary_desc d;
        idist_summary *summary = nullptr;
        std::memset(&d, 0, sizeof d);
        d.no_csv = d.no_tensorboard = true;
        d.track = track;
        if (idist_summary_create(&d, &summary)) return report("create", IDIST_ERR_ARG);
        report("track", idist_summary_add(summary, "loss", 1, 1));
        idist_summary_free(&summary);
    }
    if (name == "hook") {
        float parameter = 1, gradient = 2;
        idist_tensor p = {&parameter, 1, IDIST_F32}, g = {&gradient, 1, IDIST_F32};
        idist_ddp_hook hook;
        idist_ddp_desc d;
        idist_ddp *ddp = nullptr;
        std::memset(&hook, 0, sizeof hook);
        std::memset(&d, 0, sizeof d);
        hook.start = start;
        hook.finish = finish;
        d.params = &p;
        d.grads = &g;
        d.n = 1;
        d.hook = &hook;
        if (idist_ddp_create(&d, &ddp)) return report("create", IDIST_ERR_ARG);
        report("hook", idist_ddp_wait(ddp));
        idist_ddp_free(&ddp);
    }
    if (name == "op-hpp") {
        const idist::op<float> sum([](float a, float b) -> float {
            if (idist_get_rank() == 1) throw std::runtime_error("no sum");
            return a + b;
        });
        try {
            (void)idist::all_reduce(1.0f, sum);
            report("op-hpp", IDIST_OK);
        } catch (const idist::error &e) {
            report("op-hpp", e.status());
        }
    }
    report("next", idist_barrier(nullptr));
}
#endif

int rank_case(const std::string &name) {
    idist_desc d;
    std::memset(&d, 0, sizeof d);
    d.timeout_ms = d.init_timeout_ms = 20000;
    if (name == "alloc") d.allocator = {allocate, give_back, nullptr};
    if (name == "log") d.logger.log_fn = log_line;
    if (idist_initialize(&d)) {
        report("initialize", IDIST_ERR_STATE);
        return 1;
    }
#ifdef WITH_TRAIN
    if (name == "order" || name == "fetch" || name == "fetch-threads" || name == "metric" ||
        name == "track" || name == "hook" || name == "op-hpp")
        train_case(name);
#endif
    if (name == "op") op_rank(3);
    if (name == "op-large") op_rank(300000);
    if (name == "first") {
        report("first", idist_one_rank_first(task, nullptr, 1, false, nullptr));
        report("next", idist_barrier(nullptr));
    }
    if (name == "only") {
        report("only", idist_one_rank_only(task, nullptr, 1, true, nullptr));
        report("next", idist_barrier(nullptr));
    }
    if (name == "alloc") {
        idist_group *group = nullptr;
        throws = idist_get_rank() == 1;
        report("split", idist_split(nullptr, 0, 0, &group));
        throws = false;
    }
    if (name == "log" && idist_get_rank() == 1) idist_abort(nullptr); // logs a warning
    if (name == "log") report("next", idist_barrier(nullptr));
    report("finalize", idist_finalize());
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    std::string name = argc > 1 ? argv[1] : "";
    parent = getpid();
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    if (argc > 2) how = argv[2];
    if (name == "fork") return spawn(false, "fork");
    if (name == "exec") return spawn(false, "exec");
    if (name == "parallel") return spawn(true, "fork");
    // Calls parallel_run in a world that a launcher has started.
    if (name == "join") {
        idist_desc d;
        std::memset(&d, 0, sizeof d);
        d.timeout_ms = d.init_timeout_ms = 20000;
        report("join", idist_parallel_run(&d, worker, nullptr));
        return 0;
    }
    return rank_case(name);
}
