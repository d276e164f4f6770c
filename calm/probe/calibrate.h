/* What counting costs the program that is counted: its tracepoints run in its own threads, so no clock here
 * sees it. */
#ifndef CALM_PROBE_CALIBRATE_H
#define CALM_PROBE_CALIBRATE_H

#include <sys/types.h>

/* Nanoseconds that tracing adds; negative where it was not measured. */
struct trace_cost {
    double counted_call; /* to a system call that is counted */
    double other_call;   /* to any other system call, which is slower too while one of them is traced */
    double flush;        /* to a TLB flush */
    double task;         /* to a thread's or a process's start and end: it inherits every counter */
};

/*
 * Measures, in some 20 ms and in a process of its own, since what is measured is inherited by children.
 * groups: see enum counter_group. Returns the process, or a negative number where there is none.
 */
pid_t calibration_begin(unsigned groups, struct trace_cost *cost);

/*
 * Ends that process. Worth doing only once the program's counters are open: the last close of a tracepoint
 * waits some 30 ms for every CPU, and this way it is not the last.
 */
void calibration_end(pid_t helper);

#endif
