// idist.hpp: values, sizes that do not fit, errors on all ranks, and destructors while an exception
// unwinds the stack. The ranks are threads of this process, so that the address sanitizer sees
// everything that they leak.
#include "idist.hpp"

#include "ranks.h"

#include <array>
#include <cmath>
#include <functional>
#include <thread>

typedef std::function<void(idist::world &)> body;

// Throws `text` if the condition is false. The test case then fails and prints the text.
static void require(bool right, const char *text) {
    if (!right) throw std::logic_error(text);
}
#define REQUIRE(condition) require((condition), #condition)

// Returns true if f throws an idist::error with this status and text, and false if f throws
// nothing. Throws std::logic_error if f throws another idist::error.
static bool throws(idist_status status, const char *text, const std::function<void()> &f) {
    try {
        f();
    } catch (const idist::error &e) {
        if (e.status() == status && strstr(e.what(), text)) return true;
        throw std::logic_error(std::string("another error: ") + e.name() + ": " + e.what());
    }
    return false;
}

static void run_rank(const idist_desc &desc, const body &f, std::string &failure) {
    try {
        idist::world world = idist::world::open(desc);
        f(world);
    } catch (const std::exception &e) {
        failure = e.what();
    }
}

// Runs f on n ranks as one test case. The case passes if no rank throws, except that rank n - 1
// must throw `expected` if that is not empty.
static void run(int n, const char *name, const body &f, const char *expected = "") {
    std::vector<std::thread> threads;
    std::vector<std::string> failures(static_cast<size_t>(n));
    idist_store *store = nullptr;
    bool right = idist_store_open("mem://", nullptr, &store) == IDIST_OK;

    tap_running("%s with %d ranks", name, n);
    for (int r = 0; r < n; r++) {
        idist_desc desc = idist_desc();
        desc.store = store;
        desc.rank = r;
        desc.world_size = n;
        desc.timeout_ms = desc.init_timeout_ms = RANKS_TIMEOUT_MS * test_slow_factor();
        threads.emplace_back(run_rank, desc, std::cref(f), std::ref(failures[size_t(r)]));
    }
    for (auto &thread : threads) thread.join();
    idist_store_close(&store);

    for (int r = 0; r < n; r++) right = right && failures[size_t(r)] == (r < n - 1 ? "" : expected);
    tap_ok(right, "%s with %d ranks", name, n);
    for (int r = 0; r < n && !right; r++)
        tap_diag("rank %d: %s", r, failures[size_t(r)].empty() ? "-" : failures[size_t(r)].c_str());
}

//------------------------------------------------------------------------------
// values
//------------------------------------------------------------------------------

static void reductions(idist::world &world) {
    const int n = world.size(), r = world.rank();
    const float all = static_cast<float>(n * (n + 1)) / 2;
    std::vector<float> x(1000, static_cast<float>(r + 1)), y(1000);
    const std::vector<float> &constant = x;
    std::array<int, 3> small = {{r, 1, -r}};
    double array[2] = {1.5, static_cast<double>(r)};

    idist::all_reduce(constant, y, idist::sum, world);
    REQUIRE(y == std::vector<float>(1000, all) && x[0] == static_cast<float>(r + 1));
    idist::all_reduce(x, idist::max, world);
    REQUIRE(x[999] == static_cast<float>(n));
    idist::all_reduce(small, idist::min, idist::options(world).timeout(std::chrono::seconds(20)));
    REQUIRE(small[0] == 0 && small[2] == 1 - n);
    idist::all_reduce(array, idist::sum, world);
    REQUIRE(array[0] == 1.5 * n);
    idist::all_reduce(idist::make_span(array, 1), idist::max, world);
    idist::reduce(small, idist::sum, n - 1, world);
    REQUIRE(small[1] == (r == n - 1 ? n : 1));

    REQUIRE(idist::all_reduce(r, idist::max, world) == n - 1);
    REQUIRE(idist::all_reduce(r == 0, idist::lor, world));
    REQUIRE(idist::all_reduce(r == 0, idist::land, world) == (n == 1));
    REQUIRE(throws(IDIST_ERR_ARG, "SUM of bool",
                   [&] { (void)idist::all_reduce(true, idist::sum, world); }));
    REQUIRE(idist::scan(r + 1, idist::sum, world) == (r + 1) * (r + 2) / 2);
    REQUIRE(idist::exscan(r + 1, idist::sum, -5, world) == (r ? r * (r + 1) / 2 : -5));
    REQUIRE(idist::reduce(1, idist::sum, 0, world) == (r == 0 ? n : 1));
    REQUIRE(idist::broadcast(r + 7, n - 1, world) == n + 6);
}

