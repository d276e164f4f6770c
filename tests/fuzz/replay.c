/*
 * Runs a fuzz target on files, without a fuzzer: each file that is named, and each of a folder that is.
 * Prints the name of each before it runs, so that the last line tells which one failed.
 */
#include "check.h"

#include <dirent.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_INPUT_BYTES ((size_t)1 << 20)
#define MAX_PATH_BYTES  4096

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

static size_t runs;

static void run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    uint8_t *all = malloc(MAX_INPUT_BYTES);
    CHECK(all != NULL);
    size_t count = fread(all, 1, MAX_INPUT_BYTES, file);
    fclose(file);
    /* Of the exact size, so that a sanitizer sees what is read beyond it. */
    uint8_t *bytes = malloc(count == 0 ? 1 : count);
    CHECK(bytes != NULL);
    memcpy(bytes, all, count);
    free(all);
    printf("%s\n", path);
    fflush(stdout);
    LLVMFuzzerTestOneInput(bytes, count);
    free(bytes);
    runs++;
}

static int is_input(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

static void run_folder(const char *path) {
    struct dirent **entries;
    int count = scandir(path, &entries, is_input, alphasort);
    CHECK(count >= 0);
    for (int i = 0; i < count; i++) {
        char name[MAX_PATH_BYTES];
        CHECK(snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name) < (int)sizeof name);
        run_file(name);
        free(entries[i]);
    }
    free(entries);
}

int main(int count, char **arguments) {
    for (int i = 1; i < count; i++) {
        struct stat status;
        CHECK(stat(arguments[i], &status) == 0);
        if (S_ISDIR(status.st_mode)) {
            run_folder(arguments[i]);
        } else {
            run_file(arguments[i]);
        }
    }
    CHECK(runs > 0);
    printf("%zu inputs\n", runs);
    return 0;
}
