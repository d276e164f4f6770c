/* The resident memory of a process and all its descendants, over time. */
#ifndef CALM_PROBE_TREE_H
#define CALM_PROBE_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct process {
    pid_t pid;
    pid_t parent;
    int statm;         /* kept open: a sample costs one pread */
    uint64_t pages[3]; /* as statm has them now: size, resident, shared */
};

struct tree {
    struct process *processes;
    size_t count;
    size_t capacity;
    unsigned seen; /* processes ever found, the first included */

    pid_t root;
    uint64_t page_kib;
    pid_t self; /* the subreaper, so the parent of every orphan */
    pid_t last_pid;
    pid_t pid_max;
    int loadavg; /* its last field is the newest process id; -1: cannot be believed here */
    uint64_t next_search_ns;

    uint64_t samples;
    uint64_t peak_pages;
    uint64_t floor_kib; /* what a parent reads of a child's largest size is never lower: see tree_sample */
    uint64_t mark_kib;  /* the root's own, as last read; 0: never */
    uint64_t last_pages;
    uint64_t first_ns;
    uint64_t last_ns;
    double area; /* page nanoseconds */
};

/* root is a child of the calling process, which is a subreaper. Returns false when root cannot be watched. */
bool tree_open(struct tree *tree, pid_t root);

/*
 * Costs a pread for each process and one more, as long as no process is born on the machine. The largest
 * resident size that the kernel reports of a child includes what it had before its exec: floor_kib. So as
 * long as no sample was larger, the root's mark since its exec is read as well.
 */
void tree_sample(struct tree *tree, uint64_t now_ns);

/* The mean over the time from the first sample to the last. */
double tree_average_pages(const struct tree *tree);

#endif
