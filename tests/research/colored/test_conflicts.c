/* Colors derived from conflicts alone, in simulated caches that occasionally give wrong answers. */
#include "colored/conflicts.h"

#include "colored/balance.h"

#include <string.h>

#include "check.h"

#define MAX_PAGES 4096

/* A cache with a set for each color, of which the least recently read goes first. */
struct cache {
    size_t ways;
    uint32_t wrong; /* one answer of so many, at random; 0: none */
    uint64_t random;
    uint16_t color_of[MAX_PAGES];
};

static uint64_t draw(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state >> 16;
}

static bool cache_evicts(void *argument, uint32_t page, const uint32_t *walked, size_t count) {
    struct cache *cache = argument;
    size_t fighting = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK(walked[i] != page);
        fighting += cache->color_of[walked[i]] == cache->color_of[page];
    }
    bool evicts = fighting >= cache->ways;
    return cache->wrong != 0 && draw(&cache->random) % cache->wrong == 0 ? !evicts : evicts;
}

static bool always(void *argument, uint32_t page, const uint32_t *walked, size_t count) {
    (void)argument, (void)page, (void)walked, (void)count;
    return true;
}

static bool never(void *argument, uint32_t page, const uint32_t *walked, size_t count) {
    (void)argument, (void)page, (void)walked, (void)count;
    return false;
}

static struct cache cache;
static uint16_t found[MAX_PAGES];
static uint32_t scratch[2 * MAX_PAGES];

static void set_up(size_t colors, size_t pages, size_t ways, uint32_t wrong, uint64_t seed) {
    cache = (struct cache){.ways = ways, .wrong = wrong, .random = seed};
    for (size_t i = 0; i < pages; i++) {
        cache.color_of[i] = (uint16_t)(draw(&cache.random) % colors);
    }
}

static struct conflicts question(size_t colors, size_t ways) {
    return (struct conflicts){.evicts = cache_evicts, .cache = &cache, .colors = colors, .ways = ways};
}

/* Pages of one color in the cache are of one color as found, and the other way round. Returns those of no
 * color, and counts those that are not as they should be, by most of each color. */
static size_t count_wrong(size_t colors, size_t pages, size_t *unknown) {
    size_t wrong = 0;
    *unknown = 0;
    for (size_t color = 0; color < colors; color++) {
        size_t of[64] = {0};
        size_t most = 0;
        size_t all = 0;
        for (size_t i = 0; i < pages; i++) {
            if (found[i] == color) {
                all++;
                of[cache.color_of[i]]++;
            }
        }
        for (size_t i = 0; i < 64; i++) {
            most = of[i] > most ? of[i] : most;
        }
        wrong += all - most;
    }
    for (size_t i = 0; i < pages; i++) {
        *unknown += found[i] == BALANCE_UNKNOWN;
        CHECK(found[i] == BALANCE_UNKNOWN || found[i] < colors);
    }
    return wrong;
}

static uint64_t first_seed;

static void test_all_are_found(void) {
    static const size_t shapes[][2] = {{1, 8}, {2, 4}, {8, 8}, {32, 16}, {64, 10}, {16, 20}};
    for (size_t shape = 0; shape < sizeof shapes / sizeof shapes[0]; shape++) {
        size_t colors = shapes[shape][0];
        size_t ways = shapes[shape][1];
        size_t pages = conflicts_min_pages(colors, ways);
        for (uint64_t seed = first_seed; seed < first_seed + 3; seed++) {
            struct conflicts conflicts = question(colors, ways);
            size_t unknown;
            CHECK(pages <= MAX_PAGES);
            set_up(colors, pages, ways, 0, seed);
            CHECK(conflicts_find(&conflicts, pages, seed, found, scratch));
            CHECK_EQUAL(count_wrong(colors, pages, &unknown), 0);
            CHECK_EQUAL(unknown, 0);
        }
    }
}

static void test_wrong_answers_do_little(void) {
    enum { COLORS = 32, WAYS = 16, PAGES = 3072 };
    for (uint64_t seed = first_seed; seed < first_seed + 5; seed++) {
        struct conflicts conflicts = question(COLORS, WAYS);
        size_t unknown;
        set_up(COLORS, PAGES, WAYS, 50, seed);
        CHECK(conflicts_find(&conflicts, PAGES, seed, found, scratch));
        /* Each page is asked for of each color before its own. */
        CHECK(count_wrong(COLORS, PAGES, &unknown) <= PAGES / 20);
        CHECK(unknown <= PAGES / 50);
    }
}

static void test_another_cache_is_noticed(void) {
    enum { WAYS = 8, PAGES = 3072 };
    struct conflicts conflicts = question(16, WAYS);
    set_up(8, PAGES, WAYS, 0, 1);
    CHECK(!conflicts_find(&conflicts, PAGES, 1, found, scratch));
    set_up(32, PAGES, WAYS, 0, 1);
    CHECK(!conflicts_find(&conflicts, PAGES, 1, found, scratch));
    conflicts.evicts = always;
    CHECK(!conflicts_find(&conflicts, PAGES, 1, found, scratch));
    conflicts.evicts = never;
    CHECK(!conflicts_find(&conflicts, PAGES, 1, found, scratch));
}

