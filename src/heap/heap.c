#include "heap/heap.h"

#include "base/assert.h"

static void set_classes(struct heap *heap, const struct size_classes *classes) {
    calm_assert(classes->count > 1 && classes->count <= SIZE_CLASSES, classes->count);
    heap->classes = classes;
    heap->runs.space = &heap->space;
}

static size_t bitmap_words(const struct size_classes *classes) {
    return (classes->max_slab_blocks + 63) / 64;
}

bool heap_init(struct heap *heap, const struct size_classes *classes, size_t address_space) {
    set_classes(heap, classes);
    return space_init(&heap->space, address_space, bitmap_words(classes));
}

bool heap_init_part(struct heap *heap, const struct size_classes *classes, const struct page_map *map,
                    unsigned part) {
    set_classes(heap, classes);
    return space_init_part(&heap->space, map, part, bitmap_words(classes));
}

void heap_note_misuse(struct heap *heap, enum misuse kind, const void *pointer) {
    heap->misuse[heap->misuses++ % MISUSE_RECORDS] =
        (struct misuse_record){kind, pointer != heap->freed_now, pointer};
}

void heap_note_wild_free(struct heap *heap, const void *pointer) {
    uint32_t page = space_page(&heap->space, pointer);
    bool freed = false;
    if (page != 0 && space_is_usable(&heap->space, page)) {
        const struct span *span = space_span_of(&heap->space, page);
        freed = page - span->page < span->pages && span->state >= SPAN_DIRTY && span->state <= SPAN_TAKEN;
    }
    heap_note_misuse(heap, freed ? MISUSE_DOUBLE_FREE : MISUSE_INVALID_FREE, pointer);
}
