/* Sets of up to 128 CPUs or threads. */
#ifndef CALM_TRACE_BITS_H
#define CALM_TRACE_BITS_H

#include <stdint.h>

#define BITS 128

__extension__ typedef unsigned __int128 bits;

static inline bits bit_of(unsigned number) {
    return (bits)1 << number;
}

/* The set is not empty. */
static inline unsigned lowest_bit(bits set) {
    uint64_t low = (uint64_t)set;
    return low != 0 ? (unsigned)__builtin_ctzll(low) : 64 + (unsigned)__builtin_ctzll((uint64_t)(set >> 64));
}

#endif
