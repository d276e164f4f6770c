/* Where the process's heap has its records: for readers outside of the process. */
#include "api/layout.h"

#include "api/state.h"
#include "governor/governor.h"

#include <stddef.h>

#define SPACE calm_governor.heap.space

const struct blocks_layout calm_blocks = {
    .magic = {'c', 'a', 'l', 'm', 'b', 'l', 'k', 's'},
    .version = BLOCKS_LAYOUT_VERSION,
    .bytes = sizeof(struct blocks_layout),
    .page_bytes = &SPACE.page_size,
    .spans = &SPACE.spans.memory[TABLE_SPANS].base,
    .spans_end = &SPACE.spans.end,
    .span_bytes = &SPACE.spans.span_bytes,
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
    .records = {&SPACE.page_tables[CLASS_TABLE].base, &SPACE.page_tables[SPAN_TABLE].base,
                &SPACE.page_tables[USER_TABLE].base, &SPACE.spans.memory[TABLE_SPANS].base,
                &SPACE.spans.memory[TABLE_FREE_SPANS].base, &SPACE.spans.memory[TABLE_FREE_WORDS].base,
                &calm_caches.base, &calm_caches.states},
    .depots = &calm_governor.depots[0].bins,
    .depot_count = MAX_DEPOTS,
    .depot_bytes = sizeof(struct depot),
};
_Static_assert(offsetof(struct size_class, size) == 0, "blocks_layout.h");
