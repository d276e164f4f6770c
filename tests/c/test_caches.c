/* Caches: what is read of machines made of files, and of this one. */
#include "os/caches.h"

#include <errno.h>
#include <stdlib.h>

#include "check.h"
#include "machine_files.h"

/* The paper's machine. */
static void test_nehalem(void) {
    put_cache(0, "1\n", "Data\n", "32K\n", "8\n", "0,8\n");
    put_cache(1, "1\n", "Instruction\n", "32K\n", "4\n", "0,8\n");
    put_cache(2, "2\n", "Unified\n", "256K\n", "8\n", "0,8\n");
    put_cache(3, "3\n", "Unified\n", "8192K\n", "16\n", "0-3,8-11\n");
    struct os_cache caches[CACHES_MOST];
    errno = 1234;
    CHECK_EQUAL(os_caches(root, caches, CACHES_MOST), 3);
    CHECK_EQUAL(errno, 1234);
    const struct os_cache expected[] = {
        {1, 32 << 10, 8, 64, 64, 2}, {2, 256 << 10, 8, 64, 512, 2}, {3, 8 << 20, 16, 64, 8192, 8}};
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQUAL(caches[i].level, expected[i].level);
        CHECK_EQUAL(caches[i].bytes, expected[i].bytes);
        CHECK_EQUAL(caches[i].ways, expected[i].ways);
        CHECK_EQUAL(caches[i].line_bytes, expected[i].line_bytes);
        CHECK_EQUAL(caches[i].sets, expected[i].sets);
        CHECK_EQUAL(caches[i].cpus, expected[i].cpus);
    }
    CHECK_EQUAL(os_cache_way_bytes(&caches[2]), 512 << 10);
    CHECK_EQUAL(os_caches(root, caches, 2), 2);
    clear_machine();
}

/* What is not told, or makes no sense, is no cache; and none is made up for a machine that is not this one.
 */
static void test_odd(void) {
    struct os_cache caches[CACHES_MOST];
    CHECK_EQUAL(os_caches(root, caches, CACHES_MOST), 0);
    put_cache(0, "1\n", "Data\n", "32K\n", "0\n", "0\n"); /* fully associative */
    put_cache(1, "2\n", "Unified\n", "", "8\n", "0\n");
    put_cache(2, "3\n", "Unified\n", "99999999999999999999999K\n", "16\n", "");
    put_cache(3, "x\n", "Unified\n", "8M\n", "16\n", "0\n");
    size_t count = os_caches(root, caches, CACHES_MOST);
    CHECK(count >= 1 && count <= 2);
    CHECK_EQUAL(caches[0].ways, 512);
    CHECK_EQUAL(caches[0].sets, 1);
    for (size_t i = 0; i < count; i++) {
        CHECK(caches[i].bytes > 0 && caches[i].sets > 0 && caches[i].ways > 0 && caches[i].cpus == 1);
    }
    clear_machine();
}

/* As the C library was told. Not every machine tells. */
static void test_this_machine(void) {
    struct os_cache caches[CACHES_MOST];
    size_t count = os_caches("", caches, CACHES_MOST);
    long line = sysconf(_SC_LEVEL1_DCACHE_LINESIZE);
    long ways = sysconf(_SC_LEVEL1_DCACHE_ASSOC);
    CHECK(count > 0 || line <= 0);
    if (count > 0 && line > 0 && ways > 0) {
        CHECK_EQUAL(caches[0].level, 1);
        CHECK_EQUAL(caches[0].line_bytes, line);
        CHECK_EQUAL(caches[0].ways, ways);
        CHECK_EQUAL(caches[0].bytes, sysconf(_SC_LEVEL1_DCACHE_SIZE));
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(i == 0 || caches[i].level >= caches[i - 1].level);
        CHECK_EQUAL(caches[i].sets, caches[i].bytes / caches[i].line_bytes / caches[i].ways);
    }
}

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    test_nehalem();
    test_odd();
    test_this_machine();
    CHECK(rmdir(root) == 0);
    return 0;
}
