#!/usr/bin/env python3
"""drop_ins.py [--check] [--line-directives] [FOLDER] - writes the headers that a program copies.

Each header src/idist*.h becomes one file in FOLDER (by default the root of the repository). A
quoted include with a slash names a part of the implementation. The part's text replaces the first
include of the part, and later includes are removed. Includes of parts that idist.h contains are
also removed from the other drop-ins. base/begin.h, the file that it includes, and base/end.h are
exceptions: every drop-in contains them. After base/end.h comes an #undef of each private macro that
the drop-in defines. An include without a slash stays.

--check writes nothing, names the files that are stale, and fails if there are any.
--line-directives adds #line, so that compilers and debuggers refer to the files in src/.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
INCLUDE = re.compile(r'#include "([^"]+)"')
MACRO = re.compile(r"^# *(define|undef) (IDIST__\w+)", re.MULTILINE)
REPEATED = ("base/begin.h", "base/end.h", "os/mutex_init.h")
NOTE = "\n    Generated from src/ by tools/drop_ins.py: change the files there.\n*/\n"


class DropIn:
    """The text of one drop-in. `elsewhere` has the parts that the drop-in finds in idist.h."""

    def __init__(self, name, elsewhere, has_line_directives):
        self.name, self.elsewhere, self.has_lines = name, elsewhere, has_line_directives
        self.parts, self.out = set(), []
        self.paste(name)

    def paste(self, path):
        lines = (SRC / path).read_text(encoding="ascii").split("\n")[:-1]
        after_part = False
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if match and "/" in match.group(1):
                after_part = self.include(match.group(1)) or after_part
                line = ""
            elif line == "#pragma once":
                line = ""
            if after_part and line and self.has_lines:
                self.out.append(f'#line {number} "src/{path}"')
            after_part = after_part and not line
            self.out.append(line)

    def include(self, path):
        """Pastes a part, unless it is there already. Returns True if the part was pasted."""
        if path not in REPEATED and (path in self.parts or path in self.elsewhere):
            return False
        self.parts.add(path)
        self.out += ["", f"// ---- {path} " + "-" * (92 - len(path)), ""]
        if self.has_lines:
            self.out.append(f'#line 1 "src/{path}"')
        self.paste(path)
        if path == "base/end.h":
            self.out += [""] + [f"#undef {name}" for name in self.macros()]
        return True

    def macros(self):
        """Returns the private macros of the implementation that are still defined."""
        text = "\n".join(self.out)
        text = text[text.index("defined(IDIST_IMPLEMENTATION)"):]
        last = {name: word for word, name in MACRO.findall(text)}
        return sorted(name for name, word in last.items() if word == "define")

    def text(self):
        text = "\n".join(self.out) + "\n"
        text = text.replace("\n*/\n", NOTE, 1)
        return text if self.has_lines else re.sub(r"\n{3,}", "\n\n", text)


def main(arguments):
    options = {a for a in arguments if a.startswith("--")}
    folders = [a for a in arguments if a not in options]
    if options - {"--check", "--line-directives"} or len(folders) > 1:
        sys.exit(__doc__)
    folder = pathlib.Path(folders[0]) if folders else ROOT
    core, stale = set(), []
    for name in ["idist.h"] + sorted(p.name for p in SRC.glob("idist_*.h")):
        drop_in = DropIn(name, core, "--line-directives" in options)
        core = core or drop_in.parts
        target = folder / name
        if not target.exists() or target.read_text(encoding="ascii") != drop_in.text():
            stale.append(name)
            if "--check" not in options:
                target.write_text(drop_in.text(), encoding="ascii")
    if stale and "--check" in options:
        sys.exit("stale: " + " ".join(stale) + "; run make drop-ins, and commit what it writes")


if __name__ == "__main__":
    main(sys.argv[1:])
