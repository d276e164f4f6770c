#include "heap/slab_blocks.h"

#include "base/assert.h"
#include "heap/purge_batch.h"
#include "heap/slab.h"

#include <string.h>

static struct span *new_slab(struct heap *heap, uint32_t size_class) {
    bool clean;
    struct span *span =
        runs_take(&heap->runs, heap->classes->of[size_class].slab_pages, 1, RUN_FOR_ANY, NULL, &clean);
    if (span != NULL) {
        slab_open(heap, span, size_class, clean);
    }
    return span;
}

/* Returns the bin's current slab, which has a free block, or NULL if memory is
 * short. */
static struct span *current_slab(struct heap *heap, uint32_t size_class) {
    struct slab_bin *bin = &heap->bins[size_class];
    if (bin->current != NULL && !slab_is_full(heap, bin->current)) {
        calm_assert(bin->current->size_class == size_class, size_class, bin->current->page);
        return bin->current;
    }
    bin->current = bin->part_used;
    if (bin->current != NULL) {
        address_order_remove(&bin->part_used, bin->current);
        calm_assert(bin->current->size_class == size_class && !slab_is_full(heap, bin->current), size_class);
    } else {
        bin->current = new_slab(heap, size_class);
    }
    return bin->current;
}

bool heap_has_blocks(const struct heap *heap, uint32_t size_class) {
    const struct slab_bin *bin = &heap->bins[size_class];
    return (bin->current != NULL && !slab_is_full(heap, bin->current)) || bin->part_used != NULL ||
           runs_have_dirty(&heap->runs, heap->classes->of[size_class].slab_pages);
}

size_t heap_take_blocks(struct heap *heap, uint32_t size_class, void **blocks, size_t count) {
    calm_assert(size_class > 0 && size_class < heap->classes->count, size_class, count);
    size_t taken = 0;
    while (taken < count) {
        struct span *slab = current_slab(heap, size_class);
        if (slab == NULL) {
            break;
        }
        taken += slab_take(heap, slab, blocks + count - taken, count - taken);
    }
    calm_assert(taken <= count, taken, count);
    if (taken < count) {
        memmove(blocks, blocks + count - taken, taken * sizeof *blocks);
    }
    return taken;
}

/* Returns the number of the block that begins at this offset in a slab of the
 * class, or -1 if none begins there. */
static long block_at(const struct size_class *size_class, size_t offset) {
    size_t block = size_class_block_at(size_class, offset);
    return block < size_class->slab_blocks && block * size_class->size == offset ? (long)block : -1;
}

/* Returns the slab that contains the pointer, or NULL. */
static struct span *slab_at(const struct heap *heap, const void *pointer) {
    uint32_t page = space_page(&heap->space, pointer);
    return page == 0 || heap->space.class_of[page] == 0 ? NULL : space_span_of(&heap->space, page);
}

/*
 * Nothing that is read here changes while the block is in use. If the block was
 * freed before, its slab may meanwhile become another slab. The function
 * therefore reads the slab's base and class only once. heap_put_planned follows
 * the plan only if the slab has this base and class under the lock.
 */
void heap_plan_puts(const struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count) {
    puts->count = 0;
    size_t i = 0;
    struct slab_bits *last = NULL;
    struct span *slab = NULL;
    char *base = NULL;
    uint8_t size_class = 0;
    size_t slab_bytes = 0;
    for (; i < count; i++) {
        if ((size_t)((char *)blocks[i] - base) >= slab_bytes) {
            slab = slab_at(heap, blocks[i]);
            base = slab == NULL ? NULL : *(char *volatile *)&slab->base;
            size_class = slab == NULL ? 0 : *(volatile uint8_t *)&slab->size_class;
            slab_bytes = (size_t)heap->classes->of[size_class].slab_pages << heap->space.page_shift;
        }
        const struct size_class *of = &heap->classes->of[size_class];
        long block = slab == NULL ? -1 : block_at(of, (size_t)((char *)blocks[i] - base));
        size_t word = (size_t)block / 64;
        uint64_t bit = (uint64_t)1 << (block & 63);
        if (last != NULL && block >= 0 && last->slab == slab && last->base == base && last->word == word &&
            (last->bits & bit) == 0) {
            last->bits |= bit;
            last->count++;
            continue;
        }
        if (puts->count == MAX_HEAP_PUTS) {
            break;
        }
        last = &puts->of[puts->count++];
        *last = (struct slab_bits){.count = 1};
        if (block >= 0) {
            *last = (struct slab_bits){slab, base, bit, (uint16_t)word, 1, size_class};
            __builtin_prefetch(&slab->used_blocks, 1);
            __builtin_prefetch(&slab->allocated[word], 1);
            __builtin_prefetch(&heap->space.users_of[slab->page], 1);
        }
    }
    calm_assert(puts->count <= MAX_HEAP_PUTS && i <= count, puts->count, i, count);
    puts->planned = i;
}

static void put_block(struct heap *heap, void *pointer) {
    struct heap_puts one;
    heap_plan_puts(heap, &one, &pointer, 1);
    const struct slab_bits *put = &one.of[0];
    struct span *slab = put->slab;
    if (slab == NULL) {
        heap_note_wild_free(heap, pointer);
    } else if ((slab->allocated[put->word] & put->bits) == 0 ||
               (slab->claimed && heap_claims(heap, pointer, heap->classes->of[put->size_class].size))) {
        heap_note_misuse(heap, MISUSE_DOUBLE_FREE, pointer);
    } else {
        slab_put(heap, slab, put->word, put->bits);
    }
}

/* Returns whether the planned blocks are certainly still in use. After a double
 * free, their slab may have become another slab since the plan. A purge may
 * have claimed free blocks of the slab. */
static bool are_in_use(const struct slab_bits *put) {
    const struct span *slab = put->slab;
    return slab != NULL && slab->state == SPAN_SLAB && !slab->claimed &&
           slab->size_class == put->size_class && slab->base == put->base &&
           (put->bits & ~slab->allocated[put->word]) == 0;
}

void heap_put_planned(struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count) {
    for (;;) {
        void *const *block = blocks;
        calm_assert(puts->planned <= count && (puts->count > 0 || count == 0), puts->planned, count);
        for (size_t i = 0; i < puts->count; i++) {
            const struct slab_bits *put = &puts->of[i];
            if (are_in_use(put)) {
                slab_put(heap, put->slab, put->word, put->bits);
            } else {
                for (size_t each = 0; each < put->count; each++) {
                    put_block(heap, block[each]);
                }
            }
            block += put->count;
        }
        calm_assert(block == blocks + puts->planned, puts->planned);
        blocks += puts->planned;
        count -= puts->planned;
        if (count == 0) {
            return;
        }
        heap_plan_puts(heap, puts, blocks, count);
    }
}

void heap_put_blocks(struct heap *heap, void *const *blocks, size_t count) {
    struct heap_puts puts;
    heap_plan_puts(heap, &puts, blocks, count);
    heap_put_planned(heap, &puts, blocks, count);
}
