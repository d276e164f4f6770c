/* Where the process's heap has its records. */
#ifndef CALM_API_LAYOUT_H
#define CALM_API_LAYOUT_H

#include "heap/blocks_layout.h"

extern const struct blocks_layout calm_blocks;

#endif
