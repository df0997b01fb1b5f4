#include "implementation.c"
