// implementation.cpp - the implementation of idist, which only this file of the extension compiles
#define IDIST_IMPLEMENTATION
#include "idist.h"
