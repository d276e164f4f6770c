/*
 * late_open LIBRARY HOG...: uses up all remaining thread-local memory, then opens the library as a plugin,
 * beside the C library's malloc, and calls it by dlsym.
 */
#include "api.h"

#include <dlfcn.h>
#include <string.h>

static void *(*late_malloc)(size_t);
static void *(*late_realloc)(void *, size_t);
static void (*late_free)(void *);
static int (*late_stats)(struct calm_stats *, size_t);
static size_t (*late_trim)(size_t);

static void work(size_t thread) {
    enum { HELD = 200 };
    unsigned char *held[HELD] = {0};
    size_t bytes[HELD] = {0};
    uint64_t random = thread;
    for (size_t i = 0; i < 20000 + HELD; i++) {
        size_t at = i < 20000 ? next_random(&random) % HELD : i - 20000;
        if (held[at] != NULL) {
            CHECK(is_filled(held[at], bytes[at], at));
            if (next_random(&random) % 4 == 0) {
                held[at] = late_realloc(held[at], bytes[at] + 500);
                CHECK(held[at] != NULL && is_filled(held[at], bytes[at] / 8 * 8, at));
            }
            late_free(held[at]);
            held[at] = NULL;
        }
        if (i < 20000) {
            bytes[at] = 1 + next_random(&random) % (next_random(&random) % 16 == 0 ? 90000 : 900);
            held[at] = late_malloc(bytes[at]);
            CHECK(held[at] != NULL && (uintptr_t)held[at] % 16 == 0);
            fill(held[at], bytes[at], at);
            /* The C library's own goes on as before. */
            char *other = malloc(bytes[at]);
            CHECK(other != NULL);
            free(other);
        }
    }
}

static void *find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    if (symbol == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        _Exit(1);
    }
    return symbol;
}

static void use_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        _Exit(1);
    }
    *(void **)&late_malloc = find(library, "calm_malloc");
    *(void **)&late_realloc = find(library, "calm_realloc");
    *(void **)&late_free = find(library, "calm_free");
    *(void **)&late_stats = find(library, "calm_stats");
    *(void **)&late_trim = find(library, "calm_trim");
    work(0);
    run_threads(4, work);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        work(1);
        run_threads(2, work);
        _exit(0);
    }
    check_child(child);
    struct calm_stats stats;
    CHECK(late_stats(&stats, sizeof stats) == 0);
    CHECK(stats.in_use + stats.dirty == stats.footprint);
    late_trim(0); /* of what the helper or a server has not yet given back */
    CHECK(late_stats(&stats, sizeof stats) == 0 && stats.dirty == 0 && stats.purged > 0);
    char *kept = late_malloc(100);
    CHECK(kept != NULL);
    CHECK(dlclose(library) == 0);
}

int main(int argc, char **argv) {
    CHECK(argc > 3);
    size_t taken = 0;
    while (2 + taken < (size_t)argc && dlopen(argv[2 + taken], RTLD_NOW | RTLD_LOCAL) != NULL) {
        taken++;
    }
    CHECK(2 + taken < (size_t)argc); /* none is left */
    say("taken", taken);
    use_library(argv[1]);
    /* Closed and opened again; threads end between the two. */
    use_library(argv[1]);
    say("used", 1);
    return 0;
}
