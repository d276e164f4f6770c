/*
 * A call: what a client asks of the server and waits for.
 *
 * A slot's word goes FREE, CLAIMED (a client fills it), PENDING (the server may take it), TAKEN (the server
 * is at it), DONE (the client reads the answer), FREE. The client may abandon a call that is PENDING or
 * TAKEN: then the server frees the slot, undoing what it did; so slots are the process's, and never on a
 * client's stack. A record that names a slot which is not PENDING is an old one, and is skipped. tests/model/
 * has the proof.
 */
#ifndef CALM_OFFLOAD_CALL_H
#define CALM_OFFLOAD_CALL_H

#include "heap/size_class.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CALLS      128
#define CALL_WORDS (CALLS / 64)

enum call_state { CALL_FREE, CALL_CLAIMED, CALL_PENDING, CALL_TAKEN, CALL_DONE, CALL_ABANDONED };
#define CALL_STATE    0x7U
#define CALL_SLEEPING 0x8U /* the client sleeps on the word */

enum call_kind {
    CALL_BLOCKS,
    CALL_LARGE,
    CALL_SHORT, /* the caller's own work */
    CALL_LONG,  /* the same, not begun between two pieces of other long work */
};

enum take_flags {
    TAKE_ZEROED = 1,  /* for calloc */
    TAKE_AT_ONCE = 2, /* without being made resident first: somebody waits */
};

struct call {
    _Alignas(64) _Atomic(uint32_t) state;
    enum call_kind kind;
    _Atomic(uint64_t) claimer; /* the thread pointer of who claimed it last */
    /* CALL_BLOCKS */
    uint32_t class;
    size_t count; /* wanted; then how many blocks there are */
    /* CALL_LARGE */
    size_t pages;
    size_t align_pages;
    unsigned flags;
    bool zero;
    void *block;
    /* The caller's work, to be run on the server: not abandoned once it has begun. */
    void (*work)(void *subject);
    void *subject;
    void *blocks[MAGAZINE_BLOCKS_MOST];
};

#endif
