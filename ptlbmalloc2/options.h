/* What the user asked for, of this library and of glibc's malloc. Read once, at start-up, from the
 * environment. */
#ifndef PTLBMALLOC2_OPTIONS_H
#define PTLBMALLOC2_OPTIONS_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

enum stats_format { STATS_OFF, STATS_TEXT, STATS_JSON };

struct options {
    double sensitivity;             /* PTLBMALLOC2_SENSITIVITY: multiplies the trim threshold; default 1 */
    enum stats_format stats_format; /* PTLBMALLOC2_STATS=1|json[:FILE] */
    char stats_path[PATH_MAX];      /* empty: stderr */
    bool verbose;                   /* PTLBMALLOC2_VERBOSE=1 */
    bool placement;                 /* PTLBMALLOC2_PLACEMENT=1 */
    /* glibc's own settings that the user made (GLIBC_TUNABLES, MALLOC_..._): theirs win. */
    bool sets_trim_threshold;
    bool sets_top_pad;
    size_t top_pad; /* then, its value in bytes */
    bool sets_mmap_threshold;
    size_t mmap_threshold; /* likewise */
    bool sets_mmap_max;
    bool sets_huge_pages; /* other heap sizes */
    bool sets_tagging;    /* block addresses carry tags */
    bool sets_check;      /* blocks have a mark behind them */
};

/* Bad values get one line each on stderr and the default. */
void options_read(struct options *options);

#endif
