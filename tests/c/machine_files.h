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

/* A file, and the folders that it is in; a folder, if text is NULL. */
__attribute__((format(printf, 2, 3))) static inline void put(const char *text, const char *name, ...) {
    char path[256];
    va_list arguments;
    int length = snprintf(path, sizeof path, "%s", root);
    va_start(arguments, name);
    vsnprintf(path + length, sizeof path - (size_t)length, name, arguments);
    va_end(arguments);
    for (char *slash = strchr(path + length + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        CHECK(mkdir(path, 0700) == 0 || errno == EEXIST);
        *slash = '/';
    }
    if (text == NULL) { /* a folder */
        CHECK(mkdir(path, 0700) == 0 || errno == EEXIST);
        return;
    }
    FILE *file = fopen(path, "we");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK(fclose(file) == 0);
}

static inline int remove_one(const char *path, const struct stat *status, int type, struct FTW *where) {
    (void)status, (void)type;
    return where->level == 0 ? 0 : remove(path);
}

static inline void clear_machine(void) {
    CHECK(nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0);
}

#endif
