/*
 * calm-probe: runs a program and tells, as one JSON object, what it took; or, with -m, what a message between
 * CPUs takes here.
 *
 * It is in C and small because it must not disturb: the peak memory that the kernel reports of a program
 * includes that of the process it was forked from.
 */
#include "calibrate.h"
#include "counters.h"
#include "json.h"
#include "messages.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/*
 * An average of fewer looks than this would be a guess; and the program's own mark, as fewer have read it,
 * may be of its first microseconds, when it was nothing yet.
 */
enum { SAMPLES_LEAST = 3 };

enum { PAIRS_MOST = 64 };

struct options {
    int output;
    unsigned groups;
    uint64_t interval_ns;
    sigset_t unblocked; /* in the program; the caller blocked them, so that the probe would live to report */
    int gate; /* somebody there gets the program's process id, and says when it may begin; -1: nobody */
    char **assignments; /* NAME=VALUE, for the program alone */
    size_t assignment_count;
    struct cpu_pair pairs[PAIRS_MOST]; /* to send messages between, and run no command */
    size_t pair_count;
    char **command;
};

/* What the child says on its way: once before exec, and again only if exec fails. */
struct note {
    int error;
    struct rusage before;
};

struct run {
    pid_t child;
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t own_cpu_ns;
    struct note note;
    siginfo_t end;
    struct rusage usage;
    struct rusage helper; /* children reaped before the program began */
    struct tree tree;
    struct trace_cost cost;
    bool tlb_row_known;
    uint64_t tlb_row;
    uint64_t tasks_started; /* on the whole machine, so no fewer than by the program */
};

static uint64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static uint64_t timeval_us(struct timeval t) {
    return (uint64_t)t.tv_sec * 1000000U + (uint64_t)t.tv_usec;
}

static uint64_t less(uint64_t from, uint64_t amount) {
    return from > amount ? from - amount : 0;
}

static _Noreturn void fail(const char *what, int error) {
    fprintf(stderr, "calm-probe: %s: %s\n", what, strerror(error));
    exit(1);
}

static _Noreturn void usage(int status) {
    fputs("usage: calm-probe [-f FD | -o FILE] [-c GROUPS] [-i MILLISECONDS] [-p] [-e NAME=VALUE]... "
          "[-g FD] -- COMMAND...\n"
          "       calm-probe [-f FD | -o FILE] -m PAIRS\n"
          "Runs COMMAND and writes what it took as one JSON object.\n"
          "  -f FD            write to this open descriptor (default: 2, standard error)\n"
          "  -o FILE          write to this file\n"
          "  -c GROUPS        count these, separated by commas: tlb, received, syscalls, hardware; or none "
          "(default: "
          "all)\n"
          "  -i MILLISECONDS  look at the memory this often (default: 10)\n"
          "  -p               send COMMAND a SIGTERM when the process that started calm-probe ends\n"
          "  -e NAME=VALUE    set this in COMMAND's environment; calm-probe itself runs without it\n"
          "  -s SIGNALS       unblock these for COMMAND, by their numbers, separated by commas\n"
          "  -g FD            write COMMAND's process id to this socket, and run it when a byte comes back\n"
          "  -m PAIRS         run nothing, but measure messages between these CPUs: 0:1,0:2\n",
          status == 0 ? stdout : stderr);
    exit(status);
}

static unsigned parse_groups(char *list) {
    unsigned groups = 0;
    for (char *state = NULL, *name = strtok_r(list, ",", &state); name != NULL;
         name = strtok_r(NULL, ",", &state)) {
        if (strcmp(name, "tlb") == 0) {
            groups |= GROUP_TLB;
        } else if (strcmp(name, "syscalls") == 0) {
            groups |= GROUP_SYSCALLS;
        } else if (strcmp(name, "hardware") == 0) {
            groups |= GROUP_HARDWARE;
        } else if (strcmp(name, "received") == 0) {
            groups |= GROUP_RECEIVED;
        } else if (strcmp(name, "none") != 0) {
            fprintf(stderr, "calm-probe: -c: no group is called '%s'\n", name);
            exit(2);
        }
    }
    return groups;
}

