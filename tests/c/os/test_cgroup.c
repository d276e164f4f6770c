/* Control groups: the memory and the CPU time that they leave, of versions 1 and 2. */
#include "os/cgroup.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "check.h"
#include "group_files.h"

static uint64_t group_limit;

static uint64_t group_room(void) {
    errno = KEPT_ERRNO;
    uint64_t room = cgroup_available_bytes(root, &group_limit);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return room;
}

static uint64_t room_with(const char *current, const char *max, const char *high, const char *pressure) {
    put_group("a/b/c", "memory.current", current);
    put_group("a/b/c", "memory.max", max);
    put_group("a/b/c", "memory.high", high);
    put_group("a/b/c", "memory.pressure", pressure);
    return group_room();
}

/* Of version 2: the nearest limit of the group and those above it. */
static void test_memory_of_groups(void) {
    CHECK_EQUAL(group_room(), UINT64_MAX);
    put("0::/a/b/c\n", "/proc/self/cgroup");
    CHECK_EQUAL(room_with(NULL, NULL, NULL, NULL), UINT64_MAX);
    CHECK_EQUAL(room_with("800\n", "1000\n", "max\n", NULL), 100);
    CHECK_EQUAL(room_with("900\n", "1000\n", "max\n", NULL), 0);
    CHECK_EQUAL(room_with("901\n", "1000\n", "max\n", NULL), 0);
    CHECK_EQUAL(room_with("800\n", "max\n", "1000\n", NULL), 100);
    CHECK_EQUAL(room_with("800\n", "5000\n", "1000\n", NULL), 100); /* the lower one counts */
    CHECK_EQUAL(room_with("800\n", "1000\n", "5000\n", NULL), 100);
    CHECK_EQUAL(room_with("999999999999\n", "max\n", "max\n", NULL), UINT64_MAX);
    CHECK_EQUAL(room_with("800\n", "1000\n", NULL, NULL), 100);
    CHECK_EQUAL(room_with("800\n", NULL, "1000\n", NULL), 100);
    CHECK_EQUAL(room_with("800\n", NULL, NULL, NULL), UINT64_MAX);
    CHECK_EQUAL(room_with(NULL, "1000\n", "1000\n", NULL), UINT64_MAX);
    CHECK_EQUAL(room_with("0\n", "17179869184\n", "max\n", NULL), 17179869184 / 10 * 9);
    CHECK_EQUAL(room_with("1\n", "0\n", "max\n", NULL), 0);

    /* What the kernel gives up by itself. */
    room_with("1500\n", "2000\n", "max\n", NULL);
    put_group("a/b/c", "memory.stat",
              "anon 1\nfile 900\ninactive_file 200\nactive_file 100\nslab_reclaimable 50\n"
              "total_inactive_file 5000\n");
    CHECK_EQUAL(group_room(), 1800 - (1500 - 350));
    put_group("a/b/c", "memory.stat", "inactive_file 5000\n");
    CHECK_EQUAL(group_room(), 1800);
    put_group("a/b/c", "memory.stat", NULL);

    /* Those above, and the topmost. */
    room_with("10\n", "1000\n", "max\n", NULL);
    put_group("a", "memory.current", "500\n");
    put_group("a", "memory.max", "1000\n");
    CHECK_EQUAL(group_room(), 400);
    put_group("", "memory.current", "700\n");
    put_group("", "memory.max", "1000\n");
    CHECK_EQUAL(group_room(), 200);
    put("0::/none of these\n", "/proc/self/cgroup");
    CHECK_EQUAL(group_room(), 200);
    put_group("", "memory.max", NULL);
    put_group("a", "memory.max", NULL);
    put("0::/a/b/c\n", "/proc/self/cgroup");

    /* Waiting for memory, in the group itself. */
    static const char *low[] = {SOME("0.00"), SOME("0.99"), SOME("1.00"), SOME("9.99"), "", "nonsense"};
    static const char *much[] = {SOME("10.00"), SOME("10.01"), SOME("55.50"), SOME("100.00")};
    for (size_t i = 0; i < sizeof low / sizeof low[0]; i++) {
        CHECK_EQUAL(room_with("1\n", "1000\n", "max\n", low[i]), 899);
    }
    for (size_t i = 0; i < sizeof much / sizeof much[0]; i++) {
        CHECK_EQUAL(room_with("1\n", "1000\n", "max\n", much[i]), 0);
        CHECK_EQUAL(room_with(NULL, NULL, NULL, much[i]), 0);
        put_group("a", "memory.pressure", much[i]);
        CHECK_EQUAL(room_with("1\n", "1000\n", "max\n", NULL), 899);
        put_group("a", "memory.pressure", NULL);
    }
    clear_machine();
}

