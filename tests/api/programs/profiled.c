/*
 * profiled CASE [FILE]: allocates known amounts in a few functions, for a heap profile. Built with -O2 and
 * without frame pointers, like most programs.
 *
 *   sites         20 MB each by small_site and by large_site, which stay; 60 MB by churn_site in three
 *                 threads, which do not
 *   switched FILE what during_site has, between two settings of the option, is written to FILE
 *   forked        the child has 10 MB more, of child_site
 *   signalled     signal_site allocates in a handler, on a stack of its own
 *   many          3.2 GB by churn_site in 64 threads, which share a CPU
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                   \
    do {                                                   \
        if (!(condition)) {                                \
            fprintf(stderr, "profiled: %s\n", #condition); \
            exit(1);                                       \
        }                                                  \
    } while (0)
/* Its own frame, whatever the compiler thinks of it. */
#define SITE         __attribute__((noinline, noclone))
#define STAY         __asm__ volatile("" ::: "memory")
#define MAX_KEPT     200000
#define MANY_THREADS 64
#define MANY_BLOCKS  3200000

static void *kept[MAX_KEPT];
static int kept_count;

static void keep(void *block) {
    CHECK(block != NULL && kept_count < MAX_KEPT);
    kept[kept_count++] = block;
}

SITE static void small_site(void) {
    for (int i = 0; i < 100000; i++) {
        keep(malloc(200));
    }
}

SITE static void large_site(void) {
    for (int i = 0; i < 100; i++) {
        keep(malloc(200000));
    }
}

SITE static void churn_site(int count) {
    for (int i = 0; i < count; i++) {
        void *block = malloc(1000);
        CHECK(block != NULL);
        STAY;
        free(block);
    }
}

SITE static void before_site(void) {
    for (int i = 0; i < 10000; i++) {
        keep(malloc(1000));
    }
}

SITE static void during_site(void) {
    for (int i = 0; i < 10000; i++) {
        keep(calloc(10, 100));
    }
}

SITE static void resized_site(void) {
    for (int i = 0; i < 10000; i++) {
        keep(realloc(NULL, 1000));
    }
}

SITE static void aligned_site(void) {
    for (int i = 0; i < 10000; i++) {
        void *block;
        CHECK(posix_memalign(&block, 64, 1024) == 0);
        keep(block);
    }
}

SITE static void child_site(void) {
    for (int i = 0; i < 10000; i++) {
        keep(malloc(1000));
    }
}

SITE static void signal_site(void) {
    for (int i = 0; i < 10000; i++) {
        keep(malloc(1000));
    }
}

SITE static void nest(int depth, void (*site)(void)) {
    if (depth > 0) {
        nest(depth - 1, site);
    } else {
        site();
    }
    STAY;
}

static void *churn(void *argument) {
    churn_site(20000);
    STAY;
    return argument;
}

static int sites(void) {
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, churn, NULL) == 0);
    }
    nest(10, small_site);
    nest(3, large_site);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    return 0;
}

static int switched(const char *path) {
    void *set_symbol = dlsym(RTLD_DEFAULT, "calm_set");
    void *write_symbol = dlsym(RTLD_DEFAULT, "calm_profile_write");
    CHECK(set_symbol != NULL && write_symbol != NULL);
    int (*set)(const char *, const char *);
    int (*write_profile)(const char *);
    memcpy(&set, &set_symbol, sizeof set);
    memcpy(&write_profile, &write_symbol, sizeof write_profile);
    CHECK(write_profile(path) == -1);
    nest(1, before_site);
    CHECK(set("profile", "1g") == 0);
    keep(malloc(1000)); /* now so much is left to the next sample, until that is drawn anew */
    CHECK(set("profile", "8k") == 0);
    nest(1, during_site);
    nest(1, resized_site);
    nest(1, aligned_site);
    CHECK(set("profile", "0") == 0);
    nest(1, before_site);
    CHECK(write_profile(path) == 0);
    while (kept_count > 0) {
        free(kept[--kept_count]);
    }
    return 0;
}

static int forked(void) {
    nest(1, small_site);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        nest(1, child_site);
        return 0;
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("child %d\n", (int)child);
    return 0;
}

static void handle(int number) {
    (void)number;
    nest(2, signal_site);
    STAY;
}

SITE static void raise_here(void) {
    CHECK(raise(SIGUSR1) == 0);
    STAY;
}

static int signalled(void) {
    static char stack[1 << 16];
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    CHECK(sigaltstack(&other, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    raise_here();
    return 0;
}

static void *run_in_thread(void *argument) {
    churn_site(MANY_BLOCKS / MANY_THREADS);
    STAY;
    return argument;
}

static int many(void) {
    cpu_set_t allowed;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    int first = 0;
    while (!CPU_ISSET(first, &allowed)) {
        first++;
    }
    CPU_ZERO(&allowed);
    CPU_SET(first, &allowed);
    CHECK(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
    pthread_t threads[MANY_THREADS];
    for (int i = 0; i < MANY_THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_in_thread, NULL) == 0);
    }
    for (int i = 0; i < MANY_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    return 0;
}

int main(int count, char **arguments) {
    const char *which = count > 1 ? arguments[1] : "";
    if (strcmp(which, "sites") == 0) {
        return sites();
    }
    if (strcmp(which, "switched") == 0 && count > 2) {
        return switched(arguments[2]);
    }
    if (strcmp(which, "forked") == 0) {
        return forked();
    }
    if (strcmp(which, "signalled") == 0) {
        return signalled();
    }
    if (strcmp(which, "many") == 0) {
        return many();
    }
    fprintf(stderr, "usage: profiled sites|switched FILE|forked|signalled|many\n");
    return 2;
}
