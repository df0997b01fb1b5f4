#!/usr/bin/env python3
"""events.py - writes events.txt: records of an events file, as TensorBoard writes them, for
tests/unit/summary.c

    make build/peers/tensorboard/installed
    build/peers/tensorboard/bin/python tests/data/events.py >tests/data/events.txt

Each line describes a record: microseconds since 1970, step, tag, value and record. The tag and the
record are hexadecimal bytes, and the value is a hexadecimal float. The record without a tag ("-")
is the first record of a file.
"""
import io
import math
import struct

import tensorboard
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def record(event):
    """Returns the contents of a file that has only this event."""
    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue().hex()


def float_of(value):
    """Returns the float nearest to a double, as the field stores it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


print(f"# made by events.py with tensorboard {tensorboard.__version__}")
US = 1769801172180123
print(US, 0, "-", 0.0.hex(), record(Event(wall_time=US / 1e6, file_version="brain.Event:2")))
CASES = [
    (US, 1, "train/loss", 2.302585092994046),
    (US + 1, 0, "a", 0.0),
    (US + 999999, 127, "test/accuracy", -0.0),
    (1, 128, "x, \"y\"\n", 1.0),
    (2, 2**31, "\u00e9poque \u20ac \U0001f600", -1e-300),
    (US, 2**63 - 1, "b", 1e300),
    (US, 300, "nan", math.nan),
    (US, 16384, "inf", math.inf),
    (US, 5, "t" * 110, 0.1),
    (US, 5, "t" * 121, 1e-40),
    (US, 5, "t" * 1000, 16777217.0),
]
for us, step, tag, value in CASES:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=float_of(value))])
    event = Event(wall_time=us / 1e6, step=step, summary=summary)
    print(us, step, tag.encode().hex(), float(value).hex(), record(event))
