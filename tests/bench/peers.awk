# peers.awk - prints the report of bench_peers.sh, from its lines:
#
#     library,round,op,mode,ranks,bytes,p50_us,min_us
#
# With -v curve=LIBRARY -v ranks=N, prints only the points "bytes us" of that curve of all_reduce.
# For rate, bw and bibw a time is the time of one message. The table of rate shows nanoseconds, and
# the messages of all pairs per second. The tables of bw and bibw show the bandwidth. A ratio is the
# peer's time divided by idist's time, so idist is faster if the ratio is above 1. The best peer is
# the fastest peer at that point.

#------------------------------------------------------------------------------
# targets
#------------------------------------------------------------------------------

# Returns true if a time is the time of one message, with the messages of all ranks counted.
function is_window(op) {
    return op == "rate" || op == "bw" || op == "bibw"
}

function pick(what, openmpi, best_peer, worst_size) {
    if (what == "openmpi") return openmpi
    if (what == "best") return best_peer
    return worst_size
}

# Returns the ratio to reach, or 0 if there is no target, as for back-to-back calls.
function target(op, mode, n, what) {
    if (mode == "b2b" || is_window(op)) return 0
    if (what == "alloc") return op == "all_reduce" ? 4 : 0

    if (op == "all_reduce" && n == 2) return pick(what, 1.6, 1.25, 0.95)
    if (op == "all_reduce" && n == 4) return pick(what, 2, 1.4, 1)
    if (op == "all_reduce" && n == 8) return pick(what, 2.5, 1.5, 1)

    if (n == 2 || n == 4 || n == 8) return pick(what, 0, 1.2, 0.9)
    return 0
}

# Returns the upper limit of idist's time, in the unit of single(), or 0 if there is no target.
function single_target(op, n) {
    if (op == "blocked") return 0.03
    if (n == 2) return 15
    if (n == 32) return 250
    return 0
}

# Counts a target that was met, or keeps the description of a target that was missed.
function count(is_met, words) {
    if (is_met) n_met++
    else missed[++n_missed] = words
}

#------------------------------------------------------------------------------
# times
#------------------------------------------------------------------------------

function sort(a, n,    i, j, x) {
    for (i = 2; i <= n; i++) {
        x = a[i]
        for (j = i - 1; j > 0 && a[j] > x; j--) a[j + 1] = a[j]
        a[j + 1] = x
    }
}

function median(key,    a, n, i) {
    n = split(points[key], a, " ")
    for (i = 1; i <= n; i++) a[i] += 0
    sort(a, n)

    return n ? (a[int((n + 1) / 2)] + a[int(n / 2) + 1]) / 2 : 0
}

# Returns the time of a library at a point, or 0 if there is none.
function time(library, op, mode, n, bytes,    key) {
    key = library SUBSEP op SUBSEP mode SUBSEP n SUBSEP bytes
    if (!(key in cached)) cached[key] = key in points ? median(key) : 0

    return cached[key]
}

# Returns true if any library has a time at a point.
function any_time(op, mode, n, bytes,    i) {
    for (i = 1; i <= n_libraries; i++) {
        if (time(libraries[i], op, mode, n, bytes)) return 1
    }
    return 0
}

# Returns the time of the fastest peer whose name starts with `prefix`. Sets best_name to its name.
function best(prefix, op, mode, n, bytes,    i, t, least) {
    best_name = "-"
    least = 0

    for (i = 1; i <= n_libraries; i++) {
        if (libraries[i] ~ /^idist/ || index(libraries[i], prefix) != 1) continue

        t = time(libraries[i], op, mode, n, bytes)
        if (t > 0 && (least == 0 || t < least)) {
            least = t
            best_name = libraries[i]
        }
    }
    return least
}

#------------------------------------------------------------------------------
# text
#------------------------------------------------------------------------------

function size_text(x) {
    if (x >= 1048576) return x / 1048576 " Mi"
    if (x < 1024) return x ""
    return x % 1024 ? sprintf("%.1f Ki", x / 1024) : x / 1024 " Ki"
}

function us_text(us) {
    if (us == 0) return "-"
    if (us < 99.995) return sprintf("%.2f", us)
    return sprintf(us < 999.95 ? "%.1f" : "%.0f", us)
}

