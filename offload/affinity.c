#include "offload/affinity.h"

#include "base/size.h"
#include "os/random.h"

/* Idle shares are compared in quarters: in finer steps, noise would send every
 * process to the same CPU. */
#define IDLE_QUARTERS 4

/* On a client's core, where the client may have begun only now. */
#define MAX_QUARTER_AT_CLIENT 1

const char *affinity_obstacle(const struct cpu_set *allowed, double quota_cpus) {
    if (cpu_set_count(allowed) < 2) { /* server and clients would wait for each other's time slices */
        return "offload needs a CPU of its own, and there is but one: running without it";
    }
    /* Polling would use up the clients' time. */
    return quota_cpus < 2 ? "offload needs a CPU of its own, and the control group may use less than two: "
                            "running without it"
                          : NULL;
}

/* ---- the order of candidates ---- */

/* 0, the busiest quarter, to 3. */
static unsigned idle_quarter(const struct affinity_view *view, unsigned cpu) {
    unsigned percent = view->idle_percent[cpu];
    percent = percent == CPU_IDLE_UNKNOWN ? 50 : percent;
    return percent >= 100 ? IDLE_QUARTERS - 1 : percent * IDLE_QUARTERS / 100;
}

/* What two CPUs share: the first of these that holds. */
enum nearness { SAME_CPU, SAME_CORE, SAME_CACHE, SAME_SOCKET, OTHER_SOCKET };

static enum nearness nearness(const struct affinity_view *view, unsigned cpu, unsigned other) {
    const struct cpu_site *site = &view->sites[cpu];
    const struct cpu_site *other_site = &view->sites[other];
    return cpu == other                         ? SAME_CPU
           : site->core == other_site->core     ? SAME_CORE
           : site->cache == other_site->cache   ? SAME_CACHE
           : site->socket == other_site->socket ? SAME_SOCKET
                                                : OTHER_SOCKET;
}

/* To the busiest client. */
static enum nearness nearness_to_client(const struct affinity_view *view, unsigned cpu) {
    return view->client_count == 0 ? OTHER_SOCKET : nearness(view, cpu, view->clients[0]);
}

static unsigned min_idle_quarter_of_core(const struct affinity_view *view, unsigned cpu) {
    unsigned min = IDLE_QUARTERS - 1;
    for (unsigned other = 0; (other = cpu_set_next(&view->allowed, other)) < MAX_CPUS; other++) {
        if (nearness(view, cpu, other) == SAME_CORE) {
            min = (unsigned)size_min(min, idle_quarter(view, other));
        }
    }
    return min;
}

/* The higher, the better. Its digits are rules 1 to 5 of affinity_choose, the
 * first the highest. */
static unsigned rank(const struct affinity_view *view, unsigned cpu) {
    unsigned apart = SAME_CACHE; /* or farther from all clients */
    for (size_t i = 0; i < view->client_count; i++) {
        apart = (unsigned)size_min(apart, nearness(view, cpu, view->clients[i]));
    }
    unsigned idle = idle_quarter(view, cpu);
    idle = apart < SAME_CACHE ? (unsigned)size_min(idle, MAX_QUARTER_AT_CLIENT) : idle;
    enum nearness client = nearness_to_client(view, cpu);
    unsigned near = OTHER_SOCKET - (unsigned)size_max(client, SAME_CACHE);
    unsigned rules_1_to_3 = (client != SAME_CPU) << 4 | idle << 2 | apart;
    return rules_1_to_3 << 4 | near << 2 | min_idle_quarter_of_core(view, cpu);
}

/* ---- the choice ---- */

static bool admits(const struct affinity_view *view, enum affinity_kind kind, unsigned cpu) {
    enum nearness client = nearness_to_client(view, cpu);
    bool meets = kind == AFFINITY_SIBLING ? client == SAME_CORE
                 : kind == AFFINITY_CORE  ? client == SAME_CACHE || client == SAME_SOCKET
                                          : client == OTHER_SOCKET;
    return kind == AFFINITY_AUTO || (view->client_count > 0 && meets);
}

/* The best of the CPUs that meet the request; -1 if there is none. */
static int best(const struct affinity_view *view, enum affinity_kind kind, uint64_t seed) {
    int found = -1;
    uint64_t highest = 0;
    for (unsigned cpu = 0; (cpu = cpu_set_next(&view->allowed, cpu)) < MAX_CPUS; cpu++) {
        uint64_t this = (uint64_t)rank(view, cpu) << 32 | random_mix(random_mix(seed) + cpu) >> 32;
        if (admits(view, kind, cpu) && (found < 0 || this > highest)) {
            found = (int)cpu;
            highest = this;
        }
    }
    return found;
}

struct affinity_choice affinity_choose(const struct affinity_view *view, struct affinity_request request,
                                       uint64_t seed) {
    if (cpu_set_count(&view->allowed) < 2) {
        return (struct affinity_choice){-1, false};
    }
    int cpu = request.kind != AFFINITY_NUMBER               ? best(view, request.kind, seed)
              : cpu_set_has(&view->allowed, request.number) ? (int)request.number
                                                            : -1;
    return cpu >= 0 ? (struct affinity_choice){cpu, true}
                    : (struct affinity_choice){best(view, AFFINITY_AUTO, seed), false};
}

/* ---- the view of this machine ---- */

static void update_cpu(struct affinity_survey *survey, const char *root, unsigned cpu) {
    survey->view.sites[cpu] = topology_site(root, cpu);
    const struct cpu_times *after = &survey->cpus[survey->updates % 2];
    const struct cpu_times *before = &survey->cpus[(survey->updates + 1) % 2];
    survey->view.idle_percent[cpu] = (uint8_t)cpu_times_idle_percent(before, after, cpu);
}

void affinity_update(struct affinity_survey *survey, const char *root, int server_thread) {
    struct affinity_view *view = &survey->view;
    survey->updates++;
    struct task_times *tasks = &survey->tasks[survey->updates % 2];
    const struct task_times *tasks_before = &survey->tasks[(survey->updates + 1) % 2];
    cpu_times_sample(root, &survey->cpus[survey->updates % 2]);
    task_times_sample(root, server_thread, tasks);
    view->client_count = task_times_busiest_cpus(tasks_before, tasks, view->clients, MAX_AFFINITY_CLIENTS);
    for (unsigned cpu = 0; (cpu = cpu_set_next(&view->allowed, cpu)) < MAX_CPUS; cpu++) {
        update_cpu(survey, root, cpu);
    }
    for (size_t i = 0; i < view->client_count; i++) {
        update_cpu(survey, root, view->clients[i]);
    }
}