/* Some pages may fight with none, by chance; many are a sign of another cache. */
static void test_pages_of_no_color(void) {
    enum { COLORS = 8, WAYS = 8, PAGES = 3072 };
    struct conflicts conflicts = question(COLORS, WAYS);
    size_t unknown;
    for (size_t part = 5; part <= 20; part += 15) {
        set_up(COLORS, PAGES, WAYS, 0, 1);
        size_t odd = 0;
        for (size_t i = 0; i < PAGES; i += part) {
            cache.color_of[i] = (uint16_t)(COLORS + odd++);
        }
        CHECK_EQUAL(conflicts_find(&conflicts, PAGES, 1, found, scratch), part == 20);
        for (size_t i = 0; i < PAGES; i++) {
            cache.color_of[i] %= 64; /* as many as are counted */
        }
        CHECK(part != 20 || (count_wrong(COLORS, PAGES, &unknown) == 0 && unknown == odd));
    }
    CHECK(!conflicts_find(&conflicts, 0, 1, found, scratch));
}

static void test_known_colors_are_confirmed(void) {
    enum { COLORS = 32, WAYS = 16, PAGES = 3072 };
    struct conflicts conflicts = question(COLORS, WAYS);
    static uint16_t said[PAGES];
    set_up(COLORS, PAGES, WAYS, 0, 9);
    CHECK(conflicts_confirm(&conflicts, cache.color_of, PAGES, scratch));
    /* By other names, as well. */
    for (size_t i = 0; i < PAGES; i++) {
        said[i] = cache.color_of[i] ^ 5;
    }
    CHECK(conflicts_confirm(&conflicts, said, PAGES, scratch));
    /* They have nothing to do with each other, as frames have where a hypervisor deals them out. */
    for (size_t i = 0; i < PAGES; i++) {
        said[i] = (uint16_t)(i % COLORS);
    }
    CHECK(!conflicts_confirm(&conflicts, said, PAGES, scratch));
    /* Of one color too little is known, or nothing. */
    for (size_t known = 0; known < 2 * WAYS; known += 2 * WAYS - 1) {
        size_t count = 0;
        for (size_t i = 0; i < PAGES; i++) {
            bool last = cache.color_of[i] == COLORS - 1;
            said[i] = last && count >= known ? BALANCE_UNKNOWN : cache.color_of[i];
            count += last;
        }
        CHECK(!conflicts_confirm(&conflicts, said, PAGES, scratch));
    }
    conflicts.evicts = always;
    CHECK(!conflicts_confirm(&conflicts, cache.color_of, PAGES, scratch));
    conflicts.evicts = never;
    CHECK(!conflicts_confirm(&conflicts, cache.color_of, PAGES, scratch));
}

/* How many questions are allowed, and how many were asked. */
static size_t questions_allowed;
static size_t questions_asked;

static bool counted(void *argument, uint32_t page, const uint32_t *walked, size_t count) {
    questions_asked++;
    return cache_evicts(argument, page, walked, count);
}

static bool is_over(const void *allowed) {
    return questions_asked >= *(const size_t *)allowed;
}

/* None of the loops goes on asking, wherever it was. */
static void test_it_ends_when_told_to(void) {
    enum { COLORS = 8, WAYS = 8 };
    const size_t pages = conflicts_min_pages(COLORS, WAYS);
    struct conflicts conflicts = question(COLORS, WAYS);
    conflicts.evicts = counted;
    set_up(COLORS, pages, WAYS, 0, 3);
    questions_asked = 0;
    CHECK(conflicts_find(&conflicts, pages, 3, found, scratch));
    const size_t to_find = questions_asked;
    questions_asked = 0;
    CHECK(conflicts_confirm(&conflicts, cache.color_of, pages, scratch));
    const size_t to_confirm = questions_asked;
    conflicts.is_over = is_over;
    conflicts.bound = &questions_allowed;
    for (questions_allowed = 0; questions_allowed < to_find; questions_allowed += 1 + to_find / 500) {
        questions_asked = 0;
        CHECK(!conflicts_find(&conflicts, pages, 3, found, scratch));
        CHECK_EQUAL(questions_asked, questions_allowed);
    }
    for (questions_allowed = 0; questions_allowed < to_confirm; questions_allowed++) {
        questions_asked = 0;
        CHECK(!conflicts_confirm(&conflicts, cache.color_of, pages, scratch));
        CHECK_EQUAL(questions_asked, questions_allowed);
    }
    questions_allowed = to_find + 1;
    questions_asked = 0;
    CHECK(conflicts_find(&conflicts, pages, 3, found, scratch));
}

int main(void) {
    first_seed = check_seed(1);
    test_all_are_found();
    test_wrong_answers_do_little();
    test_another_cache_is_noticed();
    test_pages_of_no_color();
    test_known_colors_are_confirmed();
    test_it_ends_when_told_to();
    return 0;
}
