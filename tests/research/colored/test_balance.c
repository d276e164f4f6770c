/* The selection of pages for colored memory from a surplus, compared with every possible choice. */
#include "colored/balance.h"

#include <stdbool.h>
#include <string.h>

#include "check.h"

#define MAX_COLORS 3
#define MAX_PAGES  6
#define MAX_PLACES 4

/* What a choice costs, in the order of what matters. */
struct cost {
    size_t misplaced;
    size_t unknown;
    size_t squares;
};

static struct cost cost_of(const uint16_t *color_of, size_t colors, size_t first, size_t places,
                           const uint32_t *chosen) {
    struct cost cost = {0, 0, 0};
    size_t used[MAX_COLORS] = {0};
    for (size_t i = 0; i < places; i++) {
        uint16_t color = color_of[chosen[i]];
        cost.misplaced += color != (first + i) % colors;
        if (color == BALANCE_UNKNOWN) {
            cost.unknown++;
        } else {
            used[color]++;
        }
    }
    for (size_t color = 0; color < colors; color++) {
        cost.squares += used[color] * used[color];
    }
    return cost;
}

static bool is_less(struct cost a, struct cost b) {
    if (a.misplaced != b.misplaced) {
        return a.misplaced < b.misplaced;
    }
    return a.unknown != b.unknown ? a.unknown < b.unknown : a.squares < b.squares;
}

/* The least that any order of any of the pages costs. */
static void try_all(const uint16_t *color_of, size_t pages, size_t colors, size_t first, size_t places,
                    size_t place, uint32_t *chosen, struct cost *least) {
    if (place == places) {
        struct cost cost = cost_of(color_of, colors, first, places, chosen);
        *least = is_less(cost, *least) ? cost : *least;
        return;
    }
    for (uint32_t page = 0; page < pages; page++) {
        bool taken = false;
        for (size_t i = 0; i < place; i++) {
            taken |= chosen[i] == page;
        }
        if (!taken) {
            chosen[place] = page;
            try_all(color_of, pages, colors, first, places, place + 1, chosen, least);
        }
    }
}

static void check_choice(const uint16_t *color_of, size_t pages, size_t colors, size_t first, size_t places) {
    uint32_t chosen[MAX_PAGES];
    uint32_t next[MAX_PAGES];
    struct balance balance = balance_choose(color_of, pages, colors, first, places, chosen, next);
    size_t used[MAX_COLORS] = {0};
    for (size_t i = 0; i < places; i++) {
        CHECK(chosen[i] < pages);
        for (size_t other = 0; other < i; other++) {
            CHECK(chosen[other] != chosen[i]);
        }
        if (color_of[chosen[i]] != BALANCE_UNKNOWN) {
            used[color_of[chosen[i]]]++;
        }
    }
    struct cost cost = cost_of(color_of, colors, first, places, chosen);
    struct cost least = {SIZE_MAX, 0, 0};
    uint32_t tried[MAX_PAGES];
    try_all(color_of, pages, colors, first, places, 0, tried, &least);
    CHECK_EQUAL(cost.misplaced, least.misplaced);
    CHECK_EQUAL(cost.unknown, least.unknown);
    CHECK_EQUAL(cost.squares, least.squares);
    CHECK_EQUAL(balance.misplaced, cost.misplaced);
    size_t even = (places + colors - 1) / colors;
    size_t crowded = 0;
    for (size_t color = 0; color < colors; color++) {
        crowded += used[color] > even ? used[color] - even : 0;
    }
    CHECK_EQUAL(balance.crowded, crowded);
}

static void test_no_choice_is_better(void) {
    for (size_t colors = 1; colors <= MAX_COLORS; colors++) {
        for (size_t pages = 1; pages <= MAX_PAGES; pages++) {
            size_t kinds = colors + 1; /* one of them unknown */
            size_t all = 1;
            for (size_t i = 0; i < pages; i++) {
                all *= kinds;
            }
            for (size_t number = 0; number < all; number++) {
                uint16_t color_of[MAX_PAGES];
                size_t rest = number;
                for (size_t i = 0; i < pages; i++, rest /= kinds) {
                    color_of[i] = rest % kinds == colors ? BALANCE_UNKNOWN : (uint16_t)(rest % kinds);
                }
                size_t most = pages < MAX_PLACES ? pages : MAX_PLACES;
                check_choice(color_of, pages, colors, number % colors, 1 + number % most);
            }
        }
    }
}

/* Where there is enough of each color, place after place has the next one. */
static void test_the_order_is_regular(void) {
    enum { COLORS = 32, PAGES = 4096, PLACES = 1000, FIRST = 7 };
    static uint16_t color_of[PAGES];
    static uint32_t chosen[PLACES];
    static uint32_t next[PAGES];
    for (uint32_t i = 0; i < PAGES; i++) {
        color_of[i] = (uint16_t)(i * 2654435761U >> 27);
    }
    struct balance balance = balance_choose(color_of, PAGES, COLORS, FIRST, PLACES, chosen, next);
    CHECK_EQUAL(balance.misplaced, 0);
    CHECK_EQUAL(balance.crowded, 0);
    for (size_t i = 0; i < PLACES; i++) {
        CHECK_EQUAL(color_of[chosen[i]], (FIRST + i) % COLORS);
    }
}

/* Of one color alone, all but its own places are others', and all beyond an even share crowd it. */
static void test_one_color(void) {
    enum { COLORS = BALANCE_MAX_COLORS, PAGES = 2 * COLORS };
    static uint16_t color_of[PAGES];
    static uint32_t chosen[PAGES];
    static uint32_t next[PAGES];
    for (size_t i = 0; i < PAGES; i++) {
        color_of[i] = COLORS - 1;
    }
    struct balance balance = balance_choose(color_of, PAGES, COLORS, 0, PAGES, chosen, next);
    CHECK_EQUAL(balance.misplaced, PAGES - 2);
    CHECK_EQUAL(balance.crowded, PAGES - 2);
}

int main(void) {
    test_no_choice_is_better();
    test_the_order_is_regular();
    test_one_color();
    return 0;
}
