/* Server affinity in offload mode: the choice of a CPU by machine, clients, and option. */
#include "offload/affinity.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"

#define KEPT_ERRNO 1234 /* none of the system's */
#define SEEDS      500

static struct affinity_view view;

/* ---- machines ---- */

/* CPUs 0 to count - 1, all idle and allowed, no clients. Numbered as Linux does on most: first one
 * hyperthread of each core, socket by socket, then the other. */
static void make_machine(unsigned count, unsigned threads, unsigned sockets) {
    memset(&view, 0, sizeof view);
    unsigned cores = count / threads;
    for (unsigned cpu = 0; cpu < count; cpu++) {
        unsigned core = cpu % cores;
        unsigned socket = core / (cores / sockets);
        cpu_set_add(&view.allowed, cpu);
        view.sites[cpu] = (struct cpu_site){core, socket * (cores / sockets), socket};
        view.idle_percent[cpu] = 100;
    }
    for (unsigned cpu = count; cpu < MAX_CPUS; cpu++) {
        /* Not to be read. */
        view.sites[cpu] = (struct cpu_site){0, 0, 0};
        view.idle_percent[cpu] = 100;
    }
}

static void add_client(unsigned cpu) {
    CHECK(view.client_count < MAX_AFFINITY_CLIENTS);
    view.clients[view.client_count++] = cpu;
}

static void disallow(unsigned cpu) {
    view.allowed.words[cpu / 64] &= ~((uint64_t)1 << cpu % 64);
}

static struct affinity_choice choose(enum affinity_kind kind, uint64_t seed) {
    errno = KEPT_ERRNO;
    struct affinity_choice choice = affinity_choose(&view, (struct affinity_request){.kind = kind}, seed);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return choice;
}

/* Whatever the seed: one of these, each of them for some seed, and the request met or not. */
static void check_among(enum affinity_kind kind, bool met, const unsigned *cpus, size_t count) {
    unsigned chosen[MAX_CPUS] = {0};
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        struct affinity_choice choice = choose(kind, seed * 7919);
        CHECK_EQUAL(choice.met, met);
        CHECK(choice.cpu >= 0 && cpu_set_has(&view.allowed, (unsigned)choice.cpu));
        chosen[choice.cpu]++;
    }
    unsigned all = 0;
    for (size_t i = 0; i < count; i++) {
        CHECK(chosen[cpus[i]] > 0);
        all += chosen[cpus[i]];
    }
    CHECK_EQUAL(all, SEEDS);
}

#define CHECK_AMONG(kind, met, ...)                         \
    check_among(kind, met, (const unsigned[]){__VA_ARGS__}, \
                sizeof((const unsigned[]){__VA_ARGS__}) / sizeof(unsigned))

/* ---- whether at all ---- */

static void test_declining(void) {
    static struct cpu_set allowed;
    CHECK(strstr(affinity_obstacle(&allowed, INFINITY), "there is but one") != NULL);
    cpu_set_add(&allowed, 77);
    CHECK(strstr(affinity_obstacle(&allowed, INFINITY), "there is but one") != NULL);
    CHECK(strstr(affinity_obstacle(&allowed, 1), "there is but one") != NULL);
    cpu_set_add(&allowed, 5000);
    CHECK(affinity_obstacle(&allowed, INFINITY) == NULL);
    CHECK(affinity_obstacle(&allowed, 2) == NULL);
    CHECK(affinity_obstacle(&allowed, 64) == NULL);
    CHECK(strstr(affinity_obstacle(&allowed, 1.99), "control group") != NULL);
    CHECK(strstr(affinity_obstacle(&allowed, 0.01), "control group") != NULL);
}

static void test_one_cpu(void) {
    static const enum affinity_kind kinds[] = {AFFINITY_AUTO, AFFINITY_NUMBER, AFFINITY_SIBLING,
                                               AFFINITY_CORE, AFFINITY_SOCKET};
    for (unsigned cpus = 0; cpus < 2; cpus++) {
        make_machine(cpus, 1, 1);
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
            struct affinity_choice choice = choose(kinds[i], 1);
            CHECK(!choice.met);
            CHECK(choice.cpu == -1);
        }
    }
    /* One of a large machine: its own, whatever lies beside it. */
    make_machine(16, 2, 2);
    memset(&view.allowed, 0, sizeof view.allowed);
    cpu_set_add(&view.allowed, 3);
    add_client(0);
    CHECK_EQUAL(choose(AFFINITY_AUTO, 1).cpu, -1);
}

/* ---- an idle CPU ---- */

