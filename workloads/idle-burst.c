/* Memory that a process keeps after its threads freed it and became idle. Threads allocate in a burst, write
 * every byte, free everything and then wait. Some seconds later, resident memory is compared with that
 * before the burst.
 *
 * Block sizes range from 16 bytes to 256 KiB. Each doubling occurs half as often as the one below, and
 * within it all sizes are equally likely, so that each of the 14 doublings has the same share of the bytes.
 *
 * Only these blocks are allocated: the program's own data is in a separate mapping that is resident before
 * the first reading, and reading the memory statistics does not allocate. */
#include "support.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char program_name[] = "idle-burst";

enum order { ORDER_LIFO, ORDER_FIFO, ORDER_RANDOM };
enum main_thread { MAIN_IDLE, MAIN_BUSY };

static const char *const order_names[] = {"lifo", "fifo", "random", NULL};
static const char *const main_names[] = {"idle", "busy", NULL};

enum {
    SMALLEST = 16,
    DOUBLINGS = 14,    /* from 16 bytes to 256 KiB */
    KEPT = 16,         /* blocks of 64 bytes that each thread holds from before the burst to its end */
    STACK = 256 << 10, /* of a thread: too small for a huge page */
    MOST_THREADS = 4096,
};

struct burst {
    unsigned long threads;
    unsigned long share; /* bytes of each thread */
    enum order order;
    /* All threads and the main one meet here between any two phases. */
    pthread_barrier_t phase;
};

struct worker {
    struct burst *burst;
    pthread_t thread;
    unsigned long number;
    void **blocks;
    unsigned long count;
};

/* In KiB, -1 where it is not known. */
struct reading {
    long rss;
    long cgroup;
};

static void *map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fail(program_name, "out of memory");
    }
    /* A huge page that the kernel makes of it later would look like memory of the allocator. */
    (void)madvise(memory, bytes, MADV_NOHUGEPAGE);
    memset(memory, 1, bytes);
    return memory;
}

static size_t next_size(unsigned long long *random) {
    int doubling = 0;
    do {
        unsigned long long bits = random_next(random);
        doubling = bits != 0 ? __builtin_ctzll(bits) : DOUBLINGS;
    } while (doubling >= DOUBLINGS);
    size_t least = (size_t)SMALLEST << doubling;
    return random_between(random, least, 2 * least - 1);
}

static unsigned long count_blocks(unsigned long number, unsigned long share) {
    unsigned long long random = number;
    unsigned long count = 0;
    for (unsigned long bytes = 0; bytes < share; bytes += next_size(&random)) {
        count++;
    }
    return count;
}

static void shuffle(void **blocks, unsigned long count, unsigned long long random) {
    for (unsigned long i = count; i > 1; i--) {
        unsigned long other = random_between(&random, 0, i - 1);
        void *block = blocks[i - 1];
        blocks[i - 1] = blocks[other];
        blocks[other] = block;
    }
}

static void next_phase(struct burst *burst) {
    (void)pthread_barrier_wait(&burst->phase);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    struct burst *burst = worker->burst;
    void *kept[KEPT];
    for (unsigned i = 0; i < KEPT; i++) {
        kept[i] = memset(checked(malloc(64), program_name), 1, 64);
    }
    next_phase(burst); /* first reading */
    next_phase(burst);
    unsigned long long random = worker->number;
    for (unsigned long i = 0; i < worker->count; i++) {
        size_t size = next_size(&random);
        worker->blocks[i] = memset(checked(malloc(size), program_name), 1, size);
    }
    next_phase(burst); /* reading of the peak */
    next_phase(burst);
    if (burst->order == ORDER_RANDOM) {
        shuffle(worker->blocks, worker->count, random);
    }
    for (unsigned long i = 0; i < worker->count; i++) {
        free(worker->blocks[burst->order == ORDER_LIFO ? worker->count - 1 - i : i]);
    }
    next_phase(burst);
    next_phase(burst); /* blocked in the kernel, until after the last reading */
    for (unsigned i = 0; i < KEPT; i++) {
        free(kept[i]);
    }
    return NULL;
}

/* The start of a small file, as text. */
static bool read_start(const char *path, char *text, size_t size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return false;
    }
    ssize_t length = read(file, text, size - 1);
    (void)close(file);
    text[length > 0 ? length : 0] = '\0';
    return length > 0;
}

static struct reading read_memory(const char *cgroup) {
    struct reading reading = {-1, -1};
    char text[256];
    char *rest = text;
    if (read_start("/proc/self/statm", text, sizeof text)) {
        (void)strtol(text, &rest, 10); /* the size; what is resident comes second */
        reading.rss = strtol(rest, NULL, 10) * (sysconf(_SC_PAGESIZE) / 1024);
    }
    char path[4096];
    if (cgroup != NULL && snprintf(path, sizeof path, "%s/memory.current", cgroup) < (int)sizeof path &&
        read_start(path, text, sizeof text)) {
        reading.cgroup = strtol(text, NULL, 10) / 1024;
    }
    return reading;
}

