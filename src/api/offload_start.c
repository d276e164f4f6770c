/* Offload mode as the options ask for it. */
#include "api/features.h"
#include "api/options.h"

bool offload_is_wanted(void) {
    return calm_options.offload != OPTION_OFFLOAD_OFF && offload_is_possible(&calm_offload);
}

static struct affinity_request requested_cpu(void) {
    static const enum affinity_kind kinds[] = {[OPTION_OFFLOAD_ON] = AFFINITY_AUTO,
                                               [OPTION_OFFLOAD_SIBLING] = AFFINITY_SIBLING,
                                               [OPTION_OFFLOAD_CORE] = AFFINITY_CORE,
                                               [OPTION_OFFLOAD_SOCKET] = AFFINITY_SOCKET};
    int wanted = calm_options.offload;
    return wanted < OPTION_OFFLOAD_CPU_0
               ? (struct affinity_request){kinds[wanted], 0}
               : (struct affinity_request){AFFINITY_NUMBER, (unsigned)(wanted - OPTION_OFFLOAD_CPU_0)};
}

struct backend *offload_start(struct governor *governor) {
    struct offload_options options = {calm_options.test_sync != 0, requested_cpu(),
                                      (unsigned)calm_options.test_offload_timeout};
    return offload_open(&calm_offload, &options, governor);
}