static void test_two_cpus(void) {
    make_machine(2, 1, 1);
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1);
    add_client(1);
    CHECK_AMONG(AFFINITY_AUTO, true, 0);
    /* Not on top of the busiest client, however busy the other is. */
    view.idle_percent[0] = 0;
    CHECK_AMONG(AFFINITY_AUTO, true, 0);
    add_client(0);
    CHECK_AMONG(AFFINITY_AUTO, true, 0);
}

/* Processes that start at once see the same machine. Each has the number behind the last one's threads. */
static void test_spreading(void) {
    unsigned total[4] = {0};
    unsigned rounds = 0;
    unsigned distinct = 0;
    make_machine(4, 1, 1);
    for (uint64_t first = 1; first < 4194304; first = first * 5 / 2) {
        for (uint64_t gap = 1; gap <= 64; gap++, rounds++) {
            unsigned chosen[4] = {0};
            for (uint64_t process = 0; process < 8; process++) {
                int cpu = choose(AFFINITY_AUTO, first + gap * process).cpu;
                CHECK(cpu >= 0 && cpu < 4);
                chosen[cpu]++;
                total[cpu]++;
            }
            for (unsigned cpu = 0; cpu < 4; cpu++) {
                CHECK(chosen[cpu] < 8);
                distinct += chosen[cpu] > 0;
            }
        }
    }
    /* As if by chance: a quarter each, and of eight on four CPUs, 3.6 of them. */
    for (unsigned cpu = 0; cpu < 4; cpu++) {
        CHECK(total[cpu] > 2 * rounds * 9 / 10 && total[cpu] < 2 * rounds * 11 / 10);
    }
    CHECK(distinct > rounds * 7 / 2);
    /* The same answer to the same question, of seeds of any size. */
    for (uint64_t seed = 1; seed != 0; seed <<= 1) {
        struct affinity_choice choice = choose(AFFINITY_AUTO, seed);
        CHECK(choice.cpu >= 0 && choice.cpu < 4);
        CHECK(choose(AFFINITY_AUTO, seed).cpu == choice.cpu);
    }
    CHECK(choose(AFFINITY_AUTO, UINT64_MAX).cpu < 4);
}

/* Small differences are noise; large ones are not. */
static void test_idle_shares(void) {
    make_machine(4, 1, 1);
    view.idle_percent[0] = 76;
    view.idle_percent[1] = 88;
    view.idle_percent[2] = 99;
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1, 2, 3);
    view.idle_percent[1] = 60;
    view.idle_percent[3] = 10;
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 2);
    view.idle_percent[0] = 74;
    view.idle_percent[2] = 49;
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1);
    view.idle_percent[0] = 0;
    view.idle_percent[1] = 24;
    CHECK_AMONG(AFFINITY_AUTO, true, 2);
    view.idle_percent[2] = 24;
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1, 2, 3);
    /* What is not known is better than what is busy, and worse than what is idle. */
    view.idle_percent[3] = CPU_IDLE_UNKNOWN;
    CHECK_AMONG(AFFINITY_AUTO, true, 3);
    view.idle_percent[0] = 80;
    CHECK_AMONG(AFFINITY_AUTO, true, 0);
    memset(view.idle_percent, CPU_IDLE_UNKNOWN, 4);
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1, 2, 3);
    disallow(0);
    disallow(2);
    CHECK_AMONG(AFFINITY_AUTO, true, 1, 3);
}

/* Whichever CPUs are busy and wherever the clients run: the rules, stated in another way. */
static void test_siblings_are_left_alone(void) {
    uint32_t random = 1;
    for (unsigned round = 0; round < 2000; round++) {
        make_machine(8, 2, 1);
        for (unsigned cpu = 0; cpu < 8; cpu++) {
            random = random * 1664525 + 1013904223;
            view.idle_percent[cpu] = random >> 30 == 0 ? 100 : (uint8_t)((random >> 16) % 101);
            if (random >> 8 & 1) {
                disallow(cpu);
            }
        }
        for (unsigned i = 0; i <= round % 3; i++) {
            random = random * 1664525 + 1013904223;
            add_client(random >> 29);
        }
        bool another_is_free = false;
        for (unsigned cpu = 0; cpu < 8; cpu++) {
            bool apart = true;
            for (size_t i = 0; i < view.client_count; i++) {
                apart = apart && cpu % 4 != view.clients[i] % 4;
            }
            another_is_free |= apart && cpu_set_has(&view.allowed, cpu) && view.idle_percent[cpu] >= 25;
        }
        struct affinity_choice choice = choose(AFFINITY_AUTO, round);
        if (cpu_set_count(&view.allowed) < 2) {
            CHECK_EQUAL(choice.cpu, -1);
            continue;
        }
        CHECK(choice.met);
        CHECK(cpu_set_has(&view.allowed, (unsigned)choice.cpu));
        CHECK((unsigned)choice.cpu != view.clients[0]);
        for (size_t i = 0; i < view.client_count && another_is_free; i++) {
            CHECK((unsigned)choice.cpu % 4 != view.clients[i] % 4);
        }
    }
}

