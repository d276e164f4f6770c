/*
 * Where the table of samples is, for other processes. An offset belongs to the field of the same
 * name in struct samples or struct sample_stack. Weights are two words of 64
 * bits: count and bytes. Stack number 0 is none. New fields go to the end. A
 * change of meaning changes the version.
 */
#ifndef CALM_PROFILE_SAMPLES_LAYOUT_H
#define CALM_PROFILE_SAMPLES_LAYOUT_H

#include "profile/samples.h"

#define SAMPLES_LAYOUT_VERSION 1

struct samples_layout {
    char magic[8]; /* "calmheap", without its NUL */
    uint32_t version;
    uint32_t bytes;                /* of this struct */
    const struct samples *samples; /* all zero if the profile was never on */
    const void *mean_bytes;        /* uint64_t: between two samples now; 0: off */
    const void *last_mean_bytes;   /* uint64_t: between two samples when the profile was last on */
    uint32_t count_unit;           /* the count of one block */
    uint32_t max_depth;
    uint32_t max_stacks;
    uint32_t stacks; /* pointers */
    uint32_t addresses;
    uint32_t stacks_end; /* uint32_t */
    uint32_t addresses_end;
    uint32_t dropped; /* uint64_t */
    uint32_t peak_bytes;
    uint32_t peak_ns;
    uint32_t peak_epoch;
    uint32_t stack_bytes;
    uint32_t sequence; /* uint32_t */
    uint32_t first;
    uint32_t depth;
    uint32_t allocated; /* weights */
    uint32_t in_use;
    uint32_t at_peak;
    uint32_t epoch;     /* uint64_t */
    uint32_t lifetimes; /* double */
    uint32_t births;
    uint32_t unused;
};

#define SAMPLES_FIELD(field) .field = offsetof(struct samples, field)
#define STACK_FIELD(field)   .field = offsetof(struct sample_stack, field)

/* Initializes the description of a table and of the two means. */
#define SAMPLES_LAYOUT(table, mean, last_mean)                                                          \
    {                                                                                                   \
        .magic = {'c', 'a', 'l', 'm', 'h', 'e', 'a', 'p'}, .version = SAMPLES_LAYOUT_VERSION,           \
        .bytes = sizeof(struct samples_layout), .samples = (table), .mean_bytes = (mean),               \
        .last_mean_bytes = (last_mean), .count_unit = SAMPLE_COUNT_UNIT, .max_depth = MAX_SAMPLE_DEPTH, \
        .max_stacks = MAX_SAMPLE_STACKS, .stacks = offsetof(struct samples, stacks.base),               \
        .addresses = offsetof(struct samples, addresses.base), SAMPLES_FIELD(stacks_end),               \
        SAMPLES_FIELD(addresses_end), SAMPLES_FIELD(dropped), SAMPLES_FIELD(peak_bytes),                \
        SAMPLES_FIELD(peak_ns), SAMPLES_FIELD(peak_epoch), .stack_bytes = sizeof(struct sample_stack),  \
        STACK_FIELD(sequence), STACK_FIELD(first), STACK_FIELD(depth), STACK_FIELD(allocated),          \
        STACK_FIELD(in_use), STACK_FIELD(at_peak), STACK_FIELD(epoch), STACK_FIELD(lifetimes),          \
        STACK_FIELD(births),                                                                            \
    }

#endif
