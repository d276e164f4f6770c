#include "os/cgroup.h"

#include "os/file.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOUNT     "/sys/fs/cgroup"
#define PATH_MOST 512

/* The number in folder/name; UINT64_MAX for "max" and where there is none. */
static uint64_t number_in(const char *folder, const char *name) {
    char path[PATH_MOST + 32];
    char text[64];
    size_t length = strlen(folder);
    memcpy(path, folder, length);
    path[length] = '/';
    memcpy(path + length + 1, name, strlen(name) + 1);
    if (file_read(path, text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9') {
        return UINT64_MAX;
    }
    uint64_t number = 0;
    for (const char *digit = text; *digit >= '0' && *digit <= '9'; digit++) {
        number = number * 10 + (uint64_t)(*digit - '0');
    }
    return number;
}

/* "some avg10=12.34 avg60=...": whether it is ten or more. */
static bool under_pressure(const char *folder) {
    char path[PATH_MOST + 32];
    char text[256];
    size_t length = strlen(folder);
    memcpy(path, folder, length);
    memcpy(path + length, "/memory.pressure", sizeof "/memory.pressure");
    if (file_read(path, text, sizeof text) <= 0) {
        return false;
    }
    const char *average = strstr(text, "avg10=");
    return average != NULL && average[6] != '0' && average[7] != '.';
}

/* The page cache's part, of memory.stat; 0 if it does not say. */
static uint64_t file_bytes(const char *folder) {
    char path[PATH_MOST + 32];
    char text[512];
    size_t length = strlen(folder);
    memcpy(path, folder, length);
    memcpy(path + length, "/memory.stat", sizeof "/memory.stat");
    if (file_read(path, text, sizeof text) <= 0) {
        return 0;
    }
    const char *line = strstr(text, "\nfile ");
    uint64_t number = 0;
    for (const char *digit = line == NULL ? "" : line + 6; *digit >= '0' && *digit <= '9'; digit++) {
        number = number * 10 + (uint64_t)(*digit - '0');
    }
    return number;
}

static bool is_near_limit(const char *folder) {
    uint64_t current = number_in(folder, "memory.current");
    if (current == UINT64_MAX) {
        return false;
    }
    /* What caches files is given up by the kernel before anybody has to wait. */
    uint64_t file = file_bytes(folder);
    current -= file < current ? file : current;
    uint64_t max = number_in(folder, "memory.max");
    uint64_t high = number_in(folder, "memory.high");
    uint64_t limit = max < high ? max : high;
    return limit != UINT64_MAX && current > limit / 10 * 9;
}

bool cgroup_folder_is_short(const char *folder) {
    return strlen(folder) < PATH_MOST && (is_near_limit(folder) || under_pressure(folder));
}

bool cgroup_memory_is_short(void) {
    char text[PATH_MOST];
    char folder[PATH_MOST + sizeof MOUNT];
    if (file_read("/proc/self/cgroup", text, sizeof text) <= 0) {
        return false;
    }
    /* Of version 2 there is one line, "0::/path". */
    const char *path = strncmp(text, "0::", 3) == 0 ? text + 3 : strstr(text, "\n0::");
    if (path == NULL) {
        return false;
    }
    path += path[0] == '\n' ? 4 : 0;
    size_t length = strcspn(path, "\n");
    if (sizeof MOUNT + length > PATH_MOST) {
        return false;
    }
    memcpy(folder, MOUNT, sizeof MOUNT - 1);
    memcpy(folder + sizeof MOUNT - 1, path, length);
    folder[sizeof MOUNT - 1 + length] = '\0';
    if (cgroup_folder_is_short(folder)) {
        return true;
    }
    /* Those above limit it too. The root has no limit. */
    for (char *slash = strrchr(folder, '/'); slash != NULL && slash >= folder + sizeof MOUNT - 1;
         slash = strrchr(folder, '/')) {
        *slash = '\0';
        if (is_near_limit(folder)) {
            return true;
        }
    }
    return false;
}
