/*
 * calm-probe: runs a program and writes, as one JSON object, what it took.
 *
 * It is in C and small because it must not disturb: the peak memory that the kernel reports of a program
 * includes that of the process it was forked from.
 */
#include "calibrate.h"
#include "counters.h"
#include "files.h"
#include "json.h"
#include "tree.h"

#include <err.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

/*
 * An average of fewer samples than this would be a guess; and the program's own mark, as fewer have read it,
 * may be of its first microseconds.
 */
enum { MIN_SAMPLES = 3 };

struct options {
    int output;
    unsigned groups;
    uint64_t interval_ns;
    sigset_t unblocked; /* in the program; the caller blocked them, so that the probe would live to report */
    int gate; /* a socket that gets the program's process id, and answers when it may begin; or -1 */
    char **assignments; /* NAME=VALUE, for the program alone */
    size_t assignment_count;
    char **command;
};

/* What the child writes: once before exec, and again only if exec fails. */
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
    int64_t tlb_row;       /* -1: unknown */
    int64_t tasks_started; /* on the whole machine, so no fewer than by the program */
};

static int64_t timeval_us(struct timeval t) {
    return (int64_t)t.tv_sec * 1000000 + t.tv_usec;
}

static int64_t positive(int64_t difference) {
    return difference > 0 ? difference : 0;
}

static _Noreturn void usage(int status) {
    fputs("usage: calm-probe [-f FD | -o FILE] [-c GROUPS] [-i MILLISECONDS] [-p] [-e NAME=VALUE]... "
          "[-s SIGNALS] [-g FD] -- COMMAND...\n"
          "Runs COMMAND and writes what it took as one JSON object.\n"
          "  -f FD            write to this open descriptor (default: 2, standard error)\n"
          "  -o FILE          write to this file\n"
          "  -c GROUPS        count these, separated by commas: tlb, received, syscalls, hardware; or none "
          "(default: all)\n"
          "  -i MILLISECONDS  sample the memory this often (default: 10)\n"
          "  -p               send COMMAND a SIGTERM when the process that started calm-probe ends\n"
          "  -e NAME=VALUE    set this in COMMAND's environment; calm-probe itself runs without it\n"
          "  -s SIGNALS       unblock these for COMMAND, by their numbers, separated by commas\n"
          "  -g FD            write COMMAND's process id to this socket, and run it when a byte comes back\n",
          status == 0 ? stdout : stderr);
    exit(status);
}

static unsigned parse_groups(char *list) {
    static const char *const names[] = {"tlb", "syscalls", "hardware", "received"}; /* enum counter_group */
    unsigned groups = 0;
    for (char *state = NULL, *name = strtok_r(list, ",", &state); name != NULL;
         name = strtok_r(NULL, ",", &state)) {
        bool known = strcmp(name, "none") == 0;
        for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++) {
            if (strcmp(name, names[i]) == 0) {
                groups |= 1U << i;
                known = true;
            }
        }
        if (!known) {
            errx(2, "-c: no group is called '%s'", name);
        }
    }
    return groups;
}

static unsigned long parse_number(const char *text, char option, unsigned long least, unsigned long most) {
    char *end;
    errno = 0;
    unsigned long number = strtoul(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || number < least || number > most) {
        errx(2, "-%c takes a whole number from %lu to %lu, not '%s'", option, least, most, text);
    }
    return number;
}

static void parse_signals(char *list, sigset_t *set) {
    for (char *state = NULL, *number = strtok_r(list, ",", &state); number != NULL;
         number = strtok_r(NULL, ",", &state)) {
        sigaddset(set, (int)parse_number(number, 's', 1, SIGRTMAX));
    }
}

