/*
 * Whether there is a CPU for the server to have to itself: a server that shares one is in its clients' way.
 *
 * By what it ran while it was awake, by what the whole process used, and, while it has given way, by what the
 * process leaves idle. The server's thread alone; a look costs three system calls, made some milliseconds
 * apart.
 */
#ifndef CALM_OFFLOAD_CROWD_H
#define CALM_OFFLOAD_CROWD_H

#include <stdbool.h>
#include <stdint.h>

/* It takes so many looks in a row to be sure: a thread that has just started may be moved to another CPU
 * soon. */
#define CROWD_LOOKS 3

/* All zero but cpus is the valid initial state. */
struct crowd {
    unsigned cpus;      /* that the process may use */
    uint64_t looked_ns; /* when it looked last; 0: what went before does not count */
    uint64_t ran_ns;    /* what the server, and the process, had run by then */
    uint64_t used_ns;
    uint64_t slept_ns;      /* by the server, since then: for the caller to add to */
    unsigned crowded_looks; /* in a row */
    uint64_t away_until_ns;
    uint64_t away_ns; /* how long the last period was in which it had given way */
    uint64_t back_ns; /* when that was over */
};

/*
 * Whether the server is in its clients' way: others run on its CPU while it is awake, or the process has all
 * its CPUs busy though the server itself sleeps for much of the time. False until some milliseconds have
 * passed since the last look.
 */
bool crowd_is_there(struct crowd *crowd, uint64_t now_ns);

/* It gives way: for a while, twice as long each time, unless it was back for many times as long. */
void crowd_give_way(struct crowd *crowd, uint64_t now_ns);

/* How long that while still is, in [1 ms, most]. */
uint64_t crowd_away_ns(const struct crowd *crowd, uint64_t now_ns, uint64_t most_ns);

/* Whether that while is over, and the process left so much of a CPU idle that the server can have it; if it
 * did not, the while begins again. */
bool crowd_has_room(struct crowd *crowd, uint64_t now_ns);

#endif