static void moves(idist::world &world) {
    const int n = world.size(), r = world.rank();
    const size_t size = size_t(n);
    std::vector<int> mine(2, r), all(2 * size), scattered(2), swapped(size);
    std::vector<size_t> counts(size, 2);

    idist::all_gather(mine, all, world);
    for (size_t i = 0; i < all.size(); i++) REQUIRE(all[i] == int(i) / 2);
    idist::scatter(all, scattered, n - 1, world);
    REQUIRE(scattered[0] == r && scattered[1] == r);
    for (size_t i = 0; i < size; i++) all[i] = r * 100 + int(i);
    idist::all_to_all(idist::make_span(all.data(), size), swapped, world);
    for (size_t i = 0; i < size; i++) REQUIRE(swapped[i] == int(i) * 100 + r);

    std::vector<int> root(r == 0 ? 2 * size : 0);
    idist::gather(mine, root, 0, world);
    REQUIRE(r != 0 || root[2 * size - 1] == n - 1);
    all.assign(2 * size, -1);
    idist::all_gatherv(mine, all, counts, world);
    REQUIRE(all[2 * size - 1] == n - 1);
    idist::gatherv(mine, root, counts, 0, world);
    idist::scatterv(root, counts, scattered, 0, world);
    REQUIRE(scattered[1] == r);
    std::vector<int> again(2 * size);
    idist::all_to_allv(all, counts, again, counts, world);
    REQUIRE(again[0] == r && again[2 * size - 1] == r);
    idist::reduce_scatterv(all, scattered, counts, idist::sum, world);
    REQUIRE(scattered[0] == n * r);
    idist::reduce_scatter(all, scattered, idist::sum, world);
    REQUIRE(scattered[0] == n * r);

    const std::vector<double> halves = idist::all_gather(r * 0.5, world);
    REQUIRE(halves.size() == size && halves[size - 1] == 0.5 * (n - 1));
    REQUIRE(idist::gather(r, 0, world).size() == (r == 0 ? size : 0));
}

static void texts(idist::world &world) {
    const int n = world.size(), r = world.rank();
    std::string text = r == 0 ? std::string(1000, 'x') : "";
    std::vector<double> values(r == 0 ? 3 : 100, 1.0 + r);
    std::vector<size_t> counts;

    idist::broadcast(text, 0, world);
    REQUIRE(text == std::string(1000, 'x'));
    const std::vector<std::string> names =
        idist::all_gather(std::string(size_t(r), 'a') + std::to_string(r), world);
    REQUIRE(int(names.size()) == n && names[size_t(n - 1)].size() == size_t(n));
    REQUIRE(names[size_t(r)].back() == '0' + r);
    idist::broadcast_resize(values, 0, world);
    REQUIRE(values == std::vector<double>(3, 1.0));
    values.assign(size_t(r + 1), r);
    const std::vector<double> all = idist::all_gather_concat(values, world, &counts);
    REQUIRE(all.size() == size_t(n * (n + 1) / 2) && counts[size_t(n - 1)] == size_t(n));
    REQUIRE(all.back() == n - 1);
}

