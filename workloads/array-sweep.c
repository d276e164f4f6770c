/* Figure 3 of Valat, "Impact of the Operating System Memory Allocation on CPU Intensive Applications": one
 * array is read repeatedly, and the time of a load shows which cache still holds it. Small pages at random
 * addresses fill some sets of a physically indexed cache beyond their capacity, so that an array of the
 * cache's size does not fit. Huge pages cover all sets evenly, and so do small pages that libcalmcolored
 * selects by color. */
#include "arrays.h"
#include "calmcolored.h"
#include "support.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const char program_name[] = "array-sweep";

enum memory { MEMORY_SMALL, MEMORY_HUGE, MEMORY_MALLOC, MEMORY_COLORED };
enum walk { WALK_STRIDE, WALK_CHASE, WALK_PAGES };

static const char *const memory_names[] = {"small", "huge", "malloc", "colored", NULL};
static const char *const color_names[] = {"auto", "frames", "timed", NULL};
static const unsigned color_sources[] = {0, CALM_COLORED_FRAMES, CALM_COLORED_TIMED};
static const char *const walk_names[] = {"stride", "chase", "pages", NULL};

enum { PAGE_BYTES = 4096 };

/* A place that is read: its number where the places are read in order, else the place to read next. */
union place {
    uint64_t number;
    union place *next;
};

struct sweep {
    char *array;
    unsigned long places;
    unsigned long stride;
};

static union place *place_at(const struct sweep *sweep, unsigned long number) {
    return (union place *)(sweep->array + number * sweep->stride);
}

/* A function of libcalmcolored, which is beside this program in a checkout's build, and not in packages. */
static void *colored_function(const char *name) {
    void *library = dlopen("libcalmcolored.so", RTLD_NOW);
    void *function = library == NULL ? NULL : dlsym(library, name);
    if (function == NULL) {
        char why[512];
        (void)snprintf(why, sizeof why, "--memory colored: %s", dlerror());
        fail(program_name, why);
    }
    return function;
}

static struct array array_colored(size_t bytes, unsigned cache) {
    __typeof__(&calm_colored_alloc) alloc = NULL;
    *(void **)&alloc = colored_function("calm_colored_alloc");
    void *block = alloc(bytes, cache);
    if (block == NULL) {
        char why[256];
        (void)snprintf(why, sizeof why, "calm_colored_alloc: %s", strerror(errno));
        fail(program_name, why);
    }
    return (struct array){.start = block, .block = block, .mapped = 0};
}

static void array_colored_free(const struct array *array) {
    __typeof__(&calm_colored_free) release = NULL;
    *(void **)&release = colored_function("calm_colored_free");
    release(array->block);
}

/* The one place that knows how an array can be had; cache is for colored memory. */
static struct array have_array(enum memory memory, size_t bytes, unsigned cache) {
    switch (memory) {
    case MEMORY_SMALL:
        return array_mapped(program_name, bytes, HUGE_OFF);
    case MEMORY_HUGE:
        return array_mapped(program_name, bytes, HUGE_ON);
    case MEMORY_COLORED:
        return array_colored(bytes, cache);
    default:
        return array_malloc(program_name, bytes);
    }
}

static void shuffle(uint32_t *numbers, unsigned long count, unsigned long long *state) {
    for (unsigned long i = count; i-- > 1;) {
        unsigned long other = random_between(state, 0, i);
        uint32_t kept = numbers[i];
        numbers[i] = numbers[other];
        numbers[other] = kept;
    }
}

/* Makes one cycle through all places: in any order, or page after page, the pages in any order and so the
 * places of each. The second needs one translation for a page's places, as reading in order does, and yet
 * tells no prefetcher where it will go. */
static void link_places(const struct sweep *sweep, enum walk walk) {
    unsigned long together = walk == WALK_PAGES ? PAGE_BYTES / sweep->stride : 1;
    together = together == 0 ? 1 : together;
    unsigned long groups = (sweep->places + together - 1) / together;
    /* Not the allocator's, whose next blocks it would place. */
    size_t bytes = (groups + together) * sizeof(uint32_t);
    struct array scratch = array_mapped(program_name, bytes, HUGE_SYSTEM);
    uint32_t *group_order = scratch.start;
    uint32_t *order = group_order + groups;
    unsigned long long state = 1;
    for (unsigned long g = 0; g < groups; g++) {
        group_order[g] = (uint32_t)g;
    }
    shuffle(group_order, groups, &state);
    union place before = {0};
    union place *last = &before;
    for (unsigned long g = 0; g < groups; g++) {
        unsigned long base = group_order[g] * together;
        unsigned long count = sweep->places - base < together ? sweep->places - base : together;
        for (unsigned long i = 0; i < count; i++) {
            order[i] = (uint32_t)i;
        }
        shuffle(order, count, &state);
        for (unsigned long i = 0; i < count; i++) {
            last->next = place_at(sweep, base + order[i]);
            last = last->next;
        }
    }
    last->next = before.next;
    array_free(&scratch);
}

