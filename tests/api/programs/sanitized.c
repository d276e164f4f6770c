/* For sanitizers that have their own allocator: sanitized [fault]. With fault it makes an error that each of
 * them detects. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static volatile int shared;

static void *work(void *unused) {
    for (size_t i = 1; i < 2000; i++) {
        char *block = i % 3 == 0 ? calloc(1, i) : malloc(i);
        block = realloc(block, 2 * i);
        memset(block, 1, 2 * i);
        void *aligned;
        if (posix_memalign(&aligned, 64, i) == 0) {
            free(aligned);
        }
        free(block);
    }
    return unused;
}

/* Often: of two accesses at the same moment ThreadSanitizer may miss each. */
static void *write_shared(void *unused) {
    for (int i = 0; i < 1000; i++) {
        shared = shared + 1;
    }
    return unused;
}

int main(int argc, char **argv) {
    (void)argv;
    pthread_t thread;
    pthread_create(&thread, NULL, argc > 1 ? write_shared : work, NULL);
    if (argc > 1) {
        write_shared(NULL);
    } else {
        work(NULL);
    }
    pthread_join(thread, NULL);
    char *text = strdup("lived");
    if (argc > 1) {
        free(text); /* and used: */
    }
    puts(text);
    if (argc == 1) {
        free(text);
    }
    static char *volatile lost;
    lost = argc > 1 ? malloc(12345) : NULL;
    lost = NULL;
    return 0;
}