# Returns the unit of an operation's columns. MB/s are bytes per microsecond.
function unit_text(op) {
    if (op == "rate") return "ns per message"
    if (is_window(op)) return "MB/s"
    return "us"
}

function figure_text(op, bytes, us) {
    if (us == 0 || !is_window(op)) return us_text(us)
    if (op == "rate") return sprintf("%.1f", us * 1000)
    return sprintf("%.0f", bytes / us)
}

function ratio_text(r) {
    return r > 0 ? sprintf("%.2f", r) : "-"
}

# Prints the names of the libraries that have their own column on the left.
function print_names(    i) {
    for (i = 1; i <= n_libraries; i++) {
        if (libraries[i] != "idist_alloc") printf " %9s", libraries[i]
    }
}

#------------------------------------------------------------------------------
# ratios of one kind over the sizes
#------------------------------------------------------------------------------

function start_ratios(kind) {
    sum[kind] = 0
    number[kind] = 0
    worst[kind] = 0
    worst_at[kind] = ""
}

function add_ratio(kind, r, at) {
    if (r <= 0) return

    sum[kind] += log(r)
    number[kind]++

    if (worst[kind] == 0 || r < worst[kind]) {
        worst[kind] = r
        worst_at[kind] = " at " at
    }
}

function mean(kind) {
    return exp(sum[kind] / number[kind])
}

#------------------------------------------------------------------------------
# the table of an operation
#------------------------------------------------------------------------------

function table_head(op, with_alloc) {
    printf "\n%s, %s\n  %9s", where, unit_text(op), "bytes"
    print_names()
    printf " | %9s %8s %8s", "best peer", "/ best", "/ OMPI"

    if (op == "rate") printf " | %15s", "idist million/s"

    if (with_alloc) printf " | %11s %8s", "idist_alloc", "/ best"
    printf "\n"
}

# Prints the line of a size. Appends the size to `lacking` if idist has no figure.
function table_row(op, mode, n, bytes,    i, at, own, alloc, peer, to_best, to_openmpi) {
    at = size_text(bytes)
    printf "  %9s", at

    for (i = 1; i <= n_libraries; i++) {
        if (libraries[i] == "idist_alloc") continue
        printf " %9s", figure_text(op, bytes, time(libraries[i], op, mode, n, bytes))
    }

    own = time("idist", op, mode, n, bytes)
    if (!own && "idist" in present) lacking = lacking " " at

    peer = best("openmpi", op, mode, n, bytes)
    to_openmpi = own > 0 ? peer / own : 0
    add_ratio("openmpi", to_openmpi, at)

    peer = best("", op, mode, n, bytes)
    to_best = own > 0 ? peer / own : 0
    add_ratio("best", to_best, at)
    printf " | %9s %8s %8s", best_name, ratio_text(to_best), ratio_text(to_openmpi)

    if (op == "rate") printf " | %15s", (own > 0 ? sprintf("%.3f", 1 / own) : "-")

    alloc = time("idist_alloc", op, mode, n, bytes)
    if (alloc) {
        add_ratio("alloc", peer / alloc, at)
        printf " | %11s %8s", us_text(alloc), ratio_text(peer / alloc)
    }
    printf "\n"
}

function judge(text, value, goal, at) {
    printf "  %-52s %8.3f%s", text, value, at

    if (goal > 0) {
        printf "   target %.2f: %s", goal, (value >= goal ? "met" : "MISSED")
        count(value >= goal, where ": " text sprintf(" %.3f%s, target %.2f", value, at, goal))
    }
    printf "\n"
}

function judge_mean(text, kind, goal) {
    judge("geometric mean / " text, mean(kind), goal, "")
}

function judge_worst(text, kind, goal) {
    judge("worst size " text, worst[kind], goal, worst_at[kind])
}

function table_verdict(op, mode, n) {
    if (lacking != "") {
        printf "  idist has no figure at%s\n", lacking
        count(0, where ": idist has no figure at" lacking)
    }

    if (number["openmpi"]) {
        judge_mean("the faster Open MPI", "openmpi", target(op, mode, n, "openmpi"))
    }

    if (number["best"]) {
        judge_mean("the best peer", "best", target(op, mode, n, "best"))
        judge_worst("/ the best peer", "best", target(op, mode, n, "worst"))
    }

    if (number["alloc"]) {
        judge_worst("of idist_alloc / the best peer", "alloc", target(op, mode, n, "alloc"))
    }
}

