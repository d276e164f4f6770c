#include "policy/hysteresis.h"

#include <stdint.h>

double hysteresis_factor(double cpus_used, double sensitivity) {
    /* The comparisons are written so that a NaN takes the default. */
    double cpus = cpus_used > 0 ? cpus_used : 0;
    return (1 + cpus / 100) * (sensitivity > 0 ? sensitivity : 1);
}

struct hysteresis_thresholds hysteresis_decide(struct hysteresis_input in) {
    double factor = hysteresis_factor(in.cpus_used, in.sensitivity);
    double trim = (double)hysteresis_base_bytes(in.footprint_bytes) * factor;

    struct hysteresis_thresholds out;
    out.trim_bytes = trim < (double)PTRDIFF_MAX ? (size_t)trim : (size_t)PTRDIFF_MAX;
    out.pad_bytes = out.trim_bytes / 4;
    out.pad_each_bytes = out.pad_bytes / (in.arenas > 0 ? in.arenas : 1);
    return out;
}
