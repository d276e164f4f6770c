#include "placement.h"

#include <stdint.h>
#include <string.h>

#include "activation.h"
#include "base/assert.h"
#include "base/size.h"
#include "glibc_malloc.h"
#include "glibc_proof.h"
#include "glibc_settings.h"
#include "options.h"
#include "os/random.h"
#include "os/vm.h"
#include "placement/lines.h"
#include "state.h"

/* Of current x86-64 CPUs: a way of the L1 cache is a page. */
#define PAGE_BYTES 4096UL
#define LINE_BYTES 64UL
#define MAX_SHIFT  (PAGE_BYTES - LINE_BYTES)

/* The program may lower glibc's mmap threshold; still smaller blocks are not placed. */
#define MIN_BYTES (32UL << 10)

/* From this size on, a page more is at most a 64th. */
#define MIN_EXTRA_PAGE_BYTES (64 * PAGE_BYTES)

#define PROOF_TRIES 8 /* other threads may map blocks meanwhile */

_Atomic(bool) placement_started;

const char *placement_why_not = "not asked for";
static _Atomic(uint64_t) turn;  /* blocks placed so far */
static uint64_t placement_seed; /* different in each process */

/* Whether the block is the first of its mapping, and neither alignment nor placement has shifted it. */
static bool begins_page(void *block) {
    const struct chunk *chunk = chunk_of_block(block);
    return (chunk->size_flags & CHUNK_FLAGS) == CHUNK_IS_MMAPPED &&
           (uintptr_t)block % PAGE_BYTES == CHUNK_HEADER_BYTES && chunk->prev_size == 0;
}

/* By how much the next block is shifted. */
static size_t next_shift(size_t room_bytes) {
    if (room_bytes < LINE_BYTES) {
        return 0;
    }
    const struct line_spread spread = {LINE_BYTES, PAGE_BYTES};
    return line_offset(&spread, true, atomic_fetch_add_explicit(&turn, 1, memory_order_relaxed),
                       placement_seed, room_bytes, LINE_BYTES);
}

static void *shifted(void *block, size_t shift) {
    if (shift == 0) {
        return block;
    }
    calm_assert(shift % LINE_BYTES == 0 && shift <= MAX_SHIFT, shift);
    void *placed = (char *)block + shift;
    struct chunk *chunk = chunk_of_block(placed);
    chunk->prev_size = shift;
    chunk->size_flags = chunk_of_block(block)->size_flags - shift;
    return placed;
}

/* A chunk is 8 to 23 bytes larger than its block, and mapped if it reaches the threshold. */
size_t placement_min_bytes(void) {
    size_t max_overhead = CHUNK_HEADER_BYTES + CHUNK_ALIGN_MASK;
    return size_max(LOAD(&glibc_settings.mmap_threshold_bytes), MIN_BYTES + max_overhead) - max_overhead;
}

size_t placement_request_bytes(size_t bytes) {
    if (!placement_is_on() || bytes < MIN_EXTRA_PAGE_BYTES || bytes < placement_min_bytes() ||
        bytes > PTRDIFF_MAX - PAGE_BYTES) {
        return bytes;
    }
    return bytes + MAX_SHIFT; /* no page more if the last one has that much room */
}

void *placement_place(void *block, size_t bytes, size_t kept) {
    if (!placement_is_on() || block == NULL || bytes < MIN_BYTES || !begins_page(block)) {
        return block;
    }
    size_t usable = block_usable_bytes(block);
    if (usable < bytes) {
        return block;
    }
    size_t shift = next_shift(usable - bytes);
    if (shift > 0) {
        ADD(&state.counters.placed_blocks, 1);
        if (kept > 0) { /* untouched pages stay untouched */
            memmove((char *)block + shift, block, kept);
        }
    }
    return shifted(block, shift);
}

/*
 * A placed block starts whole lines after glibc's own offset, an aligned one at a power of two. A header that
 * does not agree with glibc's own was not placed, or has been overwritten; then glibc aborts the process.
 */
void *placement_original(void *block) {
    size_t shift = (uintptr_t)block % PAGE_BYTES - CHUNK_HEADER_BYTES;
    const struct chunk *chunk = chunk_of_block(block);
    if (shift == 0 || shift % LINE_BYTES != 0 || chunk->prev_size != shift) {
        return block;
    }
    void *own = (char *)block - shift;
    bool agree = begins_page(own) && chunk_of_block(own)->size_flags == chunk->size_flags + shift;
    return agree ? own : block;
}

