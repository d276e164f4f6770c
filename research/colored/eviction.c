#include "colored/eviction.h"

#include "base/size.h"

#define TRIALS 64 /* a hit and a miss each take the median of these */
#define VOTES  9  /* loads of which the majority decides */

static void eviction_read(const char *at) {
    (void)*(const volatile char *)at;
}

/* Waits until all loads before have completed. */
static void finish_reads(void) {
#if defined(__x86_64__)
    __asm__ volatile("lfence" ::: "memory");
#endif
}

static uint64_t cycles(void) {
#if defined(__x86_64__)
    uint32_t low;
    uint32_t high;
    __asm__ volatile("lfence\n\trdtsc\n\tlfence" : "=a"(low), "=d"(high)::"memory");
    return (uint64_t)high << 32 | low;
#else
    return 0;
#endif
}

bool eviction_can_time(void) {
#if defined(__x86_64__)
    return true;
#else
    return false;
#endif
}

/* Any line but the first of a page, which programs read most. */
static const char *line_of(const struct eviction *eviction, uint32_t page) {
    return eviction->base + page * eviction->page_bytes + 5 * eviction->line_bytes;
}

/* Cycles that a load of a page's line takes. */
static uint64_t time_load(const struct eviction *eviction, const char *line) {
    finish_reads();
    eviction_read(line + eviction->page_bytes / 2); /* so that no TLB miss is measured */
    uint64_t start = cycles();
    eviction_read(line);
    return cycles() - start;
}

bool eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count) {
    const struct eviction *known = eviction;
    const char *line = line_of(known, page);
    unsigned missed = 0;
    unsigned hit = 0;
    while (missed <= VOTES / 2 && hit <= VOTES / 2) {
        eviction_read(line);
        finish_reads();
        /* Caches do not simply evict the oldest line. After passes in both directions, the line is the one
         * that was used least. */
        for (size_t i = 0; i < 2 * count; i++) {
            eviction_read(line_of(known, walked[i < count ? i : i - count]));
        }
        finish_reads();
        for (size_t i = count; i-- > 0;) {
            eviction_read(line_of(known, walked[i]));
        }
        bool miss = time_load(known, line) >= known->miss_cycles;
        missed += miss;
        hit += !miss;
    }
    return missed > hit;
}

/* The median time of a load after the count pages that follow its page were read. */
static uint64_t typical_after(const struct eviction *eviction, size_t pages, size_t count) {
    uint64_t times[TRIALS];
    for (size_t trial = 0; trial < TRIALS; trial++) {
        size_t page = trial * (pages / TRIALS);
        const char *line = line_of(eviction, (uint32_t)page);
        eviction_read(line);
        finish_reads();
        for (int walks = 0; walks < 3; walks++) {
            for (size_t i = 1; i <= count; i++) {
                eviction_read(line_of(eviction, (uint32_t)((page + i) % pages)));
            }
        }
        uint64_t took = time_load(eviction, line);
        size_t at = trial;
        for (; at > 0 && times[at - 1] > took; at--) {
            times[at] = times[at - 1];
        }
        times[at] = took;
    }
    return times[TRIALS / 2];
}

bool eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t page_bytes,
                   const struct hardware_cache *cache, size_t colors) {
    *eviction = (struct eviction){.base = base, .page_bytes = page_bytes, .line_bytes = cache->line_bytes};
    /* With a quarter of the pages that the cache holds, nearly all sets have room; with four times as many,
     * no set has. */
    size_t room = cache->ways * colors;
    uint64_t hit = typical_after(eviction, pages, room / 4);
    uint64_t miss = typical_after(eviction, pages, size_min(pages - 1, 4 * room));
    /* Nearer to the hits, because misses vary more. */
    eviction->miss_cycles = hit + (miss - hit) / 3;
    return miss > hit + hit / 5;
}
