# net.awk - prints the report of bench_net.sh. The input has lines
# PART,PLACES,LIBRARY,op,mode,ranks,bytes,p50,min with times in microseconds. For op rate, a time is
# the time of one message, with the messages of all pairs of ranks counted together. -v rate gives
# the rate of a link in Mbit/s for the part "rate". The part "far" has links of 100 Mbit/s.
#
# The bound of an all_reduce of S bytes over H hosts is 2 (H - 1) / H * S / rate. This is the time
# in which each host can send and receive the least possible number of bytes, however many ranks it
# has.

function median(list,    values, n, i, j, x) {
    n = split(list, values, " ")
    for (i = 2; i <= n; i++) {
        x = values[i] + 0
        for (j = i - 1; j >= 1 && values[j] + 0 > x; j--) values[j + 1] = values[j]
        values[j + 1] = x
    }
    return n ? values[int((n + 1) / 2)] + 0 : 0
}

function hosts_of(places,    list, seen, n, i, count) {
    n = split(places, list, " ")
    for (i = 1; i <= n; i++) if (!(list[i] in seen)) { seen[list[i]] = 1; count++ }
    return count
}

function time_text(us, op) {
    if (!us) return "-"
    return sprintf(op == "rate" ? "%.3f" : "%.1f", us)
}

function ratio_text(us, own) {
    return us && own ? sprintf("%.2f", us / own) : "-"
}

function size_text(nbytes) {
    if (nbytes >= 1048576) return nbytes / 1048576 " Mi"
    if (nbytes >= 1024) return nbytes / 1024 " Ki"
    return nbytes ""
}

BEGIN { FS = "," }

NF == 9 {
    row = $1 SUBSEP $2 SUBSEP $7 SUBSEP $4
    if (!(row in known)) { known[row] = 1; rows[++row_count] = row }
    if (!($3 in libraries)) { libraries[$3] = 1; order[++library_count] = $3 }
    p50[row, $3] = p50[row, $3] " " $8
    least[row, $3] = least[row, $3] " " $9
}

END {
    for (i = 1; i <= row_count; i++) {
        split(rows[i], key, SUBSEP)
        if (key[1] != part || key[2] != places || key[4] != op) {
            part = key[1]
            places = key[2]
            op = key[4]
            printf "\n%s, %s, a rank on each of: %s\n%10s", part, op, places, "bytes"
            for (k = 1; k <= library_count; k++) printf " %12s", order[k] " us"
            for (k = 1; k <= library_count; k++)
                if (order[k] != "idist") printf " %12s", order[k] " x"
            print "   p50 / min" (part == "rate" || part == "far" ? "   of the bound" : "")
        }
        own = median(p50[rows[i], "idist"])
        printf "%10s", size_text(key[3])
        for (k = 1; k <= library_count; k++)
            printf " %12s", time_text(median(p50[rows[i], order[k]]), op)
        for (k = 1; k <= library_count; k++)
            if (order[k] != "idist") printf " %12s", ratio_text(median(p50[rows[i], order[k]]), own)
        fastest = median(least[rows[i], "idist"])
        printf " %11.2f", fastest ? own / fastest : 0
        if (part == "rate" || (part == "far" && key[3] > 1048576)) {
            h = hosts_of(places)
            bound = 2 * (h - 1) / h * key[3] * 8 / (part == "far" ? 100 : rate)
            printf " %12.1f %%", own ? 100 * bound / own : 0
        }
        print ""
    }
}
