// train/report/event.h: a scalar as TensorBoard reads it
//
// An events file is a TFRecord file: a sequence of
//
//     bytes of the data    8 bytes
//     masked CRC-32C of these 8 bytes
//     data                 an Event in the format of protocol buffers
//     masked CRC-32C of the data
//
// with the lowest byte of a number first. In the first record the Event says which version the file
// has. The fields in use, each a varint of number and type with its content after it:
//
//     Event      1 wall_time (double)  2 step (varint)  3 file_version  5 summary (Summary)
//     Summary    1 value (Value)
//     Value      1 tag  2 simple_value (float)
//
// Sources: record_writer.cc, event.proto and summary.proto of TensorFlow; RFC 3720, appendix B.4.
#pragma once

#define IDIST__TAG_NBYTES 1000                        // at most, without the 0 at the end
#define IDIST__EVENT_NBYTES (IDIST__TAG_NBYTES + 100) // of a record with such a tag

// The types of fields.
enum { IDIST__EVENT_VARINT = 0, IDIST__EVENT_64 = 1, IDIST__EVENT_SIZED = 2, IDIST__EVENT_32 = 5 };

// A message, or a record.
typedef struct idist__event {
    size_t nbytes;
    unsigned char bytes[IDIST__EVENT_NBYTES];
} idist__event;

static void idist__event_bytes(idist__event *event, const void *bytes, size_t nbytes) {
    memcpy(event->bytes + event->nbytes, bytes, nbytes);
    event->nbytes += nbytes;
}

// A number of nbytes bytes, the lowest first.
static void idist__event_number(idist__event *event, uint64_t number, int nbytes) {
    int i;

    for (i = 0; i < nbytes; i++)
        event->bytes[event->nbytes++] = (unsigned char)(number >> (8 * i) & 0xff);
}

// Seven bits per byte, the lowest first; the eighth says that there is another byte.
static void idist__event_varint(idist__event *event, uint64_t number) {
    for (; number >= 0x80; number >>= 7)
        event->bytes[event->nbytes++] = (unsigned char)(number & 0x7f) | 0x80;
    event->bytes[event->nbytes++] = (unsigned char)number;
}

static void idist__event_field(idist__event *event, int field, int type) {
    idist__event_varint(event, (uint64_t)(field << 3 | type));
}

static void idist__event_sized(idist__event *event, int field, const void *bytes, size_t nbytes) {
    idist__event_field(event, field, IDIST__EVENT_SIZED);
    idist__event_varint(event, nbytes);
    idist__event_bytes(event, bytes, nbytes);
}

static void idist__event_double(idist__event *event, int field, double value) {
    uint64_t bits;

    memcpy(&bits, &value, sizeof bits);
    idist__event_field(event, field, IDIST__EVENT_64);
    idist__event_number(event, bits, 8);
}

static void idist__event_float(idist__event *event, int field, double value) {
    float rounded = (float)value;
    uint32_t bits;

    memcpy(&bits, &rounded, sizeof bits);
    idist__event_field(event, field, IDIST__EVENT_32);
    idist__event_number(event, bits, 4);
}

// CRC-32C, bit by bit: a record is short.
static uint32_t idist__event_crc(const unsigned char *bytes, size_t nbytes) {
    uint32_t crc = 0xffffffffu;
    size_t i;
    int bit;

    for (i = 0; i < nbytes; i++) {
        crc ^= bytes[i];
        for (bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }

    return ~crc;
}

// Masked, because a checksum over data with checksums in it is a weak one.
static void idist__event_masked_crc(idist__event *record, const unsigned char *bytes,
                                    size_t nbytes) {
    uint32_t crc = idist__event_crc(bytes, nbytes);

    idist__event_number(record, (crc >> 15 | crc << 17) + 0xa282ead8u, 4);
}

// An Event as a record.
static void idist__event_frame(idist__event *record, const idist__event *event) {
    record->nbytes = 0;
    idist__event_number(record, event->nbytes, 8);
    idist__event_masked_crc(record, record->bytes, 8);
    idist__event_bytes(record, event->bytes, event->nbytes);
    idist__event_masked_crc(record, event->bytes, event->nbytes);
}

// The first record of a file. wall_time in seconds since 1970.
static void idist__event_version(idist__event *record, double wall_time) {
    idist__event event;

    event.nbytes = 0;
    idist__event_double(&event, 1, wall_time);
    idist__event_sized(&event, 3, "brain.Event:2", 13);
    idist__event_frame(record, &event);
}

// The record of a value. A step of 0 is left out, as by every writer of this format.
static void idist__event_scalar(idist__event *record, double wall_time, uint64_t step,
                                const char *tag, double scalar) {
    idist__event event, summary, value;

    value.nbytes = 0;
    idist__event_sized(&value, 1, tag, strlen(tag));
    idist__event_float(&value, 2, scalar);

    summary.nbytes = 0;
    idist__event_sized(&summary, 1, value.bytes, value.nbytes);

    event.nbytes = 0;
    idist__event_double(&event, 1, wall_time);
    if (step) {
        idist__event_field(&event, 2, IDIST__EVENT_VARINT);
        idist__event_varint(&event, step);
    }

    idist__event_sized(&event, 5, summary.bytes, summary.nbytes);
    idist__event_frame(record, &event);
}
