/* Blocks of which the program writes one page each: what they make resident. Prints bytes that are resident
 * beyond those at the start, while all blocks live. Arguments: the bytes of blocks that are filled and freed
 * before, 1 GiB three times (0: none); the number and the bytes of the sparse blocks; calloc or malloc; how
 * often these are freed and taken again; trim, or keep free memory (then growth counts from the burst's end).
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST ((size_t)20000)

static char *blocks[MOST];

static long resident(void) {
    char text[128] = "";
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fgets(text, sizeof text, file) == NULL) {
        abort();
    }
    fclose(file);
    return strtol(strchr(text, ' '), NULL, 10) * sysconf(_SC_PAGESIZE);
}

static void burst(size_t bytes) {
    size_t count = bytes == 0 ? 0 : ((size_t)1 << 30) / bytes;
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < count; i++) {
            blocks[i] = malloc(bytes);
            memset(blocks[i], 1, bytes);
        }
        for (size_t i = 0; i < count; i++) {
            free(blocks[i]);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 7) {
        return 2;
    }
    size_t count = strtoul(argv[2], NULL, 10);
    size_t bytes = strtoul(argv[3], NULL, 10);
    int renewals = atoi(argv[5]);
    int trims = strcmp(argv[6], "trim") == 0;
    long before = resident();
    burst(strtoul(argv[1], NULL, 10));
    before = trims ? before : resident();
    for (int round = 0; round <= renewals; round++) {
        for (size_t i = 0; i < count; i++) {
            free(blocks[i] = round == 0 ? NULL : blocks[i]);
        }
        for (size_t i = 0; i < count; i++) {
            blocks[i] = strcmp(argv[4], "calloc") == 0 ? calloc(1, bytes) : malloc(bytes);
            blocks[i][bytes / 3] = 1;
        }
    }
    if (trims) {
        malloc_trim(0);
    }
    printf("%ld\n", resident() - before);
    return 0;
}