static void messages(idist::world &world) {
    const int n = world.size(), r = world.rank(), next = (r + 1) % n, last = (r + n - 1) % n;
    std::vector<float> x(size_t(r + 1), static_cast<float>(r));
    idist_recv_info info;
    int got = -1;
    const int me[] = {r};
    int from[] = {-1};

    {
        idist::request sending;
        idist::send(x, next, 5, idist::options(world).into(sending));
        const std::vector<float> y = idist::recv_vector<float>(idist::any_source, 5, world, &info);
        REQUIRE(info.source == last && y.size() == size_t(last + 1) && y[0] == float(last));
    } // the destructor of `sending` waits
    idist::together(
        [&] {
            idist::send(me, next, 6, world);
            idist::recv(from, last, 6, world);
        },
        world);
    REQUIRE(from[0] == last);
    info = idist::sendrecv(me, next, 7, idist::make_span(&got, 1), last, 7, world);
    REQUIRE(got == last && info.count == 1);

    idist::request receiving;
    idist::recv(from, last, 8, info, idist::options(world).into(receiving));
    idist::send(r + 0.5, next, 9, world);
    REQUIRE(idist::recv_value<double>(last, 9, world) == last + 0.5);
    REQUIRE(receiving.is_pending());
    REQUIRE(throws(IDIST_ERR_STATE, "not complete",
                   [&] { idist::barrier(idist::options(world).into(receiving)); }));
    idist::send(me, next, 8, world);
    idist::request moved = std::move(receiving);
    REQUIRE(!receiving.is_pending() && moved.is_pending());
    moved.wait();
    REQUIRE(from[0] == last && info.source == last && !moved.is_pending());
    REQUIRE(!idist::iprobe(idist::any_source, idist::any_tag, nullptr, world));
}

struct particle {
    float mass;
    int id;
};
static thread_local idist_dtype particle_dtype;
template <> struct idist::dtype_traits<particle> {
    static idist_dtype value() { return particle_dtype; }
};

static void operations(idist::world &world) {
    const int n = world.size(), r = world.rank();
    const float factor = 10;
    const idist::op<float> weighted([factor](float a,
                                             float b) { return a * factor < b * factor ? b : a; },
                                    true, world);
    const idist::op<int> last([](int, int higher) { return higher; }, false, world);
    const idist::op<float> doubled = idist::op<float>::premul_sum(2.0, world);
    const idist::dtype type(sizeof(particle), "particle", world);
    std::vector<float> x(3, static_cast<float>(r + 1));

    idist::all_reduce(x, weighted, world);
    REQUIRE(x[2] == static_cast<float>(n));
    REQUIRE(idist::all_reduce(r, last, world) == n - 1);
    REQUIRE(idist::all_reduce(1.0f, doubled, world) == static_cast<float>(2 * n));
    particle_dtype = type.get();
    const idist::op<particle> heavier([](const particle &a,
                                         const particle &b) { return a.mass < b.mass ? b : a; },
                                      true, world);
    const particle heaviest =
        idist::all_reduce(particle{static_cast<float>(r), 100 + r}, heavier, world);
    REQUIRE(heaviest.id == 99 + n);
    const idist_f64_i64 where =
        idist::all_reduce(idist_f64_i64{static_cast<double>(-r), r}, idist::minloc, world);
    REQUIRE(where.index == n - 1);
    const idist::float16 one = {0x3c00}, sum = idist::all_reduce(one, idist::max, world);
    REQUIRE(sum.bits == 0x3c00);
}

static void owners(idist::world &world) {
    const int n = world.size(), r = world.rank();
    idist::memory<double> shared(50000, world), other;
    std::vector<idist::request> requests(70); // more than wait_all handles without an allocation
    idist::group half = idist::split(r % 2, 0, world), taken;

    for (auto &value : shared) value = r;
    idist::all_reduce(shared, idist::sum, world);
    REQUIRE(shared[49999] == n * (n - 1) / 2);
    other = std::move(shared);
    REQUIRE(other.size() == 50000 && shared.size() == 0);

    REQUIRE(half.size() == (n + 1 - r % 2) / 2 && half.rank() == r / 2);
    REQUIRE(idist::all_reduce(1, idist::sum, half) == half.size());
    taken = std::move(half);
    REQUIRE(!half && taken.is_member() && taken.translate(0, world.get()) == r % 2);
    REQUIRE(throws(IDIST_ERR_ARG, "moved from", [&] { idist::barrier(half); }));

    for (auto &request : requests) idist::barrier(idist::options(world).into(request));
    idist::wait_all(requests);
    idist::barrier(idist::options(world).into(requests[3]));
    REQUIRE(idist::wait_any(requests) == 3);
    REQUIRE(idist::wait_any(requests) == requests.size());

    std::vector<int> x(10, 1);
    idist::plan plan([&](const idist::options &o) { idist::all_reduce(x, idist::sum, o); }, taken);
    plan.start();
    plan.start(requests[0]);
    while (!requests[0].test()) {}
    REQUIRE(x[9] == taken.size() * taken.size());
    REQUIRE(throws(IDIST_ERR_ARG, "not in together",
                   [&] { idist::together([&] { (void)idist::recv_value<int>(0, 1, world); }); }));
    REQUIRE(throws(IDIST_ERR_ARG, "is in no plan", [&] {
        idist::plan wrong(
            [&](const idist::options &o) { (void)idist::all_reduce(1, idist::sum, o); }, world);
    }));
    idist::plan later = std::move(plan);
    later.start();
}

