// cxx.h - the API from C++17: exceptions, templates over the dtype, RAII, function objects; include
// idist.h or idist_train.h first
#ifndef EXAMPLES_CXX_H
#define EXAMPLES_CXX_H

#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <vector>

inline void check(idist_status status) {
    if (status != IDIST_OK) throw std::runtime_error(idist_last_error());
}

// ---- templates over the dtype ----

template <class T> T sum(T value) {
    check(idist_all_reduce(&value, &value, 1, IDIST_DTYPE(&value), IDIST_SUM, nullptr));
    return value;
}

template <class T> void broadcast(std::vector<T> &values, int root) {
    check(idist_broadcast(values.data(), values.size(), IDIST_DTYPE(values.data()), root, nullptr));
}

// ---- RAII ----

class world {
  public:
    explicit world(const idist_desc &desc) { check(idist_initialize(&desc)); }
    world(const world &) = delete;
    world &operator=(const world &) = delete;
    ~world() {
        const bool failing = std::uncaught_exceptions() > 0;

        if (failing) idist_abort(nullptr); // the others fail, instead of waiting for this one
        if (idist_finalize() != IDIST_OK && !failing)
            std::fprintf(stderr, "%s\n", idist_last_error());
    }
};

class request { // stays where it is: idist has its address
  public:
    request() = default;
    request(const request &) = delete;
    request &operator=(const request &) = delete;
    ~request() { idist_wait(&r); }
    void wait() { check(idist_wait(&r)); }
    const idist_opts *opts() { return &o; }

  private:
    idist_request r{};
    idist_opts o{nullptr, &r, nullptr, 0, nullptr};
};

template <class T, void (*Free)(T **)> struct freed_by {
    void operator()(T *p) const { Free(&p); }
};
template <class T, void (*Free)(T **)> using handle = std::unique_ptr<T, freed_by<T, Free>>;

// Free comes first, because T and Desc follow from the arguments: create<idist_ddp_free>(
// idist_ddp_create, desc).
template <auto Free, class T, class Desc>
handle<T, Free> create(idist_status (*make)(const Desc *, T **), const Desc &desc) {
    T *p = nullptr;

    check(make(&desc, &p));
    return handle<T, Free>(p);
}

// ---- function objects ----

// Runs work(local_rank) on every rank.
template <class F> void parallel_run(const idist_desc &desc, F &work) {
    const idist_worker_fn call = [](int local_rank, void *arg) {
        try {
            return (*static_cast<F *>(arg))(local_rank);
        } catch (const std::exception &e) {
            std::fprintf(stderr, "rank %d: %s\n", idist_get_rank(), e.what());
            return 1;
        }
    };

    check(idist_parallel_run(&desc, call, &work));
}

#endif // EXAMPLES_CXX_H
