#include "heap/slab_blocks.h"

#include "base/assert.h"
#include "heap/purge_batch.h"
#include "heap/slab.h"

#include <string.h>

static struct span *new_slab(struct heap *heap, uint32_t class, enum run_choice choice) {
    bool clean;
    uint64_t made = heap->runs.huge_pages_made;
    struct span *span = runs_take(&heap->runs, heap->classes->of[class].slab_pages, 1, choice, NULL, &clean);
    heap->dirtied_pages += heap->runs.huge_pages_made - made;
    if (span != NULL) {
        slab_open(heap, span, class, clean);
    }
    return span;
}

/* The bin's current slab, with a free block; NULL if memory is short. */
static struct span *current_slab(struct heap *heap, uint32_t class, enum run_choice choice) {
    struct slab_bin *bin = &heap->bins[class];
    if (bin->current != NULL && !slab_is_full(heap, bin->current)) {
        calm_assert(bin->current->class == class, class, bin->current->page);
        return bin->current;
    }
    bin->current = bin->part_used;
    if (bin->current != NULL) {
        address_order_remove(&bin->part_used, bin->current);
        calm_assert(bin->current->class == class && !slab_is_full(heap, bin->current), class);
    } else {
        bin->current = new_slab(heap, class, choice);
    }
    return bin->current;
}

size_t heap_take_blocks(struct heap *heap, uint32_t class, void **blocks, size_t count,
                        const struct take_options *options) {
    calm_assert(class > 0 && class < heap->classes->count, class, count);
    struct prefault prefault = {.populate = options->prefault};
    size_t taken = 0;
    while (taken < count) {
        struct span *slab = current_slab(heap, class, options->new_slabs);
        if (slab == NULL) {
            break;
        }
        taken += slab_take(heap, slab, blocks + count - taken, count - taken,
                           options->prefault == NULL ? NULL : &prefault);
    }
    calm_assert(taken <= count, taken, count);
    prefault_finish(&prefault);
    if (taken < count) {
        memmove(blocks, blocks + count - taken, taken * sizeof *blocks);
    }
    return taken;
}

/* The number of the block that begins so many bytes into a slab of the class; -1 if none begins there. */
static long block_at(const struct size_class *class, size_t offset) {
    size_t block = size_class_block_at(class, offset);
    return block < class->slab_blocks && block * class->size == offset ? (long)block : -1;
}

/* The slab that a pointer is in, if any. */
static struct span *slab_at(const struct heap *heap, const void *pointer) {
    uint32_t page = space_page(&heap->space, pointer);
    return page == 0 || heap->space.class_of[page] == 0 ? NULL : space_span_of(&heap->space, page);
}

/*
 * Of a block in use nothing that is read here changes. The slab of one that was freed before may meanwhile
 * become another: so its base and class are read once, and the plan holds if they are the slab's still under
 * the lock.
 */
void heap_plan_puts(const struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count) {
    puts->count = 0;
    size_t i = 0;
    struct slab_bits *last = NULL;
    struct span *slab = NULL;
    char *base = NULL;
    uint8_t class = 0;
    size_t slab_bytes = 0;
    for (; i < count; i++) {
        if ((size_t)((char *)blocks[i] - base) >= slab_bytes) {
            slab = slab_at(heap, blocks[i]);
            base = slab == NULL ? NULL : *(char *volatile *)&slab->base;
            class = slab == NULL ? 0 : *(volatile uint8_t *)&slab->class;
            slab_bytes = (size_t)heap->classes->of[class].slab_pages << heap->space.page_shift;
        }
        const struct size_class *of = &heap->classes->of[class];
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
            *last = (struct slab_bits){slab, base, bit, (uint16_t)word, 1, class};
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
               (slab->claimed &&
                purge_batch_claims(heap->claims, pointer, heap->classes->of[put->class].size))) {
        heap_note_misuse(heap, MISUSE_DOUBLE_FREE, pointer);
    } else {
        slab_put(heap, slab, put->word, put->bits);
    }
}

/* Whether all of them surely are blocks in use, as planned: the slab has not become another since, as it may
 * if a block is freed twice, and no purge has claimed free blocks of it. */
static bool are_in_use(const struct slab_bits *put) {
    const struct span *slab = put->slab;
    return slab != NULL && slab->state == SPAN_SLAB && !slab->claimed && slab->class == put->class &&
           slab->base == put->base && (put->bits & ~slab->allocated[put->word]) == 0;
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
