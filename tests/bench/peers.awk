# peers.awk - the report of bench_peers.sh, from its lines: library,round,op,mode,ranks,bytes,p50_us,min_us
#
# With -v curve=LIBRARY -v ranks=N: only the points "bytes us" of that curve of all_reduce.
# A ratio is the peer's time / idist's: above 1 idist is faster. The best peer is the fastest one at that point.

function target(op, n, what) { # 0: none
    if (what == "alloc") return op == "all_reduce" ? 4 : 0
    if (op == "all_reduce" && n == 2) return what == "openmpi" ? 1.6 : what == "best" ? 1.25 : 0.95
    if (op == "all_reduce" && n == 4) return what == "openmpi" ? 2 : what == "best" ? 1.4 : 1
    if (op == "all_reduce" && n == 8) return what == "openmpi" ? 2.5 : what == "best" ? 1.5 : 1
    if (n == 2 || n == 4 || n == 8) return what == "openmpi" ? 0 : what == "best" ? 1.2 : 0.9
    return 0
}

function goal_of(op, mode, n, what) { return mode == "b2b" ? 0 : target(op, n, what) } # none back to back

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

# The time of a library at a point; 0: none.
function time(library, op, mode, n, bytes,    key) {
    key = library SUBSEP op SUBSEP mode SUBSEP n SUBSEP bytes
    if (!(key in cached)) cached[key] = key in points ? median(key) : 0
    return cached[key]
}

# The fastest of the peers whose names start with `prefix`; best_name says which.
function best(prefix, op, mode, n, bytes,    i, t, least) {
    best_name = "-"; least = 0
    for (i = 1; i <= n_libraries; i++) {
        if (libraries[i] ~ /^idist/ || index(libraries[i], prefix) != 1) continue
        t = time(libraries[i], op, mode, n, bytes)
        if (t > 0 && (least == 0 || t < least)) { least = t; best_name = libraries[i] }
    }
    return least
}

function size_text(x) {
    return x >= 1048576 ? x / 1048576 " Mi" : x >= 1024 ? (x % 1024 ? sprintf("%.1f Ki", x / 1024) : x / 1024 " Ki") : x ""
}
function us_text(us) { return us == 0 ? "-" : sprintf(us < 99.995 ? "%.2f" : us < 999.95 ? "%.1f" : "%.0f", us) }
function ratio_text(r) { return r > 0 ? sprintf("%.2f", r) : "-" }

function judge(text, value, goal, at) {
    printf "  %-52s %8.3f%s", text, value, at
    if (goal > 0) {
        printf "   target %.2f: %s", goal, (value >= goal ? "met" : "MISSED")
        if (value >= goal) n_met++
        else missed[++n_missed] = where ": " text sprintf(" %.3f", value) at sprintf(", target %.2f", goal)
    }
    printf "\n"
}

# Ratios of one kind over the sizes.
function start_ratios(kind) { sum[kind] = 0; number[kind] = 0; worst[kind] = 0; worst_at[kind] = "" }
function add_ratio(kind, r, at) {
    if (r <= 0) return
    sum[kind] += log(r); number[kind]++
    if (worst[kind] == 0 || r < worst[kind]) { worst[kind] = r; worst_at[kind] = " at " at }
}
function mean(kind) { return exp(sum[kind] / number[kind]) }

function table(op, mode, n,    i, j, k, t, own, any, with_alloc, lacking) {
    start_ratios("openmpi"); start_ratios("best"); start_ratios("alloc")
    where = op ", " n " ranks" (mode == "b2b" ? ", back to back" : "")
    with_alloc = 0; lacking = ""
    for (j = 1; j <= n_sizes; j++) if (time("idist_alloc", op, mode, n, sizes[j])) with_alloc = 1
    printf "\n%s, us\n  %9s", where, "bytes"
    for (i = 1; i <= n_libraries; i++) if (libraries[i] != "idist_alloc") printf " %9s", libraries[i]
    printf " | %9s %8s %8s", "best peer", "/ best", "/ OMPI"
    if (with_alloc) printf " | %11s %8s", "idist_alloc", "/ best"
    printf "\n"
    for (j = 1; j <= n_sizes; j++) {
        any = 0
        for (i = 1; i <= n_libraries; i++) if (time(libraries[i], op, mode, n, sizes[j])) any = 1
        if (!any) continue
        printf "  %9s", size_text(sizes[j])
        for (i = 1; i <= n_libraries; i++)
            if (libraries[i] != "idist_alloc") printf " %9s", us_text(time(libraries[i], op, mode, n, sizes[j]))
        own = time("idist", op, mode, n, sizes[j])
        if (!own && "idist" in present) lacking = lacking " " size_text(sizes[j])
        t = best("openmpi", op, mode, n, sizes[j])
        k = own > 0 ? t / own : 0
        add_ratio("openmpi", k, size_text(sizes[j]))
        t = best("", op, mode, n, sizes[j])
        add_ratio("best", own > 0 ? t / own : 0, size_text(sizes[j]))
        printf " | %9s %8s %8s", best_name, ratio_text(own > 0 ? t / own : 0), ratio_text(k)
        own = time("idist_alloc", op, mode, n, sizes[j])
        if (own) {
            add_ratio("alloc", t / own, size_text(sizes[j]))
            printf " | %11s %8s", us_text(own), ratio_text(t / own)
        }
        printf "\n"
    }
    if (lacking != "") {
        printf "  idist has no figure at%s\n", lacking
        missed[++n_missed] = where ": idist has no figure at" lacking
    }
    if (number["openmpi"])
        judge("geometric mean / the faster Open MPI", mean("openmpi"), goal_of(op, mode, n, "openmpi"), "")
    if (number["best"]) {
        judge("geometric mean / the best peer", mean("best"), goal_of(op, mode, n, "best"), "")
        judge("worst size / the best peer", worst["best"], goal_of(op, mode, n, "worst"), worst_at["best"])
    }
    if (number["alloc"])
        judge("worst size of idist_alloc / the best peer", worst["alloc"], goal_of(op, mode, n, "alloc"), worst_at["alloc"])
}

