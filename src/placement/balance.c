#include "placement/balance.h"

#define NONE UINT32_MAX

struct shelf {
    uint32_t free; /* the first of its pages that is not chosen, or NONE */
    uint32_t used;
};

static uint32_t take(struct shelf *shelf, const uint32_t *next) {
    uint32_t page = shelf->free;
    shelf->free = next[page];
    shelf->used++;
    return page;
}

/* Of those that have a page left, one of which the fewest are used; the unknown, which is last, only if there
 * is no other. */
static struct shelf *emptiest(struct shelf *shelves, size_t colors) {
    struct shelf *best = &shelves[colors];
    for (size_t i = colors; i-- > 0;) {
        if (shelves[i].free != NONE && (best == &shelves[colors] || shelves[i].used <= best->used)) {
            best = &shelves[i];
        }
    }
    return best;
}

struct balance balance_choose(const uint16_t *color_of, size_t pages, size_t colors, size_t first,
                              size_t places, uint32_t *chosen, uint32_t *next) {
    struct shelf shelves[BALANCE_COLORS_MOST + 1];
    struct balance balance = {0, 0};
    colors = colors > 0 ? colors : 1; /* as a cache without colors has one */
    for (size_t i = 0; i <= colors; i++) {
        shelves[i] = (struct shelf){.free = NONE, .used = 0};
    }
    for (size_t page = pages; page-- > 0;) { /* so that the first is taken first */
        struct shelf *shelf = &shelves[color_of[page] == BALANCE_UNKNOWN ? colors : color_of[page]];
        next[page] = shelf->free;
        shelf->free = (uint32_t)page;
    }
    for (size_t i = 0; i < places; i++) {
        struct shelf *shelf = &shelves[(first + i) % colors];
        chosen[i] = shelf->free == NONE ? NONE : take(shelf, next);
    }
    for (size_t i = 0; i < places; i++) {
        if (chosen[i] == NONE) {
            chosen[i] = take(emptiest(shelves, colors), next);
            balance.misplaced++;
        }
    }
    size_t even = (places + colors - 1) / colors;
    for (size_t i = 0; i < colors; i++) {
        balance.crowded += shelves[i].used > even ? shelves[i].used - even : 0;
    }
    return balance;
}
