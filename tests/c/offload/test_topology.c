/* CPUs: read from this machine, and from machines simulated by files. */
#include "offload/topology.h"

#include "offload/cpu_times.h"
#include "os/syscall.h"
#include "os/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "machine_files.h"

/* The kernel's word: a bare thread has nothing that the C library could read it from. */
static unsigned current_cpu(void) {
    unsigned cpu;
    CHECK_EQUAL(os_syscall(SYS_getcpu, (long)&cpu, 0, 0, 0, 0, 0), 0);
    return cpu;
}

#define CPU "/sys/devices/system/cpu/cpu%u"

static void put_cpu(unsigned cpu, const char *siblings, const char *socket, const char *last_cache) {
    put(siblings, CPU "/topology/thread_siblings_list", cpu);
    put(socket, CPU "/topology/physical_package_id", cpu);
    /* Caches of its core alone, which do not count. */
    put(siblings, CPU "/cache/index0/shared_cpu_list", cpu);
    put(siblings, CPU "/cache/index2/shared_cpu_list", cpu);
    put(last_cache, CPU "/cache/index3/shared_cpu_list", cpu);
}

static void check_site(unsigned cpu, uint32_t core, uint32_t cache, uint32_t socket) {
    errno = KEPT_ERRNO;
    struct cpu_site site = topology_site(root, cpu);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK_EQUAL(site.core, core);
    CHECK_EQUAL(site.cache, cache);
    CHECK_EQUAL(site.socket, socket);
}

static int lowest_free_descriptor(void) {
    int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    close(descriptor);
    return descriptor;
}

/* ---- sets ---- */

static void test_sets(void) {
    static struct cpu_set set;
    CHECK_EQUAL(cpu_set_count(&set), 0);
    CHECK_EQUAL(cpu_set_next(&set, 0), MAX_CPUS);
    static const unsigned members[] = {0, 1, 63, 64, 127, 128, 1023, 1024, MAX_CPUS - 1};
    size_t count = sizeof members / sizeof members[0];
    for (size_t i = 0; i < count; i++) {
        CHECK(!cpu_set_has(&set, members[i]));
        cpu_set_add(&set, members[i]);
        CHECK(cpu_set_has(&set, members[i]));
        CHECK_EQUAL(cpu_set_count(&set), i + 1);
    }
    size_t next = 0;
    for (unsigned cpu = 0; cpu < MAX_CPUS; cpu++) {
        next += next < count && members[next] < cpu;
        CHECK_EQUAL(cpu_set_next(&set, cpu), members[next]);
        CHECK_EQUAL(cpu_set_has(&set, cpu), cpu == members[next]);
    }
    CHECK_EQUAL(cpu_set_next(&set, MAX_CPUS), MAX_CPUS);
    CHECK_EQUAL(cpu_set_next(&set, UINT32_MAX), MAX_CPUS);
    cpu_set_add(&set, MAX_CPUS);
    cpu_set_add(&set, UINT32_MAX);
    CHECK_EQUAL(cpu_set_count(&set), count);
    CHECK(!cpu_set_has(&set, MAX_CPUS) && !cpu_set_has(&set, UINT32_MAX));
    CHECK(cpus_possible() <= MAX_CPUS);
}

/* ---- threads ---- */

static void check_as_glibc(const struct cpu_set *set) {
    cpu_set_t expected;
    CHECK(sched_getaffinity(0, sizeof expected, &expected) == 0);
    for (unsigned cpu = 0; cpu < MAX_CPUS; cpu++) {
        CHECK_EQUAL(cpu_set_has(set, cpu), cpu < CPU_SETSIZE && CPU_ISSET(cpu, &expected));
    }
}