static unsigned long parse_number(const char *text, char option, unsigned long least, unsigned long most) {
    char *end;
    errno = 0;
    unsigned long number = strtoul(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || number < least || number > most) {
        fprintf(stderr, "calm-probe: -%c takes a whole number from %lu to %lu, not '%s'\n", option, least,
                most, text);
        exit(2);
    }
    return number;
}

static void parse_signals(char *list, sigset_t *set) {
    for (char *state = NULL, *number = strtok_r(list, ",", &state); number != NULL;
         number = strtok_r(NULL, ",", &state)) {
        sigaddset(set, (int)parse_number(number, 's', 1, SIGRTMAX));
    }
}

/* Ends with the parent, so that a killed caller leaves nothing running; SIGTERM is passed on to the program.
 */
static void end_with_parent(void) {
    pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) {
        exit(1);
    }
}

static struct options parse_options(int argc, char **argv) {
    struct options options = {
        .output = STDERR_FILENO, .groups = GROUP_ALL, .interval_ns = 10000000, .gate = -1};
    sigemptyset(&options.unblocked);
    options.assignments = calloc((size_t)argc, sizeof *options.assignments);
    if (options.assignments == NULL) {
        fail("out of memory", errno);
    }
    for (int option; (option = getopt(argc, argv, "+f:o:c:i:e:s:g:m:ph")) != -1;) {
        switch (option) {
        case 'f':
            options.output = (int)parse_number(optarg, 'f', 0, 1U << 20);
            break;
        case 'o':
            options.output = open(optarg, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
            if (options.output < 0) {
                fail(optarg, errno);
            }
            break;
        case 'c':
            options.groups = parse_groups(optarg);
            break;
        case 'i':
            options.interval_ns = parse_number(optarg, 'i', 1, 60000) * 1000000U;
            break;
        case 'e':
            if (strchr(optarg, '=') == NULL || optarg[0] == '=') {
                fprintf(stderr, "calm-probe: -e takes NAME=VALUE, not '%s'\n", optarg);
                exit(2);
            }
            options.assignments[options.assignment_count++] = optarg;
            break;
        case 's':
            parse_signals(optarg, &options.unblocked);
            break;
        case 'g':
            options.gate = (int)parse_number(optarg, 'g', 0, 1U << 20);
            if (fcntl(options.gate, F_SETFD, FD_CLOEXEC) != 0) {
                fail("-g", errno);
            }
            break;
        case 'm':
            options.pair_count = messages_parse(optarg, options.pairs, PAIRS_MOST);
            if (options.pair_count == 0) {
                fprintf(stderr, "calm-probe: -m takes at most %d pairs of CPUs as 0:1,0:2, not '%s'\n",
                        PAIRS_MOST, optarg);
                exit(2);
            }
            break;
        case 'p':
            end_with_parent();
            break;
        case 'h':
            usage(0);
        default:
            usage(2);
        }
    }
    if ((optind == argc) != (options.pair_count > 0)) {
        usage(2);
    }
    options.command = argv + optind;
    if (fcntl(options.output, F_GETFD) < 0) {
        fail("-f", errno);
    }
    if (options.output > STDERR_FILENO && fcntl(options.output, F_SETFD, FD_CLOEXEC) != 0) {
        fail("-f", errno);
    }
    return options;
}

/* The sum over all CPUs of the TLB row of /proc/interrupts, which only x86 has. */
static bool read_tlb_row(uint64_t *sum) {
    bool found = false;
    char *line = NULL;
    size_t size = 0;
    FILE *file = fopen("/proc/interrupts", "re");
    if (file == NULL) {
        return false;
    }
    while (!found && getline(&line, &size, file) > 0) {
        char *at = line + strspn(line, " ");
        if (strncmp(at, "TLB:", 4) != 0) {
            continue;
        }
        found = true;
        *sum = 0;
        at += 4;
        for (;;) {
            char *end;
            uint64_t number = strtoull(at, &end, 10);
            if (end == at) {
                break;
            }
            *sum += number;
            at = end;
        }
    }
    free(line);
    fclose(file);
    return found;
}

/* Threads and processes started on this machine since it booted. */
static uint64_t read_tasks_started(void) {
    uint64_t started = 0;
    char *line = NULL;
    size_t size = 0;
    FILE *file = fopen("/proc/stat", "re");
    if (file == NULL) {
        return 0;
    }
    while (getline(&line, &size, file) > 0) {
        if (strncmp(line, "processes ", 10) == 0) {
            started = strtoull(line + 10, NULL, 10);
            break;
        }
    }
    free(line);
    fclose(file);
    return started;
}

/* The signals that are passed on, and SIGCHLD: all are waited for, none is handled. */
static sigset_t awaited_signals(void) {
    static const int numbers[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
    sigset_t set;
    sigemptyset(&set);
    for (unsigned i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        sigaddset(&set, numbers[i]);
    }
    return set;
}

static _Noreturn void be_the_program(const struct options *options, int go, int notes, const sigset_t *mask,
                                     const struct sigaction *on_child) {
    char byte;
    struct note note = {.error = 0};
    sigaction(SIGCHLD, on_child, NULL);
    sigprocmask(SIG_SETMASK, mask, NULL);
    sigprocmask(SIG_UNBLOCK, &options->unblocked, NULL);
    for (size_t i = 0; i < options->assignment_count; i++) {
        putenv(options->assignments[i]);
    }
    if (read(go, &byte, 1) != 1) {
        _exit(127);
    }
    getrusage(RUSAGE_SELF, &note.before);
    if (write(notes, &note, sizeof note) == (ssize_t)sizeof note) {
        execvp(options->command[0], options->command);
        note.error = errno;
        if (write(notes, &note, sizeof note) < 0) {
            perror("calm-probe"); /* the probe is gone: there is nobody else left to tell */
        }
    }
    _exit(127);
}

static void read_notes(int notes, struct note *note) {
    struct note last;
    memset(note, 0, sizeof *note);
    /* Up to the end of the file, which a successful exec makes by closing the pipe. */
    for (;;) {
        ssize_t got = read(notes, &last, sizeof last);
        if (got == (ssize_t)sizeof last) {
            *note = last;
        } else if (got == 0 || (got < 0 && errno != EINTR)) {
            return;
        }
    }
}

/* Reaps orphans, so that their times and faults count; true when the program itself has ended. It is left as
 * it is. */
static bool ended(struct run *run) {
    for (;;) {
        siginfo_t info = {.si_pid = 0};
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
            return false;
        }
        if (info.si_pid == run->child) {
            run->end = info;
            return true;
        }
        waitid(P_PID, (id_t)info.si_pid, &info, WEXITED);
    }
}

/* What the kernel's mark of the largest process cannot fall below: ours before the program, and our helper's.
 */
static uint64_t floor_kib(const struct run *run) {
    long before = run->note.before.ru_maxrss;
    long helper = run->helper.ru_maxrss;
    return (uint64_t)(before > helper ? before : helper);
}

static void watch(struct run *run, uint64_t interval_ns, const sigset_t *awaited) {
    uint64_t next = clock_ns(CLOCK_MONOTONIC);
    while (!ended(run)) {
        uint64_t now = clock_ns(CLOCK_MONOTONIC);
        if (now >= next) {
            tree_sample(&run->tree, now);
            next += interval_ns;
            next = next <= now ? now + interval_ns : next;
        }
        now = clock_ns(CLOCK_MONOTONIC);
        uint64_t left = less(next, now);
        struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000U),
                                   .tv_nsec = (long)(left % 1000000000U)};
        siginfo_t info;
        int signal_number = sigtimedwait(awaited, &info, &timeout);
        /* One that the terminal sends (SI_KERNEL) has reached the program as well. */
        if (signal_number > 0 && signal_number != SIGCHLD && info.si_code != SI_KERNEL) {
            kill(run->child, signal_number);
        }
    }
    run->end_ns = clock_ns(CLOCK_MONOTONIC);
}

