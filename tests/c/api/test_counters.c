/* The counters as another process reads them, compared with those that the library reports. */
#include "arena/terms.h"
#include "counter_reader.h"
#include "whole_allocator.h"

#include <string.h>

static void check_counters(void) {
    static const char *const only_here[] = {"reserved", "metadata", "cached_limit"};
    const struct counter_table *table = counter_table_of("calmalloc");
    struct calm_stats stats = stats_now();
    size_t skipped = 0;
#define COUNTER(name, ...)                                       \
    if (skipped < 3 && strcmp(#name, only_here[skipped]) == 0) { \
        skipped++;                                               \
    } else {                                                     \
        CHECK_EQUAL(counter_now(table, #name), stats.name);      \
    }
#include "api/counters.def"
    CHECK_EQUAL(skipped, 3);
    CHECK_EQUAL(counter_now(table, "background"), (unsigned)calm_arenas.settings.background);
    CHECK_EQUAL(counter_now(table, "policy"), (unsigned)calm_arenas.settings.policy);
}

/* What this machine need not show: it may have one depot, and rows read in vain give the same sum. */
static void check_cached_terms(void) {
    const struct counter_table *table = counter_table_of("calmalloc");
    bool depots = false;
    bool caches = false;
    for (size_t i = 0; i < table->count; i++) {
        const struct counter_term *term = &table->terms[i];
        CHECK((term->rows == NULL) == (term->present == NULL));
        caches |= term->rows != NULL;
        depots |= term->at == &calm_arenas.depots[0].bins && term->pointers == MAX_DEPOTS &&
                  (const char *)term->at + term->pointer_stride == (const char *)&calm_arenas.depots[1].bins;
    }
    CHECK(caches && depots);
}

/* What a process outside would read is what calm_stats says, whatever happens in between. */
static void test_counters(void) {
    const struct counter_table *table = counter_table_of("calmalloc");
    check_cached_terms();
    check_counters();
    for (size_t number = 0; number < steps; number++) {
        step(number);
        if (number % 100 == 0) {
            check_counters();
        }
    }
    struct calm_stats stats = stats_now();
    CHECK(stats.purged > 0 && stats.cached > 0 && stats.dirty > 0);
    CHECK(counter_now(table, "limit_checks") > 0 && counter_now(table, "purge_ns") > 0);
    set("memory_per_cpu", "1");
    check_counters();
    free_all();
    check_counters();
    CHECK(calm_trim(0) > 0);
    check_counters();
    CHECK_EQUAL(counter_now(table, "cached"), 0);
    obtain(3 * MIB);
    /* As in the midst of a purge, which is over before anybody looks. */
    calm_arenas.of[0].heap.claimed_pages += 3;
    calm_arenas.of[0].heap.purging_pages += 5;
    struct calm_stats midst = stats_now();
    CHECK_EQUAL(counter_now(table, "footprint"), midst.footprint);
    CHECK_EQUAL(counter_now(table, "in_use"), midst.in_use);
    CHECK_EQUAL(counter_now(table, "dirty"), midst.dirty);
    calm_arenas.of[0].heap.claimed_pages -= 3;
    calm_arenas.of[0].heap.purging_pages -= 5;
    /* A bound that only a helper allows, which the child does not have. */
    free_all();
    terms_start_background(&calm_arenas);
    calm_free(obtain(32 * MIB));
    check_counters();
    uint64_t limit = counter_now(table, "dirty_limit");
    struct calm_stats before = stats_now();
    pid_t child = fork();
    CHECK(child >= 0);
    check_counters();
    if (child == 0) {
        /* Totals from the fork on, and levels as they were. */
        struct calm_stats now = stats_now();
        CHECK_EQUAL(now.in_use, before.in_use);
        CHECK_EQUAL(now.dirtied + now.purged + now.purges_limit + now.purges_request + now.cache_misses, 0);
        CHECK_EQUAL(now.large_allocations + now.limit_checks + now.purge_ns + now.purge_ranges, 0);
        CHECK(before.dirtied > 0 && before.purged > 0 && before.limit_checks > 0);
        /* Only to tell them apart. No thread reads them before they are restored. */
        atomic_store(&calm_arenas.settings.policy, 1);
        atomic_store(&calm_arenas.settings.background, 2);
        check_counters();
        atomic_store(&calm_arenas.settings.policy, 0);
        atomic_store(&calm_arenas.settings.background, 0);
        CHECK(counter_now(table, "dirty_limit") < limit);
        obtain(5 * MIB);
        check_counters();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    prepare_governor();
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_counters);
    return 0;
}
