#include "os/cgroup.h"

#include "base/size.h"
#include "os/file.h"
#include "os/text.h"

#include <string.h>

#define MOUNT          "/sys/fs/cgroup"
#define MAX_NAME_BYTES 32 /* the longest name of a file in a group's folder */

/* ---- the groups that a process is in ---- */

/* A signal handler has little stack space. One buffer therefore holds first the
 * path of the list of groups, and, once that file is open, the paths of the
 * groups. */
struct walk {
    const char *root;
    const char *controller;
    void (*visit)(struct walk *walk);
    void *result;
    size_t length; /* of the current group's folder, in `path` */
    char path[FILE_MAX_PATH + MAX_NAME_BYTES];
};

/* Returns the path of a file in the current folder. It is valid until the next
 * call. */
static const char *cgroup_path(struct walk *walk, const char *name) {
    walk->path[walk->length] = '/';
    memcpy(walk->path + walk->length + 1, name, strlen(name) + 1);
    return walk->path;
}

/* Returns the number in a file of the current folder. Returns UINT64_MAX for
 * "max", for "-1", and if the file has no number. */
static uint64_t number_in(struct walk *walk, const char *name) {
    return file_read_number(cgroup_path(walk, name));
}

/* Returns whether a list such as "cpu,cpuacct:" contains a word. */
static bool lists(const char *list, const char *word) {
    for (;;) {
        size_t length = strcspn(list, ",:");
        if (length == strlen(word) && memcmp(list, word, length) == 0) {
            return true;
        }
        if (list[length] != ',') {
            return false;
        }
        list += length + 1;
    }
}

/*
 * A line is "number:controllers:/path"; the line of version 2 names no
 * controllers. If several controllers of version 1 share a mount, each
 * controller's name leads to it.
 *
 * Visits the group of the line, the groups above it, and the topmost one. In a
 * container the mounted folder may be the process's own group, and the path may
 * be the group's name outside of the container.
 */
static bool walk_line(void *context, const char *line) {
    struct walk *walk = context;
    const char *controllers = line + strcspn(line, ":");
    controllers += *controllers == ':';
    bool second = *controllers == ':';
    const char *path = controllers + strcspn(controllers, ":");
    path += *path == ':';
    if (*path != '/' || (!second && !lists(controllers, walk->controller)) ||
        *text_print(walk->path, FILE_MAX_PATH, "%s" MOUNT "%s%s%s", walk->root, second ? "" : "/",
                    second ? "" : walk->controller, path) == '\0') {
        return true;
    }
    walk->length = strlen(walk->path);
    size_t top = walk->length - strlen(path);
    for (;;) {
        walk->visit(walk);
        if (walk->length == top) {
            return true;
        }
        do {
            walk->length--;
        } while (walk->path[walk->length] != '/');
    }
}

static void visit_groups(const char *root, const char *controller, void (*visit)(struct walk *walk),
                         void *result) {
    struct walk walk = {.root = root, .controller = controller, .visit = visit, .result = result};
    const char *list = text_print(walk.path, sizeof walk.path, "%s/proc/self/cgroup", root);
    file_each_part(list, '\n', walk_line, &walk);
}

/* ---- memory ---- */

/* The number of the line "some avg10=12.34 ..." is the percentage of the last
 * ten seconds in which some task waited. */
bool cgroup_is_under_pressure(const char *path) {
    char text[256];
    if (file_read(path, text, sizeof text) <= 0) {
        return false;
    }
    const char *average = strstr(text, "avg10=");
    return average != NULL && average[6] != '0' && average[7] != '.';
}

struct available {
    bool visited; /* version 2 visits the process's own group first */
    uint64_t bytes;
    uint64_t limit;
};

static void note_memory(struct walk *walk) {
    struct available *available = walk->result;
    if (!available->visited && cgroup_is_under_pressure(cgroup_path(walk, "memory.pressure"))) {
        available->bytes = 0;
    }
    available->visited = true;
    uint64_t current = number_in(walk, "memory.current");
    uint64_t limit = size_min(number_in(walk, "memory.max"), number_in(walk, "memory.high"));
    bool second = current != UINT64_MAX;
    if (!second) {
        current = number_in(walk, "memory.usage_in_bytes");
        limit = number_in(walk, "memory.limit_in_bytes");
    }
    if (current == UINT64_MAX || limit == UINT64_MAX) {
        return;
    }
    /* The kernel reclaims this memory without making a task wait. In version 1
     * the total_ fields include the groups below. */
    static const char *const names[2][3] = {{"total_inactive_file", "total_active_file"},
                                            {"inactive_file", "active_file", "slab_reclaimable"}};
    uint64_t bytes[3] = {0};
    file_read_named_numbers(cgroup_path(walk, "memory.stat"), names[second], bytes, second ? 3 : 2);
    available->limit = size_min(available->limit, limit);
    uint64_t used = size_minus(current, bytes[0] + bytes[1] + bytes[2]);
    available->bytes = size_min(available->bytes, size_minus(limit / 10 * 9, used));
}

uint64_t cgroup_available_bytes(const char *root, uint64_t *limit) {
    struct available available = {false, UINT64_MAX, UINT64_MAX};
    visit_groups(root, "memory", note_memory, &available);
    *limit = available.limit;
    return available.bytes;
}

/* ---- CPU time ---- */

static void note_quota(struct walk *walk) {
    double *min_quota = walk->result;
    uint64_t quota = number_in(walk, "cpu.cfs_quota_us"); /* -1: no limit */
    uint64_t period = number_in(walk, "cpu.cfs_period_us");
    if (quota == UINT64_MAX || period == UINT64_MAX) {
        /* Version 2 has both numbers in one file, as "150000 100000" or "max
         * 100000". */
        char text[64];
        if (file_read(cgroup_path(walk, "cpu.max"), text, sizeof text) <= 0) {
            return;
        }
        const char *end = parse_number(text, &quota);
        if (end == text || *end != ' ') {
            return;
        }
        parse_number(end + 1, &period);
    }
    double cpus = period > 0 ? (double)quota / (double)period : __builtin_inf();
    *min_quota = cpus < *min_quota ? cpus : *min_quota;
}

double cgroup_cpu_quota(const char *root) {
    double quota = __builtin_inf();
    visit_groups(root, "cpu", note_quota, &quota);
    return quota;
}