/* Whoever watches the program too gets ready meanwhile. A watcher that is gone ends the run. */
static void wait_at_gate(int gate, pid_t child) {
    char byte;
    if (dprintf(gate, "%d\n", (int)child) < 0 || read(gate, &byte, 1) != 1) {
        kill(child, SIGKILL);
        fail("-g", errno);
    }
}

static void run_program(const struct options *options, struct run *run) {
    int go[2];
    int notes[2];
    sigset_t mask;
    struct sigaction on_child;
    sigset_t awaited = awaited_signals();
    const struct sigaction plain = {.sa_handler = SIG_DFL};

    /* A SIGCHLD that the caller ignores would have the kernel reap the program behind our back. */
    sigaction(SIGCHLD, &plain, &on_child);
    sigprocmask(SIG_BLOCK, &awaited, &mask);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    const struct calibration calibration = calibration_begin(options->groups);
    run->cost = calibration.cost;
    if (pipe2(go, O_CLOEXEC) != 0 || pipe2(notes, O_CLOEXEC) != 0) {
        fail("pipe", errno);
    }
    run->child = fork();
    if (run->child < 0) {
        fail("fork", errno);
    }
    if (run->child == 0) {
        close(go[1]);
        be_the_program(options, go[0], notes[1], &mask, &on_child);
    }
    close(notes[1]);
    counters_open(run->child, options->groups);
    calibration_end(&calibration);
    getrusage(RUSAGE_CHILDREN, &run->helper);
    if (!tree_open(&run->tree, run->child)) {
        fail("/proc", errno);
    }

    if (options->gate >= 0) {
        wait_at_gate(options->gate, run->child);
    }

    uint64_t row_before = 0;
    uint64_t row_after = 0;
    run->tlb_row_known = read_tlb_row(&row_before);
    uint64_t started_before = read_tasks_started();
    uint64_t cpu_before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    run->start_ns = clock_ns(CLOCK_MONOTONIC);
    if (write(go[1], "", 1) != 1) {
        fail("pipe", errno);
    }
    read_notes(notes[0], &run->note);
    run->tree.floor_kib = floor_kib(run);
    watch(run, options->interval_ns, &awaited);
    run->own_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_before;
    run->tlb_row_known = run->tlb_row_known && read_tlb_row(&row_after);
    run->tlb_row = row_after - row_before;
    run->tasks_started = read_tasks_started() - started_before;
    counters_read();
    if (waitpid(run->child, NULL, 0) != run->child) {
        fail("wait", errno);
    }
    getrusage(RUSAGE_CHILDREN, &run->usage);
}