static void test_hyperthreads(void) {
    make_machine(8, 2, 1);
    add_client(1);
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 2, 3, 4, 6, 7);
    /* A whole idle core before half of one that works for others. */
    view.idle_percent[0] = 0;
    view.idle_percent[6] = 40;
    CHECK_AMONG(AFFINITY_AUTO, true, 3, 7);
    view.idle_percent[3] = view.idle_percent[7] = 10;
    CHECK_AMONG(AFFINITY_AUTO, true, 2);
    /* A busy CPU elsewhere is worse than the client's sibling; and that is worse than one a quarter idle. */
    view.idle_percent[2] = view.idle_percent[4] = view.idle_percent[6] = 0;
    CHECK_AMONG(AFFINITY_AUTO, true, 5);
    view.idle_percent[4] = 25;
    CHECK_AMONG(AFFINITY_AUTO, true, 4);
    /* Clients everywhere: beside the busiest rather than on top of any that is as busy. */
    make_machine(4, 2, 1);
    add_client(0);
    add_client(1);
    CHECK_AMONG(AFFINITY_AUTO, true, 2, 3);
    view.idle_percent[2] = 20;
    CHECK_AMONG(AFFINITY_AUTO, true, 3);
    view.idle_percent[3] = 20;
    view.idle_percent[1] = 20;
    CHECK_AMONG(AFFINITY_AUTO, true, 2); /* beside the busiest, which is idler than the other, of late */
}

static void test_nearness(void) {
    make_machine(16, 1, 2);
    for (unsigned cpu = 0; cpu < 16; cpu++) {
        view.sites[cpu].cache = cpu / 4 * 4;
    }
    add_client(9);
    CHECK_AMONG(AFFINITY_AUTO, true, 8, 10, 11);
    view.idle_percent[8] = view.idle_percent[10] = view.idle_percent[11] = 60;
    CHECK_AMONG(AFFINITY_AUTO, true, 12, 13, 14, 15);
    memset(view.idle_percent + 12, 30, 4);
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1, 2, 3, 4, 5, 6, 7);
    view.idle_percent[10] = 80;
    CHECK_AMONG(AFFINITY_AUTO, true, 10);
}

/* ---- what was asked for ---- */

static void check_number(unsigned number, bool met) {
    struct affinity_choice choice =
        affinity_choose(&view, (struct affinity_request){.kind = AFFINITY_NUMBER, .number = number}, 3);
    CHECK_EQUAL(choice.met, met);
    CHECK_EQUAL(choice.cpu, met ? (int)number : choose(AFFINITY_AUTO, 3).cpu);
}

static void test_number(void) {
    make_machine(8, 2, 1);
    add_client(2);
    disallow(5);
    for (unsigned cpu = 0; cpu < 8; cpu++) {
        view.idle_percent[cpu] = (uint8_t)(cpu * 10);
        check_number(cpu, cpu != 5); /* also the client's own */
    }
    check_number(8, false);
    check_number(MAX_CPUS, false);
    check_number(UINT32_MAX, false);
    cpu_set_add(&view.allowed, MAX_CPUS - 1);
    check_number(MAX_CPUS - 1, true);
}

static void test_sibling(void) {
    make_machine(8, 2, 1);
    add_client(6);
    add_client(1);
    view.idle_percent[2] = 0;
    CHECK_AMONG(AFFINITY_SIBLING, true, 2);
    disallow(2);
    CHECK_AMONG(AFFINITY_SIBLING, false, 0, 3, 4, 7);
    /* Four of a core: the idle ones. */
    make_machine(8, 4, 1);
    add_client(1);
    CHECK_AMONG(AFFINITY_SIBLING, true, 3, 5, 7);
    view.idle_percent[5] = 10;
    CHECK_AMONG(AFFINITY_SIBLING, true, 3, 7);
    add_client(7);
    CHECK_AMONG(AFFINITY_SIBLING, true, 3);
    make_machine(4, 1, 1);
    add_client(0);
    CHECK_AMONG(AFFINITY_SIBLING, false, 1, 2, 3);
    view.client_count = 0;
    CHECK_AMONG(AFFINITY_SIBLING, false, 0, 1, 2, 3);
}

