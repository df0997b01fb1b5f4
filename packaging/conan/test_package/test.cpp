#include "test.c"
