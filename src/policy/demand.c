#include "policy/demand.h"

#include "base/assert.h"
#include "base/size.h"

#define EPOCH_S (DEMAND_EPOCH_NS / 1e9)
/* After so long a term has weight 1/e. */
#define FADE_S 25.0

/* The program is idle after this number of epochs in which it used less than this part of a CPU. */
#define BUSY_CPUS   (1.0 / 16)
#define IDLE_EPOCHS 4
/* The assumed cost of purging a page, with the weight of this number of measured pages. A wrong measurement
 * is outweighed by it after a while, also if the measurement prevents all further purges. */
#define PRIOR_PURGE_NS 500.0
#define PRIOR_PAGES    1024.0

/* Layers of an octave, and the first one that has several. */
#define OCTAVE_LAYERS 8
#define OCTAVE_SHIFT  3
#define LOWEST_PAGES  256
#define LOWEST_SHIFT  5 /* LOWEST_PAGES = OCTAVE_LAYERS << LOWEST_SHIFT */

/* A layer trusts its history while it has a credit of one purge: what being wrong costs at most. While it
 * does not, what the history would have saved counts for little: or alternately fooling and feeding it would
 * pay. */
#define FIRST_CREDIT     2.0F
#define MAX_REUSE_CREDIT 4.0F
#define UNTRUSTED_SHARE  0.05F
/* A gap that is longer than this multiple of the longest so far, and an epoch, is not of their kind. */
#define MARGIN             2.0F
#define KEEP_TO_BREAK_EVEN __builtin_inff()
/* A layer that was used in each epoch for this time is expected to be used in the next ones. */
#define CONSTANT_S 1.0F
/* With a price of zero: no layer is kept beyond the epoch in which it was used. */
#define MIN_BREAK_EVEN_S 1e-6

/* The lowest layer is 0; the last one has no end. */
static size_t layer_base(size_t layer) {
    size_t above = layer - 1;
    return layer == 0 ? 0 : (OCTAVE_LAYERS + above % OCTAVE_LAYERS) << (above / OCTAVE_LAYERS + LOWEST_SHIFT);
}

/* The number of layers that are in use with this number of pages. */
static size_t layers_of(size_t pages) {
    if (pages <= LOWEST_PAGES) {
        return pages > 0;
    }
    size_t last = pages - 1;
    unsigned shift = (unsigned)(63 - __builtin_clzll(last)) - OCTAVE_SHIFT;
    size_t layer = (shift - LOWEST_SHIFT) * (size_t)OCTAVE_LAYERS + (last >> shift) - OCTAVE_LAYERS + 1;
    calm_assert(layer_base(size_min(layer, DEMAND_LAYERS - 1)) < pages, layer, pages);
    return size_min(layer + 1, DEMAND_LAYERS);
}

/* Pages of a layer between two levels. */
static size_t layer_pages(size_t layer, size_t from, size_t to) {
    size_t base = size_max(layer_base(layer), from);
    return size_minus(layer + 1 < DEMAND_LAYERS ? size_min(layer_base(layer + 1), to) : to, base);
}

/* ---- one layer ---- */

static float shorter_of(float a_s, float b_s) {
    return a_s < b_s ? a_s : b_s;
}

/* The cost of a gap, in purges of the layer: break_even_s of rent cost as much as one. None is kept longer.
 */
static float cost_of(float gap_s, float keep_s, float break_even_s) {
    float kept_s = shorter_of(keep_s, break_even_s);
    return gap_s < kept_s ? gap_s / break_even_s : kept_s / break_even_s + 1;
}

static size_t known_gaps(const struct demand_layer *layer) {
    return size_min(layer->gaps, DEMAND_GAPS);
}

static void add_gap(struct demand_layer *layer, float gap_s) {
    calm_assert(gap_s >= 0);
    layer->gaps_s[layer->gaps++ % DEMAND_GAPS] = gap_s;
}

static float cost_so_far(const struct demand_layer *layer, float keep_s, float break_even_s) {
    float cost = 0;
    for (size_t i = 0; i < known_gaps(layer); i++) {
        cost += cost_of(layer->gaps_s[i], keep_s, break_even_s);
    }
    return cost;
}

/* Of times with the same cost so far the shortest: a longer one waits for what has not been seen. The longest
 * is the break-even time, whatever becomes of it: the cost of a page may not have been measured yet. */
static float best_keep_s(const struct demand_layer *layer, float break_even_s) {
    float best_s = known_gaps(layer) > 0 ? 0 : KEEP_TO_BREAK_EVEN;
    float best = cost_so_far(layer, best_s, break_even_s);
    for (size_t i = 0; i <= known_gaps(layer); i++) {
        float keep_s = KEEP_TO_BREAK_EVEN;
        if (i < known_gaps(layer)) {
            keep_s = MARGIN * layer->gaps_s[i] + (float)(2 * EPOCH_S);
        }
        float cost = cost_so_far(layer, keep_s, break_even_s);
        if (cost < best || (cost == best && keep_s < best_s)) {
            best = cost;
            best_s = keep_s;
        }
    }
    return best_s;
}

