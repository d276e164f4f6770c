/*
 * heap_program: allocates as the lines of its standard input say, and answers each with its number.
 *
 *   keep COUNT BYTES   by keep_site, until drop
 *   drop               frees all of that
 *   churn COUNT BYTES  by churn_site, each freed at once
 *   threads COUNT      start; each keeps and frees blocks of many sizes until join
 *   join
 *   vanish             ends by _exit
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SITE         __attribute__((noinline, noclone))
#define STAY         __asm__ volatile("" ::: "memory")
#define KEPT_MOST    200000
#define THREADS_MOST 16
#define HELD         100

static void *kept[KEPT_MOST];
static int kept_count;
static pthread_t threads[THREADS_MOST];
static int thread_count;
static _Atomic(int) stop;

static void *checked(void *block) {
    if (block == NULL) {
        exit(3);
    }
    return block;
}

SITE static void keep_site(int count, size_t bytes) {
    for (int i = 0; i < count && kept_count < KEPT_MOST; i++) {
        kept[kept_count++] = checked(malloc(bytes));
    }
    STAY;
}

SITE static void churn_site(int count, size_t bytes) {
    for (int i = 0; i < count; i++) {
        void *block = checked(malloc(bytes));
        STAY;
        free(block);
    }
}

SITE static void *thread_site(unsigned *random) {
    *random = *random * 1103515245 + 12345;
    void *block = checked(malloc(1 + (*random >> 8) % 300000));
    STAY;
    return block;
}

static void *work(void *argument) {
    unsigned random = (unsigned)(size_t)argument;
    void *held[HELD] = {0};
    for (int i = 0; !atomic_load(&stop); i++) {
        free(held[i % HELD]);
        held[i % HELD] = thread_site(&random);
    }
    for (int i = 0; i < HELD; i++) {
        free(held[i]);
    }
    return NULL;
}

int main(void) {
    char line[100];
    for (int number = 1; fgets(line, sizeof line, stdin) != NULL; number++) {
        char word[20];
        int count = 0;
        size_t bytes = 0;
        if (sscanf(line, "%19s %d %zu", word, &count, &bytes) < 1) {
            return 2;
        }
        if (strcmp(word, "keep") == 0) {
            keep_site(count, bytes);
        } else if (strcmp(word, "drop") == 0) {
            while (kept_count > 0) {
                free(kept[--kept_count]);
            }
        } else if (strcmp(word, "churn") == 0) {
            churn_site(count, bytes);
        } else if (strcmp(word, "threads") == 0) {
            atomic_store(&stop, 0);
            for (thread_count = 0; thread_count < count && thread_count < THREADS_MOST; thread_count++) {
                pthread_create(&threads[thread_count], NULL, work, (void *)(size_t)thread_count);
            }
        } else if (strcmp(word, "join") == 0) {
            atomic_store(&stop, 1);
            while (thread_count > 0) {
                pthread_join(threads[--thread_count], NULL);
            }
        } else if (strcmp(word, "vanish") == 0) {
            _exit(5);
        } else {
            return 2;
        }
        printf("%d\n", number);
        fflush(stdout);
    }
    return 0;
}
