#include "colored/block_table.h"

#include "base/assert.h"
#include "colored/page_mover.h"
#include "os/vm.h"

#define MAX_COLORED_BLOCKS 1024

/* States of an entry without a block. Entries are used in order: behind one that is UNUSED, all are. */
enum { UNUSED, VACANT, CLAIMED };

static struct block table_blocks[MAX_COLORED_BLOCKS];

static uintptr_t state_of(const struct block *block) {
    return atomic_load_explicit(&block->state, memory_order_acquire);
}

/* The first entry in a state. NULL if there is none. */
static struct block *block_find(uintptr_t state) {
    for (struct block *block = table_blocks; block < table_blocks + MAX_COLORED_BLOCKS; block++) {
        uintptr_t found = state_of(block);
        if (found == state || found == UNUSED) {
            return found == state ? block : NULL;
        }
    }
    return NULL;
}

static struct block *block_claim_in(uintptr_t state) {
    struct block *block;
    uintptr_t expected;
    do {
        expected = state;
        block = block_find(state);
    } while (block != NULL &&
             !atomic_compare_exchange_weak_explicit(&block->state, &expected, CLAIMED, memory_order_acquire,
                                                    memory_order_relaxed));
    return block;
}

struct block *block_claim_vacant(void) {
    struct block *block = block_claim_in(VACANT);
    return block != NULL ? block : block_claim_in(UNUSED);
}

struct block *block_claim(const void *address) {
    return (uintptr_t)address <= CLAIMED ? NULL : block_claim_in((uintptr_t)address);
}

void *block_publish(struct block *block) {
    calm_assert(state_of(block) == CLAIMED, state_of(block));
    mapping_release(&block->surplus);
    char *address = atomic_load_explicit(&block->pages.base, memory_order_relaxed);
    atomic_store_explicit(&block->state, (uintptr_t)address, memory_order_release);
    return address;
}

void block_discard(struct block *block) {
    calm_assert(state_of(block) == CLAIMED, state_of(block));
    mapping_release(&block->surplus);
    mapping_release(&block->pages);
    page_mappings_return(block->moved_pages);
    block->moved_pages = 0;
    atomic_store_explicit(&block->state, VACANT, memory_order_release);
}

bool block_stats(const void *address, struct calm_colored *stats) {
    const struct block *block = (uintptr_t)address <= CLAIMED ? NULL : block_find((uintptr_t)address);
    if (block != NULL) {
        *stats = block->stats;
    }
    return block != NULL;
}

void block_table_after_fork(void) {
    size_t moved_pages = 0;
    for (struct block *block = table_blocks;
         block < table_blocks + MAX_COLORED_BLOCKS && state_of(block) != UNUSED; block++) {
        if (state_of(block) == CLAIMED) {
            block_discard(block);
        }
        moved_pages += block->moved_pages;
    }
    page_mappings_after_fork(moved_pages);
}

char *mapping_reserve(struct page_range *mapping, size_t bytes) {
    char *base = vm_reserve(bytes);
    if (base != NULL) {
        vm_disable_huge_pages(base, bytes);
    }
    mapping->bytes = bytes;
    atomic_store_explicit(&mapping->base, base, memory_order_release);
    return base;
}

/* The entry forgets the mapping before the kernel does: the address may be another thread's right after, and
 * the child of a fork must not unmap what lies there then. */
void mapping_release(struct page_range *mapping) {
    char *base = atomic_exchange_explicit(&mapping->base, NULL, memory_order_acq_rel);
    if (base != NULL) {
        vm_release(base, mapping->bytes);
    }
}
