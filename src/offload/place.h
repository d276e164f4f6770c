/*
 * On which CPU the server thread of offload mode runs.
 *
 * The server takes a CPU for itself while it is hot, so the default is to harvest one that is idle. It must
 * not share a core with the threads that it serves: a spinning hyperthread slows its sibling down. And it
 * should share a cache and a socket with them, through which blocks pass, and whose memory it makes resident.
 * A user who knows better names the CPU, or the kind of place.
 *
 * The choice is pure, apart from the look at the machine (struct place_survey) that it is made from. Nothing
 * is allocated, errno is preserved, and no thread-local storage is needed.
 *
 * Source: "NextGen-Malloc" (HotOS 2023), section 3.2, "Type of Core to Offload to".
 */
#ifndef CALM_OFFLOAD_PLACE_H
#define CALM_OFFLOAD_PLACE_H

#include "os/topology.h"

/* ---- whether at all ---- */

enum place_decline {
    PLACE_NO_DECLINE,
    PLACE_DECLINE_ONE_CPU, /* the server and whom it serves would wait for each other's turns */
    PLACE_DECLINE_QUOTA,   /* a server that spins would use up its clients' time */
};

/* Why there should be no server thread, given the CPUs that the process may run on and how many CPUs' time
 * its control group allows it (cgroup_cpu_quota; infinity: no limit). Pure. */
enum place_decline place_should_decline(const struct cpu_set *allowed, double quota_cpus);

/* ---- where ---- */

#define PLACE_CLIENTS_MOST 16

/* The machine as the choice sees it. Of sites and idle_percent only what belongs to a CPU of `allowed` or of
 * `clients` is read. */
struct place_view {
    struct cpu_set allowed; /* for the server */
    struct cpu_site sites[CPUS_MOST];
    uint8_t idle_percent[CPUS_MOST];      /* of late; CPU_IDLE_UNKNOWN counts as half */
    uint32_t clients[PLACE_CLIENTS_MOST]; /* CPUs, below CPUS_MOST, where the process's threads run, busiest
                                             first */
    size_t client_count;
};

enum place_kind {
    PLACE_AUTO,    /* an idle CPU */
    PLACE_NUMBER,  /* the one of this number */
    PLACE_SIBLING, /* another hyperthread of the busiest client's core */
    PLACE_CORE,    /* another core of its socket */
    PLACE_SOCKET,  /* another socket */
};

struct place_request {
    enum place_kind kind;
    unsigned number; /* of PLACE_NUMBER */
};

enum place_reason {
    PLACE_MET,
    PLACE_ONE_CPU,     /* none is chosen: there are fewer than two */
    PLACE_NOT_ALLOWED, /* the number is of a CPU that the process may not run on, is offline, or is none */
    PLACE_NO_SIBLING,
    PLACE_NO_CORE,
    PLACE_NO_SOCKET,
};

struct place_choice {
    int cpu; /* -1: none */
    enum place_reason reason;
};

/*
 * The server's CPU. Where the request cannot be met, `reason` says why, and the CPU is that of PLACE_AUTO.
 *
 * Of the CPUs that the request admits, the first of these that tells two apart decides:
 *  1. not the busiest client's own CPU, if there is another;
 *  2. how idle it is, in quarters; on a client's core, at most the second lowest;
 *  3. not of a client's core, or else at least not a client's CPU;
 *  4. nearer to the busiest client: the same last-level cache, else the same socket;
 *  5. how idle the busiest other hyperthread of its core is, in quarters;
 *  6. the seed, which spreads over those that are left: processes that start at the same time see the same
 *     machine, and must not all choose the same CPU. Any numbers do that differ from process to process; a
 *     process's number alone does not among containers, in each of which the first has number 1.
 *
 * Pure; takes time for each pair of allowed CPUs.
 */
struct place_choice place_choose(const struct place_view *view, struct place_request request, uint64_t seed);

/* ---- looking ---- */

/*
 * All zero is the valid initial state, in static memory: it is some 400 KiB, of which little is touched on a
 * machine of few CPUs. One thread at a time.
 */
struct place_survey {
    struct place_view view;
    struct cpu_times cpus[2];
    struct task_times tasks[2];
    unsigned looks;
};

/*
 * Brings the view up to date: sites, idle shares since the look before this one, and where the process's
 * threads ran since then; at the first look, since the machine's start and since each thread's. So two looks
 * a tenth of a second or more apart see what is going on.
 *
 * The caller sets view.allowed before (cpu_affinity), from a thread that is not bound to one CPU, as the
 * server soon is. server_thread is the thread that is no client, 0 if there is none yet. If none of the
 * threads is seen to run, `client_cpu` is the only client's CPU; CPUS_MOST if that is not known either.
 */
void place_look(struct place_survey *survey, const char *root, int server_thread, unsigned client_cpu);

#endif
