/* After the benchmark "anon-r-seq" of Amit, "Optimizing the TLB Shootdown Algorithm with Page Access
 * Tracking": one thread reads fresh anonymous memory sequentially, with a page fault for each page, and no
 * TLB shootdown. It shows the cost that saving shootdowns elsewhere adds to a fault. */
#define _GNU_SOURCE /* MADV_NOHUGEPAGE */
#include "paging.h"
#include "support.h"

#include <stdio.h>
#include <sys/mman.h>

#ifdef __x86_64__
#include <x86intrin.h>
#endif

static const char program_name[] = "anon-r-seq";

struct pass {
    unsigned long pages;
    double seconds;
    unsigned long long cycles;
    unsigned long faults;
};

/* The reference cycles since some moment; 0 where the CPU does not tell. */
static unsigned long long reference_cycles(void) {
#ifdef __x86_64__
    return __rdtsc();
#else
    return 0;
#endif
}

static void read_fresh(struct pass *pass) {
    size_t page = page_bytes();
    size_t bytes = pass->pages * page;
    char *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        fail(program_name, "out of memory");
    }
    /* A kernel without huge pages refuses, and is right. */
    (void)madvise(memory, bytes, MADV_NOHUGEPAGE);
    struct thread_cost before = thread_cost_now();
    double begin = now_seconds();
    unsigned long long cycles = reference_cycles();
    unsigned long long bits = 0;
    for (unsigned long i = 0; i < pass->pages; i++) {
        bits |= page_load(memory + i * page);
    }
    pass->cycles += reference_cycles() - cycles;
    pass->seconds += now_seconds() - begin;
    pass->faults += thread_cost_now().minor_faults - before.minor_faults;
    if (bits != 0) {
        fail(program_name, "fresh memory is not zero");
    }
    (void)munmap(memory, bytes);
}

int main(int argc, char **argv) {
    unsigned long size = 64UL << 20;
    unsigned long rounds = 10;
    unsigned long clock = 0;
    unsigned long pin = 0;
    const struct option_spec options[] = {
        {"size", "bytes that are mapped, read and unmapped", OPTION_COUNT, &size, 1, 1UL << 43, NULL},
        {"rounds", "number of times", OPTION_COUNT, &rounds, 1, 1000000000, NULL},
        {"clock", "report the time of a fault, in ns and in cycles of the time stamp counter", OPTION_FLAG,
         &clock, 0, 1, NULL},
        {"pin", "stay on one CPU", OPTION_FLAG, &pin, 0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Reads fresh anonymous memory, page by page.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    if (pin != 0) {
        pin_thread(program_name, 0);
    }
    struct pass pass = {.pages = pages_of(size)};
    for (unsigned long round = 0; round < rounds; round++) {
        read_fresh(&pass);
    }
    if (pass.faults == 0) {
        fail(program_name, "fresh memory was read without a fault");
    }
    printf("{\"workload\": \"anon-r-seq\", \"size\": %lu, \"rounds\": %lu, \"pages\": %lu, \"reads\": %lu, "
           "\"minor_faults\": %lu, \"seconds\": %.6f",
           size, rounds, pass.pages, pass.pages * rounds, pass.faults, pass.seconds);
    if (clock != 0) {
        printf(", \"ns_per_fault\": %.3f, \"cycles_per_fault\": %.3f",
               pass.seconds * 1e9 / (double)pass.faults, (double)pass.cycles / (double)pass.faults);
    }
    printf("}\n");
    return 0;
}
