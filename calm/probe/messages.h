/* What a message between two CPUs costs: for the probe's -m, which runs no program. */
#ifndef CALM_PROBE_MESSAGES_H
#define CALM_PROBE_MESSAGES_H

#include "json.h"

#include <stdbool.h>
#include <stddef.h>

struct cpu_pair {
    unsigned a; /* sends, and wakes */
    unsigned b; /* answers, and sleeps */
};

/* Reads "0:1,0:2"; the number of pairs, at most most. 0: the text is something else. */
size_t messages_parse(const char *text, struct cpu_pair *pairs, size_t most);

/*
 * Measures, and writes the fields
 *   reference_mhz    of the time stamp counter; null where there is none
 *   atomic_ns        an atomic read-modify-write of a cache line that no other CPU has
 *   pairs            by "a:b", each null where its CPUs cannot be used
 *     round_trip_ns       there and back, by a cache line that both poll
 *     wake_ns             what it costs the waker to wake a thread that sleeps on a futex
 *     wake_round_trip_ns  from before that to the woken thread's answer
 * Each figure has median, low and high (the first and last deciles) and samples; it is null where there are
 * too few. Half a second for each pair at most. Ends the probe where threads are short.
 */
void messages_measure(struct json *json, const struct cpu_pair *pairs, size_t count);

#endif
