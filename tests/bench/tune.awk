# tune.awk - prints one line of the table of tune.sh, from lines "ALGORITHM BYTES US"

function median(list,    values, n, i, k, held) {
    n = split(list, values, " ")
    for (i = 2; i <= n; i++)
        for (k = i; k > 1 && values[k] + 0 < values[k - 1] + 0; k--) {
            held = values[k]
            values[k] = values[k - 1]
            values[k - 1] = held
        }
    return values[int((n + 1) / 2)]
}

function size_text(nbytes) {
    return nbytes < 1024 ? nbytes " B" : sprintf("%.4g KiB", nbytes / 1024)
}

{
    if (!($2 in seen)) {
        seen[$2] = 1
        sizes[++count] = $2
    }
    times[$1, $2] = times[$1, $2] " " $3
}

END {
    crossover = ""
    for (i = count; i >= 1; i--) {
        if (median(times["latency", sizes[i]]) < median(times["bandwidth", sizes[i]])) break
        crossover = sizes[i]
    }
    if (crossover == "") measured = "> " size_text(sizes[count])
    else if (crossover == sizes[1]) measured = "< " size_text(sizes[1])
    else measured = size_text(crossover)

    for (i = 1; i <= count; i++)
        if (i % 3 == 1)
            points = points sprintf("  %s: %.0f / %.0f", size_text(sizes[i]), \
                                    median(times["latency", sizes[i]]), \
                                    median(times["bandwidth", sizes[i]]))
    printf "%-15s %14s %14s %s\n", op, measured, limit == "" ? "-" : limit " KiB", points
}
