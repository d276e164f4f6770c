/*
 * Server affinity: the CPU on which the server runs ("NextGen-Malloc", HotOS
 * 2023, section 3.2). A polling server occupies a CPU, so by default it takes
 * an idle one: on a core without clients, which it would slow down, but near
 * them, since blocks pass through their cache and it populates their memory.
 *
 * The choice is pure; struct affinity_survey reads the machine for it. Nothing
 * here allocates, changes errno, or needs thread-local storage. Called by
 * offload.c; the choice by the server's thread.
 */
#ifndef CALM_OFFLOAD_AFFINITY_H
#define CALM_OFFLOAD_AFFINITY_H

#include "offload/cpu_times.h"
#include "offload/topology.h"

/* ---- whether to have a server ---- */

/* Why there should be no server, given the CPUs that the process may use and
 * the number of CPUs whose time its control group may use (cgroup_cpu_quota;
 * infinity: no limit): a message, NULL if there should be one. Pure. */
const char *affinity_obstacle(const struct cpu_set *allowed, double quota_cpus);

/* ---- which CPU ---- */

#define MAX_AFFINITY_CLIENTS 16

/* What the choice depends on. Sites and idle shares are read only for CPUs in
 * `allowed` or `clients`. */
struct affinity_view {
    struct cpu_set allowed; /* for the server */
    struct cpu_site sites[MAX_CPUS];
    uint8_t idle_percent[MAX_CPUS];         /* recently; CPU_IDLE_UNKNOWN counts as half */
    uint32_t clients[MAX_AFFINITY_CLIENTS]; /* CPUs on which the process's threads run, busiest first */
    size_t client_count;
};

enum affinity_kind {
    AFFINITY_AUTO,    /* an idle CPU */
    AFFINITY_NUMBER,  /* the CPU with that number */
    AFFINITY_SIBLING, /* another hyperthread of the busiest client's core */
    AFFINITY_CORE,    /* another core of its socket */
    AFFINITY_SOCKET,  /* another socket */
};

struct affinity_request {
    enum affinity_kind kind;
    unsigned number; /* of AFFINITY_NUMBER */
};

struct affinity_choice {
    int cpu;  /* -1: none, of fewer than two CPUs */
    bool met; /* the request */
};

/*
 * The server's CPU. If the request cannot be met, the CPU is that of
 * AFFINITY_AUTO.
 *
 * Among the CPUs that meet the request, the first of these rules that
 * distinguishes two of them decides:
 *  1. not the busiest client's own CPU;
 *  2. the idler CPU, in quarters; on a client's core, at most the second lowest
 *     quarter;
 *  3. a core without clients, or else a CPU without clients;
 *  4. nearer to the busiest client: the same last-level cache, else the same
 *     socket;
 *  5. a core whose busiest other hyperthread is idler, in quarters;
 *  6. the seed: processes that start at the same time see the same machine, and
 *     must not all choose the same CPU. The seed must differ between processes;
 *     a process id alone does not, as the first process of each container has
 *     number 1.
 *
 * Pure. Takes time for each pair of allowed CPUs.
 */
struct affinity_choice affinity_choose(const struct affinity_view *view, struct affinity_request request,
                                       uint64_t seed);

/* ---- the view of this machine ---- */

/*
 * All zero is the initial state, in static memory: it has some 400 KiB, of
 * which little is touched on a machine with few CPUs. One thread at a time.
 */
struct affinity_survey {
    struct affinity_view view;
    struct cpu_times cpus[2];
    struct task_times tasks[2];
    unsigned updates;
};

/*
 * Brings the view up to date: sites, and the idle shares and busiest CPUs since
 * the last update; in the first update, since the machine's and each thread's
 * start. Updates should be a tenth of a second or more apart.
 *
 * The caller sets view.allowed first (cpu_affinity), on a thread that is not
 * bound to one CPU. server_thread is the thread that is not a client, or 0.
 */
void affinity_update(struct affinity_survey *survey, const char *root, int server_thread);

#endif