static void test_core(void) {
    make_machine(16, 2, 2);
    add_client(12);
    CHECK_AMONG(AFFINITY_CORE, true, 5, 6, 7, 13, 14, 15);
    memset(view.idle_percent, 0, 16);
    view.idle_percent[0] = view.idle_percent[4] = 100;
    view.idle_percent[14] = 30;
    CHECK_AMONG(AFFINITY_CORE, true, 14);
    /* Where there is but one core. */
    make_machine(2, 2, 1);
    add_client(1);
    CHECK_AMONG(AFFINITY_CORE, false, 0);
    /* None left of the socket. */
    make_machine(8, 1, 2);
    add_client(0);
    disallow(1);
    disallow(2);
    disallow(3);
    CHECK_AMONG(AFFINITY_CORE, false, 4, 5, 6, 7);
    view.client_count = 0;
    CHECK(!choose(AFFINITY_CORE, 0).met);
}

static void test_socket(void) {
    make_machine(16, 2, 2);
    add_client(12);
    CHECK_AMONG(AFFINITY_SOCKET, true, 0, 1, 2, 3, 8, 9, 10, 11);
    memset(view.idle_percent, 0, 4);
    CHECK_AMONG(AFFINITY_SOCKET, true, 8, 9, 10, 11);
    /* Clients of that socket, too. */
    add_client(9);
    CHECK_AMONG(AFFINITY_SOCKET, true, 8, 10, 11);
    make_machine(16, 2, 1);
    add_client(12);
    for (unsigned cpu = 6; cpu < 16; cpu++) {
        view.idle_percent[cpu] = 50;
    }
    CHECK_AMONG(AFFINITY_SOCKET, false, 0, 1, 2, 3, 5);
    view.client_count = 0;
    CHECK(!choose(AFFINITY_SOCKET, 0).met);
}

/* A client that may run where the server may not. */
static void test_client_elsewhere(void) {
    make_machine(16, 2, 2);
    add_client(2);
    disallow(2);
    CHECK_AMONG(AFFINITY_SIBLING, true, 10);
    CHECK_AMONG(AFFINITY_AUTO, true, 0, 1, 3, 8, 9, 11);
}

static void test_largest_machine(void) {
    make_machine(MAX_CPUS, 2, 4);
    /* A part of it: the choice takes time for each pair. */
    memset(&view.allowed, 0, sizeof view.allowed);
    for (unsigned cpu = MAX_CPUS - 64; cpu < MAX_CPUS; cpu++) {
        cpu_set_add(&view.allowed, cpu);
    }
    add_client(MAX_CPUS - 1);
    view.idle_percent[MAX_CPUS - 2] = 3;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        int cpu = choose(AFFINITY_AUTO, seed).cpu;
        CHECK(cpu >= MAX_CPUS - 64 && cpu < MAX_CPUS - 2);
    }
}

/* ---- looking ---- */

static char root[] = "/tmp/calm-test-place-XXXXXX";

static const char *const folders[] = {
    "/proc",
    "/proc/self",
    "/proc/self/task",
    "/proc/self/task/50",
    "/proc/self/task/51",
    "/sys",
    "/sys/devices",
    "/sys/devices/system",
    "/sys/devices/system/cpu",
    "/sys/devices/system/cpu/cpu0",
    "/sys/devices/system/cpu/cpu0/topology",
    "/sys/devices/system/cpu/cpu1",
    "/sys/devices/system/cpu/cpu1/topology",
    "/sys/devices/system/cpu/cpu2",
    "/sys/devices/system/cpu/cpu2/topology",
};

