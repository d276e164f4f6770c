/*
 * pairs N SIZE: calls malloc(SIZE) and free N times, and nothing else, to count the instructions of the two.
 * Under callgrind, the cost of one pair is the difference between two values of N, divided by the difference
 * of these.
 */
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    char *end[2] = {"?", "?"};
    unsigned long pairs = argc == 3 ? strtoul(argv[1], &end[0], 10) : 0;
    unsigned long size = argc == 3 ? strtoul(argv[2], &end[1], 10) : 0;
    if (*end[0] != '\0' || *end[1] != '\0') {
        fprintf(stderr, "usage: pairs N SIZE\n");
        return 2;
    }
    for (unsigned long i = 0; i < pairs; i++) {
        void *volatile block = malloc(size);
        free(block);
    }
    return 0;
}
