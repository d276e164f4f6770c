#include "os/topology.h"

#include "os/file.h"
#include "os/syscall.h"
#include "os/text.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* Fewer ticks than these between two looks say nothing. */
#define TICKS_LEAST 5

/* What counts beside the busiest CPU of the process: a quarter of it. */
#define BUSY_SHARE 4

/* More levels of cache than there are: L1 has two. */
#define CACHE_INDEX_MOST 5

/* ---- sets ---- */

unsigned cpu_set_count(const struct cpu_set *set) {
    unsigned count = 0;
    for (size_t i = 0; i < CPUS_MOST / 64; i++) {
        count += (unsigned)__builtin_popcountll(set->words[i]);
    }
    return count;
}

unsigned cpu_set_next(const struct cpu_set *set, unsigned from) {
    for (unsigned word = from / 64; word < CPUS_MOST / 64; word++) {
        uint64_t rest = set->words[word] & (word == from / 64 ? ~(uint64_t)0 << from % 64 : ~(uint64_t)0);
        if (rest != 0) {
            return word * 64 + (unsigned)__builtin_ctzll(rest);
        }
    }
    return CPUS_MOST;
}

/* ---- threads and CPUs ---- */

bool cpu_affinity(int thread, struct cpu_set *set) {
    memset(set, 0, sizeof *set);
    return os_syscall(SYS_sched_getaffinity, thread, sizeof *set, (long)set, 0, 0, 0) > 0;
}

bool cpu_pin(unsigned cpu) {
    struct cpu_set one = {0};
    cpu_set_add(&one, cpu);
    return os_syscall(SYS_sched_setaffinity, 0, sizeof one, (long)&one, 0, 0, 0) == 0;
}

/* ---- files of any length, a piece at a time ---- */

struct reader {
    long descriptor;
    long at;
    long filled;
    _Alignas(8) char bytes[1024];
};

static bool reader_open(struct reader *reader, struct text *path) {
    *reader = (struct reader){.descriptor = -1};
    if (text_end(path)) {
        reader->descriptor =
            os_syscall(SYS_openat, AT_FDCWD, (long)path->bytes, O_RDONLY | O_CLOEXEC, 0, 0, 0);
    }
    return reader->descriptor >= 0;
}

static void reader_close(struct reader *reader) {
    os_syscall(SYS_close, reader->descriptor, 0, 0, 0, 0, 0);
}

/* The next byte without taking it; -1 at the end. */
static int reader_peek(struct reader *reader) {
    if (reader->at == reader->filled) {
        long length;
        do {
            length = os_syscall(SYS_read, reader->descriptor, (long)reader->bytes, (long)sizeof reader->bytes,
                                0, 0, 0);
        } while (length == -EINTR);
        reader->at = 0;
        reader->filled = length > 0 ? length : 0;
        if (length <= 0) {
            return -1;
        }
    }
    return (unsigned char)reader->bytes[reader->at];
}

static int reader_next(struct reader *reader) {
    int byte = reader_peek(reader);
    reader->at += byte >= 0;
    return byte;
}

/* Adds a digit, and stays at the most there is. */
static uint64_t with_digit(uint64_t number, int digit) {
    return number > (UINT64_MAX - 9) / 10 ? UINT64_MAX : number * 10 + (uint64_t)(digit - '0');
}

static bool is_digit(int byte) {
    return byte >= '0' && byte <= '9';
}

/* False if none is next. */
static bool reader_number(struct reader *reader, uint64_t *number) {
    if (!is_digit(reader_peek(reader))) {
        return false;
    }
    *number = 0;
    while (is_digit(reader_peek(reader))) {
        *number = with_digit(*number, reader_next(reader));
    }
    return true;
}

/* Takes what is next as far as it is this; whether it is all of it. */
static bool reader_word(struct reader *reader, const char *word) {
    while (*word != '\0' && reader_peek(reader) == *word) {
        reader_next(reader);
        word++;
    }
    return *word == '\0';
}

/* Adds a list such as "0-3,8-11", as far as it is one. */
static void reader_list(struct reader *reader, struct cpu_set *set) {
    uint64_t first;
    while (reader_number(reader, &first)) {
        uint64_t last = first;
        if (reader_peek(reader) == '-') {
            reader_next(reader);
            if (!reader_number(reader, &last)) {
                return;
            }
        }
        for (uint64_t cpu = first; cpu <= last && cpu < CPUS_MOST; cpu++) {
            cpu_set_add(set, (unsigned)cpu);
        }
        if (reader_next(reader) != ',') {
            return;
        }
    }
}

/* ---- where CPUs lie ---- */

static bool open_of_cpu(struct reader *reader, const char *root, unsigned cpu, const char *name) {
    struct text path;
    path.length = 0;
    text_string(&path, root);
    text_string(&path, "/sys/devices/system/cpu/cpu");
    text_number(&path, cpu);
    text_string(&path, name);
    return reader_open(reader, &path);
}