/* Loads that wait for nothing: as fast as the cache can deliver. */
static __attribute__((noinline)) uint64_t read_in_order(const struct sweep *sweep) {
    const char *at = sweep->array;
    size_t stride = sweep->stride;
    uint64_t sums[4] = {0, 0, 0, 0};
    unsigned long left = sweep->places;
    for (; left >= 4; left -= 4) {
        sums[0] += ((const union place *)at)->number;
        sums[1] += ((const union place *)(at + stride))->number;
        sums[2] += ((const union place *)(at + 2 * stride))->number;
        sums[3] += ((const union place *)(at + 3 * stride))->number;
        at += 4 * stride;
    }
    for (; left > 0; left--) {
        sums[0] += ((const union place *)at)->number;
        at += stride;
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* Loads of which each has to wait for the one before it. */
static __attribute__((noinline)) const union place *follow(const union place *place, unsigned long loads) {
    for (unsigned long i = 0; i < loads; i++) {
        place = place->next;
    }
    return place;
}

/* One pass, checked by what is known of any of them. */
static void pass(const struct sweep *sweep, enum walk walk) {
    if (walk == WALK_STRIDE) {
        if (read_in_order(sweep) != (uint64_t)sweep->places * (sweep->places - 1) / 2) {
            fail(program_name, "the array does not hold what was written to it");
        }
    } else {
        const union place *start = place_at(sweep, 0);
        if (follow(start, sweep->places) != start) {
            fail(program_name, "the walk does not end where it began");
        }
    }
    /* Memory may have changed, for all the compiler knows: no pass is like the one before it. */
    __asm__ volatile("" ::: "memory");
}

/* Of the numbers of the places in the order in which a pass reads them; finds out that it reads all. No more
 * are read than there are: where memory is broken, the walk may end in a circle without its start. */
static unsigned long long check_walk(const struct sweep *sweep, enum walk walk) {
    unsigned long long checksum = 0;
    unsigned long read = 0;
    const union place *place = place_at(sweep, 0);
    do {
        unsigned long number = (unsigned long)((const char *)place - sweep->array) / sweep->stride;
        checksum = checksum_add(checksum, number);
        unsigned long after = number + 1 == sweep->places ? 0 : number + 1;
        place = walk == WALK_STRIDE ? place_at(sweep, after) : place->next;
        read++;
    } while (place != place_at(sweep, 0) && read < sweep->places);
    if (place != place_at(sweep, 0) || read < sweep->places) {
        fail(program_name, "the walk leaves places out");
    }
    return checksum;
}

int main(int argc, char **argv) {
    unsigned long bytes = 1UL << 20;
    unsigned long memory = MEMORY_MALLOC;
    unsigned long cache = 0;
    unsigned long colors = 0;
    unsigned long walk = WALK_STRIDE;
    unsigned long stride = LINE_BYTES;
    unsigned long repeats = 1000;
    const struct option_spec options[] = {
        {"bytes", "bytes in the array", OPTION_COUNT, &bytes, 64, 1UL << 36, NULL},
        {"memory",
         "the array's memory: small pages, huge pages, a block from the allocator, or small "
         "pages selected by color",
         OPTION_CHOICE, &memory, 0, 0, memory_names},
        {"cache", "colored: the cache level (default 2)", OPTION_COUNT, &cache, 1, 9, NULL},
        {"colors", "colored: how the colors of pages are determined", OPTION_CHOICE, &colors, 0, 0,
         color_names},
        {"walk", "sequential, random, or page by page with random order of pages and within", OPTION_CHOICE,
         &walk, 0, 0, walk_names},
        {"stride", "bytes between two reads", OPTION_COUNT, &stride, 8, 1UL << 30, NULL},
        {"repeats", "timed passes", OPTION_COUNT, &repeats, 1, 1000000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Reads one array repeatedly.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (stride % sizeof(union place) != 0) {
        reject_arguments(program_name, "--stride is no multiple of 8");
    }
    if (bytes % stride != 0) {
        reject_arguments(program_name, "--bytes is no multiple of --stride");
    }
    if (bytes / stride > UINT32_MAX) {
        reject_arguments(program_name, "--bytes has more than 4294967295 times --stride");
    }
    if (memory != MEMORY_COLORED && (cache != 0 || colors != 0)) {
        reject_arguments(program_name, "--cache and --colors are for --memory colored");
    }
    if (cache == 0) {
        cache = 2;
    }

    struct array block = have_array((enum memory)memory, bytes, (unsigned)cache | color_sources[colors]);
    struct sweep sweep = {block.start, bytes / stride, stride};
    for (unsigned long i = 0; i < sweep.places; i++) {
        place_at(&sweep, i)->number = i;
    }
    if (walk != WALK_STRIDE) {
        link_places(&sweep, (enum walk)walk);
    }
    unsigned long long checksum = check_walk(&sweep, (enum walk)walk);
    pass(&sweep, (enum walk)walk); /* warms up */
    double seconds = now_seconds();
    for (unsigned long repeat = 0; repeat < repeats; repeat++) {
        pass(&sweep, (enum walk)walk);
    }
    seconds = now_seconds() - seconds;

    printf("{\"workload\": \"array-sweep\", \"bytes\": %lu, \"memory\": \"%s\", \"walk\": \"%s\", "
           "\"stride\": %lu, \"repeats\": %lu, \"loads\": %lu, \"huge_kib\": %lu, \"checksum\": \"%016llx\", "
           "\"seconds\": %.6f, \"ns_per_load\": %.4f}\n",
           bytes, memory_names[memory], walk_names[walk], stride, repeats, repeats * sweep.places,
           huge_kib(program_name), checksum, seconds,
           seconds / ((double)repeats * (double)sweep.places) * 1e9);
    if (memory == MEMORY_COLORED) {
        array_colored_free(&block);
    } else {
        array_free(&block);
    }
    return 0;
}
