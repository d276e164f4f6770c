/* Machines made of files, for what reads /sys and /proc below a folder that stands for "/". */
#ifndef CALM_TESTS_MACHINE_FILES_H
#define CALM_TESTS_MACHINE_FILES_H

#include <errno.h>
#include <ftw.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "check.h"

/* mkdtemp makes it; what is in it goes by clear_machine. */
static char root[] = "/tmp/calm-test-machine-XXXXXX";

/* The path of a file of the machine, until the next call. */
static inline const char *machine_path(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s%s", root, name);
    return path;
}

/* A file of a machine, and the folders that it is in; a folder, if text is NULL. */
__attribute__((format(printf, 3, 4))) static inline void put_at(const char *machine, const char *text,
                                                                const char *name, ...) {
    char path[256];
    va_list arguments;
    int length = snprintf(path, sizeof path, "%s", machine);
    va_start(arguments, name);
    vsnprintf(path + length, sizeof path - (size_t)length, name, arguments);
    va_end(arguments);
    for (char *slash = strchr(path + length + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        CHECK(mkdir(path, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
    if (text == NULL) { /* a folder */
        CHECK(mkdir(path, 0755) == 0 || errno == EEXIST);
        return;
    }
    FILE *file = fopen(path, "we");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK(fclose(file) == 0);
}

#define put(...) put_at(root, __VA_ARGS__)

/* One of CPU 0's caches, with lines of 64 bytes. */
static inline void put_cache_at(const char *machine, unsigned index, const char *level, const char *type,
                                const char *size, const char *ways, const char *cpus) {
#define INDEX "/sys/devices/system/cpu/cpu0/cache/index%u/"
    put_at(machine, level, INDEX "level", index);
    put_at(machine, type, INDEX "type", index);
    put_at(machine, size, INDEX "size", index);
    put_at(machine, ways, INDEX "ways_of_associativity", index);
    put_at(machine, "64\n", INDEX "coherency_line_size", index);
    put_at(machine, cpus, INDEX "shared_cpu_list", index);
#undef INDEX
}

#define put_cache(...) put_cache_at(root, __VA_ARGS__)

static inline int remove_one(const char *path, const struct stat *status, int type, struct FTW *where) {
    (void)status, (void)type;
    return where->level == 0 ? 0 : remove(path);
}

static inline void clear_machine_at(const char *machine) {
    CHECK(nftw(machine, remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0);
}

static inline void clear_machine(void) {
    clear_machine_at(root);
}

#endif
