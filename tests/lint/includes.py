#!/usr/bin/env python3
"""includes.py [FOLDER] - checks which file of src/ (or FOLDER) includes which. Exits with 1 if a
rule is broken. The files of a folder include only files of that folder and of folders before it in
FLOORS (a folder of os/ counts as os). No file includes itself through other files. Outside os/, the
name of a file is unique. Exactly one header of src/ lists each file.
"""
import os
import pathlib
import re
import sys

FLOORS = '''os base net store launch core calls spawn trace
    ring/shm ring/msg ring/share ring/algo ring/connect ring/engine ring/join ring
    mpi gpu gpu/ipc gpu/nccl gpu/route xla
    train train/checkpoint train/compress train/ddp train/zero train/report'''.split()
REPEATED = {'base/begin.h', 'base/end.h', 'os/mutex_init.h'}

src = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else
                   os.path.join(os.path.dirname(__file__), '..', '..', 'src'))
files = {p.relative_to(src).as_posix(): p.read_text() for p in sorted(src.rglob('*.h'))}
includes = {f: [i for i in re.findall(r'^ *# *include "([^"]+)"', text, re.M) if '/' in i]
            for f, text in files.items()}
LISTS = ('os/system.h', 'os/bodies.h')
lists = [i for f in files if '/' not in f or f in LISTS for i in includes[f]]
stems, wrong = {}, []


def cycle(path):
    """Returns the first cycle that the includes of the last file of a path close, or None."""
    for i in includes.get(path[-1], []):
        if i in path:
            return path[path.index(i):] + [i]
        if i not in safe and cycle(path + [i]):
            return cycle(path + [i])
    safe.add(path[-1])
    return None


safe = set()
for f in files:
    folder, stem = os.path.split(re.sub(r'^os/\w+/', 'os/', f))
    if not folder:
        continue
    if folder not in FLOORS:
        wrong.append(f'{f}: {folder} is no floor')
        continue
    for i in includes[f]:
        if i not in files:
            wrong.append(f'{f}: there is no {i}')
        elif FLOORS.index(os.path.dirname(re.sub(r'^os/\w+/', 'os/', i))) > FLOORS.index(folder):
            wrong.append(f'{f}: {i} is on a higher floor')
    if folder != 'os' and stems.setdefault(stem, f) != f:
        wrong.append(f'{f}: {stems[stem]} has the same name')
    if f not in REPEATED and lists.count(f) != 1:
        wrong.append(f'{f}: {lists.count(f)} headers of src/ include it')
    if f not in REPEATED and '\n#pragma once\n' not in files[f]:
        wrong.append(f'{f}: no #pragma once')
    if f not in safe and cycle([f]):
        wrong.append('circle: ' + ' -> '.join(cycle([f])))
print('\n'.join(wrong), end='\n' if wrong else '')
sys.exit(len(wrong) > 0)