void *placement_restore(void *block, size_t shift, size_t kept) {
    if (block == NULL || shift == 0) {
        return block;
    }
    if (begins_page(block)) {
        return shifted(block, shift); /* the bytes moved with their pages */
    }
    /* The kernel refused to resize the mapping, and glibc has copied to an arena. */
    memmove(block, (char *)block + shift, kept);
    return block;
}

/* ---- the proof ---- */

static const unsigned char marks[] = {0x5a, 0xc3};

static void mark(unsigned char *block, size_t bytes) {
    block[0] = marks[0];
    block[bytes - 1] = marks[1];
}

/* Whether glibc's realloc resizes a placed block with its contents. */
static bool resizes(unsigned char **block, size_t bytes, size_t new_bytes) {
    unsigned char *own = placement_original(*block);
    size_t shift = (size_t)(*block - own);
    unsigned char *resized = __libc_realloc(own, new_bytes + shift);
    if (resized == NULL) {
        return false;
    }
    size_t kept = size_min(bytes, new_bytes);
    *block = placement_restore(resized, shift, kept);
    bool right = *block == resized + shift && placement_original(*block) == resized &&
                 block_usable_bytes(*block) >= new_bytes && (*block)[0] == marks[0] &&
                 (kept < bytes || (*block)[kept - 1] == marks[1]);
    mark(*block, new_bytes);
    return right;
}

/* Whether the block has the pages that glibc counts for it, and no room beyond them. */
static bool adds_up(void *own, size_t bytes, size_t mapped) {
    const struct chunk *chunk = chunk_of_block(own);
    return mapped == ((chunk_bytes(chunk) + PAGE_BYTES - 1) & -PAGE_BYTES) &&
           block_usable_bytes(own) >= bytes &&
           (char *)own + block_usable_bytes(own) <= (char *)chunk + mapped;
}

/* Whether it can be shifted as far as any block, grown, shrunk and freed. Frees it in any case. */
static bool moves(void *own, size_t bytes) {
    unsigned char *block = shifted(own, MAX_SHIFT);
    bool right = placement_original(block) == own;
    mark(block, bytes);
    size_t more = bytes + 2 * PAGE_BYTES;
    right = right && resizes(&block, bytes, more) && resizes(&block, more, bytes);
    own = placement_original(block);
    __libc_free(own);
    return right && !glibc_is_mapped(chunk_of_block(own));
}

static const char *prove(void) {
    const char *found = "no memory";
    for (int i = 0; i < PROOF_TRIES; i++) {
        struct mallinfo before = __libc_mallinfo();
        /* More than is free at the arena's top, which glibc would use first. */
        size_t min_bytes = LOAD(&glibc_settings.mmap_threshold_bytes) + (unsigned)before.keepcost;
        size_t bytes = (min_bytes + (1UL << 20)) & -PAGE_BYTES;
        void *own = __libc_malloc(bytes + MAX_SHIFT);
        if (own == NULL) {
            return found;
        }
        if (!begins_page(own)) {
            __libc_free(own);
            found = "glibc maps no large blocks";
            continue;
        }
        size_t mapped = (unsigned)__libc_mallinfo().hblkhd - (unsigned)before.hblkhd;
        if (!adds_up(own, bytes + MAX_SHIFT, mapped)) {
            __libc_free(own);
            found = "a mapped block is not laid out as known";
            continue;
        }
        /* Not the bytes: realloc in 2.43 counts 16 too many. */
        if (moves(own, bytes) && __libc_mallinfo().hblks == before.hblks) {
            return "";
        }
        found = "a mapped block that was moved does not work";
    }
    return found;
}

/* If glibc is governed, its version is known, and freeing a mapped block changes none of its thresholds. */
static const char *find_obstacle(void) {
    return !options.placement             ? placement_why_not
           : !activation_is_on()          ? "glibc is not governed"
           : glibc_settings.check         ? "glibc.malloc.check marks where each block ends"
           : vm_page_size() != PAGE_BYTES ? "pages are not of 4096 bytes"
                                          : prove();
}

void placement_start(void) {
    placement_why_not = find_obstacle();
    if (*placement_why_not == '\0') {
        placement_seed = random_process_seed();
        atomic_store_explicit(&placement_started, true, memory_order_release);
    }
}