static void write_counters(struct json *json) {
    json_begin(json, "counters");
    for (unsigned i = 0; i < counter_count; i++) {
        const struct counter *counter = &counters[i];
        json_begin(json, counter->name);
        if (counter->valid) {
            json_uint(json, "value", counter->value);
            json_bool(json, "scaled", counter->scaled);
            json_bool(json, "user_only", counter->user_only);
        } else {
            json_null(json, "value");
            json_text(json, "reason", counter->reason);
        }
        json_end(json);
    }
    json_end(json);
}

static void write_memory(struct json *json, const struct run *run, const struct options *options) {
    uint64_t page_kib = (uint64_t)sysconf(_SC_PAGESIZE) / 1024;
    uint64_t sampled_kib = run->tree.peak_pages * page_kib;
    uint64_t largest_kib = (uint64_t)run->usage.ru_maxrss;
    bool mark_is_known = run->tree.samples >= SAMPLES_LEAST && run->tree.mark_kib > 0;
    if (largest_kib <= floor_kib(run) && mark_is_known) {
        largest_kib = run->tree.mark_kib;
    }
    json_begin(json, "memory");
    /*
     * Samples can miss a peak; the kernel's own mark misses none, but knows one process at a time. Of several
     * processes both are reached. Of a single one the mark is the peak: samples come from counters that lag.
     */
    bool mark_is_all = run->tree.seen == 1 && (largest_kib > floor_kib(run) || mark_is_known);
    json_uint(json, "peak_kib", mark_is_all || largest_kib > sampled_kib ? largest_kib : sampled_kib);
    if (run->tree.samples >= SAMPLES_LEAST) {
        json_real(json, "average_kib", tree_average_pages(&run->tree) * (double)page_kib);
    } else {
        json_null(json, "average_kib");
    }
    json_uint(json, "sampled_peak_kib", sampled_kib);
    json_uint(json, "largest_process_kib", largest_kib);
    json_uint(json, "floor_kib", floor_kib(run));
    json_bool(json, "mark_read", mark_is_known);
    json_uint(json, "samples", run->tree.samples);
    json_uint(json, "interval_ns", options->interval_ns);
    json_uint(json, "processes", run->tree.seen);
    json_end(json);
}

