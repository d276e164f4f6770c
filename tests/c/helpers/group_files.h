/* Control groups of a machine made of files (machine_files.h). */
#ifndef CALM_TESTS_GROUP_FILES_H
#define CALM_TESTS_GROUP_FILES_H

#include <stddef.h>
#include <unistd.h>

#include "machine_files.h"

/* A file of a group's folder; NULL: there is none. */
static inline void put_group(const char *group, const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "/sys/fs/cgroup/%s/%s", group, name);
    if (text != NULL) {
        put(text, "%s", path);
    } else {
        unlink(machine_path(path));
    }
}

/* A file of pressure by which some wait for this percentage of the time. */
#define SOME(average)                                                                    \
    "some avg10=" average " avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 " \
    "avg300=0.00 total=0\n"

#endif
