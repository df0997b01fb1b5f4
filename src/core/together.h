// core/together.h: what a thread has begun between idist_group_begin and idist_group_end
#pragma once

#include "core/model.h"

typedef struct idist__together {
    int depth;                 // open idist_group_begin calls
    idist_status status;       // first failure inside them
    char text[1024];           // of it
    idist__task *first, *last; // started inside them
    idist__world *held_world;  // its device backend holds some of them back until the end
} idist__together;

IDIST__TLS idist__together idist__together_now;