static void write_cost(struct json *json, const char *name, double ns) {
    if (ns < 0) {
        json_null(json, name);
    } else {
        json_real(json, name, ns);
    }
}

static void write_report(FILE *file, const struct run *run, const struct options *options) {
    struct json json = {.file = file};
    /* What the helper did, and the child before it became the program, is not the program's. */
    const struct rusage *before = &run->note.before;
    const struct rusage *helper = &run->helper;
    json_begin(&json, NULL);
    if (run->note.error != 0) {
        json_begin(&json, "error");
        json_uint(&json, "errno", (uint64_t)run->note.error);
        json_text(&json, "text", strerror(run->note.error));
        json_end(&json);
    } else {
        json_null(&json, "error");
    }
    json_begin(&json, "end");
    if (run->end.si_code == CLD_EXITED) {
        json_uint(&json, "code", (uint64_t)run->end.si_status);
        json_null(&json, "signal");
    } else {
        json_null(&json, "code");
        json_uint(&json, "signal", (uint64_t)run->end.si_status);
    }
    json_end(&json);
    json_uint(&json, "wall_ns", run->end_ns - run->start_ns);
    json_uint(
        &json, "user_us",
        less(timeval_us(run->usage.ru_utime), timeval_us(before->ru_utime) + timeval_us(helper->ru_utime)));
    json_uint(
        &json, "system_us",
        less(timeval_us(run->usage.ru_stime), timeval_us(before->ru_stime) + timeval_us(helper->ru_stime)));
    json_uint(&json, "minor_faults",
              less((uint64_t)run->usage.ru_minflt, (uint64_t)(before->ru_minflt + helper->ru_minflt)));
    json_uint(&json, "major_faults",
              less((uint64_t)run->usage.ru_majflt, (uint64_t)(before->ru_majflt + helper->ru_majflt)));
    write_memory(&json, run, options);
    write_counters(&json);
    if (run->tlb_row_known) {
        json_uint(&json, "system_wide_tlb_interrupts", run->tlb_row);
    } else {
        json_null(&json, "system_wide_tlb_interrupts");
    }
    json_begin(&json, "own");
    json_uint(&json, "cpu_ns", run->own_cpu_ns);
    write_cost(&json, "counted_call_ns", run->cost.counted_call);
    write_cost(&json, "other_call_ns", run->cost.other_call);
    write_cost(&json, "flush_ns", run->cost.flush);
    write_cost(&json, "task_ns", run->cost.task);
    json_uint(&json, "system_wide_tasks_started", run->tasks_started);
    json_end(&json);
    json_end(&json);
    fputc('\n', file);
}

static bool write_messages(FILE *file, const struct options *options) {
    struct json json = {.file = file};
    json_begin(&json, NULL);
    bool whole = messages_measure(&json, options->pairs, options->pair_count);
    json_end(&json);
    fputc('\n', file);
    return whole;
}

int main(int argc, char **argv) {
    struct options options = parse_options(argc, argv);
    struct run run = {.child = 0};
    if (options.pair_count > 0) {
        FILE *report = fdopen(options.output, "w");
        if (report == NULL) {
            fail("output", errno);
        }
        if (!write_messages(report, &options)) {
            fail("-m", errno);
        }
        free(options.assignments);
        if (fclose(report) != 0) {
            fail("output", errno);
        }
        return 0;
    }
    counters_init();
    run_program(&options, &run);
    /* Opened only now: a buffer allocated earlier would have been the program's to inherit. */
    FILE *file = fdopen(options.output, "w");
    if (file == NULL) {
        fail("output", errno);
    }
    write_report(file, &run, &options);
    tree_close(&run.tree);
    free(options.assignments);
    if (fclose(file) != 0) {
        fail("output", errno);
    }
    return 0;
}