static void begin_gap(struct demand_layer *layer, float break_even_s) {
    if (layer->used_s >= CONSTANT_S || layer->used_s >= break_even_s) {
        add_gap(layer, 0); /* it was used in each epoch */
    }
    layer->used_s = 0;
    layer->keep_s = best_keep_s(layer, break_even_s);
}

/* The credit changes only when a gap ends. */
static bool is_trusted(const struct demand_layer *layer) {
    return layer->credit >= 1;
}

/* For how long to keep it in this gap. The price may have changed since the gap began. */
static float keeping_s(const struct demand_layer *layer, float break_even_s) {
    return is_trusted(layer) ? shorter_of(layer->keep_s, break_even_s) : break_even_s;
}

static bool layer_is_kept(const struct demand_layer *layer, float break_even_s) {
    return layer->unused_s == 0 || layer->unused_s < keeping_s(layer, break_even_s);
}

static void end_gap(struct demand_layer *layer, float break_even_s) {
    float gap_s = layer->unused_s;
    float foreseen = cost_of(gap_s, layer->keep_s, break_even_s);
    float saved = cost_of(gap_s, KEEP_TO_BREAK_EVEN, break_even_s) - foreseen;
    float credit = layer->credit + saved * (is_trusted(layer) ? 1 : UNTRUSTED_SHARE);
    layer->credit = credit < 0 ? 0 : credit > MAX_REUSE_CREDIT ? MAX_REUSE_CREDIT : credit;
    calm_assert(layer->credit >= 0 && layer->credit <= MAX_REUSE_CREDIT);
    add_gap(layer, gap_s);
    layer->unused_s = 0;
}

/* ---- all of them ---- */

/*
 * In an epoch that no tick ended in time, a layer that was in use when it began, and is not when it ends, was
 * used at its beginning; one that was not in use when it began was used at its end. Returns the pages that
 * were kept through a gap that ended.
 */
static size_t record_levels(struct demand *demand, const struct demand_epoch *epoch) {
    float break_even_s = (float)demand->break_even_s;
    float length_s = (float)(epoch->ns / 1e9);
    float rest_s = length_s < 2 * (float)EPOCH_S ? 0 : length_s - (float)EPOCH_S;
    size_t used = layers_of(epoch->max_used);
    size_t used_before = layers_of(demand->used_last);
    size_t used_after = layers_of(epoch->used_last);
    size_t kept = 0;
    for (; demand->layer_count < used; demand->layer_count++) {
        demand->layers[demand->layer_count] = (struct demand_layer){.credit = FIRST_CREDIT};
    }
    for (size_t i = 0; i < demand->layer_count; i++) {
        struct demand_layer *layer = &demand->layers[i];
        if (layer->unused_s == 0 && i >= used) {
            begin_gap(layer, break_even_s);
        }
        if (i >= used) {
            layer->unused_s += length_s;
            continue;
        }
        bool had_gap = layer->unused_s > 0;
        layer->unused_s += had_gap && i >= used_before ? rest_s : 0;
        if (had_gap) {
            kept += layer_is_kept(layer, break_even_s) ? layer_pages(i, 0, epoch->max_used) : 0;
            end_gap(layer, break_even_s);
        }
        bool until_end = i < used_after;
        layer->used_s += i < used_before && until_end ? length_s : length_s - rest_s;
        if (!until_end && i < used_before && rest_s > 0) {
            begin_gap(layer, break_even_s);
            layer->unused_s = rest_s;
        }
    }
    return kept;
}

/* The highest layer in use may be in use in part: the rest goes with the layer above, or by the break-even
 * time. */
static void record_high(struct demand *demand, const struct demand_epoch *epoch) {
    demand->high_s += epoch->ns / 1e9;
    if (epoch->max_used >= demand->high || layers_of(epoch->max_used) != layers_of(demand->high) ||
        demand->high_s >= demand->break_even_s) {
        demand->high = epoch->max_used;
        demand->high_s = 0;
    }
}

static size_t worth_keeping(const struct demand *demand) {
    float break_even_s = (float)demand->break_even_s;
    size_t pages = demand->used_last;
    size_t last = layers_of(demand->high);
    for (size_t i = 0; i < demand->layer_count; i++) {
        bool in_part = i + 1 == last &&
                       (last == demand->layer_count || !layer_is_kept(&demand->layers[last], break_even_s));
        if (layer_is_kept(&demand->layers[i], break_even_s)) {
            pages += layer_pages(i, demand->used_last, in_part ? demand->high : demand->highest);
        }
    }
    return pages;
}

static void fade(struct demand *demand, double ns) {
    double weight = 1 / (1 + ns / 1e9 / FADE_S);
    demand->surplus_pages *= weight;
    demand->fragmented_ns *= weight;
    demand->absent_ns *= weight;
    demand->purge_ns *= weight;
    demand->purged_pages *= weight;
    demand->absent_pages *= weight;
}

