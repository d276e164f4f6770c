/*
 * Does what the lines of its input say, and answers each with its process id, so that a test that watches it
 * from outside decides what happens when:
 *
 *     hold COUNT SIZE     allocates and keeps so many blocks, and writes to each page of them
 *     free                frees them all
 *     free-every N        frees each Nth of them
 *     large               allocates and frees a block that no cache holds
 *     busy                the same again and again, until the next line comes
 *     fork                the child goes on with the input, and the parent waits for it
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char **blocks;
static size_t held;

static void large(void) {
    char *block = malloc(3 << 20);
    memset(block, 1, 4096);
    free(block);
}

static void hold(size_t count, size_t size) {
    blocks = realloc(blocks, (held + count) * sizeof *blocks);
    for (size_t i = 0; i < count; i++) {
        char *block = malloc(size);
        for (size_t at = 0; at < size; at += 4096) {
            block[at] = 1;
        }
        blocks[held++] = block;
    }
}

static void free_every(size_t step) {
    for (size_t i = 0; i < held; i += step) {
        free(blocks[i]);
        blocks[i] = NULL;
    }
}

static void answer(void) {
    char text[32];
    int length = snprintf(text, sizeof text, "%d\n", (int)getpid());
    if (write(1, text, (size_t)length) != length) {
        exit(1);
    }
}

int main(void) {
    char line[80];
    setvbuf(stdin, NULL, _IONBF, 0);
    answer();
    while (fgets(line, sizeof line, stdin) != NULL) {
        size_t count, size;
        if (sscanf(line, "hold %zu %zu", &count, &size) == 2) {
            hold(count, size);
        } else if (sscanf(line, "free-every %zu", &count) == 1) {
            free_every(count);
        } else if (strcmp(line, "free\n") == 0) {
            free_every(1);
            held = 0;
        } else if (strcmp(line, "large\n") == 0) {
            large();
        } else if (strcmp(line, "busy\n") == 0) {
            answer();
            struct pollfd input = {.fd = 0, .events = POLLIN};
            while (poll(&input, 1, 1) == 0) {
                large();
            }
            continue;
        } else if (strcmp(line, "fork\n") == 0) {
            int status;
            if (fork() != 0) {
                return wait(&status) < 0;
            }
        } else {
            return 2;
        }
        answer();
    }
    return 0;
}
