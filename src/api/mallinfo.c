/*
 * mallinfo(3), malloc_stats(3) and malloc_info(3): what glibc reports of its
 * malloc, for this allocator.
 */
#include "api/counters.h"
#include "base/size.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

#ifndef CALM_WITHOUT_MALLOC

#if defined(__GLIBC__)

#if !__GLIBC_PREREQ(2, 33)
/* The library also runs with later versions of glibc, which have it. */
struct mallinfo2 {
    size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};
EXPORT struct mallinfo2 mallinfo2(void);
#endif

EXPORT struct mallinfo2 mallinfo2(void) {
    struct calm_stats stats;
    counters_fill(&stats);
    return (struct mallinfo2){
        .arena = stats.footprint,
        .ordblks = 1,
        .uordblks = stats.in_use - size_min(stats.cached, stats.in_use),
        .fordblks = stats.dirty + stats.cached,
        .keepcost = stats.dirty,
    };
}

/* Converts a number to int. Larger numbers become the largest int. */
static int clamped(size_t number) {
    return number > __INT_MAX__ ? __INT_MAX__ : (int)number;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
EXPORT struct mallinfo mallinfo(void) {
    struct mallinfo2 info = mallinfo2();
    return (struct mallinfo){
        .arena = clamped(info.arena),
        .ordblks = clamped(info.ordblks),
        .uordblks = clamped(info.uordblks),
        .fordblks = clamped(info.fordblks),
        .keepcost = clamped(info.keepcost),
    };
}
#pragma GCC diagnostic pop

#endif

EXPORT void malloc_stats(void) {
    struct text page = {0};
    text_format(&page, "calmalloc:\n");
    counters_print(&page, "  %s: %lu\n");
    text_write(&page, 2);
}

EXPORT int malloc_info(int options, FILE *stream) {
    if (options != 0) {
        errno = EINVAL;
        return -1;
    }
    struct text page = {0};
    text_format(&page, "<malloc version=\"calmalloc-1\">\n");
    counters_print(&page, "<%s>%lu</%s>\n");
    text_format(&page, "</malloc>\n");
    return fwrite(page.bytes, 1, page.length, stream) == page.length ? 0 : -1;
}

#endif
