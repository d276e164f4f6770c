/* The library's own options, read once, at start-up, from the environment. */
#ifndef PTLBMALLOC2_OPTIONS_H
#define PTLBMALLOC2_OPTIONS_H

#include <limits.h>
#include <stdbool.h>

enum stats_format { STATS_OFF, STATS_TEXT, STATS_JSON };

extern struct options {
    double sensitivity;             /* PTLBMALLOC2_SENSITIVITY: multiplies the trim threshold; default 1 */
    enum stats_format stats_format; /* PTLBMALLOC2_STATS=1|json[:FILE] */
    char stats_path[PATH_MAX];      /* empty: stderr */
    bool verbose;                   /* PTLBMALLOC2_VERBOSE=1 */
    bool placement;                 /* PTLBMALLOC2_PLACEMENT=1 */
} options;

/* Each invalid value is reported on stderr and ignored. */
void ptlbmalloc2_options_read(void);

#endif