//------------------------------------------------------------------------------
// errors
//------------------------------------------------------------------------------

// Passes wrong sizes. Only the rank that passes them gets an error. Nothing is sent, and the world
// stays usable.
static void sizes(idist::world &world) {
    const int n = world.size();
    std::vector<int> one(1), two(2), many(size_t(2 * n + 1));
    std::vector<size_t> counts(size_t(n), 2), few(size_t(n + 1), 1);
    idist::request request;

    REQUIRE(throws(IDIST_ERR_ARG, "all_reduce: recv has 2 elements, expected 1",
                   [&] { idist::all_reduce(one, two, idist::sum, world); }));
    REQUIRE(throws(IDIST_ERR_ARG, "all_gather: recv has",
                   [&] { idist::all_gather(two, many, world); }));
    REQUIRE(throws(IDIST_ERR_ARG, "reduce_scatter: send",
                   [&] { idist::reduce_scatter(many, two, idist::sum, world); }));
    if (n > 1)
        REQUIRE(throws(IDIST_ERR_ARG, "all_to_all: send", [&] { idist::all_to_all(many, world); }));
    if (world.rank() == 0) {
        REQUIRE(throws(IDIST_ERR_ARG, "gather: recv", [&] { idist::gather(one, many, 0, world); }));
        REQUIRE(
            throws(IDIST_ERR_ARG, "scatter: send", [&] { idist::scatter(many, one, 0, world); }));
    }
    REQUIRE(throws(IDIST_ERR_ARG, "all_gatherv: the buffer has",
                   [&] { idist::all_gatherv(two, one, counts, world); }));
    REQUIRE(throws(IDIST_ERR_ARG, "all_gatherv: counts has",
                   [&] { idist::all_gatherv(two, many, few, world); }));
    REQUIRE(throws(IDIST_ERR_ARG, "takes no request", [&] {
        (void)idist::all_reduce(1, idist::sum, idist::options(world).into(request));
    }));
    REQUIRE(throws(IDIST_ERR_ARG, "is a temporary", [&] {
        idist::send(std::vector<int>(3), 0, 0, idist::options(world).into(request));
    }));
    REQUIRE(!request.is_pending());
    REQUIRE(idist::all_reduce(1, idist::sum, world) == n);
}

static void mismatch(idist::world &world) {
    std::vector<int> x(size_t(1 + (world.rank() == 0)), 1);
    int caught = 0;

    for (int i = 0; i < 2; i++) // the first call detects the mismatch, the second repeats it
        caught += throws(IDIST_ERR_MISMATCH, "the count differs",
                         [&] { idist::all_reduce(x, idist::sum, world); });
    REQUIRE(caught == 2);
    REQUIRE(idist::error(IDIST_ERR_MISMATCH, "").ends_group());
    REQUIRE(!strcmp(idist::error(IDIST_ERR_MISMATCH, "").name(), "IDIST_ERR_MISMATCH"));
}

// Throws on the last rank while requests and a group are open. The other ranks, which wait for the
// last rank, must get IDIST_ERR_ABORTED.
static void unwinds(idist::world &world) {
    std::vector<float> x(1000, 1), y(1000), z(100000);
    const idist::group group = idist::split(0, 0, world);
    idist::request averaging, receiving, sending;

    if (world.rank() == world.size() - 1) {
        idist::all_reduce(x, idist::sum, idist::options(world).into(averaging));
        idist::recv(y, idist::any_source, 77, idist::options(group).into(receiving));
        idist::send(z, 0, 78, idist::options(group).into(sending)); // nobody receives this
        throw std::runtime_error("exploded");
    }
    REQUIRE(throws(IDIST_ERR_ABORTED, "idist_abort", [&] {
        idist::all_reduce(x, idist::sum, world); // may complete before the last rank throws
        idist::barrier(world);
    }));
    REQUIRE(throws(IDIST_ERR_ABORTED, "idist_abort", [&] { idist::barrier(group); }));
}

