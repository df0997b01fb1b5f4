// xla/compile_options.h: an encoder for CompileOptionsProto
//
// A program over a group has one replica per member; replica i runs on the device of rank i:
//
//     CompileOptionsProto        executable_build_options = 3
//       ExecutableBuildOptions   num_replicas = 4, num_partitions = 5, device_assignment = 9
//         DeviceAssignment       replica_count = 1, computation_count = 2, computation_devices = 3
//           ComputationDevice    replica_device_ids = 1, packed
//
// (xla/pjrt/proto/compile_options.proto and xla/xla_data.proto.) A message is a sequence of fields.
// Each field is a tag, followed by a number, or by a length and that many bytes. All integers are
// varints: seven bits per byte, lowest first.
#pragma once

#include "xla/xla_model.h"

// A message being written. If `data` is NULL, only the size is computed.
typedef struct idist__proto {
    char *data;
    size_t nbytes;
} idist__proto;

static void idist__proto_varint(idist__proto *proto, uint64_t value) {
    do {
        if (proto->data)
            proto->data[proto->nbytes] = (char)((value & 127) | (value > 127 ? 128 : 0));
        proto->nbytes++;
        value >>= 7;
    } while (value);
}

// Appends a field that is an integer.
static void idist__proto_integer(idist__proto *proto, int field, uint64_t value) {
    idist__proto_varint(proto, (uint64_t)field << 3);
    idist__proto_varint(proto, value);
}

// Appends the tag and the length of a field that is a message of nbytes. The message follows.
static void idist__proto_message(idist__proto *proto, int field, size_t nbytes) {
    idist__proto_varint(proto, (uint64_t)field << 3 | 2);
    idist__proto_varint(proto, nbytes);
}

// Appends the device of each replica.
static void idist__proto_device_ids(idist__proto *proto, const idist_group *g) {
    const idist__xla_rank_info *infos = idist__xla_of(g->w)->infos;
    int i;

    for (i = 0; i < g->size; i++)
        idist__proto_varint(proto, (uint64_t)infos[g->ranks[i]].device_id);
}

// Writes a message whose parts have these sizes: [0] the ids, [1] ComputationDevice, [2]
// DeviceAssignment, [3] ExecutableBuildOptions. Updates the sizes. If a call does not change the
// sizes, the lengths that it wrote are right.
static void idist__proto_options(idist__proto *proto, const idist_group *g, size_t nbytes[4]) {
    uint64_t n = (uint64_t)g->size;
    size_t begin[4];

    idist__proto_message(proto, 3, nbytes[3]);
    begin[3] = proto->nbytes;
    idist__proto_integer(proto, 4, n);
    idist__proto_integer(proto, 5, 1);
    idist__proto_message(proto, 9, nbytes[2]);
    begin[2] = proto->nbytes;
    idist__proto_integer(proto, 1, n);
    idist__proto_integer(proto, 2, 1);
    idist__proto_message(proto, 3, nbytes[1]);
    begin[1] = proto->nbytes;
    idist__proto_message(proto, 1, nbytes[0]);
    begin[0] = proto->nbytes;
    idist__proto_device_ids(proto, g);

    for (n = 0; n < 4; n++) nbytes[n] = proto->nbytes - begin[n];
}

// Writes the options of a program over a group, if they fit. Returns the number of bytes.
static size_t idist__proto_write(const idist_group *g, char *data, size_t capacity) {
    size_t nbytes[4] = {0, 0, 0, 0};
    idist__proto proto;
    int turn;

    // The length of a message has more bytes when the message is long. Five turns are enough: a
    // longer length changes only the messages around it.
    for (turn = 0; turn < 5; turn++) {
        proto.data = NULL;
        proto.nbytes = 0;
        idist__proto_options(&proto, g, nbytes);
    }

    if (proto.nbytes > capacity) return proto.nbytes;
    proto.data = data;
    proto.nbytes = 0;
    idist__proto_options(&proto, g, nbytes);

    return proto.nbytes;
}