static const struct {
    const char *name;
    const char *text;
} files[] = {
    {"/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n"},
    {"/sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1\n"},
    {"/sys/devices/system/cpu/cpu1/topology/physical_package_id", "1\n"},
    {"/sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "0,2\n"},
};

static const char *const looks[] = {"/proc/stat", "/proc/self/task/50/stat", "/proc/self/task/51/stat"};

static const char *in_root(const char *name) {
    static char path[160];
    snprintf(path, sizeof path, "%s%s", root, name);
    return path;
}

static void put(const char *name, const char *text) {
    FILE *file = fopen(in_root(name), "we");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void put_thread(const char *name, unsigned ticks, unsigned cpu) {
    char text[256];
    snprintf(text, sizeof text,
             "5 (t) S 1 2 3 4 5 6 7 8 9 0 %u 0 0 0 20 0 1 0 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 17 %u 0\n", ticks,
             cpu);
    put(name, text);
}

static void look_again(int server_thread) {
    static struct affinity_survey survey;
    survey.view.allowed = view.allowed;
    errno = KEPT_ERRNO;
    affinity_update(&survey, root, server_thread);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    view = survey.view;
}

static void test_looking(void) {
    CHECK(mkdtemp(root) != NULL);
    memset(&view, 0, sizeof view);
    cpu_set_add(&view.allowed, 0);
    cpu_set_add(&view.allowed, 1);

    /* A machine that says nothing. */
    look_again(0);
    CHECK_EQUAL(view.client_count, 0);
    CHECK_EQUAL(view.idle_percent[0], CPU_IDLE_UNKNOWN);

    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        CHECK(mkdir(in_root(folders[i]), 0700) == 0);
    }
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        put(files[i].name, files[i].text);
    }
    put("/proc/stat", "cpu0 100 0 0 900\ncpu1 800 0 0 200\ncpu2 0 0 0 1000\n");
    put_thread("/proc/self/task/50/stat", 100, 0);
    put_thread("/proc/self/task/51/stat", 500, 1);
    look_again(0);
    CHECK_EQUAL(view.idle_percent[0], 90);
    CHECK_EQUAL(view.idle_percent[1], 20);
    CHECK_EQUAL(view.client_count, 1); /* a fifth of the busiest is too little */
    CHECK_EQUAL(view.clients[0], 1);
    CHECK_EQUAL(view.sites[0].core, 0);
    CHECK_EQUAL(view.sites[1].socket, 1);
    CHECK_EQUAL(choose(AFFINITY_AUTO, 5).cpu, 0);

    /* What has happened since. The server is no client; a client's CPU is looked at, allowed or not. */
    put("/proc/stat", "cpu0 200 0 0 900\ncpu1 800 0 0 300\ncpu2 50 0 0 1050\n");
    put_thread("/proc/self/task/50/stat", 150, 2);
    put_thread("/proc/self/task/51/stat", 900, 1);
    look_again(51);
    CHECK_EQUAL(view.idle_percent[0], 0);
    CHECK_EQUAL(view.idle_percent[1], 100);
    CHECK_EQUAL(view.idle_percent[2], 50);
    CHECK_EQUAL(view.client_count, 1);
    CHECK_EQUAL(view.clients[0], 2);
    CHECK_EQUAL(view.sites[2].core, 0);
    CHECK_EQUAL(choose(AFFINITY_AUTO, 5).cpu, 1);
    CHECK_EQUAL(choose(AFFINITY_SIBLING, 5).cpu, 0);
    CHECK_EQUAL(choose(AFFINITY_SOCKET, 5).cpu, 1);
    CHECK(!choose(AFFINITY_CORE, 5).met);

    for (size_t i = 0; i < sizeof looks / sizeof looks[0]; i++) {
        CHECK(unlink(in_root(looks[i])) == 0);
    }
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        CHECK(unlink(in_root(files[i].name)) == 0);
    }
    for (size_t i = sizeof folders / sizeof folders[0]; i-- > 0;) {
        CHECK(rmdir(in_root(folders[i])) == 0);
    }
    CHECK(rmdir(root) == 0);
}

/* Whatever this machine is: a CPU that the process may be pinned to. */
static void test_this_machine(void) {
    static struct affinity_survey survey;
    CHECK(cpu_affinity(0, &survey.view.allowed));
    for (int looked = 0; looked < 3; looked++) {
        affinity_update(&survey, TOPOLOGY_MACHINE, 0);
        if (survey.view.client_count == 0) { /* no thread has run for so long that the kernel tells */
            survey.view.clients[survey.view.client_count++] = (unsigned)sched_getcpu();
        }
        struct affinity_choice choice = affinity_choose(
            &survey.view, (struct affinity_request){.kind = AFFINITY_AUTO}, (uint64_t)getpid());
        if (cpu_set_count(&survey.view.allowed) < 2) {
            CHECK(choice.cpu == -1 && !choice.met);
        } else {
            CHECK(choice.met);
            CHECK(survey.view.client_count > 0 && (unsigned)choice.cpu != survey.view.clients[0]);
            CHECK(cpu_pin((unsigned)choice.cpu));
            CHECK_EQUAL((unsigned)sched_getcpu(), choice.cpu);
        }
    }
}

int main(void) {
    test_declining();
    test_one_cpu();
    test_two_cpus();
    test_spreading();
    test_idle_shares();
    test_siblings_are_left_alone();
    test_hyperthreads();
    test_nearness();
    test_number();
    test_sibling();
    test_core();
    test_socket();
    test_client_elsewhere();
    test_largest_machine();
    test_looking();
    in_child(test_this_machine);
    return 0;
}