/* A killed caller leaves nothing running: SIGTERM is passed on to the program. */
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
        err(1, "out of memory");
    }
    for (int option; (option = getopt(argc, argv, "+f:o:c:i:e:s:g:ph")) != -1;) {
        switch (option) {
        case 'f':
            options.output = (int)parse_number(optarg, 'f', 0, 1U << 20);
            break;
        case 'o':
            options.output = open(optarg, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
            if (options.output < 0) {
                err(1, "%s", optarg);
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
                errx(2, "-e takes NAME=VALUE, not '%s'", optarg);
            }
            options.assignments[options.assignment_count++] = optarg;
            break;
        case 's':
            parse_signals(optarg, &options.unblocked);
            break;
        case 'g':
            options.gate = (int)parse_number(optarg, 'g', 0, 1U << 20);
            if (fcntl(options.gate, F_SETFD, FD_CLOEXEC) != 0) {
                err(1, "-g");
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
    if (optind == argc) {
        usage(2);
    }
    options.command = argv + optind;
    if (fcntl(options.output, F_SETFD, options.output > STDERR_FILENO ? FD_CLOEXEC : 0) != 0) {
        err(1, "-f");
    }
    return options;
}

/* The sum of the numbers behind the word that begins a line of a file; -1 where there is no such line. */
static int64_t sum_of_line(const char *path, const char *word) {
    int64_t sum = -1;
    char *line = NULL;
    size_t size = 0;
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return -1;
    }
    while (sum < 0 && getline(&line, &size, file) > 0) {
        char *end = line + strspn(line, " ");
        if (strncmp(end, word, strlen(word)) != 0) {
            continue;
        }
        sum = 0;
        for (char *at = NULL, *next = end + strlen(word); at != next;) {
            at = next;
            sum += strtoll(at, &next, 10);
        }
    }
    free(line);
    fclose(file);
    return sum;
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
            perror("calm-probe"); /* the probe has ended */
        }
    }
    _exit(127);
}

static void read_notes(int notes, struct note *note) {
    struct note last;
    memset(note, 0, sizeof *note);
    /* Up to the end of the file, which a successful exec makes by closing the pipe. */
    ssize_t got;
    do {
        got = read(notes, &last, sizeof last);
        if (got == (ssize_t)sizeof last) {
            *note = last;
        }
    } while (got > 0 || (got < 0 && errno == EINTR));
}

/* Reaps orphans, so that their times and faults count; true when the program, which is not reaped, has ended.
 */
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
        uint64_t left = next > now ? next - now : 0;
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

/* Another observer of the program gets ready meanwhile. One that has ended ends the run. */
static void wait_at_gate(int gate, pid_t child) {
    char byte;
    if (dprintf(gate, "%d\n", (int)child) < 0 || read(gate, &byte, 1) != 1) {
        kill(child, SIGKILL);
        err(1, "-g");
    }
}

static void run_program(const struct options *options, struct run *run) {
    int go[2];
    int notes[2];
    sigset_t mask;
    struct sigaction on_child;
    sigset_t awaited = awaited_signals();
    const struct sigaction plain = {.sa_handler = SIG_DFL};

    /* A SIGCHLD that the caller ignores would make the kernel reap the program. */
    sigaction(SIGCHLD, &plain, &on_child);
    sigprocmask(SIG_BLOCK, &awaited, &mask);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t helper = calibration_begin(options->groups, &run->cost);
    if (pipe2(go, O_CLOEXEC) != 0 || pipe2(notes, O_CLOEXEC) != 0) {
        err(1, "pipe");
    }
    run->child = fork();
    if (run->child < 0) {
        err(1, "fork");
    }
    if (run->child == 0) {
        close(go[1]);
        be_the_program(options, go[0], notes[1], &mask, &on_child);
    }
    close(notes[1]);
    counters_open(run->child, options->groups);
    calibration_end(helper);
    getrusage(RUSAGE_CHILDREN, &run->helper);
    if (!tree_open(&run->tree, run->child)) {
        err(1, "/proc");
    }

    if (options->gate >= 0) {
        wait_at_gate(options->gate, run->child);
    }

    int64_t row_before = sum_of_line("/proc/interrupts", "TLB:"); /* of all CPUs; only x86 has it */
    int64_t started_before = sum_of_line("/proc/stat", "processes ");
    uint64_t cpu_before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    run->start_ns = clock_ns(CLOCK_MONOTONIC);
    if (write(go[1], "", 1) != 1) {
        err(1, "pipe");
    }
    read_notes(notes[0], &run->note);
    long before = run->note.before.ru_maxrss;
    long helpers = run->helper.ru_maxrss;
    run->tree.floor_kib = (uint64_t)(before > helpers ? before : helpers);
    watch(run, options->interval_ns, &awaited);
    run->own_cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_before;
    run->tlb_row = row_before < 0 ? -1 : sum_of_line("/proc/interrupts", "TLB:") - row_before;
    run->tasks_started = sum_of_line("/proc/stat", "processes ") - started_before;
    counters_read();
    if (waitpid(run->child, NULL, 0) != run->child) {
        err(1, "wait");
    }
    getrusage(RUSAGE_CHILDREN, &run->usage);
}

