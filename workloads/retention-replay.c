/* Replays a program's memory use, epoch by epoch, for a retention policy, and computes the memory that the
 * policy keeps, and what that and purging in vain cost. Reads from stdin one line for each epoch of 100 ms:
 * the highest number of pages in use, the number at its end, and the CPU time in milliseconds. The heap has
 * no fragmentation: any free page fits any request. */
#include "policy/demand.h"
#include "policy/retention.h"
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "retention-replay";

enum policy { POLICY_ADAPTIVE, POLICY_PAPER, POLICY_FIXED };

static const char *const policy_names[] = {"adaptive", "paper", "fixed", NULL};

enum { PAGE = 4096, FIXED_MOST = 1 << 16 };

struct replay {
    enum policy policy;
    size_t fixed; /* windows */
    struct demand_price price;
    double purge_ns; /* of a page */
    struct demand demand;
    size_t levels[FIXED_MOST]; /* window n's at n % FIXED_MOST */
    size_t windows;
    size_t held;
    size_t highest;
    size_t purged; /* in the last window */
    size_t given;  /* in all */
    double kept;   /* pages, through whole windows */
    double vain;   /* pages */
    double cpu_ns;
};

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t most(size_t a, size_t b) {
    return a > b ? a : b;
}

/* What is to be kept, with what is in use. */
static size_t fixed_peak(const struct replay *replay) {
    size_t peak = 0;
    for (size_t i = 1; i <= least(replay->fixed, replay->windows); i++) {
        peak = most(peak, replay->levels[(replay->windows - i) % FIXED_MOST]);
    }
    return peak;
}

static void give(struct replay *replay, size_t pages) {
    replay->purged += pages;
    replay->given += pages;
    replay->held -= pages;
}

static void decide(struct replay *replay, size_t used) {
    size_t free_pages = replay->held - used;
    if (replay->policy == POLICY_FIXED) {
        size_t peak = most(fixed_peak(replay), used);
        give(replay, replay->held > peak ? replay->held - peak : 0);
        return;
    }
    struct retention_terms terms = {
        .adaptive = replay->policy == POLICY_ADAPTIVE,
        .background_purge = true,
        .factor = 1.01,
        .peak_bytes = demand_peak_pages(&replay->demand) * PAGE,
        .surplus_bytes = demand_surplus_pages(&replay->demand) * PAGE,
        .available_bytes = SIZE_MAX,
    };
    struct retention retention = retention_decide(&terms, used * PAGE, free_pages * PAGE);
    if (free_pages * PAGE > retention.limit_bytes) {
        give(replay, free_pages - retention.keep_bytes / PAGE);
    }
    size_t worth = demand_peak_pages(&replay->demand) + demand_surplus_pages(&replay->demand);
    if (terms.adaptive && replay->held > worth) {
        give(replay, replay->held - worth);
    }
}

static void pass_window(struct replay *replay, size_t max_used, size_t used_last, double cpu_ns) {
    size_t faulted = max_used > replay->held ? max_used - replay->held : 0;
    size_t min_free = replay->held > max_used ? replay->held - max_used : 0;
    replay->vain +=
        (double)least(faulted, replay->highest > replay->held ? replay->highest - replay->held : 0);
    replay->held += faulted;
    replay->highest = most(replay->highest, max_used);
    replay->levels[replay->windows++ % FIXED_MOST] = max_used;
    replay->cpu_ns += cpu_ns;
    struct demand_epoch window = {
        .ns = DEMAND_EPOCH_NS,
        .cpu_ns = cpu_ns,
        .max_used = max_used,
        .used_last = used_last,
        .max_held = replay->held,
        .purged_pages = replay->purged,
        .faulted_pages = faulted,
        .purge_ns = (double)replay->purged * replay->purge_ns,
    };
    replay->purged = 0;
    demand_record(&replay->demand, &window, replay->price);
    replay->kept += (double)min_free;
    decide(replay, used_last);
}

int main(int argc, char **argv) {
    static struct replay replay;
    unsigned long policy = POLICY_ADAPTIVE;
    unsigned long windows = 10;
    unsigned long gib = 8;
    unsigned long fault_ns = 700;
    unsigned long purge_ns = 300;
    const struct option_spec options[] = {
        {"policy", "the policy", OPTION_CHOICE, &policy, 0, 0, policy_names},
        {"windows", "epochs for which `fixed` keeps memory that was in use", OPTION_COUNT, &windows, 0,
         FIXED_MOST, NULL},
        {"memory-per-cpu", "GiB that are worth, for a second, a second of CPU time", OPTION_COUNT, &gib, 0,
         1000000, NULL},
        {"fault", "nanoseconds for the first touch of a page", OPTION_COUNT, &fault_ns, 0, 1000000, NULL},
        {"purge", "nanoseconds for purging a page", OPTION_COUNT, &purge_ns, 0, 1000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Computes the memory that a retention policy would have kept, and its cost.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    replay.policy = (enum policy)policy;
    replay.fixed = windows;
    replay.purge_ns = (double)purge_ns;
    double pages_per_cpu = (double)gib * (1 << 30) / PAGE;
    replay.price = (struct demand_price){(double)fault_ns, pages_per_cpu};

    char line[256];
    while (fgets(line, sizeof line, stdin) != NULL) {
        char *rest = line;
        size_t max_used = strtoull(rest, &rest, 10);
        size_t used_last = strtoull(rest, &rest, 10);
        char *end = rest;
        double cpu_ms = strtod(rest, &end);
        if (end == rest || used_last > max_used || max_used > SIZE_MAX / PAGE) {
            fail(program_name, "a line is not three numbers: pages at most, pages at the end, milliseconds");
        }
        pass_window(&replay, max_used, used_last, cpu_ms * 1e6);
    }
    double wasted_ns = replay.vain * (double)(fault_ns + purge_ns);
    double rent_s = gib > 0 ? replay.kept * DEMAND_EPOCH_NS / 1e9 / pages_per_cpu : 0;
    printf("{\"windows\": %zu, \"cpu_s\": %.3f, \"vain_s\": %.6f, \"vain_pages\": %.0f, \"kept_mib\": %.3f, "
           "\"rent_s\": %.6f, \"given_pages\": %zu}\n",
           replay.windows, replay.cpu_ns / 1e9, wasted_ns / 1e9, replay.vain,
           replay.windows > 0 ? replay.kept / (double)replay.windows * PAGE / (1 << 20) : 0, rent_s,
           replay.given);
    return 0;
}
