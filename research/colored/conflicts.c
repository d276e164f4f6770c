#include "colored/conflicts.h"

#include "base/size.h"
#include "colored/balance.h"
#include "os/random.h"

#include <string.h>

#define MAX_COLOR_TRIES 32 /* to find one color */
#define MAX_STUCK       4  /* times that no group could be removed */

struct color_search {
    const struct conflicts *conflicts;
    uint64_t random;
    uint16_t *color_of;
    size_t pages;
    uint32_t *set; /* at first many pages of all colors, at last some of one */
    size_t count;
    uint32_t *other; /* scratch */
    bool over;       /* is_over returned true */
};

static uint64_t draw(struct color_search *search, uint64_t below) {
    search->random += RANDOM_GOLDEN_RATIO;
    return random_mix(search->random) % below;
}

/* False once the search is over: then nothing is found, and the loops below end soon. */
static bool evicts(struct color_search *search, uint32_t page, const uint32_t *walked, size_t count) {
    const struct conflicts *conflicts = search->conflicts;
    search->over = search->over || (conflicts->is_over != NULL && conflicts->is_over(conflicts->bound));
    return !search->over && conflicts->evicts(conflicts->cache, page, walked, count);
}

/* The same, until two answers agree. */
static bool surely_evicts(struct color_search *search, uint32_t page, const uint32_t *walked, size_t count) {
    bool first = evicts(search, page, walked, count);
    return evicts(search, page, walked, count) == first ? first : evicts(search, page, walked, count);
}

/* A set does not get back the pages that it loses by a wrong yes. */
static bool evicts_twice(struct color_search *search, uint32_t page, const uint32_t *walked, size_t count) {
    bool first = evicts(search, page, walked, count);
    return first && evicts(search, page, walked, count);
}

static void shuffle(struct color_search *search) {
    for (size_t i = search->count; i > 1; i--) {
        size_t at = draw(search, i);
        uint32_t page = search->set[i - 1];
        search->set[i - 1] = search->set[at];
        search->set[at] = page;
    }
}

/* Fills the set with pages of colors not yet found, without the page: enough to evict a page of any of these
 * colors. */
static void gather(struct color_search *search, uint32_t page, size_t most) {
    search->count = 0;
    for (size_t i = 0; i < search->pages; i++) {
        if (search->color_of[i] == BALANCE_UNKNOWN && i != page) {
            search->set[search->count++] = (uint32_t)i;
        }
    }
    shuffle(search);
    search->count = size_min(search->count, most);
}

/* Removes a group of the set without which it evicts the page as well. False if there is none. */
static bool remove_group(struct color_search *search, uint32_t page) {
    size_t groups = search->conflicts->ways + 1;
    for (size_t group = 0; group < groups; group++) {
        size_t from = search->count * group / groups;
        size_t to = search->count * (group + 1) / groups;
        size_t rest = search->count - (to - from);
        if (to == from) {
            continue;
        }
        memcpy(search->other, search->set, from * sizeof *search->set);
        memcpy(search->other + from, search->set + to, (search->count - to) * sizeof *search->set);
        if (evicts_twice(search, page, search->other, rest)) {
            memcpy(search->set, search->other, rest * sizeof *search->set);
            search->count = rest;
            return true;
        }
    }
    return false;
}

static void reduce(struct color_search *search, uint32_t page) {
    for (int stuck = 0; search->count > search->conflicts->ways && stuck < MAX_STUCK && !search->over;) {
        if (!remove_group(search, page)) {
            shuffle(search);
            stuck++;
        }
    }
}

/* Whether the first pages of the set, without the page itself, evict it. */
static bool set_evicts(struct color_search *search, uint32_t page, size_t count) {
    size_t walked = 0;
    for (size_t i = 0; i < count; i++) {
        if (search->set[i] != page) {
            search->other[walked++] = search->set[i];
        }
    }
    return surely_evicts(search, page, search->other, walked);
}