static void test_pinning(void) {
    static struct cpu_set all;
    static struct cpu_set now;
    errno = KEPT_ERRNO;
    CHECK(cpu_affinity(0, &all));
    check_as_glibc(&all);
    CHECK(cpu_affinity(getpid(), &now));
    CHECK(memcmp(&all, &now, sizeof all) == 0);
    CHECK(!cpu_pin(MAX_CPUS) && !cpu_pin(UINT32_MAX));
    if (cpus_possible() < MAX_CPUS) {
        CHECK(!cpu_pin(MAX_CPUS - 1));
    }
    CHECK(cpu_affinity(0, &now));
    CHECK(memcmp(&all, &now, sizeof all) == 0);
    for (unsigned cpu = cpu_set_next(&all, 0); cpu < MAX_CPUS; cpu = cpu_set_next(&all, cpu + 1)) {
        CHECK(cpu_pin(cpu));
        CHECK_EQUAL(current_cpu(), cpu);
        CHECK(cpu_affinity(0, &now));
        CHECK(cpu_set_count(&now) == 1 && cpu_set_has(&now, cpu));
        check_as_glibc(&now);
    }
    /* No thread has the highest number there can be. */
    CHECK(!cpu_affinity(INT32_MAX, &now));
    CHECK_EQUAL(cpu_set_count(&now), 0);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

/* ---- where CPUs lie ---- */

static void test_plain_machine(void) {
    put_cpu(0, "0\n", "0\n", "0-1\n");
    put_cpu(1, "1\n", "0\n", "0-1\n");
    check_site(0, 0, 0, 0);
    check_site(1, 1, 0, 0);
    struct cpu_set siblings;
    CHECK(topology_siblings(root, 1, &siblings));
    CHECK(cpu_set_count(&siblings) == 1 && cpu_set_has(&siblings, 1));
    clear_machine();
}

static void test_hyperthreads(void) {
    char list[16];
    for (unsigned cpu = 0; cpu < 8; cpu++) {
        snprintf(list, sizeof list, "%u,%u\n", cpu % 4, cpu % 4 + 4);
        put_cpu(cpu, list, "0\n", "0-7\n");
    }
    for (unsigned cpu = 0; cpu < 8; cpu++) {
        check_site(cpu, cpu % 4, 0, 0);
        struct cpu_set siblings;
        CHECK(topology_siblings(root, cpu, &siblings));
        CHECK(cpu_set_count(&siblings) == 2);
        CHECK(cpu_set_has(&siblings, cpu % 4) && cpu_set_has(&siblings, cpu % 4 + 4));
    }
    clear_machine();
}

/* Two sockets, each with two caches, numbered as some machines do. */
static void test_sockets(void) {
    static const char *caches[] = {"0-1,8-9\n", "2-3,10-11\n", "4-5,12-13\n", "6-7,14-15\n"};
    char list[16];
    for (unsigned cpu = 0; cpu < 16; cpu++) {
        snprintf(list, sizeof list, "%u,%u\n", cpu % 8, cpu % 8 + 8);
        put_cpu(cpu, list, cpu % 8 < 4 ? "0\n" : "36\n", caches[cpu % 8 / 2]);
    }
    for (unsigned cpu = 0; cpu < 16; cpu++) {
        check_site(cpu, cpu % 8, cpu % 8 / 2 * 2, cpu % 8 < 4 ? 0 : 36);
    }
    clear_machine();
}

static void check_siblings(const char *list, const unsigned *members, size_t count) {
    put(list, CPU "/topology/thread_siblings_list", 3U);
    struct cpu_set siblings;
    bool listed = topology_siblings(root, 3, &siblings);
    bool alone = count == 1 && members[0] == 3;
    CHECK(listed || alone);
    CHECK_EQUAL(cpu_set_count(&siblings), count);
    for (size_t i = 0; i < count; i++) {
        CHECK(cpu_set_has(&siblings, members[i]));
    }
}

#define CHECK_SIBLINGS(list, ...)                         \
    check_siblings(list, (const unsigned[]){__VA_ARGS__}, \
                   sizeof((const unsigned[]){__VA_ARGS__}) / sizeof(unsigned))

static void test_lists(void) {
    CHECK_SIBLINGS("0-3,8-11\n", 0, 1, 2, 3, 8, 9, 10, 11);
    CHECK_SIBLINGS("0-3,8-11", 0, 1, 2, 3, 8, 9, 10, 11);
    CHECK_SIBLINGS("3\n", 3);
    CHECK_SIBLINGS("3-3\n", 3);
    CHECK_SIBLINGS("0,3,64,200\n", 0, 3, 64, 200);
    CHECK_SIBLINGS("63-65\n", 3, 63, 64, 65); /* itself belongs to it, whatever is said */
    CHECK_SIBLINGS("", 3);
    CHECK_SIBLINGS("\n", 3);
    CHECK_SIBLINGS("nonsense\n", 3);
    CHECK_SIBLINGS("-1\n", 3);
    CHECK_SIBLINGS("7-4\n", 3);
    CHECK_SIBLINGS("1,\n", 1, 3);
    CHECK_SIBLINGS("1-\n", 3);
    CHECK_SIBLINGS("1 2\n", 1, 3);
    CHECK_SIBLINGS("8190-99999\n", 3, 8190, 8191);
    CHECK_SIBLINGS("9000\n", 3);
    CHECK_SIBLINGS("1,99999999999999999999999999-99999999999999999999999999\n", 1, 3);
    CHECK_SIBLINGS("8191-99999999999999999999999999\n", 3, 8191);

    /* Longer than any buffer. */
    static char every_other[1 << 15];
    size_t length = 0;
    for (unsigned cpu = 1; cpu < MAX_CPUS; cpu += 2) {
        length += (size_t)snprintf(every_other + length, sizeof every_other - length, "%u,", cpu);
    }
    CHECK(length < sizeof every_other - 1);
    every_other[length - 1] = '\n';
    put(every_other, CPU "/topology/thread_siblings_list", 3U);
    struct cpu_set siblings;
    CHECK(topology_siblings(root, 3, &siblings));
    CHECK_EQUAL(cpu_set_count(&siblings), MAX_CPUS / 2);
    for (unsigned cpu = 0; cpu < MAX_CPUS; cpu++) {
        CHECK_EQUAL(cpu_set_has(&siblings, cpu), cpu % 2);
    }
    clear_machine();
}

static void test_missing(void) {
    struct cpu_set siblings;
    int lowest = lowest_free_descriptor();
    /* Nothing at all; then a CPU that is offline, which has a folder but no topology. */
    check_site(5, 5, MAX_CPUS, 0);
    put("0\n", CPU "/online", 5U);
    check_site(5, 5, MAX_CPUS, 0);
    CHECK(!topology_siblings(root, 5, &siblings));
    CHECK(cpu_set_count(&siblings) == 1 && cpu_set_has(&siblings, 5));
    /* A virtual machine that knows of no packages, and of no caches beyond the core's. */
    put("4-5\n", CPU "/topology/thread_siblings_list", 5U);
    put("-1\n", CPU "/topology/physical_package_id", 5U);
    put("4-5\n", CPU "/cache/index1/shared_cpu_list", 5U);
    check_site(5, 4, 4, 0);
    put("1\n", CPU "/topology/physical_package_id", 6U);
    check_site(6, 6, MAX_CPUS + 1, 1);
    put("99999999999999999999\n", CPU "/topology/physical_package_id", 6U);
    check_site(6, 6, MAX_CPUS, 0);
    check_site(MAX_CPUS - 1, MAX_CPUS - 1, MAX_CPUS, 0);
    CHECK_EQUAL(lowest_free_descriptor(), lowest);

    /* A root too long to be looked below. */
    static char far[8000];
    memset(far, '/', sizeof far - 1);
    static struct cpu_times times;
    static struct task_times tasks;
    CHECK_EQUAL(topology_site(far, 1).core, 1);
    CHECK(!topology_siblings(far, 1, &siblings));
    CHECK(!cpu_times_sample(far, &times) && !task_times_sample(far, 0, &tasks));
    clear_machine();
}

/* ---- how busy CPUs are ---- */

static struct cpu_times before;
static struct cpu_times after;

static void look(const char *stat, struct cpu_times *times) {
    put(stat, "/proc/stat");
    errno = KEPT_ERRNO;
    CHECK(cpu_times_sample(root, times));
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static void test_idle(void) {
    look("cpu  1000 10 500 8000 100 0 20 5 0 0\n"
         "cpu0 100 10 50 800 20 5 10 5 70 0\n"
         "cpu1 0 0 0 1000 0 0 0 0 0 0\n"
         "cpu3 500 0 0 500 0 0 0 0 0 0\n"
         "intr 359427 0 0 0\nctxt 670768\n",
         &before);
    CHECK_EQUAL(before.cpus, 4);
    CHECK_EQUAL(before.of[0].total, 1000);
    CHECK_EQUAL(before.of[0].idle, 820);
    CHECK_EQUAL(before.of[2].total, 0);
    /* CPU 0 half idle, partly waiting for a disk; CPU 1 wholly busy; CPU 2 comes online; CPU 3 went offline.
     */
    look("cpu  1000 10 500 8000 100 0 20 5 0 0\n"
         "cpu0 120 10 70 830 40 5 15 10 75 0\n"
         "cpu1 30 20 10 1000 0 10 10 20 0 0\n"
         "cpu2 10 0 0 30 0 0 0 0 0 0\n"
         "intr 359427 0 0 0\n",
         &after);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 0), 50);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 1), 0);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 2), 75);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 3), CPU_IDLE_UNKNOWN);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 4), CPU_IDLE_UNKNOWN);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, MAX_CPUS), CPU_IDLE_UNKNOWN);
    CHECK_EQUAL(cpu_times_idle_percent(&after, &after, 0), CPU_IDLE_UNKNOWN);
    CHECK_EQUAL(cpu_times_idle_percent(&after, &before, 0), CPU_IDLE_UNKNOWN);
    /* Since the machine's start. */
    static const struct cpu_times start;
    CHECK_EQUAL(cpu_times_idle_percent(&start, &before, 0), 82);
    CHECK_EQUAL(cpu_times_idle_percent(&start, &before, 1), 100);
    CHECK_EQUAL(cpu_times_idle_percent(&start, &before, 2), CPU_IDLE_UNKNOWN);

    /* Four ticks say nothing, five do. Idle time that goes back, and such that runs ahead. */
    look("cpu0 100 0 0 100\ncpu1 100 0 0 100\ncpu2 100 0 0 100 50 0 0 0\ncpu3 100 0 0 100 50 0 0 0\n",
         &before);
    look("cpu0 101 0 0 103\ncpu1 102 0 0 103\ncpu2 200 0 0 101 40 0 0 0\ncpu3 90 0 0 200 50 0 0 0\n", &after);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 0), CPU_IDLE_UNKNOWN);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 1), 60);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 2), 0);
    CHECK_EQUAL(cpu_times_idle_percent(&before, &after, 3), 100);
    clear_machine();
}

