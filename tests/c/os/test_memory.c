/* The memory that the machine and its control groups have left. */
#include "os/memory.h"

#include <errno.h>

#include "check.h"
#include "group_files.h"

static size_t room_limit;

static size_t room_of(const char *meminfo, const char *pressure) {
    put(meminfo, "/proc/meminfo");
    put(pressure, "/proc/pressure/memory");
    errno = KEPT_ERRNO;
    size_t room = memory_available_bytes(root, &room_limit);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return room;
}

static void test_memory_of_machine(void) {
    CHECK_EQUAL(memory_available_bytes(root, &room_limit), SIZE_MAX);
    CHECK_EQUAL(room_limit, memory_total_bytes());
    CHECK_EQUAL(room_of("MemTotal:   1000 kB\nMemFree: 3 kB\nMemAvailable:   500 kB\n", ""), 450 << 10);
    CHECK_EQUAL(room_of("MemTotal:   1000 kB\nMemAvailable:   50 kB\n", ""), 0);
    CHECK_EQUAL(room_of("MemTotal:   1000 kB\n", ""), SIZE_MAX);
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 50 kB\nHugetlb: 900 kB\n", ""), 45 << 10);
    /* Pressure while there is much available is of other kinds of memory. */
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 500 kB\n", SOME("50.00")), 450 << 10);
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 199 kB\n", SOME("9.00")), 149 << 10);
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 199 kB\n", SOME("50.00")), 0);
    put("0::/a\n", "/proc/self/cgroup");
    put_group("a", "memory.current", "1000\n");
    put_group("a", "memory.max", "10000\n");
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 500 kB\n", ""), 8000);
    CHECK_EQUAL(room_limit, 10000);
    put_group("a", "memory.high", "5000\n");
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 500 kB\n", ""), 3500);
    CHECK_EQUAL(room_limit, 5000);
    clear_machine();
    CHECK(memory_available_bytes("", &room_limit) > 0); /* whatever it says of this machine */
}

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    test_memory_of_machine();
    CHECK(rmdir(root) == 0);
    return 0;
}
