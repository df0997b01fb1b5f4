// train/report/event.h: scalars in the format that TensorBoard reads
//
// An events file is a TFRecord file, which is a sequence of these records:
//
//     size of the data     8 bytes
//     masked CRC-32C       4 bytes, over the size
//     data                 an Event in the format of protocol buffers
//     masked CRC-32C       4 bytes, over the data
//
// Numbers have the lowest byte first. The Event in the first record contains the version of the
// file. A field begins with a varint that contains its number and type; the field's content
// follows. The fields in use are:
//
//     Event      1 wall_time (double)  2 step (varint)  3 file_version  5 summary (Summary)
//     Summary    1 value (Value)
//     Value      1 tag  2 simple_value (float)
//
// Sources: record_writer.cc, event.proto and summary.proto of TensorFlow; RFC 3720, appendix B.4.
#pragma once

#define IDIST__TAG_NBYTES 1000                        // largest tag, without the terminating 0
#define IDIST__EVENT_NBYTES (IDIST__TAG_NBYTES + 100) // largest record

// The types of fields ("wire types").
enum { IDIST__EVENT_VARINT = 0, IDIST__EVENT_64 = 1, IDIST__EVENT_SIZED = 2, IDIST__EVENT_32 = 5 };

// The bytes of a message or of a record.
typedef struct idist__event {
    size_t nbytes;
    unsigned char bytes[IDIST__EVENT_NBYTES];
} idist__event;

static void idist__event_bytes(idist__event *event, const void *bytes, size_t nbytes) {
    memcpy(event->bytes + event->nbytes, bytes, nbytes);
    event->nbytes += nbytes;
}

// Appends a number as nbytes bytes, the lowest byte first.
static void idist__event_number(idist__event *event, uint64_t number, int nbytes) {
    int i;

    for (i = 0; i < nbytes; i++)
        event->bytes[event->nbytes++] = (unsigned char)(number >> (8 * i) & 0xff);
}

// Appends a number with seven bits per byte, the lowest bits first. The eighth bit says that
// another byte follows.
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

// Computes CRC-32C bit by bit, which is fast enough for short records.
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

// Appends a masked CRC-32C, because a plain CRC over data that contains CRCs is weak.
static void idist__event_masked_crc(idist__event *record, const unsigned char *bytes,
                                    size_t nbytes) {
    uint32_t crc = idist__event_crc(bytes, nbytes);

    idist__event_number(record, (crc >> 15 | crc << 17) + 0xa282ead8u, 4);
}

// Makes a record from an Event.
static void idist__event_frame(idist__event *record, const idist__event *event) {
    record->nbytes = 0;
    idist__event_number(record, event->nbytes, 8);
    idist__event_masked_crc(record, record->bytes, 8);
    idist__event_bytes(record, event->bytes, event->nbytes);
    idist__event_masked_crc(record, event->bytes, event->nbytes);
}

// Makes the first record of a file. wall_time is in seconds since 1970.
static void idist__event_version(idist__event *record, double wall_time) {
    idist__event event;

    event.nbytes = 0;
    idist__event_double(&event, 1, wall_time);
    idist__event_sized(&event, 3, "brain.Event:2", 13);
    idist__event_frame(record, &event);
}

// Makes the record of a scalar. Leaves out a step of 0, as every writer of this format does.
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