static void test_odd_stat(void) {
    static char text[1 << 19];
    size_t length = 0;
    for (unsigned cpu = 0; cpu < MAX_CPUS + 10; cpu++) {
        length += (size_t)snprintf(text + length, sizeof text - length, "cpu%u %u 0 0 %u 0 0 0 0 0 0\n", cpu,
                                   cpu, 2 * cpu);
    }
    CHECK(length < sizeof text - 1);
    look(text, &after);
    CHECK_EQUAL(after.cpus, MAX_CPUS);
    for (unsigned cpu = 0; cpu < MAX_CPUS; cpu++) {
        CHECK(after.of[cpu].total == 3 * cpu && after.of[cpu].idle == 2 * cpu);
    }
    /* A later look with fewer CPUs has nothing left of those. */
    look("cpu5 1 2 3 4\n", &after);
    CHECK_EQUAL(after.cpus, 6);
    for (unsigned cpu = 0; cpu < 5; cpu++) {
        CHECK(after.of[cpu].total == 0 && after.of[cpu].idle == 0);
    }
    CHECK(after.of[5].total == 10 && after.of[5].idle == 4);

    static const char *const empty[] = {"",
                                        "\n",
                                        "cp",
                                        "cpu",
                                        "cpu\n",
                                        "intr 1 2 3\ncpu0 1 1 1 1 1 1 1 1\n",
                                        "cpu99999 1 1 1 1\n",
                                        "cpu18446744073709551616 1 1 1 1\n"};
    for (size_t i = 0; i < sizeof empty / sizeof empty[0]; i++) {
        put(empty[i], "/proc/stat");
        CHECK(!cpu_times_sample(root, &after));
        CHECK_EQUAL(after.cpus, 0);
    }
    look("cpu0\ncpu1 nonsense\ncpu1 7 7 7 7\ncpu0 1 1 1 1\ncpu2 1 2", &after);
    CHECK_EQUAL(after.cpus, 3);
    CHECK(after.of[0].total == 0 && after.of[1].total == 0 && after.of[2].total == 3);
    clear_machine();
    errno = KEPT_ERRNO;
    CHECK(!cpu_times_sample(root, &after));
    CHECK_EQUAL(after.cpus, 0);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

/* ---- how busy the process is ---- */

static struct task_times tasks_before;
static struct task_times tasks_after;

static void put_task(unsigned thread, const char *name, char state, unsigned user, unsigned system,
                     unsigned cpu) {
    char text[512];
    snprintf(text, sizeof text,
             "%u (%s) %c 1 2 3 4 -1 4194304 101 5 6 7 %u %u 90 91 20 0 1 0 99091 3133440 407 "
             "18446744073709551615 1 2 3 0 0 0 0 0 0 0 0 0 17 %u 0 0 0 0 0 1 2 3 4 5 6 7 0\n",
             thread, name, state, user, system, cpu);
    put(text, "/proc/self/task/%u/stat", thread);
}

static void look_at_tasks(int without, struct task_times *times) {
    errno = KEPT_ERRNO;
    CHECK(task_times_sample(root, without, times));
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static void check_busiest(size_t most, const uint32_t *expected, size_t count) {
    uint32_t cpus[16];
    CHECK_EQUAL(task_times_busiest_cpus(&tasks_before, &tasks_after, cpus, most), count);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(cpus[i], expected[i]);
    }
}

#define CHECK_BUSIEST(most, ...)                         \
    check_busiest(most, (const uint32_t[]){__VA_ARGS__}, \
                  sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

static void test_tasks(void) {
    check_busiest(16, NULL, 0);
    put_task(100, "main", 'S', 10, 5, 3);
    put_task(101, "a) R 1 (2", 'S', 20, 0, 2);
    put_task(102, "((", 'S', 6, 0, 3);
    put_task(103, "server", 'R', 1000, 1000, 1);
    put_task(104, "idle", 'S', 6, 0, 6);
    put_task(105, "rare", 'S', 4, 1, 5);
    put_task(106, "", 'S', 0, 0, 7);
    put(NULL, "/proc/self/task/107"); /* it has just ended */
    put("", "/proc/self/task/108/stat");
    put("109 (cut off", "/proc/self/task/109/stat");
    put("110 (cut off) S 1 2 3", "/proc/self/task/110/stat");
    put("x", "/proc/self/task/111x/stat");
    look_at_tasks(103, &tasks_after);
    CHECK_EQUAL(tasks_after.count, 6);
    memset(&tasks_before, 0, sizeof tasks_before);
    CHECK_BUSIEST(16, 3, 2, 6, 5); /* of CPU 3 two threads, together 21; 5 is a quarter of that */
    CHECK_BUSIEST(2, 3, 2);
    CHECK_BUSIEST(1, 3);
    check_busiest(0, NULL, 0);

    /* Only what is new counts, and a thread that lost time is another one. */
    look_at_tasks(103, &tasks_before);
    put_task(100, "main", 'S', 13, 5, 3);
    put_task(101, "a) R 1 (2", 'S', 20, 0, 2);
    put_task(102, "((", 'S', 0, 5, 4);
    put_task(104, "idle", 'R', 7, 0, 6); /* a tick, and runs */
    put_task(105, "rare", 'S', 5, 1, 5);
    put_task(112, "new", 'S', 5, 3, 8191);
    put_task(113, "nowhere", 'S', 300, 1, 8192);
    look_at_tasks(103, &tasks_after);
    CHECK_BUSIEST(16, 8191, 4, 3, 6); /* a quarter of 8 is 2 */
    look_at_tasks(0, &tasks_after);
    CHECK_BUSIEST(16, 1);

    /* Nobody had a tick: then where one runs. */
    clear_machine();
    put_task(100, "main", 'R', 0, 0, 1);
    put_task(101, "other", 'S', 0, 0, 0);
    memset(&tasks_before, 0, sizeof tasks_before);
    look_at_tasks(0, &tasks_after);
    CHECK_BUSIEST(16, 1);
    put_task(100, "main", 'S', 0, 0, 1);
    look_at_tasks(0, &tasks_after);
    check_busiest(16, NULL, 0);
    clear_machine();
    errno = KEPT_ERRNO;
    CHECK(!task_times_sample(root, 0, &tasks_after));
    CHECK_EQUAL(tasks_after.count, 0);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static void test_many_tasks(void) {
    for (unsigned i = 0; i < MAX_TASKS + 20; i++) {
        put_task(1000 + i, "many", 'S', i + 1, 0, i);
    }
    int lowest = lowest_free_descriptor();
    look_at_tasks(0, &tasks_after);
    CHECK_EQUAL(tasks_after.count, MAX_TASKS);
    CHECK_EQUAL(lowest_free_descriptor(), lowest);
    static bool seen[MAX_TASKS + 20];
    for (uint32_t i = 0; i < MAX_TASKS; i++) {
        uint32_t cpu = tasks_after.tasks[i].cpu;
        CHECK(cpu < MAX_TASKS + 20 && !seen[cpu]);
        seen[cpu] = true;
        CHECK(tasks_after.tasks[i].ticks == cpu + 1 && tasks_after.tasks[i].thread == (int32_t)(1000 + cpu));
    }
    uint32_t cpus[MAX_TASKS];
    memset(&tasks_before, 0, sizeof tasks_before);
    size_t count = task_times_busiest_cpus(&tasks_before, &tasks_after, cpus, MAX_TASKS);
    CHECK(count > MAX_TASKS / 2 && count < MAX_TASKS);
    for (size_t i = 1; i < count; i++) {
        CHECK(cpus[i] < cpus[i - 1]);
    }
    clear_machine();
}

/* ---- this machine ---- */

static void look_at_this_machine(void) {
    static struct cpu_set all;
    CHECK(cpu_affinity(0, &all));
    CHECK(cpu_times_sample(TOPOLOGY_MACHINE, &before));
    for (unsigned cpu = cpu_set_next(&all, 0); cpu < MAX_CPUS; cpu = cpu_set_next(&all, cpu + 1)) {
        struct cpu_site site = topology_site(TOPOLOGY_MACHINE, cpu);
        CHECK(site.core <= cpu);
        CHECK(site.cache <= cpu || site.cache == MAX_CPUS + site.socket);
        struct cpu_set siblings;
        topology_siblings(TOPOLOGY_MACHINE, cpu, &siblings);
        CHECK(cpu_set_has(&siblings, cpu) && cpu_set_has(&siblings, site.core));
    }
    CHECK(task_times_sample(TOPOLOGY_MACHINE, 0, &tasks_after));
    int caller = (int)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    uint32_t i = 0;
    while (i < tasks_after.count && tasks_after.tasks[i].thread != caller) {
        i++;
    }
    CHECK(i < tasks_after.count && tasks_after.tasks[i].running);
    CHECK(task_times_sample(TOPOLOGY_MACHINE, caller, &tasks_before));
    CHECK_EQUAL(tasks_before.count + 1, tasks_after.count);
}

static void test_this_machine(void) {
    errno = KEPT_ERRNO;
    int lowest = lowest_free_descriptor();
    look_at_this_machine();
    CHECK_EQUAL(lowest_free_descriptor(), lowest);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* they need the C library's thread */

static _Atomic(bool) looked;

static void look_from_bare_thread(void *argument) {
    (void)argument;
    look_at_this_machine();
    struct cpu_set all;
    CHECK(cpu_affinity(0, &all));
    unsigned cpu = cpu_set_next(&all, 0);
    CHECK(cpu_pin(cpu));
    CHECK_EQUAL(current_cpu(), cpu);
    looked = true;
}

/* The server's. Alone in its process: the thread's stack is nobody's when it has ended. */
static void test_bare_thread(void) {
    static struct thread bare;
    CHECK(thread_start(&bare, look_from_bare_thread, NULL, (size_t)64 << 10));
    WAIT_UNTIL(looked);
}

#else

static void test_bare_thread(void) {
}

#endif

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    test_sets();
    in_child(test_pinning);
    test_plain_machine();
    test_hyperthreads();
    test_sockets();
    test_lists();
    test_missing();
    test_idle();
    test_odd_stat();
    test_tasks();
    test_many_tasks();
    test_this_machine();
    in_child(test_bare_thread);
    CHECK(rmdir(root) == 0);
    return 0;
}