// Throws after the request is complete. The destructors must abort neither the group nor the world.
static void unwinds_alone(idist::world &world) {
    std::vector<float> x(1000, 1);

    for (int i = 0; i < 3; i++) {
        try {
            idist::request averaging;
            idist::group group = idist::split(0, 0, world);
            idist::all_reduce(x, idist::max, idist::options(group).into(averaging));
            if (i) averaging.wait();
            else
                while (!averaging.test()) {}
            throw 17;
        } catch (int thrown) {
            REQUIRE(thrown == 17);
        }
    }
    REQUIRE(idist::all_reduce(1, idist::sum, world) == world.size());
}

// Throws inside idist::together on the last rank. The calls made there must end, and all ranks must
// get IDIST_ERR_ABORTED.
static void together_throws(idist::world &world) {
    std::vector<float> x(10);
    int caught = 0;

    if (world.rank() == world.size() - 1) {
        try {
            idist::together(
                [&] {
                    idist::recv(x, idist::any_source, 5, world);
                    throw std::runtime_error("in between");
                },
                world);
        } catch (const std::runtime_error &e) {
            caught += !strcmp(e.what(), "in between");
        }
        REQUIRE(caught == 1);
    }
    REQUIRE(throws(IDIST_ERR_ABORTED, "idist_abort", [&] { idist::barrier(world); }));
}

static void first(idist::world &world) {
    const int n = world.size(), last = n - 1;
    int runs = 0;

    idist::one_rank_first([&] { runs++; }, last, world);
    REQUIRE(runs == 1);
    idist::one_rank_only([&](int) { return ++runs, 0; }, last, world);
    REQUIRE(runs == (world.rank() == last ? 2 : 1));
    try {
        idist::one_rank_first([&] { throw std::out_of_range("no file"); }, last, world);
        require(false, "one_rank_first throws");
    } catch (const std::out_of_range &e) {
        REQUIRE(world.rank() == last && !strcmp(e.what(), "no file"));
    } catch (const idist::error &e) {
        REQUIRE(world.rank() != last && e.status() == IDIST_ERR_CALLBACK);
    }
    idist::barrier(world);
}

//------------------------------------------------------------------------------
// processes
//------------------------------------------------------------------------------

static void spawns(int n) {
    std::vector<int> captured(3, 4);
    idist_desc desc = idist_desc();
    desc.timeout_ms = desc.init_timeout_ms = RANKS_TIMEOUT_MS * test_slow_factor();

    tap_running("spawn of %d", n);
    try {
        idist::spawn(
            [&](int local_rank) {
                const int sum = idist::all_reduce(captured[0], idist::sum);
                return sum == 4 * n && local_rank == idist::rank() ? 0 : 1;
            },
            n, desc);
        idist::spawn([] { idist::barrier(); }, n, desc);
        idist::workers beside([&] { REQUIRE(idist::world_size() == n); }, n, desc);
        while (!beside.poll()) tap_sleep_ms(1);
        beside.wait();
        tap_ok(true, "%d workers run a lambda", n);
    } catch (const std::exception &e) {
        tap_ok(false, "%d workers run a lambda", n);
        tap_diag("%s", e.what());
    }

    tap_running("spawn of %d of which one throws", n);
    try {
        idist::spawn(
            [&](int local_rank) {
                std::vector<float> x(10);
                idist::request request;
                idist::recv(x, idist::any_source, 1, request);
                if (local_rank == n - 1) throw std::runtime_error("exploded in a worker");
                idist::barrier();
            },
            n, desc);
        tap_ok(false, "a worker of %d throws", n);
    } catch (const idist::worker_error &e) {
        tap_is(e.report().rank, n - 1, "a worker of %d throws: the report names it", n);
        tap_like(e.report().text, "exploded in a worker", "with what it threw");
        tap_like(e.what(), "exploded in a worker", "so does the error");
        tap_is(e.status(), IDIST_ERR_WORKER_FAILED, "its status");
    }
}

static idist_report report_of(const std::function<void(int)> &f) {
    idist_desc desc = idist_desc();
    desc.timeout_ms = desc.init_timeout_ms = RANKS_TIMEOUT_MS * test_slow_factor();

    try {
        idist::spawn(f, 2, desc);
    } catch (const idist::worker_error &e) {
        return e.report();
    }
    return idist_report();
}

