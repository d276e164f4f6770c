/*
 * CPU contention: whether the server has a CPU to itself, judged by its CPU
 * time while awake and by the CPU time of the process. A server without one
 * delays its clients, so it stops serving for a time, a pause. Called by the
 * server's thread alone. A check makes up to two system calls, at most once in
 * 8 ms.
 */
#ifndef CALM_OFFLOAD_CONTENTION_H
#define CALM_OFFLOAD_CONTENTION_H

#include <stdbool.h>
#include <stdint.h>

/* Consecutive checks that must find contention: the kernel may soon move a new
 * thread to another CPU. */
#define CONTENTION_CHECKS 3

/* All zero, except cpus, is the initial state. */
struct contention {
    unsigned cpus;       /* that the process may use */
    uint64_t checked_ns; /* time of the last check; 0: ignore what happened before the next one */
    uint64_t ran_ns;     /* CPU time of the server, and of the process, at that time */
    uint64_t used_ns;
    uint64_t slept_ns;         /* that the server slept since then; the caller adds to it */
    unsigned contended_checks; /* consecutive */
    uint64_t pause_until_ns;
    uint64_t pause_ns;        /* length of the last pause */
    uint64_t served_since_ns; /* the end of that pause */
};

/*
 * While the server serves. True if other threads run on the server's CPU while
 * it is awake, or if the process keeps all its CPUs busy though the server
 * sleeps for much of the time. False if the last check was less than 8 ms ago.
 */
bool contention_check(struct contention *contention, uint64_t now_ns);

/* A pause begins: of 50 ms at first, and twice as long as the last one (up to
 * 3.2 s), unless the server has served many times as long as that since. */
void contention_back_off(struct contention *contention, uint64_t now_ns);

/* What is left of the pause, from 1 ms to max_ns. */
uint64_t contention_wait_ns(const struct contention *contention, uint64_t now_ns, uint64_t max_ns);

/* In a pause. True if it is over and the process left enough of a CPU idle
 * during it; if it did not, another one begins. */
bool contention_is_over(struct contention *contention, uint64_t now_ns);

#endif
