# plot_scalars.gnuplot - draws the scalars.csv that idist_summary writes: a panel per metric, with a
# curve per tag over the steps. A metric is the text after the last slash of a tag. Values that are
# not finite are left out. gnuplot truncates a tag at a comma.
#
#     gnuplot -c tools/plot_scalars.gnuplot scalars.csv scalars.svg      # or make plots CSV=...
if (ARGC != 2 || ARG1 eq ARG2) exit error "usage: gnuplot -c plot_scalars.gnuplot CSV SVG"
MAX_TAGS = 100

set datafile separator ','
set datafile missing NaN # the rows of other tags do not interrupt a line

finite(value) = value - value == 0 ? value : NaN

# The tags that have values, in the order in which they first appear.
seen = "\n"
is_known(tag) = strstrt(seen, "\n".tag."\n") > 0
note(tag, value) = value - value != 0 || is_known(tag) ? 0 : (seen = seen.tag."\n", 0)
stats ARG1 every ::1 using (note(strcol(3), $4)) nooutput
if (seen eq "\n") exit error ARG1.": no finite values"

array tags[MAX_TAGS]
n_tags = 0
rest = seen[2:*]
while (strlen(rest) > 0 && n_tags < MAX_TAGS) {
    n_tags = n_tags + 1
    end = strstrt(rest, "\n")
    tags[n_tags] = rest[1:end - 1]
    rest = rest[end + 1:*]
}

# The tag "train/loss" belongs to the panel "loss".
metric(tag) = strstrt(tag, "/") ? metric(tag[strstrt(tag, "/") + 1:*]) : tag
array panels[MAX_TAGS]
n_panels = 0
do for [i = 1:n_tags] {
    is_new = 1
    do for [k = 1:n_panels] { if (panels[k] eq metric(tags[i])) { is_new = 0 } }
    if (is_new) {
        n_panels = n_panels + 1
        panels[n_panels] = metric(tags[i])
    }
}

set terminal svg size 720, 300 * n_panels background 'white' noenhanced
set output ARG2
set xlabel 'step'
set grid
set key outside right top
set lmargin 11
set rmargin 24
set offsets graph 0.02, graph 0.02, graph 0.02, graph 0.02
set multiplot layout n_panels, 1
do for [k = 1:n_panels] {
    set ylabel panels[k]
    command = ''
    do for [i = 1:n_tags] {
        if (metric(tags[i]) eq panels[k]) {
            command = command.(command eq '' ? 'plot ' : ', ').sprintf(\
                "ARG1 every ::1 using 2:(strcol(3) eq tags[%d] ? finite($4) : NaN)", i).sprintf(\
                " with linespoints pointtype 7 pointsize 0.4 linewidth 1.5 title tags[%d]", i)
        }
    }
    eval command
}
unset multiplot
