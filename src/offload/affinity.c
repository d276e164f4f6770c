#include "offload/affinity.h"

#include "base/size.h"

/* Idle shares are compared in quarters: in finer steps, noise would send every process to the same CPU. */
#define IDLE_QUARTERS 4

/* On a client's core, where the client may have begun only now. */
#define MAX_QUARTER_AT_CLIENT 1

enum affinity_decline affinity_should_decline(const struct cpu_set *allowed, double quota_cpus) {
    if (cpu_set_count(allowed) < 2) {
        return AFFINITY_DECLINE_ONE_CPU;
    }
    return quota_cpus < 2 ? AFFINITY_DECLINE_QUOTA : AFFINITY_NO_DECLINE;
}

/* ---- the order of candidates ---- */

/* 0, the busiest quarter, to 3. */
static unsigned idle_quarter(const struct affinity_view *view, unsigned cpu) {
    unsigned percent = view->idle_percent[cpu];
    percent = percent == CPU_IDLE_UNKNOWN ? 50 : percent;
    return percent >= 100 ? IDLE_QUARTERS - 1 : percent * IDLE_QUARTERS / 100;
}

/* 2: a core without clients; 1: a hyperthread beside a client's; 0: a client's CPU. */
static unsigned apartness(const struct affinity_view *view, unsigned cpu) {
    unsigned apart = 2;
    for (size_t i = 0; i < view->client_count; i++) {
        if (view->clients[i] == cpu) {
            return 0;
        }
        if (view->sites[view->clients[i]].core == view->sites[cpu].core) {
            apart = 1;
        }
    }
    return apart;
}

/* To the busiest client. 2: the same cache; 1: the same socket. */
static unsigned nearness(const struct affinity_view *view, unsigned cpu) {
    if (view->client_count == 0) {
        return 0;
    }
    const struct cpu_site *client = &view->sites[view->clients[0]];
    const struct cpu_site *site = &view->sites[cpu];
    return site->cache == client->cache ? 2 : site->socket == client->socket ? 1 : 0;
}

static unsigned min_idle_quarter_of_core(const struct affinity_view *view, unsigned cpu) {
    unsigned min = IDLE_QUARTERS - 1;
    for (unsigned other = 0; (other = cpu_set_next(&view->allowed, other)) < MAX_CPUS; other++) {
        if (other != cpu && view->sites[other].core == view->sites[cpu].core) {
            min = (unsigned)size_min(min, idle_quarter(view, other));
        }
    }
    return min;
}

/* The higher, the better. Its digits are rules 1 to 5 of affinity_choose, the first the highest. */
static unsigned rank(const struct affinity_view *view, unsigned cpu) {
    bool is_busiest = view->client_count > 0 && view->clients[0] == cpu;
    unsigned idle = idle_quarter(view, cpu);
    unsigned apart = apartness(view, cpu);
    idle = apart < 2 ? (unsigned)size_min(idle, MAX_QUARTER_AT_CLIENT) : idle;
    unsigned rules_1_to_3 = (is_busiest ? 0U : 1U) << 4 | idle << 2 | apart;
    return rules_1_to_3 << 4 | nearness(view, cpu) << 2 | min_idle_quarter_of_core(view, cpu);
}

/* ---- the choice ---- */

static bool admits(const struct affinity_view *view, enum affinity_kind kind, unsigned cpu) {
    if (kind == AFFINITY_AUTO) {
        return true;
    }
    if (view->client_count == 0) {
        return false;
    }
    unsigned client = view->clients[0];
    bool same_core = view->sites[cpu].core == view->sites[client].core;
    bool same_socket = view->sites[cpu].socket == view->sites[client].socket;
    return kind == AFFINITY_SIBLING ? same_core && cpu != client
           : kind == AFFINITY_CORE  ? !same_core && same_socket
                                    : !same_socket;
}

/* MurmurHash3's finalizer (Appleby): each bit of the result depends on all bits of the number. Process ids of
 * successive processes differ by a constant, the number of their threads. */
static uint64_t mix(uint64_t number) {
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCDU;
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53U;
    return number ^ number >> 33;
}

/* The best of the CPUs that meet the request; -1 if there is none. */
static int best(const struct affinity_view *view, enum affinity_kind kind, uint64_t seed) {
    unsigned highest = 0;
    unsigned equal = 0;
    for (unsigned cpu = 0; (cpu = cpu_set_next(&view->allowed, cpu)) < MAX_CPUS; cpu++) {
        if (admits(view, kind, cpu)) {
            unsigned this = rank(view, cpu);
            equal = this > highest ? 1 : equal + (this == highest);
            highest = this > highest ? this : highest;
        }
    }
    unsigned skip = (unsigned)((mix(seed) >> 32) * equal >> 32);
    for (unsigned cpu = 0; (cpu = cpu_set_next(&view->allowed, cpu)) < MAX_CPUS; cpu++) {
        if (admits(view, kind, cpu) && rank(view, cpu) == highest && skip-- == 0) {
            return (int)cpu;
        }
    }
    return -1;
}

struct affinity_choice affinity_choose(const struct affinity_view *view, struct affinity_request request,
                                       uint64_t seed) {
    if (cpu_set_count(&view->allowed) < 2) {
        return (struct affinity_choice){-1, AFFINITY_ONE_CPU};
    }
    static const enum affinity_reason unmet[] = {
        [AFFINITY_NUMBER] = AFFINITY_NOT_ALLOWED,
        [AFFINITY_SIBLING] = AFFINITY_NO_SIBLING,
        [AFFINITY_CORE] = AFFINITY_NO_CORE,
        [AFFINITY_SOCKET] = AFFINITY_NO_SOCKET,
    };
    int cpu = request.kind != AFFINITY_NUMBER               ? best(view, request.kind, seed)
              : cpu_set_has(&view->allowed, request.number) ? (int)request.number
                                                            : -1;
    return cpu >= 0 ? (struct affinity_choice){cpu, AFFINITY_MET}
                    : (struct affinity_choice){best(view, AFFINITY_AUTO, seed), unmet[request.kind]};
}

/* ---- the view of this machine ---- */

static void update_cpu(struct affinity_survey *survey, const char *root, unsigned cpu) {
    survey->view.sites[cpu] = topology_site(root, cpu);
    const struct cpu_times *after = &survey->cpus[survey->updates % 2];
    const struct cpu_times *before = &survey->cpus[(survey->updates + 1) % 2];
    survey->view.idle_percent[cpu] = (uint8_t)cpu_times_idle_percent(before, after, cpu);
}

void affinity_update(struct affinity_survey *survey, const char *root, int server_thread,
                     unsigned client_cpu) {
    struct affinity_view *view = &survey->view;
    survey->updates++;
    struct task_times *tasks = &survey->tasks[survey->updates % 2];
    const struct task_times *tasks_before = &survey->tasks[(survey->updates + 1) % 2];
    cpu_times_sample(root, &survey->cpus[survey->updates % 2]);
    task_times_sample(root, server_thread, tasks);
    view->client_count = task_times_busiest_cpus(tasks_before, tasks, view->clients, MAX_AFFINITY_CLIENTS);
    if (view->client_count == 0 && client_cpu < MAX_CPUS) {
        view->clients[0] = client_cpu;
        view->client_count = 1;
    }
    for (unsigned cpu = 0; (cpu = cpu_set_next(&view->allowed, cpu)) < MAX_CPUS; cpu++) {
        update_cpu(survey, root, cpu);
    }
    for (size_t i = 0; i < view->client_count; i++) {
        update_cpu(survey, root, view->clients[i]);
    }
}
