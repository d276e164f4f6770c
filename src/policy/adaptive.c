#include "policy/adaptive.h"

/* Less than this is not worth a system call each window. */
#define UNUSED_PAGES_LEAST 16

struct adaptive_decision adaptive_decide(double band, struct adaptive_window window) {
    struct adaptive_decision decision = {band, 0};
    double vain = window.purged_pages == 0 ? 0 : (double)window.reused_pages / (double)window.purged_pages;
    double cost_ns = window.purge_ns * (vain < 1 ? vain : 1) + (double)window.reused_pages * window.fault_ns;
    double cpu_ns = window.ns * (window.cpus_used > 0.1 ? window.cpus_used : 0.1);
    if (cost_ns > window.cost_share * cpu_ns) {
        decision.band = band * 2 < window.band_most ? band * 2 : window.band_most;
    } else if (cost_ns < window.cost_share * cpu_ns / 4) {
        decision.band = band * 7 / 8 > ADAPTIVE_BAND_LEAST ? band * 7 / 8 : ADAPTIVE_BAND_LEAST;
    }
    if (window.unused_pages >= UNUSED_PAGES_LEAST) {
        decision.purge_pages = window.unused_pages;
    }
    return decision;
}