static void write_counters(struct json *json) {
    json_begin(json, "counters");
    for (unsigned i = 0; i < counter_count; i++) {
        const struct counter *counter = &counters[i];
        json_begin(json, counter->name);
        json_int(json, "value", counter->value);
        if (counter->value >= 0) {
            json_bool(json, "scaled", counter->scaled);
            json_bool(json, "user_only", counter->user_only);
        } else {
            json_text(json, "reason", counter->reason);
        }
        json_end(json);
    }
    json_end(json);
}

static void write_memory(struct json *json, const struct run *run, const struct options *options) {
    const struct tree *tree = &run->tree;
    uint64_t sampled_kib = tree->peak_pages * tree->page_kib;
    uint64_t largest_kib = (uint64_t)run->usage.ru_maxrss;
    bool mark_is_known = tree->samples >= MIN_SAMPLES && tree->mark_kib > 0;
    if (largest_kib <= tree->floor_kib && mark_is_known) {
        largest_kib = tree->mark_kib;
    }
    json_begin(json, "memory");
    /*
     * Samples can miss a peak; the kernel's own mark misses none, but knows one process at a time. Of several
     * processes both are reached. Of a single one the mark is the peak: samples come from counters that lag.
     */
    bool mark_is_all = tree->seen == 1 && (largest_kib > tree->floor_kib || mark_is_known);
    uint64_t peak_kib = mark_is_all || largest_kib > sampled_kib ? largest_kib : sampled_kib;
    double average_kib = tree_average_pages(tree) * (double)tree->page_kib;
    json_int(json, "peak_kib", (int64_t)peak_kib);
    json_real(json, "average_kib", tree->samples >= MIN_SAMPLES ? average_kib : -1);
    json_int(json, "largest_process_kib", (int64_t)largest_kib);
    json_int(json, "floor_kib", (int64_t)tree->floor_kib);
    json_bool(json, "mark_read", mark_is_known);
    json_int(json, "samples", (int64_t)tree->samples);
    json_int(json, "interval_ns", (int64_t)options->interval_ns);
    json_int(json, "processes", tree->seen);
    json_end(json);
}

static void write_report(struct json *json, const struct run *run, const struct options *options) {
    /* What the helper did, and the child before it became the program, is not the program's. */
    const struct rusage *all = &run->usage;
    const struct rusage *before = &run->note.before;
    const struct rusage *helper = &run->helper;
    if (run->note.error != 0) {
        json_begin(json, "error");
        json_int(json, "errno", run->note.error);
        json_text(json, "text", strerror(run->note.error));
        json_end(json);
    } else {
        json_null(json, "error");
    }
    bool exited = run->end.si_code == CLD_EXITED;
    json_begin(json, "end");
    json_int(json, "code", exited ? run->end.si_status : -1);
    json_int(json, "signal", exited ? -1 : run->end.si_status);
    json_end(json);
    json_int(json, "wall_ns", (int64_t)(run->end_ns - run->start_ns));
    json_int(
        json, "user_us",
        positive(timeval_us(all->ru_utime) - timeval_us(before->ru_utime) - timeval_us(helper->ru_utime)));
    json_int(
        json, "system_us",
        positive(timeval_us(all->ru_stime) - timeval_us(before->ru_stime) - timeval_us(helper->ru_stime)));
    json_int(json, "minor_faults", positive(all->ru_minflt - before->ru_minflt - helper->ru_minflt));
    json_int(json, "major_faults", positive(all->ru_majflt - before->ru_majflt - helper->ru_majflt));
    write_memory(json, run, options);
    write_counters(json);
    json_int(json, "interrupts_system_wide", run->tlb_row);
    json_begin(json, "own");
    json_int(json, "cpu_ns", (int64_t)run->own_cpu_ns);
    json_real(json, "counted_call_ns", run->cost.counted_call);
    json_real(json, "other_call_ns", run->cost.other_call);
    json_real(json, "flush_ns", run->cost.flush);
    json_real(json, "task_ns", run->cost.task);
    json_int(json, "system_wide_tasks_started", run->tasks_started);
    json_end(json);
}

int main(int argc, char **argv) {
    program_invocation_short_name = "calm-probe"; /* before messages, however a copy is called */
    static struct options options;
    static struct run run;
    options = parse_options(argc, argv);
    counters_init();
    run_program(&options, &run);
    /* Opened only now: a buffer allocated earlier would have been the program's to inherit. */
    struct json json = {.file = fdopen(options.output, "w")};
    if (json.file == NULL) {
        err(1, "output");
    }
    json_begin(&json, NULL);
    write_report(&json, &run, &options);
    json_end(&json);
    fputc('\n', json.file);
    if (fclose(json.file) != 0) {
        err(1, "output");
    }
    return 0;
}
