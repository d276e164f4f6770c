#include "offload/place.h"

/* Shares of idle time are compared in quarters: finer, and noise would send every process to the same CPU. */
#define IDLE_QUARTERS 4

/* The most that counts as idle where a client runs: it may have begun only now. */
#define QUARTER_AT_CLIENT 1

enum place_decline place_should_decline(const struct cpu_set *allowed, double quota_cpus) {
    if (cpu_set_count(allowed) < 2) {
        return PLACE_DECLINE_ONE_CPU;
    }
    return quota_cpus < 2 ? PLACE_DECLINE_QUOTA : PLACE_NO_DECLINE;
}

/* ---- the order of candidates ---- */

/* 0, the busiest quarter, to 3. */
static unsigned idle_quarter(const struct place_view *view, unsigned cpu) {
    unsigned percent = view->idle_percent[cpu];
    percent = percent == CPU_IDLE_UNKNOWN ? 50 : percent;
    return percent >= 100 ? IDLE_QUARTERS - 1 : percent * IDLE_QUARTERS / 100;
}

/* 2: on a core without clients; 1: on a hyperthread beside a client's; 0: where a client runs. */
static unsigned apartness(const struct place_view *view, unsigned cpu) {
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

/* 2: one cache; 1: one socket. */
static unsigned nearness(const struct place_view *view, unsigned cpu) {
    if (view->client_count == 0) {
        return 0;
    }
    const struct cpu_site *client = &view->sites[view->clients[0]];
    const struct cpu_site *site = &view->sites[cpu];
    return site->cache == client->cache ? 2 : site->socket == client->socket ? 1 : 0;
}

static unsigned least_idle_quarter_of_core(const struct place_view *view, unsigned cpu) {
    unsigned least = IDLE_QUARTERS - 1;
    for (unsigned other = cpu_set_next(&view->allowed, 0); other < CPUS_MOST;
         other = cpu_set_next(&view->allowed, other + 1)) {
        if (other != cpu && view->sites[other].core == view->sites[cpu].core) {
            unsigned quarter = idle_quarter(view, other);
            least = quarter < least ? quarter : least;
        }
    }
    return least;
}

/* Higher is better; equal is as good. Its digits are the rules of place_choose, the first the highest. */
static unsigned rank(const struct place_view *view, unsigned cpu) {
    bool is_busiest = view->client_count > 0 && view->clients[0] == cpu;
    unsigned idle = idle_quarter(view, cpu);
    unsigned apart = apartness(view, cpu);
    idle = apart < 2 && idle > QUARTER_AT_CLIENT ? QUARTER_AT_CLIENT : idle;
    unsigned digits = is_busiest ? 0 : 1;
    digits = digits << 2 | idle;
    digits = digits << 2 | apart;
    digits = digits << 2 | nearness(view, cpu);
    return digits << 2 | least_idle_quarter_of_core(view, cpu);
}

/* ---- the choice ---- */

static bool admits(const struct place_view *view, enum place_kind kind, unsigned cpu) {
    if (kind == PLACE_AUTO) {
        return true;
    }
    if (view->client_count == 0) {
        return false;
    }
    unsigned client = view->clients[0];
    bool same_core = view->sites[cpu].core == view->sites[client].core;
    bool same_socket = view->sites[cpu].socket == view->sites[client].socket;
    switch (kind) {
    case PLACE_SIBLING:
        return same_core && cpu != client;
    case PLACE_CORE:
        return !same_core && same_socket;
    default:
        return !same_socket;
    }
}

/* Every bit of the result depends on all of the number's: those of processes that start one after the other
 * lie at regular distances, as many apart as each has threads (Appleby's finalizer, of MurmurHash3). */
static uint64_t mix(uint64_t number) {
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCDU;
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53U;
    return number ^ number >> 33;
}

/* The best of those that the kind of place admits; -1 if it admits none. */
static int best(const struct place_view *view, enum place_kind kind, uint64_t seed) {
    unsigned highest = 0;
    unsigned equal = 0;
    for (unsigned cpu = cpu_set_next(&view->allowed, 0); cpu < CPUS_MOST;
         cpu = cpu_set_next(&view->allowed, cpu + 1)) {
        if (admits(view, kind, cpu)) {
            unsigned this = rank(view, cpu);
            equal = this > highest ? 1 : equal + (this == highest);
            highest = this > highest ? this : highest;
        }
    }
    unsigned skip = (unsigned)((mix(seed) >> 32) * equal >> 32);
    for (unsigned cpu = cpu_set_next(&view->allowed, 0); cpu < CPUS_MOST;
         cpu = cpu_set_next(&view->allowed, cpu + 1)) {
        if (admits(view, kind, cpu) && rank(view, cpu) == highest && skip-- == 0) {
            return (int)cpu;
        }
    }
    return -1;
}

static enum place_reason reason_of(enum place_kind kind) {
    switch (kind) {
    case PLACE_SIBLING:
        return PLACE_NO_SIBLING;
    case PLACE_CORE:
        return PLACE_NO_CORE;
    default:
        return PLACE_NO_SOCKET;
    }
}

struct place_choice place_choose(const struct place_view *view, struct place_request request, uint64_t seed) {
    if (cpu_set_count(&view->allowed) < 2) {
        return (struct place_choice){-1, PLACE_ONE_CPU};
    }
    if (request.kind == PLACE_NUMBER) {
        if (cpu_set_has(&view->allowed, request.number)) {
            return (struct place_choice){(int)request.number, PLACE_MET};
        }
        return (struct place_choice){best(view, PLACE_AUTO, seed), PLACE_NOT_ALLOWED};
    }
    int cpu = best(view, request.kind, seed);
    if (cpu < 0) {
        return (struct place_choice){best(view, PLACE_AUTO, seed), reason_of(request.kind)};
    }
    return (struct place_choice){cpu, PLACE_MET};
}

/* ---- looking ---- */

static void look_at_cpu(struct place_survey *survey, const char *root, unsigned cpu) {
    survey->view.sites[cpu] = topology_site(root, cpu);
    const struct cpu_times *after = &survey->cpus[survey->looks % 2];
    const struct cpu_times *before = &survey->cpus[(survey->looks + 1) % 2];
    survey->view.idle_percent[cpu] = (uint8_t)cpu_idle_percent(before, after, cpu);
}

void place_look(struct place_survey *survey, const char *root, int server_thread, unsigned client_cpu) {
    struct place_view *view = &survey->view;
    survey->looks++;
    struct task_times *tasks = &survey->tasks[survey->looks % 2];
    const struct task_times *tasks_before = &survey->tasks[(survey->looks + 1) % 2];
    cpu_times_look(root, &survey->cpus[survey->looks % 2]);
    task_times_look(root, server_thread, tasks);
    view->client_count = task_busiest_cpus(tasks_before, tasks, view->clients, PLACE_CLIENTS_MOST);
    if (view->client_count == 0 && client_cpu < CPUS_MOST) {
        view->clients[0] = client_cpu;
        view->client_count = 1;
    }
    for (unsigned cpu = cpu_set_next(&view->allowed, 0); cpu < CPUS_MOST;
         cpu = cpu_set_next(&view->allowed, cpu + 1)) {
        look_at_cpu(survey, root, cpu);
    }
    for (size_t i = 0; i < view->client_count; i++) {
        look_at_cpu(survey, root, view->clients[i]);
    }
}