/* The empty set, and false, where there is no list. */
static bool list_of_cpu(const char *root, unsigned cpu, const char *name, struct cpu_set *set) {
    struct reader reader;
    memset(set, 0, sizeof *set);
    if (!open_of_cpu(&reader, root, cpu, name)) {
        return false;
    }
    reader_list(&reader, set);
    reader_close(&reader);
    return cpu_set_next(set, 0) < CPUS_MOST;
}

bool topology_siblings(const char *root, unsigned cpu, struct cpu_set *siblings) {
    bool listed = list_of_cpu(root, cpu, "/topology/thread_siblings_list", siblings);
    cpu_set_add(siblings, cpu);
    return listed;
}

/* The kernel says -1 where the firmware did not say. */
static uint32_t socket_of(const char *root, unsigned cpu) {
    struct reader reader;
    uint64_t socket = 0;
    if (!open_of_cpu(&reader, root, cpu, "/topology/physical_package_id")) {
        return 0;
    }
    if (!reader_number(&reader, &socket) || socket > INT32_MAX) {
        socket = 0;
    }
    reader_close(&reader);
    return (uint32_t)socket;
}

static uint32_t cache_of(const char *root, unsigned cpu, uint32_t socket) {
    /* They are listed from the CPU outwards. */
    char name[] = "/cache/index0/shared_cpu_list";
    struct cpu_set sharing;
    for (int index = CACHE_INDEX_MOST; index >= 0; index--) {
        name[sizeof "/cache/index" - 1] = (char)('0' + index);
        if (list_of_cpu(root, cpu, name, &sharing)) {
            return cpu_set_next(&sharing, 0);
        }
    }
    return CPUS_MOST + socket;
}

struct cpu_site topology_site(const char *root, unsigned cpu) {
    struct cpu_set siblings;
    topology_siblings(root, cpu, &siblings);
    uint32_t socket = socket_of(root, cpu);
    return (struct cpu_site){
        .core = cpu_set_next(&siblings, 0), .cache = cache_of(root, cpu, socket), .socket = socket};
}

/* ---- how busy CPUs are ---- */

/* The columns of a line of /proc/stat that make up all of a CPU's time: user, nice, system, idle, iowait,
 * irq, softirq, steal. Those that follow are parts of the first two. */
enum { COLUMN_IDLE = 3, COLUMN_IOWAIT = 4, COLUMNS = 8 };

static void skip_line(struct reader *reader) {
    int byte;
    do {
        byte = reader_next(reader);
    } while (byte >= 0 && byte != '\n');
}

static void look_at_cpu(struct reader *reader, struct cpu_times *times, unsigned cpu) {
    for (; times->cpus <= cpu; times->cpus++) {
        times->of[times->cpus].idle = 0;
        times->of[times->cpus].total = 0;
    }
    for (int column = 0; column < COLUMNS; column++) {
        uint64_t ticks;
        while (reader_peek(reader) == ' ') {
            reader_next(reader);
        }
        if (!reader_number(reader, &ticks)) {
            return;
        }
        times->of[cpu].total += ticks;
        if (column == COLUMN_IDLE || column == COLUMN_IOWAIT) {
            times->of[cpu].idle += ticks;
        }
    }
}

bool cpu_times_look(const char *root, struct cpu_times *times) {
    struct reader reader;
    struct text path;
    times->cpus = 0;
    path.length = 0;
    text_string(&path, root);
    text_string(&path, "/proc/stat");
    if (!reader_open(&reader, &path)) {
        return false;
    }
    /* The lines of CPUs come first, in order; behind them is more than anybody wants to read. */
    while (reader_word(&reader, "cpu")) {
        uint64_t cpu;
        if (reader_number(&reader, &cpu) && cpu < CPUS_MOST && cpu >= times->cpus) {
            look_at_cpu(&reader, times, (unsigned)cpu);
        }
        skip_line(&reader);
    }
    reader_close(&reader);
    return times->cpus > 0;
}

unsigned cpu_idle_percent(const struct cpu_times *before, const struct cpu_times *after, unsigned cpu) {
    if (cpu >= after->cpus) {
        return CPU_IDLE_UNKNOWN;
    }
    uint64_t idle = after->of[cpu].idle;
    uint64_t total = after->of[cpu].total;
    uint64_t idle_before = cpu < before->cpus ? before->of[cpu].idle : 0;
    uint64_t total_before = cpu < before->cpus ? before->of[cpu].total : 0;
    if (total < total_before || total - total_before < TICKS_LEAST) {
        return CPU_IDLE_UNKNOWN;
    }
    total -= total_before;
    /* The kernel corrects itself: idle time may go back, and run ahead. */
    idle = idle < idle_before ? 0 : idle - idle_before;
    return idle >= total ? 100 : (unsigned)((double)idle * 100 / (double)total);
}

