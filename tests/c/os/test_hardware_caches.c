/* Cache geometry: read from machines simulated by files, and from this machine. */
#include "os/hardware_caches.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "machine_files.h"
#include "os/text.h"

/* ---- files that can be hidden ---- */

long __real_file_read(const char *path, char *text, size_t size);
long __wrap_file_read(const char *path, char *text, size_t size);

static bool files_are_hidden;

long __wrap_file_read(const char *path, char *text, size_t size) {
    return files_are_hidden ? -1 : __real_file_read(path, text, size);
}

/* ---- the tests ---- */

/* The paper's machine. */
static void test_nehalem(void) {
    put_cache(0, "1\n", "Data\n", "32K\n", "8\n", "0,8\n");
    put_cache(1, "1\n", "Instruction\n", "32K\n", "4\n", "0,8\n");
    put_cache(2, "2\n", "Unified\n", "256K\n", "8\n", "0,8\n");
    put_cache(3, "3\n", "Unified\n", "8192K\n", "16\n", "0-3,8-11\n");
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    errno = 1234;
    CHECK_EQUAL(hardware_caches_read(root, caches, MAX_HARDWARE_CACHES), 3);
    CHECK_EQUAL(errno, 1234);
    const struct hardware_cache expected[] = {
        {1, 32 << 10, 8, 64, 64, 2}, {2, 256 << 10, 8, 64, 512, 2}, {3, 8 << 20, 16, 64, 8192, 8}};
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQUAL(caches[i].level, expected[i].level);
        CHECK_EQUAL(caches[i].bytes, expected[i].bytes);
        CHECK_EQUAL(caches[i].ways, expected[i].ways);
        CHECK_EQUAL(caches[i].line_bytes, expected[i].line_bytes);
        CHECK_EQUAL(caches[i].sets, expected[i].sets);
        CHECK_EQUAL(caches[i].cpus, expected[i].cpus);
    }
    CHECK_EQUAL(hardware_cache_way_bytes(&caches[2]), 512 << 10);
    CHECK_EQUAL(hardware_caches_read(root, caches, 2), 2);
    clear_machine();
}

/* What is not told, or makes no sense, is no cache; and none is made up for a machine that is not this one.
 */
static void test_odd(void) {
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    CHECK_EQUAL(hardware_caches_read(root, caches, MAX_HARDWARE_CACHES), 0);
    put_cache(0, "1\n", "Data\n", "32K\n", "0\n", "0\n"); /* fully associative */
    put_cache(1, "2\n", "Unified\n", "", "8\n", "0\n");
    put_cache(2, "3\n", "Unified\n", "99999999999999999999999K\n", "16\n", "");
    put_cache(3, "x\n", "Unified\n", "8M\n", "16\n", "0\n");
    size_t count = hardware_caches_read(root, caches, MAX_HARDWARE_CACHES);
    CHECK(count >= 1 && count <= 2);
    CHECK_EQUAL(caches[0].ways, 512);
    CHECK_EQUAL(caches[0].sets, 1);
    for (size_t i = 0; i < count; i++) {
        CHECK(caches[i].bytes > 0 && caches[i].sets > 0 && caches[i].ways > 0 && caches[i].cpus == 1);
    }
    clear_machine();
}

/* A unit, a line and a list that are not as usual. */
static void test_what_is_written_otherwise(void) {
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    put_cache(0, "1\n", "Data\n", "32768\n", "8\n", "5-3\n"); /* no range */
    put_cache(1, "2\n", "Unified\n", "8M\n", "16\n", "1,3-4,9\n");
    put_cache(2, "3\n", "Unified\n", "48K\n", "16\n", "0\n");
    put("48\n", "/sys/devices/system/cpu/cpu0/cache/index2/coherency_line_size"); /* no power of two */
    put_cache(3, "4\n", "Unified\n", "1K\n", "64\n", "0\n");                      /* less than a line a way */
    CHECK_EQUAL(hardware_caches_read(root, caches, MAX_HARDWARE_CACHES), 2);
    CHECK_EQUAL(caches[0].bytes, 32768);
    CHECK_EQUAL(caches[0].cpus, 1);
    CHECK_EQUAL(caches[1].bytes, 8 << 20);
    CHECK_EQUAL(caches[1].cpus, 4);
    CHECK_EQUAL(hardware_caches_read(root, caches, 1), 1);
    clear_machine();
}

/* What does not fit is cut off, and NUL follows. */
static void test_end_of_a_text(void) {
    static struct {
        struct text text;
        char behind;
    } guarded;
    guarded.behind = 'b';
    while (guarded.text.length < TEXT_MAX_BYTES - 1) {
        text_format(&guarded.text, "a");
    }
    CHECK_EQUAL(strlen(guarded.text.bytes), TEXT_MAX_BYTES - 1);
    text_format(&guarded.text, "bb");
    CHECK_EQUAL(guarded.text.length, TEXT_MAX_BYTES);
    CHECK_EQUAL(strlen(guarded.text.bytes), TEXT_MAX_BYTES);
    CHECK_EQUAL(guarded.behind, 'b');
}

#if defined(_SC_LEVEL1_DCACHE_LINESIZE)
/* As the C library was told. Not every machine tells. */
static void test_this_machine(void) {
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", caches, MAX_HARDWARE_CACHES);
    long line = sysconf(_SC_LEVEL1_DCACHE_LINESIZE);
    long ways = sysconf(_SC_LEVEL1_DCACHE_ASSOC);
    CHECK(count > 0 || ways <= 0);
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
#else
static void test_this_machine(void) {
}
#endif

/* What the processor says itself is what the kernel has from it, where there are both; but for the CPUs that
 * share a cache, of which it only knows how many there may be. */
static void test_processor(void) {
    struct hardware_cache said[MAX_HARDWARE_CACHES];
    struct hardware_cache asked[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", said, MAX_HARDWARE_CACHES);
    files_are_hidden = true;
    size_t found = hardware_caches_read("", asked, MAX_HARDWARE_CACHES);
    CHECK_EQUAL(hardware_caches_read(root, asked, MAX_HARDWARE_CACHES), 0);
    CHECK_EQUAL(hardware_caches_read("", asked, found < 2 ? found : 2), found < 2 ? found : 2);
    CHECK_EQUAL(hardware_caches_read("", asked, MAX_HARDWARE_CACHES), found);
    files_are_hidden = false;
    for (size_t i = 0; i < found; i++) {
        CHECK(asked[i].cpus >= 1);
    }
    if (count == 0 || found == 0) {
        puts("left out: the kernel or the processor says nothing of caches");
        return;
    }
    CHECK_EQUAL(found, count);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(asked[i].level, said[i].level);
        CHECK_EQUAL(asked[i].bytes, said[i].bytes);
        CHECK_EQUAL(asked[i].ways, said[i].ways);
        CHECK_EQUAL(asked[i].line_bytes, said[i].line_bytes);
        CHECK_EQUAL(asked[i].sets, said[i].sets);
    }
}

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    test_nehalem();
    test_odd();
    test_what_is_written_otherwise();
    test_end_of_a_text();
    test_this_machine();
    test_processor();
    CHECK(rmdir(root) == 0);
    return 0;
}
