// core/together.h: what a thread starts between idist_group_begin and idist_group_end
#pragma once

#include "core/model.h"

typedef struct idist__together {
    int depth;                 // open idist_group_begin calls
    idist_status status;       // of the first call that failed, or IDIST_OK
    char text[1024];           // error text of the first call that failed
    idist__task *first, *last; // tasks that wait for idist_group_end
    idist__world *held_world;  // its device backend holds some tasks back until group_end
} idist__together;

IDIST__TLS idist__together idist__together_now;
