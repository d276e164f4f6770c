#include "policy/hysteresis.h"

double hysteresis_factor(double cpus_used, double sensitivity) {
    /* The comparisons are written so that a NaN takes the default. */
    double cpus = cpus_used > 0 ? cpus_used : 0;
    return (1 + cpus / 100) * (sensitivity > 0 ? sensitivity : 1);
}

struct hysteresis_thresholds hysteresis_decide(struct hysteresis_input in) {
    size_t trim =
        hysteresis_threshold_bytes(in.footprint_bytes, hysteresis_factor(in.cpus_used, in.sensitivity));
    size_t pad = trim / 4;
    return (struct hysteresis_thresholds){trim, pad, pad / (in.arenas > 0 ? in.arenas : 1)};
}
