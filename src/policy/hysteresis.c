#include "policy/hysteresis.h"

#include <stdint.h>

#define KB 1000UL
#define MB (1000 * KB)
#define GB (1000 * MB)

size_t hysteresis_base_bytes(size_t footprint_bytes) {
    if (footprint_bytes < 500 * KB) {
        return 100 * KB;
    }
    if (footprint_bytes < MB) {
        return footprint_bytes / 2;
    }
    if (footprint_bytes < GB) {
        return footprint_bytes / 10 + 400 * KB;
    }
    return 100 * MB;
}

struct hysteresis_thresholds hysteresis_decide(struct hysteresis_input in) {
    /* The comparisons are written so that a NaN takes the default. */
    double cpus = in.cpus_used > 0 ? in.cpus_used : 0;
    double sensitivity = in.sensitivity > 0 ? in.sensitivity : 1;
    double trim = (double)hysteresis_base_bytes(in.footprint_bytes) * (1 + cpus / 100) * sensitivity;

    struct hysteresis_thresholds out;
    out.trim_bytes = trim < (double)PTRDIFF_MAX ? (size_t)trim : (size_t)PTRDIFF_MAX;
    out.pad_bytes = out.trim_bytes / 4;
    out.pad_each_bytes = out.pad_bytes / (in.arenas > 0 ? in.arenas : 1);
    return out;
}
