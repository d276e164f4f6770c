/*
 * pairs N SIZE [beside]: calls malloc(SIZE) and free N times, and nothing else, to count the instructions of
 * the two. Under callgrind, the cost of one pair is the difference between two values of N, divided by the
 * difference of these. With `beside`, a second thread exists, and sleeps.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *sleep_on(void *unused) {
    pause();
    return unused;
}

int main(int argc, char **argv) {
    char *end[2] = {"?", "?"};
    int beside = argc == 4 && strcmp(argv[3], "beside") == 0;
    unsigned long pairs = argc == 3 + beside ? strtoul(argv[1], &end[0], 10) : 0;
    unsigned long size = argc == 3 + beside ? strtoul(argv[2], &end[1], 10) : 0;
    pthread_t thread;
    if (*end[0] != '\0' || *end[1] != '\0') {
        fprintf(stderr, "usage: pairs N SIZE [beside]\n");
        return 2;
    }
    if (beside && pthread_create(&thread, NULL, sleep_on, NULL) != 0) {
        fprintf(stderr, "pairs: no thread can be started\n");
        return 1;
    }
    for (unsigned long i = 0; i < pairs; i++) {
        void *volatile block = malloc(size);
        free(block);
    }
    return 0;
}
