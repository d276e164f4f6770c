/* The allocator's traces in a process: guest CASE [ARGUMENT]. */
#include "api.h"
#include "names.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* ---- mappings ---- */

struct mapping {
    uintptr_t begin, end;
    char access[8];
    char flags[256]; /* of smaps */
};

static struct mapping mappings[1024];
static size_t mapping_count;

static void read_mappings(void) {
    static char buffer[1 << 16];
    char line[512];
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file != NULL && setvbuf(file, buffer, _IOFBF, sizeof buffer) == 0);
    mapping_count = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        struct mapping mapping = {0};
        if (sscanf(line, "%lx-%lx %7s", &mapping.begin, &mapping.end, mapping.access) == 3) {
            CHECK(mapping_count < sizeof mappings / sizeof mappings[0]);
            mappings[mapping_count++] = mapping;
        } else if (strncmp(line, "VmFlags:", 8) == 0) {
            CHECK(mapping_count > 0 && strlen(line) < sizeof mapping.flags);
            strcpy(mappings[mapping_count - 1].flags, line + 8);
        }
    }
    fclose(file);
}

static const struct mapping *mapping_of(const void *address) {
    for (size_t i = 0; i < mapping_count; i++) {
        if ((uintptr_t)address >= mappings[i].begin && (uintptr_t)address < mappings[i].end) {
            return &mappings[i];
        }
    }
    return NULL;
}

/* How a child ends that writes there: by the signal's number, or 0. */
static int write_in_child(uintptr_t address) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile char *)address = 1;
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static bool is_writable(const void *address) {
    const struct mapping *mapping = mapping_of(address);
    return mapping != NULL && mapping->access[1] == 'w';
}

/* A program that writes all over the memory that its blocks lie in breaks its own blocks, not the allocator.
 */
static void overwrite_and_allocate(const char *block, const struct mapping *heap) {
    memset((char *)heap->begin, 0x41, (size_t)((uintptr_t)block - heap->begin));
    for (size_t bytes = 1; bytes < 100 * KIB; bytes += bytes / 4 + 1) {
        for (int i = 0; i < 20; i++) {
            char *other = malloc(bytes);
            read_mappings();
            if (other == NULL || !is_writable(other) || !is_writable(other + bytes - 1)) {
                _exit(1);
            }
        }
    }
}

static void guards(const char *unused) {
    (void)unused;
    char *block = malloc(100);
    CHECK(block != NULL);
    free(malloc(5000)); /* so that there is what could be broken */
    read_mappings();
    const struct mapping heap = *mapping_of(block);
    for (uintptr_t distance = 1; distance <= 256 * KIB; distance *= 2) {
        CHECK_EQUAL(write_in_child(heap.begin - distance), SIGSEGV);
        CHECK_EQUAL(write_in_child(heap.end + distance - 1), SIGSEGV);
    }
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        overwrite_and_allocate(block, &heap);
        _exit(0);
    }
    check_child(child);
    free(block);
}

/* A core file has the blocks, and not what is only reserved. */
static void core_files(const char *unused) {
    (void)unused;
    char *blocks[] = {malloc(100), malloc(40 * KIB), malloc(20 * MIB)};
    size_t reserved = 0;
    for (size_t i = 0; i < 3; i++) {
        memset(blocks[i], 1, 100);
    }
    read_mappings();
    for (size_t i = 0; i < 3; i++) {
        const struct mapping *mapping = mapping_of(blocks[i]);
        CHECK(mapping != NULL && strstr(mapping->flags, " dd") == NULL);
    }
    for (size_t i = 0; i < mapping_count; i++) {
        if (mappings[i].access[0] == '-' && strstr(mappings[i].flags, " dd") == NULL) {
            reserved += mappings[i].end - mappings[i].begin;
        }
    }
    say("reserved_in_core_files", reserved);
    for (size_t i = 0; i < 3; i++) {
        free(blocks[i]);
    }
}

/* What may be written, of this process: what strict overcommit charges. */
static void writable(const char *unused) {
    (void)unused;
    free(malloc(100));
    size_t bytes = 0;
    read_mappings();
    for (size_t i = 0; i < mapping_count; i++) {
        bytes += mappings[i].access[1] == 'w' ? mappings[i].end - mappings[i].begin : 0;
    }
    say("writable", bytes);
}

/* ---- limits ---- */

static void *chain; /* of blocks, each with the next one's address */

static size_t take_all(size_t bytes) {
    size_t taken = 0;
    for (void **block; (block = malloc(bytes)) != NULL; taken += bytes) {
        memset(block, 1, 64);
        *block = chain;
        chain = block;
    }
    CHECK_EQUAL(errno, ENOMEM);
    return taken;
}

static void free_all(void) {
    while (chain != NULL) {
        void *next = *(void **)chain;
        free(chain);
        chain = next;
    }
}

static void allocate_in_thread(size_t thread) {
    use_blocks(thread, 500);
}

/* A program that limits its address space: malloc goes by the limit, and all else has room. */
static void limit_at_run_time(const char *unused) {
    (void)unused;
    const struct rlimit limit = {GIB, RLIM_INFINITY}, none = {RLIM_INFINITY, RLIM_INFINITY};
    struct rlimit before;
    use_blocks(1, 2000);
    char *kept = malloc(100 * KIB);
    fill(kept, 100 * KIB, 5);
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    void *mapped = mmap(NULL, 100 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED && munmap(mapped, 100 * MIB) == 0);
    run_threads(2, allocate_in_thread);
    size_t large = take_all(MIB);
    free_all();
    size_t small = take_all(3000);
    free_all();
    CHECK(large > 512 * MIB && large < GIB);
    CHECK(small > 128 * MIB && small < GIB);
    use_blocks(2, 2000);
    CHECK(is_filled(kept, 100 * KIB, 5));
    CHECK(prlimit(getpid(), RLIMIT_AS, &none, &before) == 0 && before.rlim_cur == GIB);
    void *block = malloc(2 * GIB);
    CHECK(block != NULL);
    free(block);
    free(kept);
    struct rlimit wrong = {2, 1};
    CHECK(setrlimit(RLIMIT_AS, &wrong) == -1 && errno == EINVAL);
}

/* ---- descriptors ---- */

/* Each number is used again, for a file that only the program writes. */
static void reuse_descriptors(const char *path) {
    for (int number = 0; number < 256; number++) {
        close(number);
    }
    for (int number = 0; number < 200; number++) {
        if (open(path, O_WRONLY | O_CREAT, 0600) != number) {
            _exit(3);
        }
    }
}

/* ---- a C++ library that comes late, in a scope of its own ---- */

static void late_cxx(const char *path) {
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(plugin != NULL);
    int (*catches)(void) = (int (*)(void))(uintptr_t)dlsym(plugin, "catches");
    int (*handles)(void) = (int (*)(void))(uintptr_t)dlsym(plugin, "handles");
    CHECK(catches != NULL && handles != NULL);
    CHECK(catches() == 1);
    CHECK(handles() == 3);
    CHECK(dlclose(plugin) == 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"guards", guards},
        {"core-files", core_files},
        {"writable", writable},
        {"limit-at-run-time", limit_at_run_time},
        {"reuse-descriptors", reuse_descriptors},
        {"late-cxx", late_cxx},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
