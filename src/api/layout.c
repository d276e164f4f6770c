/* Where the process's heap has its records: for readers outside of the process. */
#include "api/layout.h"

#include "api/state.h"
#include "governor/governor.h"

#include <stddef.h>

#define SPACE         calm_governor.heap.space
#define SHELF(number) &calm_governor.depots[number].shelves

const struct blocks_layout calm_blocks = {
    .magic = {'c', 'a', 'l', 'm', 'b', 'l', 'k', 's'},
    .version = BLOCKS_LAYOUT_VERSION,
    .bytes = sizeof(struct blocks_layout),
    .page_bytes = &SPACE.page_size,
    .spans = &SPACE.spans_region.base,
    .spans_end = &SPACE.spans_end,
    .span_bytes = &SPACE.span_bytes,
    .span_page = offsetof(struct span, page),
    .span_pages = offsetof(struct span, pages),
    .span_used_blocks = offsetof(struct span, used_blocks),
    .span_class = offsetof(struct span, class),
    .span_state = offsetof(struct span, state),
    .slab = SPAN_SLAB,
    .large = SPAN_LARGE,
    .pages = &SPACE.users_of,
    .page_users = PAGE_USERS,
    .page_dirty = PAGE_DIRTY,
    .class_bytes = sizeof(struct size_class),
    .classes = &calm_classes.of[0],
    .class_count = &calm_classes.count,
    .segments = &SPACE.segment[0].region.base,
    .segment_count = &SPACE.segments,
    .segment_bytes = sizeof(struct segment),
    .records = {&SPACE.classes_region.base, &SPACE.spans_of_region.base, &SPACE.users_region.base,
                &SPACE.spans_region.base, &SPACE.free_spans_region.base, &SPACE.free_words_region.base,
                &calm_caches.regions, &calm_caches.states, SHELF(0), SHELF(1), SHELF(2), SHELF(3), SHELF(4),
                SHELF(5), SHELF(6), SHELF(7)},
};
_Static_assert(offsetof(struct size_class, size) == 0, "blocks_layout.h");
_Static_assert(MAX_DEPOTS == 8, "a shelf for each depot");