static void other_ends() {
    tap_running("other ends of workers");
    idist_report report = report_of([](int local_rank) {
        if (local_rank == 1) throw 17;
    });
    tap_ok(report.rank == 1 && report.exit_code == 1, "a worker that throws an int");
    tap_like(report.text, "not derived from std::exception", "its text");
    report = report_of([](int) {
        (void)freopen("/dev/null", "w", stderr); // where std::terminate writes
        const idist::op<int> op([](int a, int b) -> int {
            if (b > 0) throw std::runtime_error("in a reduction");
            return a;
        });
        (void)idist::all_reduce(1, op);
    });
    tap_is(report.signal, SIGABRT, "an exception in a reduction ends the process");

    try {
        idist::spawn([] {}, -3);
        tap_ok(false, "-3 workers");
    } catch (const idist::worker_error &) {
        tap_ok(false, "-3 workers are an error, and not that of a worker");
    } catch (const idist::error &e) {
        tap_is(e.status(), IDIST_ERR_ARG, "-3 workers are an error, and not that of a worker");
    }
}

// Runs parallel_run and worlds of one rank in this process.
static void alone() {
    idist_desc desc = idist_desc();
    int where = 0;

    tap_running("parallel_run in this process");
    try {
        idist::parallel_run(desc, [&] {
            where = 1;
            idist::request never;
            std::vector<int> x(1);
            idist::recv(x, 0, 3, never);
            throw std::out_of_range("passes on");
        });
    } catch (const std::out_of_range &e) {
        where += !strcmp(e.what(), "passes on") ? 1 : 0;
    }
    tap_is(where, 2, "parallel_run passes an exception on");
    tap_ok(!idist_is_initialized(), "and the world has ended");

    tap_running("a default world");
    {
        idist::world world;
        tap_ok(idist_is_initialized() && world.size() == 1 && !world.get(), "a default world");
        try {
            const idist::world second;
            tap_ok(false, "a second one is an error");
        } catch (const idist::error &e) {
            tap_is(e.status(), IDIST_ERR_STATE, "a second one is an error");
        }
        tap_ok(idist_is_initialized(), "and the first one stays");
        world.finalize();
        tap_ok(!idist_is_initialized(), "finalize leaves it");
    }
    try {
        idist::world world;
        idist::request never;
        int x[1];
        idist::recv(x, 0, 3, never);
        throw 1;
    } catch (int) {
        tap_ok(!idist_is_initialized(), "an exception leaves it, with a request open");
    }
    idist_set_last_error("a text");
    idist_set_last_error(idist_last_error() + 2);
    tap_like(idist_last_error(), "text", "idist_set_last_error");
    idist_set_last_error(std::string(5000, 'x').c_str());
    tap_is(strlen(idist_last_error()), 1023, "cuts a long text off");
    idist_set_last_error(nullptr);
    tap_is(strlen(idist_last_error()), 0, "takes NULL");
}

static_assert(idist::dtype_of<const double>() == IDIST_F64, "a constant expression");
static_assert(idist::dtype_of<long long>() == IDIST_I64 && idist::dtype_of<bool>() == IDIST_U8, "");
static_assert(std::is_nothrow_move_constructible<idist::request>::value, "for vectors of them");
static_assert(!std::is_copy_constructible<idist::request>::value, "");
static_assert(!std::is_copy_constructible<idist::group>::value, "");
static_assert(!std::is_copy_constructible<idist::plan>::value, "");
static_assert(!std::is_copy_constructible<idist::world>::value, "");

int main() {
    tap_deadline(120);
    for (int n = 1; n <= 4; n++) spawns(n); // before there are threads
    other_ends();
    alone();
    for (int n = 1; n <= 4; n++) {
        run(n, "reductions", reductions);
        run(n, "gather, scatter and the v-forms", moves);
        run(n, "texts and vectors", texts);
        run(n, "messages", messages);
        run(n, "operations of its own", operations);
        run(n, "owners", owners);
        run(n, "wrong sizes", sizes);
        if (n > 1) run(n, "a mismatch", mismatch);
        run(n, "an exception amid requests", unwinds, "exploded");
        run(n, "an exception after requests", unwinds_alone);
        run(n, "an exception within together", together_throws);
        run(n, "one rank first", first);
    }
    return tap_done();
}
