#!/usr/bin/env python3
"""single.py SOURCE OUTPUT - writes a header of idist with the parts that it is made of in place.

idist.h includes its parts, and these may include more. This puts the text of each where it is
included, so that one file can be copied. Of the other headers only idist_begin.h and idist_end.h
are put in place; they go on including idist.h and each other.
"""

import os
import re
import sys

REPEATED = ["begin", "end"]  # included wherever an implementation begins and ends
INCLUDE = re.compile(r'^#include "idist_([a-z]+)\.h"')


def is_part(match, whole):
    """Whether the header that a line includes is put in place of the line."""
    return match and (whole or match.group(1) in REPEATED)


def without_guard_include(lines):
    """A room that can be included by itself first includes idist.h; here that would be itself."""
    text = "".join(lines)
    text = text.replace('#ifndef IDIST_H\n#include "idist.h"\n#endif\n', "")
    return text.splitlines(keepends=True)


def expand(path, whole):
    folder = os.path.dirname(path)
    with open(path, encoding="ascii") as source:
        lines = source.readlines()
    if os.path.basename(path) != "idist.h" and whole:
        lines = without_guard_include(lines)
    for line in lines:
        match = INCLUDE.match(line)
        if is_part(match, whole):
            yield from expand(os.path.join(folder, "idist_%s.h" % match.group(1)), whole)
        else:
            yield line


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = sys.argv[1:]
    text = "".join(expand(source, os.path.basename(source) == "idist.h"))
    with open(output, "w", encoding="ascii") as target:
        target.write(text)


if __name__ == "__main__":
    main()
