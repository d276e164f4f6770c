#include "placement.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "glibc_layout.h"
#include "glibc_malloc.h"
#include "glibc_prove.h"
#include "governor.h"
#include "os/seed.h"
#include "placement/lines.h"

/* Those of today's x86-64 CPUs: a way of the L1 is a page, in so many lines. */
#define PAGE_BYTES 4096UL
#define LINE_BYTES 64UL
#define MOST_SHIFT (PAGE_BYTES - LINE_BYTES)

/* What the program itself may make glibc map, if it is smaller, is not placed. */
#define LEAST_BYTES (32UL << 10)

/* From here on a page more is at most a 64th. */
#define MAY_COST_A_PAGE_BYTES (64 * PAGE_BYTES)

#define PROVE_TRIES 8 /* other threads may map blocks meanwhile */

_Atomic(bool) placement_started;

static const char *why_not = "not asked for";
static _Atomic(uint64_t) turn; /* blocks placed so far */
static uint64_t seed;          /* so that processes differ */

const char *placement_why_not(void) {
    return placement_is_on() ? NULL : why_not;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* The first of its mapping, and glibc's alone: none that alignment or we have moved. */
static bool begins_its_page(void *block) {
    const struct chunk *chunk = chunk_of_block(block);
    return (chunk->size_flags & CHUNK_FLAGS) == CHUNK_IS_MMAPPED &&
           (uintptr_t)block % PAGE_BYTES == CHUNK_HEADER_BYTES && chunk->prev_size == 0;
}

/* How far on the next block begins. */
static size_t next_shift(size_t room_bytes) {
    if (room_bytes < LINE_BYTES) {
        return 0;
    }
    const struct line_spread spread = {LINE_BYTES, PAGE_BYTES};
    return line_offset(&spread, true, atomic_fetch_add_explicit(&turn, 1, memory_order_relaxed), seed,
                       room_bytes, LINE_BYTES);
}

static void *shifted(void *block, size_t shift) {
    if (shift == 0) {
        return block;
    }
    void *placed = (char *)block + shift;
    struct chunk *chunk = chunk_of_block(placed);
    chunk->prev_size = shift;
    chunk->size_flags = chunk_of_block(block)->size_flags - shift;
    return placed;
}

/* A chunk is of 8 to 23 bytes more than its block, and mapped if it is of the threshold. */
size_t placement_least_bytes(void) {
    size_t threshold = governor_mmap_threshold();
    return threshold > LEAST_BYTES + CHUNK_HEADER_BYTES + CHUNK_ALIGN_MASK
               ? threshold - CHUNK_HEADER_BYTES - CHUNK_ALIGN_MASK
               : LEAST_BYTES;
}

size_t placement_ask(size_t bytes) {
    if (bytes < MAY_COST_A_PAGE_BYTES || bytes < placement_least_bytes() ||
        bytes > PTRDIFF_MAX - PAGE_BYTES) {
        return bytes;
    }
    return bytes + MOST_SHIFT; /* no page more where the last one has that much room */
}

void *placement_place(void *block, size_t bytes, size_t kept) {
    if (block == NULL || bytes < LEAST_BYTES || !begins_its_page(block)) {
        return block;
    }
    size_t usable = chunk_bytes(chunk_of_block(block)) - glibc_mmapped_overhead_bytes;
    if (usable < bytes) {
        return block;
    }
    size_t shift = next_shift(usable - bytes);
    if (shift > 0) {
        governor_note_placed();
        if (kept > 0) { /* a page that nobody has touched stays untouched */
            memmove((char *)block + shift, block, kept);
        }
    }
    return shifted(block, shift);
}

/*
 * Lines behind glibc's own place, so a block is no aligned one: those begin at powers of two. What does not
 * agree with glibc's header was not placed, or has been overwritten, and then glibc is to end the process
 * over it.
 */
void *placement_glibcs(void *block) {
    size_t shift = (uintptr_t)block % PAGE_BYTES - CHUNK_HEADER_BYTES;
    const struct chunk *chunk = chunk_of_block(block);
    if (shift == 0 || shift % LINE_BYTES != 0 || chunk->prev_size != shift) {
        return block;
    }
    void *own = (char *)block - shift;
    bool agree = begins_its_page(own) && chunk_of_block(own)->size_flags == chunk->size_flags + shift;
    return agree ? own : block;
}

void *placement_keep(void *block, size_t shift, size_t kept) {
    if (block == NULL || shift == 0) {
        return block;
    }
    if (begins_its_page(block)) {
        return shifted(block, shift); /* the bytes came along with their pages */
    }
    /* The mapping could not be resized, and an arena had room. */
    memmove(block, (char *)block + shift, kept);
    return block;
}

/* ---- the proof ---- */

static const unsigned char marks[] = {0x5a, 0xc3};

static void mark(unsigned char *block, size_t bytes) {
    block[0] = marks[0];
    block[bytes - 1] = marks[1];
}

/* Whether a placed block goes through glibc's realloc to another size, both ways, with what it holds. */
static bool resizes(unsigned char **block, size_t bytes, size_t new_bytes) {
    unsigned char *own = placement_glibcs(*block);
    size_t shift = (size_t)(*block - own);
    unsigned char *resized = __libc_realloc(own, new_bytes + shift);
    if (resized == NULL) {
        return false;
    }
    size_t kept = smaller(bytes, new_bytes);
    *block = placement_keep(resized, shift, kept);
    size_t usable = chunk_bytes(chunk_of_block(*block)) - glibc_mmapped_overhead_bytes;
    bool right = *block == resized + shift && placement_glibcs(*block) == resized && usable >= new_bytes &&
                 (*block)[0] == marks[0] && (kept < bytes || (*block)[kept - 1] == marks[1]);
    mark(*block, new_bytes);
    return right;
}

/* Whether the block has the pages that glibc counts for it, and no room beyond them. */
static bool adds_up(void *own, size_t bytes, size_t mapped) {
    const struct chunk *chunk = chunk_of_block(own);
    size_t usable = chunk_bytes(chunk) - glibc_mmapped_overhead_bytes;
    return mapped == ((chunk_bytes(chunk) + PAGE_BYTES - 1) & -PAGE_BYTES) && usable >= bytes &&
           (char *)own + usable <= (char *)chunk + mapped;
}

/* Whether it can be placed as far on as any, grow, shrink and go. Freed in any case. */
static bool moves(void *own, size_t bytes) {
    unsigned char *block = shifted(own, MOST_SHIFT);
    bool right = placement_glibcs(block) == own;
    mark(block, bytes);
    size_t more = bytes + 2 * PAGE_BYTES;
    right = right && resizes(&block, bytes, more) && resizes(&block, more, bytes);
    own = placement_glibcs(block);
    __libc_free(own);
    return right && !glibc_is_mapped(chunk_of_block(own));
}

static const char *prove(void) {
    const char *found = "no memory";
    for (int i = 0; i < PROVE_TRIES; i++) {
        struct mallinfo before = __libc_mallinfo();
        /* More than is free in the arena's top: that would be taken first. */
        size_t bytes = (governor_mmap_threshold() + (unsigned)before.keepcost + (1UL << 20)) & -PAGE_BYTES;
        void *own = __libc_malloc(bytes + MOST_SHIFT);
        if (own == NULL) {
            return found;
        }
        if (!begins_its_page(own)) {
            __libc_free(own);
            found = "glibc maps no large blocks";
            continue;
        }
        size_t mapped = (unsigned)__libc_mallinfo().hblkhd - (unsigned)before.hblkhd;
        if (!adds_up(own, bytes + MOST_SHIFT, mapped)) {
            __libc_free(own);
            found = "a mapped block is not laid out as known";
            continue;
        }
        /* Not the bytes: realloc in 2.43 counts 16 too many. */
        if (moves(own, bytes) && __libc_mallinfo().hblks == before.hblks) {
            return NULL;
        }
        found = "a mapped block that was moved does not work";
    }
    return found;
}

/* Only where glibc is governed: its version is known then, and freeing a mapped block changes no threshold of
 * glibc's own. */
static const char *stands_against(const struct options *options) {
    if (!options->placement) {
        return "not asked for";
    }
    if (!governor_is_active()) {
        return "glibc is not governed";
    }
    if (options->sets_check) {
        return "glibc.malloc.check marks where each block ends";
    }
    if (sysconf(_SC_PAGESIZE) != (long)PAGE_BYTES) {
        return "pages are not of 4096 bytes";
    }
    return prove();
}

void placement_start(const struct options *options) {
    why_not = stands_against(options);
    if (why_not != NULL) {
        return;
    }
    seed = os_process_seed();
    atomic_store_explicit(&placement_started, true, memory_order_release);
}
