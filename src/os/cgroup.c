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

/* ---- CPU time ---- */

/* What one read of such a file gives, at most. */
#define GROUPS_MOST 4096

/* The number that text begins with, and where it ends. */
static uint64_t number_at(const char *text, const char **end) {
    uint64_t number = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        number = number * 10 + (uint64_t)(*text - '0');
    }
    *end = text;
    return number;
}

static double quota_of_folder(const char *folder) {
    uint64_t quota = number_in(folder, "cpu.cfs_quota_us"); /* -1: no limit */
    uint64_t period = number_in(folder, "cpu.cfs_period_us");
    if (quota == UINT64_MAX || period == UINT64_MAX) {
        /* Version 2: both in one file, as "150000 100000" or "max 100000". */
        char path[PATH_MOST + 32];
        char text[64];
        size_t length = strlen(folder);
        memcpy(path, folder, length);
        memcpy(path + length, "/cpu.max", sizeof "/cpu.max");
        if (file_read(path, text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9') {
            return __builtin_inf();
        }
        const char *end;
        quota = number_at(text, &end);
        period = *end == ' ' ? number_at(end + 1, &end) : 0;
    }
    return period > 0 ? (double)quota / (double)period : __builtin_inf();
}

/* The least that a group and those above it are allowed. The topmost counts, too: in a container, what is
 * mounted is its own group, and the groups' names may be those that they have outside. */
static double quota_of_groups(const char *root, const char *mount, const char *group, size_t group_length) {
    char folder[PATH_MOST];
    size_t root_length = strlen(root);
    size_t mount_length = strlen(mount);
    size_t top = root_length + mount_length;
    if (top + group_length >= sizeof folder) {
        return __builtin_inf();
    }
    memcpy(folder, root, root_length);
    memcpy(folder + root_length, mount, mount_length);
    memcpy(folder + top, group, group_length);
    folder[top + group_length] = '\0';
    double least = quota_of_folder(folder);
    for (char *slash = strrchr(folder, '/'); slash != NULL && slash >= folder + top;
         slash = strrchr(folder, '/')) {
        *slash = '\0';
        double quota = quota_of_folder(folder);
        least = quota < least ? quota : least;
    }
    return least;
}

/* Whether a list such as "cpu,cpuacct" has "cpu". */
static bool lists_cpu(const char *list, size_t length) {
    for (size_t at = 0; at < length; at++) {
        size_t next = at + strcspn(list + at, ",:");
        if (next - at == 3 && memcmp(list + at, "cpu", 3) == 0) {
            return true;
        }
        at = next;
    }
    return false;
}

double cgroup_cpu_quota_in(const char *root) {
    char text[GROUPS_MOST];
    double least = __builtin_inf();
    size_t length = strlen(root);
    char path[PATH_MOST];
    if (length + sizeof "/proc/self/cgroup" > sizeof path) {
        return least;
    }
    memcpy(path, root, length);
    memcpy(path + length, "/proc/self/cgroup", sizeof "/proc/self/cgroup");
    if (file_read(path, text, sizeof text) <= 0) {
        return least;
    }
    /* Each line is "number:controllers:/path"; version 2's names no controllers. Where the CPU shares a mount
     * of version 1 with others, "cpu" leads there as well. */
    for (const char *line = text; *line != '\0'; line += *line == '\n') {
        const char *controllers = line + strcspn(line, ":\n");
        controllers += *controllers == ':';
        size_t controllers_length = strcspn(controllers, ":\n");
        const char *group = controllers + controllers_length;
        group += *group == ':';
        size_t group_length = strcspn(group, "\n");
        double quota = __builtin_inf();
        if (*group == '/' && controllers_length == 0) {
            quota = quota_of_groups(root, MOUNT, group, group_length);
        } else if (*group == '/' && lists_cpu(controllers, controllers_length)) {
            quota = quota_of_groups(root, MOUNT "/cpu", group, group_length);
        }
        least = quota < least ? quota : least;
        line = group + group_length;
    }
    return least;
}

double cgroup_cpu_quota(void) {
    return cgroup_cpu_quota_in("");
}