# One line of figures for each number of ranks.
function single(op, title, unit, scale,    i, j, t, header, goal) {
    header = 0
    for (j = 1; j <= n_ranks; j++) {
        if (!((op SUBSEP "-" SUBSEP ranks_list[j]) in tables)) continue
        if (!header++) {
            printf "\n%s\n  %9s", title, "ranks"
            for (i = 1; i <= n_libraries; i++) if (libraries[i] != "idist_alloc") printf " %9s", libraries[i]
            printf "\n"
        }
        printf "  %9d", ranks_list[j]
        for (i = 1; i <= n_libraries; i++) {
            t = time(libraries[i], op, "-", ranks_list[j], 0) / scale
            if (libraries[i] != "idist_alloc") printf " %9s", (t > 0 ? sprintf("%.3f", t) : "-")
        }
        t = time("idist", op, "-", ranks_list[j], 0) / scale
        goal = op == "blocked" ? 0.03 : ranks_list[j] == 2 ? 15 : ranks_list[j] == 32 ? 250 : 0
        if (t > 0 && goal) {
            printf "   target of idist: under %g %s: %s", goal, unit, (t < goal ? "met" : "MISSED")
            if (t < goal) n_met++
            else missed[++n_missed] = op ", " ranks_list[j] " ranks: " t " " unit ", target under " goal
        }
        printf "\n"
    }
}

BEGIN {
    FS = ","
    n_libraries = split("idist idist_alloc openmpi4 openmpi5 impi mpich4 mpich5 gloo", order, " ")
}

NF == 8 {
    present[$1]
    if (!(("op", $3) in known)) { known["op", $3]; ops[++n_ops] = $3 }
    if (!(("n", $5) in known)) { known["n", $5]; ranks_list[++n_ranks] = $5 + 0 }
    if (!(("b", $6) in known)) { known["b", $6]; sizes[++n_sizes] = $6 + 0 }
    tables[$3, $4, $5]
    key = $1 SUBSEP $3 SUBSEP $4 SUBSEP $5 SUBSEP $6
    points[key] = points[key] " " $7
    if ($2 + 0 > n_rounds) n_rounds = $2 + 0
}

END {
    for (i = 1; i <= n_libraries; i++) if (order[i] in present) libraries[++n_present] = order[i]
    n_libraries = n_present + 0
    sort(sizes, n_sizes)
    sort(ranks_list, n_ranks)
    if (curve != "") {
        for (j = 1; j <= n_sizes; j++)
            if ((t = time(curve, "all_reduce", "barrier", ranks, sizes[j])) > 0) print sizes[j], t
        exit
    }
    printf "Time of the slowest rank, median of the iterations, median of %d round%s. A ratio is peer / idist.\n",
        n_rounds, n_rounds == 1 ? "" : "s"
    for (o = 1; o <= n_ops; o++)
        for (r = 1; r <= n_ranks; r++) {
            if ((ops[o], "barrier", ranks_list[r]) in tables) table(ops[o], "barrier", ranks_list[r])
            if ((ops[o], "b2b", ranks_list[r]) in tables) table(ops[o], "b2b", ranks_list[r])
        }
    single("start", "start, barrier, end, ms", "ms", 1e3)
    single("blocked", "CPU time of a rank that waits 3 s in a barrier, s", "s", 1e6)
    printf "\nTargets met: %d, missed: %d\n", n_met, n_missed
    for (i = 1; i <= n_missed; i++) print "    " missed[i]
}
