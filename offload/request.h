/* What a client asks for: blocks of one size class, or a large block, to take
 * or to put back. */
#ifndef CALM_OFFLOAD_REQUEST_H
#define CALM_OFFLOAD_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct request {
    uint32_t size_class; /* 0: one large block */
    void **blocks;
    size_t count; /* in: wanted, or freed; out: taken, 0 if memory is short */
    /* A large block */
    size_t pages;
    size_t align_pages;
    size_t bytes; /* freed */
    bool zeroed;  /* for calloc */
    bool zero;    /* out: known to be zero */
};

#endif
