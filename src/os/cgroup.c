#include "os/cgroup.h"

#include "os/file.h"

#include <stddef.h>
#include <string.h>

#define MOUNT      "/sys/fs/cgroup"
#define NAME_BYTES 32 /* of a file in a group's folder, at most */

/* A group's folder, with room behind it for the name of a file. */
struct group {
    size_t length;
    char path[FILE_LINE_BYTES + NAME_BYTES];
};

static bool append(struct group *group, const char *text, size_t length) {
    if (length >= FILE_LINE_BYTES - group->length) {
        return false;
    }
    memcpy(group->path + group->length, text, length);
    group->length += length;
    group->path[group->length] = '\0';
    return true;
}

/* The path of a file in the folder, until another one is asked for. */
static const char *file_in(struct group *group, const char *name) {
    group->path[group->length] = '/';
    memcpy(group->path + group->length + 1, name, strlen(name) + 1);
    return group->path;
}

/* The number that text begins with, and where it ends. */
static uint64_t number_at(const char *text, const char **end) {
    uint64_t number = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        number = number * 10 + (uint64_t)(*text - '0');
    }
    *end = text;
    return number;
}

/* The number in a file of the folder; UINT64_MAX for "max", "-1", and where there is none. */
static uint64_t number_in(struct group *group, const char *name) {
    char text[64];
    if (file_read(file_in(group, name), text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9') {
        return UINT64_MAX;
    }
    const char *end;
    return number_at(text, &end);
}

/* ---- the groups that a process is in ---- */

/* Stack space is scarce in a signal handler: one path serves the list of groups and, once that is open, them.
 */
struct walk {
    struct group group;
    const char *root;
    const char *controller;
    void (*visit)(void *context, struct group *group);
    void *context;
};

/* Whether a list such as "cpu,cpuacct" has a word. */
static bool lists(const char *list, size_t length, const char *word) {
    for (size_t at = 0; at < length; at++) {
        size_t next = at + strcspn(list + at, ",:");
        if (next - at == strlen(word) && memcmp(list + at, word, next - at) == 0) {
            return true;
        }
        at = next;
    }
    return false;
}

/*
 * A line is "number:controllers:/path"; version 2's names no controllers. Where a controller of version 1
 * shares a mount with others, its own name leads there as well. Visited are the group and those above it, and
 * the topmost, too: in a container, what is mounted is its own group, and the groups' names may be those that
 * they have outside.
 */
static void walk_line(void *context, const char *line) {
    struct walk *walk = context;
    struct group *group = &walk->group;
    const char *controllers = line + strcspn(line, ":");
    controllers += *controllers == ':';
    size_t length = strcspn(controllers, ":");
    const char *path = controllers + length;
    path += *path == ':';
    bool second = length == 0;
    group->length = 0;
    if (*path != '/' || (!second && !lists(controllers, length, walk->controller)) ||
        !append(group, walk->root, strlen(walk->root)) || !append(group, MOUNT, sizeof MOUNT - 1) ||
        (!second && (!append(group, "/", 1) || !append(group, walk->controller, strlen(walk->controller))))) {
        return;
    }
    size_t top = group->length;
    if (!append(group, path, strlen(path))) {
        return;
    }
    for (;;) {
        walk->visit(walk->context, group);
        if (group->length == top) {
            return;
        }
        do {
            group->length--;
        } while (group->path[group->length] != '/');
    }
}

static void visit_groups(const char *root, const char *controller,
                         void (*visit)(void *context, struct group *group), void *context) {
    struct walk walk = {.root = root, .controller = controller, .visit = visit, .context = context};
    if (append(&walk.group, root, strlen(root))) {
        file_each_line(file_in(&walk.group, "proc/self/cgroup"), walk_line, &walk);
    }
}

/* ---- memory ---- */

/* "some avg10=12.34 avg60=...": whether it is ten or more. */
bool cgroup_is_pressed(const char *path) {
    char text[256];
    if (file_read(path, text, sizeof text) <= 0) {
        return false;
    }
    const char *average = strstr(text, "avg10=");
    return average != NULL && average[6] != '0' && average[7] != '.';
}

/* What the kernel gives up by itself. */
static void add_reclaimable(void *context, const char *line) {
    /* Version 2's, and version 1's of a group with those below it. */
    static const char *const names[] = {"inactive_file", "active_file", "slab_reclaimable",
                                        "total_inactive_file", "total_active_file"};
    uint64_t *sums = context;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        uint64_t bytes = file_line_number(line, names[i]);
        sums[i < 3 ? 0 : 1] += bytes == UINT64_MAX ? 0 : bytes;
    }
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

struct memory_room {
    bool visited; /* the process's own group, of version 2, comes first */
    uint64_t bytes;
};

static void note_memory(void *context, struct group *group) {
    struct memory_room *room = context;
    if (!room->visited && cgroup_is_pressed(file_in(group, "memory.pressure"))) {
        room->bytes = 0;
    }
    room->visited = true;
    uint64_t current = number_in(group, "memory.current");
    uint64_t limit = least(number_in(group, "memory.max"), number_in(group, "memory.high"));
    bool second = current != UINT64_MAX;
    if (!second) {
        current = number_in(group, "memory.usage_in_bytes");
        limit = number_in(group, "memory.limit_in_bytes");
    }
    if (current == UINT64_MAX || limit == UINT64_MAX) {
        return;
    }
    uint64_t reclaimable[2] = {0, 0};
    file_each_line(file_in(group, "memory.stat"), add_reclaimable, reclaimable);
    uint64_t used = current - least(current, reclaimable[second ? 0 : 1]);
    uint64_t most = limit / 10 * 9;
    room->bytes = least(room->bytes, most > used ? most - used : 0);
}

uint64_t cgroup_memory_room_in(const char *root) {
    struct memory_room room = {false, UINT64_MAX};
    visit_groups(root, "memory", note_memory, &room);
    return room.bytes;
}

uint64_t cgroup_memory_room(void) {
    return cgroup_memory_room_in("");
}

/* ---- CPU time ---- */

static void note_quota(void *context, struct group *group) {
    double *least_quota = context;
    uint64_t quota = number_in(group, "cpu.cfs_quota_us"); /* -1: no limit */
    uint64_t period = number_in(group, "cpu.cfs_period_us");
    if (quota == UINT64_MAX || period == UINT64_MAX) {
        /* Version 2: both in one file, as "150000 100000" or "max 100000". */
        char text[64];
        if (file_read(file_in(group, "cpu.max"), text, sizeof text) <= 0 || text[0] < '0' || text[0] > '9') {
            return;
        }
        const char *end;
        quota = number_at(text, &end);
        period = *end == ' ' ? number_at(end + 1, &end) : 0;
    }
    double cpus = period > 0 ? (double)quota / (double)period : __builtin_inf();
    *least_quota = cpus < *least_quota ? cpus : *least_quota;
}

double cgroup_cpu_quota_in(const char *root) {
    double quota = __builtin_inf();
    visit_groups(root, "cpu", note_quota, &quota);
    return quota;
}

double cgroup_cpu_quota(void) {
    return cgroup_cpu_quota_in("");
}