/* The folder of the cgroup (v2) that the process is in, if its memory is counted. */
static const char *find_cgroup(char *folder, size_t size) {
    static const char *const mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
    char text[4096];
    char path[4096 + 64];
    if (!read_start("/proc/self/cgroup", text, sizeof text)) {
        return NULL;
    }
    char *line = strncmp(text, "0::", 3) == 0 ? text : strstr(text, "\n0::");
    if (line == NULL) {
        return NULL;
    }
    line += line == text ? 3 : 4;
    line[strcspn(line, "\n")] = '\0';
    for (unsigned i = 0; i < sizeof mounts / sizeof mounts[0]; i++) {
        (void)snprintf(folder, size, "%s%s", mounts[i], strcmp(line, "/") == 0 ? "" : line);
        if (snprintf(path, sizeof path, "%s/memory.current", folder) < (int)sizeof path &&
            access(path, R_OK) == 0) {
            return folder;
        }
    }
    return NULL;
}

/* A main thread that goes on with its own small work, for a small part of the time. */
static void stay_busy(double seconds) {
    enum { AT_ONCE = 32 };
    unsigned long long random = 1;
    double end = now_seconds() + seconds;
    while (now_seconds() < end) {
        char *blocks[AT_ONCE];
        for (unsigned i = 0; i < AT_ONCE; i++) {
            blocks[i] = checked(malloc(random_between(&random, 16, 1024)), program_name);
            *blocks[i] = 1;
        }
        for (unsigned i = 0; i < AT_ONCE; i++) {
            free(blocks[i]);
        }
        sleep_seconds(1e-3);
    }
}

static struct worker *start(struct burst *burst) {
    pthread_attr_t attributes;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setstacksize(&attributes, STACK);
    struct worker *workers = map(burst->threads * sizeof *workers);
    for (unsigned long i = 0; i < burst->threads; i++) {
        workers[i] = (struct worker){.burst = burst, .number = i, .count = count_blocks(i, burst->share)};
        workers[i].blocks = map((workers[i].count + 1) * sizeof(void *));
    }
    if (pthread_barrier_init(&burst->phase, NULL, (unsigned)burst->threads + 1) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    for (unsigned long i = 0; i < burst->threads; i++) {
        if (pthread_create(&workers[i].thread, &attributes, work, &workers[i]) != 0) {
            fail(program_name, "cannot start a thread");
        }
    }
    return workers;
}

static void print_reading(const char *moment, struct reading reading) {
    printf("\"rss_%s_kib\": %ld, ", moment, reading.rss);
    if (reading.cgroup < 0) {
        printf("\"cgroup_%s_kib\": null, ", moment);
    } else {
        printf("\"cgroup_%s_kib\": %ld, ", moment, reading.cgroup);
    }
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long bytes = 1UL << 30;
    unsigned long seconds = 5;
    unsigned long order = ORDER_LIFO;
    unsigned long main_thread = MAIN_IDLE;
    unsigned long cgroup_path = 0;
    const struct option_spec options[] = {
        {"threads", "threads that allocate, free and become idle", OPTION_COUNT, &threads, 1, MOST_THREADS,
         NULL},
        {"bytes", "total bytes that the threads allocate", OPTION_COUNT, &bytes, 1, 1UL << 40, NULL},
        {"seconds", "from the last free to the final reading", OPTION_COUNT, &seconds, 0, 1000000, NULL},
        {"order", "free newest first, oldest first, or at random", OPTION_CHOICE, &order, 0, 0, order_names},
        {"main", "the main thread sleeps meanwhile, or keeps allocating a little", OPTION_CHOICE,
         &main_thread, 0, 0, main_names},
        {"cgroup", "folder of the memory.current to read (default: the process's cgroup)", OPTION_PATH,
         &cgroup_path, 0, 0, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads allocate and free a lot and become idle: how much memory does the process keep?",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    char own_cgroup[4096 + 32];
    const char *cgroup = (const char *)cgroup_path;
    if (cgroup == NULL) {
        cgroup = find_cgroup(own_cgroup, sizeof own_cgroup);
    }

    struct burst burst = {.threads = threads, .share = bytes / threads, .order = (enum order)order};
    struct worker *workers = start(&burst);
    unsigned long blocks = 0;
    for (unsigned long i = 0; i < threads; i++) {
        blocks += workers[i].count;
    }
    next_phase(&burst);
    struct reading before = read_memory(cgroup);
    next_phase(&burst);
    next_phase(&burst);
    struct reading peak = read_memory(cgroup);
    next_phase(&burst);
    next_phase(&burst);
    struct reading freed = read_memory(cgroup);
    if (main_thread == MAIN_BUSY) {
        stay_busy((double)seconds);
    } else {
        sleep_seconds((double)seconds);
    }
    struct reading after = read_memory(cgroup);
    next_phase(&burst);
    for (unsigned long i = 0; i < threads; i++) {
        (void)pthread_join(workers[i].thread, NULL);
    }

    printf("{\"workload\": \"idle-burst\", \"threads\": %lu, \"bytes\": %lu, \"blocks\": %lu, \"order\": "
           "\"%s\", "
           "\"main\": \"%s\", \"seconds\": %lu, ",
           threads, bytes, blocks, order_names[order], main_names[main_thread], seconds);
    print_reading("before", before);
    print_reading("peak", peak);
    print_reading("freed", freed);
    print_reading("after", after);
    printf("\"retained_kib\": %ld}\n", after.rss - before.rss);
    return 0;
}
