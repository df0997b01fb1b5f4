#!/usr/bin/env python3
"""scalars.py - prints the scalars of a folder that idist_summary has written, for summary.sh

    python3 tests/train/scalars.py csv FOLDER [--floats]
    build/peers/tensorboard/bin/python tests/train/scalars.py tensorboard FOLDER

A line per value: step, tag, value and wall time, the latter three in hexadecimal digits. With csv,
Python's csv module reads scalars.csv; with --floats it rounds each value to a float.
With tensorboard, TensorBoard's own reader reads the events files; values are floats.
"""
import csv
import math
import struct
import sys


def as_float(value):
    """A double rounded to a float, as C does it."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def show(step, tag, value, wall_time):
    """Prints a line."""
    bits = struct.pack(">d", math.nan if math.isnan(value) else value).hex()
    print(step, tag.encode().hex(), bits, struct.pack(">d", wall_time).hex())


def show_csv(path, floats):
    """All lines of a CSV file, which must have four columns each."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, strict=True))
    if rows[0] != ["wall_time", "step", "tag", "value"]:
        sys.exit(f"{path}: its header is {rows[0]}")
    for wall_time, step, tag, value in rows[1:]:
        value = float(value)
        show(int(step), tag, as_float(value) if floats else value, float(wall_time))


def show_tensorboard(folder):
    """All scalars, tag by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            show(event.step, tag, event.value, event.wall_time)


if sys.argv[1] == "tensorboard":
    show_tensorboard(sys.argv[2])
else:
    show_csv(sys.argv[2] + "/scalars.csv", "--floats" in sys.argv)
