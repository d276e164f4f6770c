/* Section 3.1 of "Ptlbmalloc2: Reducing TLB Shootdowns with High Memory Efficiency": the cost of
 * madvise(MADV_DONTNEED) alone, when every thread calls it continuously. */
#include "support.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __x86_64__
#include <x86intrin.h>
#endif

static const char program_name[] = "madvise-storm";

enum pages { PAGES_SHARED, PAGES_OWN };

static const char *const pages_names[] = {"shared", "own", NULL};

struct storm {
    unsigned long calls;
    bool touch;
    char *memory;
    size_t page;
    size_t stride; /* 0 when all threads share one page */
};

static void give_back(unsigned long thread, void *shared) {
    const struct storm *storm = shared;
    char *page = storm->memory + thread * storm->stride;
    for (unsigned long call = 0; call < storm->calls; call++) {
        if (storm->touch) {
            /* Threads may share the page, so the store is atomic. */
            __atomic_store_n(page, (char)1, __ATOMIC_RELAXED);
        }
        if (madvise(page, storm->page, MADV_DONTNEED) != 0) {
            fail(program_name, "madvise refused");
        }
    }
}

/* The reference cycles since some moment; 0 where the CPU does not tell. */
static unsigned long long reference_cycles(void) {
#ifdef __x86_64__
    return __rdtsc();
#else
    return 0;
#endif
}

int main(int argc, char **argv) {
    unsigned long threads = 16;
    unsigned long calls = 1000000;
    unsigned long pages = PAGES_SHARED;
    unsigned long touch = 0;
    const struct option_spec options[] = {
        {"threads", "threads that call madvise", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"calls", "calls that each thread makes", OPTION_COUNT, &calls, 1, 1000000000000, NULL},
        {"pages", "one page for all threads, or one each", OPTION_CHOICE, &pages, 0, 0, pages_names},
        {"touch", "write the page before each call, so that there is something to flush", OPTION_FLAG, &touch,
         0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads call madvise(MADV_DONTNEED) on a page, over and over.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct storm storm = {.calls = calls, .touch = touch != 0, .page = (size_t)sysconf(_SC_PAGESIZE)};
    storm.stride = pages == PAGES_OWN ? storm.page : 0;
    size_t bytes = storm.page * (pages == PAGES_OWN ? threads : 1);
    storm.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (storm.memory == MAP_FAILED) {
        fail(program_name, "out of memory");
    }
    double clock = now_seconds();
    unsigned long long cycles = reference_cycles();
    double seconds = run_threads(program_name, threads, give_back, &storm);
    cycles = reference_cycles() - cycles;
    clock = now_seconds() - clock;

    printf("{\"workload\": \"madvise-storm\", \"threads\": %lu, \"calls\": %lu, \"pages\": \"%s\", "
           "\"touch\": %s, "
           "\"seconds\": %.6f, \"calls_per_second\": %.0f, \"reference_mhz\": %.1f}\n",
           threads, calls, pages_names[pages], touch != 0 ? "true" : "false", seconds,
           (double)threads * (double)calls / seconds, (double)cycles / clock * 1e-6);
    return 0;
}
