#include "tree.h"

#include "files.h"

#include <ctype.h>
#include <dirent.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

/* More new process ids than this since the last sample, and reading all of /proc is the cheaper way. */
enum { FEW_NEW_PIDS = 128 };

/* Searching may take this part of the time (2 %), however busy the machine is with starting processes. */
enum { SEARCH_PAUSE = 50 };

static bool add_process(struct tree *tree, pid_t pid, pid_t parent) {
    char path[64];
    if (tree->count == tree->capacity) {
        size_t capacity = tree->capacity == 0 ? 16 : 2 * tree->capacity;
        struct process *grown = realloc(tree->processes, capacity * sizeof *grown);
        if (grown == NULL) {
            return false;
        }
        tree->processes = grown;
        tree->capacity = capacity;
    }
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    tree->processes[tree->count++] = (struct process){.pid = pid, .parent = parent, .statm = fd};
    tree->seen++;
    return true;
}

static struct process *find_process(const struct tree *tree, pid_t pid) {
    for (size_t i = 0; i < tree->count; i++) {
        if (tree->processes[i].pid == pid) {
            return &tree->processes[i];
        }
    }
    return NULL;
}

/* /proc/loadavg, unless it is an imitation: those of containers have another newest process id. */
static int open_loadavg(void) {
    struct statfs fs;
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && (fstatfs(fd, &fs) != 0 || fs.f_type != PROC_SUPER_MAGIC)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* The newest process id of the machine, threads included; 0 when unknown. */
static pid_t newest_pid(const struct tree *tree) {
    char text[128];
    if (tree->loadavg < 0 || read_text(tree->loadavg, text, sizeof text) <= 0) {
        return 0;
    }
    const char *last = strrchr(text, ' ');
    return last == NULL ? 0 : (pid_t)strtol(last + 1, NULL, 10);
}

bool tree_open(struct tree *tree, pid_t root) {
    char text[32];
    *tree = (struct tree){.root = root,
                          .self = getpid(),
                          .last_pid = root,
                          .loadavg = open_loadavg(),
                          .page_kib = (uint64_t)sysconf(_SC_PAGESIZE) / 1024};
    if (read_path("/proc/sys/kernel/pid_max", text, sizeof text) > 0) {
        tree->pid_max = (pid_t)strtol(text, NULL, 10);
    }
    return add_process(tree, root, tree->self);
}

static long status_field(const char *status, const char *name) {
    const char *at = strstr(status, name);
    return at == NULL ? -1 : strtol(at + strlen(name), NULL, 10);
}

/* Adds pid if it is a process, not a thread, whose parent belongs to the tree. */
static void consider(struct tree *tree, pid_t pid) {
    char path[64];
    char status[1024];
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    if (pid == tree->self || find_process(tree, pid) != NULL || read_path(path, status, sizeof status) <= 0) {
        return;
    }
    pid_t parent = (pid_t)status_field(status, "\nPPid:");
    if (status_field(status, "\nTgid:") == pid &&
        (parent == tree->self || find_process(tree, parent) != NULL)) {
        add_process(tree, pid, parent);
    }
}

static void search_all(struct tree *tree) {
    DIR *proc = opendir("/proc");
    if (proc == NULL) {
        return;
    }
    /* In the order of their ids, so parents come before their children but after a wrap; those wait for a
     * sample. */
    for (const struct dirent *entry = readdir(proc); entry != NULL; entry = readdir(proc)) {
        if (isdigit((unsigned char)entry->d_name[0])) {
            consider(tree, (pid_t)strtol(entry->d_name, NULL, 10));
        }
    }
    closedir(proc);
}

/*
 * Only a process id given out since the last sample can be a new descendant, so only those are read. The
 * files /proc/PID/task/TID/children are in few kernels, and there is one for each thread.
 */
static void search(struct tree *tree) {
    pid_t newest = newest_pid(tree);
    if (newest != 0 && newest == tree->last_pid) {
        return;
    }
    uint64_t start = clock_ns(CLOCK_MONOTONIC);
    if (start < tree->next_search_ns) {
        return;
    }
    pid_t fresh = newest - tree->last_pid;
    bool wrapped = fresh < 0;
    if (wrapped) {
        fresh += tree->pid_max;
    }
    if (newest == 0 || fresh > FEW_NEW_PIDS || tree->pid_max == 0) {
        search_all(tree);
    } else {
        for (pid_t pid = tree->last_pid + 1; fresh > 0; fresh--, pid++) {
            consider(tree, wrapped && pid >= tree->pid_max ? pid - tree->pid_max : pid);
        }
    }
    tree->last_pid = newest;
    uint64_t end = clock_ns(CLOCK_MONOTONIC);
    tree->next_search_ns = end + SEARCH_PAUSE * (end - start);
}

/* False when the process is gone. */
static bool read_pages(struct process *process) {
    char text[128];
    if (read_text(process->statm, text, sizeof text) <= 0) {
        return false;
    }
    char *at = text;
    for (unsigned i = 0; i < 3; i++) {
        process->pages[i] = strtoull(at, &at, 10);
    }
    return true;
}

/* More are not touched between two reads of one memory. */
#define NEAR_PAGES 256

static bool is_near(const struct process *one, const struct process *other) {
    for (unsigned i = 0; i < 3; i++) {
        if (llabs((long long)(one->pages[i] - other->pages[i])) > NEAR_PAGES) {
            return false;
        }
    }
    return true;
}

static bool is_same(const struct process *one, const struct process *other) {
    return memcmp(one->pages, other->pages, sizeof one->pages) == 0;
}

/*
 * A child whose figures are its parent's, number for number, still shares the parent's memory: it is between
 * vfork and exec, or a fork that has written nothing yet. To count it would double the memory of every
 * program that calls system(). The figures may differ by what was touched between the two reads: so each is
 * read again, in turn, until two reads in a row agree.
 */
static bool mirrors_parent(const struct tree *tree, struct process *process) {
    struct process *parent = find_process(tree, process->parent);
    if (parent == NULL) {
        return false;
    }
    for (int turn = 0; turn < 8 && !is_same(parent, process) && is_near(parent, process); turn++) {
        if (!read_pages(turn % 2 == 0 ? parent : process)) {
            break; /* it has ended, which the next sample sees */
        }
    }
    return is_same(parent, process);
}

static void read_mark(struct tree *tree) {
    char path[64];
    char status[2048];
    snprintf(path, sizeof path, "/proc/%d/status", (int)tree->root);
    long mark_kib = read_path(path, status, sizeof status) > 0 ? status_field(status, "\nVmHWM:") : -1;
    if (mark_kib > 0 && (uint64_t)mark_kib > tree->mark_kib) {
        tree->mark_kib = (uint64_t)mark_kib;
    }
}

void tree_sample(struct tree *tree, uint64_t now_ns) {
    uint64_t pages = 0;
    search(tree);
    for (size_t i = 0; i < tree->count;) {
        if (read_pages(&tree->processes[i])) {
            i++;
        } else {
            close(tree->processes[i].statm);
            tree->processes[i] = tree->processes[--tree->count];
        }
    }
    for (size_t i = 0; i < tree->count; i++) {
        if (!mirrors_parent(tree, &tree->processes[i])) {
            pages += tree->processes[i].pages[1];
        }
    }
    if (pages == 0) {
        return; /* everything has ended and waits to be reaped */
    }
    if (tree->samples == 0) {
        tree->first_ns = now_ns;
    } else {
        tree->area += 0.5 * (double)(pages + tree->last_pages) * (double)(now_ns - tree->last_ns);
    }
    tree->samples++;
    tree->last_ns = now_ns;
    tree->last_pages = pages;
    tree->peak_pages = pages > tree->peak_pages ? pages : tree->peak_pages;
    if (tree->peak_pages * tree->page_kib <= tree->floor_kib) {
        read_mark(tree);
    }
}

double tree_average_pages(const struct tree *tree) {
    double sampled = (double)(tree->last_ns - tree->first_ns);
    return sampled > 0 ? tree->area / sampled : (double)tree->last_pages;
}
