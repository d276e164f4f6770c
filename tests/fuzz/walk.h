/* The walk over a heap that checks its consistency, for all targets that own a heap. */
#ifndef CALM_TESTS_FUZZ_WALK_H
#define CALM_TESTS_FUZZ_WALK_H

#include "heap/walk.h"

#endif