function table(op, mode, n,    j, with_alloc) {
    start_ratios("openmpi")
    start_ratios("best")
    start_ratios("alloc")

    where = op ", " n " ranks" (mode == "b2b" ? ", back to back" : "")
    lacking = ""

    with_alloc = 0
    for (j = 1; j <= n_sizes; j++) {
        if (time("idist_alloc", op, mode, n, sizes[j])) with_alloc = 1
    }
    table_head(op, with_alloc)

    for (j = 1; j <= n_sizes; j++) {
        if (any_time(op, mode, n, sizes[j])) table_row(op, mode, n, sizes[j])
    }
    table_verdict(op, mode, n)
}

#------------------------------------------------------------------------------
# one line of figures for each number of ranks
#------------------------------------------------------------------------------

function single_row(op, n, unit, scale,    i, t, goal) {
    printf "  %9d", n
    for (i = 1; i <= n_libraries; i++) {
        if (libraries[i] == "idist_alloc") continue

        t = time(libraries[i], op, "-", n, 0) / scale
        printf " %9s", (t > 0 ? sprintf("%.3f", t) : "-")
    }

    t = time("idist", op, "-", n, 0) / scale
    goal = single_target(op, n)
    if (t > 0 && goal) {
        printf "   target of idist: under %g %s: %s", goal, unit, (t < goal ? "met" : "MISSED")
        count(t < goal, op ", " n " ranks: " t " " unit ", target under " goal)
    }
    printf "\n"
}

function single(op, title, unit, scale,    j, n_rows) {
    n_rows = 0
    for (j = 1; j <= n_ranks; j++) {
        if (!((op, "-", ranks_list[j]) in tables)) continue

        if (n_rows++ == 0) {
            printf "\n%s\n  %9s", title, "ranks"
            print_names()
            printf "\n"
        }
        single_row(op, ranks_list[j], unit, scale)
    }
}

#------------------------------------------------------------------------------
# input and output
#------------------------------------------------------------------------------

function print_curve(    j, t) {
    for (j = 1; j <= n_sizes; j++) {
        t = time(curve, "all_reduce", "barrier", ranks, sizes[j])
        if (t > 0) print sizes[j], t
    }
}

function print_report(    i, j, n) {
    printf "Time of the slowest rank, median of the iterations, median of %d round%s.",
        n_rounds, (n_rounds == 1 ? "" : "s")
    printf " A ratio is peer / idist.\n"

    for (i = 1; i <= n_ops; i++) {
        for (j = 1; j <= n_ranks; j++) {
            n = ranks_list[j]
            if ((ops[i], "barrier", n) in tables) table(ops[i], "barrier", n)
            if ((ops[i], "b2b", n) in tables) table(ops[i], "b2b", n)
        }
    }

    single("start", "start, barrier, end, ms", "ms", 1e3)
    single("blocked", "CPU time of a rank that waits 3 s in a barrier, s", "s", 1e6)

    printf "\nTargets met: %d, missed: %d\n", n_met, n_missed
    for (i = 1; i <= n_missed; i++) print "    " missed[i]
}

BEGIN {
    FS = ","
    n_order = split("idist idist_alloc openmpi4 openmpi5 impi mpich4 mpich5 gloo", order, " ")
}

NF == 8 {
    present[$1]
    tables[$3, $4, $5]

    if (!(("op", $3) in known)) {
        known["op", $3]
        ops[++n_ops] = $3
    }

    if (!(("n", $5) in known)) {
        known["n", $5]
        ranks_list[++n_ranks] = $5 + 0
    }

    if (!(("b", $6) in known)) {
        known["b", $6]
        sizes[++n_sizes] = $6 + 0
    }

    key = $1 SUBSEP $3 SUBSEP $4 SUBSEP $5 SUBSEP $6
    points[key] = points[key] " " $7
    if ($2 + 0 > n_rounds) n_rounds = $2 + 0
}

END {
    for (i = 1; i <= n_order; i++) {
        if (order[i] in present) libraries[++n_libraries] = order[i]
    }
    sort(sizes, n_sizes)
    sort(ranks_list, n_ranks)

    if (curve != "") print_curve()
    else print_report()
}
