/*
 * Demand: for how long free memory is worth keeping, decided from how the program used memory so far, and
 * from what memory is worth: a price.
 *
 * This is the ski-rental problem: keeping a page rents it, for as long as it is kept; purging it costs the
 * purge, and a fault if the program needs it again. The price makes the two comparable: at P byte-seconds for
 * a second of CPU time, a page that costs c to purge and to fault in is worth keeping for c * P / page bytes,
 * the break-even time: about 3 s at 8 GiB.
 *
 * The pages in use form a stack of layers, each an eighth of an octave: the lowest is used by all that the
 * program does, the highest perhaps once a day. Each epoch of 100 ms says which layers were in use. A gap is
 * the time that a layer was unused until it was used again. Without knowledge a layer is kept for the
 * break-even time, which never costs more than twice the optimum that knows the future. With a history of
 * gaps the policy takes the time, from none to break-even, that would have cost least over the last gaps. An
 * expectation can be wrong: each layer has a credit of a few purges, which what expectations save restores,
 * and what they cost uses up. Without credit a layer is kept for the break-even time, so that the total is at
 * most 2.1 times the optimum's, and a few purges.
 *
 * Layers do not show fragmentation: free pages that do not fit the requested sizes. It shows by its cost:
 * each purged page and a later fault that the level of use does not explain pair up as a wasted purge.
 * While these cost more than the absent pages would have as rent, and the program is busy, what was held
 * besides the layers is kept, too: the surplus.
 *
 * Pure: no system call, no lock, no global. Called once per epoch by the governor, by retention-replay and by
 * the tests. The zero value is the valid initial state. Sources: Karlin et al., "Competitive snoopy caching"
 * (1988), for the break-even rule; Purohit et al., "Improving online algorithms via ML predictions" (2018),
 * for expectations that are not trusted without limit.
 */
#ifndef CALM_POLICY_DEMAND_H
#define CALM_POLICY_DEMAND_H

#include <stdbool.h>
#include <stddef.h>

#define DEMAND_EPOCH_NS 100000000ULL
#define DEMAND_GAPS     8 /* the last ones, of a layer */
/* The lowest is of 256 pages, then eight of equal size in each octave, up to 2^29 pages. */
#define DEMAND_LAYERS 169

/* All counts are pages, all times nanoseconds, unless the name says otherwise. */
struct demand_epoch {
    double ns;            /* length; several times DEMAND_EPOCH_NS if no tick came in between */
    double cpu_ns;        /* CPU time of the process */
    size_t max_used;      /* highest number of pages in use */
    size_t used_last;     /* pages in use at the end */
    size_t max_held;      /* highest number of pages in use or free and perhaps resident */
    size_t purged_pages;  /* purged in this epoch */
    size_t faulted_pages; /* taken into use while not resident */
    double purge_ns;      /* CPU time spent purging */
};

struct demand_price {
    double fault_ns;     /* of one page, as measured */
    double page_seconds; /* pages * seconds that are worth a second of CPU time; 0: none is kept */
};

struct demand_layer {
    unsigned gaps;             /* recorded so far */
    float gaps_s[DEMAND_GAPS]; /* number n at n % DEMAND_GAPS */
    float used_s;              /* for how long it was in use, since the last gap */
    float unused_s;            /* 0: it was in use in the last epoch */
    float keep_s;              /* for how long to keep it in this gap, at most, as the history says */
    float credit;              /* purges in vain that the history may still cause, of the whole layer */
};

struct demand {
    struct demand_layer layers[DEMAND_LAYERS];
    size_t layer_count; /* that were ever in use */
    size_t epochs;
    size_t highest; /* pages that were ever in use */
    size_t high;    /* that were in use within the highest layer in use, for the last time high_s ago */
    double high_s;
    size_t used_last;
    size_t peak_pages; /* see demand_peak_pages */
    double break_even_s;
    unsigned idle_epochs; /* consecutive ones, up to the number that makes the program idle */
    bool fragmented;      /* the surplus is worth keeping */
    /* Exponentially weighted: a term has weight 1/e after 25 s. */
    double surplus_pages; /* held besides what is worth keeping; the maximum, fading */
    double fragmented_ns; /* cost of what was purged in vain because of fragmentation */
    double absent_ns;     /* rent that purged pages would have cost */
    double purge_ns, purged_pages;
    double absent_pages; /* purged, and not yet paired with a fault */
};

/* What an epoch showed: CPU time in ns. */
struct demand_outcome {
    double wasted_ns; /* spent on purging pages that were needed again */
    double saved_ns;  /* not spent, as pages were kept that were needed again, an epoch or more later */
};

/* Records a finished epoch. */
struct demand_outcome demand_record(struct demand *demand, const struct demand_epoch *epoch,
                                    struct demand_price price);

/* The number of pages, in use or free, that is worth keeping. */
static inline size_t demand_peak_pages(const struct demand *demand) {
    return demand->peak_pages;
}

/* How many more are worth keeping, as the heap is fragmented. */
static inline size_t demand_surplus_pages(const struct demand *demand) {
    return demand->fragmented ? (size_t)demand->surplus_pages : 0;
}

/* The largest part of what is kept while it is unused: all layers that were last in use at the same time. */
struct demand_forecast {
    size_t pages;    /* 0: nothing is kept */
    double unused_s; /* since it was last in use */
    double reuse_s;  /* its gaps on average; 0: none is known */
    double keep_s;   /* it goes once it was unused for so long */
};

struct demand_forecast demand_forecast(const struct demand *demand);

/* In a child of fork, which is a program of its own. Writes few words. */
void demand_forget(struct demand *demand);

#endif
