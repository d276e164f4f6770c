#include "colored/balance.h"

#include "base/assert.h"

#define NOT_CHOSEN UINT32_MAX

/* The pages of a color, or of unknown color. */
struct bin {
    uint32_t free; /* the first that is not chosen, or NOT_CHOSEN */
    uint32_t used;
};

static uint32_t bin_take(struct bin *bin, const uint32_t *next) {
    calm_assert(bin->free != NOT_CHOSEN);
    uint32_t page = bin->free;
    bin->free = next[page];
    bin->used++;
    return page;
}

/* Of the bins with free pages, one with the fewest used pages. That of unknown color, which is last, only if
 * there is no other. */
static struct bin *least_used(struct bin *bins, size_t colors) {
    struct bin *best = &bins[colors];
    for (size_t i = colors; i-- > 0;) {
        if (bins[i].free != NOT_CHOSEN && (best == &bins[colors] || bins[i].used <= best->used)) {
            best = &bins[i];
        }
    }
    return best;
}

struct balance balance_choose(const uint16_t *color_of, size_t pages, size_t colors, size_t first,
                              size_t positions, uint32_t *chosen, uint32_t *next) {
    struct bin bins[BALANCE_MAX_COLORS + 1];
    struct balance balance = {0, 0};
    colors = colors > 0 ? colors : 1; /* a cache without colors has one */
    calm_assert(colors <= BALANCE_MAX_COLORS && positions <= pages, colors, positions, pages);
    for (size_t i = 0; i <= colors; i++) {
        bins[i] = (struct bin){.free = NOT_CHOSEN, .used = 0};
    }
    for (size_t page = pages; page-- > 0;) { /* so that the first page is taken first */
        struct bin *bin = &bins[color_of[page] == BALANCE_UNKNOWN ? colors : color_of[page]];
        next[page] = bin->free;
        bin->free = (uint32_t)page;
    }
    for (size_t i = 0; i < positions; i++) {
        struct bin *bin = &bins[(first + i) % colors];
        chosen[i] = bin->free == NOT_CHOSEN ? NOT_CHOSEN : bin_take(bin, next);
    }
    for (size_t i = 0; i < positions; i++) {
        if (chosen[i] == NOT_CHOSEN) {
            chosen[i] = bin_take(least_used(bins, colors), next);
            balance.misplaced++;
        }
    }
    size_t even = (positions + colors - 1) / colors;
    for (size_t i = 0; i < colors; i++) {
        balance.crowded += bins[i].used > even ? bins[i].used - even : 0;
    }
    return balance;
}