/* Of version 1, alone and beside version 2. */
static void test_memory_of_first_groups(void) {
    put_group("memory/d/e", "memory.usage_in_bytes", "500\n");
    put_group("memory/d/e", "memory.limit_in_bytes", "9223372036854771712\n");
    put("7:cpuset:/d/e\n4:memory:/d/e\n1:name=systemd:/\n", "/proc/self/cgroup");
    CHECK(group_room() > (uint64_t)1 << 62); /* no limit */
    put_group("memory/d/e", "memory.limit_in_bytes", "1000\n");
    CHECK_EQUAL(group_room(), 400);
    put_group("memory/d/e", "memory.stat", "inactive_file 1\ntotal_inactive_file 90\ntotal_active_file 10\n");
    CHECK_EQUAL(group_room(), 500);
    put_group("memory/d", "memory.usage_in_bytes", "800\n");
    put_group("memory/d", "memory.limit_in_bytes", "1000\n");
    CHECK_EQUAL(group_room(), 100);
    put_group("a", "memory.current", "850\n");
    put_group("a", "memory.max", "1000\n");
    put("4:memory:/d/e\n0::/a/b\n", "/proc/self/cgroup");
    CHECK_EQUAL(group_room(), 50);
    put("6:memoryx:/d/e\n5:name=memory:/d\n", "/proc/self/cgroup");
    CHECK_EQUAL(group_room(), UINT64_MAX);

    /* As many groups, and as long names, as there are. */
    FILE *file = fopen(machine_path("/proc/self/cgroup"), "w");
    CHECK(file != NULL);
    for (int i = 0; i < 100; i++) {
        fprintf(file, "%d:name=%0*d:/%0*d\n", i + 100, i, 0, 10 * i, 0);
    }
    fprintf(file, "4:memory:/d/e");
    CHECK(fclose(file) == 0);
    CHECK_EQUAL(group_room(), 100);
    clear_machine();
}

static double quota_where(const char *groups) {
    put(groups, "/proc/self/cgroup");
    errno = KEPT_ERRNO;
    double quota = cgroup_cpu_quota(root);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return quota;
}

static void test_cpu_quota(void) {
    CHECK(cgroup_cpu_quota(root) == INFINITY);
    /* Version 2: the least of the group and those above it. */
    CHECK(quota_where("0::/a/b/c\n") == INFINITY);
    put("max 100000\n", "/sys/fs/cgroup/a/b/c/cpu.max");
    CHECK(quota_where("0::/a/b/c\n") == INFINITY);
    put("350000 100000\n", "/sys/fs/cgroup/a/b/c/cpu.max");
    CHECK(quota_where("0::/a/b/c\n") == 3.5);
    CHECK(quota_where("0::/a/b/c") == 3.5);
    CHECK(quota_where("0::/a/b\n") == INFINITY);
    CHECK(quota_where("0::/a/b/c/unseen/below\n") == 3.5);
    put("50000 20000\n", "/sys/fs/cgroup/a/cpu.max");
    CHECK(quota_where("0::/a/b/c\n") == 2.5);
    CHECK(quota_where("0::/a\n") == 2.5);
    CHECK(quota_where("0::/\n") == INFINITY);
    put("400000 100000\n", "/sys/fs/cgroup/a/b/cpu.max");
    CHECK(quota_where("0::/a/b/c\n") == 2.5);
    CHECK(quota_where("0::/a/b (deleted)\n") == 2.5);
    put("150000 100000\n", "/sys/fs/cgroup/cpu.max"); /* a container's own group */
    CHECK(quota_where("0::/a/b/c\n") == 1.5);
    CHECK(quota_where("0::/\n") == 1.5);
    CHECK(quota_where("0::/system.slice/none of these\n") == 1.5);
    static const char *const odd[] = {"",          "\n",         "100000",       "100000\n",
                                      "100000 \n", "100000 0\n", "100000 max\n", "x 1\n"};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        put(odd[i], "/sys/fs/cgroup/cpu.max");
        CHECK(quota_where("0::/a/b/c\n") == 2.5);
    }
    unlink(machine_path("/sys/fs/cgroup/cpu.max"));

    /* Version 1, alone and beside version 2. */
    put("-1\n", "/sys/fs/cgroup/cpu/d/cpu.cfs_quota_us");
    put("100000\n", "/sys/fs/cgroup/cpu/d/cpu.cfs_period_us");
    CHECK(quota_where("7:cpuset:/d\n4:cpu,cpuacct:/d\n1:name=systemd:/d\n") == INFINITY);
    put("120000\n", "/sys/fs/cgroup/cpu/d/cpu.cfs_quota_us");
    CHECK(quota_where("7:cpuset:/d\n4:cpu,cpuacct:/d\n1:name=systemd:/d\n") == 1.2);
    CHECK(quota_where("4:cpuacct,cpu:/d\n") == 1.2);
    CHECK(quota_where("1:cpu:/d/e\n0::/\n") == 1.2);
    CHECK(quota_where("1:cpu:/\n0::/a\n") == 2.5);
    CHECK(quota_where("1:cpu:/d\n0::/a\n") == 1.2);
    CHECK(quota_where("7:cpuset:/d\n6:cpuacct:/d\n5:name=cpu:/d\n4:cpus:/d\n") == INFINITY);
    put("90000\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"); /* a container's own */
    put("100000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    CHECK(quota_where("4:cpu,cpuacct:/docker/0123456789abcdef\n") == 0.9);
    static const char *const nothing[] = {"",   "\n",      "0",        "0:",        "0::",     "0::\n",
                                          "::", "4:cpu\n", "4:cpu:\n", "4:cpu:d\n", "/a/b/c\n"};
    for (size_t i = 0; i < sizeof nothing / sizeof nothing[0]; i++) {
        CHECK(quota_where(nothing[i]) == INFINITY);
    }

    /* Names too long for any path of ours. */
    static char far[2000];
    memset(far, 'x', sizeof far - 2);
    memcpy(far, "0::/", 4);
    far[sizeof far - 2] = '\n';
    CHECK(quota_where(far) == INFINITY);
    memset(far, '/', sizeof far - 1);
    CHECK(cgroup_cpu_quota(far) == INFINITY);
    CHECK(cgroup_cpu_quota("") > 0); /* whatever it says of this machine */

    clear_machine();
}

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    test_memory_of_groups();
    test_memory_of_first_groups();
    test_cpu_quota();
    CHECK(rmdir(root) == 0);
    return 0;
}