static bool holds(const struct color_search *search, uint32_t page) {
    for (size_t i = 0; i < search->count; i++) {
        if (search->set[i] == page) {
            return true;
        }
    }
    return false;
}

/* A set that just suffices misses half of the pages of its color. So the set is extended by pages that it
 * does evict, and then loses those that the others do not evict. */
static void search_grow(struct color_search *search) {
    size_t most = 4 * search->conflicts->ways;
    size_t first = search->count;
    for (uint32_t i = 0; i < search->pages && search->count < most; i++) {
        if (search->color_of[i] == BALANCE_UNKNOWN && !holds(search, i) && set_evicts(search, i, first)) {
            search->set[search->count++] = i;
        }
    }
    for (size_t i = search->count; i-- > 0;) {
        if (!set_evicts(search, search->set[i], search->count)) {
            search->set[i] = search->set[--search->count];
        }
    }
}

/* Leaves a set of pages of one more color in the search. False if none is found. */
static bool find_set(struct color_search *search, size_t colors_left) {
    size_t ways = search->conflicts->ways;
    for (int tries = 0; tries < MAX_COLOR_TRIES && !search->over; tries++) {
        uint32_t page = (uint32_t)draw(search, search->pages);
        for (size_t i = 0; i < search->pages && search->color_of[page] != BALANCE_UNKNOWN; i++) {
            page = (uint32_t)((page + 1) % search->pages);
        }
        gather(search, page, 3 * ways * colors_left);
        if (!surely_evicts(search, page, search->set, search->count)) {
            continue;
        }
        reduce(search, page);
        if (search->count > 3 * ways) {
            continue;
        }
        search_grow(search);
        if (search->count >= ways + ways / 2) {
            return true;
        }
    }
    return false;
}

bool conflicts_find(const struct conflicts *conflicts, size_t pages, uint64_t seed, uint16_t *color_of,
                    uint32_t *scratch) {
    struct color_search search = {
        .conflicts = conflicts,
        .random = seed,
        .color_of = color_of,
        .pages = pages,
    };
    search.set = scratch;
    search.other = scratch + pages;
    if (pages == 0) {
        return false;
    }
    for (size_t i = 0; i < pages; i++) {
        color_of[i] = BALANCE_UNKNOWN;
    }
    size_t unknown = pages;
    for (size_t color = 0; color < conflicts->colors; color++) {
        if (!find_set(&search, conflicts->colors - color)) {
            return false;
        }
        size_t members = size_min(search.count, 3 * conflicts->ways);
        for (uint32_t i = 0; i < pages; i++) {
            if (color_of[i] == BALANCE_UNKNOWN && set_evicts(&search, i, members)) {
                color_of[i] = (uint16_t)color;
                unknown--;
            }
        }
    }
    return !search.over && unknown <= pages / 8;
}

/* Enough pages for a clear answer, all of the color or all of others. */
static size_t gather_for(const struct conflicts *conflicts, const uint16_t *color_of, size_t pages,
                         size_t color, bool same, uint32_t *set) {
    size_t count = 0;
    for (uint32_t i = 0; i < pages && count < 3 * conflicts->ways; i++) {
        if (color_of[i] != BALANCE_UNKNOWN && (color_of[i] == color) == same) {
            set[count++] = i;
        }
    }
    return count;
}

bool conflicts_confirm(const struct conflicts *conflicts, const uint16_t *color_of, size_t pages,
                       uint32_t *scratch) {
    struct color_search search = {.conflicts = conflicts};
    for (size_t color = 0; color < conflicts->colors; color++) {
        size_t same = gather_for(conflicts, color_of, pages, color, true, scratch);
        /* The others are to evict the first. */
        if (same < 2 * conflicts->ways || !surely_evicts(&search, scratch[0], scratch + 1, same - 1)) {
            return false;
        }
        uint32_t page = scratch[0];
        size_t others = gather_for(conflicts, color_of, pages, color, false, scratch);
        if (surely_evicts(&search, page, scratch, others)) {
            return false;
        }
    }
    return !search.over;
}
