/*
 * Demand: the time for which free memory is worth keeping. The policy decides
 * it by the program's past use of memory, and by a price of memory.
 *
 * This is the ski-rental problem. A kept page costs rent, for as long as it is
 * kept. A purged page costs the purge, and a fault if the program needs it
 * again. The price makes rent and CPU time comparable. At P byte-seconds for a
 * second of CPU time, a page that costs c to purge and to fault in is worth
 * keeping for c * P / page bytes. This is the break-even time: about 3 s at 8
 * GiB.
 *
 * The pages in use form a stack of layers, each an eighth of an octave. The
 * program uses the lowest layer all the time, and the highest perhaps once a
 * day. Each epoch of 100 ms shows which layers were in use. A gap is the time
 * from one use of a layer to its next use.
 *
 * A layer without a history of gaps is kept for the break-even time, which
 * never costs more than twice the optimum that knows the future. With a
 * history, the policy keeps the layer for the time, from none to break-even,
 * that would have cost least over the last gaps. This expectation can be wrong.
 * Each layer therefore has a credit of a few purges. The costs that
 * expectations save add to the credit, and the costs that they cause use it up.
 * A layer without credit is kept for the break-even time. The total cost is
 * therefore at most 2.1 times the optimum, plus a few purges.
 *
 * Layers do not show fragmentation, that is, free pages that do not fit the
 * requested sizes. Its cost shows it. A purged page, together with a later
 * fault that the level of use does not explain, counts as a wasted purge, unless
 * the faulting block would have taken clean pages in any case. The
 * surplus is the memory that was held besides the layers. It is kept, too,
 * while the program is busy and the wasted purges cost more than keeping the
 * purged pages would have.
 *
 * Pure: no system call, no lock, no global. The arena, retention-replay and the
 * tests call demand_record once per epoch. All zero is the initial state.
 *
 * Sources: Karlin et al., "Competitive snoopy caching" (1988), for the
 * break-even rule; Purohit et al., "Improving online algorithms via ML
 * predictions" (2018), for the bounded trust in expectations.
 */
#ifndef CALM_POLICY_DEMAND_H
#define CALM_POLICY_DEMAND_H

#include <stdbool.h>
#include <stddef.h>

#define DEMAND_EPOCH_NS 100000000ULL
#define DEMAND_GAPS     8 /* the number of gaps that a layer remembers */
/* The lowest layer has 256 pages. Above it, each octave has eight layers of
 * equal size, up to 2^29 pages. */
#define DEMAND_LAYERS 169

/* Counts are in pages and times in nanoseconds, unless the name says
 * otherwise. */
struct demand_epoch {
    double ns;            /* length; several times DEMAND_EPOCH_NS if no call ended it in time */
    double cpu_ns;        /* CPU time of the process */
    size_t max_used;      /* highest number of pages in use */
    size_t used_last;     /* pages in use at the end */
    size_t max_held;      /* highest number of pages that were in use, or free and perhaps resident */
    size_t purged_pages;  /* purged in this epoch */
    size_t faulted_pages; /* taken into use while not resident */
    size_t sparse_pages;  /* those of them for which free resident pages would not have been used */
    double purge_ns;      /* CPU time spent purging */
};

struct demand_price {
    double fault_ns;     /* measured cost of one page fault */
    double page_seconds; /* pages * seconds that are worth a second of CPU time; 0: no page is kept */
};

struct demand_layer {
    unsigned gaps;             /* the number of gaps so far */
    float gaps_s[DEMAND_GAPS]; /* the last gaps: number n is at n % DEMAND_GAPS */
    float used_s;              /* time of use since the last gap */
    float unused_s;            /* length of the current gap; 0: the layer was in use in the last epoch */
    float keep_s;              /* maximum time to keep the layer in this gap, by its history */
    float credit;              /* wasted purges of the whole layer that its history may still cause */
};

struct demand {
    struct demand_layer layers[DEMAND_LAYERS];
    size_t layer_count; /* layers that were ever in use */
    size_t epochs;
    size_t highest; /* highest number of pages that were ever in use */
    size_t high;    /* highest number of pages in use within the highest layer in use; reached high_s ago */
    double high_s;
    size_t used_last;
    size_t peak_pages; /* see demand_peak_pages */
    double break_even_s;
    unsigned idle_epochs; /* consecutive idle epochs, up to the number that makes the program idle */
    bool fragmented;      /* the surplus is worth keeping */
    /* Exponentially weighted sums: a term has weight 1/e after 25 s. */
    double surplus_pages; /* fading maximum of the pages held besides those worth keeping */
    double fragmented_ns; /* cost of purges that were wasted because of fragmentation */
    double absent_ns;     /* rent that the purged pages would have cost */
    double purge_ns, purged_pages;
    double absent_pages; /* pages purged, and not yet paired with a fault */
};

/* The result of an epoch, as CPU time in ns. */
struct demand_outcome {
    double wasted_ns; /* spent on purging pages that were needed again */
    double saved_ns;  /* saved by keeping pages that were needed again, an epoch or more later */
};

/* Records a finished epoch. Returns what its purges and its kept pages cost or
 * saved. */
struct demand_outcome demand_record(struct demand *demand, const struct demand_epoch *epoch,
                                    struct demand_price price);

/* Returns the number of pages, in use or free, that are worth keeping. */
static inline size_t demand_peak_pages(const struct demand *demand) {
    return demand->peak_pages;
}

/* Returns the number of further pages that are worth keeping because the heap
 * is fragmented. */
static inline size_t demand_surplus_pages(const struct demand *demand) {
    return demand->fragmented ? (size_t)demand->surplus_pages : 0;
}

/* The largest part of the kept unused pages: all layers whose last use ended at
 * the same time. */
struct demand_forecast {
    size_t pages;    /* 0: no unused page is kept */
    double unused_s; /* time since the last use */
    double reuse_s;  /* average length of the gaps; 0: no gap is known */
    double keep_s;   /* the pages are kept until unused_s reaches this time */
};

struct demand_forecast demand_forecast(const struct demand *demand);

/* Called in a child of fork, which is a program of its own. Writes few
 * words. */
void demand_forget(struct demand *demand);

#endif