static double lower_of(double a, double b) {
    return a < b ? a : b;
}

/* Returns the number of pages whose purge was wasted: as many as those of which the next fault could have
 * been saved. Growth beyond what was kept explains faults, too, but is no fragmentation. */
static double record_fragmentation(struct demand *demand, const struct demand_epoch *epoch, double page_ns) {
    size_t avoidable = size_minus(epoch->faulted_pages, epoch->sparse_pages);
    double wasted = lower_of((double)avoidable, demand->absent_pages);
    calm_assert(wasted >= 0 && wasted <= demand->absent_pages);
    size_t grown = size_minus(epoch->max_used, demand->peak_pages);
    size_t unexplained = size_min(size_minus(epoch->faulted_pages, grown), avoidable);
    demand->fragmented_ns += lower_of((double)unexplained, wasted) * page_ns;
    demand->absent_pages += (double)epoch->purged_pages - wasted;
    demand->absent_ns += demand->absent_pages * page_ns * (epoch->ns / 1e9) / demand->break_even_s;
    double surplus = (double)size_minus(epoch->max_held, size_max(epoch->max_used, demand->peak_pages));
    demand->surplus_pages = surplus > demand->surplus_pages ? surplus : demand->surplus_pages;
    bool busy = epoch->cpu_ns >= BUSY_CPUS * epoch->ns;
    demand->idle_epochs = busy ? 0 : demand->idle_epochs + (demand->idle_epochs < IDLE_EPOCHS);
    demand->fragmented = demand->fragmented_ns > demand->absent_ns && demand->idle_epochs < IDLE_EPOCHS;
    return wasted;
}

struct demand_outcome demand_record(struct demand *demand, const struct demand_epoch *epoch,
                                    struct demand_price price) {
    calm_assert(epoch->ns > 0 && epoch->cpu_ns >= 0 && epoch->purge_ns >= 0);
    calm_assert(epoch->used_last <= epoch->max_used, epoch->used_last, epoch->max_used);
    calm_assert(price.fault_ns >= 0 && price.page_seconds >= 0);
    fade(demand, epoch->ns);
    demand->purge_ns += epoch->purge_ns;
    demand->purged_pages += (double)epoch->purged_pages;
    double page_ns = price.fault_ns +
                     (demand->purge_ns + PRIOR_PAGES * PRIOR_PURGE_NS) / (demand->purged_pages + PRIOR_PAGES);
    double break_even_s = page_ns / 1e9 * price.page_seconds;
    demand->break_even_s = break_even_s > MIN_BREAK_EVEN_S ? break_even_s : MIN_BREAK_EVEN_S;
    double wasted = record_fragmentation(demand, epoch, page_ns);
    size_t kept = record_levels(demand, epoch);
    demand->epochs++;
    record_high(demand, epoch);
    demand->highest = size_max(demand->highest, epoch->max_used);
    demand->used_last = epoch->used_last;
    demand->peak_pages = worth_keeping(demand);
    calm_assert(demand->peak_pages >= demand->used_last, demand->peak_pages, demand->used_last);
    calm_assert(demand->layer_count <= DEMAND_LAYERS, demand->layer_count);
    calm_assert(demand->used_last <= demand->highest, demand->used_last, demand->highest);
    /* What faulted was not kept: a limit or a trim was in the way. */
    size_t saved = size_minus(kept, epoch->faulted_pages);
    return (struct demand_outcome){wasted * page_ns, (double)saved * page_ns};
}

/* On average, those of constant use left out. 0: there was none. */
static double usual_gap_s(const struct demand_layer *layer) {
    double sum = 0;
    size_t count = 0;
    for (size_t i = 0; i < known_gaps(layer); i++) {
        sum += (double)layer->gaps_s[i];
        count += layer->gaps_s[i] > 0;
    }
    return count > 0 ? sum / (double)count : 0;
}

struct demand_forecast demand_forecast(const struct demand *demand) {
    struct demand_forecast most = {0};
    struct demand_forecast now = {0};
    for (size_t i = 0; i < demand->layer_count; i++) {
        const struct demand_layer *layer = &demand->layers[i];
        double keep_s = (double)keeping_s(layer, (float)demand->break_even_s);
        if (layer->unused_s == 0 || (double)layer->unused_s >= keep_s) {
            continue;
        }
        if ((double)layer->unused_s != now.unused_s) {
            now = (struct demand_forecast){.unused_s = (double)layer->unused_s};
        }
        now.pages += layer_pages(i, demand->used_last, demand->highest);
        now.reuse_s = usual_gap_s(layer);
        now.keep_s = keep_s;
        most = now.pages > most.pages ? now : most;
    }
    return most;
}

void demand_forget(struct demand *demand) {
    demand->layer_count = 0;
    demand->highest = 0;
    demand->high = 0;
    demand->peak_pages = 0;
    demand->surplus_pages = 0;
    demand->fragmented = false;
}