/* ---- how busy this process is, and where ---- */

/* Fields of /proc/.../stat, counted from the state, which follows the name in parentheses. */
enum { FIELD_UTIME = 11, FIELD_STIME = 12, FIELD_PROCESSOR = 36 };

static void look_at_task(const char *root, unsigned thread, struct task_times *times) {
    struct text path;
    char text[1024];
    path.length = 0;
    text_string(&path, root);
    text_string(&path, "/proc/self/task/");
    text_number(&path, thread);
    text_string(&path, "/stat");
    if (!text_end(&path) || file_read(path.bytes, text, sizeof text) <= 0) {
        return; /* it has just ended */
    }
    /* A name may hold anything, parentheses too. */
    const char *field = strrchr(text, ')');
    if (field == NULL || field[1] != ' ') {
        return;
    }
    field += 2;
    bool running = *field == 'R';
    uint64_t ticks = 0;
    for (int index = 0;; index++) {
        uint64_t number = 0;
        for (const char *digit = field; is_digit(*digit); digit++) {
            number = with_digit(number, *digit);
        }
        if (index == FIELD_UTIME || index == FIELD_STIME) {
            ticks += number;
        } else if (index == FIELD_PROCESSOR) {
            if (is_digit(*field) && number < CPUS_MOST) {
                times->tasks[times->count].thread = (int32_t)thread;
                times->tasks[times->count].cpu = (uint32_t)number;
                times->tasks[times->count].ticks = ticks;
                times->tasks[times->count].running = running;
                times->count++;
            }
            return;
        }
        field = strchr(field, ' ');
        if (field == NULL) {
            return;
        }
        field++;
    }
}

/* Of struct linux_dirent64, which no header of the C library's has. */
enum { ENTRY_LENGTH = 16, ENTRY_NAME = 19 };

bool task_times_look(const char *root, int without_thread, struct task_times *times) {
    struct reader reader;
    struct text path;
    times->count = 0;
    path.length = 0;
    text_string(&path, root);
    text_string(&path, "/proc/self/task");
    if (!reader_open(&reader, &path)) {
        return false;
    }
    long length;
    while (times->count < TASKS_MOST &&
           (length = os_syscall(SYS_getdents64, reader.descriptor, (long)reader.bytes,
                                (long)sizeof reader.bytes, 0, 0, 0)) > 0) {
        uint16_t entry_length;
        for (long at = 0; at < length && times->count < TASKS_MOST; at += entry_length) {
            memcpy(&entry_length, reader.bytes + at + ENTRY_LENGTH, sizeof entry_length);
            uint64_t thread = 0;
            const char *digit = reader.bytes + at + ENTRY_NAME;
            for (; is_digit(*digit); digit++) {
                thread = with_digit(thread, *digit);
            }
            if (*digit == '\0' && thread != 0 && thread <= INT32_MAX && thread != (uint64_t)without_thread) {
                look_at_task(root, (unsigned)thread, times);
            }
        }
    }
    reader_close(&reader);
    return true;
}

static uint64_t ticks_of_thread(const struct task_times *times, int32_t thread) {
    for (uint32_t i = 0; i < times->count; i++) {
        if (times->tasks[i].thread == thread) {
            return times->tasks[i].ticks;
        }
    }
    return 0;
}

size_t task_busiest_cpus(const struct task_times *before, const struct task_times *after, uint32_t *cpus,
                         size_t most) {
    struct {
        uint32_t cpu;
        uint64_t ticks;
    } loads[TASKS_MOST];
    size_t count = 0;
    for (uint32_t i = 0; i < after->count; i++) {
        uint64_t ticks = after->tasks[i].ticks;
        uint64_t ticks_before = ticks_of_thread(before, after->tasks[i].thread);
        /* Less than before: the number is that of another thread now. */
        ticks = (ticks >= ticks_before ? ticks - ticks_before : ticks) + after->tasks[i].running;
        size_t at = 0;
        while (at < count && loads[at].cpu != after->tasks[i].cpu) {
            at++;
        }
        if (at == count) {
            loads[count].cpu = after->tasks[i].cpu;
            loads[count++].ticks = 0;
        }
        loads[at].ticks += ticks;
    }
    uint64_t highest = 0;
    size_t chosen = 0;
    while (chosen < most) {
        size_t busiest = 0;
        for (size_t i = 1; i < count; i++) {
            busiest = loads[i].ticks > loads[busiest].ticks ? i : busiest;
        }
        if (count == 0 || loads[busiest].ticks == 0 || loads[busiest].ticks < highest / BUSY_SHARE) {
            break;
        }
        highest = chosen == 0 ? loads[busiest].ticks : highest;
        cpus[chosen++] = loads[busiest].cpu;
        loads[busiest].ticks = 0;
    }
    return chosen;
}
